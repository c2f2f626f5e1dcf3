"""The keeper of a device's memory: workers that die leave whole steps, and strangers are told nothing."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_keeper, gpu_keeper_memory
from bench.devices import APART
from bench.gpu_keeper import SMALL, live, measure
from bench.gpu_keeper_memory import ASKED, HostBlock, Refused, answer, attached, line_from, user_of
from bench.gpu_keeper_rank import FAULTY, FREE, HELD, PREPARED, WHOLE, Journalled, Shape
from bench.ranks import RankFailed
from bench.result import Arguments, Incomplete, Row, WrongResult

SHAPE = Shape(rows=64, dim=3, touched=24)
DEADLINE_S = 120.0


def begun(shape: Shape = SHAPE) -> Journalled:
    return Journalled(torch.zeros(shape.ends[-1], dtype=torch.uint8).untyped_storage(), shape, seed=5)


class Stop(Exception):
    pass


def stop() -> None:
    raise Stop


# --- all of it, with real kills ------------------------------------------------------------------


def test_a_table_that_is_kept_outlives_kills_bit_for_bit() -> None:
    rows = list(gpu_keeper.run(Arguments(seed=3), APART, time.monotonic() + DEADLINE_S))
    found = {row.metric: row for row in rows}
    assert set(found) == {
        *("bit_identical", "undone_steps", "undo_ms", "death_s", "late_rows", "context_s"),
        *("keeper_attach_s", "image_put_s", "attach_over_put"),
        *("journal_ms", "delta_ms", "image_ms", "journal_over_image", "journal_and_delta_over_image"),
    }
    assert found["undone_steps"].value >= 1  # that which was held
    assert found["late_rows"].value == 0
    assert found["death_s"].repeats == found["undone_steps"].labels["kills"] == 2
    same = [row for row in rows if row.metric == "bit_identical"]
    assert [row.value for row in same] == [1, 1]
    assert [row.labels["after"] for row in same] == [FREE, FAULTY]
    assert same[1].labels["undone"] == 1
    assert all(row.value > 0 for row in rows if row.unit in ("s", "ms", "ratio"))


def test_a_worker_that_dies_in_its_first_step_leaves_nothing() -> None:
    scale = dataclasses.replace(SMALL, lives=(HELD, HELD, WHOLE), steps=0, repeats=0)
    (first, _), (second, _), (last, none) = live(scale, 1, time.monotonic() + DEADLINE_S)
    assert [one["undone"] for one in (first, second, last)] == [False, True, True]
    assert [one["found"] for one in (first, second, last)] == [0, 0, 0]
    assert none is None
    assert last["digest"] == last["expected"]


def test_what_was_measured_before_a_failure_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"context_s": 0.5, "attach_s": 0.25, "late_rows": 0, "undone": False, "undo_s": 0.0}
    whole = told | {"digest": "a", "expected": "b", "steps": 7}

    def lived(life: str, *others: Any) -> Iterator[tuple[dict[str, Any], float | None]]:
        yield told, 1.0
        if life == HELD:
            raise RankFailed("rank 0 of 1 raised")
        times = {name: [0.5] for name in ("journal", "delta", "image", "put")}
        yield whole | {"seconds": times}, None

    def asked(life: str) -> list[Row]:
        monkeypatch.setattr(gpu_keeper, "live", lambda *others: lived(life, *others))
        lives = dataclasses.replace(SMALL, lives=(HELD, WHOLE))
        monkeypatch.setattr(gpu_keeper, "SMALL", lives)
        with pytest.raises(Incomplete, match="raised|other bytes than 7 steps give it") as raised:
            gpu.kept(gpu_keeper.run(Arguments(), APART, 0.0))
        return raised.value.rows

    assert [row.metric for row in asked(HELD)][-3:] == ["death_s", "context_s", "keeper_attach_s"]
    metrics = [row.metric for row in asked(WHOLE)]
    assert "attach_over_put" in metrics and "bit_identical" not in metrics


def test_a_part_without_time_says_so() -> None:
    with pytest.raises(RankFailed, match="still runs after 0 s"):
        list(measure(SMALL, 0, time.monotonic()))


# --- the journal ---------------------------------------------------------------------------------


def test_a_step_is_undone_from_wherever_it_was_left() -> None:
    own = begun()
    assert own.undo() is False
    for number in (1, 2):
        own.step(number)
    before = own.table.clone()
    assert len(own.touched(3).unique()) == SHAPE.touched
    with pytest.raises(Stop):
        own.step(3, stop)
    assert not torch.equal(own.table, before)
    own.table[own.ids[:5]] = 7.0  # an undo that was killed
    assert own.undo() is True
    assert torch.equal(own.table, before)
    assert own.committed() == 2 and own.undo() is False
    own.records.fill_(9.0)  # killed before it was prepared
    assert own.undo() is False and torch.equal(own.table, before)


def test_steps_that_are_left_out_or_done_twice_are_seen() -> None:
    def trained(*steps: int) -> torch.Tensor:
        own = begun()
        for number in steps:
            own.change(number, own.touched(number))
        return own.table

    assert torch.equal(trained(1, 2, 3), trained(1, 2, 3))
    for wrong in ((1, 2), (1, 3), (1, 2, 2, 3), (1, 3, 2)):
        assert not torch.equal(trained(1, 2, 3), trained(*wrong))


def test_words_that_no_step_leaves_are_refused() -> None:
    own = begun()
    own.step(1)
    own.words[PREPARED] = 3
    with pytest.raises(WrongResult, match="step 3 with 24 rows is prepared after step 1"):
        own.undo()


# --- who may attach ------------------------------------------------------------------------------


class Told:
    """A block with a ticket like that of a CUDA device."""

    TICKET = (0, b"c\x00\xff", 512, 1024, b"/torch_1", 3, b"", True)

    def ticket(self) -> Sequence[Any]:
        return self.TICKET

    @staticmethod
    def opened(ticket: Sequence[Any]) -> Any:
        return ticket


def said(message: bytes) -> bytes:
    """What a keeper answers to this."""
    own, other = socket.socketpair()
    with own:
        with other:
            own.sendall(message)
            answer(other, Told())
        try:
            return own.recv(1 << 16)
        except ConnectionResetError:  # what it hadn't read
            return b""


def test_a_stranger_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_keeper_memory, "PATIENCE_S", 0.05)
    assert said(ASKED).endswith(b"true]\n")
    for message in (b"", b"attach", b"detach\n", b"attach!\n", b"\n", b"x" * 10_000):
        assert said(message) == b""
    monkeypatch.setattr(os, "geteuid", lambda: 4_294_967)
    assert said(ASKED) == b""


def test_a_line_ends_in_time_and_in_length(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = socket.socketpair()
    with own, other:
        own.sendall(b"abc\n")
        assert line_from(other, 4, 1.0) == b"abc\n"
        own.sendall(b"abcd\n")
        assert line_from(other, 4, 1.0) is None
        assert line_from(other, 4, 1.0) == b"\n"
        began = time.monotonic()
        assert line_from(other, 4, 0.05) is None
        assert time.monotonic() - began < 5
        own.sendall(b"a")
        own.shutdown(socket.SHUT_WR)
        assert line_from(other, 4, 1.0) is None


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "keeper"))
        listener.listen()
        yield listener


def answering(listener: socket.socket) -> threading.Thread:
    def once() -> None:
        connection, _ = listener.accept()
        with connection:
            answer(connection, Told())

    thread = threading.Thread(target=once)
    thread.start()
    return thread


def test_a_ticket_arrives_as_it_was_told(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_keeper_memory.BLOCKS, "told", Told)
    thread = answering(listening)
    ticket: Any = attached("told", listening.getsockname(), 10.0)
    thread.join()
    assert tuple(ticket) == Told.TICKET
    assert [type(one) for one in ticket] == [type(one) for one in Told.TICKET]


def test_a_keeper_that_is_silent_or_another_users_is_refused(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = listening.getsockname()
    with pytest.raises(Refused, match="gave no answer"):
        attached(APART, address, 0.05)
    monkeypatch.setattr(os, "geteuid", lambda: 4_294_967)
    with pytest.raises(Refused, match="is a socket of user"):
        attached(APART, address, 1.0)
    with pytest.raises(OSError, match="No such file"):
        attached(APART, f"{address}-none", 1.0)


def test_the_kernel_says_who_is_there() -> None:
    own, other = socket.socketpair()
    with own, other:
        assert user_of(own) == os.geteuid()


def test_memory_is_shared_and_has_no_name() -> None:
    block = HostBlock(64)
    first, second = (HostBlock.opened(block.ticket()) for _ in range(2))
    first[3] = 7
    assert (second[3], second[4], second.nbytes()) == (7, 0, 64)


# --- who ends with whom --------------------------------------------------------------------------

KEEPS = """
import signal, sys
from bench.devices import APART
from bench.gpu_keeper import SMALL
from bench.gpu_keeper_memory import Keeping, keep
from bench.gpu_keeper_rank import FREE, HELD, Order, work
from bench.ranks import Ranks

