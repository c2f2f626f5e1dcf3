"""Workers that are watched: processes of their own, without torch, that follow commands.

    python tests/support/failure_detector_worker.py INDEX SIZE TIMEOUT_S

Says its port, receives all ports, and then does one command a line until one of them ends it or lasts.
What the watch logs is reported with its level.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300.0


class Worker:
    """One worker, as its test sees it."""

    def __init__(self, index: int, size: int, timeout_s: float, error_file: Path) -> None:
        self.index = index
        self.error_file = error_file
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(index), str(size), str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "TORCHELASTIC_ERROR_FILE": str(error_file),
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "1",
            },
        )
        self._text = b""

    def told(self) -> Any:
        """What it says next."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + DEADLINE_S
        while b"\n" not in self._text:
            ready, _, _ = select.select([self.process.stdout], [], [], deadline - time.monotonic())
            assert ready, f"worker {self.index} says nothing"
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            assert part, f"worker {self.index} has ended"
            self._text += part
        line, self._text = self._text.split(b"\n", 1)
        return json.loads(line)

    def do(self, command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def ended(self) -> int:
        """Its exit code."""
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what it was told last
                    pipe.close()

    def filled(self) -> None:
        """Returns once it has filled the pipe to this end."""
        assert self.process.stdout is not None
        deadline, capacity = (
            time.monotonic() + DEADLINE_S,
            fcntl.fcntl(self.process.stdout, fcntl.F_GETPIPE_SZ),
        )
        while (
            int.from_bytes(fcntl.ioctl(self.process.stdout, termios.FIONREAD, bytes(4)), "little") < capacity
        ):
            assert time.monotonic() < deadline, f"worker {self.index} does not fill the pipe"
            time.sleep(0.01)


@contextmanager
def watched(size: int, timeout_s: float, folder: Path) -> Iterator[list[Worker]]:
    """Workers that watch each other."""
    workers = [Worker(index, size, timeout_s, folder / f"error.{index}") for index in range(size)]
    try:
        ports = [worker.told() for worker in workers]
        for worker in workers:
            worker.do(ports)
        assert all(worker.told() == "watching" for worker in workers)
        yield workers
    finally:
        for worker in workers:
            worker.close()


# --- in the worker ------------------------------------------------------------------------------


def say(value: object) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


class Telling(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say([record.levelname, record.getMessage()])


def sleep() -> None:
    say("begins")
    time.sleep(10 * DEADLINE_S)


def spin() -> None:
    say("begins")
    while True:
        pass


def lock() -> None:
    mutex = threading.Lock()
    with mutex:
        say("begins")
        mutex.acquire()


def clog() -> None:
    """Fills stdout, where the logs also go: while no process reads, this hangs with the stream's lock."""
    from ecemb.net import watch as watch_module

    watch_module.REPORT_S = 1.0
    logging.getLogger("ecemb").addHandler(logging.StreamHandler(sys.stdout))
    while True:
        sys.stdout.write("x" * 4096)


def fork() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(10 * DEADLINE_S)
        os._exit(0)
    say(child)


def fail() -> None:
    raise ValueError("on purpose")


def fail_beside_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(10 * DEADLINE_S,)).start()
    fail()


def main(index: int, size: int, timeout_s: float) -> None:
    package = types.ModuleType("ecemb")  # the real one imports torch
    package.__path__ = [str(ROOT / "ecemb")]
    sys.modules["ecemb"] = package
    from ecemb.net import watch as watch_module
    from ecemb.net.error_file import Activity, Failure
    from ecemb.net.links import Listener, Peer, connect, neighbours
    from ecemb.net.watch import FailureDetector

    watch_module.REPORT_S = DEADLINE_S
    logging.getLogger("ecemb").addHandler(Telling())
    with Listener() as listener:
        say(listener.port)
        ports = json.loads(sys.stdin.readline())
        peers = [Peer(f"rank {i} (host h{i})", ("127.0.0.1",), port) for i, port in enumerate(ports)]
        near = {peer: peers[peer] for peer in neighbours(index, size)}
        links = connect(listener, index, size, near, b"secret", time.monotonic() + DEADLINE_S)
    where = Activity()
    names = [peer.name for peer in peers]
    watch = FailureDetector(links, index, names, timeout_s, activity=where)

    def exit_in_a_step(code: int) -> None:
        where.failure = Failure(f"SystemExit: {code}", "the stack", code, 7.0)

    say("watching")
    commands: dict[str, Callable[..., object]] = {
        "end": lambda: sys.exit(0),
        "close": lambda: (watch.say_goodbye(), say("closed")),
        **{one.__name__: one for one in (sleep, spin, lock, clog, fork, fail, fail_beside_a_thread)},
        exit_in_a_step.__name__: exit_in_a_step,
    }
    for line in iter(sys.stdin.readline, ""):
        name, *arguments = json.loads(line)
        commands[name](*arguments)


if __name__ == "__main__":
    signal.alarm(int(4 * DEADLINE_S))
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
