"""A call shares its work among threads, and is over when all of them are done."""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest

from ecemb.kernels import threads as threads_module
from ecemb.kernels.threads import Team

WAIT_S = 300


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("items", [0, 1, 2, 6, 7, 100])
def test_every_item_is_some_threads(threads: int, items: int) -> None:
    parts: list[tuple[int, int]] = []
    Team(threads, least_bytes=1).share(items, 1, lambda first, stop: parts.append((first, stop)))
    assert [item for first, stop in sorted(parts) for item in range(first, stop)] == list(range(items))
    assert len(parts) == max(1, min(threads, items))


def test_what_is_small_stays_in_this_thread() -> None:
    seen: set[int] = set()
    work = Team(3)
    for items in (1, threads_module.LEAST_BYTES // 8, 2 * threads_module.LEAST_BYTES // 8 - 1):
        work.share(items, 8, lambda first, stop: seen.add(threading.get_ident()))
    assert seen == {threading.get_ident()}
    work.share(2 * threads_module.LEAST_BYTES // 8, 8, lambda first, stop: seen.add(threading.get_ident()))
    assert len(seen) == 2


def test_an_error_of_any_part_is_raised_when_all_are_done() -> None:
    done: list[int] = []

    def act(first: int, stop: int) -> None:
        if first == 0:
            raise ValueError("the caller's part")
        time.sleep(0.05)
        done.append(first)

    with pytest.raises(ValueError, match="the caller's part"):
        Team(2, least_bytes=1).share(2, 1, act)
    assert done in ([], [1])  # not begun, or done

    def other(first: int, stop: int) -> None:
        if first:
            raise ValueError("another's part")

    with pytest.raises(ValueError, match="another's part"):
        Team(2, least_bytes=1).share(2, 1, other)


@pytest.mark.parametrize("then", [KeyboardInterrupt, TimeoutError, SystemExit, MemoryError])
@pytest.mark.parametrize("first", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_waits_for_what_has_begun(first: type[BaseException], then: type[BaseException]) -> None:
    """So do those that follow, whatever their handlers raise. The first is raised."""
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def act(start: int, stop: int) -> None:
        if start:
            begun.set()
            assert go_on.wait(WAIT_S)
            done.set()
        else:
            assert begun.wait(WAIT_S)

    waits = [then("again"), then("again"), first("first")]
    real = threads_module.wait

    def interrupted(*args: object) -> object:
        if waits:
            raise waits.pop()
        go_on.set()
        return real(*args)  # pyright: ignore

    with mock.patch.object(threads_module, "wait", interrupted), pytest.raises(BaseException) as raised:
        Team(2, least_bytes=1).share(2, 1, act)
    whole = done.is_set()
    go_on.set()
    assert whole, "the other part was still at work"
    assert (type(raised.value), str(raised.value)) == (first, "first")
