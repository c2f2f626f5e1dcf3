"""The plan of a start against an oracle read off docs/protocol.md, 3.3, over every combination of reports.

Up to two ranks, every value of every word is tried. For three and four, reports are taken up to the
order of ranks, and words that the protocol says no rank may look at (the transactions of an arena
that is REBUILDING or FINISHED) have one value; that they don't matter is itself tested on two ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecemb.coding.placement import Placement
from ecemb.errors import InconsistentArenas, JobFinished, StateLost, TooManyErasures
from ecemb.memory.header import NONE, Constants, Header, State
from ecemb.recovery.plan import RecoveryPlan, plan_recovery

ERRORS = (JobFinished, StateLost, TooManyErasures, InconsistentArenas)
FILL = 1
GENERATION_IDS = {1: 101, 2: 102, 3: 103, NONE: NONE}


@dataclasses.dataclass(frozen=True)
class Said:
    """One arena's report, without what is the same on all ranks."""

    state: State
    joined: int = 1
    opened: int = 1
    committed: int = 0
    prepared: int = 0


Reports = Sequence["Said | None"]  # by rank; None: no arena of the rank was found


def constants(rank: int, placement: Placement, arena_id: str | None = None) -> Constants:
    size = placement.world_size
    return Constants(
        job="job",
        arena_id=arena_id or f"{rank:08x}",
        rank=rank,
        world_size=size,
        n=placement.n,
        k=placement.k,
        positions=placement.positions,
        domains=tuple("abcdefghijklmnopqrstuvwx"[:size]),
        layout_hash="",
        layout="",
        block_words=((1,) * placement.k,) * size,
        regions=(),
        fill=FILL,
    )


def lone_constants() -> Constants:
    return Constants("job", "00000000", 0, 1, ("a",), FILL, 2, 1, (0,), "", "", ((1,),), ())


def header(said: Said, fixed: Constants) -> Header:
    fields = dataclasses.asdict(said)
    return Header(fixed, generation_id=GENERATION_IDS[said.joined], **fields)


# --- the oracle: docs/protocol.md, 3.3 in its own words ------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Verdict:
    kind: str
    transaction: int = 0
    survivors: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    broken: bool = False


def stripe(placement: Placement, c: int) -> list[int]:
    """Ranks of class c: data blocks at positions c + r .. c + n - 1, then parity at c .. c + r - 1."""
    r = placement.n - placement.k
    offsets = [*range(r, placement.n), *range(r)]
    return [placement.positions.index((c + o) % placement.world_size) for o in offsets]


def shows(one: Said) -> bool:
    return one.state in (State.LIVE, State.REBUILDING) or (one.state == State.INIT and one.prepared > 0)


def oracle(
    said: Reports, placement: Placement | None, started: bool = False, finished: bool = False
) -> Verdict | type[Exception]:
    there = {rank: one for rank, one in enumerate(said) if one is not None}
    # An INIT arena has a say once another one of its fill is LIVE, REBUILDING or FINISHED; all are of one.
    settled = any(one.state != State.INIT for one in there.values())
    heard = {rank: one for rank, one in there.items() if settled or one.state != State.INIT}
    bar = max((max(one.opened, FILL) for one in heard.values()), default=NONE)
    current = {rank: one for rank, one in heard.items() if one.joined >= bar}
    # A job with a tombstone that is not stale, or whose mark stands, does not train again.
    if finished or any(one.state == State.FINISHED for one in current.values()):
        return JobFinished
    living = any(one.state in (State.LIVE, State.REBUILDING) for one in there.values())
    valid = {}
    for rank, one in current.items():
        if one.state == State.LIVE or (one.state == State.INIT and one.prepared >= 0 and living):
            valid[rank] = one
    # A fresh start only if nothing shows that the job had started: a LIVE or half-rebuilt arena, one that a
    # resume had prepared, or the mark.
    if not valid:
        if any(shows(one) for one in there.values()):
            return TooManyErasures
        return StateLost if started else Verdict("fresh")
    # Section 4: lost are those without a valid arena, T is the smallest prepared.
    lost = tuple(rank for rank in range(len(said)) if rank not in valid)
    if placement is not None:
        for c in range(placement.world_size):
            gone = [rank for rank in stripe(placement, c) if rank in lost]
            if len(gone) > placement.n - placement.k:
                return TooManyErasures
    transaction = min(one.prepared for one in valid.values())
    if transaction < 0 or any(one.committed > transaction for one in valid.values()):
        return InconsistentArenas
    return Verdict(
        kind="memory" if lost else "process",
        transaction=transaction,
        survivors=tuple(sorted(valid)),
        lost=lost,
    )


