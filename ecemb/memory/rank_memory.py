"""The operations of one rank on its own arena, without other ranks: capture, undo, apply, redo, commit.

`RankMemory` puts the parts of an arena together and writes the header's words in the order that
docs/protocol.md, 1.1 demands. Each operation may be interrupted between any two instructions, by a crash as
well, and then be repeated.

Owns as well the two slots of replicated state (`Slots`): the slot of the last committed transaction is never
written. A slot holds some slices of the state; a restarted rank receives the others from other ranks
(`ecemb.recovery.state_slices`). `WindowBudget` predicts the number of steps of a window that fit in memory:
it expects the old records of a window to grow with its steps as those of the last window did.

Must not know: the network, the content of replicated state, how ranks agree on a window.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..coding.parity import Delta, ParityBlocks, Received, Scratch, blank, messages, size_words
from ..coding.placement import WHOLE, Placement, Share
from ..coding.rows import WORD_BYTES, RowSpace, Table, TableLayout, arrange, joined, split
from ..errors import InconsistentArenas
from ..kernels.contract import Ids, Kernels, Words, are_apart
from . import capacity, private_files
from .arena import Arena, Backing
from .header import NONE, State, Word
from .journal import PART_BYTES, ROW_JOURNALS, Inbox, Outbox, ParityJournal, Prefault, RowJournal


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The layout of all ranks' rows and parity, equal on all ranks.

    Attributes:
        placement: rank and block -> keepers of their parity; None for one rank alone, which has no parity.
        block_words: [world size][k], words of every rank's data blocks.
        generator: uint8 [n, k].
    """

    placement: Placement | None
    block_words: tuple[tuple[int, ...], ...]
    generator: NDArray[np.uint8]


