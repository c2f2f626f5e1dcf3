"""Gives replacement ranks what they lack while training goes on: the side of those who hold it.

Owns the messages of a request, and one thread for each replacement rank that this rank serves. A request
names runs of words of one of this rank's blocks, and the transaction as of which they are wanted. The answer
has them, or says that they are gone: then the replacement rank asks again (docs/protocol.md, 9.2).

Must not know: what a replacement rank lacks, and what it does with an answer.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from typing import NamedTuple

import numpy as np

from ..errors import InconsistentArenas, PeerFailure
from ..group.channels import Channels, Mesh
from ..kernels.contract import Words
from ..local.as_of import AsOf
from ..local.rank_memory import RankMemory
from .delays import Delays
from .missing import CHUNK_WORDS
from .plan import RecoveryPlan

logger: logging.Logger = logging.getLogger("ecemb")

ANSWER_WORDS = 2
"""Words of an answer: an `Answer`, and for how long training waited for a processor, in ns. The runs follow,
if they are given."""


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
        runs: their number. The words at which they begin follow (int64), if there are several.
        first: the word at which the first run begins, counted from the block's start.
    """

    stripe_class: int = 0
    block: int = 0
    of: int = 0
    width: int = 0
    runs: int = 0
    first: int = 0

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


class Serving:
    """Answers the requests of replacement ranks, in a thread for each of them.

    Args:
        memory: this rank's, which is whole; its rows and parity change meanwhile.
        requests: connections with the replacement ranks.
        plan: the same on all ranks.
    """

    def __init__(self, memory: RankMemory, requests: Mesh, plan: RecoveryPlan) -> None:
        self._as_of, self._requests = AsOf(memory), requests
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"ecemb-serve-{rank}", daemon=True)
            for rank in asking(plan, memory.rank)
        ]

    def start(self) -> None:
        """Begins to answer."""
        for thread in self._threads:
            thread.start()

    def close(self, wait_s: float = 1.0) -> bool:
        """Waits for the threads: each ends when its replacement rank asks no more, or has ended.

        Args:
            wait_s: seconds to wait for each. A thread that goes on waits for requests until the connections
                hang up.

        Returns:
            Whether all have ended.
        """
        for thread in self._threads:
            thread.join(wait_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, rank: int) -> None:
        what = f"serving rank {rank}, which is rebuilt"
        channels, delays = self._requests.channels([rank]), Delays()
        room = np.empty(ANSWER_WORDS, np.uint64)
        try:
            while (request := _next(channels, rank, what)).runs:
                began_ns, size = delays.so_far_ns(), request.runs * request.width
                if len(room) < ANSWER_WORDS + size:
                    room = np.empty(ANSWER_WORDS + size, np.uint64)
                answer = room[: ANSWER_WORDS + size]
                offsets = np.full(request.runs, request.first, np.int64)
                if request.runs > 1:
                    channels.expect({rank: offsets})
                    channels.run(what)
                runs = answer[ANSWER_WORDS:].reshape(request.runs, request.width)
                given = self._as_of.read(
                    request.stripe_class, request.block, offsets, request.width, request.of, runs
                )
                room[:ANSWER_WORDS] = (Answer.GIVEN if given else Answer.GONE, delays.so_far_ns() - began_ns)
                channels.send(rank, answer if given else room[:ANSWER_WORDS])
        except PeerFailure as error:  # its end is the failure detector's business
            logger.debug("rank %d is not served any more: %s", rank, error)
        except Exception as error:
            logger.exception("rank %d, which is rebuilt, is not served any more: %s", rank, error)
            with contextlib.suppress(PeerFailure):
                channels.send(rank, np.array([Answer.REFUSED, 0], np.uint64))
                channels.run(what)
        finally:
            delays.close()


def asking(plan: RecoveryPlan, rank: int) -> list[int]:
    """The replacement ranks that a rank serves, ascending."""
    return sorted({task.rank for task in plan.rebuild if rank in (holder for _, holder in task.sources)})


def _next(channels: Channels, rank: int, what: str) -> Request:
    """Sends the last answer, and waits for the next request."""
    words = Request().words
    channels.expect({rank: words})
    channels.run(what)
    return Request.of_words(words)
