"""Undo records and the inbox: what a transaction may still need after its process has died.

Three growing regions of the arena, each guarded by aligned words of the header (protocol.md, section 3):

- `RowJournal`: the old records of the rows that a transaction changes. Written before the data change.
- `Inbox`: the deltas that other ranks sent for the parity kept here. Complete before `prepared` is stored.
- `ParityJournal`: the old parity words under those deltas. Complete before parity changes.

Undo and redo copy bytes, so doing them twice, or half of them twice, does no harm.
Must not know: the network, who decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .arena import Arena
from .delta import Delta, Scratch, unpack
from .errors import InconsistentArenas
from .rows import WORD_BYTES, RowSpace

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

_HEAD_WORDS = 2


def _words(arena: Arena, region: str, word: str) -> Words:
    """What is in use of a region; bytes after the last whole word are left out."""
    used = arena.filled(region, word)
    return used[: len(used) // WORD_BYTES * WORD_BYTES].view(np.uint64)


def _used(record: Words) -> int:
    """Words of a record (uint64 [1, m]) up to the last that isn't 0."""
    changed = np.flatnonzero(record)
    return int(changed[-1]) + 1 if len(changed) else 0


class RowJournal:
    """Old records of the rows that one transaction changes, in chunks of one table each.

    Args:
        arena: holds the region "row_journal" and the words `rows_label`, `rows_bytes`.
        space: the rank's rows; read by `capture`, overwritten by `undo`.
    """

    def __init__(self, arena: Arena, space: RowSpace) -> None:
        self._arena = arena
        self._space = space
        self._chunks: list[tuple[int, Ids, Words]] = []
        self._scratch = Scratch()

    @property
    def label(self) -> int:
        """The transaction whose old records lie here; meaningless once that one is committed."""
        return self._arena.get("rows_label")

    def arm(self, transaction: int) -> None:
        """Empties the journal for a new transaction: the count first, then the label."""
        self._arena.set("rows_bytes", 0)
        self._arena.set("rows_label", transaction)
        self._chunks.clear()

    def capture(self, table: int, ids: Ids) -> int:
        """Saves rows that are about to change.

        Args:
            table: index of the table in the row space.
            ids: int64 [m], ascending and distinct. Rows saved before in this transaction are left out.

        Returns:
            The number of rows saved now.

        Raises:
            NotEnoughSpace: the journal can't grow; nothing was saved, and nothing may change.
        """
        for seen in (chunk[1] for chunk in self._chunks if chunk[0] == table):
            ids = np.setdiff1d(ids, seen, assume_unique=True)
        m = len(ids)
        if m == 0:
            return 0
        width = self._space.named[table].layout.record_words
        used = self._arena.get("rows_bytes")
        size = (_HEAD_WORDS + m + m * width) * WORD_BYTES
        self._arena.reserve("row_journal", used + size)
        words = self._arena.region("row_journal")[used : used + size].view(np.uint64)
        signed = words.view(np.int64)
        signed[:_HEAD_WORDS] = (table, m)
        saved = signed[_HEAD_WORDS : _HEAD_WORDS + m]
        saved[:] = ids
        records = words[_HEAD_WORDS + m :].reshape(m, width)
        self._space.named[table].gather(saved, records)
        self._arena.set("rows_bytes", used + size)
        self._chunks.append((table, saved, records))
        return m

    def changes(self) -> tuple[Ids, Ids, Words]:
        """The deltas of all captured rows against what they hold now.

        A lone record's last words are left out if they haven't changed: rank state fills a part of its own.

        Returns:
            addresses: int64 [m], ascending.
            starts: int64 [m + 1], where each record's words lie.
            words: uint64 [starts[-1]], old XOR new; overwritten by the next call.
        """
        tables = sorted({table for table, _, _ in self._chunks})
        merged = [self._merged(table) for table in tables]
        words = self._scratch.room(sum(old.size for _, old in merged))
        addresses: list[Ids] = []
        starts: list[Ids] = []
        at = 0
        for table, (ids, old) in zip(tables, merged, strict=True):
            new = words[at : at + old.size].reshape(old.shape)
            self._space.named[table].gather(ids, new)
            np.bitwise_xor(new, old, out=new)
            addresses.append(ids * old.shape[1] + self._space.bases[table])
            starts.append(at + np.arange(len(ids), dtype=np.int64) * old.shape[1])
            at += _used(new) if len(ids) == 1 else old.size
        end = np.array([at], np.int64)
        return np.concatenate([*addresses, end[:0]]), np.concatenate([*starts, end]), words[:at]

    def _merged(self, table: int) -> tuple[Ids, Words]:
        chunks = [(ids, old) for index, ids, old in self._chunks if index == table]
        if len(chunks) == 1:
            return chunks[0]
        ids = np.concatenate([ids for ids, _ in chunks])
        order = np.argsort(ids)
        return ids[order], np.concatenate([old for _, old in chunks])[order]

    def undo(self) -> int:
        """Copies the saved records back, the last chunk first.

        Returns:
            The number of rows written.
        """
        rows = 0
        for table, ids, records in reversed(list(self._stored())):
            self._space.named[table].scatter_(ids, records)
            rows += len(ids)
        return rows

    def _stored(self) -> Iterator[tuple[int, Ids, Words]]:
        words = _words(self._arena, "row_journal", "rows_bytes")
        signed = words.view(np.int64)
        at = 0
        while at < len(words):
            head = signed[at : at + _HEAD_WORDS].tolist()
            table, m = head if len(head) == _HEAD_WORDS else (-1, 0)
            if not 0 <= table < len(self._space.named):
                raise self._damaged(f"names table {table}, but the rank has {len(self._space.named)}")
            layout = self._space.named[table].layout
            at += _HEAD_WORDS
            if m < 0 or at + m * (1 + layout.record_words) > len(words):
                raise self._damaged(f"says that {m} rows of table {layout.name!r} follow word {at}")
            ids, at = signed[at : at + m], at + m
            if m and not 0 <= int(ids.min()) <= int(ids.max()) < layout.rows:
                raise self._damaged(f"names a row that table {layout.name!r} of {layout.rows} rows has not")
            size = m * layout.record_words
            records, at = words[at : at + size].reshape(m, layout.record_words), at + size
            yield table, ids, records

    def _damaged(self, what: str) -> InconsistentArenas:
        return InconsistentArenas(
            f"the row journal {what}: the arena's memory is damaged; nothing was undone. "
            f"{self._arena.way_out}"
        )


