"""Rows and parity of one rank while it trains: made, updated, rebuilt.

Must not know: trainings, what else has to be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from .arithmetic import Ids, Numbers, add_, difference, gather, overflowing, scatter_
from .coefficients import Reals
from .memory import Memory
from .stripes import Block, Segment, Stripes, Term, length
from .wire import Arrived, Bytes, Wire

Columns = Sequence[Numbers]
"""Of a table: its weight and its optimizer state, [rows, ...] each."""

_ENCODED_ROWS = 1 << 16
"""Rows of a table that parity is made of at a time."""
_CARRIED = 1 << 22
"""Numbers that are sent at a time to a rank that has lost them."""
_NOTHING = np.empty(0, np.uint8)


class LiveParity:
    """A rank's rows and parity. All ranks.

    Args:
        stripes: who keeps what.
        matrix: float64 [r, k], the code's coefficients.
        memory: of this rank.
        tables: of each table, the keys of its columns.

    Attributes:
        rows: of each table its columns after the last whole step, in memory that outlives the process.
    """

    def __init__(
        self, stripes: Stripes, matrix: Reals, memory: Memory, tables: Sequence[Sequence[str]]
    ) -> None:
        self._stripes, self._matrix, self._parity = stripes, matrix, memory.parity
        self._dtype = memory.dtype
        self.rows: list[Columns] = [[memory.columns[key] for key in keys] for keys in tables]
        self._rank = dist.get_rank()
        self._wire = Wire(stripes, memory.dtype)
        self._carried_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """To other ranks, so far."""
        return self._wire.sent_bytes + self._carried_bytes

    @property
    def message_bytes(self) -> int:
        """Memory that messages take."""
        return self._wire.message_bytes

    def encode(self, keepers: Collection[int]) -> None:
        """Recomputes parity of all rows, on some ranks. All ranks.

        Args:
            keepers: the ranks; the same on all.
        """
        if not keepers:
            return
        if self._rank in keepers:
            for row in self._parity:
                row[:] = 0
        most = max((rows for shapes in self._stripes.shapes for rows, _ in shapes), default=0)
        for start in range(0, most, _ENCODED_ROWS):
            rows = [np.arange(start, min(start + _ENCODED_ROWS, len(one[0]))) for one in self.rows]
            self._fill(rows, _NOTHING, lambda table, ids, out: gather(self.rows[table], ids, out))
            self._add(self._wire.exchange(keepers))
            self._wire.finish()
        self._wire.free()  # a step's messages are much smaller

    def exchange(self, tables: Sequence[Columns], rows: Sequence[Ids], passenger: Bytes) -> list[Arrived]:
        """Sends what has changed since the last step, and gets what others send. All ranks.

        Args:
            tables: as they are trained. Read.
            rows: of each table those that may have changed, int64 [m], ascending and distinct.
            passenger: bytes that the keepers of this rank's first block get. Read.

        Returns:
            All that `take_over` needs.
        """

        def fill(table: int, ids: Ids, out: Numbers) -> None:
            difference(tables[table], self.rows[table], ids, out)

        self._fill(rows, passenger, fill)
        return self._wire.exchange(range(self._stripes.ring.ranks))

    def take_over(self, arrived: Sequence[Arrived], tables: Sequence[Columns], rows: Sequence[Ids]) -> None:
        """Adds to parity what `exchange` got, and takes this rank's own new rows over."""
        self._add(arrived)
        for kept, live, ids in zip(self.rows, tables, rows, strict=True):
            for mine, new in zip(kept, live, strict=True):
                mine[ids] = new.take(ids, axis=0)

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        self._wire.finish()

    @overflowing
    def rebuild(self, lost: Collection[int]) -> int:
        """Solves for the rows of lost ranks, in float64. All ranks.

        Returns:
            Rows of this rank that came out with NaN or infinities.

        Raises:
            ParityLost: more is lost than parity can rebuild.
        """
        stripes, poisoned = self._stripes, 0
        work = [
            (rank, block, stripes.terms(self._matrix, rank, block, lost))
            for rank in sorted(lost)
            for block in range(stripes.ring.k)
        ]
        for rank, block, terms in work:
            segments = stripes.blocks[rank][block]
            total = np.zeros(length(segments))
            for term in terms:
                for start, part in self._carried(term, rank, len(total)):
                    total[start : start + len(part)] += term.weight * part
            if rank == self._rank:
                poisoned += self._put(segments, total)
        return poisoned

    def _carried(self, term: Term, target: int, most: int) -> Iterator[tuple[int, Numbers]]:
        """On the target, a term's numbers, piece by piece, and where they are; on others, nothing."""
        stripes = self._stripes
        if term.block is None:
            size = stripes.parity_lengths(term.rank)[term.row]
        else:
            size = length(stripes.blocks[term.rank][term.block])
        size = min(size, most)
        if self._rank == term.rank:
            values = self._parity[term.row] if term.block is None else self._flat(term.block)
        elif self._rank == target:
            values = np.empty(min(size, _CARRIED), self._dtype)
        else:
            return
        for start in range(0, size, _CARRIED):
            stop = min(start + _CARRIED, size)
            if self._rank == term.rank:
                piece = torch.from_numpy(values[start:stop])
                dist.send(piece, target)
                self._carried_bytes += piece.nbytes
            else:
                dist.recv(torch.from_numpy(values[: stop - start]), term.rank)
                yield start, values[: stop - start]

    def _flat(self, block: int) -> Numbers:
        """One of this rank's blocks as a run of numbers, new."""
        segments = self._stripes.blocks[self._rank][block]
        out = np.empty(length(segments), self._dtype)
        for segment in segments:
            rows = slice(segment.first, segment.first + segment.rows)
            gather(self.rows[segment.table], rows, _rows(out, segment))
        return out

    def _put(self, segments: Block, values: Numbers) -> int:
        """Takes a rebuilt block over; how many of its rows are not finite."""
        poisoned = 0
        for segment in segments:
            part = _rows(values, segment)
            poisoned += int((~np.isfinite(part)).any(axis=1).sum())
            scatter_(self.rows[segment.table], slice(segment.first, segment.first + segment.rows), part)
        return poisoned

    def _fill(
        self, rows: Sequence[Ids], passenger: Bytes, write: Callable[[int, Ids, Numbers], None]
    ) -> None:
        """Writes messages: of each block the rows that are in it."""
        for block, segments in enumerate(self._stripes.blocks[self._rank]):
            chosen: list[Ids] = []
            for segment in segments:
                ids = rows[segment.table]
                first, stop = np.searchsorted(ids, (segment.first, segment.first + segment.rows))
                chosen.append(ids[first:stop])
            carries = passenger if block == 0 else _NOTHING
            parts, seat = self._wire.begin(block, [len(ids) for ids in chosen], len(carries))
            seat[:] = carries
            for part, ids in zip(parts, chosen, strict=True):
                np.subtract(ids, part.segment.first, out=part.rows)
                write(part.segment.table, ids, part.differences)

    def _add(self, arrived: Sequence[Arrived]) -> None:
        for message in arrived:
            parity = self._parity[message.row]
            coefficient = float(self._matrix[message.row, message.block])
            for part in message.parts:
                if len(part.rows):
                    add_(_rows(parity, part.segment), part.rows, part.differences, coefficient)


def _rows(values: Numbers, segment: Segment) -> Numbers:
    """A segment's part of a run of numbers, [rows, width], in place."""
    return values[segment.start : segment.stop].reshape(segment.rows, segment.width)
