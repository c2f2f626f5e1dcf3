"""Rows and parity of this rank as a committed transaction left them, while the next one changes them.

Owns the choice between table and journal, and of the words that a replacement rank can be given
(docs/protocol.md, 9.2). Any thread may read. Must not know: the network, and the use of the words.
"""

from __future__ import annotations

import bisect

import numpy as np

from ..coding.parity import class_words
from ..errors import InconsistentArenas
from ..kernels.contract import Ids, Words
from .rank_memory import RankMemory

_PART_WORDS = 1 << 17
"""Of records that are read while a capture waits: 1 MiB."""


class AsOf:
    """Reads one rank's blocks.

    Args:
        memory: this rank's, which has all of its rows and parity.
    """

    def __init__(self, memory: RankMemory) -> None:
        self._memory, space = memory, memory.space
        self._tables = [(i, space.bases[i]) for i, one in enumerate(space.named) if one.owner == i]

    def read(self, stripe_class: int, block: int, offsets: Ids, width: int, of: int, out: Words) -> bool:
        """Copies words of one of this rank's blocks as a transaction left them.

        Args:
            stripe_class: the class of the block.
            block: its number in the stripe: data 0..k-1, parity k..n-1.
            offsets: int64 [m], where each run of words begins, counted from the block's start; in any order;
                read.
            width: words of a run.
            of: the transaction. The rank that asks has committed it, and has prepared no other.
            out: uint64 [m, width], overwritten: the runs, with zeros beyond the block's end.

        Returns:
            Whether `out` is as of the transaction. If not, this rank can't read it now: it has committed
            another one or, of parity, begun to apply it.

        Raises:
            InconsistentArenas: this rank has no such block, or no such words; nothing was read.
        """
        self._check(stripe_class, block, offsets, width)
        if block < self._memory.geometry.generator.shape[1]:
            return self._read_rows(block, offsets, width, of, out)
        return self._read_parity(stripe_class, offsets, of, out)

    def _check(self, stripe_class: int, block: int, offsets: Ids, width: int) -> None:
        memory, placement = self._memory, self._memory.geometry.placement
        if placement is not None:
            members = placement.members(stripe_class) if 0 <= stripe_class < placement.world_size else ()
            if 0 <= block < len(members) and members[block] == memory.rank:
                size = class_words(placement, memory.geometry.block_words, stripe_class)
                last = size - width
                if width >= 0 and (not len(offsets) or 0 <= int(offsets.min()) <= int(offsets.max()) <= last):
                    return
        raise InconsistentArenas(
            f"rank {memory.rank} is asked for {len(offsets)} runs of {width} words of block {block} of "
            f"stripe class {stripe_class}, and has no such block or no such words: the network is damaged, "
            f"or the ranks run different versions of ecemb; restart the job"
        )

    def _read_parity(self, stripe_class: int, offsets: Ids, of: int, out: Words) -> bool:
        parity = self._memory.parity
        if parity is None or not self._has_parity_of(of):
            return False
        self._memory.kernels.gather_rows(parity.block(stripe_class), offsets, out)
        return self._has_parity_of(of)

    def _has_parity_of(self, transaction: int) -> bool:
        """Whether all parity is that of a transaction; if so before and after a copy, all of the copy is."""
        memory = self._memory
        return memory.committed == transaction and memory.parity_journal.label <= transaction

    def _read_rows(self, block: int, offsets: Ids, width: int, of: int, out: Words) -> bool:
        space, kernels = self._memory.space, self._memory.kernels
        low, high = space.bounds[block : block + 2]
        begins = offsets + low
        ends = np.minimum(begins + width, high)
        if len(out) == 1 and self._read_run(int(begins[0]), int(ends[0]), of, out[0]):
            return self._memory.committed <= of
        out[:] = 0
        first, last = int(begins.min(initial=high)), int(ends.max(initial=low))
        for index, base in self._tables:
            layout = space.named[index].table.layout
            end, record = base + layout.words, layout.record_words
            if max(base, first) >= min(end, last):
                continue
            froms, tos = np.maximum(begins, base), np.minimum(ends, end)
            here = np.flatnonzero(froms < tos)
            if not len(here):
                continue
            froms, tos = froms[here] - base, tos[here] - base
            first_rows = froms // record
            rows = _united(first_rows, -(-tos // record))
            records = np.empty((len(rows), record), np.uint64)
            self._gather(index, rows, of, records)
            words = records.reshape(-1)  # the rows of a run are neighbours here as well
            at = (np.searchsorted(rows, first_rows) - first_rows) * record + froms
            whole = tos - froms == width
            if len(here) == len(out) and whole.all():
                kernels.gather_rows(words, at, out)
                continue
            runs = np.empty((np.count_nonzero(whole), width), np.uint64)
            kernels.gather_rows(words, at[whole], runs)
            out[here[whole]] = runs
            for one in np.flatnonzero(~whole).tolist():
                run, size = here[one], tos[one] - froms[one]
                start = base + froms[one] - begins[run]
                out[run, start : start + size] = words[at[one] : at[one] + size]
        return self._memory.committed <= of  # or a journal that was read may have been armed again

    def _read_run(self, start: int, stop: int, of: int, out: Words) -> bool:
        """Copies words start..stop-1 of the row space, if they are all of `out`, and of one table."""
        space = self._memory.space
        if stop - start != len(out) or not len(out):
            return False
        index, base = self._tables[bisect.bisect_right(self._tables, start, key=lambda one: one[1]) - 1]
        layout = space.named[index].table.layout
        if stop > base + layout.words:
            return False
        record = layout.record_words
        rows = np.arange((start - base) // record, -(-(stop - base) // record))
        if len(rows) * record == len(out):
            self._gather(index, rows, of, out.reshape(len(rows), record))
            return True
        records = np.empty((len(rows), record), np.uint64)
        self._gather(index, rows, of, records)
        skipped = (start - base) % record
        out[:] = records.reshape(-1)[skipped : skipped + len(out)]
        return True

    def _gather(self, index: int, rows: Ids, of: int, out: Words) -> None:
        """Copies records of a table as of a transaction, if no later one is committed meanwhile.

        Args:
            index: of a named table that owns its rows.
            rows: int64 [m], ascending, distinct.
            of: the transaction.
            out: uint64 [m, record_words], overwritten.
        """
        memory, table = self._memory, self._memory.space.named[index].table
        step = max(1, _PART_WORDS // table.layout.record_words)
        for at in range(0, len(rows), step):
            some, records = rows[at : at + step], out[at : at + step]
            with memory.rows_lock:
                table.gather(some, records)
                self._correct(index, some, of, records)

    def _correct(self, index: int, rows: Ids, of: int, records: Words) -> None:
        """Overwrites the records of rows that later transactions may have changed, with those they saved.

        A row may be in both journals: the older one has it as the transaction left it.
        """
        memory, space, width = self._memory, self._memory.space, records.shape[1]
        newer = [journal for journal in memory.journals if journal.label > of]
        for journal in sorted(newer, key=lambda one: one.label, reverse=True):
            saved = journal.saved()
            for name in {name for name, _, _ in saved.chunks}:
                one = space.named[name]
                if one.owner != index:
                    continue
                skipped = one.rows.start
                edges = skipped, skipped + one.table.layout.rows
                a, b = np.searchsorted(rows, edges).tolist()
                found = saved.find(name, rows[a:b] - skipped, width)
                hit = np.flatnonzero(found >= 0)
                old = np.empty((len(hit), width), np.uint64)
                memory.kernels.gather_rows(saved.words, found[hit], old)
                records[a + hit] = old


def _united(starts: Ids, stops: Ids) -> Ids:
    """The numbers in any of m ranges: int64, ascending, distinct."""
    sizes = stops - starts
    ends = np.cumsum(sizes)
    return np.unique(np.repeat(starts - ends + sizes, sizes) + np.arange(ends[-1]))