def outcome(
    headers: Sequence[Header],
    placement: Placement | None,
    started: bool = False,
    finished: bool = False,
) -> RecoveryPlan | type[Exception]:
    try:
        return plan_recovery(headers, placement, started=started, finished=finished)
    except ERRORS as error:
        return type(error)


def matches(got: RecoveryPlan | type[Exception], expected: Verdict | type[Exception]) -> bool:
    if isinstance(got, type) or isinstance(expected, type):
        return got is expected
    return (
        got.kind == expected.kind
        and got.transaction == expected.transaction
        and got.survivors == expected.survivors
        and got.lost == expected.lost
        and got.donor == (expected.survivors[0] if expected.survivors else -1)
    )


def check_rebuilds(plan: RecoveryPlan, placement: Placement) -> None:
    """Every lost block comes once, on its own rank, from k different survivors of its stripe."""
    planned = [(task.stripe_class, task.block, task.rank) for task in plan.rebuild]
    blocks = {
        (c, block, rank)
        for c in range(placement.world_size)
        for block, rank in enumerate(stripe(placement, c))
        if rank in plan.lost
    }
    assert len(planned) == len(blocks)
    assert set(planned) == blocks
    for task in plan.rebuild:
        ranks = stripe(placement, task.stripe_class)
        assert len({block for block, _ in task.sources}) == len(task.sources) == placement.k
        for block, rank in task.sources:
            assert ranks[block] == rank
            assert rank in plan.survivors


