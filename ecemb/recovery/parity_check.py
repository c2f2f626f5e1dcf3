"""Compares parity with the rows under it, on all ranks together.

Recovery's verification and the scrub build on this module. It writes nothing.

Must not know: what a difference leads to.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..coding.parity import Delta, Syndrome, parted, size_words, unpack
from ..errors import InconsistentArenas
from ..group.collectives import Transport
from ..local.rank_memory import RankMemory, encoded

CHUNK_WORDS = 1 << 17


def longest_block(memory: RankMemory) -> int:
    """Words of the longest data block of any rank; the same on all."""
    return max(max(words) for words in memory.geometry.block_words)


def chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cuts words start..stop-1 of all blocks into chunks, so that memory is bounded."""
    for at in range(start, stop, CHUNK_WORDS):
        yield at, min(at + CHUNK_WORDS, stop)


def collect(
    memory: RankMemory, transport: Transport, start: int, stop: int, what: str
) -> list[tuple[int, Delta]]:
    """Words start..stop-1 of every block whose parity is kept here, as deltas from zero. All ranks.

    Raises:
        PeerFailure: a peer died or did not come before the deadline.
        InconsistentArenas: messages that no rank of this job sends.
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


def compare(memory: RankMemory, transport: Transport, start: int, stop: int, what: str) -> list[Syndrome]:
    """Compares words start..stop-1 of the parity kept here with the rows under it. All ranks.

    A rank that returns knows that every rank has called it, and that its own rows were read before that.

    Returns:
        The differing words of each parity block kept here that differs; empty without parity.

    Raises:
        PeerFailure: a peer died or did not come before the deadline.
        InconsistentArenas: messages that no rank of this job sends.
    """
    if memory.parity is None:
        return []
    return memory.parity.syndromes(collect(memory, transport, start, stop, what), start, stop)
