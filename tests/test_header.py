"""The header's bytes, and the rule that says which arenas count as survivors."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from holders import constants

from ecemb import header
from ecemb.errors import ArenaDamaged, ConfigurationError, InconsistentArenas
from ecemb.header import NONE, WORDS, Constants, Header, State, valid

RANKS = (constants(rank=0, arena_id="00000000"), constants(rank=1, arena_id="11111111"))
TWIN = constants(rank=0, arena_id="22222222")
LIVE, INIT, REBUILDING, FINISHED = State.LIVE, State.INIT, State.REBUILDING, State.FINISHED


def report(rank: int = 0, state: State = LIVE, **words: int) -> Header:
    words = {"joined": 7, "generation_id": 70, "opened": 7, "committed": 3, "prepared": 3, **words}
    return Header(RANKS[rank], state, **words)


class TestConstants:
    def test_there_and_back(self) -> None:
        one = constants(layout='{"tables": ["\u00fc\\"\\\\"]}', domains=("a", "b-1", "ü", ""))
        assert Constants.decode(one.encode()) == one
        assert hash(Constants.decode(one.encode())) == hash(one)

    def test_equal_constants_are_equal_bytes(self) -> None:
        one = constants(arena_id="0123abcd")
        fields = dataclasses.asdict(one)
        again = Constants(**dict(reversed(fields.items())))
        assert one.encode() == again.encode()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("arena_id", "xyz"),
            ("arena_id", "0123ABCD"),
            ("arena_id", "../../../etc"),
            ("rank", 4),
            ("rank", -1),
            ("world_size", 0),
            ("n", 3),
            ("n", 257),
            ("k", 0),
            ("positions", (0, 1, 2, 2)),
            ("positions", (0, 1, 2)),
            ("domains", ("a",)),
            ("block_words", ((1, 2, 3),) * 3),
            ("block_words", ((1, 2),) * 4),
            ("block_words", ((1, 2, -3),) * 4),
            ("regions", (("a", 1), ("a", 2))),
            ("regions", (("a", -1),)),
            ("regions", tuple((str(i), 1) for i in range(257))),
        ],
    )
    def test_rules(self, name: str, value: object) -> None:
        with pytest.raises(ConfigurationError, match="an arena's"):
            constants(**{name: value})

    def test_a_world_of_one(self) -> None:
        one = constants(world_size=1, positions=(0,), domains=("a",), block_words=((1, 2, 3),))
        assert Constants.decode(one.encode()) == one

    @pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b"null", b"\xff", b'{"job": 1}'])
    def test_what_is_none(self, payload: bytes) -> None:
        with pytest.raises(ArenaDamaged):
            Constants.decode(payload)

    def test_wrong_types_and_names(self) -> None:
        fields = json.loads(constants().encode())
        for change in ({"rank": "0"}, {"more": 1}, {"regions": [1]}, {"block_words": 3}):
            with pytest.raises(ArenaDamaged):
                Constants.decode(json.dumps({**fields, **change}).encode())

    def test_ids_are_random_and_allowed(self) -> None:
        ids = {header.new_arena_id() for _ in range(100)}
        assert len(ids) == 100
        assert all(constants(arena_id=one).arena_id == one for one in ids)


class TestSpans:
    def test_regions_do_not_meet(self) -> None:
        regions = (("a", 1), ("b", 0), ("c", 4096), ("d", 4097), ("e", 5))
        spans, total = header.spans(constants(regions=regions), 5000)
        assert spans == {
            "a": (16384, 1),
            "b": (20480, 0),
            "c": (20480, 4096),
            "d": (24576, 4097),
            "e": (32768, 5),
        }
        assert total == 36864

    def test_all_words_and_reserved_sizes_fit(self) -> None:
        assert len(set(WORDS)) == len(WORDS) <= header.RESERVED
        last = header.WORDS_OFFSET + 8 * (header.RESERVED + header.MAX_REGIONS)
        assert last <= header.CONSTANTS_OFFSET


def says(headers: tuple[Header, ...]) -> Any:
    """The rule of protocol.md once more, in other words: the survivors' indices, or the error."""
    opened = max(one.opened for one in headers)
    current = {i for i, one in enumerate(headers) if not one.joined < opened}
    for i, j in itertools.combinations(sorted(current), 2):
        generations = {headers[i].joined, headers[j].joined}
        ids = {headers[i].generation_id, headers[j].generation_id}
        if len(generations) == 1 and len(ids) == 2 and NONE not in generations | ids:
            return InconsistentArenas
    live = {i for i in current if headers[i].state == LIVE}
    filled = {i for i in current if headers[i].state == INIT and headers[i].prepared != NONE}
    chosen = live | filled if live else live
    if len({headers[i].constants.rank for i in chosen}) < len(chosen):
        return InconsistentArenas
    return sorted(chosen)


