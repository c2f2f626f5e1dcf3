"""The rate of a rebuild beside training: at once on idle processors, at a floor on busy ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from ecemb.recovery import rate
from ecemb.recovery.rate import BUSY_NS, FLOOR_BYTES_PER_S, Rate

PROCESSORS, OF_HOST, WORDS = 4, 8, 1 << 17
REST_S = 8 * WORDS / (FLOOR_BYTES_PER_S * PROCESSORS)


class Machine:
    """A host at a moment: what `Rate` sees of it."""

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
        mock.patch.object(rate, "_LOAD", one),
        mock.patch.object(rate.os, "sched_getaffinity", return_value=set(range(PROCESSORS))),
        mock.patch.object(rate.os, "cpu_count", return_value=OF_HOST),
        mock.patch.object(rate.time, "monotonic", one.time_s),
    ):
        yield one


def rested(made: Rate, machine: Machine) -> float:
    """For how long it rests, in seconds."""
    began_s = machine.now_s
    while wait_s := made.wait_s():
        machine.now_s += wait_s
    return machine.now_s - began_s


def test_beside_idle_processors_chunks_follow_each_other(machine: Machine) -> None:
    made = Rate()
    assert not made.wait_s() and made.most_under_way == 1
    for delay_ns in (0, BUSY_NS - 1):
        made.came(WORDS, delay_ns)
        assert not made.wait_s() and made.most_under_way == 2


@pytest.mark.parametrize("running", [OF_HOST // 2, OF_HOST, 2 * OF_HOST])
def test_beside_busy_ones_they_come_at_the_floor(machine: Machine, running: int) -> None:
    made, machine.running = Rate(), running
    for _ in range(3):
        made.came(WORDS, BUSY_NS)
        assert made.most_under_way == 1
        assert math.isclose(rested(made, machine), REST_S)


def test_what_came_beside_idle_processors_counts(machine: Machine) -> None:
    """So training is not held up for what would have come at the floor; for a second, at most."""
    made, machine.running = Rate(), OF_HOST
    for _ in range(3):
        made.came(WORDS, 0)
    made.came(WORDS, BUSY_NS)
    assert math.isclose(rested(made, machine), 4 * REST_S)
    for _ in range(round(3 / REST_S)):
        made.came(WORDS, 0)
    made.came(WORDS, BUSY_NS)
    assert math.isclose(rested(made, machine), rate._MEMORY_S)
    made.came(WORDS, BUSY_NS)
    assert math.isclose(rested(made, machine), REST_S)


def test_a_chunk_of_more_than_a_second_rests_for_as_long(machine: Machine) -> None:
    made, machine.running = Rate(), OF_HOST
    made.came(round(3 / REST_S) * WORDS, BUSY_NS)
    assert math.isclose(rested(made, machine), round(3 / REST_S) * REST_S)


def test_a_rest_ends_when_processors_are_idle_at_two_looks(machine: Machine) -> None:
    made, machine.running = Rate(), OF_HOST
    made.came(WORDS, BUSY_NS)
    looks = iter([0, OF_HOST, OF_HOST // 2 - 1, 1, 0])
    while machine.now_s < 100 + REST_S / 2:
        machine.running = next(looks)
        if not (wait_s := made.wait_s()):
            break
        machine.now_s += wait_s
    assert list(looks) == [0]
    assert made.most_under_way == 1


def test_a_look_is_of_one_rest_alone(machine: Machine) -> None:
    made, machine.running = Rate(), 0
    for _ in range(3):
        made.came(WORDS, BUSY_NS)
        assert made.wait_s()


def test_a_hurry_ends_it(machine: Machine) -> None:
    made, machine.running = Rate(), OF_HOST
    made.came(WORDS, BUSY_NS)
    made.hurry()
    assert not made.wait_s() and made.most_under_way == 1


@pytest.mark.parametrize(("processors", "most"), [(1, 1), (2, 2), (64, 2)])
def test_two_chunks_are_under_way_but_no_more_than_processors(processors: int, most: int) -> None:
    with mock.patch.object(rate.os, "sched_getaffinity", return_value=set(range(processors))):
        made = Rate()
        made.came(WORDS, 0)
        assert made.most_under_way == most


def test_without_a_file_to_look_at_it_has_the_floor(machine: Machine, tmp_path: Path) -> None:
    made = Rate()
    made.came(WORDS, BUSY_NS)
    with mock.patch.object(rate, "_LOAD", tmp_path / "loadavg"):
        assert math.isclose(rested(made, machine), REST_S)


@pytest.mark.parametrize("said", [b"", b"nonsense\n", b"0.00 0.00 0.00 0/0 0\n", b"0.00 0.00 0.00 -/1 0\n"])
def test_a_system_that_does_not_count_has_the_floor(machine: Machine, said: bytes) -> None:
    made = Rate()
    made.came(WORDS, BUSY_NS)
    with mock.patch.object(machine, "read_bytes", return_value=said):
        assert math.isclose(rested(made, machine), REST_S)
