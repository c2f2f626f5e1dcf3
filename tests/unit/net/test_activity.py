"""Where a process is, in words."""

from __future__ import annotations

import threading

import pytest

from ecemb.net.error_file import Activity, placed


def test_waits_of_the_main_thread_count_and_no_others() -> None:
    where = Activity()
    assert where.waited_s == 0
    with where.waiting():
        first = where.waited_s
        with where.waiting():  # within another one
            assert where.waited_s >= first
        assert where.waited_s > 0
    assert where.waited_s == 0
    seen: list[float] = []

    def beside() -> None:
        with where.waiting():
            seen.append(where.waited_s)

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert seen == [0]


class Guard:
    next_step = 7

    def __init__(self) -> None:
        self._activity = Activity()

    @placed
    def save(self, path: str, *, keep: int) -> str:
        """Saves."""
        if keep < 1:
            raise ValueError(self._activity.place)
        return f"{path} {keep} {self._activity.place}"


def test_a_call_is_a_place_while_it_runs() -> None:
    guard = Guard()
    assert guard.save("a", keep=2) == "a 2 in guard.save(), before step 7"
    assert guard._activity.place == "before ecemb.protect()"
    with pytest.raises(ValueError, match=r"in guard.save\(\), before step 7"):
        guard.save("a", keep=0)
    assert guard._activity.place == "before ecemb.protect()"
    assert guard.save.__doc__ == "Saves."
