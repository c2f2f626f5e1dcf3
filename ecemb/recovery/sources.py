"""Asks whole ranks for words of a replacement rank's blocks, and adds their answers up to those words.

Owns the replacement rank's end of the requests. k blocks of a stripe, as one transaction left them, give each
lost block of it. If a holder can't give its block as of that transaction, the words are asked for again.

Must not know: the words that are missing, and the moment at which they may be stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import PeerFailure
from ..group.collectives import Kind, Transport
from ..group.error_file import follows
from ..kernels.contract import Ids, Kernels, Words
from ..local.rank_memory import RankMemory
from .missing import CHUNK_WORDS
from .plan import RecoveryPlan
from .rebuild import weights_of
from .serving import ANSWER_WORDS, Answer, Request

Wait = Callable[[], None]
_MOST_SPARE = 32
"""Answers whose memory is kept for others."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """A request to all holders of a block, and the memory of their answers.

    Attributes:
        block: the lost block.
        runs: of words that are asked for.
        width: words of a run.
        answers: of the holders, in the order of the block's sources.
        arrived: waits for the answers.
        sent: waits for the requests.
    """

    block: int
    runs: int
    width: int
    answers: Sequence[Words]
    arrived: Sequence[Wait]
    sent: Sequence[Wait]


class Asked:
    """Words that are on their way.

    Attributes:
        delay_ns: after `wait`: for how long a holder's training waited for a processor meanwhile, at most.
    """

    def __init__(
        self, sources: Sources, runs: int, width: int, parts: Sequence[tuple[int, int, _Part]]
    ) -> None:
        self._sources, self._size, self._parts = sources, (runs, width), parts
        self.delay_ns = 0

    def wait(self) -> Words | None:
        """Waits for the answers of all holders, and adds them up.

        Returns:
            uint64 [m, width], new; None if a holder does not have them as of the transaction.

        Raises:
            PeerFailure: a holder died, or refuses to answer.
        """
        found = [(at, first, *self._sources.add_up(part)) for at, first, part in self._parts]
        self.delay_ns = max((delay_ns for *_, delay_ns in found), default=0)
        if len(found) == 1:
            return found[0][2]
        words = np.empty(self._size, np.uint64)
        for at, first, given, _ in found:
            if given is None:
                return None
            words[at : at + given.shape[0], first : first + given.shape[1]] = given
        return words


class Sources:
    """The holders of what one replacement rank lost.

    Args:
        memory: this rank's.
        transport: of a group that has this rank and the holders, for this purpose alone.
        ranks: the job's ranks in the order of the group's.
        kernels: add the blocks up.
        plan: the same on all ranks.
    """

    def __init__(
        self,
        memory: RankMemory,
        transport: Transport,
        ranks: Sequence[int],
        kernels: Kernels,
        plan: RecoveryPlan,
    ) -> None:
        self._transport, self._ranks, self._kernels = transport, list(ranks), kernels
        self._tasks = {task.block: task for task in plan.rebuild if task.rank == memory.rank}
        self._weights = {block: weights_of(task, memory.geometry) for block, task in self._tasks.items()}
        self._rank = memory.rank
        self._spare: list[Words] = []

    def ask(self, block: int, offsets: Ids, width: int, of: int) -> Asked:
        """Asks for runs of words of one lost block. One thread asks, and waits for the answers in this order.

        Args:
            block: number of the block in its stripe: data 0..k-1, parity k..n-1.
            offsets: int64 [m], where each run begins, counted from the block's start; read.
            width: words of a run.
            of: the transaction as of which the words are wanted.

        Raises:
            PeerFailure: a holder died.
        """
        rows, wide = max(1, CHUNK_WORDS // max(1, width)), min(width, CHUNK_WORDS)
        parts = [
            (at, first, self._part(block, offsets[at : at + rows] + first, of, min(wide, width - first)))
            for at in range(0, len(offsets), rows)
            for first in range(0, width, wide)
        ]
        return Asked(self, len(offsets), width, parts)

    def end(self) -> None:
        """Says to all holders that this rank asks no more.

        Raises:
            PeerFailure: a holder died.
        """
        holders = {rank for task in self._tasks.values() for _, rank in task.sources}
        for wait in [self._say(Request().words, rank, "the end of a rebuild") for rank in sorted(holders)]:
            wait()

    def _part(self, block: int, offsets: Ids, of: int, width: int) -> _Part:
        """Asks all holders for a part that fits a request."""
        task = self._tasks[block]
        what = f"asking for block {block} of stripe class {task.stripe_class}"
        runs, size = len(offsets), ANSWER_WORDS + len(offsets) * width
        answers = [self._room(size) for _ in task.sources]
        arrived, sent = list[Wait](), list[Wait]()
        for (other, rank), answer in zip(task.sources, answers, strict=True):
            request = Request(task.stripe_class, other, of, width, runs, int(offsets[0]))
            sent.append(self._say(request.words, rank, what))
            if runs > 1:
                sent.append(self._say(offsets.view(np.uint64), rank, what))
            arrived.append(self._expect(answer, rank, what))
        return _Part(block, runs, width, answers, arrived, sent)

    def _room(self, size: int) -> Words:
        """Memory of an answer, uint64 [size], of any content."""
        found = self._spare.pop() if self._spare else np.empty(0, np.uint64)
        return (found if len(found) >= size else np.empty(size, np.uint64))[:size]

    def add_up(self, part: _Part) -> tuple[Words | None, int]:
        """Waits for a part, and adds it up; see `Asked.wait`."""
        for wait in part.arrived:
            wait()
        sources = self._tasks[part.block].sources
        delay_ns = max(int(answer[1]) for answer in part.answers)
        given = [
            self._answer(head, rank) == Answer.GIVEN
            for head, (_, rank) in zip(part.answers, sources, strict=True)
        ]
        for wait in part.sent:  # a holder that refuses may not have received all
            wait()
        total = None
        if all(given):
            total = np.empty(part.runs * part.width, np.uint64)
            blocks = [answer[ANSWER_WORDS:] for answer in part.answers]
            self._kernels.dot(blocks, self._weights[part.block].reshape(1, -1), [total])
            total = total.reshape(part.runs, part.width)
        large = [answer for answer in part.answers if len(answer) >= CHUNK_WORDS // 2]
        self._spare += large[: _MOST_SPARE - len(self._spare)]
        return total, delay_ns

    def _answer(self, head: Words, rank: int) -> Answer:
        answer = int(head[0])
        if answer == Answer.REFUSED:
            text = f"rank {rank} refuses to give rank {self._rank} what it lacks: see the log of rank {rank}"
            raise follows(PeerFailure(text))
        if answer > Answer.REFUSED:
            raise PeerFailure(
                f"rank {rank} answers {answer} to a request of rank {self._rank}, and answers are 0 to "
                f"{int(Answer.REFUSED)}: the network is damaged, or the ranks run different versions of "
                f"ecemb; restart the job"
            )
        return Answer(answer)

    def _say(self, words: Words, rank: int, what: str) -> Callable[[], None]:
        tag = self._transport.tag(Kind.REQUEST, 0)
        return self._transport.send(words, self._ranks.index(rank), what, tag)

    def _expect(self, words: Words, rank: int, what: str) -> Callable[[], None]:
        return self._transport.expect(
            words, self._ranks.index(rank), what, self._transport.tag(Kind.ANSWER, 0)
        )
