"""Stripes as all ranks see them together: every keeper collects the rows under its parity, and compares.

What starts, verifies and scrubs alike stand on. Nothing is written here.

Must not know: what follows from a difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .delta import HEAD_WORDS, Delta, unpack
from .errors import InconsistentArenas
from .memory import RankMemory, encoded
from .parity import Syndrome
from .transport import Transport

Words = NDArray[np.uint64]

CHUNK_WORDS = 1 << 17


def longest_block(memory: RankMemory) -> int:
    """Words of the longest data block of any rank; the same on all."""
    return max(max(words) for words in memory.geometry.block_words)


def chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cuts words start..stop-1 of all blocks into what is worked on at a time, so that memory is bounded."""
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
    words, lengths = encoded(memory, start, stop)
    incoming = transport.all_to_all(np.array(lengths, np.int64).reshape(-1, 1), what)[:, 0].tolist()
    placement = memory.geometry.placement
    most = 0 if placement is None else placement.k * placement.r * (stop - start + HEAD_WORDS + 3)
    if min(incoming) < 0 or max(incoming) > most:
        raise InconsistentArenas(
            f"{what}: the ranks announce messages of {incoming} words, and none has more than {most}: the "
            f"network is damaged, or the ranks run different versions of ecemb; restart the job"
        )
    out = np.empty(sum(incoming), np.uint64)
    transport.exchange(words, lengths, out, incoming, what)
    edges = np.cumsum([0, *incoming]).tolist()
    return [
        (sender, delta)
        for sender, (a, b) in enumerate(itertools.pairwise(edges))
        for delta in unpack(out[a:b])
    ]


def compare(memory: RankMemory, transport: Transport, start: int, stop: int, what: str) -> list[Syndrome]:
    """Compares words start..stop-1 of the parity kept here with the rows under it. All ranks.

    Whoever returns knows that every rank has called it, and that its own rows were read before that.

    Returns:
        Where they differ, for each parity block kept here that does; empty in a world without parity.

    Raises:
        PeerFailure: a peer died or did not come before the deadline.
        InconsistentArenas: messages that no rank of this job sends.
    """
    if memory.parity is None:
        return []
    return memory.parity.syndromes(collect(memory, transport, start, stop, what), start, stop)
