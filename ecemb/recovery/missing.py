"""The rows and the parity that a replacement rank still lacks (docs/protocol.md, 9.1).

Owns a bit for each row and for each chunk of a parity block, and the order in which chunks are requested.
Bytes are stored where the bit is unset, and the bit is set after them. One thread stores, and any thread may
read the bits. Must not know: the network, the ranks that have the bytes, and the moments at which bytes may
be stored.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from ..coding.rows import WORD_BYTES
from ..errors import KernelError
from ..kernels.contract import Ids, RowSet, Words, check_ids
from ..memory.rank_memory import RankMemory

CHUNK_WORDS = 1 << 17
"""Words of a chunk, 1 MiB. Each chunk of parity has a bit."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Neighbouring words of one block, of which some are missing.

    Attributes:
        block: number of the block in its stripe: data 0..k-1, parity k..n-1.
        start: first word, counted from the block's start.
        stop: end of the words, counted from the block's start.
        table: the table's index in `RowSpace.named` for rows; -1 for parity.
        stripe_class: the stripe class for parity; -1 for rows.
    """

    block: int
    start: int
    stop: int
    table: int = -1
    stripe_class: int = -1

    @property
    def is_parity(self) -> bool:
        """Whether the chunk is in a parity block."""
        return self.table < 0


class _Bits:
    """The bits of the rows of a table, or of the chunks of a parity block, with at least one unset.

    Args:
        size: number of bits.

    Attributes:
        present: the rows or chunks that are stored.
        left: number of rows or chunks that are missing.
        given: end of the bits that `next_chunk` has returned since the last `rewind`.
    """

    def __init__(self, size: int) -> None:
        self.present = RowSet(size)
        self.left, self.given, self._first = size, 0, 0

    def next(self) -> int | None:
        """The first unset bit from `given` on; None if there is none."""
        self._first = self.present.first_absent(self._first)
        at = self.present.first_absent(max(self._first, self.given))
        return at if at < self.present.rows else None

    def end(self, at: int, stop: int) -> int:
        """1 + the last unset bit in at..stop-1, the bits of one chunk, of which at least one is unset."""
        return stop - int(self.present.has(np.arange(at, stop))[::-1].argmin())


class Missing:
    """The rows and the parity of a replacement rank that are missing; at first all of them.

    A `table` is an index in `RowSpace.named`, and ids are row numbers there, as for
    `ecemb.memory.journal.RowJournal.capture`.

    Args:
        memory: the rank's memory. `store_rows_` and `store_span_` write its rows, `store_parity_` writes its
            parity, each after it has reserved memory for them.
    """

    def __init__(self, memory: RankMemory) -> None:
        self._memory, self._space = memory, memory.space
        space, blocks = memory.space, {} if memory.parity is None else memory.parity.blocks
        self._parity = parity = {c: words for c, (_, words) in blocks.items()}
        self._rows = {
            index: _Bits(one.table.layout.rows)
            for index, one in enumerate(space.named)
            if one.table.layout.words and one.owner == index
        }
        self._chunks = {c: _Bits(-(-len(words) // CHUNK_WORDS)) for c, words in parity.items() if len(words)}
        self._bytes_left = (space.words + sum(len(words) for words in parity.values())) * WORD_BYTES

    @property
    def bytes_left(self) -> int:
        """Bytes of missing records and missing parity."""
        return self._bytes_left

    def is_whole(self) -> bool:
        """Whether all rows and all parity are stored."""
        return not self._rows and not self._chunks

    def table_is_whole(self, table: int) -> bool:
        """Whether all rows of a table are stored; for a table in a group, all rows of the group."""
        return self._space.named[table].owner not in self._rows

    def rows_left(self) -> dict[str, int]:
        """Table's name -> number of its missing rows, for tables that miss some."""
        left: dict[str, int] = {}
        for table, one in zip(self._space.tables, self._space.named, strict=True):
            if (bits := self._rows.get(one.owner)) is not None:
                is_all, rows = len(one.rows) == bits.present.rows, one.rows
                count = bits.left if is_all else len(rows) - bits.present.count(rows.start, rows.stop)
                if count:
                    left[table.layout.name] = min(count, table.layout.rows)  # a record in parts is one row
        return left

    def lacks(self, table: int, ids: Ids) -> Ids:
        """The missing rows among some rows of a table.

        Args:
            table: the table.
            ids: int64 [m], in any order, repeats allowed; numbers that are not rows are ignored; read.

        Returns:
            The missing rows: int64, distinct, ascending; new.
        """
        one = self._space.named[table]
        bits = self._rows.get(one.owner)
        if bits is None:
            return np.empty(0, np.int64)
        rows = ids[(ids >= 0) & (ids < one.table.layout.rows)]
        return np.unique(rows[~bits.present.has(rows + one.rows.start)])

    def place(self, table: int, ids: Ids) -> list[tuple[int, Ids, Ids]]:
        """The positions of rows' records in data blocks.

        Args:
            table: the table.
            ids: int64 [m], ascending; read.

        Returns:
            For each data block that has some of the rows: its number, these rows (a view of `ids`), and the
            words at which their records begin, counted from the block's start (int64, new).
        """
        width, base = self._space.named[table].table.layout.record_words, self._space.bases[table]
        cut = self._space.cut(table, ids)
        return [
            (block, ids[a:b], ids[a:b] * width + (base - self._space.bounds[block]))
            for block, (a, b) in enumerate(itertools.pairwise(cut))
            if a < b
        ]

    def next_chunk(self, hottest: Sequence[int] = ()) -> Chunk | None:
        """The next chunk with missing words that was not returned since the last `rewind`.

        A chunk of rows has at most `CHUNK_WORDS` words, unless it is a single row.

        Args:
            hottest: tables whose chunks come first, in this order; parity comes after all tables.

        Returns:
            The chunk; None if all chunks with missing words were returned.
        """
        for table in (*(self._space.named[table].owner for table in hottest), *self._rows):
            if table in self._rows and (chunk := self._rows_of(table)) is not None:
                return chunk
        for q, (c, words) in enumerate(self._parity.items()):
            if (bits := self._chunks.get(c)) is not None and (at := bits.next()) is not None:
                bits.given, start = at + 1, at * CHUNK_WORDS
                block = len(self._space.bounds) - 1 + q
                return Chunk(block, start, min(start + CHUNK_WORDS, len(words)), stripe_class=c)
        return None

    def rewind(self) -> None:
        """Lets `next_chunk` begin again at the first missing chunk, as a returned chunk was not stored."""
        for bits in (*self._rows.values(), *self._chunks.values()):
            bits.given = 0

    def _rows_of(self, table: int) -> Chunk | None:
        """The next chunk of a table's missing rows that was not returned; None if there is none."""
        bits = self._rows[table]
        if (at := bits.next()) is None:
            return None
        width, edges = self._space.named[table].table.layout.record_words, self._space.named[table].edges
        block = bisect.bisect_right(edges, at) - 1
        end = bits.given = bits.end(at, min(at + max(1, CHUNK_WORDS // width), edges[block + 1]))
        skip = self._space.bases[table] - self._space.bounds[block]
        return Chunk(block, skip + at * width, skip + end * width, table=table)

    def back_rows(self, table: int, ids: Ids) -> None:
        """Reserves memory for rows ahead of `store_rows_`, which then finds it reserved.

        Args:
            table: the table.
            ids: rows of the table, int64 [m], in any order.

        Raises:
            NotEnoughSpace: other processes have taken the memory.
        """
        one = self._space.named[table]
        self._memory.back_rows(one.owner, ids + one.rows.start)

    def store_rows_(self, table: int, ids: Ids, records: Words) -> None:
        """Stores those of some rows that are missing, and then sets their bits.

        Args:
            table: the table.
            ids: rows of the table, int64 [m], distinct, ascending; read.
            records: their records, uint64 [m, record_words]; read.

        Raises:
            KernelError: ids or records have the wrong form, or the table has no such rows; nothing was
                stored.
            NotEnoughSpace: other processes have taken the memory.
        """
        one = self._space.named[table]
        layout, rows = one.table.layout, ids + one.rows.start
        check_ids("store_rows_", ids, layout.rows, "table")
        if (np.diff(ids) <= 0).any() or records.shape != (len(ids), layout.record_words):
            raise KernelError(
                f"store_rows_: {len(ids)} ids and records {list(records.shape)}: ids have to be ascending "
                f"and distinct, with a record of {layout.record_words} words for each"
            )
        self._memory.back_rows(one.owner, rows)
        self._store_rows(one.owner, rows, records)

    def _store_rows(self, owner: int, ids: Ids, records: Words) -> None:
        bits = self._rows.get(owner)
        if bits is None:
            return
        unset = ~bits.present.has(ids)
        if not unset.all():
            ids, records = ids[unset], records[unset]
        table = self._space.named[owner].table
        table.scatter_(ids, records)
        bits.left -= table.kernels.distinct(ids, bits.present, np.empty_like(ids))
        if not bits.left:
            del self._rows[owner]
        self._bytes_left -= records.nbytes

    def store_span_(self, block: int, start: int, words: Words) -> None:
        """Stores the missing rows in a range of words of a data block, and then sets their bits.

        Args:
            block: number of the data block, 0..k-1.
            start: first word, counted from the block's start.
            words: uint64 [m]; read. Rows that are only partly in it, at its ends, are not stored.

        Raises:
            KernelError: the block has no such words; nothing was stored.
            NotEnoughSpace: other processes have taken the memory.
        """
        bounds = self._space.bounds
        low = bounds[block] + start if 0 <= block < len(bounds) - 1 and start >= 0 else -1
        high = low + len(words)
        if low < 0 or high > bounds[block + 1]:
            raise KernelError(
                f"store_span_: data block {block} has no words {start}..{start + len(words) - 1}; its number "
                f"has to be below {len(bounds) - 1}, and the words have to be in it"
            )
        for owner in list(self._rows):
            layout, base = self._space.named[owner].table.layout, self._space.bases[owner]
            width = layout.record_words
            first = max(0, -((base - low) // width))
            end = min(layout.rows, (high - base) // width)
            if first < end:
                records = words[base + first * width - low : base + end * width - low]
                ids = np.arange(first, end)
                self._memory.back_rows(owner, ids[:1], len(ids))
                self._store_rows(owner, ids, records.reshape(end - first, width))

    def store_parity_(self, stripe_class: int, start: int, words: Words) -> None:
        """Stores a chunk of parity if it is missing, and then sets its bit.

        Args:
            stripe_class: a stripe class of which this rank keeps parity.
            start: first word of the chunk, counted from the block's start.
            words: the chunk, uint64 [up to CHUNK_WORDS]; read.

        Raises:
            KernelError: there is no such chunk; nothing was stored.
            NotEnoughSpace: other processes have taken the memory.
        """
        block = self._parity.get(stripe_class)
        size = 0 if block is None else min(CHUNK_WORDS, len(block) - start)
        if block is None or start < 0 or start % CHUNK_WORDS or size <= 0 or len(words) != size:
            raise KernelError(
                f"store_parity_: words {start}..{start + len(words) - 1} are not a chunk of the parity of "
                f"stripe class {stripe_class}; chunks begin at multiples of {CHUNK_WORDS} words"
            )
        bits = self._chunks.get(stripe_class)
        if bits is None or bits.present.has(np.array([start // CHUNK_WORDS]))[0]:
            return
        self._memory.back_parity(stripe_class, np.array([start]), size)
        block[start : start + size] = words
        bits.left -= bits.present.add_(start // CHUNK_WORDS)
        if not bits.left:
            del self._chunks[stripe_class]
        self._bytes_left -= words.nbytes
