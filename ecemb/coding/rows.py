"""Tables as fixed-size byte records in one address space.

Owns the geometry of a rank's rows: the bytes of a row's *record*, and the address of each record in the
rank's *row space* of 8-byte words. A table shard is a list of row-aligned tensors (the weight and each
per-row optimizer state); row i's record has the bytes of row i of each tensor, side by side, padded with
zeros to a multiple of 8 bytes. Records are virtual: they exist in journals, deltas and parity, while the
tensors stay contiguous in the arena.

Invariant: two ranks (or two generations of one rank) with equal layouts have equal addresses.
Must not know: optimizers, processes, the use of the bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..kernels.contract import Columns, Ids, Kernels, Words

WORD_BYTES = 8
ALIGN_BYTES = 64
SPLIT_BYTES = 512
"""Size of the parts in which a single long record is captured (`split`)."""
PART = re.compile(r"(.*)\[:, (\d+):(\d+)\]", re.DOTALL)
"""Matches the name of a shard that has only some columns of its table (`part_of`): table's name, range."""
_NONE = np.empty(0, np.uint64)


@dataclasses.dataclass(frozen=True)
class Column:
    """One row-aligned tensor of a table shard.

    Attributes:
        name: "weight", or the optimizer's name of its state ("sum", "exp_avg", ...).
        dtype: torch's name of the element type without "torch.", e.g. "float32".
        row_bytes: bytes of one row.
    """

    name: str
    dtype: str
    row_bytes: int