def order(life):
    return Order(APART, sys.argv[1], SMALL.shape, life, 1, 0.0, 0, 0.0, 0, 10.0)

if __name__ == "__main__":
    keeping = Keeping(APART, sys.argv[1], SMALL.shape.ends[-1])
    with Ranks(1, keep, keeping, deadline_s=60, imports=("bench.gpu_keeper_rank",)) as keeper:
        keeper.answers()
        with Ranks(1, work, order(HELD), deadline_s=60) as held:
            held.answers()
            with Ranks(1, work, order(FREE), deadline_s=60) as free:
                free.answers()
                print(*(one._processes[0].pid for one in (keeper, held, free)), flush=True)
                signal.pause()
"""


def test_keeper_and_workers_end_with_their_caller(tmp_path: Path) -> None:
    script, address = tmp_path / "keeps.py", tmp_path / "keeper"
    script.write_text(KEEPS, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(gpu.ROOT), *filter(None, sys.path)])}
    command = [sys.executable, str(script), str(address)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as caller:
        assert caller.stdout is not None
        ends = [os.pidfd_open(int(pid)) for pid in caller.stdout.readline().split()]
        assert len(ends) == 3
        assert attached(APART, str(address), 10.0).nbytes() == SMALL.shape.ends[-1]
        caller.send_signal(signal.SIGKILL)
    for end in ends:
        ready, _, _ = select.select([end], [], [], 20.0)
        os.close(end)
        assert ready
    with pytest.raises(ConnectionRefusedError):
        attached(APART, str(address), 1.0)
