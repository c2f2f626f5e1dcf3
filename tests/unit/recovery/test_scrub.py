"""Rotten memory: every planted bit is found, and put right where the code can tell which block is wrong.

`Code.locate` alone, exhaustively; then scrubs of real arenas with threads for ranks, bits flipped anywhere in
rows, rank state and parity. Real ranks scrub in the middle of a training in tests/scenarios/test_guard.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import galois
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ecemb.coding.code import Code
from ecemb.coding.placement import Placement
from ecemb.coding.rows import Column, TableLayout
from ecemb.errors import (
    CodeError,
    ConfigurationError,
    InconsistentArenas,
    PeerFailure,
    UndeclaredWrite,
    UsageError,
)
from ecemb.memory.rank_memory import RankMemory
from ecemb.recovery import scrub
from ecemb.recovery.scrub import Scrubber, ScrubReport
from ecemb.state.rank_state import NAME as RANK_STATE
from support.simulation import (
    Hub,
    Job,
    Killed,
    Machines,
    Moments,
    Wires,
    alone,
    check_parity,
    generator_of,
    job_of,
    moment,
    watched,
)

Words = NDArray[np.uint64]

FIELD = galois.GF(2**8, irreducible_poly=0x11D, primitive_element=2)
ALL = np.uint64(2**64 - 1)
DONE = 2  # transactions before memory rots

# --- which block: the pure part -------------------------------------------------------------------


def syndromes_of(code: Code, errors: dict[int, Words]) -> Words:
    """S_q, by galois: what parity as stored, XOR what data as stored gives, is for errors in some blocks."""
    size = max(len(error) for error in errors.values())
    sums = FIELD.Zeros((code.r, 8 * size))
    for block, error in errors.items():
        data = FIELD(error.view(np.uint8))
        if block < code.k:
            sums += FIELD(generator_of(code)[code.k :, block])[:, None] * data
        else:
            sums[block - code.k] += data
    return np.ascontiguousarray(sums.view(np.ndarray)).view(np.uint64)


def locate(code: Code, syndromes: Words, possible: Words | None = None) -> tuple[list[int], Words]:
    if possible is None:
        possible = np.full((code.n, syndromes.shape[1]), ALL)
    blocks, errors = code.locate(syndromes, possible, generator_of(code))
    return blocks.tolist(), errors


def in_one_byte(*values: Any) -> Words:
    """Every value in each of a word's 8 bytes."""
    return (np.arange(*values, dtype=np.uint64)[:, None] << np.arange(0, 64, 8, dtype=np.uint64)).reshape(-1)


@pytest.mark.parametrize("shape", [(4, 2), (6, 4), (6, 3), (5, 2), (3, 1), (14, 10)], ids=str)
def test_every_error_of_one_block_is_located(shape: tuple[int, int]) -> None:
    """All blocks, all 255 errors, in all 8 bytes of a word."""
    code = Code(*shape)
    errors = in_one_byte(1, 256)
    for block in range(code.n):
        blocks, found = locate(code, syndromes_of(code, {block: errors}))
        assert blocks == [block] * len(errors)
        assert np.array_equal(found, errors)


@pytest.mark.parametrize("shape", [(2, 1), (4, 3), (6, 5)], ids=str)
def test_one_parity_block_locates_nothing(shape: tuple[int, int]) -> None:
    code = Code(*shape)
    for block in range(code.n):
        blocks, found = locate(code, syndromes_of(code, {block: in_one_byte(1, 256)}))
        assert set(blocks) == {-1} and not found.any()


def test_words_that_fit_have_no_wrong_block() -> None:
    blocks, errors = locate(Code(4, 2), np.zeros((2, 3), np.uint64))
    assert blocks == [-1] * 3 and not errors.any()
    assert locate(Code(4, 2), np.zeros((2, 0), np.uint64))[0] == []


words = st.integers(1, 2**64 - 1)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(4, 2), (6, 4), (6, 3), (5, 2), (14, 10)]), st.data())
def test_errors_of_one_block_in_any_bytes_are_located(shape: tuple[int, int], data: st.DataObject) -> None:
    code = Code(*shape)
    block = data.draw(st.integers(0, code.n - 1))
    errors = np.array(data.draw(st.lists(words, min_size=1, max_size=8)), np.uint64)
    blocks, found = locate(code, syndromes_of(code, {block: errors}))
    assert blocks == [block] * len(errors) and np.array_equal(found, errors)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([(6, 3), (5, 2), (4, 1), (7, 3), (14, 10)]), st.data())
