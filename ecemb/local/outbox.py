"""The deltas of one transaction, laid out in this process's memory for the ranks that keep parity.

Owns their order: a table's records in a block are one Delta, however many steps have changed them. They are
laid out in parts, and rows may change again meanwhile: a part takes a row that the next transaction has
journalled from that journal, which has the row as this transaction left it (docs/protocol.md, 1.6).

Must not know: the network, parity, when the parts are laid out.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..coding.parity import Scratch, blank, place, size_words, write_heads_
from ..coding.rows import WORD_BYTES, RowSpace
from ..kernels.contract import Ids, Kernels, RowSet, Words

Chunk = tuple[int, Ids, Words]
"""A table, rows of it in ascending order, and their old records (uint64 [m, record_words])."""

PART_BYTES = 8 << 20
"""Of the records that a commit works on before it rests. To lay them out takes some ms: a capture waits."""

Part = list[tuple[Ids, Words]]
"""Rows of one table and block, and their old records; views of the chunks."""


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """The old records of a transaction, as its journal has them.

    Attributes:
        words: uint64, the journal's memory.
        chunks: views of it; each row is in one of them.
        seen: the rows of each table that are in them.
    """

    words: Words
    chunks: Sequence[Chunk]
    seen: Mapping[int, RowSet]

    def place(self, records: Words) -> int:
        """The word at which the records of a chunk begin."""
        return place(records, self.words)

    def find(self, table: int, ids: Ids, width: int) -> Ids:
        """The word at which the old record of each row begins; -1 for a row that isn't there.

        Args:
            table: the table.
            ids: int64 [m], in any order.
            width: words of a record.
        """
        found = np.full(len(ids), -1, np.int64)
        if (rows := self.seen.get(table)) is None:
            return found
        known = np.flatnonzero(rows.has(ids))
        known = known[np.argsort(ids[known])]
        wanted = ids[known]
        for at, saved, records in self.chunks if len(known) else ():
            if at != table:
                continue
            a, b = np.searchsorted(saved, (wanted[0], wanted[-1] + 1)).tolist()
            where = np.searchsorted(wanted, saved[a:b])
            hit = np.flatnonzero(wanted[where] == saved[a:b])
            found[known[where[hit]]] = self.place(records) + width * (a + hit)
        return found


class Outbox:
    """The deltas of one transaction.

    Args:
        space: the rank's rows.
        kernels: do the work.
        saved: the transaction's old records. They stay until it is committed.
        scratch: memory for the deltas.
        newer: the old records of the next transaction, if that has begun; called with the lock held.
        lock: held while rows are read; who journals rows of the next transaction holds it as well.
        head: words of the head of each block's section.

    Attributes:
        words: uint64, a section of deltas for each block; complete when `lay_out` has returned.
        edges: k + 1 words: the first word of each section, and the end of the last.
    """

    def __init__(
        self,
        space: RowSpace,
        kernels: Kernels,
        saved: Saved,
        scratch: Scratch,
        newer: Callable[[], Saved | None] = lambda: None,
        lock: threading.Lock | None = None,
        *,
        head: int = 0,
    ) -> None:
        self._space, self._kernels, self._saved, self._scratch = space, kernels, saved, scratch
        self._newer, self._lock = newer, lock or threading.Lock()
        self.words: Words = scratch.room(0)
        self.edges: list[int] = [0] * len(space.bounds)
        self._head = head

    def lay_out(self, rest: Callable[[], object] = lambda: None) -> None:
        """Lays out all deltas.

        Args:
            rest: called between two parts.
        """
        by_table: dict[int, list[tuple[Ids, Words, list[int]]]] = {}
        for table, ids, old in self._saved.chunks:
            by_table.setdefault(table, []).append((ids, old, self._space.cut(table, ids)))
        blocks = len(self.edges) - 1
        rows = sum(size_words(len(ids), old.shape[1]) for _, ids, old in self._saved.chunks)
        size = rows + blocks * (self._head + len(by_table) * size_words(0, 0))
        self.words = self._scratch.room(size)
        for block in range(blocks):
            at = self.edges[block] + self._head
            for table, chunks in by_table.items():
                found = [
                    (ids[a:b], old[a:b])
                    for ids, old, cut in chunks
                    if (a := cut[block]) < (b := cut[block + 1])
                ]
                if found:
                    at += self._lay_out(block, table, found, self.words[at:], rest)
            self.edges[block + 1] = at
        write_heads_(self.words, self.edges, self._head)

    def _lay_out(self, block: int, table: int, rows: Part, out: Words, rest: Callable[[], object]) -> int:
        """Writes one Delta to the start of `out`; returns its size in words.

        The unchanged last words of a single record are left out: rank state fills only a part of its record.
        """
        count, width = sum(len(ids) for ids, _ in rows), self._space.named[table].table.layout.record_words
        delta = blank(out, block, count, width)
        first = self._space.bases[table] - self._space.bounds[block]
        at = 0
        for part in _parts(rows, max(1, PART_BYTES // max(1, WORD_BYTES * width))):
            end = at + sum(len(ids) for ids, _ in part)
            self._change(table, part, delta.words[at:end])
            np.multiply(_ids(part), width, out=delta.offsets[at:end])
            at = end
            rest()
        delta.offsets[:] += first
        if count == 1:
            width = (delta.words != 0).tobytes().rfind(b"\1") + 1
            blank(out, block, count, width)
        return size_words(count, width)

    def _change(self, table: int, part: Part, out: Words) -> None:
        """Writes old XOR new of some rows of a table (uint64 [m, record_words], overwritten)."""
        at = 0
        with self._lock:
            for ids, old in part:
                self._space.named[table].table.change(ids, old, out[at : at + len(ids)])
                at += len(ids)
            if (newer := self._newer()) is not None:
                self._correct(table, part, out, newer)

    def _correct(self, table: int, part: Part, out: Words, newer: Saved) -> None:
        """Does it again for rows that the next transaction may have changed, with what it has saved."""
        width = out.shape[1]
        found = newer.find(table, _ids(part), width)
        again = np.flatnonzero(found >= 0)
        if not len(again):
            return
        places = [self._saved.place(old) + width * np.arange(len(ids)) for ids, old in part]
        old, left = np.empty((2, len(again), width), np.uint64)
        self._kernels.gather_rows(self._saved.words, np.concatenate(places)[again], old)
        self._kernels.gather_rows(newer.words, found[again], left)
        np.bitwise_xor(old, left, out=left)
        self._kernels.scatter_(out, again, left, 0)


def _ids(part: Part) -> Ids:
    """The rows of a part."""
    return part[0][0] if len(part) == 1 else np.concatenate([ids for ids, _ in part])


def _parts(rows: Part, most: int) -> Iterator[Part]:
    """Cuts rows into parts of at most `most` rows."""
    part: Part = []
    left = most
    for ids, old in rows:
        at = 0
        while at < len(ids):
            end = min(len(ids), at + left)
            part.append((ids[at:end], old[at:end]))
            at, left = end, left - (end - at)
            if not left:
                yield part
                part, left = [], most
    if part:
        yield part
