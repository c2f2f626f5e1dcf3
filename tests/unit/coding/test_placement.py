"""Placement's promises, held against the definition of a stripe class written out once more."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from ecemb.coding.placement import Placement, fitting_codes
from ecemb.errors import PlacementError

LARGEST = 16
CODES = [(N, n, k) for N in range(2, LARGEST + 1) for n in range(2, N + 1) for k in range(1, n)]


def shuffled(n: int, k: int, world_size: int, rng: random.Random) -> Placement:
    positions = list(range(world_size))
    rng.shuffle(positions)
    return Placement(n, k, tuple(positions))


def partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as a descending sum of parts <= `largest`."""
    if total == 0:
        yield ()
    for part in range(min(total, largest), 0, -1):
        for rest in partitions(total - part, part):
            yield (part, *rest)


def hosts(counts: tuple[int, ...], rng: random.Random) -> list[str]:
    """Rank -> host, in random order, for hosts with these numbers of ranks."""
    layout = [f"host-{i}" for i, count in enumerate(counts) for _ in range(count)]
    rng.shuffle(layout)
    return layout


def held_blocks(placement: Placement) -> dict[int, list[tuple[int, int]]]:
    """Class -> (rank, block) of everything in it, gathered from what each rank says it holds."""
    held: dict[int, list[tuple[int, int]]] = {c: [] for c in range(placement.world_size)}
    for rank in range(placement.world_size):
        for block in range(placement.k):
            held[placement.stripe_class(rank, block)].append((rank, block))
        for c, q in placement.kept(rank):
            held[c].append((rank, placement.k + q))
    return held


def test_every_view_of_a_class_is_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    for world_size, n, k in CODES:
        placement = shuffled(n, k, world_size, rng)
        r, p = n - k, placement.positions
        assert (placement.r, placement.world_size) == (r, world_size)
        held = held_blocks(placement)
        for c in range(world_size):
            members = placement.members(c)
            assert [p[rank] for rank in members] == [(c + r + i) % world_size for i in range(k)] + [
                (c + q) % world_size for q in range(r)
            ]
            assert sorted(held[c], key=lambda pair: pair[1]) == [(rank, b) for b, rank in enumerate(members)]


@pytest.mark.slow
def test_every_block_has_its_r_keepers_and_every_rank_keeps_r(seed: int) -> None:
    rng = random.Random(seed)
    for world_size, n, k in CODES:
        placement = shuffled(n, k, world_size, rng)
        received: Counter[int] = Counter()
        for rank in range(world_size):
            assert len(placement.kept(rank)) == n - k
            for block in range(k):
                members = placement.members(placement.stripe_class(rank, block))
                keepers = placement.keepers(rank, block)
                assert members[block] == rank
                assert keepers == members[k:]
                assert len({rank, *keepers}) == n - k + 1
                received.update(keepers)
        assert set(received.values()) == {k * (n - k)}  # the load of updates is even


def test_any_r_lost_ranks_are_recoverable(seed: int) -> None:
    rng = random.Random(seed)
    for world_size, n, k in CODES:
        placement = shuffled(n, k, world_size, rng)
        # n ranks hold a class's n blocks, so r lost ranks take r of them at most, whichever ranks:
        assert all(len(set(placement.members(c))) == n for c in range(world_size))
        if world_size <= 8:
            losses = list(itertools.combinations(range(world_size), n - k))
        else:
            losses = [tuple(rng.sample(range(world_size), n - k)) for _ in range(3)]
        assert all(placement.tolerates(lost) for lost in losses)


@pytest.mark.slow
def test_tolerates_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    for world_size, n, k in CODES:
        placement = shuffled(n, k, world_size, rng)
        held = held_blocks(placement)
        if world_size <= 7:
            losses = [
                s for size in range(world_size + 1) for s in itertools.combinations(range(world_size), size)
            ]
        else:
            losses = [tuple(rng.sample(range(world_size), rng.randint(0, world_size))) for _ in range(4)]
            losses.append(tuple(rng.sample(range(world_size), min(n - k + 1, world_size))))
        for lost in losses:
            gone = {c: tuple(sorted(b for rank, b in blocks if rank in lost)) for c, blocks in held.items()}
            broken = tuple(c for c, blocks in gone.items() if len(blocks) > n - k)
            assert placement.erasures(lost) == {c: blocks for c, blocks in gone.items() if blocks}
            assert placement.broken(lost) == broken
            assert placement.tolerates(lost) == (not broken)


def test_a_rank_lost_twice_is_lost_once() -> None:
    placement = Placement.ranks(4, 3, 6)
    assert placement.tolerates([2, 2])
    assert placement.erasures([2, 2]) == placement.erasures([2])


