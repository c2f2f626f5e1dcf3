"""The differences of a step on their way: one message for each of a rank's blocks, to each of its keepers.

The same wire as ecemb's: a gloo group, point to point, sizes announced before. A message has its head (bytes
of the passenger, rows of each segment), row numbers, differences, and with block 0 a passenger: bytes that
are kept as they are.

Must not know: where differences come from, what is done to memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from baselines.rows import Scratch

from .arithmetic import Ids, Numbers
from .stripes import Block, Segment, Stripes

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Part:
    """What a message says of one segment.

    Attributes:
        segment: of the sender's block.
        rows: int64 [m], of the segment: its first is 0.
        differences: [m, width].
    """

    segment: Segment
    rows: Ids
    differences: Numbers


@dataclass(frozen=True)
class Arrived:
    """A message.

    Attributes:
        source: rank.
        block: its block.
        row: number of the parity row that is kept here.
        parts: of the block's segments.
        passenger: uint8, with block 0.
    """

    source: int
    block: int
    row: int
    parts: list[Part]
    passenger: Bytes


class Wire:
    """Sends differences to their keepers, and takes in those that are kept here. All ranks.

    Args:
        stripes: who keeps what.
        dtype: of differences.

    Attributes:
        sent_bytes: so far.
    """

    def __init__(self, stripes: Stripes, dtype: np.dtype[Any]) -> None:
        self._stripes, self._dtype = stripes, dtype
        self._group = dist.new_group(backend="gloo")
        self._rank = dist.get_rank()
        self._outgoing = [Scratch() for _ in range(stripes.ring.k)]
        self._incoming: dict[tuple[int, int], Scratch] = {}
        self._sending: list[dist.Work] = []
        self.sent_bytes = 0

    def begin(self, block: int, counts: Sequence[int], passenger_bytes: int) -> tuple[list[Part], Bytes]:
        """Memory for a message, to be filled before `exchange`.

        Args:
            block: of this rank.
            counts: rows of each segment of it.
            passenger_bytes: 0 except with block 0.

        Returns:
            Its parts and its passenger, of any content.
        """
        segments = self._stripes.blocks[self._rank][block]
        size = self._size(segments, counts, passenger_bytes)
        message = self._outgoing[block].of(size)
        head = message[: 8 * (2 + len(counts))].view(np.int64)
        head[0], head[1], head[2:] = size, passenger_bytes, counts
        return _read(message, segments, self._dtype)

    def exchange(self, keepers: Collection[int]) -> list[Arrived]:
        """Sends the messages that were begun, and returns when all for this rank are there. All ranks.

        Args:
            keepers: ranks that get any; the same on all ranks.
        """
        stripes, rank = self._stripes, self._rank
        sizes: dict[tuple[int, int], Tensor] = {}
        waiting: list[tuple[tuple[int, int], int, dist.Work]] = []
        for row in range(stripes.ring.r if rank in keepers else 0):
            for block, source in enumerate(stripes.ring.members(rank, row)):
                sizes[source, block] = size = torch.empty(1, dtype=torch.int64)
                waiting.append(((source, block), row, self._receive(size, source, 2 * block)))
        for block, room in enumerate(self._outgoing):
            announced = room.of(8).view(np.int64)
            message = torch.from_numpy(room.of(int(announced[0])))
            for keeper in stripes.ring.keepers(rank, block):
                if keeper in keepers:
                    self._send(torch.from_numpy(announced), keeper, 2 * block)
                    self._send(message, keeper, 2 * block + 1)
        coming: list[tuple[tuple[int, int], int, Bytes, dist.Work]] = []
        for key, row, work in waiting:
            work.wait()
            message = self._incoming.setdefault(key, Scratch()).of(int(sizes[key]))
            coming.append(
                (key, row, message, self._receive(torch.from_numpy(message), key[0], 2 * key[1] + 1))
            )
        arrived: list[Arrived] = []
        for (source, block), row, message, work in coming:
            work.wait()
            read = _read(message, stripes.blocks[source][block], self._dtype)
            arrived.append(Arrived(source, block, row, *read))
        return arrived

    def finish(self) -> None:
        """Waits until all that was sent has left, so that it may be overwritten."""
        for work in self._sending:
            work.wait()
        self._sending.clear()

    def free(self) -> None:
        """Gives memory of messages back, once all has left; what `exchange` gave lies in it."""
        self.finish()
        self._outgoing = [Scratch() for _ in self._outgoing]
        self._incoming.clear()

    @property
    def message_bytes(self) -> int:
        """Memory that messages take."""
        return sum(room.nbytes for room in (*self._outgoing, *self._incoming.values()))

    def _size(self, segments: Block, counts: Sequence[int], passenger_bytes: int) -> int:
        head = 8 * (2 + len(counts))
        rows = 8 * sum(counts)
        numbers = sum(count * segment.width for count, segment in zip(counts, segments, strict=True))
        return head + rows + _aligned(numbers * self._dtype.itemsize) + passenger_bytes

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        self._sending.append(_started(dist.isend(tensor, group=self._group, group_dst=to, tag=tag)))
        self.sent_bytes += tensor.nbytes

    def _receive(self, tensor: Tensor, source: int, tag: int) -> dist.Work:
        return _started(dist.irecv(tensor, group=self._group, group_src=source, tag=tag))


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not in the group of the parity")
    return work


def _read(message: Bytes, segments: Block, dtype: np.dtype[Any]) -> tuple[list[Part], Bytes]:
    """A message's parts and passenger, in place."""
    at = 8 * (2 + len(segments))
    head = message[:at].view(np.int64)
    counts = head[2:].tolist()
    ids = message[at : at + 8 * sum(counts)].view(np.int64)
    at += ids.nbytes
    parts: list[Part] = []
    first = 0
    for segment, count in zip(segments, counts, strict=True):
        stop = at + count * segment.width * dtype.itemsize
        values = message[at:stop].view(dtype).reshape(count, segment.width)
        parts.append(Part(segment, ids[first : first + count], values))
        first, at = first + count, stop
    return parts, message[len(message) - int(head[1]) :]


def _aligned(size: int) -> int:
    return -(-size // 8) * 8
