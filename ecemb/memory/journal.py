"""The journals of a transaction: the records that are saved before rows and parity change.

- `RowJournal`: undo records, the old records of the rows that a transaction changes. There are two, so that a
  transaction can begin before the previous one is decided. Undo copies bytes, so it may be repeated, also
  after an interruption.
- `Outbox`: the deltas of these rows, laid out in this process's memory for the ranks that keep parity. A
  table's records in a block are one Delta, however many steps have changed them. Deltas are laid out in
  parts, while the next transaction may change rows: a row that it has journalled is read from its journal,
  which has the row as this transaction left it (docs/protocol.md, 1.6).
- `Inbox`: the deltas that other ranks sent for the parity of this keeper, complete before `prepared` is
  stored. In front it has two words for each sender, its message's first word and its length.
- `ParityJournal`: how far parity has changed, which a redo needs beside the inbox.
- `Prefault` backs the journals' bytes and maps their pages in a thread, beside the training, so that no step
  waits for the kernel to clear them. Nothing depends on it: memory that isn't ready when it is needed is
  allocated then.

Row journals, inbox and parity journal are growing regions of the arena. Words of the header guard each of
them, and the order of stores is that of docs/protocol.md, 1.1. Must not know: the network, the decision.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..coding.parity import Delta, Received, Scratch, blank, sections, size_words, unpack, write_heads_
from ..coding.rows import WORD_BYTES, RowSpace
from ..errors import EcembError, InconsistentArenas, NotEnoughSpace, StepFailed
from ..kernels.contract import Ids, Kernels, RowSet, Words
from ..kernels.threads import MOST_THREADS
from .arena import Arena, populate
from .header import NONE, Word

logger: logging.Logger = logging.getLogger("ecemb")


Chunk = tuple[int, Ids, Words]
"""Table, its rows (int64 [m], ascending), and their old records (uint64 [m, record_words])."""

PART_BYTES = 8 << 20
"""Bytes of records that a commit processes before it calls `rest`. To lay them out takes some ms, during
which a capture waits for the lock."""

Part = list[tuple[Ids, Words]]
"""Rows of one table and block, and their old records; views of the chunks."""


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """The old records of a transaction, as its journal has them.

    Attributes:
        words: uint64, the journal's memory.
        chunks: the journal's chunks, views of `words`; each row is in one of them.
        seen: table -> the set of its rows in the chunks.
    """

    words: Words
    chunks: Sequence[Chunk]
    seen: Mapping[int, RowSet]

    def place(self, records: Words) -> int:
        """The word of the journal at which the records of a chunk begin."""
        first, start = (one.__array_interface__["data"][0] for one in (records, self.words))
        return (first - start) // WORD_BYTES

    def find(self, table: int, ids: Ids, width: int) -> Ids:
        """The word of the journal at which the old record of each row begins, int64 [m], new.

        Args:
            table: the table.
            ids: int64 [m], its rows, in any order; read.
            width: words of a record.

        Returns:
            -1 for a row that isn't saved.
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
        saved: the transaction's old records. They stay until the transaction is committed.
        scratch: memory for the deltas.
        newer: returns the old records of the next transaction, None if it has not begun; called with the lock
            held.
        lock: held while rows are read; also held by the thread that captures rows of the next transaction.
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
        newer: Callable[[], Saved | None],
        lock: threading.Lock,
        head: int,
    ) -> None:
        self._space, self._kernels, self._saved, self._scratch = space, kernels, saved, scratch
        self._newer, self._lock = newer, lock
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

        If it has a single record, its unchanged last words are left out: rank state fills only a part of its
        record.
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
        """Computes the deltas again of rows that the next transaction may have changed.

        Args:
            table: the table.
            part: rows of it, with their old records.
            out: uint64 [m, record_words], deltas of these rows; overwritten where the next transaction has
                saved the row.
            newer: the records that the next transaction has saved: the rows as this one left them.
        """
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


ROW_JOURNALS = {
    "row_journal": (Word.ROWS_LABEL, Word.ROWS_BYTES),
    "next_journal": (Word.NEXT_LABEL, Word.NEXT_BYTES),
}
"""Region -> its words of the header: label, and bytes in use.

The second region is used while the transaction of the first is undecided.
"""

_CHUNK_HEAD_WORDS = 2
_SOON_STEPS, _FAR_STEPS = 4, 32
"""If the prefaulted memory lasts for fewer steps than the first number, a window requests memory for as many
steps as the second number."""
_CLEAR_WORDS = 10
"""`clear_` clears at least this many words of a row set in the time in which `forget_` removes one row."""