class TestValid:
    def test_every_pair_of_reports(self) -> None:
        words = itertools.product(State, (NONE, 7, 8), (NONE, 1), (NONE, 7, 8), (NONE, 0))
        fields = [(state, *rest) for state, *rest in words]
        owners = ((RANKS[0], RANKS[1]), (RANKS[0], TWIN))
        seen: set[str] = set()
        for (first, second), (a, b) in itertools.product(owners, itertools.product(fields, fields)):
            pair = tuple(
                Header(owner, state, joined=joined, generation_id=id_, opened=opened, prepared=last)
                for owner, (state, joined, id_, opened, last) in ((first, a), (second, b))
            )
            try:
                result: Any = [pair.index(one) for one in valid(pair)]
            except InconsistentArenas:
                result = InconsistentArenas
            assert result == says(pair), pair
            seen.add(str(result))
        assert seen == {"[]", "[0]", "[1]", "[0, 1]", str(InconsistentArenas)}

    @pytest.mark.parametrize(
        ("reports", "survivors"),
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
            pytest.param([report(0), report(1, INIT, prepared=NONE)], [0], id="INIT, and not prepared"),
            pytest.param([report(0, INIT, prepared=0), report(1, INIT, prepared=0)], [], id="nobody is LIVE"),
            pytest.param(
                [report(0, joined=6, opened=6), report(1, INIT, prepared=0)], [], id="the LIVE one is stale"
            ),
        ],
    )
    def test_situations(self, reports: list[Header], survivors: list[int]) -> None:
        assert valid(reports) == [reports[i] for i in survivors]

    def test_the_store_knows_of_a_generation_that_no_arena_is_left_of(self) -> None:
        assert valid([report(0), report(1)], opened=7) == [report(0), report(1)]
        assert valid([report(0), report(1)], opened=8) == []

    def test_the_order_is_kept(self) -> None:
        assert valid([report(1), report(0)]) == [report(1), report(0)]

    def test_one_generation_with_two_ids(self) -> None:
        reports = [report(0, generation_id=0xA), report(1, generation_id=0xB)]
        with pytest.raises(InconsistentArenas, match="generation 7 .* ids a and b .*rank 1"):
            valid(reports)
        assert valid([*reports, report(1, REBUILDING, joined=8, opened=8)]) == []  # both stale

    def test_two_arenas_of_one_rank(self) -> None:
        twin = dataclasses.replace(report(0), constants=TWIN)
        with pytest.raises(InconsistentArenas, match="rank 0 .* 00000000 and 22222222"):
            valid([report(0), twin])
        assert valid([report(0), dataclasses.replace(twin, state=REBUILDING)]) == [report(0)]

    def test_a_crash_while_joining_is_no_contradiction(self) -> None:
        before, after = {"joined": 7, "generation_id": 70}, {"joined": 8, "generation_id": 80}
        stores = [
            before,
            {"joined": 7, "generation_id": NONE},
            {"joined": 8, "generation_id": NONE},
            after,
        ]
        for one, other in itertools.product(stores, stores):
            pair = [report(0, **{"opened": 7, **one}), report(1, **{"opened": 7, **other})]
            assert valid(pair) == pair
