"""Who survived, and where all go on from."""

from __future__ import annotations

import pytest

from baselines.cpr.plan import Held, Plan, SavesLost, plan
from baselines.cpr.saved import Mark


def held(*steps: int, saved: int | None = 4, since: int | None = None) -> Held:
    return Held(steps, None if saved is None else Mark(saved, saved if since is None else since))


def test_nothing_has_begun_until_all_have_saved() -> None:
    assert plan([held(saved=None), held(saved=None)]) is None
    assert plan([held(0, saved=None), held(saved=0), held(saved=None)]) is None
    assert plan([held(0, saved=0), held(saved=0)]) == Plan(0, 0, (1,), (0,))


def test_failed_ranks_go_back_alone() -> None:
    assert plan([held(8, 9), held(), held(8, 9)]) == Plan(9, 0, (1,), (5,))
    assert plan([held(saved=8, since=2), held(9, 8), held()]) == Plan(9, 1, (0, 2), (7, 5))
    assert plan([held(8, 9), held(8, 9)]) == Plan(9, 0, (), ())


def test_survivors_meet_at_the_step_that_all_have_ended() -> None:
    assert plan([held(8, 9), held(7, 8), held()]) == Plan(8, 0, (2,), (4,))
    assert plan([held(8, 9), held(8)]) == Plan(8, 0, (), ())


def test_what_was_left_over_does_not_count() -> None:
    assert plan([held(2, 3), held(8, 9)]) == Plan(9, 1, (0,), (5,))


def test_if_nobody_survives_all_take_up_what_they_saved() -> None:
    assert plan([held(saved=8), held(saved=4)]) == Plan(8, 0, (0, 1), (0, 4))
    assert plan([held(saved=4), held(saved=8)]) == Plan(4, 0, (0, 1), (0, 0))


def test_lost_saves_are_no_start_from_nothing() -> None:
    with pytest.raises(SavesLost, match=r"ranks \[1\].*no files.*step 9"):
        plan([held(8, 9), held(saved=None)])
    with pytest.raises(SavesLost, match=r"step 8 comes next, and ranks \[0\] hold only"):
        plan([held(9), held(7, 8)])
