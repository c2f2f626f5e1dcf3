"""Verification beside training: fingerprints, the pace, and what a difference leads to."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ecemb.coding.code import Code
from ecemb.errors import InconsistentArenas, StepFailed, UndeclaredWrite
from ecemb.guard import Guard
from ecemb.kernels import contract
from ecemb.kernels.contract import Words
from ecemb.memory.header import Word
from ecemb.memory.rank_memory import RankMemory
from ecemb.recovery import fingerprints, verify
from ecemb.recovery.fingerprints import Fingerprints
from ecemb.recovery.scrub import CHUNK_WORDS, Scrubber
from ecemb.recovery.verify import FIRST_SHARE, VERIFY_SHARE, WARM_UP, Pace, Verifier
from support.simulation import Hub, Job, Machines, Wires, generator_of, job_of, parity_of

DONE = 2
SHAPES = [(2, 1), (3, 1), (4, 2), (4, 3), (6, 3)]


# --- fingerprints ---------------------------------------------------------------------------------


def words(rng: np.random.Generator, count: int) -> Words:
    return rng.integers(0, 2**64, count, np.uint64)


def fingerprint(block: Words, start: int, stop: int, seed: int) -> Words:
    prints = Fingerprints(start, stop, (seed, 1), contract.get_kernels("cpu"))
    return prints.of(lambda a, b: block[a:b])


@pytest.mark.parametrize("chunk", [5, 16, 40, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fingerprints_of_a_stripe_fit_the_code(
    shape: tuple[int, int], chunk: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "PAGE_WORDS", 16)
    monkeypatch.setattr(fingerprints, "CHUNK_WORDS", chunk)
    n, k = shape
    rng = np.random.default_rng(seed)
    kernels, generator = contract.get_kernels("cpu"), generator_of(Code(n, k))
    data = [words(rng, size) for size in rng.integers(0, 200, k)]  # blocks of other lengths, and none
    parity = parity_of(data, n)
    for start, stop in ((0, 200), (0, 7), (31, 150), (150, 260)):
        prints = [fingerprint(block, start, stop, seed) for block in data]
        for q, block in enumerate(parity):
            left = fingerprint(block, start, stop, seed)
            for weight, part in zip(generator[k + q], prints, strict=True):
                kernels.mul_add_block_(left, part, int(weight))
            assert not left.any()


def test_every_wrong_byte_of_a_page_is_in_the_fingerprint(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "PAGE_WORDS", 8)
    rng = np.random.default_rng(seed)
    block = words(rng, 21)
    whole = fingerprint(block, 0, 21, seed)
    for at in range(8 * 21):
        wrong = block.copy()
        wrong.view(np.uint8)[at] ^= np.uint8(rng.integers(1, 256))
        differs = np.flatnonzero((fingerprint(wrong, 0, 21, seed) ^ whole).view(np.uint8))
        assert differs.tolist() == [at % 64]


def test_equal_errors_in_two_pages_rarely_cancel(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do where both pages have the same weight, which another comparison has not."""
    monkeypatch.setattr(fingerprints, "PAGE_WORDS", 1)
    error = np.array([5, 5], np.uint64)
    missed = [not fingerprint(error, 0, 2, one).any() for one in range(seed, seed + 2000)]
    assert 0 < sum(missed) < 40
    assert Fingerprints(0, 5000, (seed, 1), contract.get_kernels("cpu"))._weights.all(), "no page is left out"


# --- the pace -------------------------------------------------------------------------------------


def comparisons(
    pace: Pace, total: int, steps: int, step_s: float, word_s: float, fixed_s: float = 0.0
) -> Iterator[tuple[int, int, float]]:
    """(step, words, cost) of the comparisons in a number of steps, whose words cost this much."""
    last, done = 0, 0
    while pace.due <= steps:
        step = pace.due
        count = min(pace.words, total - done % total)
        done += count
        work_s = count * word_s
        yield step, count, fixed_s + work_s
        elapsed_s = (step - last) * step_s
        pace.compared(step, count, fixed_s + work_s, work_s, elapsed_s, first=done < total)
        last = step