class RankMemory:
    """One rank's arena, opened: its rows, its parity, and the journals of the transaction in flight.

    Args:
        arena: attached or just created; read and overwritten.
        layouts: this rank's tables in the order of their addresses; the rank state's record is the last.
        geometry: the layout of all ranks.
        kernels: does the work on bytes.
        backing: backs the rows and parity of a replacement rank as they arrive; None: both are reserved.

    Attributes:
        kernels: as given.
        rows_lock: held while rows are captured or undone, and while an outbox or a snapshot reads rows.
        journals: both row journals; `journal` is that of the transaction that was armed last.
    """

    def __init__(
        self,
        arena: Arena,
        layouts: Sequence[TableLayout],
        geometry: Geometry,
        kernels: Kernels,
        backing: Backing | None = None,
    ) -> None:
        self.arena = arena
        self._backing = backing
        self.geometry = geometry
        self.kernels: Kernels = kernels
        self.rank: int = arena.header().constants.rank
        rows, fetch = arena.region("rows"), partial(arena.read, "rows")
        starts, _ = arrange(layouts)
        captured = joined(layouts)
        captured[-1:] = map(split, captured[-1:])
        tables, named = (
            [Table(layout, rows, at, kernels, fetch) for layout, at in zip(each, starts, strict=True)]
            for each in (layouts, captured)
        )
        self.space: RowSpace = RowSpace(tables, geometry.generator.shape[1], named)
        self.parity: ParityBlocks | None = None
        if geometry.placement is not None:
            self.parity = ParityBlocks(
                arena.region("parity").view(np.uint64),
                geometry.placement,
                self.rank,
                geometry.block_words,
                geometry.generator,
                kernels,
            )
        self._prefault = Prefault(arena)
        self.rows_lock: threading.Lock = threading.Lock()
        self.journals: list[RowJournal] = [
            RowJournal(arena, self.space, kernels, region, self._prefault, self.rows_lock)
            for region in ROW_JOURNALS
        ]
        self.journal: RowJournal = self.journals[0]
        self._r = 0 if geometry.placement is None else geometry.placement.r
        senders = () if geometry.placement is None else geometry.placement.senders(self.rank)
        self.inbox: Inbox = Inbox(arena, senders, self._r)
        self._received: tuple[int, Received] = NONE, []
        self.parity_journal: ParityJournal = ParityJournal(arena)
        self.slots: Slots = Slots(arena, self.share_of(self.rank))
        self._messages = Scratch()
        self._budgets = [
            WindowBudget(arena, {**dict.fromkeys(journals, 1), "inbox": self._r, "": 1})
            for journals in (["row_journal"], ROW_JOURNALS)
        ]

    @property
    def committed(self) -> int:
        """The last transaction that this rank committed."""
        return self.arena.get(Word.COMMITTED)

    @property
    def prepared(self) -> int:
        """The last transaction that this rank has prepared: it can commit it, also after a crash."""
        return self.arena.get(Word.PREPARED)

    @property
    def rank_state(self) -> NDArray[np.uint8]:
        """The bytes of the rank state's record, uint8, a view."""
        return self.space.tables[-1].columns[0][0]

    @property
    def message_bytes(self) -> int:
        """Bytes of this process's memory that hold messages to keepers."""
        return self._messages.size_bytes

    def share_of(self, rank: int) -> Share:
        """The part of the replicated state that a rank's slots hold."""
        return Share.of(self.geometry.placement, rank)

    def join(self, generation: int, generation_id: int) -> None:
        """Stores that this arena is a member of a generation (docs/protocol.md, 2).

        A survivor that is INIT goes LIVE before: an INIT arena counts only beside a LIVE or REBUILDING arena
        of its fill, and from this store on those may be lost.
        """
        if self.arena.get(Word.STATE) == State.INIT and self.prepared != NONE:
            self.go_live()
        self.arena.join(generation, generation_id)

    def mark_opened(self, generation: int) -> None:
        """Stores that rows and parity may change. All ranks have joined before (docs/protocol.md, 2)."""
        self.arena.set(Word.OPENED, generation)

    def mark_prepared(self, transaction: int) -> None:
        """Stores that this rank has prepared a transaction (docs/protocol.md, 1.1 and 3.3)."""
        self.arena.set(Word.PREPARED, transaction)

    def mark_undeclared(self) -> None:
        """Stores that rows were written undeclared, so that parity doesn't fit them (docs/protocol.md, 3.3).

        The next start encodes parity again.
        """
        self.arena.set(Word.UNDECLARED, 1)

    def mark_encoded(self) -> None:
        """Stores that parity fits the rows again (docs/protocol.md, 3.3)."""
        self.arena.set(Word.UNDECLARED, 0)

    def go_live(self) -> None:
        """Makes the arena LIVE, a survivor: the last store of a start (docs/protocol.md, 2)."""
        self.arena.set(Word.STATE, State.LIVE)

    def finish(self) -> None:
        """Makes the arena the tombstone of a closed job (docs/protocol.md, 2). No step follows."""
        self._prefault.wait()
        self.arena.set(Word.STATE, State.FINISHED)

    def record_recovery(self, kind: int, step: int, total_s: float) -> None:
        """Writes facts of this start for people who watch the job from outside (docs/protocol.md, 2).

        Args:
            kind: number of the recovery's kind, from 1 on.
            step: number of the step to run next.
            total_s: wall time of the start on this rank, in seconds.
        """
        self.arena.set(Word.RECOVERY_KIND, kind)
        self.arena.set(Word.RECOVERY_STEP, step)
        self.arena.set(Word.RECOVERY_US, round(total_s * 1e6))
        self.arena.set(Word.RECOVERED_NS, time.time_ns())

    def record_lacking(self, size_bytes: int) -> None:
        """Stores how many bytes a replacement rank still lacks, for people who watch the job.

        See docs/protocol.md, 2.
        """
        self.arena.set(Word.LACKING_BYTES, size_bytes)

    def record_verified(self, transaction: int) -> None:
        """Stores that all stripes have fitted at this transaction or later (docs/protocol.md, 2)."""
        self.arena.set(Word.VERIFIED, transaction)

    def arm(self, transaction: int, steps: int = 1) -> None:
        """Begins a transaction, in the row journal whose own transaction is committed.

        Args:
            transaction: number of the new transaction.
            steps: steps that it is expected to have.
        """
        likely_bytes = self.journal.likely_bytes
        self.journal = next(one for one in self.journals if one.label <= self.committed)
        self.journal.arm(transaction, steps, likely_bytes)

    def window_room(self, wanted: int, *, overlap: bool, owed_bytes: int = 0) -> int:
        """The most steps for which the next window has memory, if it changes rows as the last window did.

        Args:
            wanted: upper bound of the result, 1 or more.
            overlap: whether two transactions may need memory at the same time.
            owed_bytes: size in the journal of the rows that are captured only at the end of the last window.
        """
        used = with_owed(self.journal.used_by_step, owed_bytes)
        return self._budgets[overlap].steps(wanted, used, self.message_bytes)

    def has_room_for_all(self, *, overlap: bool) -> bool:
        """Whether there is memory for a window that changes every row.

        Args:
            overlap: as for `window_room`.
        """
        return self._budgets[overlap].has_all()

    @property
    def reserve_bytes(self) -> int:
        """Bytes of the host's memory that windows leave to other processes."""
        return least_space(self.arena)[1]

    def mark_window_room(self, steps: int) -> None:
        """Stores the most steps of a window, after a longer one ran out of memory (docs/protocol.md, 2)."""
        self.arena.set(Word.WINDOW_ROOM, steps)

    def undo(self, transaction: int) -> int:
        """Undoes the changes of this rank's rows by later transactions than `transaction`, the newest first.

        Returns:
            The number of rows written.
        """
        undone = [one for one in self.journals if one.label > transaction]
        return sum(one.undo() for one in sorted(undone, key=lambda one: one.label, reverse=True))

    def capture_rank_state(self, front: bytes | None = None) -> None:
        """Saves the rank state's old record in the journal, so that it may be overwritten.

        Args:
            front: the first bytes of the new record: only parts that these change are saved. None: all parts.
        """
        count, width = self.space.named[-1].table.columns[0].shape
        changed: Iterable[int] = range(count)
        if front is not None:  # by slices of bytes: numpy takes longer for a few KB
            old, starts = self.rank_state[: len(front)].tobytes(), enumerate(range(0, len(front), width))
            changed = [i for i, at in starts if old[at : at + width] != front[at : at + width]]
        self.journal.capture(len(self.space.tables) - 1, np.array(changed, np.int64))

    def write_rank_state(self, front: bytes) -> None:
        """Overwrites the first bytes of the rank state's record, after saving the parts that these change."""
        self.capture_rank_state(front)
        self.rank_state[: len(front)] = np.frombuffer(front, np.uint8)

    def read_block(self, stripe_class: int, block: int, start: int, stop: int) -> Words:
        """Words start..stop-1 of this rank's block of a class, fewer at the block's end; may be a view.

        The caller must not write to the result (uint64).

        Args:
            stripe_class: a class that this rank is a member of.
            block: its number in the stripe: data 0..k-1, parity k..n-1.
            start: first word, counted from the block's start.
            stop: end of the words.
        """
        if block >= self.geometry.generator.shape[1] and self.parity is not None:
            return self.parity.block(stripe_class)[start:stop]
        low, high = self.space.bounds[block], self.space.bounds[block + 1]
        return self.space.read(min(low + start, high), min(low + stop, high))

    def write_block_(self, stripe_class: int, block: int, start: int, words: Words) -> None:
        """Overwrites this rank's block of a class from word `start` on with `words` (uint64 [m])."""
        if block >= self.geometry.generator.shape[1] and self.parity is not None:
            self.parity.block(stripe_class)[start : start + len(words)] = words
        else:
            self.space.write_(self.space.bounds[block] + start, words)

    def back_rows(self, table: int, ids: Ids, each: int = 1) -> None:
        """Backs rows by memory: called before their first write, in an arena that is REBUILDING.

        Args:
            table: index in `RowSpace.named`.
            ids: int64 [m], in any order; read.
            each: number of neighbouring rows from each of `ids` on.

        Raises:
            NotEnoughSpace: there is no memory any more; no row was written.
        """
        if self._backing is not None:
            one = self.space.named[table].table
            for start, column in zip(one.starts, one.columns, strict=True):
                if size_bytes := column.shape[1]:
                    self._backing.ensure("rows", start + ids * size_bytes, each * size_bytes)

    def back_parity(self, stripe_class: int, offsets: Ids, words: int) -> None:
        """Backs runs of `words` words of a parity block, which begin at `offsets` (int64 [m], read).

        Raises: as `back_rows`.
        """
        if self._backing is not None and self.parity is not None and words:
            starts = (self.parity.starts[stripe_class] + offsets) * WORD_BYTES
            self._backing.ensure("parity", starts, words * WORD_BYTES)

    def back_all(self) -> None:
        """Backs all rows and all parity.

        Raises: as `back_rows`.
        """
        if self._backing is not None:
            self._backing.ensure_all()

    def outbox(self, journal: RowJournal | None = None) -> Outbox:
        """The deltas of a transaction, not yet laid out. The next outbox overwrites their memory.

        Args:
            journal: the transaction's journal; None for the one that was armed last. It must capture no more
                rows.
        """
        own = journal or self.journal
        other = next(one for one in self.journals if one is not own)
        return own.outbox(self._messages, other, head=self._r)

    def lay_out(self, outbox: Outbox, rest: Callable[[], object] = lambda: None) -> dict[int, Words]:
        """Lays out deltas. Returns the message to each keeper, uint64, a view.

        Args:
            outbox: from `outbox`.
            rest: called between two parts of the work.
        """
        placement = self.geometry.placement
        if placement is None:
            return {}
        outbox.lay_out(rest)
        return messages(outbox.words, outbox.edges, placement, self.rank)

    def prepare(self, transaction: int) -> None:
        """Seals the inbox and stores that this rank has prepared the transaction. The vote decides after it.

        Called when the inbox is complete, and rows and replicated state are written. It reserves all memory
        that `apply` needs: no prepared transaction may fail for lack of space.

        Raises:
            InconsistentArenas: a received delta fits no parity block of this rank; the transaction is not
                prepared.
            NotEnoughSpace: the parity under the deltas, or the parity journal, can't be backed by memory; the
                transaction is not prepared.
        """
        self.inbox.seal(transaction)
        received = self._checked(transaction)
        if self._backing is not None and not self._backing.is_whole:
            received = self._with_memory(received, self._backing)
            self._received = transaction, received
        self.parity_journal.reserve(received, self._lanes(received))
        self.mark_prepared(transaction)

    def _with_memory(self, received: Received, backing: Backing) -> Received:
        """The received rows whose parity has memory. Where only some of a row's pages have, backs the others.

        The other rows are left out: parity without memory was never stored, and what is stored there later
        includes these rows.
        """
        found: list[tuple[int, Delta]] = []
        for sender, delta in received:
            if self.parity is not None and (size := delta.words.shape[1] * WORD_BYTES):
                starts = (self.parity.start(sender, delta) + delta.offsets) * WORD_BYTES
                has = backing.has("parity", starts, size)
                backing.ensure("parity", starts[has], size)
                found.append((sender, Delta(delta.block, delta.offsets[has], delta.words[has])))
        return found

    def _checked(self, transaction: int) -> Received:
        if self.parity is None:
            return []
        received = self.inbox.deltas(transaction)
        self.parity.check(received)
        self._received = transaction, received
        return received

    def apply(self, transaction: int, rest: Callable[[], object] = lambda: None) -> None:
        """Adds the inbox's deltas to parity, row by row. May be repeated after an interruption.

        Args:
            transaction: the prepared transaction.
            rest: called between two parts of the work.

        Raises:
            InconsistentArenas: after an interruption, the inbox or the parity journal is damaged.
        """
        if self.parity is None:
            return
        (prepared, received), journal = self._received, self.parity_journal
        if prepared != transaction:
            received = self._checked(transaction)
        saved = journal.places(received)
        if journal.label != transaction:
            journal.begin(transaction)
        self._end_lanes(self.parity, received, saved)
        done, number = journal.finished(received), 0
        for sender, delta in received:
            start = done - number
            if 0 < start <= len(delta.offsets) and not journal.is_whole:
                self.parity.finish_(sender, delta.rows(start - 1, start), saved[0, journal.row % 2])
            at = max(0, start)
            for part in delta.parts(PART_BYTES, at):
                self._advance(self.parity, sender, part, number + at, saved)
                at += len(part.offsets)
                rest()
            number += len(delta.offsets)

    def _advance(self, parity: ParityBlocks, sender: int, part: Delta, number: int, saved: Words) -> None:
        """Adds a part of a Delta to parity, in lanes if threads are worth it.

        Args:
            parity: the blocks.
            sender: the rank that sent the Delta.
            part: the part.
            number: the number of its first row.
            saved: the places for old words.
        """
        count, width = part.words.shape
        lanes = min(len(saved), self.kernels.lanes(count, width * WORD_BYTES))
        if lanes < 2 or not are_apart(part.offsets, width):
            parity.advance_(sender, part, saved[0], self.parity_journal.mark)
            return
        edges = [count * lane // lanes for lane in range(lanes + 1)]
        places, marks = self.parity_journal.open([number + edge for edge in edges], saved)
        parity.advance_lanes_(sender, part, edges, places, marks)
        self.parity_journal.close(number + count)

    def _end_lanes(self, parity: ParityBlocks, received: Received, saved: Words) -> None:
        """Changes the other rows of the lanes that an interruption has left open."""
        if not (lanes := self.parity_journal.interrupted(received, saved)):
            return
        number = 0
        for sender, delta in received:
            is_theirs = number <= lanes[0].first < number + len(delta.offsets)
            for lane in lanes if is_theirs else ():
                at = int(lane.mark[0])
                if at >= lane.first:
                    row = delta.rows(at - number, at - number + 1)
                    parity.finish_(sender, row, lane.saved[at % 2])
                rest = delta.rows(at + 1 - number, lane.stop - number)
                parity.advance_(sender, rest, lane.saved, lane.mark)
            number += len(delta.offsets)
        self.parity_journal.close(lanes[-1].stop)

    def _lanes(self, received: Received) -> int:
        """The most lanes in which a part of these deltas may change parity."""
        sizes = ((len(delta.offsets), delta.words.shape[1] * WORD_BYTES) for _, delta in received)
        return max((self.kernels.lanes(*size) for size in sizes), default=1)

    def commit(self, transaction: int) -> None:
        """Stores that a transaction is committed (docs/protocol.md, 1.1).

        Journals with this label, or a lower one, are void after this store. The time of the commit, which is
        only for people, is stored before it.
        """
        self.arena.set(Word.COMMITTED_NS, time.time_ns())
        self.arena.set(Word.COMMITTED, transaction)

    def roll_to(self, transaction: int) -> tuple[int, bool]:
        """Brings this rank to the transaction that recovery decided on (docs/protocol.md, 3.3).

        Args:
            transaction: T, the smallest prepared transaction among the valid arenas.

        Returns:
            The number of rows undone, and whether a transaction was redone.

        Raises:
            InconsistentArenas: this rank has committed a later transaction than T, or the journal or inbox
                that it undoes or redoes from is damaged; no row and no parity was written.
        """
        if self.committed > transaction:
            raise InconsistentArenas(
                f"rank {self.rank} has committed transaction {self.committed}, and the survivors stand "
                f"on {transaction}: no failure leaves this behind; nothing was written. "
                f"{self.arena.way_out}"
            )
        if self.prepared > transaction:  # first: a second crash must not roll forward
            self.mark_prepared(transaction)
        undone = self.undo(transaction)
        redone = self.committed < transaction
        if redone:
            if self.committed != NONE:  # else `transaction` is the arena's first state, without an inbox
                self._checked(transaction)
                self.apply(transaction)
            self.commit(transaction)
        return undone, redone


def encoded(memory: RankMemory, start: int, stop: int) -> dict[int, Words]:
    """The messages that encode parity: words start..stop-1 of each block of this rank, as deltas from zero.

    Returns:
        Keeper -> its message, uint64, a view of new memory.
    """
    placement = memory.geometry.placement
    if placement is None:
        return {}
    out = np.empty(placement.k * size_words(1, stop - start), np.uint64)
    edges = [0]
    for block, (low, high) in enumerate(itertools.pairwise(memory.space.bounds)):
        words = memory.space.read(min(low + start, high), min(low + stop, high))
        at = edges[-1]
        if len(words):
            delta = blank(out[at:], block, 1, len(words))
            delta.offsets[:] = start
            delta.words[:] = words
            at += size_words(1, len(words))
        edges.append(at)
    return messages(out, edges, placement, memory.rank)


_SLOTS = {
    "slot0": (Word.SLOT0_LABEL, Word.SLOT0_BYTES),
    "slot1": (Word.SLOT1_LABEL, Word.SLOT1_BYTES),
}
"""Region -> its words of the header: label, and bytes in use."""


class Slots:
    """The two versions of replicated state in an arena. The committed version is never overwritten.

    Args:
        arena: holds the regions "slot0" and "slot1" and the words `slot0_label`, `slot0_bytes`, ....
        share: the part of the state that this rank's slots hold.
    """

    def __init__(self, arena: Arena, share: Share = WHOLE) -> None:
        self._arena = arena
        self.share = share

    def open(self, transaction: int, size_bytes: int) -> NDArray[np.uint8]:
        """Reserves uint8 [size_bytes] for a transaction's state; the slot is void until it is sealed."""
        slot = self._free()
        label, used = _SLOTS[slot]
        self._arena.set(label, NONE)
        self._arena.reserve(slot, size_bytes, spare_bytes=0)  # it rarely grows again
        self._arena.set(used, size_bytes)
        return self._arena.region(slot)[:size_bytes]

    def seal(self, transaction: int) -> None:
        """Records that the opened slot holds the complete state of `transaction`."""
        label, _ = _SLOTS[self._free()]
        self._arena.set(label, transaction)

    def read(self, transaction: int) -> NDArray[np.uint8]:
        """The state of a transaction, uint8, a view.

        Raises:
            InconsistentArenas: neither slot holds it.
            ArenaDamaged: the slot claims more bytes than are reserved.
        """
        labels = {slot: self._arena.get(label) for slot, (label, _) in _SLOTS.items()}
        found = [slot for slot, label in labels.items() if label == transaction]
        if len(found) != 1:
            raise InconsistentArenas(
                f"the replicated state of transaction {transaction} is not in exactly one of the slots, "
                f"which hold {list(labels.values())}: no failure leaves this behind; the arena's memory is "
                f"damaged. {self._arena.way_out}"
            )
        return self._arena.filled(found[0], _SLOTS[found[0]][1])

    def _free(self) -> str:
        committed = self._arena.get(Word.COMMITTED)
        others = [slot for slot, (label, _) in _SLOTS.items() if self._arena.get(label) != committed]
        return others[-1] if others else next(iter(_SLOTS))  # a new arena has committed nothing


class StateCopy:
    """All of the replicated state, in this process's memory: it ends with the process.

    Args:
        memory: uint8, a saved state; None: empty.
    """

    share: Share = WHOLE

    def __init__(self, memory: NDArray[np.uint8] | None = None) -> None:
        self._memory = np.empty(0, np.uint8) if memory is None else memory

    def open(self, transaction: int, size_bytes: int) -> NDArray[np.uint8]:
        """See `Slots.open`."""
        if len(self._memory) != size_bytes:
            self._memory = np.empty(size_bytes, np.uint8)
        return self._memory

    def seal(self, transaction: int) -> None:
        """See `Slots.seal`."""

    def read(self, transaction: int) -> NDArray[np.uint8]:
        """The state that was saved last, uint8, whatever its transaction."""
        return self._memory


StateStore: TypeAlias = Slots | StateCopy
"""The store that `ReplicatedState` saves to. It loads from the store if the store's share is the whole."""


_SPARE = 1.125
"""Memory for the next window, as a multiple of its expected need."""
_FRESH_S = 10.0  # how long the number of free bytes is reused before the kernel is asked again


class WindowBudget:
    """The memory that one rank has for a window, and the number of steps that fit.

    Args:
        arena: attached.
        copies: region that grows with a window -> its bytes for each byte of the row journal. The key "" is
            this process's own memory.
    """

    def __init__(self, arena: Arena, copies: Mapping[str, float]) -> None:
        self._arena = arena
        self._copies = dict(copies)
        domains = arena.constants.domains
        self._sharing = domains.count(domains[arena.constants.rank])
        self._asked_s, self._free_bytes = -_FRESH_S, 0

    def has_all(self) -> bool:
        """Whether there is memory for a window that changes all rows, and so for a window of any length."""
        return self._fits(len(self._arena.region("row_journal")), 0)

    def steps(self, wanted: int, used: Sequence[int], held_bytes: int) -> int:
        """The most steps, up to `wanted`, that a window can have.

        Args:
            wanted: 1 or more.
            used: bytes of the row journal after each step of the last window, ascending, not empty.
            held_bytes: bytes of this process's own memory that it has allocated for windows before.
        """

        def is_too_long(steps: int) -> bool:
            return not self._fits(journal_bytes(used, steps), held_bytes)

        return max(1, bisect.bisect_left(range(1, wanted + 1), True, key=is_too_long))

    def _fits(self, size_bytes: float, held_bytes: int) -> bool:
        needed = 0.0
        for region, copies in self._copies.items():
            part = copies * size_bytes
            if region:
                part = min(part, len(self._arena.region(region)))  # the capacity is for all rows
            needed += max(0.0, part - (self._arena.reserved(region) if region else held_bytes))
        return needed <= 0 or needed <= self._free() / self._sharing

    def _free(self) -> int:
        """Bytes that all ranks that share this rank's memory can take, beside the host's reserve."""
        if time.monotonic() - self._asked_s >= _FRESH_S:
            self._asked_s, self._free_bytes = time.monotonic(), free_bytes(self._arena)
        return self._free_bytes


def with_owed(used: Sequence[int], owed_bytes: int) -> list[int]:
    """Adds the rows that are captured only at a window's end to the bytes of its row journal after each step.

    The number of these rows after each step isn't known. It is assumed to grow with the square root of the
    number of steps, as popular rows come first: too high for a shorter window rather than too low.

    Args:
        used: as for `WindowBudget.steps`.
        owed_bytes: bytes that the end adds.

    Returns:
        Bytes after each step.
    """
    return [size + math.ceil(owed_bytes * math.sqrt((i + 1) / len(used))) for i, size in enumerate(used)]


def journal_bytes(used: Sequence[int], steps: int) -> float:
    """The expected bytes of the row journal after a window, times `_SPARE`.

    Beyond the last window's steps, the bytes are assumed to grow as over its last quarter: a window changes
    fewer new rows in each step the longer it lasts.

    Args:
        used: as for `WindowBudget.steps`.
        steps: number of steps of the window, 1 or more.
    """
    known = len(used)
    if steps <= known:
        return _SPARE * used[steps - 1]
    tail = max(1, known // 4)
    before = used[known - tail - 1] if known > tail else 0
    return _SPARE * (used[-1] + (steps - known) * (used[-1] - before) / tail)


def free_bytes(arena: Arena) -> int:
    """Bytes that windows can take in an arena's file system: see `least_space`."""
    return least_space(arena)[0]


def least_space(arena: Arena) -> tuple[int, int]:
    """Bytes that windows can take in an arena's file system, and the host's reserve (`capacity.reserve_of`).

    By the limit that leaves least beside its reserve, less all promises. The reserve is the largest one, and
    not among the bytes.
    """
    with private_files.opened(private_files.locate(arena.path).arena_dir, create=True) as folder:
        limits = capacity.limits(folder, arena.path)
        free = min((limit.spare_bytes for limit in limits), default=1 << 62)
        reserve = max((limit.reserve_bytes for limit in limits), default=0)
        return max(0, free - capacity.promised_elsewhere(folder)), reserve