def test_less_than_r_wrong_blocks_are_never_taken_for_one(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    code = Code(*shape)
    count = data.draw(st.integers(2, code.r - 1))
    wrong = data.draw(st.lists(st.integers(0, code.n - 1), min_size=count, max_size=count, unique=True))
    errors = {block: np.array([data.draw(words)], np.uint64) for block in wrong}
    assert locate(code, syndromes_of(code, errors))[0] == [-1]


@pytest.mark.parametrize("shape", [(4, 2), (6, 4)], ids=str)
def test_with_r_2_a_known_share_of_double_errors_looks_like_a_third_block(shape: tuple[int, int]) -> None:
    """What the docstring says: n - 2 in 255 in one byte; and never the two blocks' own."""
    code = Code(*shape)
    values = np.arange(1, 256, dtype=np.uint64)
    first, second = np.repeat(values, 255), np.tile(values, 255)
    for a, b in itertools.combinations(range(code.n), 2):
        blocks, _ = locate(code, syndromes_of(code, {a: first, b: second}))
        named = Counter(blocks)
        assert named.pop(-1) == 255 * 255 - 255 * (code.n - 2)
        assert named == {c: 255 for c in range(code.n) if c not in (a, b)}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(4, 2), (6, 4), (6, 3)]), st.data())
