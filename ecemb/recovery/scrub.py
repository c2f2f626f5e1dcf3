"""Scrubbing: compares parity with rows while the job runs, and repairs errors of single blocks.

Memory rots silently, and a rotten word shows up at the worst moment: when a lost block is rebuilt from it.
`Scrubber` compares every parity block with the rows under it, in slices between steps. All ranks see the same
differences and decide alike, by `Code.locate`; the rank with the wrong block writes.

A repair outside of any transaction is safe whenever a rank dies:

- It begins only after every rank has called `scrub`, so all have committed the same transaction t, and no
  rank has prepared t + 1: a start would choose t, undo nothing and redo nothing. All journals are void.
- It puts back the committed bytes of t, and bytes are independent: an interrupted repair leaves each byte
  either wrong as before, or right. The next scrub finds the rest.
- No header word changes: for a start, an arena under repair is an arena between two steps.
- Every chunk ends with another comparison, for which each rank reads its rows after its writes. So no rank
  begins step t + 1 during a repair, and the bytes that step t + 1 captures, and would undo to, are repaired.

Recovery verifies by the same comparison (`compare_parity`), a collective that writes nothing.

Must not know: torch's tensors, and its callers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.profiler import record_function

from ..coding.code import Code
from ..coding.parity import Delta, Syndrome, parted, size_words, unpack
from ..coding.placement import Placement
from ..coding.rows import Addresses, TableLayout
from ..errors import ConfigurationError, InconsistentArenas, UsageError
from ..kernels.contract import Ids, Words
from ..memory.rank_memory import RankMemory, encoded
from ..net.collectives import Transport

logger: logging.Logger = logging.getLogger("ecemb")


SHARED_WORDS = 1 << 14
"""Most differing words that a keeper sends for a chunk; at least r, so that every chunk makes progress."""
MAX_FINDINGS = 1000
_LOGGED = 20  # findings in the log


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A block that may be wrong.

    Attributes:
        rank: The rank that holds the block.
        block: the block's number in its stripe: data 0..k-1, parity k..n-1.
        rows: pairs (table's key, rows of that rank's shard) of the rows in the finding's words; empty for
            parity.
    """

    rank: int
    block: int
    rows: tuple[tuple[str, range], ...]

    def __str__(self) -> str:
        if not self.rows:
            return f"rank {self.rank}, block {self.block}"
        held = ", ".join(f"{_span('row', rows)} of {name!r}" for name, rows in self.rows)
        return f"rank {self.rank}, block {self.block} ({held})"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A run of words in which a stripe's parity and rows did not fit.

    Attributes:
        stripe_class: the stripe class.
        words: The words, counted from the start of the class's blocks.
        suspects: The blocks that may be wrong; a single block if the wrong block is known.
        repaired: Whether parity and rows fit now.
    """

    stripe_class: int
    words: range
    suspects: tuple[Suspect, ...]
    repaired: bool

    @property
    def rank(self) -> int | None:
        """The rank that holds the wrong block; None if it is not known."""
        return self.suspects[0].rank if len(self.suspects) == 1 else None

    @property
    def block(self) -> int | None:
        """The wrong block's number in its stripe; None if it is not known."""
        return self.suspects[0].block if len(self.suspects) == 1 else None

    @property
    def place(self) -> str:
        """The words and the suspects as text."""
        few = "" if self.rank is not None else "wrong in one or more of "
        return f"{self._words}: {few}{'; '.join(map(str, self.suspects))}"

    @property
    def _words(self) -> str:
        return f"{_span('word', self.words)} of stripe class {self.stripe_class}"

    def __str__(self) -> str:
        words, named = self._words, "; ".join(map(str, self.suspects))
        if self.rank is None:
            return f"{words}: NOT repaired, wrong in one or more of {named}"
        state = "repaired" if self.repaired else "NOT repaired, the write did not hold (defective memory?)"
        return f"{words}: {state}, {named}"


