"""The throttle of a rebuild beside training: none on idle processors, a floor on busy ones."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from ecemb.kernels import threads
from ecemb.recovery import throttle
from ecemb.recovery.throttle import BUSY_NS, FLOOR_BYTES_PER_S, UNKNOWN_NS, RebuildThrottle, RunDelay

PROCESSORS, OF_HOST, WORDS = 4, 8, 1 << 17
REST_S = 8 * WORDS / (FLOOR_BYTES_PER_S * PROCESSORS)


class Machine:
    """A host at a moment: what can be seen of it."""

    def __init__(self) -> None:
        self.now_s, self.running = 100.0, 0

    def time_s(self) -> float:
        return self.now_s

    def read_bytes(self) -> bytes:
        return b"0.50 0.40 0.30 %d/321 4242\n" % (1 + self.running)


@pytest.fixture
def machine() -> Iterator[Machine]:
    one = Machine()
    with (
        mock.patch.object(threads, "_LOAD", one),
        mock.patch.object(os, "sched_getaffinity", return_value=set(range(PROCESSORS))),
        mock.patch.object(os, "cpu_count", return_value=OF_HOST),
        mock.patch.object(time, "monotonic", one.time_s),
    ):
        yield one


def rested(made: RebuildThrottle, machine: Machine) -> float:
    """For how long it rests, in seconds."""
    began_s = machine.now_s
    while wait_s := made.wait_s():
        machine.now_s += wait_s
    return machine.now_s - began_s


def test_beside_idle_processors_chunks_follow_each_other(machine: Machine) -> None:
    made = RebuildThrottle()
    assert not made.wait_s() and made.most_in_flight == 1
    for delay_ns in (0, BUSY_NS - 1):
        made.received(WORDS, delay_ns)
        assert not made.wait_s() and made.most_in_flight == 2


@pytest.mark.parametrize("running", [OF_HOST // 2, OF_HOST, 2 * OF_HOST])
def test_beside_busy_ones_they_come_at_the_floor(machine: Machine, running: int) -> None:
    made, machine.running = RebuildThrottle(), running
    for _ in range(3):
        made.received(WORDS, BUSY_NS)
        assert made.most_in_flight == 1
        assert math.isclose(rested(made, machine), REST_S)


def test_what_came_beside_idle_processors_counts(machine: Machine) -> None:
    """So training is not held up for what would have come at the floor; for a second, at most."""
    made, machine.running = RebuildThrottle(), OF_HOST
    for _ in range(3):
        made.received(WORDS, 0)
    made.received(WORDS, BUSY_NS)
    assert math.isclose(rested(made, machine), 4 * REST_S)
    for _ in range(round(3 / REST_S)):
        made.received(WORDS, 0)
    made.received(WORDS, BUSY_NS)
    assert math.isclose(rested(made, machine), throttle._MEMORY_S)
    made.received(WORDS, BUSY_NS)
    assert math.isclose(rested(made, machine), REST_S)


def test_a_chunk_of_more_than_a_second_rests_for_as_long(machine: Machine) -> None:
    made, machine.running = RebuildThrottle(), OF_HOST
    made.received(round(3 / REST_S) * WORDS, BUSY_NS)
    assert math.isclose(rested(made, machine), round(3 / REST_S) * REST_S)


def test_a_rest_ends_when_processors_are_idle_at_two_looks(machine: Machine) -> None:
    made, machine.running = RebuildThrottle(), OF_HOST
    made.received(WORDS, BUSY_NS)
    looks = iter([0, OF_HOST, OF_HOST // 2 - 1, 1, 0])
    while machine.now_s < 100 + REST_S / 2:
        machine.running = next(looks)
        if not (wait_s := made.wait_s()):
            break
        machine.now_s += wait_s
    assert list(looks) == [0]
    assert made.most_in_flight == 1


def test_a_look_is_of_one_rest_alone(machine: Machine) -> None:
    made, machine.running = RebuildThrottle(), 0
    for _ in range(3):
        made.received(WORDS, BUSY_NS)
        assert made.wait_s()


def test_a_hurry_ends_it(machine: Machine) -> None:
    made, machine.running = RebuildThrottle(), OF_HOST
    made.received(WORDS, BUSY_NS)
    made.hurry()
    assert not made.wait_s() and made.most_in_flight == 1


@pytest.mark.parametrize(("processors", "most"), [(1, 1), (2, 2), (64, 2)])
def test_two_chunks_are_in_flight_but_no_more_than_processors(processors: int, most: int) -> None:
    with mock.patch.object(os, "sched_getaffinity", return_value=set(range(processors))):
        made = RebuildThrottle()
        made.received(WORDS, 0)
        assert made.most_in_flight == most


def test_without_a_file_to_look_at_it_has_the_floor(machine: Machine, tmp_path: Path) -> None:
    made = RebuildThrottle()
    made.received(WORDS, BUSY_NS)
    with mock.patch.object(threads, "_LOAD", tmp_path / "loadavg"):
        assert math.isclose(rested(made, machine), REST_S)


@pytest.mark.parametrize("said", [b"", b"nonsense\n", b"0.00 0.00 0.00 0/0 0\n", b"0.00 0.00 0.00 -/1 0\n"])
def test_a_system_that_does_not_count_has_the_floor(machine: Machine, said: bytes) -> None:
    made = RebuildThrottle()
    made.received(WORDS, BUSY_NS)
    with mock.patch.object(machine, "read_bytes", return_value=said):
        assert math.isclose(rested(made, machine), REST_S)


# --- waits for a processor ------------------------------------------------------------------------


def test_it_is_what_the_kernel_says_of_the_first_thread() -> None:
    delay = RunDelay()
    before, now = int(Path("/proc/self/schedstat").read_text().split()[1]), delay.so_far_ns()
    assert before <= now <= delay.so_far_ns()
    delay.close()
    delay.close()


def test_without_the_kernels_count_training_always_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", missing)
    delay = RunDelay()
    first = delay.so_far_ns()
    assert delay.so_far_ns() - first == UNKNOWN_NS
    delay.close()
