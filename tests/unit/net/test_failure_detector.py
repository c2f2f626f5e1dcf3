"""The watch: who dies or hangs is noticed by all at once; who is only slow is left alone."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from ecemb.net import error_file
from ecemb.net import watch as watch_module
from ecemb.net.links import Link, Listener, Peer, connect, drop, neighbours, pair
from ecemb.net.watch import _BEAT, _BYE, _DEAD, _DIED, _MESSAGE, EXIT_UNDECIDED, FailureDetector, _Death
from support import holdings
from support.failure_detector_worker import Worker, watched

DEADLINE_S = 300.0
LONG_S = 1000.0  # a timeout that never comes
STALL_S = 15.0  # a timeout that comes: a worker may stand still for less, on a busy machine


def noticed(worker: Worker, *, at_length: bool | None = None) -> str:
    """The line by which a worker logged that it ends: one says it at length, the others briefly."""
    level, text = worker.told()
    if at_length is not None:
        assert level == ("CRITICAL" if at_length else "WARNING")
    assert "\n" not in text
    if level == "CRITICAL":
        assert text.startswith("PeerFailure: rank ")
        assert text.endswith("; ending this process so that torchrun restarts the job from its arenas")
    else:
        assert re.fullmatch(r"rank \d+ \(host h\d+\) .*; this rank ends as well", text) and len(text) < 100
    return text


def sockets(pid: int) -> list[str]:
    """Those that a process holds."""
    found: list[str] = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in between
            found.append(os.readlink(path))
    return [name for name in found if name.startswith("socket:")]


def test_a_death_is_noticed_by_all_whatever_they_do(tmp_path: Path) -> None:
    """Eleven workers, not all of which are next to the victim. A silence would end none of them here."""
    began = int(time.time())
    with watched(11, LONG_S, tmp_path) as workers:
        victim, *others = workers[4:] + workers[:4]
        for worker, command in zip(others, ["sleep", "lock", "spin"], strict=False):
            worker.do([command])  # the rest reads from a pipe
            assert worker.told() == "begins"
        others[2].error_file.write_text('"the main thread"')
        victim.process.kill()
        for worker in others:
            text = noticed(worker, at_length=worker.index == 0)  # the first that is next to 4
            assert "rank 4 (host h4) died" in text
        for worker in others:
            assert worker.ended() == EXIT_UNDECIDED
        assert others[2].error_file.read_text() == '"the main thread"'
        message = json.loads(others[0].error_file.read_text())["message"]
        assert message["message"].startswith("PeerFailure: rank 4 (host h4) died")
        assert "in sleep" in message["extraInfo"]["py_callstack"]
        assert int(message["extraInfo"]["timestamp"]) >= began
        assert not victim.error_file.exists()


def test_a_hang_is_noticed_after_the_timeout_and_who_hung_ends_when_it_wakes(tmp_path: Path) -> None:
    with watched(3, STALL_S, tmp_path) as workers:
        hung, *others = workers
        os.kill(hung.process.pid, signal.SIGSTOP)
        for worker in others:
            silence = re.search(
                r"rank 0 \(host h0\) was silent for ([\d.]+) s", noticed(worker, at_length=True)
            )
            assert silence and float(silence[1]) >= STALL_S
        assert [worker.ended() for worker in others] == [EXIT_UNDECIDED] * 2
        os.kill(hung.process.pid, signal.SIGCONT)
        assert "the other ranks count this rank as lost: rank 0 (host h0) was silent" in hung.told()[1]
        assert hung.ended() == EXIT_UNDECIDED


def test_who_ends_normally_alarms_nobody_and_who_fails_does(tmp_path: Path) -> None:
    with watched(4, LONG_S, tmp_path) as workers:
        workers[0].do(["end"])
        assert workers[0].ended() == 0
        workers[1].do(["close"])
        assert workers[1].told() == "closed"
        workers[1].process.kill()
        workers[1].ended()
        workers[2].do(["fail_beside_a_thread"])
        assert "announcing it to the other ranks" in workers[2].told()[1]
        text = noticed(workers[3])
        assert "rank 2 (host h2) ended by an exception (see its log)" in text
        assert workers[3].ended() == EXIT_UNDECIDED
        assert workers[2].process.poll() is None  # its thread goes on


def test_an_exception_is_told_and_a_fork_hides_no_death(tmp_path: Path) -> None:
    with watched(2, LONG_S, tmp_path) as workers:
        workers[0].do(["fork"])
        child = workers[0].told()
        try:
            deadline = time.monotonic() + DEADLINE_S
            while sockets(child):  # at the end of its fork, they are closed
                assert time.monotonic() < deadline
            workers[0].process.kill()
            assert "rank 0 (host h0) died" in noticed(workers[1])
            os.kill(child, 0)  # it is still there
        finally:
            os.kill(child, signal.SIGKILL)
    with watched(2, LONG_S, tmp_path) as workers:
        workers[0].do(["fail"])
        assert "rank 0 (host h0) ended by an exception" in noticed(workers[1])


def test_who_has_left_a_step_by_its_own_error_ends_by_that_and_not_by_those_who_follow(
    tmp_path: Path,
) -> None:
    with watched(2, LONG_S, tmp_path) as workers:
        workers[0].do(["exit_in_a_step", 3])
        workers[0].do(["sleep"])
        assert workers[0].told() == "begins"
        workers[1].process.kill()
        level, text = workers[0].told()
        assert level == "CRITICAL" and text.startswith("a step of this rank failed by SystemExit: 3, and the")
        assert "rank 1 (host h1) died" in text and "ending it with code 3" in text
        assert workers[0].ended() == 3
        message = json.loads(workers[0].error_file.read_text())["message"]
        assert message["message"] == "SystemExit: 3" and message["extraInfo"]["timestamp"] == "7"


def test_logs_that_nobody_reads_keep_no_process_alive(tmp_path: Path) -> None:
    with watched(2, LONG_S, tmp_path) as workers:
        workers[1].do(["clog"])
        workers[1].filled()
        workers[0].process.kill()
        assert workers[1].ended() == EXIT_UNDECIDED


# --- within one process -------------------------------------------------------------------------


class Clock:
    """As `time`, in the detector: the test moves it, or it goes on by a step with every look at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.step, self.looks = 0.0, 0.0, 0
        self.sleep = time.sleep
        monkeypatch.setattr(watch_module, "_BEAT_S", 0.01)
        monkeypatch.setattr(watch_module, "time", self)

    def monotonic(self) -> float:
        self.looks += 1
        self.now += self.step
        return self.now

    def await_looks(self, count: int) -> None:
        """Returns when the detector has looked this many times from now on."""
        deadline, last = time.monotonic() + DEADLINE_S, self.looks + count
        while self.looks < last:
            assert time.monotonic() < deadline
            time.sleep(0.001)


