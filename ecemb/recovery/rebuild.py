"""Rebuilds lost blocks of rows and of parity.

Each survivor in the chain of a lost block adds its own block, times its weight, to the sum from the survivor
before it. The chain ends at the replacement rank, so the replacement rank receives each lost byte once for
any k. Blocks travel in chunks. The chunks of all lost blocks take turns, which keeps every link busy, and
several are in flight: while one chunk is multiplied, the next ones arrive.

Must not know: headers, and the state of a replacement's arena.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..coding.code import Code
from ..coding.parity import class_words
from ..coding.placement import Placement
from ..coding.rows import WORD_BYTES
from ..group.collectives import Transport
from ..kernels.contract import Kernels, Words
from ..local.rank_memory import Geometry, RankMemory
from .plan import Rebuild, RecoveryPlan
from .progress import Progress

Wait = Callable[[], None]
Ready = Callable[[int, int], None]
"""Called with words start..stop-1 of this rank's row space, once they are final."""

CHUNK_WORDS = 1 << 19
"""4 MiB: smaller chunks make gloo's work per message visible."""
_AHEAD = 4
"""Chunks whose receives are posted at a time, including the one in work."""
BUFFER_BYTES = 2 * _AHEAD * CHUNK_WORDS * WORD_BYTES
"""The most memory of chunks on their way, on one rank."""
TOGETHER = 256
"""Chunks between two barriers, so that a rank without a part does not wait beyond a deadline."""


def rebuild_lost(
    memory: RankMemory, transport: Transport, plan: RecoveryPlan, kernels: Kernels, ready: Ready
) -> int:
    """Rebuilds the plan's lost blocks. All ranks.

    All chunks of all blocks have one order. Every rank begins and ends its parts in that order, so messages
    between two ranks are posted in the same order at both ends. No cycle of waits can form. Proof: take the
    first chunk that is not done, and the first rank in its chain that has not done its part. The rank waits
    for no other chunk: its earlier parts are done and received, so its buffers are free. Its predecessor has
    posted the send, and the rank posts the receive; so it continues.

    Args:
        memory: This rank's.
        transport: The control group.
        plan: The same on all ranks.
        kernels: The kernels for the arithmetic.
        ready: Called for this rank's lost rows, each block's in their order.

    Returns:
        Bytes that this rank received for itself.

    Raises:
        PeerFailure: A peer died; the next start rebuilds again.
    """
    placement, received = memory.geometry.placement, 0
    if placement is None or memory.parity is None:
        return 0
    chains = [_Chain(task, placement, memory, transport, kernels, ready) for task in plan.rebuild]
    mine = [chain for chain in chains if chain.place is not None]
    every = chunked(max((chain.words for chain in chains), default=0))
    size = sum(chain.words for chain in mine) * WORD_BYTES
    with Progress("rebuilding lost memory, this rank's part", size, shown=memory.rank == 0) as progress:
        while together := list(itertools.islice(every, TOGETHER)):
            turns = itertools.product(together, mine)
            parts = (
                (chain, start, min(stop, chain.words))
                for (start, stop), chain in turns
                if start < chain.words
            )
            received += work_through(parts, progress)
            transport.barrier("the rebuild of lost blocks")
    return received


def weights_of(task: Rebuild, geometry: Geometry) -> NDArray[np.uint8]:
    """The weights of a task's sources in the sum that is its lost block: uint8 [k], new."""
    _, k = geometry.generator.shape
    code = Code(len(geometry.generator), k)
    return code.decode_weights([task.block], [block for block, _ in task.sources], geometry.generator)[0]


def chunked(words: int) -> Iterator[tuple[int, int]]:
    """The bounds of the chunks of a number of words."""
    return ((start, min(start + CHUNK_WORDS, words)) for start in range(0, words, CHUNK_WORDS))


class Link(Protocol):
    """This rank's place in a chain of ranks that adds up chunks and passes them on."""

    def begin(self, words: Words) -> Wait:
        """Starts to receive a chunk of the sum; returns a wait for its arrival."""
        ...

    def go_on(self, start: int, buffer: Buffer) -> int:
        """Does this rank's part in a chunk that has arrived; returns the bytes that it keeps."""
        ...