class Tried:
    """Plans every combination that it is given and compares; remembers digests over all of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.plans: dict[RecoveryPlan, bytes] = {}
        self.counts: dict[str, int] = {}
        self._headers: dict[tuple[int, Said, Placement | None], Header] = {}

    def headers(self, said: Reports, placement: Placement | None) -> list[Header]:
        found: list[Header] = []
        for rank, one in enumerate(said):
            if one is None:
                continue
            key = (rank, one, placement)
            if key not in self._headers:
                fixed = lone_constants() if placement is None else constants(rank, placement)
                self._headers[key] = header(one, fixed)
            found.append(self._headers[key])
        return found

    def __call__(
        self, said: Reports, placement: Placement | None, started: bool = False, finished: bool = False
    ) -> None:
        headers = self.headers(said, placement)
        got = outcome(headers, placement, started, finished)
        expected = oracle(said, placement, started, finished)
        assert matches(got, expected), (said, placement, started, finished, got, expected)
        self.rng.shuffle(headers)
        assert outcome(headers, placement, started, finished) == got, "depends on the order"
        name = got.__name__ if isinstance(got, type) else got.kind
        self.counts[name] = self.counts.get(name, 0) + 1
        if isinstance(got, type):
            return
        if got.kind == "fresh":
            assert not started
            assert not any(one is not None and shows(one) for one in said)
        if got not in self.plans:
            self.plans[got] = got.digest()
            if placement is not None:
                check_rebuilds(got, placement)

    def check_digests(self) -> None:
        """Equal iff the plans are: as many digests as different plans."""
        assert all(dataclasses.replace(plan).digest() == d for plan, d in self.plans.items())
        assert len(set(self.plans.values())) == len(self.plans)


# --- every combination ------------------------------------------------------------------------


def everything(generations: Iterable[int], transactions: Iterable[int]) -> list[Said | None]:
    """All words of all states, also those that no run could leave behind."""
    generations, transactions = list(generations), list(transactions)
    words = (generations, generations, transactions, transactions)
    return [None, *(Said(state, *w) for state in State for w in itertools.product(*words))]


def distinct(generations: Sequence[int], transactions: Sequence[int]) -> list[Said | None]:
    """As `everything`, without words that the protocol never looks at, and opened <= joined."""
    both = [(j, o) for j in generations for o in generations if o <= j]
    pairs = list(itertools.product(transactions, transactions))
    return [
        None,
        *(Said(State.FINISHED, j, o) for j, o in both),
        *(Said(State.REBUILDING, j, o, NONE, NONE) for j, o in both),
        *(Said(State.INIT, j, o, NONE, p) for j, o in both for p in (NONE, 0, 1)),
        *(Said(State.LIVE, j, o, c, p) for j, o in both for c, p in pairs),
    ]


def codes(world_size: int) -> list[Placement]:
    return [Placement.ranks(n, k, world_size) for n in range(2, world_size + 1) for k in range(1, n)]


def test_one_rank_every_combination(seed: int) -> None:
    tried = Tried(random.Random(seed))
    for one in everything((NONE, 1, 2), (NONE, 0, 1, 2)):
        for started, finished in itertools.product((False, True), repeat=2):
            tried([one], None, started, finished)
    tried.check_digests()
    assert set(tried.counts) == {e.__name__ for e in ERRORS} | {"fresh", "process"}


@pytest.mark.slow
def test_two_ranks_every_combination(seed: int) -> None:
    rng = random.Random(seed)
    tried = Tried(rng)
    (placement,) = codes(2)
    for pair in itertools.combinations_with_replacement(everything((1, 2), (NONE, 0, 1, 2)), 2):
        tried(rng.sample(pair, 2), placement, started=rng.random() < 0.5)
    tried.check_digests()
    assert set(tried.counts) == {e.__name__ for e in ERRORS} | {"fresh", "process", "memory"}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_every_combination_up_to_their_order(world_size: int, seed: int) -> None:
    rng = random.Random(seed)
    tried = Tried(rng)
    reports = distinct((1, 2), (0, 1, 2) if world_size == 3 else (0, 1))
    placements = codes(world_size)
    for said in itertools.combinations_with_replacement(reports, world_size):
        tried(rng.sample(said, world_size), rng.choice(placements), started=rng.random() < 0.5)
    tried.check_digests()
    assert set(tried.counts) == {e.__name__ for e in ERRORS} | {"fresh", "process", "memory"}


def test_four_ranks_of_one_generation_every_transaction_in_every_order(seed: int) -> None:
    """Which rank is ahead must not matter: here ranks keep their order, and survivors three steps."""
    tried = Tried(random.Random(seed))
    placement = Placement.ranks(4, 2, 4)
    live = [Said(State.LIVE, 1, 1, c, p) for c, p in ((1, 1), (1, 2), (2, 2), (2, 3), (0, 1))]
    for said in itertools.product([None, *live], repeat=4):
        tried(said, placement)
    tried.check_digests()


def test_nobody_looks_at_the_transactions_of_arenas_that_are_lost_or_finished() -> None:
    """REBUILDING counts as lost: a half-rebuilt replacement rank's header once looked like a survivor's."""
    (placement,) = codes(2)
    other = Said(State.LIVE, 2, 2, 1, 2)
    for state, joined, opened in itertools.product((State.REBUILDING, State.FINISHED), (1, 2), (1, 2)):
        outcomes = {
            outcome(
                [
                    header(Said(state, joined, opened, c, p), constants(0, placement)),
                    header(other, constants(1, placement)),
                ],
                placement,
            )
            for c, p in itertools.product((NONE, 0, 1, 2, 9), repeat=2)
        }
        assert len(outcomes) == 1


# --- beyond four ranks: sampled -----------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Said | None], Placement, bool]:
    """Mostly what failures leave behind (all within one step), sometimes anything."""
    n = draw(st.integers(2, 6))
    k = draw(st.integers(1, n - 1))
    size = draw(st.integers(n, 12))
    positions = draw(st.permutations(range(size)))
    step = draw(st.integers(0, 3))
    near = st.sampled_from([(step, step), (step, step + 1), (step + 1, step + 1)])
    live = near.map(lambda words: Said(State.LIVE, 2, draw(st.sampled_from((1, 2))), *words))
    anything = st.builds(
        Said,
        st.sampled_from([State.INIT, State.REBUILDING, State.LIVE]),
        st.integers(1, 3),
        st.integers(1, 2),
        st.integers(NONE, 4),
        st.integers(NONE, 4),
    )
    often = [live] * draw(st.integers(4, 20))
    said = draw(st.lists(st.one_of(*often, anything, st.none()), min_size=size, max_size=size))
    return said, Placement(n, k, tuple(positions)), draw(st.booleans())


@settings(max_examples=200, deadline=None)
@given(worlds(), st.randoms(use_true_random=False))
def test_larger_worlds(world: tuple[list[Said | None], Placement, bool], rng: random.Random) -> None:
    said, placement, started = world
    tried = Tried(rng)
    tried(said, placement, started)


def losses(placement: Placement) -> Iterator[tuple[int, ...]]:
    ranks = range(placement.world_size)
    for count in range(1, placement.world_size):
        yield from itertools.combinations(ranks, count)


@pytest.mark.parametrize("placement", [p for size in (3, 4, 5, 6) for p in codes(size)])
def test_every_set_of_lost_ranks(placement: Placement) -> None:
    """Also sets larger than r, as long as no stripe lost more than r."""
    for lost in losses(placement):
        said = [
            None if rank in lost else Said(State.LIVE, 1, 1, 4, 5) for rank in range(placement.world_size)
        ]
        headers = [header(one, constants(rank, placement)) for rank, one in enumerate(said) if one]
        expected = oracle(said, placement)
        got = outcome(headers, placement)
        assert matches(got, expected), (lost, got, expected)
        if not isinstance(got, type):
            check_rebuilds(got, placement)


def test_rebuilding_is_shared_among_the_survivors() -> None:
    """A rebuild draws on many ranks: no rank gives more than a part more than the others."""
    placement = Placement.ranks(4, 2, 12)
    headers = [header(Said(State.LIVE, 1, 1, 4, 4), constants(rank, placement)) for rank in range(12)]
    for lost in range(12):
        plan = plan_recovery(headers[:lost] + headers[lost + 1 :], placement)
        given_by = [sum(rank == r for t in plan.rebuild for _, r in t.sources) for rank in range(12)]
        assert sum(given_by) == 4 * 2  # four lost blocks, two sources each
        assert max(given_by) == 2  # n - 1 neighbours on either side can give; 3 would be lopsided


# --- what the errors say, and what only several arenas of one rank can do -----------------------


def test_too_many_erasures_names_the_ranks_and_the_survivors() -> None:
    placement = Placement.ranks(4, 3, 4)
    headers = [header(Said(State.LIVE), constants(rank, placement)) for rank in (0, 3)]
    with pytest.raises(TooManyErasures, match=r"ranks 1 and 2 is lost.*memory of ranks 0 and 3"):
        plan_recovery(headers, placement)


def test_committed_above_the_decision_stops_and_names_the_ranks() -> None:
    """Section 4: max(committed) > T can't happen; it is an error that stops, not a case."""
    placement = Placement.ranks(2, 1, 2)
    said = [Said(State.LIVE, 1, 1, 1, 1), Said(State.LIVE, 1, 1, 3, 3)]
    headers = [header(one, constants(rank, placement)) for rank, one in enumerate(said)]
    with pytest.raises(InconsistentArenas, match=r"\{1: 3\}.*prepared transaction 1"):
        plan_recovery(headers, placement)