@pytest.mark.parametrize("fixed_s", [0.0005, 0.4])
@pytest.mark.parametrize("step_s", [0.002, 0.1, 3.0])
@pytest.mark.parametrize("total", [100, 10**7, 10**9])
def test_the_budget_is_kept(total: int, step_s: float, fixed_s: float) -> None:
    spent_s, done, first_s = 0.0, 0, 0.0
    found = comparisons(Pace(VERIFY_SHARE, 0), total, 100_000, step_s, 4e-9, fixed_s)
    for number, (step, count, cost_s) in enumerate(found):
        time_s = step * step_s
        # What was spent before is paid for when the next slice is due, but for rounding to whole steps.
        if number and done <= total:
            assert spent_s <= FIRST_SHARE * (time_s + step_s)
        elif number:
            assert spent_s - first_s <= VERIFY_SHARE * (time_s + step_s)
        spent_s, done = spent_s + cost_s, done + count
        if done <= total:
            first_s = spent_s
    assert done >= min(total, 10**7)


def test_a_small_table_is_compared_within_the_first_300_steps() -> None:
    """Whose comparison takes less than 2 % of the time of these steps; and again within 3,000."""
    total = 10**7
    steps = [step for step, *_ in comparisons(Pace(VERIFY_SHARE, 0), total, 400, 0.1, 4e-9, 0.001)]
    done, passes = 0, []
    for step, count, _ in comparisons(Pace(VERIFY_SHARE, 0), total, 4000, 0.1, 4e-9, 0.001):
        done += count
        if done >= total * (len(passes) + 1):
            passes.append(step)
    assert steps[0] == WARM_UP
    assert passes[0] < 300 and passes[1] < 3000


def test_slices_outweigh_what_a_comparison_costs_without_words() -> None:
    """Such as 0.4 s for the commit thread: the slices grow until half of the cost is their words."""
    found = list(comparisons(Pace(VERIFY_SHARE, 0), 10**12, 10**5 * 4, 0.1, 4e-9, 0.4))
    _, count, cost_s = found[-1]
    assert count * 4e-9 >= 0.45 * cost_s


def test_steps_that_were_slower_than_expected_are_paid_back() -> None:
    """A long pause, such as an evaluation, makes the next comparison early, and then the debt waits."""
    pace = Pace(0.002, 0)
    pace.compared(5, CHUNK_WORDS, 0.004, 0.003, 600.0, first=False)
    assert pace.due == 6
    pace.compared(6, CHUNK_WORDS, 0.004, 0.003, 0.1, first=False)
    assert pace.due == 6 + 39  # (0.004 + 0.004 - 0.002 * 0.1) s are owed, and a step pays 0.0002 s


# --- comparisons of real arenas -------------------------------------------------------------------


class Verifiers:
    """The verifiers of all ranks, in one process; a call is one comparison by all."""

    def __init__(self, memories: Sequence[RankMemory], share: float = VERIFY_SHARE) -> None:
        hub, size = Hub(len(memories)), len(memories)
        self.memories = memories
        self.all: list[Verifier] = []
        for memory in memories:
            wires = Wires(hub, memory.rank, size)
            self.all.append(Verifier(memory, wires, Scrubber(memory, wires), share, 0))
        self._pool = ThreadPoolExecutor(size)
        self.step = 0

    def __call__(self) -> Verifier:
        self.step += 1
        list(self._pool.map(lambda one: one.compare(self.step, lambda: None, lambda rows: None), self.all))
        paces = {(one._pace.due, one._pace.words) for one in self.all if one._pace is not None}
        assert len(paces) <= 1, "all ranks compare next after the same step"
        assert len({(one.verified_words, one.wrong_words) for one in self.all}) == 1
        return self.all[0]


@contextmanager
def trained(root: Path, job: Job) -> Iterator[Verifiers]:
    machines = Machines(root, job)
    assert not machines.run(DONE).failures
    with machines.memories() as memories:
        yield Verifiers(memories)


def contents(memories: Sequence[RankMemory]) -> list[bytes]:
    return [m.arena.region(name).tobytes() for m in memories for name in ("rows", "parity")]


