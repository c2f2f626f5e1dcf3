"""The ranks of one measurement: real processes, with the environment that torchrun would give them.

All are forked from one server that has imported everything, since imports are most of a start. Each says
what it measured through its `Line`. At the end of the block, those that still run are killed.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .ports import ReservedPort

IMPORTS = ("ecemb.kernels.cpu", "torch._dynamo")
"""What a guard and an optimizer import when they are first used, which takes seconds."""
_TAIL_LINES = 20


class RankFailed(Exception):
    """A rank failed, or was silent until the deadline; the message has its last words."""


class Line:
    """A rank's end of the line to its caller."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, answer: object) -> None:
        """Sends what was measured, once."""
        self._pipe.send((answer, None))

    def await_end(self) -> None:
        """Waits to be dismissed, or for the caller to be gone."""
        try:
            self._pipe.recv()
        except EOFError:
            return


class Ranks:
    """Calls a function on every rank, in processes that live while the `with` block lasts.

    Args:
        world_size: Number of ranks.
        function: Called with its line and `args`; defined at the top of its module, and pickled.
        args: What else it is called with.
        deadline_s: When waiting for any of them is given up, counted from the start.
        imports: Modules that the function will import, beside those that its own module does.
    """

    def __init__(
        self,
        world_size: int,
        function: Callable[..., None],
        *args: object,
        deadline_s: float,
        imports: Sequence[str] = (),
    ) -> None:
        self._world_size = world_size
        self._function = function
        self._args = args
        self._deadline_s = deadline_s
        self._imports = imports
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        self._folder = tempfile.TemporaryDirectory(prefix="ecemb-bench-")
        self._port = ReservedPort()
        self._deadline = time.monotonic() + self._deadline_s
        environment = {
            "WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.number),
            "OMP_NUM_THREADS": "1",
        }
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([self._function.__module__, *IMPORTS, *self._imports])
        try:
            for rank in range(self._world_size):
                here, there = context.Pipe()
                self._pipes.append(here)
                arguments = (there, environment | {"RANK": str(rank)}, str(self._words(rank)))
                process = context.Process(target=_run, args=(*arguments, self._function, self._args))
                process.start()
                self._processes.append(process)
                there.close()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._port.close()
        self._folder.cleanup()

    def answers(self) -> list[Any]:
        """Waits for every rank's answer; in the order of their RANK.

        Raises:
            RankFailed: One failed, or the deadline passed.
        """
        answers: dict[int, Any] = {}
        while waiting := {self._pipes[rank]: rank for rank in range(self._world_size) if rank not in answers}:
            ready = wait(list(waiting), timeout=max(0.0, self._deadline - time.monotonic()))
            if not ready:
                raise self._silent(min(waiting.values()))
            for rank in (rank for pipe, rank in waiting.items() if pipe in ready):
                answers[rank] = self._receive(rank)
        return [answers[rank] for rank in range(self._world_size)]

    def finished(self) -> None:
        """Waits until all ranks have ended by themselves.

        Raises:
            RankFailed: One failed, or the deadline passed.
        """
        for rank, process in enumerate(self._processes):
            process.join(max(0.0, self._deadline - time.monotonic()))
            if process.exitcode is None:
                raise self._silent(rank)
            if process.exitcode != 0:
                self._receive(rank)

    def dismiss(self) -> None:
        """Has ranks that await their end go, with no word to one another; waits until they are gone.

        Not by a kill, which would leave semaphores behind that libraries make.

        Raises:
            RankFailed: The deadline passed.
        """
        for pipe in self._pipes:
            pipe.send(None)
        for rank, process in enumerate(self._processes):
            process.join(max(0.0, self._deadline - time.monotonic()))
            if process.exitcode is None:
                raise self._silent(rank)

    def _receive(self, rank: int) -> Any:
        try:
            answer, failure = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join()
            failure = f"ended with {self._processes[rank].exitcode}:\n{self._tail(rank)}"
        if failure is not None:
            raise RankFailed(f"rank {rank} of {self._world_size} {failure}")
        return answer

    def _silent(self, rank: int) -> RankFailed:
        what = f"rank {rank} of {self._world_size} still runs after {self._deadline_s:.0f} s"
        return RankFailed(f"{what}:\n{self._tail(rank)}")

    def _words(self, rank: int) -> Path:
        return Path(self._folder.name, f"{rank}.log")

    def _tail(self, rank: int) -> str:
        if not self._words(rank).exists():
            return "(no output)"
        lines = self._words(rank).read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:]) or "(no output)"


def _run(
    pipe: Connection,
    environment: dict[str, str],
    words: str,
    function: Callable[..., None],
    args: tuple[object, ...],
) -> None:
    fd = os.open(words, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    os.environ.update(environment)
    try:
        function(Line(pipe), *args)
    except BaseException:  # noqa: BLE001 - the caller raises it again
        pipe.send((None, f"raised:\n{traceback.format_exc()}"))
        raise SystemExit(1) from None
