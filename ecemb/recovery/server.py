"""The holder's part of a rebuild beside training: answers the requests of replacement ranks.

Owns the messages, one thread for each replacement rank, and the decision whether requested words may be sent.
A request names runs of words of one of this rank's blocks, and the transaction as of which they are needed.
The answer has the words, or the code GONE: then the replacement rank requests again (docs/protocol.md, 9.2).

Must not know: the words that a replacement rank lacks, and its use of an answer.
"""

from __future__ import annotations

import bisect
import contextlib
import enum
import logging
import threading
from typing import NamedTuple

import numpy as np

from ..coding.parity import class_words
from ..errors import InconsistentArenas, PeerFailure
from ..kernels.contract import Ids, Words
from ..memory.rank_memory import RankMemory
from ..net.mesh import Mesh
from .background import Background, partners
from .missing import CHUNK_WORDS
from .plan import RecoveryPlan
from .throttle import RunDelay

logger: logging.Logger = logging.getLogger("ecemb")

ANSWER_WORDS = 2
"""Words of an answer's head: an `Answer`, and for how long training waited for a processor, in ns. The runs
follow if the answer is GIVEN."""
_PART_WORDS = 1 << 17
"""Words of records, 1 MiB, that are read under the lock for which a capture may wait."""


class Answer(enum.IntEnum):
    """The result of a request: the words as of the transaction are GONE, GIVEN, or REFUSED after an error."""

    GONE = 0
    GIVEN = 1
    REFUSED = 2


class Request(NamedTuple):
    """A replacement rank's request to a holder; a request without runs is the last one.

    Attributes:
        stripe_class: the stripe class of the block.
        block: number of the holder's block in its stripe: data 0..k-1, parity k..n-1.
        of: the transaction as of which the words are needed.
        width: words of each run.
        runs: number of runs. If there are several, the words at which they begin follow (int64 [runs]).
        first: the word at which the first run begins, counted from the block's start.
    """

    stripe_class: int = 0
    block: int = 0
    of: int = 0
    width: int = 0
    runs: int = 0
    first: int = 0

    @property
    def words(self) -> Words:
        """The message, uint64 [6], new."""
        return np.array(self, np.int64).view(np.uint64)

    @classmethod
    def of_words(cls, words: Words) -> Request:
        """The request in a message (uint64 [6]).

        Raises:
            InconsistentArenas: no replacement rank sends such a request.
        """
        request = cls(*words.view(np.int64).tolist())
        least = min(request.width, request.runs)
        if any(request) and (least < 1 or request.width * request.runs > CHUNK_WORDS or min(request) < 0):
            raise InconsistentArenas(
                f"a replacement rank asks for {request.runs} runs of {request.width} words of block "
                f"{request.block} of stripe class {request.stripe_class} from word {request.first} on, as of "
                f"transaction {request.of}, and one request is for 1 to {CHUNK_WORDS} words: the network is "
                f"damaged, or the ranks run different versions of ecemb; restart the job"
            )
        return request


class Server(Background):
    """Answers the requests of replacement ranks, in a thread for each of them.

    Args:
        memory: this rank's memory, with all rows and parity; training changes them meanwhile.
        requests: connections with the replacement ranks.
        plan: the plan, the same on all ranks.
    """

    def __init__(self, memory: RankMemory, requests: Mesh, plan: RecoveryPlan) -> None:
        threads = [
            threading.Thread(
                target=self._serve, args=(requests, rank), name=f"ecemb-serve-{rank}", daemon=True
            )
            for rank in partners(plan, memory.rank)
        ]
        super().__init__(requests, threads)
        self._memory = memory

    def _serve(self, requests: Mesh, rank: int) -> None:
        """Answers the requests of one rank until its last request, or its end."""
        what = f"serving rank {rank}, which is rebuilt"
        channels, run_delay = requests.channels([rank]), RunDelay()
        head, buffer = Request().words, np.empty(ANSWER_WORDS, np.uint64)
        try:
            while True:
                channels.expect({rank: head})
                channels.run(what)  # sends the last answer as well
                request = Request.of_words(head)
                if not request.runs:
                    break
                began_ns, size = run_delay.so_far_ns(), ANSWER_WORDS + request.runs * request.width
                offsets = np.full(request.runs, request.first, np.int64)
                if request.runs > 1:
                    channels.expect({rank: offsets})
                    channels.run(what)
                if len(buffer) < size:
                    buffer = np.empty(size, np.uint64)
                runs = buffer[ANSWER_WORDS:size].reshape(request.runs, request.width)
                snapshot = Snapshot(self._memory, request.of)
                is_given = snapshot.read(request.stripe_class, request.block, offsets, runs)
                answer = Answer.GIVEN if is_given else Answer.GONE
                buffer[:ANSWER_WORDS] = (answer, run_delay.so_far_ns() - began_ns)
                channels.send(rank, buffer[: size if is_given else ANSWER_WORDS])
        except PeerFailure as error:  # the failure detector acts on the rank's end
            logger.debug("rank %d is not served any more: %s", rank, error)
        except Exception as error:
            logger.exception("rank %d, which is rebuilt, is not served any more: %s", rank, error)
            with contextlib.suppress(PeerFailure):
                channels.send(rank, np.array([Answer.REFUSED, 0], np.uint64))
                channels.run(what)
        finally:
            run_delay.close()


