"""Sends blocks along chains of ranks: to rebuild lost blocks, and to move rows to another number of ranks.

Each rank of a chain adds the blocks that it has, times their weights, to the sum from the rank before it. The
last rank needs the sum, and so it receives each byte once for any k. A block that is not lost is a sum of one
source. Blocks are sent in chunks. The chunks of all chains take turns, which keeps every link busy, and
several are in flight: while one chunk is multiplied, the next ones arrive.

`Progress` is a line on stderr for work of more than a few seconds, if stderr is a terminal: logs and pipes
get log lines only.

Must not know: headers, the state of a replacement's arena, the layout of the arenas that rows move to.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..coding.code import Code
from ..coding.parity import class_words
from ..coding.placement import Placement
from ..coding.rows import WORD_BYTES
from ..kernels.contract import Kernels, Words
from ..memory.rank_memory import Geometry, RankMemory
from ..net.collectives import Transport
from .plan import Rebuild, RecoveryPlan
from .relayout import Layout, Move, Relayout, chunks

logger: logging.Logger = logging.getLogger("ecemb")


Wait = Callable[[], None]
Ready = Callable[[int, int], None]
"""Called with start and stop of words start..stop-1 of this rank's row space, once they are final."""

CHUNK_WORDS = 1 << 19
"""Words of a chunk, 4 MiB: with smaller chunks gloo's cost per message is noticeable."""
_AHEAD = 4
"""Chunks whose receives are posted at a time, including the chunk that is added up."""
_BUFFER_BYTES = 2 * _AHEAD * CHUNK_WORDS * WORD_BYTES
"""The most memory of one process for the buffers of chunks."""
PROCESS_BYTES = 2 * _BUFFER_BYTES
"""The most memory of one process during a move: buffers of chunks, and copies of chunks that it works on."""
TOGETHER = 256
"""Chunks between two barriers, so that a rank that is in no chain does not wait beyond a deadline."""
_SAY_S = 10.0  # seconds between two log lines of a move's progress


def rebuild_lost(memory: RankMemory, transport: Transport, plan: RecoveryPlan, ready: Ready) -> int:
    """Rebuilds the plan's lost blocks. All ranks.

    Args:
        memory: this rank's memory.
        transport: the control group.
        plan: the plan, the same on all ranks.
        ready: called for the ranges of this rank's lost rows, in ascending order within each block.

    Returns:
        Bytes of this rank's own blocks that it received.

    Raises:
        PeerFailure: a peer died; the next start rebuilds again.
    """
    geometry, received = memory.geometry, 0
    if geometry.placement is None:
        return 0

    def store(task: Rebuild, start: int, words: Words) -> None:
        memory.write_block_(task.stripe_class, task.block, start, words)
        bounds = memory.space.bounds
        if task.block < len(bounds) - 1:
            ready(bounds[task.block] + start, bounds[task.block] + start + len(words))

    sizes = {task: _words_of(task, geometry, geometry.placement) for task in plan.rebuild}
    blocks = [
        Hop(
            what=f"the rebuild of block {task.block} of stripe class {task.stripe_class}",
            stripe_class=task.stripe_class,
            words=range(size),
            sources=task.sources,
            weights=weights_of(geometry.generator, task.block, task.sources),
            chain=chain,
            on_chunk=functools.partial(store, task),
        )
        for task, size in sizes.items()
        if memory.rank in (chain := [*(rank for _, rank in task.sources), task.rank])
    ]
    total = sum(len(block.words) for block in blocks) * WORD_BYTES
    every = chunked(max(sizes.values(), default=0))
    with Progress("rebuilding lost memory, this rank's part", total, shown=memory.rank == 0) as progress:
        relay = Relay({memory.rank: memory}, transport, memory.kernels, progress)
        while together := list(itertools.islice(every, TOGETHER)):
            turns = itertools.product(together, blocks)
            hops = (block.cut(start, stop) for (start, stop), block in turns if start < len(block.words))
            received += relay.run(hops, "the rebuild of lost blocks")
    return received


