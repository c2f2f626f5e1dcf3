"""ecemb's parity over servers in one process: which of its bytes are kept where, updated and rebuilt.

The code, the placement and the kernels are those of ecemb (`ecemb.coding`,
`ecemb.kernels`). What is not here: processes, steps as transactions, the wire. A failure strikes between two
steps, as in `baselines.cpr.servers`, whose sharding this is. Real processes are killed in the
head-to-head comparison.

Parity is made once of the tables as they start; from then on it is changed by what steps change, and by
nothing else. So what is rebuilt is right only if all of that was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ecemb.coding.code import Code
from ecemb.coding.placement import Placement
from ecemb.kernels.contract import Words, get_kernels

Numbers = NDArray[np.int64]
LOST = np.uint64(2**64 - 1)
"""Words of a server that is gone: as floats, NaN."""


class Coded:
    """All tables of a training on N servers, whose rows outlive the loss of any r servers: a `Kept`.

    Args:
        tables: By name, their tensors by name: float32 [rows, even], as many in a row in all tables. Live:
            changed in place by `fail` alone.
        servers: N.
        code: The code; n is at most N.

    Raises:
        PlacementError: The code doesn't fit the servers.
    """

    def __init__(self, tables: Mapping[str, Mapping[str, Tensor]], servers: int, code: Code) -> None:
        self._columns = {
            name: [tensor.numpy().view(np.uint64) for tensor in tensors.values()]
            for name, tensors in tables.items()
        }
        self._code, self._servers = code, servers
        self._placement = Placement.ranks(code.n, code.k, servers)
        self._generator = code.generator()
        self._kernels = get_kernels("cpu")
        self._rows = {name: len(columns[0]) for name, columns in self._columns.items()}
        self._shards = {name: -(-rows // servers) for name, rows in self._rows.items()}
        ends = np.cumsum([*self._shards.values()]).tolist()
        self._bases = dict(zip(self._shards, [0, *ends[:-1]], strict=True))
        first = next(iter(self._columns.values()))
        self._width = sum(column.shape[1] for column in first)
        self._length = -(-ends[-1] // code.k)  # of a block, in rows
        self._touched: list[tuple[str, Numbers, Words]] = []
        self._parity = [self._encoded(c) for c in range(servers)]

    def touch(self, table: str, rows: Tensor) -> None:
        """These rows are about to change."""
        numbers = rows.unique_consecutive().numpy()
        self._touched.append((table, numbers, self._records(table, numbers)))

    def end(self, step: int) -> None:
        """A step is done: parity takes what it has changed."""
        deltas = np.concatenate([self._records(name, rows) ^ old for name, rows, old in self._touched])
        places = np.concatenate([self._places(name, rows) for name, rows, _ in self._touched])
        self._touched.clear()
        blocks, rows = np.divmod(places, self._length)
        order = np.argsort(blocks, kind="stable")
        cuts = np.searchsorted(blocks[order], np.arange(self._servers * self._code.k + 1)).tolist()
        for number, (first, last) in enumerate(pairwise(cuts)):
            if first == last:
                continue
            server, block = divmod(number, self._code.k)
            some = order[first:last]
            kept = self._parity[self._placement.stripe_class(server, block)]
            for row, parity in zip(self._generator[self._code.k :], kept, strict=True):
                self._kernels.mul_add_rows_(parity, rows[some] * self._width, deltas[some], int(row[block]))

    def fail(self, step: int, servers: Sequence[int]) -> None:
        """These servers' rows and parity are lost, and rebuilt of what is left.

        Raises:
            CodeError: They are too many.
        """
        for server in servers:
            for block in range(self._code.k):
                self._write(server, block, np.full(self._length * self._width, LOST))
            for c, row in self._placement.kept(server):
                self._parity[c][row].fill(LOST)
        for c, lost in self._placement.erasures(servers).items():
            left = [block for block in range(self._code.n) if block not in lost][: self._code.k]
            weights = self._code.decode_weights(lost, left, self._generator)
            outs = [np.empty(self._length * self._width, np.uint64) for _ in lost]
            self._kernels.dot([self._read(c, block) for block in left], weights, outs)
            for block, out in zip(lost, outs, strict=True):
                if block < self._code.k:
                    self._write(self._placement.members(c)[block], block, out)
                else:
                    self._parity[c][block - self._code.k][:] = out

    def _encoded(self, c: int) -> list[Words]:
        """The parity of a stripe class."""
        outs = [np.empty(self._length * self._width, np.uint64) for _ in range(self._code.r)]
        data = [self._read(c, block) for block in range(self._code.k)]
        self._kernels.dot(data, self._generator[self._code.k :], outs)
        return outs

    def _records(self, table: str, rows: Numbers) -> Words:
        """uint64 [m, width]; new."""
        return np.hstack([column[rows] for column in self._columns[table]])

    def _places(self, table: str, rows: Numbers) -> Numbers:
        """Where rows are, counted over the blocks of all servers, one after another."""
        servers, rest = np.divmod(rows, self._shards[table])
        return servers * (self._code.k * self._length) + self._bases[table] + rest

    def _read(self, c: int, block: int) -> Words:
        """A block of a stripe class, uint64 [length * width]: what is no row of it is 0."""
        if block >= self._code.k:
            return self._parity[c][block - self._code.k]
        words = np.zeros((self._length, self._width), np.uint64)
        for name, rows, part in self._pieces(self._placement.members(c)[block], block):
            words[part] = np.hstack([column[rows] for column in self._columns[name]])
        return words.reshape(-1)

    def _write(self, server: int, block: int, words: Words) -> None:
        records = words.reshape(self._length, self._width)
        for name, rows, part in self._pieces(server, block):
            at = 0
            for column in self._columns[name]:
                column[rows] = records[part, at : at + column.shape[1]]
                at += column.shape[1]

    def _pieces(self, server: int, block: int) -> Iterator[tuple[str, slice, slice]]:
        """Of each table that a block has rows of: which, and where in the block."""
        begin, end = block * self._length, (block + 1) * self._length
        for name, base in self._bases.items():
            first = server * self._shards[name]
            held = min(self._shards[name], max(0, self._rows[name] - first))
            low, high = max(base, begin), min(base + held, end)
            if low < high:
                yield name, slice(first + low - base, first + high - base), slice(low - begin, high - begin)
