"""Asks whole ranks for words of a replacement rank's blocks, and adds their answers up to those words.

Owns the replacement rank's end of the requests. k blocks of a stripe, as one transaction left them, give each
lost block of it. If a holder can't give its block as of that transaction, the words are asked for again.

Must not know: the words that are missing, and the moment at which they may be stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ..errors import PeerFailure
from ..group.error_file import follows
from ..group.requests import Requests
from ..kernels.contract import Ids, Kernels, Words
from ..local.rank_memory import RankMemory
from .missing import CHUNK_WORDS
from .plan import RecoveryPlan
from .relay import weights_of
from .serving import ANSWER_WORDS, Answer, Request

_MOST_SPARE = 32
"""Answers whose memory is kept for others."""


class _Part:
    """A request to all holders of a block.

    Args:
        block: the lost block.
        runs: of words that are asked for.
        width: words of a run.
        what: names the wait for the answers.

    Attributes:
        is_here: whether all holders have answered.
        found: uint64 [runs, width], new; None if a holder does not have them as of the transaction.
        delay_ns: for how long a holder's training waited for a processor meanwhile, at most.
    """

    def __init__(self, block: int, runs: int, width: int, what: str) -> None:
        self.block, self.runs, self.width, self.what = block, runs, width, what
        self.is_here, self.delay_ns = False, 0
        self.found: Words | None = None


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
        for *_, part in self._parts:
            self._sources.take(part)
        self.delay_ns = max((part.delay_ns for *_, part in self._parts), default=0)
        if len(self._parts) == 1:
            return self._parts[0][2].found
        words = np.empty(self._size, np.uint64)
        for at, first, part in self._parts:
            if part.found is None:
                return None
            words[at : at + part.runs, first : first + part.width] = part.found
        return words


class Sources:
    """The holders of what one replacement rank lost. For one thread.

    Args:
        memory: this rank's.
        requests: connections with the holders.
        kernels: add the blocks up.
        plan: the same on all ranks.
    """

    def __init__(self, memory: RankMemory, requests: Requests, kernels: Kernels, plan: RecoveryPlan) -> None:
        self._rank, self._kernels = memory.rank, kernels
        self._tasks = {task.block: task for task in plan.rebuild if task.rank == memory.rank}
        generator = memory.geometry.generator
        self._weights = {
            block: weights_of(generator, block, task.sources) for block, task in self._tasks.items()
        }
        self._holders = holders(plan, memory.rank)
        self._dialogue = requests.dialogue(self._holders)
        self._under_way = deque[_Part]()
        self._spare: list[Words] = []

    def ask(self, block: int, offsets: Ids, width: int, of: int) -> Asked:
        """Asks for runs of words of one lost block. `send` sends it, and so does a wait for answers.

        Args:
            block: number of the block in its stripe: data 0..k-1, parity k..n-1.
            offsets: int64 [m], where each run begins, counted from the block's start; read.
            width: words of a run.
            of: the transaction as of which the words are wanted.
        """
        rows, wide = max(1, CHUNK_WORDS // max(1, width)), min(width, CHUNK_WORDS)
        parts = [
            (at, first, self._part(block, offsets[at : at + rows] + first, of, min(wide, width - first)))
            for at in range(0, len(offsets), rows)
            for first in range(0, width, wide)
        ]
        return Asked(self, len(offsets), width, parts)

    def send(self) -> None:
        """Sends what was asked, as far as it goes without a wait.

        Raises:
            PeerFailure: a holder died.
        """
        self._dialogue.hear({}, "asking for lost rows", all_sent=False)

    def take(self, part: _Part) -> None:
        """Waits for the answers to a part, and to all that was asked before it."""
        while not part.is_here:
            self._receive(self._under_way.popleft())

    def end(self) -> None:
        """Says to all holders that this rank asks no more, once all that it asked for is here.

        Raises:
            PeerFailure: a holder died.
        """
        while self._under_way:
            self._receive(self._under_way.popleft())
        for rank in self._holders:
            self._dialogue.say(Request().words, rank)
        self._dialogue.hear({}, "the end of a rebuild")

    def _part(self, block: int, offsets: Ids, of: int, width: int) -> _Part:
        """Asks all holders for a part that fits a request."""
        task = self._tasks[block]
        what = f"asking for block {block} of stripe class {task.stripe_class}"
        part = _Part(block, len(offsets), width, what)
        for other, rank in task.sources:
            request = Request(task.stripe_class, other, of, width, len(offsets), int(offsets[0]))
            self._dialogue.say(request.words, rank)
            if len(offsets) > 1:
                self._dialogue.say(offsets.view(np.uint64), rank)
        self._under_way.append(part)
        return part

    def _receive(self, part: _Part) -> None:
        """Receives the next answers of the holders of a part, and adds them up."""
        sources, size = self._tasks[part.block].sources, part.runs * part.width
        heads = {rank: np.empty(ANSWER_WORDS, np.uint64) for _, rank in sources}
        self._dialogue.hear(heads, part.what, all_sent=False)
        part.delay_ns = max(int(head[1]) for head in heads.values())
        words = {rank: self._room(size) for rank, head in heads.items() if self._gives(head, rank)}
        self._dialogue.hear(words, part.what, all_sent=False)
        if len(words) == len(sources):
            total, weights = np.empty(size, np.uint64), self._weights[part.block].reshape(1, -1)
            self._kernels.dot([words[rank] for _, rank in sources], weights, [total])
            part.found = total.reshape(part.runs, part.width)
        if size >= CHUNK_WORDS // 2:
            self._spare += list(words.values())[: _MOST_SPARE - len(self._spare)]
        part.is_here = True

    def _room(self, size: int) -> Words:
        """Memory for words, uint64 [size], of any content."""
        found = self._spare.pop() if self._spare else np.empty(0, np.uint64)
        return (found if len(found) >= size else np.empty(size, np.uint64))[:size]

    def _gives(self, head: Words, rank: int) -> bool:
        """Whether words follow the head of an answer."""
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
        return answer == Answer.GIVEN


def holders(plan: RecoveryPlan, rank: int) -> list[int]:
    """The ranks that hold what a replacement rank lost, ascending."""
    return sorted({holder for task in plan.rebuild if task.rank == rank for _, holder in task.sources})
