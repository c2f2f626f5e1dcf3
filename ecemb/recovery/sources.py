"""Asks whole ranks for words of a replacement rank's blocks, and adds their answers up to those words.

Owns the replacement rank's end of the requests. k blocks of a stripe, as one transaction left them, give each
lost block of it. If a holder can't give its block as of that transaction, the words are asked for again.

Must not know: the words that are missing, and the moment at which they may be stored.
"""

from __future__ import annotations

import time
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


class Sources:
    """The holders of what one replacement rank lost.

    Args:
        memory: this rank's.
        transport: of a group that has this rank and the holders, for this purpose alone.
        ranks: the job's ranks in the order of the group's.
        kernels: add the blocks up.
        plan: the same on all ranks.

    Attributes:
        spent_s: processor time of the last `fetch`, of the holder or of this rank, whichever is longest.
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
        self.spent_s = 0.0

    def fetch(self, block: int, offsets: Ids, width: int, of: int) -> Words | None:
        """Rebuilds runs of words of one lost block.

        Args:
            block: number of the block in its stripe: data 0..k-1, parity k..n-1.
            offsets: int64 [m], where each run begins, counted from the block's start; read.
            width: words of a run.
            of: the transaction as of which the words are wanted.

        Returns:
            uint64 [m, width], new; None if a holder does not have them as of the transaction.

        Raises:
            PeerFailure: a holder died, or refuses to answer.
        """
        began_s, self.spent_s = time.thread_time(), 0.0
        words = np.empty((len(offsets), width), np.uint64)
        rows, wide = max(1, CHUNK_WORDS // max(1, width)), min(width, CHUNK_WORDS)
        for at in range(0, len(offsets), rows):
            for first in range(0, width, wide):
                part = words[at : at + rows, first : first + wide]
                given = self._ask(block, offsets[at : at + rows] + first, of, part.shape[1])
                if given is None:
                    return None
                part[:] = given
        self.spent_s = max(self.spent_s, time.thread_time() - began_s)
        return words

    def end(self) -> None:
        """Says to all holders that this rank asks no more.

        Raises:
            PeerFailure: a holder died.
        """
        holders = {rank for task in self._tasks.values() for _, rank in task.sources}
        for wait in [self._say(Request().words, rank, "the end of a rebuild") for rank in sorted(holders)]:
            wait()

    def _ask(self, block: int, offsets: Ids, of: int, width: int) -> Words | None:
        task = self._tasks[block]
        what = f"asking for block {block} of stripe class {task.stripe_class}"
        runs, first = len(offsets), int(offsets[0])
        sent = []
        for other, rank in task.sources:
            request = Request(task.stripe_class, other, of, width, runs, first)
            sent.append(self._say(request.words, rank, what))
            if runs > 1:
                sent.append(self._say(offsets.view(np.uint64), rank, what))
        heads = [np.empty(ANSWER_WORDS, np.uint64) for _ in task.sources]
        asked_s = time.monotonic()
        for wait in [
            self._expect(head, rank, what) for head, (_, rank) in zip(heads, task.sources, strict=True)
        ]:
            wait()
        passed_s = time.monotonic() - asked_s
        answers = [self._answer(head, rank) for head, (_, rank) in zip(heads, task.sources, strict=True)]
        for wait in sent:  # a holder that refuses may not have received all
            wait()
        self.spent_s += max(min(int(head[1]) / 1e9, passed_s) for head in heads)
        blocks = {
            rank: np.empty(runs * width, np.uint64)
            for answer, (_, rank) in zip(answers, task.sources, strict=True)
            if answer == Answer.GIVEN
        }
        for wait in [self._expect(words, rank, what) for rank, words in blocks.items()]:
            wait()
        if len(blocks) < len(task.sources):
            return None
        total = np.empty(runs * width, np.uint64)
        self._kernels.dot(list(blocks.values()), self._weights[block].reshape(1, -1), [total])
        return total.reshape(runs, width)

    def _answer(self, head: Words, rank: int) -> Answer:
        if head[0] == Answer.REFUSED:
            text = f"rank {rank} refuses to give rank {self._rank} what it lacks: see the log of rank {rank}"
            raise follows(PeerFailure(text))
        if head[0] > Answer.REFUSED:
            raise PeerFailure(
                f"rank {rank} answers {int(head[0])} to a request of rank {self._rank}, and answers are 0 to "
                f"{int(Answer.REFUSED)}: the network is damaged, or the ranks run different versions of "
                f"ecemb; restart the job"
            )
        return Answer(int(head[0]))

    def _say(self, words: Words, rank: int, what: str) -> Callable[[], None]:
        tag = self._transport.tag(Kind.REQUEST, 0)
        return self._transport.send(words, self._ranks.index(rank), what, tag)

    def _expect(self, words: Words, rank: int, what: str) -> Callable[[], None]:
        return self._transport.expect(
            words, self._ranks.index(rank), what, self._transport.tag(Kind.ANSWER, 0)
        )