def _words(arena: Arena, region: str, word: Word) -> Words:
    """The words of a region that are in use, without a partial last word."""
    used = arena.filled(region, word)
    return used[: len(used) // WORD_BYTES * WORD_BYTES].view(np.uint64)


class RowJournal:
    """Old records of the rows that one transaction changes, in chunks of one table each.

    Args:
        arena: holds the region and its words of the header.
        space: the rank's rows; read by `capture`, overwritten by `undo`.
        kernels: copy and compare rows.
        region: one of `ROW_JOURNALS`.
        prefault: backs and maps memory of the region before it is needed.
        lock: shared by the journals of a rank: held while rows are captured or undone, and while another
            thread reads rows.
    """

    def __init__(
        self,
        arena: Arena,
        space: RowSpace,
        kernels: Kernels,
        region: str,
        prefault: Prefault,
        lock: threading.Lock,
    ) -> None:
        self._arena = arena
        self._lock = lock
        self._prefault = prefault
        self._steps_left, self._ends = 0, list[int]()
        self._region = region
        self._label, self._bytes = ROW_JOURNALS[region]
        self._space = space
        self._kernels = kernels
        self._ids = Scratch()
        self._chunks: list[Chunk] = []
        self._seen: dict[int, RowSet] = {}
        self._capturing = False  # stays True after an interrupted capture: it is unknown which rows are saved

    @property
    def label(self) -> int:
        """The transaction of the old records. The journal is void once the transaction is committed."""
        return self._arena.get(self._label)

    @property
    def used_by_step(self) -> list[int]:
        """Bytes of the journal after each step of the transaction; the last step may be open."""
        return [*self._ends, self._arena.get(self._bytes)]

    @property
    def likely_bytes(self) -> int:
        """Bytes of the journal that the next transaction is likely to need as well.

        Chunks of consecutive rows are left out. They come from a table that is written completely now and
        then, and both journals would grow to its size.
        """
        return sum(
            _CHUNK_HEAD_WORDS * WORD_BYTES + ids.nbytes + records.nbytes
            for _, ids, records in self._chunks
            if int(ids[-1]) - int(ids[0]) >= len(ids)
        )

    def arm(self, transaction: int, steps: int = 1, likely_bytes: int = 0) -> None:
        """Empties the journal for a new transaction: stores the count of bytes first, then the label.

        Args:
            transaction: number of the new transaction.
            steps: steps that it is expected to have.
            likely_bytes: bytes of the journal that it is expected to need.
        """
        with self._lock:
            self._arena.set(self._bytes, 0)
            self._arena.set(self._label, transaction)
            self._drop()
        self._steps_left, self._ends = steps, []
        self._prefault.ask(self._region, max(likely_bytes, self._arena.reserved(self._region)))

    def extend(self, transaction: int) -> None:
        """Adds a step to the transaction, under a new, higher label.

        Args:
            transaction: the new number of the transaction.
        """
        self._arena.set(self._label, transaction)
        self._ask_ahead()

    def retract(self, transaction: int) -> None:
        """Takes back the last `extend`, whose step has captured no row.

        Args:
            transaction: the transaction's number before.
        """
        self._arena.set(self._label, transaction)
        self._ends.pop()
        self._steps_left += 1

    def _ask_ahead(self) -> None:
        """Requests memory for the window's next steps, assuming as many new rows in each as in the last."""
        used = self._arena.get(self._bytes)
        step = used - (self._ends[-1] if self._ends else 0)
        self._ends.append(used)
        self._steps_left = max(1, self._steps_left - 1)
        if self._prefault.ready(self._region) < used + min(_SOON_STEPS, self._steps_left) * step:
            self._prefault.ask(self._region, used + min(_FAR_STEPS, self._steps_left) * step)

    def _drop(self) -> None:
        """Drops all chunks, and removes their rows from the sets."""
        rows: dict[int, int] = {}
        for table, ids, _ in self._chunks:
            rows[table] = rows.get(table, 0) + len(ids)
        cleared = {t for t, count in rows.items() if count * _CLEAR_WORDS >= len(self._seen[t].seen)}
        for table in cleared:
            self._seen[table].clear_()
        for table, ids, _ in self._chunks:
            if table not in cleared:
                self._kernels.forget_(self._seen[table], ids)
        self._chunks.clear()

    def capture(self, table: int, ids: Ids) -> int:
        """Saves rows before they change.

        Args:
            table: index of the table in the row space.
            ids: int64 [m], in any order. Repeated rows, and rows already saved in this transaction, are
                skipped.

        Returns:
            The number of rows that were saved for the first time in this transaction.

        Raises:
            NotEnoughSpace: the journal can't grow; nothing was saved, and no row may change.
            StepFailed: an exception, such as one of a signal, interrupted an earlier call. The journal takes
                no more rows, since rows that were not saved could change without their parity.
        """
        if self._capturing:
            raise StepFailed(
                "an exception interrupted the saving of rows before they change, and the step continued: "
                "let the exception end the step; a restart undoes the step"
            )
        with self._lock:
            return self._capture(table, ids)

    def _capture(self, table: int, ids: Ids) -> int:
        self._capturing = True
        fresh = self._new(table, ids)
        try:
            if len(fresh):
                self._chunks.append(self._save(table, fresh))
        except NotEnoughSpace:
            self._kernels.forget_(self._seen[table], fresh)
            self._capturing = False
            raise
        self._capturing = False
        return len(fresh)

    def _new(self, table: int, ids: Ids) -> Ids:
        """Adds rows to a table's set. Returns the new rows, ascending; the next call overwrites them."""
        if table not in self._seen:
            self._seen[table] = RowSet(self._space.named[table].table.layout.rows)
        if len(ids) == 1:
            return ids if self._seen[table].add_(int(ids[0])) else ids[:0]
        out = self._ids.room(len(ids)).view(np.int64)
        return out[: self._kernels.distinct(ids, self._seen[table], out)]

    def _save(self, table: int, ids: Ids) -> Chunk:
        """Writes the chunk, then the count; returns the chunk as views of the arena."""
        m, width = len(ids), self._space.named[table].table.layout.record_words
        used = self._arena.get(self._bytes)
        size = (_CHUNK_HEAD_WORDS + m + m * width) * WORD_BYTES
        self._arena.reserve(self._region, used + size)
        words = self._arena.region(self._region)[used : used + size].view(np.uint64)
        signed = words.view(np.int64)
        signed[:_CHUNK_HEAD_WORDS] = (table, m)
        saved = signed[_CHUNK_HEAD_WORDS : _CHUNK_HEAD_WORDS + m]
        saved[:] = ids
        records = words[_CHUNK_HEAD_WORDS + m :].reshape(m, width)
        self._space.named[table].table.gather(saved, records)
        self._arena.set(self._bytes, used + size)
        return table, saved, records

    def outbox(self, scratch: Scratch, newer: RowJournal | None = None, *, head: int = 0) -> Outbox:
        """The deltas of all captured rows: their old records XOR their records at the transaction's end.

        Args:
            scratch: memory for the deltas.
            newer: the journal of the next transaction, which may capture rows while the deltas are laid out;
                None if the next transaction begins later.
            head: words of the head of each block's section.
        """
        transaction = self.label

        def since() -> Saved | None:
            return None if newer is None or newer.label <= transaction else newer.saved()

        return Outbox(self._space, self._kernels, self.saved(), scratch, since, self._lock, head)

    def saved(self) -> Saved:
        """The old records of all rows captured so far. A thread that reads them later holds the lock."""
        region = self._arena.region(self._region)
        words = region[: len(region) // WORD_BYTES * WORD_BYTES].view(np.uint64)
        return Saved(words, list(self._chunks), self._seen)

    def undo(self) -> int:
        """Copies the saved records back to their rows, the last chunk first. The journal is void afterwards.

        Returns:
            The number of rows written.
        """
        rows = 0
        with self._lock:
            for table, ids, records in reversed(list(self._stored())):
                self._space.named[table].table.scatter_(ids, records)
                rows += len(ids)
            # A later transaction may have the same number, with its records in the other journal.
            self._arena.set(self._label, NONE)
        return rows

    def empty(self) -> None:
        """Copies the saved records back to their rows, and empties the journal. The transaction goes on."""
        with self._lock:
            for table, ids, records in self._chunks:
                self._space.named[table].table.scatter_(ids, records)
            self._arena.set(self._bytes, 0)
            self._drop()

    def _stored(self) -> Iterator[Chunk]:
        words = _words(self._arena, self._region, self._bytes)
        signed = words.view(np.int64)
        at = 0
        while at < len(words):
            head = signed[at : at + _CHUNK_HEAD_WORDS].tolist()
            table, m = head if len(head) == _CHUNK_HEAD_WORDS else (-1, 0)
            if not 0 <= table < len(self._space.named):
                raise self._damaged(f"refers to table {table}, but the rank has {len(self._space.named)}")
            layout = self._space.named[table].table.layout
            at += _CHUNK_HEAD_WORDS
            if m < 0 or at + m * (1 + layout.record_words) > len(words):
                raise self._damaged(f"claims that {m} rows of table {layout.name!r} follow word {at}")
            ids, at = signed[at : at + m], at + m
            if m and not 0 <= int(ids.min()) <= int(ids.max()) < layout.rows:
                raise self._damaged(f"refers to a row beyond the {layout.rows} rows of table {layout.name!r}")
            size = m * layout.record_words
            records, at = words[at : at + size].reshape(m, layout.record_words), at + size
            yield table, ids, records

    def _damaged(self, what: str) -> InconsistentArenas:
        return InconsistentArenas(
            f"the row journal {what}: the arena's memory is damaged; nothing was undone. "
            f"{self._arena.way_out}"
        )


class Inbox:
    """The deltas of one transaction.

    Args:
        arena: holds the region "inbox" and the words `inbox_label`, `inbox_bytes`.
        senders: the ranks that send deltas to this rank.
        r: parity blocks in a stripe.
    """

    def __init__(self, arena: Arena, senders: Sequence[int], r: int) -> None:
        self._arena, self._senders, self._r = arena, tuple(senders), r
        self._front = 2 * len(self._senders)

    def receive(self, sizes: Mapping[int, int]) -> dict[int, Words]:
        """Reserves memory for messages. First it voids the deltas of the transaction before.

        Args:
            sizes: sender -> the announced length of its message in words, not negative.

        Returns:
            Sender -> uint64 [size] in the arena, for the caller to fill.

        Raises:
            NotEnoughSpace: the inbox can't grow.
        """
        self._arena.set(Word.INBOX_LABEL, NONE)
        places: dict[int, tuple[int, int]] = dict.fromkeys(self._senders, (self._front, 0))
        end = self._front
        for sender, size in sizes.items():
            places[sender], end = (end, size), end + size
        self._arena.reserve("inbox", end * WORD_BYTES)
        words = self._arena.region("inbox")[: end * WORD_BYTES].view(np.uint64)
        words.view(np.int64)[: self._front] = [number for place in places.values() for number in place]
        self._arena.set(Word.INBOX_BYTES, end * WORD_BYTES)
        return {sender: words[at : at + size] for sender, (at, size) in places.items() if size}

    def seal(self, transaction: int) -> None:
        """Records that every message of `transaction` has been received."""
        self._arena.set(Word.INBOX_LABEL, transaction)

    def deltas(self, transaction: int) -> list[tuple[int, Delta]]:
        """The received Deltas, each with its sender.

        Raises:
            InconsistentArenas: the inbox holds another transaction or none, or its messages are damaged.
        """
        if (label := self._arena.get(Word.INBOX_LABEL)) != transaction:
            raise InconsistentArenas(
                f"transaction {transaction} is prepared, but the inbox holds {label}: no failure leaves "
                f"this behind; the arena's memory is damaged. {self._arena.way_out}"
            )
        words = _words(self._arena, "inbox", Word.INBOX_BYTES)
        numbers = words.view(np.int64)[: self._front].tolist()
        places = list(zip(numbers[::2], numbers[1::2], strict=False))
        if len(places) < len(self._senders) or not all(
            0 <= at <= at + size <= len(words) for at, size in places
        ):
            raise InconsistentArenas(
                f"the inbox of {len(words)} words claims messages at {places} (first word, length): the "
                f"arena's memory is damaged. {self._arena.way_out}"
            )
        return [
            (sender, delta)
            for sender, (at, size) in zip(self._senders, places, strict=True)
            for section in sections(words[at : at + size], self._r)
            for delta in unpack(section)
        ]


_LANE_WORDS = 16
"""Words of a lane's line in the head of the parity journal: no other thread stores in its cache lines."""
_WHOLE, _LANES = range(2)  # words of the head's first line
_MARK, _FIRST, _STOP = range(3)  # words of a lane's line
PARITY_HEAD_BYTES = (1 + MOST_THREADS) * _LANE_WORDS * WORD_BYTES
"""Bytes in front of the places for old words: a line for each lane, which one thread has. So another number
of threads is another format of arenas."""


@dataclasses.dataclass(frozen=True, eq=False)
class Lane:
    """A run of parity rows that one thread changes.

    Attributes:
        first: the number of its first row.
        stop: the number after its last row.
        mark: int64 [1], memory of the number of the row that is changing, or has changed last; first - 1
            before its first row.
        saved: uint64 [2, w], the places for its old words.
    """

    first: int
    stop: int
    mark: Ids
    saved: Words


class ParityJournal:
    """The old words of the parity row that is changing, and of the row before it; of each lane, if there are.

    A transaction's parity rows are numbered through the inbox's deltas, in their order. They change one after
    another: the journal has the number of the row that is changing, or has changed last. Rows with even
    numbers save their old words in one place, rows with odd numbers in the other.

    Threads share a run of rows that don't overlap, after all rows before it have changed: each has a lane,
    with a number and two places of its own. The head of the journal has the number of rows that were complete
    when the last lanes ended, 0 before any did, the number of lanes, and a line for each. Lanes are void once
    their rows are among the complete ones, and until one of them names a row: all lines are written before.

    Args:
        arena: holds the region "parity_journal" and the words `parity_label`, `parity_row`.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def label(self) -> int:
        """The transaction under which parity has begun to change."""
        return self._arena.get(Word.PARITY_LABEL)

    @property
    def row(self) -> int:
        """The number of the row that is changing, or has changed last, outside of lanes; NONE at first."""
        return self._arena.get(Word.PARITY_ROW)

    @property
    def mark(self) -> Ids:
        """The memory of `row`, int64 [1]: a word of the header that the kernel stores as it changes rows."""
        return self._arena.word(Word.PARITY_ROW)

    def reserve(self, received: Received, lanes: int = 1) -> None:
        """Backs the head, and for each lane two places for old words, as long as the deltas' widest row.

        Args:
            received: the deltas.
            lanes: wanted; there are fewer if the region's capacity is small.

        Raises:
            NotEnoughSpace: the journal can't grow.
        """
        size = 2 * _widest(received) * WORD_BYTES
        most = (len(self._arena.region("parity_journal")) - PARITY_HEAD_BYTES) // max(1, size)
        lanes = max(1, min(lanes, MOST_THREADS, most))
        self._arena.reserve("parity_journal", PARITY_HEAD_BYTES + lanes * size, spare_bytes=0)

    def places(self, received: Received) -> Words:
        """The places for old words that `reserve` has backed: uint64 [lanes, 2, words of the widest row]."""
        words = _widest(received)
        size = 2 * words * WORD_BYTES
        backed = self._arena.reserved("parity_journal") - PARITY_HEAD_BYTES
        lanes = min(MOST_THREADS, backed // size) if words else 1
        region = self._arena.region("parity_journal")[PARITY_HEAD_BYTES : PARITY_HEAD_BYTES + lanes * size]
        return region.view(np.uint64).reshape(lanes, 2, words)

    def begin(self, transaction: int) -> None:
        """Stores that no row has changed, then the transaction under which parity changes from here on."""
        self._arena.set(Word.PARITY_ROW, NONE)
        self._store(0, _WHOLE, 0)
        self._void_lanes()
        self._arena.set(Word.PARITY_LABEL, transaction)

    def finished(self, received: Received) -> int:
        """The number of rows that have changed, at most all rows of the deltas. Open lanes come after them.

        Raises:
            InconsistentArenas: the deltas don't have the row of the journal.
        """
        rows = sum(len(delta.offsets) for _, delta in received)
        whole = int(self._head()[0, _WHOLE])
        if not NONE <= self.row < rows or not 0 <= whole <= rows:
            raise InconsistentArenas(
                f"the parity journal names row {self.row}, after {whole} complete rows, and the inbox has "
                f"{rows}: the arena's memory is damaged. {self._arena.way_out}"
            )
        if self.row + 1 < whole:  # the process ended in `close`
            self._arena.set(Word.PARITY_ROW, whole - 1)
        return self.row + 1

    @property
    def is_whole(self) -> bool:
        """Whether row number `row` is complete, as a lane has changed it; else it may be half changed."""
        return self.row + 1 <= int(self._head()[0, _WHOLE])

    def open(self, edges: Sequence[int], saved: Words) -> tuple[Words, Ids]:
        """Begins lanes, after all rows before them have changed. The caller then starts the threads.

        Args:
            edges: lanes + 1 numbers of rows: lane i has the rows edges[i]..edges[i+1]-1.
            saved: from `places`, for as many lanes or more.

        Returns:
            The places of the lanes, uint64 [lanes, 2, w], and the memory of their numbers, int64
            [lanes, v], which are in the first column.
        """
        lanes = len(edges) - 1
        self._void_lanes()
        self._store(0, _LANES, lanes)
        for line, (first, stop) in enumerate(itertools.pairwise(edges), 1):
            self._store(line, _FIRST, first)
            self._store(line, _STOP, stop)
            self._store(line, _MARK, first - 1)
        return saved[:lanes], self._head()[1 : 1 + lanes]

    def close(self, stop: int) -> None:
        """Stores that all rows before number `stop` have changed, after all threads: the lanes are void."""
        self._store(0, _WHOLE, stop)
        self._arena.set(Word.PARITY_ROW, stop - 1)

    def interrupted(self, received: Received, saved: Words) -> list[Lane]:
        """The open lanes, if one of them names a row.

        Raises:
            InconsistentArenas: as for `finished`; or they are not the rows of a Delta that follow those which
                `finished` returns.
        """
        done, head = self.finished(received), self._head()
        lines = head[1 : 1 + min(MOST_THREADS, max(0, int(head[0, _LANES])))].tolist()
        if not any(line[_MARK] >= line[_FIRST] >= done for line in lines):
            return []
        edges = [done, *(line[_STOP] for line in lines)]
        ends = list(itertools.accumulate(len(delta.offsets) for _, delta in received))
        if (
            len(lines) > len(saved)
            or edges[-1] > next((end for end in ends if end > done), 0)
            or any(
                not (line[_FIRST] == first <= line[_MARK] + 1 <= line[_STOP])
                for first, line in zip(edges, lines, strict=False)
            )
        ):
            claims = [(line[_FIRST], line[_STOP], line[_MARK]) for line in lines]
            raise InconsistentArenas(
                f"the parity journal has lanes with the rows and numbers {claims} after row {self.row}, and "
                f"the deltas of the inbox end with the rows {ends}: the arena's memory is damaged. "
                f"{self._arena.way_out}"
            )
        return [
            Lane(line[_FIRST], line[_STOP], head[1 + i, _MARK : _MARK + 1], saved[i])
            for i, line in enumerate(lines)
        ]

    def _void_lanes(self) -> None:
        for line in range(1, 1 + MOST_THREADS):
            self._store(line, _MARK, NONE)

    def _store(self, line: int, word: int, value: int) -> None:
        """Stores a word of the head: one aligned 8-byte store, as that of a word of the header."""
        self._head()[line, word] = value

    def _head(self) -> Ids:
        """The head, int64 [1 + lanes, words of a line]."""
        return (
            self._arena.region("parity_journal")[:PARITY_HEAD_BYTES].view(np.int64).reshape(-1, _LANE_WORDS)
        )


def _widest(received: Received) -> int:
    return max((delta.words.shape[1] for _, delta in received), default=0)


class Prefault:
    """Backs and maps regions of one arena in a thread, which ends when all requests are done.

    Args:
        arena: attached.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._asked: dict[str, int] = {}
        self._ready: dict[str, int] = {}
        self._todo: dict[str, int] = {}
        self._thread: threading.Thread | None = None

    def ready(self, region: str) -> int:
        """Bytes from the region's start that this object has backed and mapped."""
        return self._ready.get(region, 0)

    def ask(self, region: str, size_bytes: int) -> None:
        """Requests that the thread backs and maps the first `size_bytes` of a region. Returns at once.

        At most the region's capacity is backed. Too little space raises no error here, but at the later
        `Arena.reserve` of the bytes.
        """
        size_bytes = min(size_bytes, len(self._arena.region(region)))
        with self._lock:
            if size_bytes <= self._asked.get(region, 0):
                return
            self._asked[region] = self._todo[region] = size_bytes
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ecemb-prefault", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # a limit of the system
                    logger.debug("%d bytes of %s are not prefaulted: %s", size_bytes, region, error)
                    self._todo.clear()
                else:
                    self._thread = thread  # which waits for this lock

    def wait(self) -> None:
        """Waits until all requests are done."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._thread = None
                    return
                region, size_bytes = self._todo.popitem()
            try:
                self._arena.reserve(region, size_bytes, spare_bytes=0)
                populate(self._arena.region(region)[self.ready(region) : size_bytes])
                self._ready[region] = size_bytes
            except (EcembError, OSError) as error:
                logger.debug("%d bytes of %s are not prefaulted: %s", size_bytes, region, error)