def carry(
    plan: Relayout,
    old: Layout,
    memories: Mapping[int, RankMemory],
    generator: NDArray[np.uint8],
    transport: Transport,
    kernels: Kernels,
    on_chunk: Callable[[Move, Words], None],
) -> int:
    """Sends all rows of the plan to their target ranks, as records of the old layout. All ranks.

    Args:
        plan: the plan, the same on all ranks.
        old: the old layout.
        memories: old rank -> its memory at the plan's transaction, for the arenas that this worker holds.
        generator: generator of the old code, uint8 [n, k]; read.
        transport: the control group of the new ranks.
        kernels: kernels for the arithmetic.
        on_chunk: called with each chunk whose target is this rank, and its records: uint64 [words], read.

    Returns:
        Bytes of records that came to this rank, including those from arenas that it holds.

    Raises:
        PeerFailure: a peer died; the old arenas are unchanged.
    """
    rank, placement = transport.rank, old.placement
    weights = functools.cache(functools.partial(weights_of, generator))

    def hops(moves: Iterable[Move]) -> Iterator[Hop]:
        for move in moves:
            chain = [one for one, _ in itertools.groupby(plan.path(move))]
            if rank in chain:
                yield Hop(
                    what=f"the move of {move.key!r}",
                    stripe_class=-1 if placement is None else placement.stripe_class(move.rank, move.block),
                    words=move.words,
                    sources=move.sources,
                    weights=weights(move.block, move.sources),
                    chain=chain,
                    on_chunk=lambda _, words, move=move: on_chunk(move, words),
                )

    total = sum(len(move.words) for move in plan.moves if rank in plan.path(move)) * WORD_BYTES
    wanted = sum(len(move.words) for move in plan.moves if move.target == rank) * WORD_BYTES
    every = chunks(plan.moves, CHUNK_WORDS)
    received, said = 0, time.monotonic()
    with Progress("moving rows, this rank's part", total, shown=rank == 0) as progress:
        relay = Relay(memories, transport, kernels, progress)
        while together := list(itertools.islice(every, TOGETHER)):
            received += relay.run(hops(together), "the move of rows")
            if rank == 0 and time.monotonic() > said + _SAY_S:
                said = time.monotonic()
                logger.info(
                    "the move: %d percent of this rank's rows are there", 100 * received // max(1, wanted)
                )
    return received


def weights_of(
    generator: NDArray[np.uint8], block: int, sources: Sequence[tuple[int, int]]
) -> NDArray[np.uint8]:
    """The weights with which sources add up to a block of their stripe: uint8 [sources], new.

    Args:
        generator: the code's generator, uint8 [n, k]; read.
        block: number of the block in its stripe.
        sources: k pairs (block, rank), or one pair of the block itself.
    """
    blocks = [one for one, _ in sources]
    if blocks == [block]:
        return np.ones(1, np.uint8)
    return Code(*generator.shape).decode_weights([block], blocks, generator)[0]