@dataclasses.dataclass(frozen=True)
class ScrubReport:
    """The result of a scrub; the same on all ranks, except `seconds`.

    Attributes:
        checked_words: number of words of every block that were compared in this call.
        total_words: number of words of the longest block; a whole pass compares them all.
        complete: whether this call ended a pass.
        wrong_words: number of words in which parity and rows did not fit.
        repaired_words: number of wrong words that fit after the repair.
        findings: the wrong words in runs, at most the first 1000 runs of the call.
        seconds: wall time of the call on this rank.
    """

    checked_words: int
    total_words: int
    complete: bool
    wrong_words: int
    repaired_words: int
    findings: tuple[Finding, ...]
    seconds: float

    def __str__(self) -> str:
        outcome = "parity and rows fit"
        if self.wrong_words:
            outcome = f"{self.wrong_words} words were wrong, {self.repaired_words} of them are repaired"
        done = f"{self.checked_words} of {self.total_words} words of every block compared"
        ended = ", which ends a pass" if self.complete else ""
        return "\n  ".join(
            [f"scrub: {done}{ended}: {outcome} ({self.seconds:.3f} s)", *map(str, self.findings)]
        )


class Scrubber:
    """Compares and repairs slice by slice.

    Args:
        memory: this rank's arena, opened; wrong words in it are overwritten.
        transport: the control group.

    Attributes:
        scrubbed_words: number of words of every block that were compared so far.
        wrong_words: number of words so far in which parity and rows did not fit.
        repaired_words: number of wrong words so far that were repaired.
    """

    def __init__(self, memory: RankMemory, transport: Transport) -> None:
        self.scrubbed_words: int = 0
        self.wrong_words: int = 0
        self.repaired_words: int = 0
        self._memory = memory
        self._transport = transport
        self._cursor = self._calls = 0
        self._addresses: list[Addresses] = []
        self._total = longest_block(memory)

    def scrub(
        self,
        fraction: float,
        check: Callable[[], None],
        verify: Callable[[list[tuple[int, range]]], None] = lambda _: None,
    ) -> ScrubReport:
        """Compares the next `fraction` of all words, and repairs errors. All ranks, between steps.

        Args:
            fraction: above 0, at most 1; the same on all ranks.
            check: Raises if this rank can't scrub now; then the scrub fails on all ranks.
            verify: Called last, with pairs (table's index, compared rows); raises if the arena's rows differ
                from the table's in training. Then the scrub fails on all ranks.

        Raises:
            UsageError: this is a world of one rank, which has no parity; or the ranks' calls differ.
            ConfigurationError: `fraction` is out of range.
            PeerFailure: a peer died or failed.
        """
        began = time.perf_counter()
        placement = self._memory.geometry.placement
        if placement is None:
            raise UsageError(
                "guard.scrub() compares rows with their parity, and a job of one rank keeps none: start "
                "it with n or more ranks"
            )
        self._transport.together("beginning a scrub", lambda: _checked(fraction, check))
        self._agree(fraction)
        found = _Found(placement, self._addresses, self._total)
        checked = left = min(self._total, math.ceil(self._total * fraction))
        at, complete = self._cursor, False
        while left:
            _, stop = next(parity_chunks(at, min(at + left, self._total)))
            with record_function("ecemb.recovery.scrub"):
                stop = self._scrub_chunk(placement, at, stop, found)
            left -= stop - at
            at = stop
            if at == self._total:
                at, complete = 0, True
        rows = list(self.rows(self._cursor, checked))
        self._transport.together("comparing tables with their images", lambda: verify(rows))
        self._cursor = at
        self._calls += 1
        self.scrubbed_words += checked
        self.wrong_words += found.wrong_words
        self.repaired_words += found.repaired_words
        report = ScrubReport(
            checked,
            self._total,
            complete,
            found.wrong_words,
            found.repaired_words,
            tuple(found.findings),
            time.perf_counter() - began,
        )
        self._log(report)
        return report

    def inspect(self, start: int, stop: int) -> list[Finding]:
        """Finds the words among start..stop-1 where parity and rows differ. All ranks; repairs nothing.

        Stops after about `MAX_FINDINGS` findings.

        Returns:
            The findings, the same on all ranks.

        Raises:
            PeerFailure: a peer died or failed.
        """
        placement = self._memory.geometry.placement
        if placement is None:
            return []
        self._agree(1.0)
        found = _Found(placement, self._addresses, self._total)
        while start < stop and len(found.findings) < MAX_FINDINGS:
            _, end = next(parity_chunks(start, stop))
            start = self._scrub_chunk(placement, start, end, found, repair=False)
        return found.findings

    def rows(self, start: int, count: int) -> Iterator[tuple[int, range]]:
        """Pairs (table's index, rows) of this rank's rows that end in words `start` .. `start` + `count` - 1.

        The words are counted from the start of each data block, modulo the words of a pass.
        """
        space = self._memory.space
        for low, high in itertools.pairwise(space.bounds):
            for a, b in ((start, start + count), (0, start + count - self._total)):
                yield from space.completed(min(low + a, high), min(low + max(a, min(b, self._total)), high))

    def _agree(self, fraction: float) -> None:
        """Checks that all ranks make the same call, and on the first call shares the ranks' layout."""
        tables = [table.layout.to_json() for table in self._memory.space.tables]
        mine: dict[str, Any] = {
            "the fraction": fraction,
            "the word to begin with": self._cursor,
            "the number of scrubs before it": self._calls,
            "the next step": self._memory.committed,
            "tables": [] if self._addresses else tables,
        }
        texts = self._transport.gather(json.dumps(mine).encode(), "agreeing on a scrub")
        answers = [json.loads(text) for text in texts]
        for name in list(mine)[:-1]:
            values = {rank: one[name] for rank, one in enumerate(answers)}
            if len(set(values.values())) > 1:
                raise UsageError(
                    f"guard.scrub() was called differently by the ranks: {name} is {values} (rank: value); "
                    f"every rank calls it after the same step, as often, with the same fraction"
                )
        if not self._addresses:
            k = self._memory.geometry.generator.shape[1]
            layouts = [[TableLayout.from_json(fields) for fields in one["tables"]] for one in answers]
            self._addresses = [Addresses(one, k) for one in layouts]

    def _scrub_chunk(
        self, placement: Placement, start: int, stop: int, found: _Found, *, repair: bool = True
    ) -> int:
        """Compares and repairs words start..stop-1 of all blocks, or fewer if many differ. All ranks.

        Returns:
            The end of the words that were compared.
        """
        stop, keys, syndromes = self._compare(placement, start, stop, SHARED_WORDS)
        if not len(keys):
            return stop
        code, generator = Code(placement.n, placement.k), self._memory.geometry.generator
        blocks, errors = code.locate(syndromes, found.possible(keys), generator)
        repaired = (blocks >= 0) & repair
        if repaired.any():
            self._repair(placement, keys, blocks, errors)
            _, left, _ = self._compare(placement, start, stop, None)
            repaired &= ~np.isin(keys, left)
            new = np.setdiff1d(left, keys)  # words that have become wrong since the first comparison
            found.add(new, np.full(len(new), -1, np.int64), np.zeros(len(new), np.bool_))
        found.add(keys, blocks, repaired)
        return stop

    def _compare(
        self, placement: Placement, start: int, stop: int, limit: int | None
    ) -> tuple[int, Ids, Words]:
        """Gathers the words where parity differs from rows. All ranks; the result is the same on all.

        Args:
            placement: The placement of blocks.
            start: First word.
            stop: End of the words.
            limit: Most differing words that a keeper sends; if a keeper has more, all ranks compare only the
                words before them. None for no limit.

        Returns:
            The end of the compared words; the keys of the differing words, int64 [m], ascending (see
            `_Found`); and the syndromes there, uint64 [r, m].
        """
        own = compare_parity(self._memory, self._transport, start, stop, "scrubbing")
        message = _packed(own, stop, limit).tobytes()
        texts = self._transport.gather(message, "scrubbing")
        answers = [_unpacked(text, rank, placement, start, stop) for rank, text in enumerate(texts)]
        stop = min(int(one[0]) for one in answers)
        classes, rows, offsets, words = np.concatenate([one[1:].reshape(4, -1) for one in answers], axis=1)
        near = offsets < stop
        every = classes[near] * (self._total + 1) + offsets[near]
        keys = np.unique(every)
        syndromes = np.zeros((placement.r, len(keys)), np.uint64)
        syndromes[rows[near], np.searchsorted(keys, every)] = words[near].view(np.uint64)
        return stop, keys, syndromes

    def _repair(self, placement: Placement, keys: Ids, blocks: Ids, errors: Words) -> None:
        """XORs errors into the wrong words of this rank's blocks.

        Args:
            placement: The placement of blocks.
            keys: Keys of the words, int64 [m], ascending.
            blocks: Number of each word's wrong block, int64 [m]; -1 if it is not known.
            errors: Wrong XOR right bytes of each word, uint64 [m].
        """
        for a, b in _runs(keys, blocks):
            c, start = divmod(int(keys[a]), self._total + 1)
            block = int(blocks[a])
            if block >= 0 and placement.members(c)[block] == self._memory.rank:
                words = self._memory.read_block(c, block, start, start + b - a)
                self._memory.write_block_(c, block, start, words ^ errors[a:b])

    def _log(self, report: ScrubReport) -> None:
        head, *_ = str(report).splitlines()
        rank = self._memory.rank
        mine = [
            finding
            for finding in report.findings
            if rank == 0 or any(suspect.rank == rank for suspect in finding.suspects)
        ]
        logger.log(logging.WARNING if mine else logging.DEBUG, "rank %d: %s", rank, head)
        for finding in mine[:_LOGGED]:
            logger.warning("rank %d: %s", rank, finding)
        if len(mine) > _LOGGED:
            logger.warning("rank %d: and %d more, in the scrub's report", rank, len(mine) - _LOGGED)