def test_a_word_whose_bytes_point_at_different_blocks_is_left_alone(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    code = Code(*shape)
    a, b = data.draw(st.lists(st.integers(0, code.n - 1), min_size=2, max_size=2, unique=True))
    places = data.draw(st.permutations(range(8)))
    cut = data.draw(st.integers(1, 7))
    one, other = (
        np.array([sum(data.draw(st.integers(1, 255)) << 8 * place for place in part)], np.uint64)
        for part in (places[:cut], places[cut:])
    )
    assert locate(code, syndromes_of(code, {a: one, b: other}))[0] == [-1]


def test_a_block_that_does_not_have_the_bits_is_ruled_out() -> None:
    code = Code(6, 4)
    errors = np.array([0x01, 0x0100, 0x010000], np.uint64)
    possible = np.full((6, 3), ALL)
    possible[2] = [0xFFFF, 0xFFFF, 0]
    possible[3] = 0
    assert locate(code, syndromes_of(code, {2: errors}), possible)[0] == [2, 2, -1]
    assert locate(code, syndromes_of(code, {3: errors}), possible)[0] == [-1] * 3
    assert locate(code, syndromes_of(code, {4: errors}), possible)[0] == [4] * 3


def test_a_damaged_generator_is_refused() -> None:
    code = Code(4, 2)
    damaged = generator_of(code).copy()
    damaged[2, 1] = 0
    for generator in (damaged, generator_of(Code(5, 2))):
        with pytest.raises(CodeError, match="generator"):
            code.locate(np.ones((2, 1), np.uint64), np.full((4, 1), ALL), generator)


# --- scrubs of real arenas ------------------------------------------------------------------------


class Scrubs:
    """The scrubbers of all ranks, in one process; a call is one scrub by all."""

    def __init__(self, memories: Sequence[RankMemory]) -> None:
        hub, size = Hub(len(memories)), len(memories)
        self.memories = memories
        self.scrubbers = [Scrubber(memory, Wires(hub, memory.rank, size)) for memory in memories]
        self._pool = ThreadPoolExecutor(size)

    def __call__(self, fraction: float = 1.0) -> ScrubReport:
        reports = list(self._pool.map(lambda one: one.scrub(fraction, lambda: None), self.scrubbers))
        assert len({dataclasses.replace(report, seconds=0) for report in reports}) == 1
        return reports[0]

    def contents(self) -> list[bytes]:
        return [m.arena.region(name).tobytes() for m in self.memories for name in ("rows", "parity")]


@contextmanager
def trained(root: Path, job: Job) -> Iterator[Scrubs]:
    machines = Machines(root, job)
    life = machines.run(DONE)
    assert not life.failures
    with machines.memories() as memories:
        yield Scrubs(memories)


@dataclasses.dataclass(frozen=True)
class Flip:
    """One bit of one rank's memory, and where it lies in its stripe."""

    kind: str
    stripe_class: int
    word: int
    rank: int
    block: int
    bytes_: NDArray[np.uint8]
    at: int
    bit: int

    def turn(self) -> None:
        self.bytes_[self.at] ^= np.uint8(1 << self.bit)


def some_bit(memories: Sequence[RankMemory], placement: Placement, rng: random.Random) -> Flip:
    """Any bit of the rows, of rank state or of the parity of any rank."""
    while True:
        memory = rng.choice(memories)
        kind = rng.choice(["rows", "rank state", "parity"])
        bit = rng.randrange(8)
        if kind == "parity":
            assert memory.parity is not None
            c, (row, words) = rng.choice(list(memory.parity.blocks.items()))
            if not len(words):
                continue
            at = rng.randrange(8 * len(words))
            view = words.view(np.uint8)
            return Flip(kind, c, at // 8, memory.rank, placement.k + row, view, at, bit)
        last = len(memory.space.tables) - 1
        table = last if kind == "rank state" else rng.randrange(last) if last else 0
        stored = memory.space.tables[table]
        if not stored.layout.rows or (kind == "rows" and table == last):
            continue
        row, column = rng.randrange(stored.layout.rows), rng.randrange(len(stored.columns))
        width = stored.columns[column].shape[1]
        if not width:
            continue
        at = rng.randrange(width)
        before = sum(one.row_bytes for one in stored.layout.columns[:column])
        address = memory.space.bases[table] + row * stored.layout.record_words + (before + at) // 8
        block = max(i for i in range(placement.k) if memory.space.bounds[i] <= address)
        while memory.space.bounds[block + 1] <= address:
            block -= 1
        c = placement.stripe_class(memory.rank, block)
        word = address - memory.space.bounds[block]
        return Flip(kind, c, word, memory.rank, block, stored.columns[column][row], at, bit)


def some_bits(scrubs: Scrubs, placement: Placement, count: int, rng: random.Random) -> list[Flip]:
    """Bits of different words of stripes."""
    flips: dict[tuple[int, int], Flip] = {}
    while len(flips) < count:
        flip = some_bit(scrubs.memories, placement, rng)
        flips.setdefault((flip.stripe_class, flip.word), flip)
    return list(flips.values())


def located(report: ScrubReport) -> set[tuple[int, int, int | None, int | None]]:
    """(class, word, rank, block) of all that was found."""
    return {(one.stripe_class, word, one.rank, one.block) for one in report.findings for word in one.words}


def plant_and_scrub(
    root: Path, count: int, shape: tuple[int, int, int], rng: random.Random
) -> dict[str, int]:
    """Flips `count` bits, a few between two scrubs, and counts what the scrubs made of them.

    Returns:
        `planted`, and of them how many were `found`, `located` in the right block, `repaired`; `left`:
        how many words stayed wrong; planted bits by kind.
    """
    n, k, size = shape
    job = job_of(n, k, size, rng)
    counts: Counter[str] = Counter(planted=0, found=0, located=0, repaired=0, left=0)
    with trained(root, job) as scrubs:
        before = scrubs.contents()
        while counts["planted"] < count:
            batch = min(rng.randint(1, 16), count - counts["planted"])
            flips = some_bits(scrubs, job.placement, batch, rng)
            for flip in flips:
                flip.turn()
                counts[flip.kind] += 1
            rotten = scrubs.contents()
            report = scrubs()
            found = located(report)
            assert report.wrong_words == len(found)
            counts["planted"] += len(flips)
            counts["repaired"] += report.repaired_words
            for flip in flips:
                there = [place for place in found if place[:2] == (flip.stripe_class, flip.word)]
                counts["found"] += len(there)
                counts["located"] += there == [(flip.stripe_class, flip.word, flip.rank, flip.block)]
            if n - k == 1:
                assert scrubs.contents() == rotten, "nothing is written that can't be located"
                for finding in report.findings:
                    assert not finding.repaired and len(finding.suspects) > 1
                for flip in flips:
                    flip.turn()
            assert scrubs.contents() == before, "bytes as before"
            counts["left"] += scrubs().wrong_words
        for scrubber in scrubs.scrubbers:
            assert scrubber.wrong_words == counts["found"]
            assert scrubber.repaired_words == counts["repaired"]
    return dict(counts)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "count"), [((4, 2, 5), 300), ((6, 3, 7), 100), ((3, 1, 3), 100)], ids=str)