def chunked(words: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the chunks into which a number of words is cut."""
    return ((start, min(start + CHUNK_WORDS, words)) for start in range(0, words, CHUNK_WORDS))


def _words_of(task: Rebuild, geometry: Geometry, placement: Placement) -> int:
    """Number of words of a lost block."""
    if task.block < placement.k:
        return geometry.block_words[task.rank][task.block]
    return class_words(placement, geometry.block_words, task.stripe_class)


@dataclasses.dataclass(frozen=True)
class Hop:
    """This rank's part in a chain that adds up words of a block.

    Attributes:
        what: name of the waits in errors.
        stripe_class: the block's stripe class; -1 in a world without parity.
        words: the words, counted from the block's start.
        sources: pairs (block, rank) that add up to the block; the rank is the one whose memory has it.
        weights: weights of the sources in the sum, uint8 [sources].
        chain: the ranks of the group that the sum passes through; the last one needs it.
        on_chunk: called on the chain's last rank with the first word's number and the sum, uint64 [words],
            read.
    """

    what: str
    stripe_class: int
    words: range
    sources: Sequence[tuple[int, int]]
    weights: NDArray[np.uint8]
    chain: Sequence[int]
    on_chunk: Callable[[int, Words], None]

    def cut(self, start: int, stop: int) -> Hop:
        """This hop for words start..stop-1 of its words."""
        return dataclasses.replace(self, words=self.words[start:stop])


class Relay:
    """Runs this rank's hops of all chains.

    All chunks of all chains have one order. Every rank begins and ends its hops in that order, so messages
    between two ranks are posted in the same order at both ends. No cycle of waits can form. Proof: take the
    first chunk that is not done, and the first rank in its chain that has not done its hop. The rank waits
    for no other chunk: its earlier hops are done and received, so its buffers are free. Its predecessor has
    posted the send, and the rank posts the receive; so it continues.

    Args:
        memories: rank -> its memory, for the ranks in `Hop.sources` whose blocks this process adds.
        transport: the control group.
        kernels: kernels for the arithmetic.
        progress: counts the chunks' bytes.
    """

    def __init__(
        self, memories: Mapping[int, RankMemory], transport: Transport, kernels: Kernels, progress: Progress
    ) -> None:
        self._memories, self._transport, self._kernels = memories, transport, kernels
        self._progress = progress

    def run(self, hops: Iterator[Hop], what: str) -> int:
        """Runs this rank's hops, with at most `_AHEAD` chunks in flight. All ranks.

        Args:
            hops: this rank's hops, in the order of all chunks.
            what: name of the barrier at the end in errors.

        Returns:
            Bytes of the chunks whose chains end at this rank.

        Raises:
            PeerFailure: a peer died.
        """
        # Twice as many buffers as chunks in flight: the last send from the next buffer has most likely ended.
        buffers = [_Buffer() for _ in range(2 * _AHEAD)]
        in_turn = itertools.cycle(buffers)
        begun: deque[tuple[Hop, _Buffer, Wait]] = deque()
        kept_bytes = 0
        while True:
            for hop in itertools.islice(hops, _AHEAD - len(begun)):
                buffer = next(in_turn)
                begun.append((hop, buffer, self._begin(hop, buffer.take(len(hop.words)))))
            if not begun:
                break
            hop, buffer, arrived = begun.popleft()
            arrived()
            kept_bytes += self._go_on(hop, buffer)
            self._progress.advance(buffer.words.nbytes)
        for buffer in buffers:
            buffer.sent()
        self._transport.barrier(what)
        return kept_bytes

    def _begin(self, hop: Hop, words: Words) -> Wait:
        """Posts the receive of the sum from the rank before; returns a function that waits for it."""
        place = hop.chain.index(self._transport.rank)
        return self._transport.expect(words, hop.chain[place - 1], hop.what) if place else _nothing

    def _go_on(self, hop: Hop, buffer: _Buffer) -> int:
        """Adds this process's blocks to the sum and sends it on; returns its bytes if the chain ends here."""
        words = self._sum(hop, buffer.words)
        after = hop.chain.index(self._transport.rank) + 1
        if after == len(hop.chain):
            hop.on_chunk(hop.words.start, words)
            return words.nbytes
        buffer.sent = self._transport.send(words, hop.chain[after], hop.what)
        return 0

    def _sum(self, hop: Hop, words: Words) -> Words:
        """Adds this process's blocks, times their weights, to the sum of the ranks before.

        A block that is shorter than the hop's words counts as zeros behind its end.

        Args:
            hop: the hop.
            words: the sum of the ranks before, uint64 [words]; overwritten. At the chain's start its content
                is ignored.

        Returns:
            `words`; or a view of the block, if the sum is this one block.
        """
        sources = zip(hop.sources, hop.weights, strict=True)
        own = [(rank, block, int(weight)) for (block, rank), weight in sources if rank in self._memories]
        for number, (rank, block, weight) in enumerate(own):
            read = self._memories[rank].read_block
            added = read(hop.stripe_class, block, hop.words.start, hop.words.stop)
            if number or hop.chain[0] != self._transport.rank:
                self._kernels.mul_add_block_(words[: len(added)], added, weight)
            elif len(own) == 1 and weight == 1 and len(added) == len(words):
                return added
            else:
                self._kernels.dot([added], np.full((1, 1), weight, np.uint8), [words[: len(added)]])
                words[len(added) :] = 0
        return words


def _nothing() -> None:
    pass


class _Buffer:
    """Memory of one chunk in flight.

    Attributes:
        words: the chunk, uint64.
        sent: waits until the chunk is sent to the next rank.
    """

    def __init__(self) -> None:
        self._memory = self.words = np.empty(0, np.uint64)
        self.sent: Wait = _nothing

    def take(self, size: int) -> Words:
        """Waits until the previous chunk is sent, and returns memory for a chunk: uint64 [size]."""
        self.sent()
        self.sent = _nothing
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint64)
        self.words = self._memory[:size]
        return self.words


_AFTER_S = 3.0
_EVERY_S = 0.2


class Progress:
    """A line on stderr with the progress of some work; a context that removes the line at its end.

    Args:
        what: Name of the work, e.g. "rebuilding".
        total: Bytes of the whole work.
        shown: Whether this process writes the line.
    """

    def __init__(self, what: str, total: int, *, shown: bool) -> None:
        self._what, self._total = what, total
        self._shown = shown and sys.stderr.isatty()
        self._began = time.monotonic()
        self._next = self._began + _AFTER_S
        self._done = self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            sys.stderr.write(f"\r{'':{self._width}}\r")
            sys.stderr.flush()

    def advance(self, size_bytes: int) -> None:
        """Counts bytes of work as done."""
        self._done += size_bytes
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next = now + _EVERY_S
        spent = now - self._began
        part = min(1.0, self._done / max(1, self._total))
        left = f", about {spent * (1 - part) / part:.0f} s left" if part else ""
        line = f"ecemb: {self._what}: {part:4.0%} of {self._total / 1e9:.2f} GB, {spent:.0f} s{left}"
        sys.stderr.write(f"\r{line:{self._width}}")
        sys.stderr.flush()
        self._width = max(self._width, len(line))
