"""Fingerprints of blocks, by which parity is compared with rows without sending rows.

Words of a block are cut into pages, and the fingerprint is the XOR over pages j of x_j times page j in
GF(2^8), with random x_j that are never 0, the same for all blocks and new in each comparison. The code is
linear and works on bytes, so fingerprints of a stripe's blocks fit the code if the blocks do. If one page of
a block is wrong, its fingerprint is wrong in the same bytes. Wrong bytes at the same place of several pages
cancel each other out with a probability of about 1 / 255 for each such place.

Owns the fingerprints and the equations between them. Must not know when they are compared, and what follows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..kernels.contract import Kernels, Words
from ..memory.header import Word
from ..memory.rank_memory import RankMemory
from ..net.collectives import Transport
from .scrub import parity_chunks

PAGE_WORDS = 1 << 13


class Fingerprints:
    """The fingerprints of words start..stop-1 of all blocks, in one comparison.

    Args:
        start: first word, counted from the blocks' start.
        stop: end of the words; blocks may end before it, and count as zeros behind their end.
        seed: numbers that give the weights of pages; the same on all ranks.
        kernels: does the arithmetic.

    Attributes:
        page_words: length of a fingerprint, in words.
    """

    def __init__(self, start: int, stop: int, seed: tuple[int, ...], kernels: Kernels) -> None:
        self._start, self._stop, self._kernels = start, stop, kernels
        self.page_words: int = min(PAGE_WORDS, stop - start)
        pages = -(-(stop - start) // self.page_words)
        self._weights = np.random.default_rng(seed).integers(1, 256, (1, pages), np.uint8)

    def of(self, read: Callable[[int, int], Words]) -> Words:
        """The fingerprint of a block.

        Args:
            read: returns words start..stop-1 of the block, fewer at its end: uint64, read.

        Returns:
            uint64 [page_words], new.
        """
        size = self.page_words
        total, part = np.zeros((2, size), np.uint64)
        page = 0
        for start, stop in parity_chunks(self._start, self._stop):
            words = read(start, stop)
            whole = len(words) // size
            pages = [words[at : at + size] for at in range(0, whole * size, size)]
            if rest := len(words) - whole * size:
                pages.append(np.zeros(size, np.uint64))
                pages[-1][:rest] = words[whole * size :]
            self._kernels.dot(pages, self._weights[:, page : page + len(pages)], [part])
            total ^= part
            page += len(pages)
        return total


def seed_of(memory: RankMemory, number: int) -> tuple[int, ...]:
    """The seed of a comparison of this start, the same on all ranks.

    Args:
        memory: this rank's memory, joined.
        number: the comparison's number.
    """
    return memory.arena.get(Word.GENERATION_ID) & (1 << 63) - 1, number


def parity_differs(
    memory: RankMemory, transport: Transport, start: int, stop: int, seed: tuple[int, ...], what: str
) -> bool:
    """Compares fingerprints of parity kept here with those of the rows under it. All ranks.

    Returns:
        Whether words start..stop-1 of a parity block that is kept here differ from the rows under it.

    Raises:
        PeerFailure: a peer died, or did not call this before the deadline.
    """
    placement, rank, generator = memory.geometry.placement, memory.rank, memory.geometry.generator
    if placement is None:
        return False
    prints = Fingerprints(start, stop, seed, memory.kernels)
    own = np.stack([prints.of(_reader(memory, -1, block)) for block in range(placement.k)])
    sent = {keeper: own[at.start : at.stop].reshape(-1) for keeper, at in placement.recipients(rank).items()}
    received = {
        sender: np.empty((len(placement.recipients(sender)[rank]), prints.page_words), np.uint64)
        for sender in placement.senders(rank)
    }
    kept = {c: (row, prints.of(_reader(memory, c, placement.k + row))) for c, row in placement.kept(rank)}
    transport.exchange(sent, {sender: words.reshape(-1) for sender, words in received.items()}, what)
    for sender, prints_of_blocks in received.items():
        for block, words in zip(placement.recipients(sender)[rank], prints_of_blocks, strict=True):
            row, left = kept[placement.stripe_class(sender, block)]
            memory.kernels.mul_add_block_(left, words, int(generator[placement.k + row, block]))
    return any(left.any() for _, left in kept.values())


def _reader(memory: RankMemory, stripe_class: int, block: int) -> Callable[[int, int], Words]:
    return lambda start, stop: memory.read_block(stripe_class, block, start, stop)