def test_every_flipped_bit_is_found_and_repaired(
    shape: tuple[int, int, int], count: int, tmp_path: Path, seed: int
) -> None:
    counts = plant_and_scrub(tmp_path / "job", count, shape, random.Random(seed))
    print(f"(n, k, ranks) = {shape}: {counts}")
    assert [counts[name] for name in ("planted", "found", "located", "repaired", "left")] == [count] * 4 + [0]
    assert min(counts[kind] for kind in ("rows", "rank state", "parity")) > 0


def test_with_one_parity_block_every_flipped_bit_is_found_and_none_repaired(
    tmp_path: Path, seed: int
) -> None:
    counts = plant_and_scrub(tmp_path / "job", 200, (4, 3, 5), random.Random(seed))
    print(f"(n, k, ranks) = (4, 3, 5): {counts}")
    ends = [counts[name] for name in ("planted", "found", "located", "repaired", "left")]
    assert ends == [200, 200, 0, 0, 0]


def odd_job(n: int, k: int, size: int, seed: int) -> Job:
    """Uneven shards of bfloat16 rows of odd dims, with states: padded records; the last rank has none."""
    wide = (Column("weight", "bfloat16", 14), Column("sum", "bfloat16", 14))
    narrow = (Column("weight", "bfloat16", 6), Column("step", "uint8", 1))
    tables = [
        (TableLayout("wide", 3 + 7 * rank, wide), TableLayout("narrow", 11 * rank % 13, narrow))
        for rank in range(size - 1)
    ]
    order = random.Random(seed).sample(range(size), size)
    return Job(Placement(n, k, tuple(order)), (*tables, ()), seed)


@pytest.mark.parametrize("shape", [(2, 1, 3), (4, 2, 6), (5, 3, 5)], ids=str)
def test_no_false_alarm_over_a_training(shape: tuple[int, int, int], tmp_path: Path, seed: int) -> None:
    job = odd_job(*shape, seed)
    machines = Machines(tmp_path / "job", job)
    for transaction in range(5):
        assert not machines.run(transaction).failures
        with machines.memories() as memories:
            check_parity(memories, job.placement)
            scrubs = Scrubs(memories)
            before = scrubs.contents()
            report = scrubs()
            assert (report.wrong_words, report.repaired_words, report.findings) == (0, 0, ())
            assert report.complete and report.checked_words == report.total_words
            assert scrubs.contents() == before
    machines.check(4)


