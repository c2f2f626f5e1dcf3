"""The header's bytes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ecemb.errors import ArenaDamaged, ConfigurationError
from ecemb.memory import header
from ecemb.memory.header import WORDS, Constants, Header, State
from support.arena_holders import constants

CONSTANTS = constants(rank=0, arena_id="00000000")


def report(state: State = State.LIVE, **words: int) -> Header:
    words = {"joined": 7, "generation_id": 70, "opened": 7, "committed": 3, "prepared": 3, **words}
    return Header(CONSTANTS, state, **words)


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

    def test_no_more_than_a_start_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one = constants()
        size = len(one.encode())
        monkeypatch.setattr(header, "MAX_CONSTANTS_BYTES", size)
        assert Constants.decode(one.encode()) == one
        monkeypatch.setattr(header, "MAX_CONSTANTS_BYTES", size - 1)
        with pytest.raises(ConfigurationError, match=f"{size} bytes of at most {size - 1}: protect fewer"):
            one.encode()

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