class _Found:
    """The findings of one scrub.

    The key of a word of a stripe class is class * (total + 1) + word; consecutive keys are neighbouring
    words.

    Args:
        placement: the placement of blocks.
        addresses: rank -> addresses of its row space.
        total: words of the longest block.
    """

    def __init__(self, placement: Placement, addresses: list[Addresses], total: int) -> None:
        self._placement = placement
        self._addresses = addresses
        self._stride = total + 1
        self.wrong_words = self.repaired_words = 0
        self.findings: list[Finding] = []

    def possible(self, keys: Ids) -> Words:
        """The bits of the keys' words that rows or parity use, in each block of the stripe: uint64 [n, m].

        For `Code.locate`.
        """
        classes, offsets = np.divmod(keys, self._stride)
        masks = np.full((self._placement.n, len(keys)), np.iinfo(np.uint64).max, np.uint64)
        for c in np.unique(classes).tolist():
            here = np.flatnonzero(classes == c)
            for block, rank in enumerate(self._placement.members(c)[: self._placement.k]):
                masks[block, here] = self._addresses[rank].mask(block, offsets[here])
        return masks

    def add(self, keys: Ids, blocks: Ids, repaired: NDArray[np.bool_]) -> None:
        """Adds wrong words.

        Args:
            keys: keys of the words, int64 [m], ascending.
            blocks: number of each word's wrong block, int64 [m]; -1 if it is not known.
            repaired: whether each word is repaired, bool [m].
        """
        self.wrong_words += len(keys)
        self.repaired_words += int(repaired.sum())
        for a, b in _runs(keys, blocks, repaired.astype(np.int64)):
            if len(self.findings) == MAX_FINDINGS:
                break
            c, start = divmod(int(keys[a]), self._stride)
            stop = start + b - a
            suspects = self._suspects(c, start, stop, int(blocks[a]))
            self.findings.append(Finding(c, range(start, stop), suspects, bool(repaired[a])))

    def _suspects(self, c: int, start: int, stop: int, block: int) -> tuple[Suspect, ...]:
        suspects: list[Suspect] = []
        for one, rank in enumerate(self._placement.members(c)):
            is_data = one < self._placement.k
            rows = self._addresses[rank].rows(one, start, stop) if is_data else ()
            if one == block or (block < 0 and (rows or not is_data)):
                suspects.append(Suspect(rank, one, rows))
        return tuple(suspects)


