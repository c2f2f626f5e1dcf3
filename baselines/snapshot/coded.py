"""Parity of all ranks' own parts, over GF(2^8), at other ranks: what ECCheck does to snapshots in memory.

A rank's own part is cut into k blocks, padded with zeros to the length of the longest one's, and its parity
is rotated over all ranks (`baselines.ring`). The code is zfec's.

Must not know: when snapshots are made, what is in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from baselines.ring import Ring
from baselines.slots import Slots, Stamp

from .moves import carry_out
from .plan import Plan, own, parity, plan_coded
from .redundancy import Redundancy, sizes

Bytes = NDArray[np.uint8]

_PIECE_BYTES = 1 << 22
"""Of a block, that are coded at a time."""


@dataclass(frozen=True)
class Coded(Redundancy):
    """Any r = n - k lost machines are survived.

    Attributes:
        n: blocks of a stripe; as many ranks, or more.
        k: of them with data.

    Raises:
        ValueError: not 1 <= k < n <= 256.
    """

    n: int
    k: int

    def __post_init__(self) -> None:
        if not 1 <= self.k < self.n <= 256:
            raise ValueError(f"a code (n, k) over GF(2^8) has 1 <= k < n <= 256; got ({self.n}, {self.k})")

    @property
    def survives(self) -> int:
        """See `Redundancy.survives`."""
        return self.n - self.k

    def plan(self, held: Sequence[Sequence[tuple[str, Stamp]]]) -> Plan | None:
        """See `Redundancy.plan`."""
        return plan_coded(held, Ring(self.n, self.k, len(held)))

    def spread(self, stamp: Stamp, slots: Slots, group: dist.ProcessGroup | None = None) -> int:
        """See `Redundancy.spread`."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        ring = Ring(self.n, self.k, ranks)
        part = slots.read(own(rank), stamp)
        lengths = sizes(len(part), group)
        block_bytes = -(-max(lengths) // self.k)
        kept = slots.begin(parity(rank), 8 * ranks + ring.r * block_bytes)
        head, rows = _opened(kept, ranks, ring.r)
        head[:] = lengths
        encoder, sent_bytes = self._zfec().Encoder(self.k, self.n), 0
        for start, stop in _pieces(block_bytes):
            sending: list[tuple[dist.Work | None, Tensor]] = []
            for block in range(self.k):
                piece = torch.from_numpy(_piece(part, block * block_bytes, start, stop))
                for keeper in ring.keepers(rank, block):
                    sending.append((dist.isend(piece, keeper, group=group, tag=block), piece))
                    sent_bytes += piece.numel()
            for row in range(ring.r):
                data: list[bytes] = []
                for block, source in enumerate(ring.members(rank, row)):
                    data.append(_received(stop - start, source, block, group))
                [coded] = encoder.encode(data, [self.k + row])
                rows[row, start:stop] = np.frombuffer(coded, np.uint8)
            for work, _ in sending:
                if work is not None:
                    work.wait()
        slots.seal(stamp)
        return sent_bytes

    def fetch(self, plan: Plan, slots: Slots) -> int:
        """See `Redundancy.fetch`."""
        sent_bytes = carry_out(plan, slots)
        if not plan.lost:
            return sent_bytes
        rank, ranks = dist.get_rank(), dist.get_world_size()
        ring = Ring(self.n, self.k, ranks)
        survivors = [one for one in range(ranks) if one not in plan.lost]
        head, rows, part = np.zeros(ranks, np.int64), np.empty((ring.r, 0), np.uint8), np.empty(0, np.uint8)
        if rank in survivors:
            head, rows = _opened(slots.read(parity(rank), plan.stamp), ranks, ring.r)
            part = slots.read(own(rank), plan.stamp)
        lengths = torch.from_numpy(head.copy())
        dist.broadcast(lengths, survivors[0])
        block_bytes = -(-int(lengths.max()) // self.k)
        for lost in plan.lost:
            out = slots.begin(own(lost), int(lengths[lost])) if rank == lost else None
            for block, (start, stop) in itertools.product(range(self.k), _pieces(block_bytes)):
                numbered = enumerate(ring.stripe(lost, block))
                there = ((number, holder) for number, holder in numbered if holder in survivors)
                used = dict(itertools.islice(there, self.k))
                if out is not None:
                    place = out[block * block_bytes + start : block * block_bytes + stop]
                    place[:] = self._decoded(block, used, stop - start)[: len(place)]
                for number in (number for number, holder in used.items() if holder == rank):
                    if number < self.k:
                        piece = _piece(part, number * block_bytes, start, stop)
                    else:
                        piece = rows[number - self.k, start:stop].copy()
                    dist.send(torch.from_numpy(piece), lost, tag=number)
                    sent_bytes += len(piece)
            if out is not None:
                slots.seal(plan.stamp)
        return sent_bytes

    def _decoded(self, block: int, used: Mapping[int, int], size: int) -> Bytes:
        """A piece of a lost block, of the pieces of k others: number in the stripe -> who sends it."""
        pieces = [_received(size, holder, number) for number, holder in used.items()]
        return np.frombuffer(self._zfec().Decoder(self.k, self.n).decode(pieces, list(used))[block], np.uint8)

    @staticmethod
    def _zfec() -> Any:
        """Imported where it is used: other ways don't need it."""
        import zfec

        return zfec


def _opened(kept: Bytes, ranks: int, r: int) -> tuple[NDArray[np.int64], Bytes]:
    """What a rank keeps: the lengths of all ranks' own parts, and its r parity rows; in place."""
    return kept[: 8 * ranks].view(np.int64), kept[8 * ranks :].reshape(r, -1)


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, _PIECE_BYTES):
        yield start, min(start + _PIECE_BYTES, size)


def _piece(part: Bytes, begin: int, start: int, stop: int) -> Bytes:
    """Bytes start..stop-1 of the block that begins there, new, with zeros after the part's end."""
    there = part[begin + start : begin + stop]
    piece = np.zeros(stop - start, np.uint8)
    piece[: len(there)] = there
    return piece


def _received(size: int, source: int, tag: int, group: dist.ProcessGroup | None = None) -> bytes:
    into = torch.empty(size, dtype=torch.uint8)
    dist.recv(into, source, group=group, tag=tag)
    return into.numpy().tobytes()