class Ended(list[str]):
    """What would have ended the process."""

    def wait(self) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while not self:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return self[0]


ENDED = Ended()


@pytest.fixture(autouse=True, scope="module")
def _goes_on() -> Iterator[None]:
    """The process of the tests ends by no detector of theirs."""
    with mock.patch.object(watch_module, "end_process", lambda why, **_: ENDED.append(why)):
        yield


@contextmanager
def one(timeout_s: float = LONG_S) -> Iterator[tuple[FailureDetector, socket.socket, Ended]]:
    """A watch with one neighbour, who is the test."""
    near, far = pair()
    far.setblocking(True)
    ENDED.clear()
    watch = FailureDetector([Link(1, near)], 0, ["rank 0", "rank 1", "rank 2"], timeout_s)
    try:
        yield watch, far, ENDED
    finally:
        watch.say_goodbye()
        drop(far)


def dead(index: int, why: int = _DIED) -> bytes:
    return _MESSAGE.pack(_DEAD, why, 0, index, 0)


def answer(place: str, *, waits: bool) -> bytes:
    text = place.encode()
    return _MESSAGE.pack(watch_module._HERE, waits, len(text), 1, 0) + text


ASK = _MESSAGE.pack(watch_module._ASK, 0, 0, 1, 0)


def answered(far: socket.socket) -> None:
    """Waits for the answer to `ASK`."""
    said = b""
    while b"before ecemb.protect()" not in said:
        part = far.recv(1 << 10)
        assert part, "it has hung up"
        said += part


