"""Which headers count, and for what: every pair of reports against the rule in other words; situations."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from ecemb.errors import InconsistentArenas
from ecemb.memory.classify import classify
from ecemb.memory.header import NONE, Header, State
from support.arena_holders import constants

OLD, NEW = 1, 2
"""Fills: the history of the fresh start, and that of a later resume."""
RANKS = {
    fill: tuple(constants(rank=rank, arena_id=f"{fill}{rank}" * 4, fill=fill) for rank in range(4))
    for fill in (OLD, NEW)
}
TWIN = constants(rank=0, arena_id="aaaaaaaa")
LIVE, INIT, REBUILDING, FINISHED = State.LIVE, State.INIT, State.REBUILDING, State.FINISHED


def report(rank: int = 0, state: State = LIVE, fill: int = OLD, **words: int) -> Header:
    words = {"joined": 7, "generation_id": 70, "opened": 7, "committed": 3, "prepared": 3, **words}
    return Header(RANKS[fill][rank], state, **words)


def survivors(reports: list[Header], opened: int = NONE) -> list[Header]:
    return list(classify(reports, opened).survivors)


def says(headers: tuple[Header, ...]) -> Any:
    """The rule of docs/protocol.md, 3.2 in other words: indices by what they count for, or the error."""
    indices = range(len(headers))
    fills = [one.constants.fill for one in headers]
    settled = [
        any(f == fill and other.state != INIT for f, other in zip(fills, headers, strict=True))
        for fill in fills
    ]
    silent = {i for i in indices if headers[i].state == INIT and not settled[i]}
    opened = max((max(headers[i].opened, fills[i]) for i in indices if i not in silent), default=NONE)
    current = {i for i in indices if i not in silent and not headers[i].joined < opened}
    for i, j in itertools.combinations(sorted(current), 2):
        generations = {headers[i].joined, headers[j].joined}
        ids = {headers[i].generation_id, headers[j].generation_id}
        if len(generations) == 1 and len(ids) == 2 and NONE not in generations | ids:
            return InconsistentArenas
    chosen = {i for i in current if headers[i].state == LIVE}
    living = {fills[i] for i in indices if headers[i].state in (LIVE, REBUILDING)}
    prepared = {i for i in current if headers[i].state == INIT and headers[i].prepared != NONE}
    chosen |= {i for i in prepared if fills[i] in living}
    newest = max((fills[i] for i in chosen), default=NONE)
    older = {fills[i] for i in chosen} - {newest}
    if any(fills[i] in older and headers[i].opened >= newest for i in indices if i not in silent):
        return InconsistentArenas
    chosen = {i for i in chosen if fills[i] == newest}
    if len({headers[i].constants.rank for i in chosen}) < len(chosen):
        return InconsistentArenas
    shows = [i for i in indices if headers[i].state in (LIVE, REBUILDING)]
    shows = sorted({*shows, *(i for i in indices if headers[i].state == INIT and headers[i].prepared > 0)})
    return (
        sorted(chosen),
        sorted(
            i for i in current if headers[i].state == FINISHED and all(fills[i] >= fills[j] for j in shows)
        ),
        shows,
        sorted(i for i in silent if headers[i].prepared == NONE),  # of four ranks, two are never a whole fill
    )


@pytest.mark.slow
def test_every_pair_of_reports() -> None:
    words = itertools.product(State, (NONE, 7, 8), (NONE, 1), (NONE, 7, 8), (NONE, 0, 1))
    fields = [(state, *rest) for state, *rest in words]
    owners = ((RANKS[OLD][0], RANKS[OLD][1]), (RANKS[OLD][0], TWIN), (RANKS[OLD][0], RANKS[NEW][1]))
    seen: set[str] = set()
    for (first, second), (a, b) in itertools.product(owners, itertools.product(fields, fields)):
        pair = tuple(
            Header(owner, state, joined=joined, generation_id=id_, opened=opened, prepared=last)
            for owner, (state, joined, id_, opened, last) in ((first, a), (second, b))
        )
        try:
            got = classify(pair)
            result: Any = tuple(
                [pair.index(one) for one in part]
                for part in (got.survivors, got.finished, got.evidence, got.hollow)
            )
        except InconsistentArenas:
            result = InconsistentArenas
        assert result == says(pair), pair
        seen.add(str(result if isinstance(result, type) else result[0]))
    assert seen == {"[]", "[0]", "[1]", "[0, 1]", str(InconsistentArenas)}


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([report(0), report(1)], [0, 1], id="all live"),
        pytest.param([report(0), report(1, REBUILDING)], [0], id="a newcomer, half rebuilt"),
        pytest.param([report(0), report(1, FINISHED)], [0], id="a tombstone"),
        pytest.param([report(0, joined=6, opened=6), report(1)], [1], id="cut off and replaced"),
        pytest.param([report(0, joined=6, opened=6), report(1, opened=6)], [0, 1], id="not opened yet"),
        pytest.param(
            [report(0, joined=6, opened=6), report(1, REBUILDING, joined=7, opened=7)],
            [],
            id="a newcomer opened what the survivor never joined",
        ),
        pytest.param([report(0), report(1, INIT, prepared=0)], [0, 1], id="crash between LIVE and LIVE"),
        pytest.param(
            [report(0, joined=8, opened=1), report(1, fill=NEW, joined=2, opened=2)],
            [1],
            id="joined after a later history began, and not opened",
        ),
        pytest.param([report(0), report(1, INIT, prepared=NONE)], [0], id="INIT, and not prepared"),
        pytest.param([report(0, INIT, prepared=0), report(1, INIT, prepared=0)], [], id="nobody is LIVE"),
        pytest.param(
            [report(0, INIT, prepared=3), report(1, REBUILDING)], [0], id="prepared beside a replacement"
        ),
        pytest.param(
            [report(0), report(1), report(2, INIT, NEW, joined=8, opened=8), report(3, INIT, NEW, joined=8)],
            [0, 1],
            id="a resume that was cut off before its first LIVE",
        ),
        pytest.param(
            [report(0), report(1), report(2, LIVE, NEW, joined=8, opened=8), report(3, INIT, NEW, joined=8)],
            [2, 3],
            id="a resume that was cut off after its first LIVE",
        ),
    ],
)
def test_situations(reports: list[Header], expected: list[int]) -> None:
    assert survivors(reports) == [reports[i] for i in expected]


def test_a_tombstone_counts_only_beside_those_it_was_a_member_with() -> None:
    yesterday = report(2, FINISHED, joined=6, opened=6)
    assert classify([yesterday]).finished == (yesterday,)
    assert not classify([yesterday, report(0)]).finished
    assert not classify([yesterday], opened=7).finished
    assert not classify([yesterday, report(0, INIT, NEW, prepared=3)]).finished  # a resume of today's
    assert not classify([yesterday, report(0, REBUILDING, NEW, joined=NONE, opened=NONE)]).finished
    closing = report(1, FINISHED)
    assert classify([yesterday, report(0), closing]).finished == (closing,)


def test_what_shows_that_the_job_had_started() -> None:
    shows = [report(0), report(1, REBUILDING), report(2, INIT, NEW, prepared=1)]
    silent = [report(3, INIT, prepared=0), report(3, FINISHED, joined=6)]
    assert classify([*shows, *silent]).evidence == tuple(shows)


def test_hollow_is_what_can_never_be_of_use() -> None:
    def filled(prepared: int, ranks: int = 4) -> list[Header]:
        return [report(rank, INIT, NEW, prepared=prepared, committed=NONE) for rank in range(ranks)]

    old = [report(0, joined=6, opened=6)]
    for others in ([], old):
        assert classify([*others, *filled(NONE, 2)]).hollow == tuple(filled(NONE, 2))
        assert classify([*others, *filled(0)]).hollow == tuple(filled(0))  # no LIVE one can be elsewhere
        assert (
            classify([*others, *filled(0, 3)]).hollow == ()
        )  # the fourth may be LIVE, on a host that is away
        assert classify([*others, *filled(2)]).hollow == ()  # they show that the job had started
    assert classify([report(0, LIVE, NEW), *filled(0)[1:]]).hollow == ()


def test_the_store_knows_of_a_generation_that_no_arena_is_left_of() -> None:
    both = [report(0), report(1)]
    assert survivors(both, opened=7) == both
    assert survivors(both, opened=8) == []


def test_the_order_is_kept() -> None:
    assert survivors([report(1), report(0)]) == [report(1), report(0)]


def test_one_generation_with_two_ids() -> None:
    reports = [report(0, generation_id=0xA), report(1, generation_id=0xB)]
    with pytest.raises(InconsistentArenas, match="generation 7 .* ids a and b .*rank 1"):
        classify(reports)
    assert survivors([*reports, report(1, REBUILDING, joined=8, opened=8)]) == []  # both stale


def test_survivors_of_two_histories() -> None:
    reports = [report(0), report(1, LIVE, NEW)]
    with pytest.raises(
        InconsistentArenas, match=r"histories, which began in generations 1 .*0 .* and 2 .*rank 1"
    ):
        classify(reports)
    assert survivors([report(0), report(1, LIVE, NEW, joined=8, opened=8)]) == [
        report(1, LIVE, NEW, joined=8, opened=8)
    ]


def test_two_arenas_of_one_rank() -> None:
    twin = dataclasses.replace(report(0), constants=TWIN)
    with pytest.raises(InconsistentArenas, match="rank 0 .* 10101010 and aaaaaaaa"):
        classify([report(0), twin])
    assert survivors([report(0), dataclasses.replace(twin, state=REBUILDING)]) == [report(0)]


def test_a_crash_while_joining_is_no_contradiction() -> None:
    before, after = {"joined": 7, "generation_id": 70}, {"joined": 8, "generation_id": 80}
    stores = [before, {"joined": 7, "generation_id": NONE}, {"joined": 8, "generation_id": NONE}, after]
    for one, other in itertools.product(stores, stores):
        pair = [report(0, **{"opened": 7, **one}), report(1, **{"opened": 7, **other})]
        assert survivors(pair) == pair