def _checked(fraction: float, check: Callable[[], None]) -> None:
    given = cast(object, fraction)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given <= 1:
        raise ConfigurationError(
            f"fraction= of guard.scrub() is the part of all words to compare in this call, above 0 and at "
            f"most 1; it is {fraction!r}"
        )
    check()


def _packed(syndromes: list[Syndrome], stop: int, limit: int | None) -> Ids:
    """The message of a keeper: the end of the compared words, then classes, rows, offsets, differing words.

    Args:
        syndromes: the differing words of each parity block kept here.
        stop: end of the compared words.
        limit: most differing words in the message; with more, the end comes before them. None for no limit.
    """
    columns = [
        np.stack([np.full(m, one.stripe_class), np.full(m, one.row), one.offsets, one.words.view(np.int64)])
        for one in syndromes
        if (m := len(one.offsets))
    ]
    differing = np.concatenate([np.empty((4, 0), np.int64), *columns], axis=1)
    if limit is not None and differing.shape[1] > limit:
        stop = int(np.partition(differing[2], limit)[limit])
        differing = differing[:, differing[2] < stop]
    return np.concatenate([np.array([stop], np.int64), differing.reshape(-1)])


def _unpacked(text: bytes, rank: int, placement: Placement, start: int, stop: int) -> Ids:
    """Reads and checks a message of `_packed` from a rank.

    Raises:
        InconsistentArenas: no rank of this job sends such a message.
    """
    values = np.frombuffer(text, np.int64) if len(text) % 32 == 8 else np.zeros(1, np.int64)
    classes, rows, offsets, _ = values[1:].reshape(4, -1)
    kept = np.zeros((placement.world_size, placement.r), np.bool_)
    kept[tuple(np.array(placement.kept(rank)).T)] = True
    known = (classes >= 0) & (classes < len(kept)) & (rows >= 0) & (rows < placement.r)
    near = (offsets >= start) & (offsets < values[0])
    if not (start < values[0] <= stop and known.all() and near.all() and kept[classes, rows].all()):
        raise InconsistentArenas(
            f"rank {rank} reports differences in words {start} to {stop - 1} in {len(text)} bytes that no "
            f"rank of this job sends: the network is damaged, or the ranks run different versions of ecemb; "
            f"restart the job"
        )
    return values