def said_to_end_by(error: str) -> bytes:
    return _Death(2, watch_module._GAVE_UP, error=error).pack()


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"", "rank 1 died"),
        (b"\1", "rank 1 died"),  # cut short
        (_BEAT + _BEAT + dead(2), "rank 2 died"),
        (said_to_end_by("ValueError: 7"), "rank 2 ended by ValueError: 7 (see its log)"),
        (answer("anywhere", waits=False) + dead(2), "rank 2 died"),
        (said_to_end_by("a\nb"), "rank 2 ended by ab (see its log)"),
        (_MESSAGE.pack(_DEAD, _DIED, 401, 2, 0) + bytes(401), "rank 1 sent bytes that are not a message"),
        (dead(0), "the other ranks count this rank as lost: rank 0 died"),
        (dead(3), "rank 1 sent bytes that are not a message"),
        (dead(2, why=9), "rank 1 sent bytes that are not a message"),
        (bytes(_MESSAGE.size), "rank 1 sent bytes that are not a message"),
        pytest.param(
            random.Random(7).randbytes(1 << 10).replace(b"\1", b"x").replace(b"\2", b"x"), "", id="noise"
        ),
    ],
)
def test_what_a_neighbour_says(said: bytes, text: str) -> None:
    with one() as (_, far, ended):
        far.sendall(said)
        far.shutdown(socket.SHUT_WR)
        assert text in ended.wait()


def test_a_goodbye_is_the_last_that_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with one(timeout_s=0.2) as (watch, far, ended):
        far.sendall(_MESSAGE.pack(_BYE, 0, 0, 1, 0) + dead(2))
        while far.recv(1 << 10):  # until it hangs up
            pass
        clock.step = 1.0
        clock.await_looks(20)
        watch.say_goodbye()
        assert not ended


def test_beats_come_and_silence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with one(timeout_s=0.5) as (_, far, ended):
        said = b""
        while len(said) < 5:
            said += far.recv(1 << 10)
        assert not ended
        clock.step = 0.1
        assert ended.wait().startswith("rank 1 was silent for 0.5 s")
        while part := far.recv(1 << 10):
            said += part
        beats, last_word = said[: -_MESSAGE.size], said[-_MESSAGE.size :]
        assert beats == _BEAT * len(beats)
        assert _MESSAGE.unpack(last_word)[0] == _DEAD


@pytest.mark.slow
def test_time_in_which_a_worker_stood_still_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that was suspended, or in a call that keeps the interpreter."""
    clock = Clock(monkeypatch)
    with one() as (_, far, ended):
        for _ in range(3):
            clock.now += 10 * LONG_S
            clock.await_looks(4)
        assert not ended
        far.sendall(ASK)
        answered(far)


@pytest.mark.slow
def test_a_worker_that_computes_beats_and_answers() -> None:
    with one() as (_, far, ended):
        far.sendall(ASK)
        far.setblocking(False)
        said, deadline = b"", time.monotonic() + DEADLINE_S
        while b"before ecemb.protect()" not in said or said.count(_BEAT) < 3:
            assert time.monotonic() < deadline
            sum(range(10_000))
            with contextlib.suppress(BlockingIOError):
                said += far.recv(1 << 10)
        assert not ended


@pytest.mark.slow
def test_a_call_that_keeps_the_interpreter_is_not_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats go on: a call waits for many of them, in which no thread of Python runs."""
    monkeypatch.setattr(watch_module, "_BEAT_S", 0.01)
    with one() as (_, far, ended):
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(DEADLINE_S), 0))
        held = ctypes.create_string_buffer(100)
        assert ctypes.PyDLL(None).recv(far.fileno(), held, 100, socket.MSG_WAITALL) == 100
        assert held.raw == 100 * _BEAT
        far.sendall(ASK)
        answered(far)
        assert not ended


def test_a_watch_that_breaks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Link) -> bool:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Link, "read", broken)
    with one() as (_, far, ended):
        far.sendall(_BEAT)
        text = ended.wait()
        assert "the watch over the other ranks failed" in text and "ZeroDivisionError: a defect" in text


def test_who_gives_up_tells_the_others() -> None:
    with one() as (watch, far, ended):
        watch.announce_failure()
        watch.announce_failure()
        said = b""
        while part := far.recv(1 << 10):
            said += part
        assert said.endswith(dead(0, watch_module._GAVE_UP)) and not ended