@dataclasses.dataclass(frozen=True)
class TableLayout:
    """The layout in bytes of one rank's shard of one table.

    Attributes:
        name: the table's key, unique on the rank.
        rows: number of local rows, 0 allowed.
        columns: the row-aligned tensors, in the order of their bytes in the record.
        group: tables that are neighbours in the row space and have the same group lie column by column in
            memory: the first columns of all of them, end to end, then the second columns; "" for a table
            without a group.
    """

    name: str
    rows: int
    columns: tuple[Column, ...]
    group: str = ""

    @cached_property
    def record_words(self) -> int:
        """8-byte words of one row's record."""
        return -(-sum(column.row_bytes for column in self.columns) // WORD_BYTES)

    @property
    def words(self) -> int:
        """8-byte words of all records."""
        return self.rows * self.record_words

    def to_json(self) -> list[object]:
        """This layout as plain lists, for headers and for comparison between ranks."""
        return [self.name, self.rows, [[c.name, c.dtype, c.row_bytes] for c in self.columns], self.group]

    def difference(self, then: TableLayout) -> str:
        """The first difference from `then`, a layout of the same name, as text; empty if they are equal."""
        if self.columns != then.columns:
            return f"its rows hold {_listed(self.columns)} now, and held {_listed(then.columns)} then"
        if self.rows != then.rows:
            return f"it has {self.rows} rows on this rank now, and had {then.rows} then"
        return "" if self.group == then.group else "it shares its buffer with other tables now than then"

    @classmethod
    def from_json(cls, fields: list[Any]) -> TableLayout:
        """Inverse of `to_json`."""
        name, rows, columns, group = fields
        return cls(name, rows, tuple(Column(*column) for column in columns), group)


def _listed(columns: Sequence[Column]) -> str:
    return " and ".join(f"{one.name} ({one.dtype}, {one.row_bytes} bytes)" for one in columns)


def part_of(name: str, start: int, stop: int) -> str:
    """The name of a shard that has only columns start..stop-1 of table `name`."""
    return f"{name}[:, {start}:{stop}]"


def base(name: str) -> str:
    """The table's name in a shard's name: without the range of columns, if there is one (`part_of`)."""
    found = PART.fullmatch(name)
    return name if found is None else found[1]


def arrange(layouts: Sequence[TableLayout]) -> tuple[list[list[int]], int]:
    """Computes the place of each column of each table in memory; columns of a group are aligned to 64 bytes.

    Args:
        layouts: the rank's tables, in the order of their addresses.

    Returns:
        For each table the byte at which each of its columns starts; and the total size in bytes.

    Raises:
        ConfigurationError: tables of a group have different numbers of columns.
    """
    starts: list[list[int]] = []
    end = 0
    for group in _groups(layouts):
        if len({len(layout.columns) for layout in group}) > 1:
            raise ConfigurationError(
                f"tables {[layout.name for layout in group]} are in one group and have different numbers of "
                f"columns"
            )
        places: list[list[int]] = [[] for _ in group]
        for i in range(len(group[0].columns)):
            for place, layout in zip(places, group, strict=True):
                place.append(end)
                end += layout.rows * layout.columns[i].row_bytes
            end = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        starts += places
    return starts, end


def joined(layouts: Sequence[TableLayout]) -> list[TableLayout]:
    """Merges each group of tables with equal columns into one table, whose rows one call can capture.

    The first table of the group gets the rows of all tables, one table after another, in the order of memory
    (`arrange`) and of the row space. The list keeps its length: the other tables stay in it. Tables without a
    group, or with other columns, stay as they are.
    """
    found: list[TableLayout] = []
    for first, *others in _groups(layouts):
        if any(one.columns != first.columns for one in others):
            found += [first, *others]
        else:
            rows = sum(one.rows for one in (first, *others))
            found += [dataclasses.replace(first, name=first.group or first.name, rows=rows), *others]
    return found


def joined_to(layouts: Sequence[TableLayout]) -> list[int]:
    """Table -> index of the table that has its rows after `joined`: the first of its group, or itself."""
    found: list[int] = []
    for group in _groups(layouts):
        start, is_joined = len(found), all(one.columns == group[0].columns for one in group)
        found += [start if is_joined else start + i for i in range(len(group))]
    return found


def split(layout: TableLayout) -> TableLayout:
    """A table of one row and column as a table with rows of `SPLIT_BYTES` bytes.

    A table with more rows or columns, or whose size is not a multiple of `SPLIT_BYTES`, stays as it is.
    """
    size_bytes = layout.columns[0].row_bytes if len(layout.columns) == layout.rows == 1 else 0
    if not size_bytes or size_bytes % SPLIT_BYTES:
        return layout
    column = dataclasses.replace(layout.columns[0], row_bytes=SPLIT_BYTES)
    return dataclasses.replace(layout, rows=size_bytes // SPLIT_BYTES, columns=(column,))


def _groups(layouts: Sequence[TableLayout]) -> Iterator[list[TableLayout]]:
    """Runs of neighbours with the same group; a table without a group is a run of its own."""
    alone = itertools.count()
    for _, group in itertools.groupby(layouts, lambda layout: layout.group or next(alone)):
        yield list(group)


class Table:
    """One table shard, bound to its memory.

    Args:
        layout: the shard's layout.
        memory: uint8, the memory of all tables of the rank, 64-byte aligned. Read and overwritten in place.
        starts: the byte of `memory` at which each column starts, from `arrange`.
        kernels: gathers and scatters rows.
        fetch: copies bytes of `memory`, from a byte on, into an array, in any thread; by default through
            `memory` itself.

    Attributes:
        layout: the shard's layout.
        columns: the memory of each column, uint8 [rows, row_bytes].
        starts: as given.
        kernels: as given.
    """

    def __init__(
        self,
        layout: TableLayout,
        memory: NDArray[np.uint8],
        starts: Sequence[int],
        kernels: Kernels,
        fetch: Callable[[int, NDArray[np.uint8]], None] | None = None,
    ) -> None:
        self._fetch = fetch
        self.layout = layout
        self.columns: list[NDArray[np.uint8]] = []
        self.starts: tuple[int, ...] = tuple(starts)
        self.kernels = kernels
        parts: list[tuple[NDArray[np.unsignedinteger], int]] = []
        offset = 0
        for column, start in zip(layout.columns, starts, strict=True):
            # Not a slice: a slice without rows would have the address of the memory, not of its start.
            rows = np.ndarray((layout.rows, column.row_bytes), np.uint8, memory.data, start)
            self.columns.append(rows)
            if column.row_bytes:
                width = math.gcd(WORD_BYTES, column.row_bytes, offset, start)
                parts.append((rows.view(f"u{width}"), offset // width))
            offset += column.row_bytes
        self._parts = Columns(layout.rows, parts)

    @property
    def widths(self) -> tuple[int, ...]:
        """The bytes of a row in each column that has any."""
        return self._parts.widths

    def gather(self, ids: Ids, out: Words) -> None:
        """Writes the records of rows `ids` (int64 [m]) to `out` (uint64 [m, record_words], overwritten)."""
        if len(ids) == 1 and 0 <= (row := int(ids[0])) < self.layout.rows:
            # Such as the rank state in each step, when the kernels' code is in no cache of the processor.
            self._read(row, row + 1, out)
            return
        self.kernels.gather_records(self._parts, ids, out)

    def change(self, ids: Ids, old: Words, out: Words) -> None:
        """Writes old XOR new of the records of rows `ids` (int64 [m]) to `out`.

        Args:
            ids: int64 [m].
            old: uint64 [m, record_words], an earlier output of `gather` for these rows; read.
            out: uint64 [m, record_words], overwritten.
        """
        if len(ids) == 1 and 0 <= (row := int(ids[0])) < self.layout.rows:
            self._read(row, row + 1, out)  # no loop is compiled for the width of the rank state alone
            np.bitwise_xor(out, old, out=out)
            return
        self.kernels.change_records(self._parts, ids, old, out)

    def scatter_(self, ids: Ids, records: Words) -> None:
        """Overwrites rows `ids` (int64 [m]) with `records` (uint64 [m, record_words])."""
        for rows, at in self._parts.parts:
            self.kernels.scatter_(rows, ids, records.view(rows.dtype), at)

    def read(self, start: int, stop: int) -> Words:
        """Returns the records of rows start..stop-1 as a new uint64 [stop-start, record_words]."""
        out = np.empty((stop - start, self.layout.record_words), np.uint64)
        self._read(start, stop, out)
        return out

    def _read(self, start: int, stop: int, out: Words) -> None:
        out[:, -1:] = 0  # the padding
        for rows, at in self._parts.parts:
            out.view(rows.dtype)[:, at : at + rows.shape[1]] = rows[start:stop]

    def copy(self, column: int, start: int, out: NDArray[np.uint8]) -> None:
        """Copies bytes of a column by all threads of the kernels.

        Args:
            column: its index.
            start: the first byte, counted from the column's first row.
            out: uint8 [m], contiguous, overwritten.
        """
        held = self.columns[column].reshape(-1)

        def some(first: int, stop: int) -> None:
            if self._fetch is None:
                out[first:stop] = held[start + first : start + stop]
            else:
                self._fetch(self.starts[column] + start + first, out[first:stop])

        self.kernels.share(out.size, 2, some)

    def write_(self, start: int, records: Words) -> None:
        """Overwrites the rows from `start` on with `records` (uint64 [m, record_words])."""
        for rows, at in self._parts.parts:
            part = records.view(rows.dtype)[:, at : at + rows.shape[1]]
            rows[start : start + len(records)] = part


class Addresses:
    """The tables and rows under the words of a rank's row space, cut into k blocks at record boundaries.

    Computed from layouts alone, so that any rank can compute it for any other rank.

    Args:
        layouts: the rank's tables, in the order of their addresses.
        k: number of data blocks.

    Attributes:
        bases: the first word of each table, and the end of the last one.
        bounds: k + 1 words; block i is [bounds[i], bounds[i+1]).
    """

    def __init__(self, layouts: Sequence[TableLayout], k: int) -> None:
        self._layouts = list(layouts)
        self.bases: list[int] = np.cumsum([0] + [layout.words for layout in layouts]).tolist()
        total = self.bases[-1]
        bounds = [0]
        for i in range(1, k):
            goal = total * i // k
            at = goal
            for layout, base in zip(layouts, self.bases, strict=False):
                if base <= goal < base + layout.words:
                    width = layout.record_words
                    at = base + (goal - base + width // 2) // width * width
            bounds.append(max(at, bounds[-1]))
        self.bounds: tuple[int, ...] = (*bounds, total)

    def mask(self, block: int, offsets: Ids) -> Words:
        """For each word, the bits that belong to rows. The other bits are padding, or beyond the block's end.

        Args:
            block: the data block.
            offsets: int64 [m], words counted from the block's start; read.

        Returns:
            uint64 [m], new.
        """
        masks = np.zeros(len(offsets), np.uint64)
        at = offsets + self.bounds[block]
        inside = at < self.bounds[block + 1]
        for layout, base in zip(self._layouts, self.bases, strict=False):
            here = inside & (at >= base) & (at < base + layout.words)
            masks[here] = np.iinfo(np.uint64).max
            if tail := sum(column.row_bytes for column in layout.columns) % WORD_BYTES:
                last = here & ((at - base) % max(layout.record_words, 1) == layout.record_words - 1)
                masks[last] = (1 << 8 * tail) - 1
        return masks

    def rows(self, block: int, start: int, stop: int) -> tuple[tuple[str, range], ...]:
        """The tables, with their rows, under words start..stop-1 of a data block; empty beyond its end."""
        low, high = self.bounds[block] + start, min(self.bounds[block] + stop, self.bounds[block + 1])
        return tuple(
            (layout.name, range((first - base) // width, -(-(last - base) // width)))
            for layout, base in zip(self._layouts, self.bases, strict=False)
            if (first := max(low, base)) < (last := min(high, base + layout.words))
            and (width := layout.record_words)
        )


@dataclasses.dataclass(frozen=True)
class NamedTable:
    """A table by which rows are captured, lost and undone.

    It is the rank's table of the same index, or what `joined` or `split` make of it. The records of both
    begin at the same word of the row space.

    Attributes:
        table: layout and memory.
        owner: index of the named table that has all rows of the group; the own index if there is no group.
        rows: the row numbers, in the owner, of the rows of the rank's table of the same index.
        edges: k + 1 row numbers: the table's first row in each block, and the end of its rows.
    """

    table: Table
    owner: int
    rows: range
    edges: list[int]


class RowSpace(Addresses):
    """The row space of one rank, with the memory of its tables.

    Args:
        tables: the rank's tables, in the order of their addresses.
        k: number of data blocks.
        named: for each table, the table by which its rows are captured; by default itself.

    Attributes:
        tables: the rank's tables.
        named: for each table, the named table by which its rows are captured. Those that are their own owners
            have each row once.
        words: number of all words.

    Raises:
        ConfigurationError: two tables have the same name.
    """

    def __init__(self, tables: Sequence[Table], k: int, named: Sequence[Table] | None = None) -> None:
        names = [table.layout.name for table in tables]
        if len(set(names)) != len(names):
            raise ConfigurationError(
                f"tables need distinct names; the names are {names}: rename one in tables="
            )
        self.tables: list[Table] = list(tables)
        super().__init__([table.layout for table in tables], k)
        self.words: int = self.bases[-1]
        self.named: list[NamedTable] = list(self._named(named or tables))

    def _named(self, named: Sequence[Table]) -> Iterator[NamedTable]:
        owner = first = end = 0
        for index, (table, one) in enumerate(zip(self.tables, named, strict=True)):
            if first == end:
                owner, first, end = index, 0, one.layout.rows
            is_split = table.layout.record_words != one.layout.record_words
            rows = range(first, first + (one if is_split else table).layout.rows)
            edges = [self._first_row(one.layout, self.bases[index], bound) for bound in self.bounds]
            yield NamedTable(one, owner, rows, edges)
            first = rows.stop

    @staticmethod
    def _first_row(layout: TableLayout, base: int, bound: int) -> int:
        """The first row that belongs to the block after word `bound`, of a table that begins at word `base`.

        Returns 0 for a table whose records have 0 words: they belong to no block.
        """
        if not layout.words:
            return 0
        return min(max(0, -(-(bound - base) // layout.record_words)), layout.rows)

    def cut(self, table: int, ids: Ids) -> list[int]:
        """The k + 1 indices at which the blocks' bounds cut `ids`, rows of a named table.

        Args:
            table: index of the named table.
            ids: int64 [m], ascending; read.
        """
        return np.searchsorted(ids, self.named[table].edges).tolist()

    def completed(self, start: int, stop: int) -> Iterator[tuple[int, range]]:
        """The rows, table by table, whose last word is within words start..stop-1.

        If ranges of words follow each other, each row belongs to exactly one of them: the range with its last
        word.
        """
        for index, (table, base) in enumerate(zip(self.tables, self.bases, strict=False)):
            if width := table.layout.record_words:
                first, last = (min(max(0, at - base) // width, table.layout.rows) for at in (start, stop))
                if first < last:
                    yield index, range(first, last)

    def read(self, start: int, stop: int) -> Words:
        """Returns words start..stop-1 of the row space as a new uint64 array."""
        parts: list[Words] = []
        for table, base, low, high in self._overlaps(start, stop):
            first, last, width = self._rows(table, base, low, high)
            skip = low - base - first * width
            parts.append(table.read(first, last).reshape(-1)[skip : skip + high - low])
        return parts[0] if len(parts) == 1 else np.concatenate([_NONE, *parts])

    def write_(self, start: int, words: Words) -> None:
        """Overwrites the row space from word `start` on with `words` (uint64 [m])."""
        for table, base, low, high in self._overlaps(start, start + len(words)):
            first, last, width = self._rows(table, base, low, high)
            skip = low - base - first * width
            whole = (last - first) * width
            part = words[low - start : high - start]
            if skip or high - low != whole:  # a record is cut: keep its other words
                records = table.read(first, last)
                records.reshape(-1)[skip : skip + high - low] = part
            else:
                records = part.reshape(last - first, width)
            table.write_(first, records)

    def _overlaps(self, start: int, stop: int) -> list[tuple[Table, int, int, int]]:
        return [
            (table, base, max(start, base), min(stop, base + table.layout.words))
            for table, base in zip(self.tables, self.bases, strict=False)
            if max(start, base) < min(stop, base + table.layout.words)
        ]

    @staticmethod
    def _rows(table: Table, base: int, low: int, high: int) -> tuple[int, int, int]:
        width = table.layout.record_words
        return (low - base) // width, -(-(high - base) // width), width