def test_a_started_job_without_arenas_does_not_begin_again() -> None:
    with pytest.raises(StateLost, match="no arena of it is left"):
        plan_recovery([], Placement.ranks(2, 1, 2), started=True)


def test_rows_written_undeclared() -> None:
    """With all memory there, parity is made again; with a loss, nothing may be rebuilt from it."""
    placement = Placement.ranks(3, 2, 3)
    headers = [header(Said(State.LIVE, 1, 1, 4, 4), constants(rank, placement)) for rank in range(3)]
    assert not plan_recovery(headers, placement).encode
    headers[1] = dataclasses.replace(headers[1], undeclared=1)
    assert plan_recovery(headers, placement).encode
    with pytest.raises(InconsistentArenas, match="rows of rank 1 were written without"):
        plan_recovery(headers[:2], placement)


def test_only_stale_arenas_are_not_a_fresh_start() -> None:
    """Section 2.3: a host that was cut off and replaced comes back when the others are gone."""
    placement = Placement.ranks(2, 1, 2)
    stale = header(Said(State.LIVE, 1, 1, 7, 7), constants(0, placement))
    newcomer = header(Said(State.REBUILDING, 2, 2, NONE, NONE), constants(0, placement, "0000ffff"))
    with pytest.raises(TooManyErasures, match="only stale or half-rebuilt arenas are left"):
        plan_recovery([stale, newcomer], placement)
    assert plan_recovery([stale], placement, started=True, opened=1).lost == (1,)
    with pytest.raises(TooManyErasures, match="only stale or half-rebuilt arenas are left"):
        plan_recovery([stale], placement, started=True, opened=2)