@pytest.mark.parametrize("shape", [(2, 1, 3), (4, 2, 5), (4, 3, 4)], ids=str)
def test_every_wrong_byte_is_found_and_nothing_is_written(
    shape: tuple[int, int, int],
    tmp_path: Path,
    seed: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n, k, size = shape
    rng = random.Random(seed)
    monkeypatch.setattr(fingerprints, "PAGE_WORDS", 4)
    ticks = itertools.count()
    monkeypatch.setattr(verify, "_clock", lambda: next(ticks) * 1e-6)
    with trained(tmp_path / "job", job_of(n, k, size, rng)) as verifiers:
        one = verifiers()
        assert one.wrong_words == 0 and one.age_s is not None and one.age_s < 1
        assert {memory.arena.get(Word.VERIFIED) for memory in verifiers.memories} == {1}
        for _ in range(12):
            before, known = contents(verifiers.memories), one.wrong_words
            memory = rng.choice(verifiers.memories)
            assert memory.parity is not None
            block = max((words for _, words in memory.parity.blocks.values()), key=len).view(np.uint8)
            users = memory.space.tables[0].columns[0].reshape(-1)
            place = rng.choice([one for one in (block, users) if len(one)])
            at, bit = rng.randrange(len(place)), np.uint8(1 << rng.randrange(8))
            place[at] ^= bit
            rotten = contents(verifiers.memories)
            caplog.clear()
            verifiers()
            assert one.wrong_words == known + 1 and one.age_s is None
            (first, *_) = [record.getMessage() for record in caplog.records]
            assert "parity does not fit rows in word" in first and "guard.touch(table, rows)" in first
            caplog.clear()
            verifiers()  # known: it is not said again
            assert one.wrong_words == known + 1 and not caplog.records
            assert contents(verifiers.memories) == rotten
            place[at] ^= bit
            verifiers()
            assert one.age_s is not None and contents(verifiers.memories) == before
            assert {memory.arena.get(Word.VERIFIED) for memory in verifiers.memories} == {verifiers.step}


def test_a_pass_in_slices_ends_with_the_age_of_its_oldest(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count()
    monkeypatch.setattr(verify, "_clock", lambda: float(next(now)))
    with trained(tmp_path / "job", job_of(3, 2, 3, random.Random(seed), rows=30)) as verifiers:
        monkeypatch.setattr(Pace, "compared", lambda self, *_, **__: None)
        for one in verifiers.all:
            assert one._pace is not None
            one._pace.words = 5
        first, memory = verifiers.all[0], verifiers.memories[0]
        total = first._total
        slices = -(-total // 5)
        assert slices > 3
        for number in range(1, 2 * slices + 1):
            verifiers()
            assert (first.age_s is None) == (number < slices)
            expected = 0 if number < slices else number - slices + 1
            assert memory.arena.get(Word.VERIFIED) == expected
        assert first.verified_words == 2 * total


def test_many_findings_are_bounded_in_the_log_and_in_messages(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trained(tmp_path / "job", job_of(2, 1, 2, random.Random(seed), rows=400)) as verifiers:
        assert verifiers.memories[0].parity is not None
        for words_ in (words for _, words in verifiers.memories[0].parity.blocks.values()):
            words_[::2] ^= np.uint64(1)
        verifiers()
        found = verifiers.all[0].wrong_words
        assert found > 50
        said = [record.getMessage() for record in caplog.records]
        [line] = [text for text in said if text.startswith("rank 0: parity does not fit rows in word")]
        assert line.count(" of stripe class ") == verify._PLACES + 1 and " more places; in word" in line
        verifiers()
        assert verifiers.all[0].wrong_words == found


def test_a_table_that_differs_from_its_image_is_told_by_its_rank(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    with trained(tmp_path / "job", job_of(3, 2, 3, random.Random(seed))) as verifiers:
        asked: dict[int, list[tuple[int, range]]] = {}

        def compare(one: Verifier) -> None:
            rank = one._memory.rank

            def verify_images(rows: list[tuple[int, range]]) -> None:
                asked[rank] = rows
                if rank == 1:
                    raise UndeclaredWrite("table 'user' differs from its image")

            one.compare(1, lambda: None, verify_images)

        list(verifiers._pool.map(compare, verifiers.all))
        assert [record.getMessage() for record in caplog.records] == [
            "rank 1: table 'user' differs from its image"
        ]
        for one in verifiers.all:
            assert one.age_s is None and one.wrong_words == 0
            layouts = [table.layout for table in one._memory.space.tables]
            rows = {(table, row) for table, some in asked[one._memory.rank] for row in some}
            assert rows == {(i, row) for i, layout in enumerate(layouts) for row in range(layout.rows)}
        verifiers()
        assert all(one.age_s is not None for one in verifiers.all)


@pytest.mark.parametrize("state", list(itertools.product([True, False], repeat=3)))
def test_a_slice_is_compared_only_between_transactions_and_if_no_rank_is_rebuilt(
    state: tuple[bool, bool, bool],
) -> None:
    compared: list[int] = []
    is_between, is_over, is_due = state
    guard: Any = SimpleNamespace(
        _transactions=SimpleNamespace(
            next_step=7, is_between=is_between, phase=lambda name: contextlib.nullcontext()
        ),
        _background=SimpleNamespace(is_over=is_over),
        _verifier=SimpleNamespace(
            is_due=lambda step: is_due, compare=lambda step, drain, verify: compared.append(step)
        ),
        _tables=SimpleNamespace(verify=None),
        _drain=None,
        _failed=None,
    )
    Guard._verify(guard)
    assert compared == ([7] if all(state) else []) and guard._failed is None


def test_a_rank_that_leaves_a_comparison_takes_no_further_step() -> None:
    """It would wait for the status of others, which wait for its fingerprints."""

    def compare(*_: object) -> None:
        raise KeyboardInterrupt

    guard: Any = Guard.__new__(Guard)
    guard._transactions = SimpleNamespace(
        next_step=7, is_between=True, phase=lambda name: contextlib.nullcontext()
    )
    guard._background, guard._tables = SimpleNamespace(is_over=True), SimpleNamespace(verify=None)
    guard._verifier = SimpleNamespace(is_due=lambda step: True, compare=compare)
    guard._failed = guard._cause = None
    guard._closed, guard._session = "", SimpleNamespace(watch=None)
    with pytest.raises(KeyboardInterrupt):
        guard._verify()
    with pytest.raises(StepFailed, match="comparing parity with rows after step 6 was interrupted"):
        guard._check_usable()


def test_no_share_and_no_parity_compare_nothing(tmp_path: Path, seed: int) -> None:
    with trained(tmp_path / "job", job_of(2, 1, 2, random.Random(seed))) as verifiers:
        off = Verifiers(verifiers.memories, 0.0)
        off()
        assert [one.is_due(10**9) for one in off.all] == [False] * 2
        assert off.all[0].age_s is None and off.all[0].verified_words == 0


def test_the_death_of_a_rank_ends_a_comparison_and_changes_nothing(tmp_path: Path, seed: int) -> None:
    """Killed at any message of a comparison: the others raise, and the next start stands where all stood."""
    job = job_of(4, 2, 4, random.Random(seed))
    machines = Machines(tmp_path / "job", job)
    assert not machines.run(DONE).failures
    with machines.memories() as memories:
        before = contents(memories)
        for after in range(6):
            hub = Hub(len(memories))

            def compare(memory: RankMemory, hub: Hub = hub, after: int = after) -> str:
                wires = Wires(hub, memory.rank, len(memories))
                if memory.rank == 1:
                    left = itertools.count()
                    send = wires.send_note

                    def send_note(*arguments: object) -> None:
                        if next(left) >= after:
                            raise SystemExit
                        send(*arguments)

                    wires.send_note = send_note
                verifier = Verifier(memory, wires, Scrubber(memory, wires), VERIFY_SHARE, 0)
                try:
                    verifier.compare(1, lambda: None, lambda rows: None)
                except BaseException as error:  # noqa: BLE001 - which one is the test's question
                    return type(error).__name__
                finally:
                    hub.end(memory.rank)
                return "done"

            with ThreadPoolExecutor(len(memories)) as pool:
                ended = list(pool.map(compare, memories))
            assert set(ended) <= {"SystemExit", "PeerFailure", "done"}
            assert ended[1] == "done" or "PeerFailure" in ended
        assert contents(memories) == before
    assert (machines.plan().kind, machines.plan().transaction) == ("process", DONE)
    assert not machines.run(DONE + 1).failures
    machines.check(DONE + 1)


# --- survivors' blocks are compared before they are decoded ----------------------------------------


def flipped(machines: Machines, lost: Sequence[int], rng: random.Random) -> tuple[int, int]:
    """Flips a bit of a survivor's table or parity, in a stripe that has lost a block.

    Returns:
        The rank and the class.
    """
    placement = machines.job.placement
    erasures = placement.erasures(lost)
    with machines.memories() as memories:
        while True:
            c = rng.choice(list(erasures))
            block = rng.choice([one for one in range(placement.n) if one not in erasures[c]])
            memory = memories[placement.members(c)[block]]
            state = (
                memory.space.bases[-2] if block < placement.k else 2**62
            )  # the rank state's record is last
            low = memory.space.bounds[block] if block < placement.k else 0
            words = len(memory.read_block(c, block, 0, 2**40))
            if words and low + (at := rng.randrange(words)) < state:
                value = memory.read_block(c, block, at, at + 1).copy()
                if block < placement.k and not _has(memory, low + at):
                    continue
                memory.write_block_(c, block, at, value ^ np.uint64(1))
                return memory.rank, c


def _has(memory: RankMemory, word: int) -> bool:
    """Whether the word's first byte is of a row, and no padding."""
    old = memory.space.read(word, word + 1)
    memory.space.write_(word, old ^ np.uint64(1))
    changed = memory.space.read(word, word + 1) != old
    memory.space.write_(word, old)
    return bool(changed.all())


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 1, 5), (5, 2, 6), (4, 2, 4), (6, 3, 7)], ids=str)
def test_a_flipped_bit_of_a_survivor_never_reaches_a_rebuilt_row(
    shape: tuple[int, int, int], tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With two spare blocks the wrong one is left out and rebuilt; with one, the start is refused."""
    n, k, size = shape
    rng = random.Random(seed)
    base = Machines(tmp_path / "base", job_of(n, k, size, rng, rows=12))
    assert not base.run(DONE).failures
    for number in range(6):
        machines = base.copy(tmp_path / str(number))
        lost = rng.sample(range(size), rng.randint(1, n - k - 1))
        owner, c = flipped(machines, lost, rng)
        for rank in lost:
            machines.lose(rank)
        spare = n - k - len(machines.job.placement.erasures(lost)[c])
        caplog.clear()
        life = machines.run(DONE)
        if spare >= 2:
            assert not life.failures
            machines.check(DONE)
            said = [record.getMessage() for record in caplog.records if "contradicts" in record.getMessage()]
            assert any(f"of stripe class {c}, in the memory of rank {owner}" in line for line in said)
            assert not machines.run(DONE + 1).failures
            machines.check(DONE + 1)
        elif spare == 1:
            assert life.failures
            assert all(isinstance(error, InconsistentArenas) for error in life.failures.values())
            assert all(f"stripe classes [{c}] contradict" in str(error) for error in life.failures.values())


def test_survivors_that_fit_are_rebuilt_from_as_planned(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    machines = Machines(tmp_path / "job", job_of(5, 2, 6, rng))
    assert not machines.run(DONE).failures
    machines.lose(3)
    life = machines.run(DONE)
    assert not life.failures and not caplog.records
    machines.check(DONE)
    assert {one.report.verified_step for one in life.ranks.values() if one.report is not None} == {None}


def test_a_recovery_says_how_old_its_evidence_is(tmp_path: Path, seed: int) -> None:
    """The step at which every survivor had seen all stripes fit; a replacement has seen none."""
    machines = Machines(tmp_path / "job", job_of(3, 2, 4, random.Random(seed)))
    assert not machines.run(DONE).failures
    for lost, expected in ((1, 1), (2, None)):
        if expected is not None:
            with machines.memories() as memories:
                Verifiers(memories)()
        machines.lose(lost)
        life = machines.run(DONE)
        assert not life.failures
        reports = [one.report for one in life.ranks.values()]
        assert {report.verified_step for report in reports if report is not None} == {expected}


def test_killed_at_any_moment_of_such_a_rebuild_the_next_start_ends_it(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    base = Machines(tmp_path / "base", job_of(4, 1, 4, rng))
    assert not base.run(DONE).failures
    owner, _ = flipped(base, [0], rng)
    base.lose(0)
    rehearsal = base.copy(tmp_path / "rehearsal")
    counts = rehearsal.run(DONE).moments
    rehearsal.check(DONE)
    every = [(rank, end) for rank, count in counts.items() for end in range(1, count + 1)]
    for rank, end in rng.sample(every, 12):
        machines = base.copy(tmp_path / f"{rank}-{end}")
        machines.run(DONE, {rank: end})
        assert not machines.run(DONE).failures, f"rank {rank} killed at {end}, rank {owner} wrong"
        machines.check(DONE)