def _runs(keys: Ids, *marks: Ids) -> list[tuple[int, int]]:
    """(start, stop) of runs of consecutive keys (int64 [m], ascending) in which each mark [m] is constant."""
    if not len(keys):
        return []
    cuts = np.diff(keys) != 1
    for mark in marks:
        cuts |= np.diff(mark) != 0
    return list(itertools.pairwise([0, *(np.flatnonzero(cuts) + 1).tolist(), len(keys)]))


def _span(name: str, numbers: range) -> str:
    return f"{name} {numbers[0]}" if len(numbers) == 1 else f"{name}s {numbers[0]} to {numbers[-1]}"


CHUNK_WORDS = 1 << 17


def longest_block(memory: RankMemory) -> int:
    """Number of words of the longest data block of any rank; the same on all ranks."""
    return max(max(words) for words in memory.geometry.block_words)


def parity_chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of chunks of words start..stop-1, so that the memory of a comparison is bounded."""
    for at in range(start, stop, CHUNK_WORDS):
        yield at, min(at + CHUNK_WORDS, stop)


def collect_parity(
    memory: RankMemory, transport: Transport, start: int, stop: int, what: str
) -> list[tuple[int, Delta]]:
    """Words start..stop-1 of every block whose parity is kept here, as deltas from zero. All ranks.

    Returns:
        Pairs (sender, delta).

    Raises:
        PeerFailure: a peer died, or did not call this before the deadline.
        InconsistentArenas: a message has a size that no rank of this job sends.
    """
    sent = encoded(memory, start, stop)
    lengths = np.zeros((transport.world_size, 1), np.int64)
    for keeper, message in sent.items():
        lengths[keeper] = len(message)
    incoming = transport.all_to_all(lengths, what)[:, 0].tolist()
    placement = memory.geometry.placement
    most = 0 if placement is None else placement.r * size_words(1, stop - start)
    if min(incoming) < 0 or max(incoming) > most:
        raise InconsistentArenas(
            f"{what}: the ranks announce messages of {incoming} words, and none has more than {most}: the "
            f"network is damaged, or the ranks run different versions of ecemb; restart the job"
        )
    received = parted(np.empty(sum(incoming), np.uint64), incoming)
    transport.exchange(sent, received, what)
    return [(sender, delta) for sender, message in received.items() for delta in unpack(message)]


def compare_parity(
    memory: RankMemory, transport: Transport, start: int, stop: int, what: str
) -> list[Syndrome]:
    """Compares words start..stop-1 of the parity kept here with the rows under it. All ranks.

    A rank that returns knows that every rank has called this, and that its own rows were read before that.

    Returns:
        The differing words of each parity block kept here that differs; empty without parity.

    Raises:
        PeerFailure: a peer died, or did not call this before the deadline.
        InconsistentArenas: a message has a size that no rank of this job sends.
    """
    if memory.parity is None:
        return []
    return memory.parity.syndromes(collect_parity(memory, transport, start, stop, what), start, stop)