def work_through(parts: Iterator[tuple[Link, int, int]], progress: Progress) -> int:
    """Does this rank's parts, with at most `_AHEAD` in flight; returns the bytes that it keeps.

    Args:
        parts: links, each with the first and the last word of a chunk, in the order of all ranks.
        progress: counts the chunks' bytes.
    """
    # Twice as many buffers, so that the next buffer's last send has most likely ended.
    buffers = [Buffer() for _ in range(2 * _AHEAD)]
    in_turn = itertools.cycle(buffers)
    begun: deque[tuple[Link, int, Buffer, Wait]] = deque()
    received = 0
    while True:
        for chain, start, stop in itertools.islice(parts, _AHEAD - len(begun)):
            buffer = next(in_turn)
            begun.append((chain, start, buffer, chain.begin(buffer.take(stop - start))))
        if not begun:
            break
        chain, start, buffer, arrived = begun.popleft()
        arrived()
        received += chain.go_on(start, buffer)
        progress.advance(buffer.words.nbytes)
    for buffer in buffers:
        buffer.sent()
    return received


def _nothing() -> None:
    pass


class Buffer:
    """Memory of one chunk on its way.

    Attributes:
        words: The chunk.
        sent: Waits until the chunk is sent on.
    """

    def __init__(self) -> None:
        self._memory = self.words = np.empty(0, np.uint64)
        self.sent: Wait = _nothing

    def take(self, size: int) -> Words:
        """Returns room for a chunk of `size` words, once the previous chunk is sent."""
        self.sent()
        self.sent = _nothing
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint64)
        self.words = self._memory[:size]
        return self.words


class _Chain:
    """One lost block, and this rank's place in the chain that rebuilds it.

    Attributes:
        words: The block's length.
        place: This rank's place; None outside of the chain.
    """

    def __init__(
        self,
        task: Rebuild,
        placement: Placement,
        memory: RankMemory,
        transport: Transport,
        kernels: Kernels,
        ready: Ready,
    ) -> None:
        self._task, self._memory, self._transport, self._kernels = task, memory, transport, kernels
        self._ready = ready
        self._what = f"the rebuild of block {task.block} of stripe class {task.stripe_class}"
        self._ranks = [rank for _, rank in task.sources] + [task.rank]
        self.place = self._ranks.index(memory.rank) if memory.rank in self._ranks else None
        geometry = memory.geometry
        self.words = class_words(placement, geometry.block_words, task.stripe_class)
        if task.block < placement.k:
            self.words = geometry.block_words[task.rank][task.block]
        self._weights = weights_of(task, geometry)

    def begin(self, words: Words) -> Wait:
        """Starts to receive a chunk of the sum; returns a wait for its arrival."""
        if not self.place:
            return _nothing
        return self._transport.expect(words, self._ranks[self.place - 1], self._what)

    def go_on(self, start: int, buffer: Buffer) -> int:
        """Does this rank's part in a chunk that has arrived; returns the bytes that it keeps."""
        task, words, place = self._task, buffer.words, self.place or 0
        if place == len(task.sources):
            self._memory.write_block_(task.stripe_class, task.block, start, words)
            bounds = self._memory.space.bounds
            if task.block < len(bounds) - 1:
                self._ready(bounds[task.block] + start, bounds[task.block] + start + len(words))
            return words.nbytes
        block, weight = task.sources[place][0], self._weights[place : place + 1]
        own = self._memory.read_block(task.stripe_class, block, start, start + len(words))
        if place:
            self._kernels.mul_add_block_(words[: len(own)], own, int(weight[0]))
        elif weight[0] == 1 and len(own) == len(words):
            words = own
        else:
            self._kernels.dot([own], weight.reshape(1, 1), [words[: len(own)]])
            words[len(own) :] = 0
        buffer.sent = self._transport.send(words, self._ranks[place + 1], self._what)
        return 0
