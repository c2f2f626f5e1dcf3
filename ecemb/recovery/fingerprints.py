"""Fingerprints of blocks, by which parity is compared with rows without sending rows.

Words of a block are cut into pages, and the fingerprint is the XOR over pages j of x_j times page j in
GF(2^8), with random x_j that are never 0, the same for all blocks and new in each comparison. The code is
linear and works on bytes, so fingerprints of a stripe's blocks fit the code if the blocks do. If one page of
a block is wrong, its fingerprint is wrong in the same bytes. Wrong bytes at the same place of several pages
cancel each other out with a probability of about 1 / 255 for each such place.

Owns the fingerprints and the equations between them. Must not know when they are compared, and what follows
from a difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..coding.code import Code
from ..coding.parity import class_words
from ..kernels.contract import Kernels, Words
from ..memory.header import Word
from ..memory.rank_memory import RankMemory
from ..net.collectives import Transport
from .scrub import CHUNK_WORDS

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
        step = max(1, CHUNK_WORDS // size)  # pages that are read at a time
        for page in range(0, self._weights.size, step):
            start = self._start + page * size
            words = read(start, min(start + step * size, self._stop))
            whole = len(words) // size
            pages = [words[at : at + size] for at in range(0, whole * size, size)]
            if rest := len(words) - whole * size:
                pages.append(np.zeros(size, np.uint64))
                pages[-1][:rest] = words[whole * size :]
            self._kernels.dot(pages, self._weights[:, page : page + len(pages)], [part])
            total ^= part
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


def wrong_blocks(memory: RankMemory, transport: Transport, lost: Sequence[int], what: str) -> dict[int, int]:
    """Compares the blocks that survived of stripes with lost blocks, where more are left than k. All ranks.

    Of each class the ranks send fingerprints of whole blocks to one of them. With k + 1 blocks, one equation
    shows whether they fit. With more, the wrong block is the one without which the others fit. Two wrong
    blocks may look like another single one with k + 2 blocks, as in `Code.locate`.

    Args:
        memory: this rank's memory, undone and redone.
        transport: the control group.
        lost: ranks whose memory is lost, the same on all ranks.
        what: names the wait in errors.

    Returns:
        Stripe class -> its wrong block, or -1 if that isn't known; only classes whose blocks don't fit. The
        same on all ranks.

    Raises:
        PeerFailure: a peer died.
    """
    placement, rank = memory.geometry.placement, memory.rank
    if placement is None:
        return {}
    found: dict[int, int] = {}
    for c, blocks in placement.erasures(lost).items():
        size = class_words(placement, memory.geometry.block_words, c)
        if len(blocks) == placement.r or not size:
            continue
        members = placement.members(c)
        left = [block for block in range(placement.n) if block not in blocks]
        *others, judge = (members[block] for block in left)
        prints = Fingerprints(0, size, seed_of(memory, c), memory.kernels)
        own = {members[at]: prints.of(_reader(memory, c, at)) for at in left if members[at] == rank}
        sent = {judge: own[rank]} if rank in others else {}
        received = {one: np.empty(prints.page_words, np.uint64) for one in others if rank == judge}
        transport.exchange(sent, received, what)
        if rank == judge:
            whole = {block: (received | own)[members[block]] for block in left}
            if (wrong := _wrong(whole, memory)) is not None:
                found[c] = wrong
    answers = transport.gather(json.dumps(list(found.items())).encode(), what)
    return {c: block for text in answers for c, block in json.loads(text)}


def _wrong(blocks: Mapping[int, Words], memory: RankMemory) -> int | None:
    """The block of a stripe that is wrong, by fingerprints; -1 if it isn't known, None if all fit.

    Args:
        blocks: block -> its fingerprint, uint64; more than k of them.
        memory: of any rank.
    """
    if _fit(blocks, memory):
        return None
    rest = ({other: blocks[other] for other in blocks if other != block} for block in blocks)
    alone = [block for block, others in zip(blocks, rest, strict=True) if _fit(others, memory)]
    is_known = len(blocks) > 1 + memory.geometry.generator.shape[1] and len(alone) == 1
    return alone[0] if is_known else -1


def _fit(blocks: Mapping[int, Words], memory: RankMemory) -> bool:
    """Whether all but k of these fingerprints are those that the k determine."""
    generator = memory.geometry.generator
    code = Code(*generator.shape)
    basis, rest = list(blocks)[: code.k], list(blocks)[code.k :]
    expected = [np.empty_like(blocks[block]) for block in rest]
    weights = code.decode_weights(rest, basis, generator)
    memory.kernels.dot([blocks[block] for block in basis], weights, expected)
    pairs = zip(rest, expected, strict=True)
    return all(np.array_equal(blocks[block], words) for block, words in pairs)
