"""Verification beside training: compares parity with rows at a budget, slice by slice, between steps.

A write past torch, or defective memory, leaves parity that doesn't fit its rows, and nothing shows it before
a lost block is rebuilt from it. `Verifier` compares fingerprints of the next slice of all blocks from time to
time (docs/protocol.md, 6.1), and where they differ, the words themselves. It names what it finds and writes
nothing: the script trains with what it wrote, declared or not, and a repair would take that back.

`Pace` decides after which step the next slice is compared, and its size, by the measured cost. All ranks
compute this from the same numbers, which go around with each comparison.

Must not know: what a step is, and who repairs.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from ..errors import UndeclaredWrite
from ..memory.rank_memory import RankMemory
from ..net.collectives import Dissemination, Kind, Transport
from ..net.wording import counted
from .fingerprints import parity_differs, seed_of
from .scrub import CHUNK_WORDS, MAX_FINDINGS, Finding, Scrubber, longest_block

logger: logging.Logger = logging.getLogger("ecemb")

VERIFY_SHARE = 0.001
"""Default of the share of training's time that comparisons take after the first pass.

Paired with training without them, they cost up to twice as much: caches are colder after a comparison, and
ranks wait for each other again (`python -m bench overhead --setting verification`).
"""
FIRST_SHARE = 0.02
"""Least share of the first pass."""
WARM_UP = 5
"""Steps before the first comparison."""
SHORTEST_S, LONGEST_S = 0.005, 0.05
"""Bounds of the time in which a slice's words are read; between them, that of a step. Longer only where a
comparison costs more than that without its words, by waiting for the commit thread for example."""
_LOGGED, _PLACES = 20, 3  # lines in the log, per pass; findings in a line
_clock: Callable[[], float] = time.perf_counter


class Pace:
    """When the next slice is compared, and how many words it has. The same on all ranks.

    Args:
        share: share of training's time that comparisons take after the first pass, above 0.
        step: number of steps that have ended.

    Attributes:
        due: number of ended steps from which on the next slice is to be compared.
        words: number of words of the next slice.
    """

    def __init__(self, share: float, step: int) -> None:
        self._share, self._last = share, step
        self._paying = max(share, FIRST_SHARE)  # the share since the last comparison
        self._debt_s = 0.0  # cost that training's time so far has not paid for
        self.due: int = step + WARM_UP
        self.words: int = CHUNK_WORDS

    def compared(
        self, step: int, words: int, cost_s: float, work_s: float, elapsed_s: float, *, first: bool
    ) -> None:
        """Chooses the next comparison after one has ended.

        Args:
            step: number of steps that have ended.
            words: number of words that were compared.
            cost_s: time that the comparison took.
            work_s: the part of it that grows with the words.
            elapsed_s: time between the comparison before and this one.
            first: whether the first pass goes on.
        """
        step_s = max(elapsed_s / max(1, step - self._last), 1e-6)
        self._debt_s = max(0.0, self._debt_s - self._paying * elapsed_s) + cost_s
        self._paying = max(self._share, FIRST_SHARE) if first else self._share
        self._last = step
        self.due = step + max(1, math.ceil(self._debt_s / (self._paying * step_s)))
        aim_s = max(min(max(step_s, SHORTEST_S), LONGEST_S), cost_s - work_s)
        self.words = max(CHUNK_WORDS, min(int(words * aim_s / max(work_s, 1e-9)), 4 * self.words))


class Verifier:
    """Compares parity with rows beside training.

    Args:
        memory: this rank's arena, opened; read, but for the word `verified`.
        transport: the control group.
        scrubber: finds the words in a slice that differs.
        share: share of training's time; 0 for no comparison.
        step: number of steps that have ended.

    Attributes:
        verified_words: number of words of every block that were compared so far.
        wrong_words: number of words so far in which parity and rows did not fit, each counted once.
    """

    def __init__(
        self, memory: RankMemory, transport: Transport, scrubber: Scrubber, share: float, step: int
    ) -> None:
        self.verified_words: int = 0
        self.wrong_words: int = 0
        self._memory, self._transport, self._scrubber = memory, transport, scrubber
        self._pace = None if share == 0 or memory.parity is None else Pace(share, step)
        self._total = longest_block(memory)
        self._fitting_from = 0  # number of compared words up to the end of the last slice that did not fit
        self._slices: deque[tuple[int, float, int]] = deque()  # compared words, time, step; of one pass
        self._number = 0
        self._known: list[tuple[int, range]] = []  # class and words of findings that are logged
        self._left_to_log = _LOGGED
        self._ended_s, self._tail_s = _clock(), 0.0

    @property
    def age_s(self) -> float | None:
        """Time since the stripe was compared that was compared longest ago; None if not all have fitted."""
        oldest = self._oldest
        return None if oldest is None else _clock() - oldest[1]

    @property
    def _oldest(self) -> tuple[int, float, int] | None:
        done = self.verified_words - self._total
        return self._slices[0] if done >= self._fitting_from and self._slices else None

    def is_due(self, step: int) -> bool:
        """Whether a slice is to be compared now that `step` steps have ended; the same on all ranks."""
        return self._pace is not None and step >= self._pace.due

    def compare(
        self, step: int, drain: Callable[[], None], verify: Callable[[list[tuple[int, range]]], None]
    ) -> None:
        """Compares the next slice. All ranks, after the same step.

        Args:
            step: number of steps that have ended.
            drain: waits until these are committed here; its time counts.
            verify: called with pairs (table's index, compared rows); raises UndeclaredWrite if the arena's
                rows differ from the table's in training.

        Raises:
            PeerFailure: a peer died, or did not call this before the deadline.
        """
        if self._pace is None:
            return
        began_s = _clock()
        drain()
        drained_s = _clock()
        start = self.verified_words % self._total
        count = min(self._pace.words, self._total - start)
        seed, what = seed_of(self._memory, self._number), "comparing parity with rows beside training"
        self._number += 1
        differs = parity_differs(self._memory, self._transport, start, start + count, seed, what)
        differs_from_image = self._differs_from_image(verify, start, count)
        sent_s = _clock()
        cost_s = self._tail_s + sent_s - began_s
        own = [differs, differs_from_image, cost_s, sent_s - drained_s, began_s - self._ended_s]
        any_parity, any_image, cost_s, work_s, elapsed_s = self._folded(own, what)
        self.verified_words += count
        if any_parity or self._known:
            self._find(start, start + count, differ=any_parity)
        if any_parity or any_image:
            self._fitting_from = self.verified_words
        self._note(step)
        first = self.verified_words < self._total
        self._pace.compared(step, count, cost_s, work_s, elapsed_s, first=first)
        self._ended_s = _clock()
        self._tail_s = self._ended_s - sent_s

    def _folded(self, own: list[float], what: str) -> tuple[bool, bool, float, float, float]:
        """Whether any rank found a difference in parity, and in images; the smallest of all ranks' times.

        A comparison ends for all ranks at about the same time, so the smallest cost is that of the rank that
        came last, without its waiting for ranks that still trained.

        Args:
            own: this rank's two findings, and three times in seconds.
            what: names the wait in errors.
        """
        times_ns = [-round(1e9 * one) for one in own[2:]]
        dissemination = Dissemination(
            self._transport,
            self._transport.tag(Kind.VERIFICATION, self._number),
            np.maximum,
            lambda _: False,
        )
        dissemination.run(np.array([*own[:2], *times_ns], np.int64), what)
        any_parity, any_image, *times_ns = dissemination.value.tolist()
        cost_s, work_s, elapsed_s = (-one / 1e9 for one in times_ns)
        return bool(any_parity), bool(any_image), cost_s, work_s, elapsed_s

    def _differs_from_image(
        self, verify: Callable[[list[tuple[int, range]]], None], start: int, count: int
    ) -> bool:
        """Compares tables outside of the arena with their images. This rank alone."""
        try:
            verify(list(self._scrubber.rows(start, count)))
        except UndeclaredWrite as error:
            if self._left_to_log > 0:
                self._left_to_log -= 1
                logger.warning("rank %d: %s", self._memory.rank, error)
            return True
        return False

    def _note(self, step: int) -> None:
        """Records that a slice was compared after `step` steps."""
        self._slices.append((self.verified_words, _clock(), step))
        while self._slices[0][0] <= self.verified_words - self._total:
            self._slices.popleft()
        if (oldest := self._oldest) is not None:
            self._memory.record_verified(oldest[2])
        if self.verified_words % self._total == 0:
            self._left_to_log = _LOGGED

    def _find(self, start: int, stop: int, *, differ: bool) -> None:
        """Finds, counts and logs words that don't fit, unless they are known. All ranks.

        Args:
            start: first word of the slice.
            stop: its end.
            differ: whether the slice's fingerprints differ.
        """
        before = self._known
        if differ and len(before) >= MAX_FINDINGS:
            return
        findings = self._scrubber.inspect(start, stop) if differ else []
        self._known = [(one.stripe_class, one.words) for one in findings]
        for c, words in before:
            parts = words[: max(0, start - words.start)], words[max(0, stop - words.start) :]
            self._known += [(c, part) for part in parts if part]
        if differ and not findings and self._memory.rank == 0:
            logger.warning(
                "verification: fingerprints of parity and rows differed, and the words themselves do not: "
                "a bit has flipped while they were read or sent; if it recurs, test memory and network"
            )
        new: list[Finding] = []
        for one in findings:
            known = sum(_common(words, one.words) for c, words in before if c == one.stripe_class)
            self.wrong_words += len(one.words) - known
            if known < len(one.words):
                new.append(one)
        self._log(new)

    def _log(self, findings: list[Finding]) -> None:
        """Logs a slice's new findings in one line: on rank 0 all, elsewhere those that this rank may own."""
        rank = self._memory.rank
        places = [one.place for one in findings if rank == 0 or rank in {it.rank for it in one.suspects}]
        if not places or self._left_to_log <= 0:
            return
        self._left_to_log -= 1
        if (left := len(places) - _PLACES - 1) > 0:
            places[_PLACES:-1] = [counted(left, "more place")]
        logger.warning(
            "rank %d: parity does not fit rows in %s. The usual cause is a write that was not declared "
            "(weight.data, numpy, a collective in place): call guard.touch(table, rows) before it, in "
            "the step; else memory is defective. Until guard.scrub() mends it, what is rebuilt from these "
            "stripes after a loss would be wrong",
            rank,
            "; in ".join(places),
        )


def _common(a: range, b: range) -> int:
    """The number of elements that two ranges have in common."""
    return max(0, min(a.stop, b.stop) - max(a.start, b.start))
