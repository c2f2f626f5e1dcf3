"""Gives replacement ranks what they lack while training goes on: the side of those who hold it.

Owns the messages of a request, and one thread for each replacement rank that this rank serves. A request
names runs of words of one of this rank's blocks, and the transaction as of which they are wanted. The answer
has them, or says that they are gone: then the replacement rank asks again (docs/protocol.md, 11.2).

Must not know: what a replacement rank lacks, and what it does with an answer.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import InconsistentArenas, PeerFailure
from ..group.collectives import Kind, Transport
from ..kernels.contract import Words
from ..local.as_of import AsOf
from ..local.rank_memory import RankMemory
from .delays import Delays
from .missing import CHUNK_WORDS
from .plan import RecoveryPlan

logger: logging.Logger = logging.getLogger("ecemb")

ANSWER_WORDS = 2
"""Words in front of an answer's runs: an `Answer`, and for how long training waited for a processor, in ns.

The runs follow in the same message; with any content, if they are not given."""


class Answer(enum.IntEnum):
    """What becomes of a request."""

    GONE = 0
    GIVEN = 1
    REFUSED = 2


class Request(NamedTuple):
    """What a replacement rank asks of a holder; without runs: that it asks no more.

    Attributes:
        stripe_class: the stripe class of the block.
        block: number of the holder's block in its stripe: data 0..k-1, parity k..n-1.
        of: the transaction as of which the words are wanted.
        width: words of each run.
        runs: their number. The words at which they begin follow in a second message, if there are several.
        first: the word at which the first run begins, counted from the block's start.
    """

    stripe_class: int = 0
    block: int = 0
    of: int = 0
    width: int = 0
    runs: int = 0
    first: int = 0

    @property
    def answer_words(self) -> int:
        """The size of any answer, also of one without what is asked for: it is known before it comes."""
        return ANSWER_WORDS + self.runs * self.width

    @property
    def words(self) -> Words:
        """The message, uint64 [6], new."""
        return np.array(self, np.int64).view(np.uint64)

    @classmethod
    def of_words(cls, words: Words) -> Request:
        """What a message (uint64 [6]) asks for.

        Raises:
            InconsistentArenas: no replacement rank asks for this.
        """
        request = cls(*words.view(np.int64).tolist())
        least = min(request.width, request.runs)
        if any(request) and (least < 1 or request.width * request.runs > CHUNK_WORDS or min(request) < 0):
            raise InconsistentArenas(
                f"a replacement rank asks for {request.runs} runs of {request.width} words of block "
                f"{request.block} of stripe class {request.stripe_class} from word {request.first} on, as of "
                f"transaction {request.of}, and one request is for 1 to {CHUNK_WORDS} words: the network is "
                f"damaged, or the ranks run different versions of ecemb; restart the job"
            )
        return request


class _Message:
    """Memory of an answer on its way.

    Attributes:
        sent: waits until it is sent.
    """

    def __init__(self) -> None:
        self._words = np.empty(0, np.uint64)
        self.sent: Callable[[], None] = lambda: None

    def room(self, size: int) -> Words:
        """Memory of another answer, uint64 [size], of any content, once this one is sent."""
        self.sent()
        if len(self._words) < size:
            self._words = np.empty(size, np.uint64)
        return self._words[:size]


class Serving:
    """Answers the requests of replacement ranks, in a thread for each of them.

    Args:
        memory: this rank's, which is whole; its rows and parity change meanwhile.
        transport: of a group that has this rank and the replacement ranks, for this purpose alone.
        ranks: the job's ranks in the order of the group's.
        plan: the same on all ranks.
    """

    def __init__(
        self, memory: RankMemory, transport: Transport, ranks: Sequence[int], plan: RecoveryPlan
    ) -> None:
        self._as_of = AsOf(memory)
        self._transport, self._ranks = transport, list(ranks)
        asking = {task.rank for task in plan.rebuild if memory.rank in (rank for _, rank in task.sources)}
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"ecemb-serve-{rank}", daemon=True)
            for rank in sorted(asking)
        ]

    def start(self) -> None:
        """Begins to answer."""
        for thread in self._threads:
            thread.start()

    def close(self, wait_s: float = 1.0) -> None:
        """Waits for the threads: each ends when its replacement rank asks no more, or has ended.

        Args:
            wait_s: seconds to wait for each. A thread that goes on waits for requests, and ends with the
                process.
        """
        for thread in self._threads:
            thread.join(wait_s)

    def _serve(self, rank: int) -> None:
        peer, tag = self._ranks.index(rank), self._transport.tag(Kind.ANSWER, 0)
        what = f"serving rank {rank}, which is rebuilt"
        delays = Delays()
        answers, size = [_Message(), _Message()], ANSWER_WORDS
        try:
            while (request := self._next(peer, what)).runs:
                began_ns, answer, size = delays.so_far_ns(), answers[0], request.answer_words
                answers.reverse()
                words = answer.room(size)
                given = self._read(request, peer, words[ANSWER_WORDS:], what)
                words[:ANSWER_WORDS] = (Answer.GIVEN if given else Answer.GONE, delays.so_far_ns() - began_ns)
                answer.sent = self._transport.send(words, peer, what, tag)
            for answer in answers:
                answer.sent()
        except PeerFailure as error:  # its end is the failure detector's business
            logger.debug("rank %d is not served any more: %s", rank, error)
        except Exception as error:
            logger.exception("rank %d, which is rebuilt, is not served any more: %s", rank, error)
            refusal = np.zeros(size, np.uint64)
            refusal[0] = Answer.REFUSED
            self._transport.say(refusal, peer, tag)
        finally:
            delays.close()

    def _next(self, peer: int, what: str) -> Request:
        """The next request; its offsets, if it has some, follow."""
        words = Request().words
        self._transport.expect(words, peer, what, self._transport.tag(Kind.REQUEST, 0))()
        return Request.of_words(words)

    def _read(self, request: Request, peer: int, out: Words, what: str) -> bool:
        """Reads the runs of a request into `out` (uint64 [runs * width]); whether they are there."""
        offsets = np.full(request.runs, request.first, np.int64)
        if request.runs > 1:
            tag = self._transport.tag(Kind.REQUEST, 0)
            self._transport.expect(offsets.view(np.uint64), peer, what, tag)()
        runs = out.reshape(request.runs, request.width)
        return self._as_of.read(request.stripe_class, request.block, offsets, request.width, request.of, runs)
