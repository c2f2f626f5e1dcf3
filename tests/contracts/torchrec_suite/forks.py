"""Ranks as forks of a process that has imported all that they need; no threads may run in it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from bench.harness.ports import ReservedPort

DEADLINE_S = 300


def fork_ranks(world_size: int, function: Callable[..., None], *args: Any) -> str:
    """Calls `function(rank, world_size, folder, *args)` on each rank, in a launcher's environment.

    `folder` is one for all, in memory.

    Returns:
        What failed, "" if nothing did.
    """
    context = multiprocessing.get_context("fork")
    port = ReservedPort()
    folder = tempfile.mkdtemp(dir="/dev/shm")
    processes = []
    pipes: dict[Connection, int] = {}
    try:
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(there, rank, world_size, port.number, function, folder, *args)
            )
            process.start()
            there.close()
            processes.append(process)
            pipes[here] = rank
        return "\n".join(_failures(pipes))
    finally:
        for process in processes:
            process.join(5)  # it has answered, or will not
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
        port.close()
        shutil.rmtree(folder, ignore_errors=True)


def _failures(pipes: dict[Connection, int]) -> list[str]:
    failures: list[str] = []
    deadline = time.monotonic() + DEADLINE_S
    waiting = set(pipes)
    while waiting:
        if not (ready := wait(waiting, timeout=max(0.0, deadline - time.monotonic()))):
            return [*failures, f"ranks {sorted(pipes[pipe] for pipe in waiting)} did not end in time"]
        for pipe in [pipe for pipe in waiting if pipe in ready]:
            waiting.remove(pipe)
            try:
                failure = pipe.recv()
            except EOFError:
                failure = "died"
            if failure:
                failures.append(f"rank {pipes[pipe]}: {failure}")
    return failures


def _rank(
    pipe: Connection,
    rank: int,
    world_size: int,
    port: int,
    function: Callable[..., None],
    folder: str,
    *args: Any,
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        function(rank, world_size, folder, *args)
    except BaseException:  # noqa: BLE001 - it is told in the process that waits for all ranks
        pipe.send(traceback.format_exc())
    else:
        pipe.send("")
