"""Servers of one process: whose rows fall back, to what, and what it counts as."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baselines.cpr.plan import Held, plan
from baselines.cpr.priority import PRIORITIES
from baselines.cpr.saved import Mark
from baselines.cpr.servers import Servers

SERVERS, STEPS, EVERY = 3, 40, 16
ROWS = {"large": 1000, "small": 4}


class Script:
    """Each step adds 1 to rows that it draws."""

    def __init__(self, priority: str | None, every: int = EVERY) -> None:
        self.tables = {
            name: {"weight": torch.zeros(rows, 2), "sum": torch.zeros(rows)} for name, rows in ROWS.items()
        }
        self.servers = Servers(self.tables, SERVERS, STEPS, every=every, priority=priority)
        self.random = torch.Generator().manual_seed(7)
        self.done = 0

    def train(self, until: int) -> None:
        for step in range(self.done + 1, until + 1):
            for name, tensors in self.tables.items():
                rows = torch.randint(ROWS[name], (50,), generator=self.random).unique()
                self.servers.touch(name, rows)
                for tensor in tensors.values():
                    tensor[rows] += 1
            self.servers.end(step)
        self.done = until

    def rows(self) -> dict[str, Tensor]:
        return {
            f"{name} {kind}": tensor.clone()
            for name, tensors in self.tables.items()
            for kind, tensor in tensors.items()
        }


def same(one: dict[str, Tensor], other: dict[str, Tensor], of: slice | None = None) -> bool:
    return all(torch.equal(one[key][of or slice(None)], other[key][of or slice(None)]) for key in one)


@pytest.mark.parametrize("priority", [None, *PRIORITIES])
def test_only_what_failed_falls_back(priority: str | None) -> None:
    script = Script(priority)
    script.train(EVERY)
    saved = script.rows()
    script.train(21)
    before = script.rows()
    script.servers.fail(21, [1])
    after = script.rows()
    first, middle, last = (slice(0, 334), slice(334, 668), slice(668, 1000))
    large = [{key: one[key] for key in one if "large" in key} for one in (saved, before, after)]
    assert same(large[2], large[1], first) and same(large[2], large[1], last)
    assert not same(large[2], large[1], middle)
    if priority is None:
        assert same(large[2], large[0], middle)
    assert script.servers.pls == pytest.approx((21 - EVERY) / (STEPS * SERVERS))
    script.train(STEPS)  # goes on


@pytest.mark.parametrize("priority", [None, *PRIORITIES])
def test_losses_count_as_they_do_on_real_ranks(priority: str | None) -> None:
    script = Script(priority)
    lost = 0
    for step, failed in ((5, (0,)), (21, (2, 0)), (40, (2,))):
        script.train(step)
        since = step - step % EVERY
        held = [Held(() if server in failed else (step,), Mark(step, since)) for server in range(SERVERS)]
        found = plan(held)
        assert found is not None and found.failed == tuple(sorted(failed))
        lost += sum(found.steps_lost)
        script.servers.fail(step, failed)
    assert lost > 0 and script.servers.pls == pytest.approx(lost / (STEPS * SERVERS))


def test_saves_change_nothing_and_are_counted() -> None:
    ends: list[dict[str, Tensor]] = []
    for priority, saves in ((None, 2), *((name, 20) for name in PRIORITIES)):
        script = Script(priority)
        script.train(STEPS)
        ends.append(script.rows())
        assert script.servers.saves == saves and script.servers.pls == 0
        assert (script.servers.priority_bytes > 0) == (priority is not None)
        assert (script.servers.touched_s > 0) == (priority is not None) and script.servers.saving_s > 0
    assert all(same(ends[0], other) for other in ends[1:])


def test_a_priority_begins_anew_with_what_was_saved() -> None:
    """What failed has no rows that are worth saving, until they change again."""
    script = Script("scar", every=1000)
    script.train(3)
    script.servers.fail(3, [0, 1, 2])
    assert not any(tensor.any() for tensor in script.rows().values())
    script.train(STEPS)
    script.servers.fail(STEPS, [0])
    assert script.servers.pls == pytest.approx((3 * 3 + STEPS) / (STEPS * SERVERS))


def test_no_such_server() -> None:
    with pytest.raises(ValueError, match="different numbers from 0 to 2"):
        Script(None).servers.fail(1, [3])
