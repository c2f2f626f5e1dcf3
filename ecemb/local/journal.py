"""Undo records: the old records of the rows that a transaction changes, written before the rows change.

Growing regions of the arena, each guarded by two aligned words of the header (docs/protocol.md, 1.1). There
are two, so that a transaction can begin before the previous one is decided. Undo copies bytes, so it may be
repeated, also after an interruption.

Must not know: the network, the decision.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from ..arena.arena import Arena
from ..arena.header import NONE, Word
from ..coding.parity import Scratch
from ..coding.rows import WORD_BYTES, RowSpace
from ..errors import InconsistentArenas, NotEnoughSpace, StepFailed
from ..kernels.contract import Ids, Kernels, RowSet, Words
from .ahead import Ahead
from .outbox import Chunk, Outbox, Saved

ROW_JOURNALS = {
    "row_journal": (Word.ROWS_LABEL, Word.ROWS_BYTES),
    "next_journal": (Word.NEXT_LABEL, Word.NEXT_BYTES),
}
"""Regions -> their words. The second region is used while the transaction of the first is undecided."""

_CHUNK_HEAD_WORDS = 2
_SOON_STEPS, _FAR_STEPS = 4, 32
"""When what is ready lasts for fewer steps than the first, a window asks for what the second may need."""
_CLEAR_WORDS = 10
"""Words of a row set that are cleared in the time that one row takes to be forgotten, or less."""


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
        ahead: makes memory ready before it is needed; None leaves that to the rows that need it.
        lock: shared by the journals of a rank: held while rows are captured or undone, and while another
            thread reads rows.
    """

    def __init__(
        self,
        arena: Arena,
        space: RowSpace,
        kernels: Kernels,
        region: str = "row_journal",
        ahead: Ahead | None = None,
        lock: threading.Lock | None = None,
    ) -> None:
        self._arena = arena
        self._lock = lock or threading.Lock()
        self._ahead = ahead
        self._steps_left, self._ends = 0, list[int]()
        self._region = region
        self._label, self._bytes = ROW_JOURNALS[region]
        self._space = space
        self._kernels = kernels
        self._ids = Scratch()
        self._chunks: list[Chunk] = []
        self._seen: dict[int, RowSet] = {}
        self._capturing = False  # also after an interrupted capture, when it is unknown which rows are saved

    @property
    def label(self) -> int:
        """The transaction of the old records; meaningless once it is committed."""
        return self._arena.get(self._label)

    @property
    def used_bytes(self) -> int:
        """Bytes of old records, of the transaction that the label says."""
        return self._arena.get(self._bytes)

    @property
    def used_by_step(self) -> list[int]:
        """Bytes of old records after each step of the transaction, the last of which may be open."""
        return [*self._ends, self.used_bytes]

    @property
    def likely_bytes(self) -> int:
        """Bytes of old records that the next transaction may need as well.

        Runs of rows are left out: of a table that is written whole now and then, both journals would have
        the size.
        """
        return sum(
            _CHUNK_HEAD_WORDS * WORD_BYTES + ids.nbytes + records.nbytes
            for _, ids, records in self._chunks
            if int(ids[-1]) - int(ids[0]) >= len(ids)
        )

    def arm(self, transaction: int, steps: int = 1, likely_bytes: int = 0) -> None:
        """Empties the journal for a new transaction: the count first, then the label.

        Args:
            transaction: its number.
            steps: steps that it is expected to have.
            likely_bytes: what it is expected to need.
        """
        with self._lock:
            self._arena.set(self._bytes, 0)
            self._arena.set(self._label, transaction)
            self._drop()
        self._steps_left, self._ends = steps, []
        if self._ahead is not None:
            self._ahead.ask(self._region, max(likely_bytes, self._arena.reserved(self._region)))

    def extend(self, transaction: int) -> None:
        """Adds a step to the transaction, under a new, higher label.

        Args:
            transaction: its number from here on.
        """
        self._arena.set(self._label, transaction)
        self._ask_ahead()

    def _ask_ahead(self) -> None:
        """Asks for the memory of the window's next steps, if they change as many new rows as the last one."""
        used = self._arena.get(self._bytes)
        step = used - (self._ends[-1] if self._ends else 0)
        self._ends.append(used)
        self._steps_left = max(1, self._steps_left - 1)
        if (
            self._ahead is not None
            and self._ahead.ready(self._region) < used + min(_SOON_STEPS, self._steps_left) * step
        ):
            self._ahead.ask(self._region, used + min(_FAR_STEPS, self._steps_left) * step)

    def _drop(self) -> None:
        """Drops all chunks."""
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
        """Adds rows to a table's set. Returns the new ones, ascending; they are valid until the next call."""
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
        """The deltas of all captured rows: their old records XOR those that the transaction has left.

        Args:
            scratch: memory for them.
            newer: takes the rows of the next transaction while they are laid out; None if it begins later.
            head: words of the head of each block's section.
        """
        transaction = self.label

        def since() -> Saved | None:
            return None if newer is None or newer.label <= transaction else newer.saved()

        return Outbox(self._space, self._kernels, self.saved(), scratch, since, self._lock, head=head)

    def saved(self) -> Saved:
        """The old records of all captured rows, as they are now. Who reads them later holds the lock."""
        region = self._arena.region(self._region)
        words = region[: len(region) // WORD_BYTES * WORD_BYTES].view(np.uint64)
        return Saved(words, list(self._chunks), self._seen)

    def undo(self) -> int:
        """Copies the saved records back, the last chunk first. The journal is void afterwards.

        Returns:
            The number of rows written.
        """
        rows = 0
        with self._lock:
            for table, ids, records in reversed(list(self._stored())):
                self._space.named[table].table.scatter_(ids, records)
                rows += len(ids)
            # A later transaction may reuse this number with the other journal.
            self._arena.set(self._label, NONE)
        return rows

    def empty(self) -> None:
        """Copies the saved records back; the transaction goes on without them."""
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
