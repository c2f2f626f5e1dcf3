"""What a worker writes of its end, and what its fork server reads once it has ended."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator

import pytest

from ecemb.launch.stub import MOST_A_MINUTE, MOST_WITHOUT_PROGRESS, Replacements
from ecemb.net import replacement
from ecemb.net.replacement import End


@pytest.fixture(autouse=True)
def no_page_stays() -> Iterator[None]:
    yield
    replacement.begin(None, 0)


def test_a_killed_process_has_left_its_end() -> None:
    page = replacement.new_page()
    assert replacement.read_page(page) == (End.PLAIN, False)
    pid = os.fork()
    if pid == 0:
        replacement.begin(page, 2)
        replacement.join()
        replacement.made_progress()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert replacement.read_page(page) == (End.IF_KILLED, True)
    assert not replacement.is_possible()  # here


@pytest.mark.parametrize(
    ("calls", "end"),
    [
        ((replacement.join, replacement.peer_died), End.PEER_DIED),
        ((replacement.peer_died, replacement.join), End.PEER_DIED),
        ((replacement.join, replacement.leave, replacement.peer_died), End.FINAL),
        ((replacement.peer_died, replacement.leave), End.FINAL),
    ],
)
def test_the_last_word_about_an_end_stands(calls: tuple, end: End) -> None:  # type: ignore[type-arg]
    page = replacement.new_page()
    replacement.begin(page, 0)
    for call in calls:
        call()
    assert replacement.read_page(page)[0] is end
    assert replacement.is_due() == (end is End.PEER_DIED)


def test_without_a_page_nothing_is_replaced() -> None:
    replacement.join()
    replacement.peer_died()
    assert not (replacement.is_possible() or replacement.is_due())


def test_a_page_of_nonsense_is_a_plain_end() -> None:
    page = replacement.new_page()
    page[0] = 200
    assert replacement.read_page(page) == (End.PLAIN, False)


def test_a_server_reads_the_widths_of_its_workers() -> None:
    page, heard = replacement.new_page(), list[int]()
    before = signal.signal(signal.SIGCHLD, lambda number, _: heard.append(number))
    try:
        pid = os.fork()
        if pid == 0:
            replacement.begin(page, 0)
            replacement.write_widths([(256, 256), (64, 4, 4), (256, 256)])
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert replacement.read_widths(page) == {(256, 256), (64, 4, 4)}
    assert signal.SIGCHLD in heard
    assert replacement.read_page(page) == (End.PLAIN, False)


def test_widths_for_which_there_is_no_room_are_left_out() -> None:
    page = replacement.new_page()
    pid = os.fork()
    if pid == 0:
        replacement.begin(page, 0)
        too_wide = replacement.MOST_RECORD_BYTES + 1
        replacement.write_widths([(), (0,), (too_wide,), *((one,) for one in range(1, 1000))])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert replacement.read_widths(page) == {(one,) for one in range(1, 1 + replacement.MOST_WIDTHS // 2)}


@pytest.mark.parametrize("numbers", [(1, 1), (2, 2, 4), (2, 1, 0), (2, 1, 1 << 20), (2, 0, 8), (1 << 30,)])
def test_widths_of_nonsense_are_none(numbers: tuple[int, ...]) -> None:
    page = replacement.new_page()
    for place, number in enumerate(numbers):
        struct.pack_into("<I", page, 4 + 4 * place, number)
    assert replacement.read_widths(page) == set()


def test_deaths_without_a_step_are_few() -> None:
    budget = Replacements()
    assert [budget.spend(0.0, progress=False) for _ in range(5)] == [True] * MOST_WITHOUT_PROGRESS + [
        False
    ] * 2
    budget = Replacements()
    assert [budget.spend(0.0, progress=number == 2) for number in range(7)] == [True] * 6 + [False]


def test_deaths_in_a_minute_are_limited() -> None:
    budget = Replacements()
    assert all(budget.spend(number / 10, progress=True) for number in range(MOST_A_MINUTE))
    assert not budget.spend(59.0, progress=True)
    assert budget.spend(60.05, progress=True)
    assert budget.count == MOST_A_MINUTE + 1
