"""The chance of loss: counted and drawn, against `Placement.tolerates` over all sets of hosts."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from ecemb.coding.placement import Placement
from ecemb.tools.cost import Odds, RackBursts, different


def on_hosts(hosts: int, each: int) -> list[int]:
    return [rank // each for rank in range(hosts * each)]


def exact(placement: Placement, hosts: list[int], lost: int) -> float:
    """The part of all sets of `lost` hosts that `tolerates` refuses."""
    sets = list(combinations(range(max(hosts) + 1), lost))
    ranks = ([rank for rank, host in enumerate(hosts) if host in one] for one in sets)
    return sum(not placement.tolerates(one) for one in ranks) / len(sets)


@pytest.mark.parametrize(
    ("n", "k", "hosts", "each"),
    [(4, 3, 9, 1), (4, 3, 7, 3), (6, 4, 9, 2), (5, 2, 9, 1), (2, 1, 8, 2), (6, 4, 6, 2)],
)
def test_chances_over_hosts_are_those_of_the_placement(n: int, k: int, hosts: int, each: int) -> None:
    names = on_hosts(hosts, each)
    placement = Placement.plan(n, k, names)
    odds = Odds(placement, names)
    for lost in range(1, n - k + 3):
        counted = lost <= n - k + 1
        assert odds.chance(lost) == pytest.approx(
            exact(placement, names, lost), rel=1e-9 if counted else 0.05
        )


@pytest.mark.parametrize("spread", ["rank", "rack", "crowded"])
def test_chances_where_the_ring_does_not_repeat_the_hosts(spread: str) -> None:
    names = on_hosts(8, 2)
    if spread == "rank":
        placement = Placement.ranks(4, 2, 16)
    elif spread == "rack":
        placement = Placement.plan(4, 2, [host // 2 for host in names])
    else:
        placement = Placement.interleaved(10, 8, names)
    odds = Odds(placement, names, 2)
    for lost in range(1, 5):
        assert odds.chance(lost) == pytest.approx(exact(placement, names, lost), rel=0.05)
    if spread == "rack":
        assert odds.chance(2, by_rack=True) == odds.chance(4, by_rack=True) == 0
        assert odds.chance(5, by_rack=True) == 1


def test_bursts_in_by_rack() -> None:
    names = on_hosts(12, 1)
    placement = Placement.plan(4, 3, names)
    pairs = [pair for rack in range(3) for pair in combinations(range(4 * rack, 4 * rack + 4), 2)]
    broken = sum(not placement.tolerates(pair) for pair in pairs) / len(pairs)
    assert Odds(placement, names, 4).chance(2, by_rack=True) == pytest.approx(broken, rel=0.05)


def test_bursts_that_one_rack_cannot_hold_go_on_in_the_next() -> None:
    bursts = RackBursts(14, 4)
    spilled = bursts.all_of(6)
    assert len(spilled) == bursts.number_of(6) == 3 * 6
    assert {0, 1, 2, 3, 4, 7} in map(set, spilled.tolist())
    assert {8, 9, 10, 11, 12, 13} in map(set, spilled.tolist())
    assert not any(set(one) <= set(range(4, 8)) | {12, 13} for one in spilled.tolist())
    drawn = bursts.draw(np.random.default_rng(0), 400, 6)
    assert {tuple(sorted(one)) for one in drawn.tolist()} == {tuple(sorted(one)) for one in spilled.tolist()}
    assert sorted(bursts.all_of(14)[0].tolist()) == sorted(bursts.draw(np.random.default_rng(0), 1, 14)[0])


@pytest.mark.parametrize("code", [(4, 3), (5, 3)])
@pytest.mark.parametrize("lost", [3, 4, 5, 7, 9])
def test_racks_in_turn_hold_a_burst_of_as_many_racks_as_parity(code: tuple[int, int], lost: int) -> None:
    """Racks of 4 hosts: a burst of 3 strikes one rack, of 5 two, of 9 three."""
    n, k = code
    hosts = [4 * rack + place for place in range(4) for rack in range(5)]
    placement = Placement.plan(n, k, hosts)
    odds = Odds(placement, hosts, 4)
    ranks = [[hosts.index(host) for host in one] for one in RackBursts(20, 4).all_of(lost).tolist()]
    broken = sum(not placement.tolerates(one) for one in ranks) / len(ranks)
    assert odds.chance(lost, by_rack=True) == pytest.approx(broken)
    assert (broken == 0) == (-(-lost // 4) <= n - k)


def test_rare_sets_are_not_missed() -> None:
    names = on_hosts(400, 1)
    placement = Placement.plan(6, 4, names)
    drawn = Odds(placement, names).broken(different(np.random.default_rng(0), 2_000_000, 4, 400)).mean()
    assert Odds(placement, names).chance(4) == pytest.approx(drawn, rel=0.06)


def test_an_episode_adds_what_is_lost_while_it_lasts() -> None:
    names = on_hosts(10, 1)
    odds = Odds(Placement.plan(3, 2, names), names)
    pair, three, four = (odds.chance(lost) for lost in (2, 3, 4))
    assert odds.episode(1, 0.0) == 0
    assert odds.episode(2, 0.0) == pair
    other, another, third = (0.1 * (1 - part) / (1 - 0.1 * part) for part in (0.1, 0.2, 0.3))
    expected = other * (pair + another * (three - pair + third * (four - three)))
    assert odds.episode(1, 0.1) == pytest.approx(expected)
    assert odds.episode(1, 1.0) == pytest.approx(four, rel=0.02)


def test_different_numbers() -> None:
    for count, size in ((1000, 5), (6, 6), (7, 3)):
        drawn = different(np.random.default_rng(1), 500, size, count)
        assert all(len(set(row)) == size for row in drawn.tolist())
        assert set(drawn.flatten().tolist()) <= set(range(count))