def waiting_since_long(monkeypatch: pytest.MonkeyPatch, *, for_answers_s: float) -> None:
    monkeypatch.setattr(watch_module, "WAIT_S", -1.0)
    monkeypatch.setattr(watch_module, "_ANSWER_S", for_answers_s)
    monkeypatch.setattr(watch_module, "_BEAT_S", 0.1)


def asked(far: socket.socket) -> None:
    """Waits for the question where the test is."""
    said = b""
    while not said.strip(_BEAT):
        said += far.recv(1 << 10)
    assert _MESSAGE.unpack(said.strip(_BEAT).ljust(_MESSAGE.size, b"\0"))[0] == watch_module._ASK


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            answer("in guard.save(), before step 7", waits=True),
            "rank 1 is in guard.save(), before step 7: all",
        ),
        (b"", "rank 1 is in a call that keeps Python's interpreter, or stopped: all"),
    ],
)
def test_who_waits_for_long_says_where_the_others_are(
    said: bytes, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting_since_long(monkeypatch, for_answers_s=LONG_S if said else 0.5)
    with one() as (_, far, ended):
        asked(far)
        far.sendall(said)
        deadline = time.monotonic() + DEADLINE_S
        while not caplog.records:
            assert time.monotonic() < deadline and not ended
            far.sendall(_BEAT)
            time.sleep(0.01)
        assert f"s before ecemb.protect(), and {line}" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("index", "place"), [(0, "before ecemb.protect()"), (1, "in guard.close(), before step 7")]
)
def test_nothing_is_said_of_who_is_here_too_nor_if_a_lower_rank_says_it(
    index: int, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting_since_long(monkeypatch, for_answers_s=LONG_S)
    near, far = pair()
    far.setblocking(True)
    watch = FailureDetector([Link(1 - index, near)], index, ["rank 0", "rank 1"], LONG_S)
    try:
        asked(far)
        far.sendall(answer(place, waits=True))
        deadline = time.monotonic() + DEADLINE_S
        while watch._asked_at is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert watch._answers and not caplog.records
    finally:
        watch.say_goodbye()
        drop(far)


def test_a_question_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with one() as (_, far, ended):
        far.sendall(ASK)
        answered(far)
        assert not ended


def start(size: int) -> list[FailureDetector]:
    listeners = [Listener() for _ in range(size)]
    peers = [Peer(f"rank {i}", ("127.0.0.1",), listeners[i].port) for i in range(size)]
    watches: list[FailureDetector] = []
    names = [peer.name for peer in peers]

    def run(index: int) -> None:
        near = {peer: peers[peer] for peer in neighbours(index, size)}
        links = connect(listeners[index], index, size, near, b"s", time.monotonic() + DEADLINE_S)
        watches.append(FailureDetector(links, index, names, LONG_S))

    ENDED.clear()
    threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(watches) == size and not ENDED
    return watches


def test_fifty_starts_and_stops_leave_nothing() -> None:
    descriptors, threads = holdings.descriptors(), holdings.threads()
    for _ in range(50):
        watches = start(2)
        closing = [threading.Thread(target=watch.say_goodbye) for watch in watches]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(DEADLINE_S)
        watches[0].say_goodbye()
    deadline = time.monotonic() + DEADLINE_S
    while holdings.descriptors() - descriptors or holdings.threads() - threads:  # one may still be ending
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_half_an_error_file_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    for whole in ('{"message": 1}', None):  # None: the writer is stuck, and is not waited for any longer
        path.write_text('{"mess')
        monkeypatch.setattr(error_file, "_WRITING_S", DEADLINE_S if whole else 0.1)
        waiting = threading.Thread(target=error_file.wait_while_written)
        waiting.start()
        if whole:
            assert waiting.is_alive()
            path.write_text(whole)
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive()


def test_the_error_file_is_not_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    error_file.write("why", "stack", later=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    error_file.write("why", "stack", later=False)
    error_file.write("another", "stack", later=False)
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "why"


def test_an_exception_that_ended_the_main_thread_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not watch_module._main_thread_failed()
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert not watch_module._main_thread_failed()  # it is alive, as in a notebook
    assert isinstance(watch_module.last_exception(), ValueError)
