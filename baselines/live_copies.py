"""Live copies: each step's changed rows, copied to the memory of r other ranks.

In-memory replication as one would write it for the same tables: the rows that a step has changed are made
distinct, gathered into one message, sent to the r next ranks, and scattered into their replicas. It survives
the loss of any r ranks as well, at r times the memory of the tables instead of r/k. There is no transaction:
who dies in the middle of a step leaves replicas of different steps behind. Of a window of steps, the rows are
copied once, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from .rows import Bytes, Ids, Scratch, distinct

Values = NDArray[Any]

_SIZE, _ROWS = 0, 1
"""Tags of messages."""
_FIRST_ROWS = 1 << 16
"""Rows of a message with which replicas are filled at first."""


class Shard:
    """Tables of this rank whose tensors lie side by side, as one.

    Attributes:
        columns: [rows, ...] each, row-aligned: the weight, and each optimizer state.
    """

    def __init__(self, columns: Sequence[Values]) -> None:
        self.columns = list(columns)

    @property
    def rows(self) -> int:
        """Of all its tables together."""
        return len(self.columns[0])

    @property
    def record_bytes(self) -> int:
        """Of one row in all columns."""
        return sum(row_bytes(column) for column in self.columns)


def row_bytes(column: Values) -> int:
    """Bytes of one row of a column."""
    return column.dtype.itemsize * int(np.prod(column.shape[1:]))


def joined(tables: Sequence[Sequence[Tensor]]) -> list[Shard]:
    """Joins tables that follow one another in memory, so that they are gathered in one go.

    Args:
        tables: of each table its weight and its states, [rows, ...] each, contiguous.
    """
    shards: list[Shard] = []
    for table in tables:
        columns = [tensor.detach().numpy() for tensor in table]
        before = shards[-1].columns if shards else []
        if len(before) == len(columns) and all(map(_follows, before, columns)):
            shards[-1] = Shard([_both(a, b) for a, b in zip(before, columns, strict=True)])
        else:
            shards.append(Shard(columns))
    return shards


def _follows(first: Values, second: Values) -> bool:
    alike = (first.dtype, first.shape[1:], first.strides) == (second.dtype, second.shape[1:], second.strides)
    return alike and first.ctypes.data + first.nbytes == second.ctypes.data


def _both(first: Values, second: Values) -> Values:
    shape = (len(first) + len(second), *first.shape[1:])
    return np.lib.stride_tricks.as_strided(first, shape, first.strides)


class Replication:
    """Keeps this rank's tables in the memory of the r next ranks, and theirs in its own. All ranks.

    Args:
        tables: of each table its weight and its states, [rows, ...] each.
        touched: the rows that the last step has changed, int64, tables numbered one after another; any order.
        r: number of replicas.
        window: steps whose rows are copied at once.

    Attributes:
        replicas: rank -> its tables as they were at the end of the last window.
        copied_rows: that this rank has sent to each partner.
        sent_bytes: to all of them.
    """

    def __init__(
        self, tables: Sequence[Sequence[Tensor]], touched: Callable[[], Ids], r: int, window: int = 1
    ) -> None:
        self._shards = joined(tables)
        self._touched = touched
        self._window = window
        self._noted: list[Ids] = []
        self._group = dist.new_group(backend="gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self._partners = [(rank + i) % ranks for i in range(1, r + 1)]
        sources = [(rank - i) % ranks for i in range(1, r + 1)]
        self._outgoing, self._incoming = Scratch(), {source: Scratch() for source in sources}
        shapes: list[Any] = [None] * ranks
        own = [[(column.shape, column.dtype.str) for column in shard.columns] for shard in self._shards]
        dist.all_gather_object(shapes, own, self._group)
        self.replicas = {
            source: [Shard([np.zeros(*spec) for spec in shard]) for shard in shapes[source]]
            for source in sources
        }
        self.copied_rows = self.sent_bytes = 0
        all_rows = np.arange(sum(shard.rows for shard in self._shards))
        most = max(sum(shard[0][0][0] for shard in rank_shapes) for rank_shapes in shapes)
        for start in range(0, most, _FIRST_ROWS):
            self._copy(all_rows[start : start + _FIRST_ROWS])
        self.copied_rows = self.sent_bytes = 0

    def step(self) -> None:
        """Called when a step has changed its rows; at a window's end, the partners get them. All ranks."""
        self._noted.append(self._touched())
        if len(self._noted) == self._window:
            self._copy(distinct(np.concatenate(self._noted)))
            self._noted.clear()

    def _copy(self, rows: Ids) -> None:
        message = torch.from_numpy(self._packed(rows))
        size = torch.tensor([message.numel()])
        sizes = {source: torch.empty(1, dtype=torch.int64) for source in self.replicas}
        announced = {source: self._receive(into, source, _SIZE) for source, into in sizes.items()}
        sent = [
            self._send(what, to, tag) for tag, what in enumerate((size, message)) for to in self._partners
        ]
        coming: dict[int, tuple[Bytes, dist.Work]] = {}
        for source, work in announced.items():
            work.wait()
            room = self._incoming[source].of(int(sizes[source]))
            coming[source] = room, self._receive(torch.from_numpy(room), source, _ROWS)
        for source, (room, work) in coming.items():
            work.wait()
            unpack_(self.replicas[source], room)
        for work in sent:
            work.wait()
        self.copied_rows += len(rows)
        self.sent_bytes += len(self._partners) * (size.nbytes + message.nbytes)

    def _packed(self, rows: Ids) -> Bytes:
        parts = split(rows, self._shards)
        records = sum(len(ids) * one.record_bytes for ids, one in zip(parts, self._shards, strict=True))
        at = 8 + rows.nbytes
        message = self._outgoing.of(at + records)
        head = message[:at].view(np.int64)
        head[0], head[1:] = len(rows), rows
        for ids, shard in zip(parts, self._shards, strict=True):
            for column in shard.columns:
                end = at + len(ids) * row_bytes(column)
                out = message[at:end].view(column.dtype).reshape(len(ids), *column.shape[1:])
                np.take(column, ids, axis=0, out=out, mode="clip")
                at = end
        return message

    def _send(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        return _started(dist.isend(tensor, group=self._group, group_dst=to, tag=tag))

    def _receive(self, tensor: Tensor, source: int, tag: int) -> dist.Work:
        return _started(dist.irecv(tensor, group=self._group, group_src=source, tag=tag))


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not in the group of the replicas")
    return work


def unpack_(replica: Sequence[Shard], message: Bytes) -> None:
    """Writes a message's rows into the replica that it is for."""
    count = int(message[:8].view(np.int64)[0])
    at = 8 + 8 * count
    rows = message[8:at].view(np.int64)
    for ids, shard in zip(split(rows, replica), replica, strict=True):
        for column in shard.columns:
            end = at + len(ids) * row_bytes(column)
            column[ids] = message[at:end].view(column.dtype).reshape(len(ids), *column.shape[1:])
            at = end


def split(rows: Ids, shards: Sequence[Shard]) -> list[Ids]:
    """Of ascending rows, numbered over all shards, those of each shard, numbered within it."""
    bases = np.cumsum([0, *(shard.rows for shard in shards)])
    edges = np.searchsorted(rows, bases)
    return [rows[a:b] - base for (a, b), base in zip(pairwise(edges), bases, strict=False)]