class Snapshot:
    """Rows and parity of a rank as of a transaction, while the next transaction changes them.

    Any thread may read.

    Args:
        memory: the rank's memory, with all rows and parity.
        of: the transaction. The requesting rank has committed it, and has prepared no later one.
    """

    def __init__(self, memory: RankMemory, of: int) -> None:
        self._memory, self._of = memory, of

    def read(self, stripe_class: int, block: int, offsets: Ids, out: Words) -> bool:
        """Copies runs of words of one of the rank's blocks.

        Args:
            stripe_class: the stripe class of the block.
            block: the block's number in the stripe: data 0..k-1, parity k..n-1.
            offsets: the words at which the runs begin, counted from the block's start, int64 [m], in any
                order; read.
            out: uint64 [m, width], overwritten: the runs, with zeros beyond the block's end.

        Returns:
            Whether `out` is as of the transaction. It is not if this rank has committed a later transaction,
            or, for parity, is at another transaction or applies the next one.

        Raises:
            InconsistentArenas: this rank has no such block, or no such words; nothing was read.
        """
        self._check(stripe_class, block, offsets, out.shape[1])
        if block < self._memory.geometry.generator.shape[1]:
            self._read_rows(block, offsets, out)
            return self._memory.committed <= self._of  # a commit allows a journal that was read to be armed
        parity = self._memory.parity
        if parity is None or not self._has_parity:
            return False
        self._memory.kernels.gather_rows(parity.block(stripe_class), offsets, out)
        return self._has_parity

    @property
    def _has_parity(self) -> bool:
        """Whether all parity is as of the transaction; if so before and after a copy, the copy is as well."""
        memory = self._memory
        return memory.committed == self._of and memory.parity_journal.label <= self._of

    def _check(self, stripe_class: int, block: int, offsets: Ids, width: int) -> None:
        memory, placement = self._memory, self._memory.geometry.placement
        if placement is not None:
            members = placement.members(stripe_class) if 0 <= stripe_class < placement.world_size else ()
            if 0 <= block < len(members) and members[block] == memory.rank:
                last = class_words(placement, memory.geometry.block_words, stripe_class) - width
                if not len(offsets) or 0 <= int(offsets.min()) <= int(offsets.max()) <= last:
                    return
        raise InconsistentArenas(
            f"rank {memory.rank} is asked for {len(offsets)} runs of {width} words of block {block} of "
            f"stripe class {stripe_class}, and has no such block or no such words: the network is damaged, "
            f"or the ranks run different versions of ecemb; restart the job"
        )

    def _read_rows(self, block: int, offsets: Ids, out: Words) -> None:
        """Copies runs of words of a data block, each from the records that contain it.

        Args:
            block: number of the data block, 0..k-1.
            offsets: the words at which the runs begin, counted from the block's start, int64 [m]; read.
            out: uint64 [m, width], overwritten.
        """
        space = self._memory.space
        low, high = space.bounds[block : block + 2]
        begins = offsets + low
        ends = np.minimum(begins + out.shape[1], high)
        if len(out) == 1 and self._read_run(int(begins[0]), int(ends[0]), out[0]):
            return
        out[:] = 0
        first, last = int(begins.min(initial=high)), int(ends.max(initial=low))
        for index, one in enumerate(space.named):
            base = space.bases[index]
            if one.owner == index and max(base, first) < min(base + one.table.layout.words, last):
                self._read_table(index, begins, ends, out)

    def _read_run(self, start: int, stop: int, out: Words) -> bool:
        """Copies words start..stop-1 of the row space, if they fill `out` and are in one table.

        Returns:
            Whether they do and are; otherwise nothing was copied.
        """
        space = self._memory.space
        if stop - start != len(out) or not len(out):
            return False
        index = space.named[bisect.bisect_right(space.bases, start) - 1].owner
        base, layout = space.bases[index], space.named[index].table.layout
        if stop > base + layout.words:
            return False
        record = layout.record_words
        rows = np.arange((start - base) // record, -(-(stop - base) // record))
        if len(rows) * record == len(out):
            self._read_records(index, rows, out.reshape(len(rows), record))
            return True
        records = np.empty((len(rows), record), np.uint64)
        self._read_records(index, rows, records)
        skipped = (start - base) % record
        out[:] = records.reshape(-1)[skipped : skipped + len(out)]
        return True

    def _read_table(self, index: int, begins: Ids, ends: Ids, out: Words) -> None:
        """Copies the words of runs that are in one table.

        Args:
            index: index of a named table that owns its rows.
            begins: the words of the row space at which the runs begin, int64 [m]; read.
            ends: the runs' ends, int64 [m]; read.
            out: uint64 [m, width], overwritten where the runs are in the table.
        """
        space, kernels, width = self._memory.space, self._memory.kernels, out.shape[1]
        layout, base = space.named[index].table.layout, space.bases[index]
        record = layout.record_words
        starts, stops = np.maximum(begins, base), np.minimum(ends, base + layout.words)
        runs = np.flatnonzero(starts < stops)
        if not len(runs):
            return
        starts, stops = starts[runs] - base, stops[runs] - base
        first_rows = starts // record
        rows = _union(first_rows, -(-stops // record))
        records = np.empty((len(rows), record), np.uint64)
        self._read_records(index, rows, records)
        words = records.reshape(-1)  # the rows of a run are neighbours in it, as in the table
        at = (np.searchsorted(rows, first_rows) - first_rows) * record + starts
        is_whole = stops - starts == width
        if len(runs) == len(out) and is_whole.all():
            kernels.gather_rows(words, at, out)
            return
        whole = np.empty((np.count_nonzero(is_whole), width), np.uint64)
        kernels.gather_rows(words, at[is_whole], whole)
        out[runs[is_whole]] = whole
        for i in np.flatnonzero(~is_whole).tolist():
            run, size = runs[i], stops[i] - starts[i]
            skipped = base + starts[i] - begins[run]
            out[run, skipped : skipped + size] = words[at[i] : at[i] + size]

    def _read_records(self, index: int, rows: Ids, out: Words) -> None:
        """Copies records of a table as of the transaction, provided that no later one is committed meanwhile.

        Args:
            index: index of a named table that owns its rows.
            rows: int64 [m], ascending, distinct; read.
            out: uint64 [m, record_words], overwritten.
        """
        table = self._memory.space.named[index].table
        step = max(1, _PART_WORDS // table.layout.record_words)
        for at in range(0, len(rows), step):
            part, records = rows[at : at + step], out[at : at + step]
            with self._memory.rows_lock:
                table.gather(part, records)
                self._undo(index, part, records)

    def _undo(self, index: int, rows: Ids, records: Words) -> None:
        """Overwrites the records of rows that later transactions have saved in journals with the saved ones.

        A row may be in both journals. The older journal has the row as of the transaction, so it comes last.

        Args:
            index: index of a named table that owns its rows.
            rows: int64 [m], ascending, distinct; read.
            records: the rows' current records, uint64 [m, record_words]; overwritten where they were saved.
        """
        memory, space, width = self._memory, self._memory.space, records.shape[1]
        newer = [journal for journal in memory.journals if journal.label > self._of]
        for journal in sorted(newer, key=lambda journal: journal.label, reverse=True):
            saved = journal.saved()
            for name in {name for name, _, _ in saved.chunks}:
                one = space.named[name]
                if one.owner != index:
                    continue
                first = one.rows.start
                a, b = np.searchsorted(rows, (first, first + one.table.layout.rows)).tolist()
                at = saved.find(name, rows[a:b] - first, width)
                is_saved = np.flatnonzero(at >= 0)
                old = np.empty((len(is_saved), width), np.uint64)
                memory.kernels.gather_rows(saved.words, at[is_saved], old)
                records[a + is_saved] = old


def _union(starts: Ids, stops: Ids) -> Ids:
    """The numbers in the ranges starts..stops-1 (each int64 [m]): int64, ascending, distinct; new."""
    sizes = stops - starts
    ends = np.cumsum(sizes)
    return np.unique(np.repeat(starts - ends + sizes, sizes) + np.arange(ends[-1]))