class Inbox:
    """The deltas that all ranks sent to this keeper in one transaction.

    Args:
        arena: holds the region "inbox" and the words `inbox_label`, `inbox_bytes`.
        world_size: number of senders.
    """

    def __init__(self, arena: Arena, world_size: int) -> None:
        self._arena = arena
        self._senders = world_size

    def open(self, lengths: Sequence[int]) -> Words:
        """Makes room for messages of the given lengths (words, one for each rank).

        Returns:
            uint64 [sum(lengths)] in the arena, to be filled with the messages in the order of ranks.

        Raises:
            NotEnoughSpace: the inbox can't grow; nothing was received.
        """
        self._arena.set("inbox_label", -1)
        size = (self._senders + sum(lengths)) * WORD_BYTES
        self._arena.reserve("inbox", size)
        words = self._arena.region("inbox")[:size].view(np.uint64)
        words.view(np.int64)[: self._senders] = lengths
        self._arena.set("inbox_bytes", size)
        return words[self._senders :]

    def seal(self, transaction: int) -> None:
        """Says that every message of `transaction` has been received."""
        self._arena.set("inbox_label", transaction)

    def deltas(self, transaction: int) -> list[tuple[int, Delta]]:
        """The received Deltas, each with its sender.

        Raises:
            InconsistentArenas: the inbox holds another transaction.
        """
        if (label := self._arena.get("inbox_label")) != transaction:
            raise InconsistentArenas(
                f"transaction {transaction} is prepared, but the inbox holds {label}: no failure leaves "
                f"this behind; the arena's memory is damaged"
            )
        words = _words(self._arena, "inbox", "inbox_bytes")
        lengths = words.view(np.int64)[: self._senders].tolist()
        if len(lengths) < self._senders or min(lengths) < 0 or self._senders + sum(lengths) != len(words):
            raise InconsistentArenas(
                f"the inbox of {len(words)} words says that its messages have {lengths}: the arena's memory "
                f"is damaged. {self._arena.way_out}"
            )
        edges = np.cumsum([self._senders, *lengths]).tolist()
        return [
            (sender, delta)
            for sender, (a, b) in enumerate(itertools.pairwise(edges))
            for delta in unpack(words[a:b])
        ]


class ParityJournal:
    """Old parity words under the inbox's deltas, in the inbox's order, so that they need no addresses.

    Args:
        arena: holds the region "parity_journal" and the word `parity_label`.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def label(self) -> int:
        """The transaction under which parity has begun to change."""
        return self._arena.get("parity_label")

    def open(self, words: int) -> Words:
        """Room for `words` old parity words, uint64 [words] in the arena.

        Raises:
            NotEnoughSpace: the journal can't grow.
        """
        self._arena.reserve("parity_journal", words * WORD_BYTES)
        return self._arena.region("parity_journal")[: words * WORD_BYTES].view(np.uint64)

    def seal(self, transaction: int) -> None:
        """Says that all old words of `transaction` are saved; from here on parity may change."""
        self._arena.set("parity_label", transaction)