def test_a_stale_arena_beside_its_successor_counts_for_nothing() -> None:
    placement = Placement.ranks(2, 1, 2)
    stale = header(Said(State.LIVE, 1, 1, 3, 3), constants(0, placement, "0000ffff"))
    now = [header(Said(State.LIVE, 2, 2, 7, 7), constants(rank, placement)) for rank in (0, 1)]
    for headers in itertools.permutations([stale, *now]):
        assert plan_recovery(headers, placement) == plan_recovery(now, placement)


def test_two_valid_arenas_of_one_rank_are_refused() -> None:
    placement = Placement.ranks(2, 1, 2)
    one, other = (header(Said(State.LIVE), constants(0, placement, x * 8)) for x in "ab")
    with pytest.raises(InconsistentArenas, match="rank 0 .* has two valid arenas"):
        plan_recovery([one, other], placement)


def test_one_arena_reported_twice_is_one_arena() -> None:
    placement = Placement.ranks(2, 1, 2)
    both = [header(Said(State.LIVE), constants(rank, placement)) for rank in (0, 1)]
    assert plan_recovery([*both, *both], placement) == plan_recovery(both, placement)


def test_the_same_generation_begun_twice_is_refused() -> None:
    """Section 2.2: the same g with another id."""
    placement = Placement.ranks(2, 1, 2)
    both = [header(Said(State.LIVE), constants(rank, placement)) for rank in (0, 1)]
    twin = dataclasses.replace(both[1], generation_id=999)
    with pytest.raises(InconsistentArenas, match="started twice"):
        plan_recovery([both[0], twin], placement)


def test_a_crash_while_joining_leaves_an_unknown_id_that_is_no_contradiction() -> None:
    placement = Placement.ranks(2, 1, 2)
    both = [header(Said(State.LIVE), constants(rank, placement)) for rank in (0, 1)]
    joining = dataclasses.replace(both[1], generation_id=NONE)
    assert plan_recovery([both[0], joining], placement) == plan_recovery(both, placement)