@pytest.mark.parametrize("fraction", [0.07, 0.3, 0.5, 0.99, 1])
def test_an_incremental_scrub_finds_every_flip_within_one_pass(
    fraction: float, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(scrub, "CHUNK_WORDS", 5)
    job = odd_job(4, 2, 5, seed)
    with trained(tmp_path / "job", job) as scrubs:
        before = scrubs.contents()
        for _ in range(3):  # from wherever the cursor stands
            total = scrub.longest_block(scrubs.memories[0])
            calls = -(-total // -int(-(total * fraction) // 1))
            flips = some_bits(scrubs, job.placement, 12, rng)
            for flip in flips:
                flip.turn()
            reports = [scrubs(fraction) for _ in range(calls)]
            assert set().union(*map(located, reports)) == {
                (flip.stripe_class, flip.word, flip.rank, flip.block) for flip in flips
            }
            assert sum(report.wrong_words for report in reports) == len(flips)
            assert any(report.complete for report in reports)
            assert {report.checked_words for report in reports} == {-int(-(total * fraction) // 1)}
            assert scrubs.contents() == before


def test_a_pass_is_complete_when_its_last_word_is_compared(tmp_path: Path, seed: int) -> None:
    with trained(tmp_path / "job", odd_job(4, 2, 5, seed)) as scrubs:
        assert [scrubs(0.25).complete for _ in range(8)] == [False, False, False, True] * 2
        assert not scrubs(0.5).complete
        assert scrubs(1).complete, "from the middle, around, to the middle"
        assert scrubs(0.5).complete


@pytest.mark.parametrize("limit", [2, 9, 1 << 14])
def test_a_whole_table_that_rotted_is_repaired_with_bounded_messages(
    limit: int, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "SHARED_WORDS", limit)
    monkeypatch.setattr(scrub, "MAX_FINDINGS", 40)
    job = odd_job(4, 2, 5, seed)
    with trained(tmp_path / "job", job) as scrubs:
        before = scrubs.contents()
        memory = scrubs.memories[3]
        for column in memory.space.tables[0].columns:
            column ^= np.uint8(0x55)
        told: list[int] = []
        packed = scrub._packed

        def watched_packed(*args: Any) -> Any:
            message = packed(*args)
            told.append((len(message) - 1) // 4)
            return message

        monkeypatch.setattr(scrub, "_packed", watched_packed)
        report = scrubs()
        assert max(told) <= limit
        assert scrubs.contents() == before
        words_ = memory.space.tables[0].layout.words
        assert report.wrong_words == report.repaired_words == words_
        assert 0 < len(report.findings) <= 40
        assert {(one.rank, one.repaired) for one in report.findings} == {(3, True)}
        if limit > words_:
            held = [rows for one in report.findings for rows in one.suspects[0].rows]
            assert {name for name, _ in held} == {"wide"}
            assert sorted({row for _, rows in held for row in rows}) == list(range(3 + 7 * 3))


def test_two_wrong_blocks_in_a_word_are_reported_and_left_alone(tmp_path: Path, seed: int) -> None:
    """With r = 3 in any bytes; the words beside them are repaired."""
    rng = random.Random(seed)
    job = odd_job(6, 3, 6, seed)
    with trained(tmp_path / "job", job) as scrubs:
        c = next(c for c in range(6) if len(scrubs.memories[0].geometry.placement.members(c)))
        parity = [scrubs.memories[rank].parity.block(c) for rank in job.placement.members(c)[3:]]
        parity[0][1] ^= np.uint64(rng.randrange(1, 2**64))
        parity[1][1] ^= np.uint64(rng.randrange(1, 2**64))
        parity[2][2] ^= np.uint64(1)
        rotten = [block.copy() for block in parity]
        report = scrubs()
        assert (report.wrong_words, report.repaired_words) == (2, 1)
        left = next(one for one in report.findings if not one.repaired)
        assert (left.stripe_class, left.words, left.rank, left.block) == (c, range(1, 2), None, None)
        assert {suspect.rank for suspect in left.suspects} <= set(job.placement.members(c))
        assert {3, 4, 5} <= {suspect.block for suspect in left.suspects}
        assert "NOT repaired" in str(left) and "block 4" in str(left)
        rotten[2][2] ^= np.uint64(1)
        assert all(np.array_equal(block, old) for block, old in zip(parity, rotten, strict=True))
        assert "2 words were wrong, 1 of them are repaired" in str(report)


def test_memory_that_does_not_hold_what_is_written_is_not_called_repaired(tmp_path: Path, seed: int) -> None:
    job = odd_job(4, 2, 5, seed)
    with trained(tmp_path / "job", job) as scrubs:
        [flip] = some_bits(scrubs, job.placement, 1, random.Random(seed))
        flip.turn()
        with mock.patch.object(RankMemory, "write_block_", return_value=None):
            report = scrubs()
        [finding] = report.findings
        assert (report.wrong_words, report.repaired_words, finding.repaired) == (1, 0, False)
        assert (finding.rank, finding.block) == (flip.rank, flip.block)
        assert "did not hold" in str(finding)


def test_a_word_that_rots_while_others_are_repaired_is_reported(tmp_path: Path, seed: int) -> None:
    job = odd_job(4, 2, 5, seed)
    with trained(tmp_path / "job", job) as scrubs:
        first, *others = some_bits(scrubs, job.placement, 60, random.Random(seed))
        second = next(other for other in others if other.rank == first.rank)
        first.turn()
        write = RankMemory.write_block_

        def rotting(self: RankMemory, *args: Any) -> None:
            write(self, *args)
            second.turn()

        with mock.patch.object(RankMemory, "write_block_", rotting):
            report = scrubs()
        assert (report.wrong_words, report.repaired_words) == (2, 1)
        assert {one.stripe_class for one in report.findings if not one.repaired} == {second.stripe_class}
        assert scrubs().repaired_words == 1


def test_findings_name_tables_and_rows(tmp_path: Path, seed: int) -> None:
    job = odd_job(4, 2, 5, seed)
    with trained(tmp_path / "job", job) as scrubs:
        tables = scrubs.memories[2].space.tables
        tables[0].columns[0][4:6] ^= np.uint8(1)
        scrubs.memories[4].rank_state[3] ^= np.uint8(1)
        report = scrubs()
        held = [rows for one in report.findings if one.rank == 2 for rows in one.suspects[0].rows]
        assert {(name, row) for name, rows in held for row in rows} == {("wide", 4), ("wide", 5)}
        [state] = [one for one in report.findings if one.rank == 4]
        assert state.suspects[0].rows == ((RANK_STATE, range(1)),)
        assert "of 'wide'" in str(report) and f"row 0 of {RANK_STATE!r}" in str(report)


def test_warnings_come_from_rank_0_and_from_whose_memory_it_is(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = odd_job(4, 2, 5, seed)
    with trained(tmp_path / "job", job) as scrubs, caplog.at_level("DEBUG", "ecemb"):
        scrubs()
        assert {record.levelname for record in caplog.records} == {"DEBUG"}
        assert len(caplog.records) == 5
        caplog.clear()
        scrubs.memories[3].space.tables[0].columns[0][:, 0] ^= np.uint8(1)
        scrubs()
        warned = Counter(int(r.getMessage().split()[1][:-1]) for r in caplog.records if r.levelno == 30)
        assert set(warned) == {0, 3} and max(warned.values()) <= scrub._LOGGED + 2
        assert warned[0] == scrub._LOGGED + 2


# --- calls that are refused -----------------------------------------------------------------------


def test_a_job_of_one_rank_has_nothing_to_compare_with(tmp_path: Path) -> None:
    with (
        alone(tmp_path, odd_job(2, 1, 2, 0).layouts(0)) as memory,
        pytest.raises(UsageError, match="one rank keeps none"),
    ):
        Scrubber(memory, Wires(Hub(1), 0, 1)).scrub(1.0, lambda: None)


def each(scrubs: Scrubs, call: Callable[[int], Any]) -> list[BaseException | None]:
    """What a call raised on each rank."""

    def tried(rank: int) -> BaseException | None:
        try:
            call(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error
        return None

    return list(scrubs._pool.map(tried, range(len(scrubs.memories))))


def test_calls_that_differ_or_fail_on_a_rank_fail_on_all(tmp_path: Path, seed: int) -> None:
    def broken() -> None:
        raise UndeclaredWrite("on purpose")

    with trained(tmp_path / "job", odd_job(2, 1, 3, seed)) as scrubs:
        scrubbers = scrubs.scrubbers
        for wrong in (0, -1, 1.01, float("nan"), "1", True, None):
            given_: list[Any] = [1.0, wrong, 1.0]
            errors = each(
                scrubs, lambda rank, given_=given_: scrubbers[rank].scrub(given_[rank], lambda: None)
            )
            assert [type(error) for error in errors] == [PeerFailure, ConfigurationError, PeerFailure]
            assert repr(wrong) in str(errors[1]) and "rank 1" in str(errors[0])
        errors = each(scrubs, lambda rank: scrubbers[rank].scrub(1.0, broken if rank == 2 else lambda: None))
        assert [type(error) for error in errors] == [PeerFailure, PeerFailure, UndeclaredWrite]
        errors = each(scrubs, lambda rank: scrubbers[rank].scrub(0.5 + rank / 4, lambda: None))
        assert {type(error) for error in errors} == {UsageError}
        assert "the fraction is {0: 0.5, 1: 0.75, 2: 1.0}" in str(errors[0])
        scrubs(0.5)
        scrubbers[1]._cursor = 0  # as if the last scrub had failed there alone
        errors = each(scrubs, lambda rank: scrubbers[rank].scrub(0.5, lambda: None))
        assert all("the word to begin with" in str(error) for error in errors)


@pytest.mark.parametrize(
    "message",
    [
        [],
        [5],
        [0],
        [9, 0, 1, 2],
        [5, 2, 0, 1, 1],
        [5, 0, 0, 1, 1],
        [5, 1, 1, 1, 1],
        [5, 1, 0, 7, 1],
        [5, -1, 0, 1, 1],
    ],
    ids=str,
)
def test_nonsense_from_a_peer_is_refused(message: list[int]) -> None:
    placement = Placement.ranks(2, 1, 3)
    assert placement.kept(1) == ((1, 0),)
    sent = np.array(message, np.int64).tobytes()
    if message == [5]:
        assert scrub._unpacked(sent, 1, placement, 0, 5).tolist() == [5]
        assert scrub._unpacked(np.array([5, 1, 0, 4, -1]).tobytes(), 1, placement, 0, 9).tolist()[3] == 4
        return
    for given_ in (sent, sent + b"."):
        with pytest.raises(InconsistentArenas, match="rank 1 reports"):
            scrub._unpacked(given_, 1, placement, 0, 5)


# --- a rank that dies in the middle of a scrub ----------------------------------------------------


@pytest.mark.slow
def test_killed_at_every_moment_of_a_scrub_nothing_is_lost(tmp_path: Path, seed: int) -> None:
    """The next start stands where all stood, and the next scrub repairs what is left."""
    rng = random.Random(seed)
    job = odd_job(4, 2, 4, seed)
    base = Machines(tmp_path / "base", job)
    assert not base.run(DONE).failures
    with base.memories() as memories:
        flips = some_bits(Scrubs(memories), job.placement, 9, rng)
        # A start refuses rank state that doesn't fit its checksum: only a scrub before it can help.
        flips = [flip for flip in flips if flip.kind != "rank state"]
        before = Scrubs(memories).contents()
        for flip in flips:
            flip.turn()
    rehearsal = scrub_until(base.copy(tmp_path / "rehearsal"), {})
    every = [(rank, end) for rank, count in rehearsal.items() for end in range(1, count + 1)]
    for rank, end in every[rng.randrange(11) :: 11]:
        machines = base.copy(tmp_path / f"{rank}-{end}")
        scrub_until(machines, {rank: end})
        plan = machines.plan()
        assert (plan.kind, plan.transaction) == ("process", DONE)
        assert all(one.prepared == one.committed == DONE for one in machines.headers())
        assert not machines.run(DONE).failures
        with machines.memories() as memories:
            scrubs = Scrubs(memories)
            scrubs()
            assert scrubs.contents() == before, f"rank {rank} killed at {end}"
        assert not machines.run(DONE + 1).failures
        machines.check(DONE + 1)


def scrub_until(machines: Machines, ends: dict[int, int]) -> dict[int, int]:
    """One scrub, in which ranks are killed at the given moments; returns how many moments each had."""
    write = RankMemory.write_block_

    def torn(self: RankMemory, c: int, block: int, start: int, words_: Words) -> None:
        """Half of every word's bytes first."""
        low = np.uint64(0xFF00FF00FF00FF00)
        old = self.read_block(c, block, start, start + len(words_)).copy()
        for part in ((old & ~low) | (words_ & low), words_):
            moment()
            write(self, c, block, start, part)
        moment()

    moments, hub = Moments(ends), Hub(machines.job.size)
    unexpected: list[BaseException] = []
    with machines.memories() as memories:

        def worker(memory: RankMemory) -> None:
            try:
                Scrubber(memory, Wires(hub, memory.rank, machines.job.size)).scrub(1.0, lambda: None)
            except (Killed, PeerFailure):
                pass
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                unexpected.append(error)
            finally:
                hub.end(memory.rank)

        with watched(moments), mock.patch.object(RankMemory, "write_block_", torn):
            threads = [
                threading.Thread(target=worker, args=(memory,), name=str(memory.rank)) for memory in memories
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(300)
                assert not thread.is_alive(), "a rank hangs"
    assert not unexpected, unexpected
    machines._plan = None
    return dict(moments.counts)
