"""Runs a function on several ranks: real processes, one gloo group, a deadline, no torchrun."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bench.harness.ports import ReservedPort
from ecemb.net.error_file import Activity
from ecemb.net.network import Network
from support.fork_server import fork_server

DEADLINE_S = 300.0
"""Minutes: on a busy machine a rank may stand still for many seconds, anywhere."""


class RankFailed(AssertionError):
    """A rank raised, died, or did not end before the deadline."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline_s: float = DEADLINE_S,
    group: bool = True,
) -> list[Any]:
    """Calls `function(*args)` on `world_size` new processes and returns what each rank returned.

    Function, arguments and results are pickled, so the function is defined at the top of its
    module. With `group`, every process is in a gloo group (`dist.get_rank()` tells them apart);
    without, the function is called with the rank first: `function(rank, *args)`.

    Raises:
        RankFailed: With the traceback of the rank that failed first; the others are killed. A rank that a
            signal has killed comes before those that raised, and these before those that ended otherwise:
            ranks end because of others. When the deadline passes, the traceback of every thread is on the
            stuck ranks' stderr.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[Connection, int] = {}
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                here, there = context.Pipe(duplex=False)
                store = str(Path(folder) / "store") if group else None
                process = context.Process(
                    target=_run, args=(there, rank, world_size, store, deadline_s, function, args)
                )
                process.start()
                there.close()
                processes.append(process)
                pipes[here] = rank
            return _collect(pipes, processes, time.monotonic() + deadline_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def launch(world_size: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """Calls `function(folder, meet, *args)` on each worker, as a launcher without an agent would.

    No worker ends before all others have returned, unless one fails.
    """
    meet = fork_server().Barrier(world_size)
    with ReservedPort() as port:
        return run_ranks(
            world_size, _launched, world_size, port.number, meet, function, folder, *args, group=False
        )


def _launched(
    index: int, world_size: int, port: int, meet: Barrier, function: Callable[..., Any], *args: Any
) -> Any:
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    os.environ.update(
        RANK=str(index), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    folder, *others = args
    result = function(folder, meet, *others)
    meet.wait(DEADLINE_S)
    return result


def _collect(pipes: dict[Connection, int], processes: list[BaseProcess], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = set(pipes)
    while waiting:
        ends = {pipe: processes[pipes[pipe]].sentinel for pipe in waiting}  # a child may still hold the pipe
        ready = wait([*waiting, *ends.values()], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(pipes[pipe] for pipe in waiting)
            raise RankFailed(f"ranks {late} did not end before the deadline")
        failures: list[tuple[int, float, str]] = []
        for pipe in [pipe for pipe in waiting if pipe in ready or ends[pipe] in ready]:
            rank = pipes[pipe]
            try:
                if not pipe.poll():
                    raise EOFError
                results[rank], failure = pipe.recv()
            except EOFError:
                processes[rank].join()
                killed = (processes[rank].exitcode or 0) < 0
                failures.append((0 if killed else 2, 0.0, f"rank {rank} died"))
            else:
                if failure is not None:
                    at, text = failure
                    failures.append((1, at, f"rank {rank} raised:\n{text}"))
            waiting.remove(pipe)
        if failures:
            raise RankFailed(min(failures)[2])
    return [results[rank] for rank in sorted(results)]


def _run(
    pipe: Connection,
    rank: int,
    world_size: int,
    store: str | None,
    deadline_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    faulthandler.dump_traceback_later(max(deadline_s - 1, 0.1))
    torch.set_num_threads(1)
    try:
        if store is None:
            result = function(rank, *args)
        else:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=deadline_s),
            )
            result = function(*args)
            dist.barrier()  # nobody closes its sockets while another still needs them
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - it is raised again in the test's own process
        pipe.send((None, (time.monotonic(), traceback.format_exc())))
    else:
        pipe.send((result, None))


def session_of() -> Any:
    """What connects the ranks of a group on this host, in the place of a session."""
    size = dist.get_world_size()
    return SimpleNamespace(
        rank=dist.get_rank(),
        world_size=size,
        hosts=["h"] * size,
        addresses=[("127.0.0.1",)] * size,
        roster=SimpleNamespace(secret="5e"),
        timeout_s=DEADLINE_S,
        patience_s=60.0,
        activity=Activity(),
        network=Network(),
    )