def test_plan_places_every_layout_that_can_be_placed(seed: int) -> None:
    rng = random.Random(seed)
    for world_size in range(2, LARGEST + 1):
        for counts in partitions(world_size, world_size):
            domains = hosts(counts, rng)
            longest = world_size // counts[0]
            for n in range(2, longest + 1):
                assert Placement.plan(n, n - 1, domains).spread(domains), (counts, n)
            if longest < world_size:
                with pytest.raises(PlacementError, match="failure domains"):
                    Placement.plan(longest + 1, 1, domains)


def test_what_plan_refuses_is_impossible() -> None:
    for world_size in range(2, 8):
        for counts in partitions(world_size, world_size):
            domains = [host for host, count in enumerate(counts) for _ in range(count)]
            for n in range(world_size // counts[0] + 1, world_size + 1):
                every_order = itertools.permutations(
                    range(1, world_size)
                )  # rank 0 stays: the ring can be turned
                assert not any(Placement(n, 1, (0, *rest)).spread(domains) for rest in every_order)


def test_any_r_lost_domains_are_recoverable_when_spread(seed: int) -> None:
    rng = random.Random(seed)
    for world_size in range(2, LARGEST + 1):
        every = list(partitions(world_size, world_size // 2))
        for counts in rng.sample(every, min(len(every), 25)):
            domains = hosts(counts, rng)
            n = rng.randint(2, world_size // counts[0])
            k = rng.randint(1, n - 1)
            placement = Placement.plan(n, k, domains)
            names = sorted(set(domains))
            for _ in range(5):
                gone = rng.sample(names, n - k)
                assert placement.tolerates([rank for rank, host in enumerate(domains) if host in gone])


def test_equal_hosts_take_turns() -> None:
    assert Placement.plan(3, 2, ["a", "a", "b", "b", "c", "c"]).positions == (0, 3, 1, 4, 2, 5)
    assert Placement.plan(4, 3, ["a", "b", "c", "d"]) == Placement.ranks(4, 3, 4)


def test_plan_is_the_same_whatever_the_names() -> None:
    layout = [2, 0, 1, 1, 0, 2, 3]
    named = [f"host-{i}" for i in layout]
    assert Placement.plan(3, 2, layout).positions == Placement.plan(3, 2, named).positions


def test_plan_scales_to_256_ranks_on_unequal_hosts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        counts: list[int] = []
        largest = rng.randint(1, 32)
        while sum(counts) < 256:
            counts.append(min(rng.randint(1, largest), 256 - sum(counts)))
        domains = hosts(tuple(counts), rng)
        n = 256 // max(counts)
        assert Placement.plan(n, 1, domains).spread(domains)


def test_spread_is_false_when_a_stripe_meets_a_domain_twice() -> None:
    assert not Placement.ranks(2, 1, 4).spread(["a", "a", "b", "b"])
    assert not Placement.ranks(2, 1, 4).spread(["a", "b", "c", "a"])  # around the ring's end
    assert Placement.ranks(2, 1, 4).spread(["a", "b", "a", "b"])


def test_fitting_codes_are_the_ones_that_plan_accepts() -> None:
    assert fitting_codes(range(4)) == [(4, 3), (4, 2), (4, 1), (3, 2), (3, 1), (2, 1)]
    assert fitting_codes(["a", "a", "b", "c", "c", "d"]) == [(3, 2), (3, 1), (2, 1)]
    assert fitting_codes(["a", "a", "b"]) == []
    assert fitting_codes([]) == []
    assert fitting_codes(range(300))[0] == (256, 255)


def test_too_few_ranks_is_an_error_that_names_codes_that_fit() -> None:
    with pytest.raises(
        PlacementError,
        match=r"\(6, 4\) needs n = 6 ranks.* are 4; codes that fit here: \(4, 2\), \(4, 3\); or start more",
    ):
        Placement.ranks(6, 4, 4)
    with pytest.raises(PlacementError, match=r"there are 1; no code fits here"):
        Placement.ranks(2, 1, 1)
    with pytest.raises(PlacementError, match=r"there are 2; codes that fit here: \(2, 1\); or start more"):
        Placement.plan(4, 1, ["a", "b"])
    with pytest.raises(
        PlacementError,
        match=r"are 4; codes that fit here: \(2, 1\); or \(6, 4\) fits on 6 hosts with 2 ranks on each",
    ):
        Placement.plan(6, 4, ["a", "a", "b", "b"])


def test_a_crowded_domain_is_an_error_that_names_it_and_codes_that_fit() -> None:
    domains = ["a", "a", "a", "b", "c", "d", "e", "f"]
    with pytest.raises(
        PlacementError,
        match=r"floor\(8 / 4\) = 2 of the 8 ranks, but 'a' holds 3; codes that fit here: \(2, 1\); "
        r"\(4, 3\) fits on 4 hosts with at most 2 of 8 ranks on each, or on 4 hosts with 3 ranks on each",
    ):
        Placement.plan(4, 3, domains)
    crowded = [f"h{i // 4}" for i in range(24)]
    with pytest.raises(
        PlacementError,
        match=r"'h3' holds 4 and 2 more do; codes that fit here: \(6, 3\), \(6, 4\), \(6, 5\)",
    ):
        Placement.plan(8, 5, crowded)
    with pytest.raises(
        PlacementError, match=r"no code fits here; \(2, 1\) fits on 2 hosts with at most 1 of 2"
    ):
        Placement.plan(2, 1, ["a", "a"])


def test_what_a_refusal_names_is_accepted(seed: int) -> None:
    """Codes for these hosts, and hosts for this code, with as many ranks in all or on each."""
    rng = random.Random(seed)
    refused = 0
    for world_size in range(2, LARGEST + 1):
        for counts in rng.sample(every := list(partitions(world_size, world_size)), min(len(every), 25)):
            domains = hosts(counts, rng)
            n = rng.randint(2, world_size)
            try:
                Placement.plan(n, rng.randint(1, n - 1), domains)
            except PlacementError as error:
                refused += 1
                text = str(error).replace("no code fits here", "codes that fit here: ")
                codes, fits = text.split("codes that fit here: ")[1].split("; ")
                for a, b in re.findall(r"\((\d+), (\d+)\)", codes):
                    Placement.plan(int(a), int(b), domains)
                [(number, at_most, total)] = re.findall(
                    r"(\d+) hosts with at most (\d+) of (\d+) ranks", fits
                )
                assert int(total) == world_size <= int(number) * int(at_most)
                Placement.plan(n, 1, [rank // int(at_most) for rank in range(world_size)])
                for number, each in re.findall(r"(\d+) hosts with (\d+) ranks on each", fits):
                    Placement.plan(n, 1, [host for host in range(int(number)) for _ in range(int(each))])
    assert refused > 20


def test_a_domain_is_fragile_if_its_loss_alone_is_too_much() -> None:
    spread = Placement.plan(3, 2, "aabbcc")
    assert spread.fragile("aabbcc") == []
    assert spread.fragile("aabbaa") == ["a"]  # a new host, "a", took over c's ranks, too
    assert spread.fragile("abcdef") == []
    assert Placement.ranks(4, 2, 6).fragile("aaabcc") == ["a"]


def test_interleaved_ranks_survive_a_host_where_fewer_than_n_hosts_are_there() -> None:
    domains = "aaaabbbbcccc"
    with pytest.raises(PlacementError, match="may hold more than"):
        Placement.plan(6, 4, domains)
    assert Placement.ranks(6, 4, 12).fragile(domains) == ["a", "b", "c"]
    assert Placement.interleaved(6, 4, domains).fragile(domains) == []
    assert Placement.interleaved(6, 5, domains).fragile(domains) == ["a", "b", "c"]
    assert Placement.interleaved(3, 2, domains) == Placement.plan(3, 2, domains)
    assert Placement.interleaved(3, 2, "aaa") == Placement.ranks(3, 2, 3)
    with pytest.raises(PlacementError, match="there are 0"):
        Placement.interleaved(2, 1, [])


def _small_placements() -> Iterator[tuple[Placement, tuple[int, ...]]]:
    """Every code on up to 6 ranks, on every layout of their hosts."""
    for size in range(2, 7):
        layouts = {hosts for hosts in itertools.product(range(size), repeat=size) if _in_order(hosts)}
        for n in range(2, size + 1):
            for k, hosts in itertools.product(range(1, n), sorted(layouts)):
                yield Placement.interleaved(n, k, hosts), hosts


def _in_order(hosts: tuple[int, ...]) -> bool:
    """Whether names of hosts appear as 0, 1, 2, ...: other names make no other layout."""
    return all(host <= max(hosts[:i], default=-1) + 1 for i, host in enumerate(hosts))


@pytest.mark.slow
def test_slices_outlive_whatever_parity_tolerates() -> None:
    for placement in {placement for placement, _ in _small_placements()}:
        slices = [set(placement.slice_holders(c)) for c in range(placement.world_size)]
        assert all(len(holders) == placement.r + 1 for holders in slices)
        for count in range(placement.world_size + 1):
            for lost in itertools.combinations(range(placement.world_size), count):
                if placement.tolerates(lost):
                    assert all(holders.difference(lost) for holders in slices), (placement, lost)


def test_slices_outlive_any_r_lost_hosts_when_stripes_are_spread() -> None:
    for placement, hosts in _small_placements():
        if placement.spread(hosts):
            slices = [{hosts[rank] for rank in placement.slice_holders(c)} for c in range(len(hosts))]
            assert all(len(holding) == placement.r + 1 for holding in slices), (placement, hosts)


def test_every_rank_holds_r_plus_1_slices() -> None:
    for placement in {placement for placement, _ in _small_placements()}:
        for rank in range(placement.world_size):
            held = [c for c in range(placement.world_size) if rank in placement.slice_holders(c)]
            assert placement.held_slices(rank) == tuple(held)
            assert len(held) == placement.r + 1
