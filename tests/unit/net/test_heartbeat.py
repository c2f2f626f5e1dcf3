"""Beats: a thread of machine code, whatever Python does."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import pytest

from ecemb.net import watch
from ecemb.net.watch import Beats
from support import holdings

Ends: TypeAlias = tuple[socket.socket, socket.socket]
ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 300


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    far.settimeout(DEADLINE_S)
    yield near, far
    near.close()
    far.close()


def test_beats_come_while_the_interpreter_is_held_and_no_more_after_stop(ends: Ends) -> None:
    near, far = ends
    one = Beats([near.fileno()], 0.02, b"\7")
    assert far.recv(1) == b"\7"  # at once
    far.setblocking(True)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", DEADLINE_S, 0))
    held = ctypes.create_string_buffer(20)  # this call keeps the interpreter until it has as many
    assert ctypes.PyDLL(None).recv(far.fileno(), held, 20, socket.MSG_WAITALL) == 20
    one.stop()
    one.stop()
    near.close()
    while said := far.recv(1 << 10):
        assert not said.strip(b"\7")


def test_each_of_several_is_beaten_and_one_that_is_full_or_closed_holds_up_none() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    full, gone, listening = pairs
    full[0].setblocking(False)
    try:
        while True:
            full[0].send(b"x" * 4096)
    except BlockingIOError:
        pass
    gone[1].close()
    one = Beats([near.fileno() for near, _ in pairs], 0.01, b"\7")
    listening[1].settimeout(DEADLINE_S)
    for _ in range(10):
        assert listening[1].recv(1) == b"\7"
    one.stop()
    for pair in pairs:
        for end in pair:
            end.close()


def test_it_takes_no_signal_from_python(ends: Ends) -> None:
    near, _ = ends
    taken: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: taken.append(number))
    one = Beats([near.fileno()], 60.0, b"\7")
    try:
        assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        texts: list[str] = []
        for path in Path("/proc/self/task").glob("*/status"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                texts.append(path.read_text())
        lines = [line for text in texts for line in text.splitlines() if line.startswith("SigBlk")]
        blocked = [int(line.split()[1], 16) for line in lines]
        assert sum(mask >> (signal.SIGUSR1 - 1) & 1 for mask in blocked) >= 1
        os.kill(os.getpid(), signal.SIGUSR1)
        assert taken == [signal.SIGUSR1]
    finally:
        one.stop()
        signal.signal(signal.SIGUSR1, before)


def test_starts_and_stops_leave_nothing(ends: Ends) -> None:
    Beats([], 1.0, b"\7").stop()
    descriptors, tasks = holdings.descriptors(), holdings.tasks()
    for _ in range(100):
        Beats([ends[0].fileno()], 1.0, b"\7").stop()
    deadline = time.monotonic() + DEADLINE_S
    while holdings.tasks() - tasks:  # a thread that was joined may still end in the kernel
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not holdings.descriptors() - descriptors


def test_a_thread_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def pthread_create(*_: object) -> int:
            return 11

    monkeypatch.setattr(watch, "_library", Library)
    with pytest.raises(OSError, match="temporarily"):
        Beats([], 1.0, b"\7")


def test_a_process_ends_well_whose_beats_nobody_stops() -> None:
    code = (
        "import socket\nfrom ecemb.net.watch import Beats\nnear, far = socket.socketpair()\n"
        "one = Beats([near.fileno()], 0.001, b'x')\nassert far.recv(1) == b'x'\n"
        "import os\nchild = os.fork()\n"
        "if child == 0:\n    one.stop()\n    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert ended.returncode == 0, ended.stderr
