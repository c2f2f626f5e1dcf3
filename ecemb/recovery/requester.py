"""The replacement rank's part of a rebuild beside training: requests missing words (docs/protocol.md, 9).

Owns the thread that sends requests, the requests in flight, and the moments at which words are stored. Rows
that a lookup waits for come first; then everything else comes in chunks, at the rate that `throttle` allows.
The words of a lost block are the weighted sum of k blocks as of one transaction: requests go to all k
holders, and again to all if one of them has gone on to a later transaction. Parity is stored while this rank
has prepared nothing later than the transaction of the request, and dropped otherwise; rows are stored
whenever they come.

Must not know: how a holder reads the words.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..errors import PeerFailure, UndeclaredWrite
from ..kernels.contract import Ids, Words
from ..memory.rank_memory import RankMemory
from ..net.error_file import Activity, follows
from ..net.mesh import Mesh
from .background import Background, partners
from .missing import CHUNK_WORDS, Chunk, Missing
from .plan import Rebuild, RecoveryPlan
from .relay import Progress, weights_of
from .server import ANSWER_WORDS, Answer, Request
from .throttle import RebuildThrottle, RunDelay

logger: logging.Logger = logging.getLogger("ecemb")

POISON = "ECEMB_POISON"
"""Environment variable: if set, missing rows are filled with NaN, which shows lookups that don't wait."""
_MOST_LATE = 4
"""After this many chunks of parity in a row were dropped, `pause` waits for the chunks in flight."""
_RETRY_S, _LONGEST_RETRY_S = 0.001, 0.05
"""First and longest rest after the answer GONE, in seconds."""
_MOST_BUFFERS = 32
"""Most buffers of answers that are kept for reuse."""


@dataclasses.dataclass(eq=False)
class Demand:
    """Rows that a lookup waits for.

    Attributes:
        table: the table's index in `RowSpace.named`.
        ids: the missing rows, int64, distinct, ascending.
    """

    table: int
    ids: Ids


@dataclasses.dataclass(eq=False)
class Pending:
    """A request to all holders of a lost block, for a part of the words of an `InFlight`.

    Attributes:
        task: the lost block and its holders.
        run: index of its first run among the runs of the `InFlight`.
        word: its first word in each of these runs.
        runs: number of runs.
        width: words of each run.
        is_answered: whether all holders have answered.
        received: the weighted sum of the holders' blocks, uint64 [runs, width], new; None before all have
            answered, or if a holder's answer is GONE.
        delay_ns: the longest time that a holder's training waited for a processor during its answer.
    """

    task: Rebuild
    run: int
    word: int
    runs: int
    width: int
    is_answered: bool = False
    received: Words | None = None
    delay_ns: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class InFlight:
    """Words of a lost block that this rank has requested.

    Attributes:
        requests: the requests that together are for all of the words.
        runs: number of runs.
        width: words of each run.
        store: stores the words, uint64 [runs, width].
        prepared: for parity, how many transactions this rank had prepared when it requested; None for rows.
        delay_ns: for how long this rank's training had waited for a processor in total at the request.
    """

    requests: list[Pending]
    runs: int
    width: int
    store: Callable[[Words], None]
    prepared: int | None
    delay_ns: int


class _Closed(Exception):
    """Ends the requesting thread, after `stop`."""


class Requester(Background):
    """Rebuilds the rows and parity of a replacement rank while it trains.

    Args:
        memory: this rank's memory in state REBUILDING; a thread of this object writes its rows and parity.
        requests: connections with the holders.
        plan: the plan, the same on all ranks.
        activity: records that the training's thread waits.
    """

    def __init__(self, memory: RankMemory, requests: Mesh, plan: RecoveryPlan, activity: Activity) -> None:
        thread = threading.Thread(target=self._run, name="ecemb-requester", daemon=True)
        super().__init__(requests, [thread])
        if os.environ.get(POISON):
            _poison(memory)
        self._memory, self._activity = memory, activity
        self._missing = Missing(memory)
        self._began_s, self._lost_bytes = time.monotonic(), self._missing.bytes_left
        self._waited_s, self._waited_by_table_s = 0.0, defaultdict[str, float](float)
        # Used by the requesting thread:
        self._holders = Holders(memory, requests, plan)
        self._in_flight = deque[InFlight]()
        self._throttle, self._run_delay, self._retry_s = RebuildThrottle(), RunDelay(), 0.0
        # Used by both threads:
        self._changed = threading.Condition()  # held for the attributes below, and while parity is stored
        self._demands = deque[Demand]()
        self._demands_of_all: list[int | None] = []
        self._demanded_rows = Counter[int]()
        self._prepared, self._is_paused, self._waits_for_resume = 0, False, False
        self._parity_in_flight = self._late_in_a_row = 0
        self._is_closing = self._is_whole = False
        self._ended_s: float | None = None
        self._error: BaseException | None = None

    # --- the training's thread ---

    @property
    def is_lacking(self) -> bool:
        """Whether rows or parity are missing, or the arena is not LIVE yet."""
        return not self._is_whole

    def ensure(self, table: int, ids: Ids) -> None:
        """Waits until rows are rebuilt; see `Background.ensure`."""
        lacking = self._missing.lacks(table, ids)
        if not len(lacking):
            return
        demand = Demand(table, lacking)
        with self._changed:
            self._demands.append(demand)
            self._demanded_rows[table] += len(lacking)
            self._changed.notify_all()
        waited_s = self._wait(lambda: demand not in self._demands or self._is_whole)
        self._waited_by_table_s[self._memory.space.named[table].table.layout.name] += waited_s

    def ensure_all(self, table: int | None = None) -> None:
        """Waits until all rows of a table, or all rows and parity, are rebuilt; without rests meanwhile."""

        def is_met() -> bool:
            return self._is_whole or (table is not None and self._missing.table_is_whole(table))

        if is_met():
            return
        left = self._missing.bytes_left
        what = "all rows and parity" if table is None else self._memory.space.named[table].table.layout.name
        logger.info("rank %d waits for %s: %.1f MB are not rebuilt yet", self._memory.rank, what, left / 1e6)
        with self._changed:
            self._demands_of_all.append(table)
            self._changed.notify_all()
        try:
            with Progress("rebuilding lost memory, this rank's part", left, shown=True) as progress:
                self._wait(is_met, progress)
        finally:
            with self._changed:
                self._demands_of_all.remove(table)

    def assert_there(self, table: int, ids: Ids) -> None:
        """Raises `UndeclaredWrite` if one of the rows is missing; see `Background.assert_there`."""
        lacking = self._missing.lacks(table, ids)
        if len(lacking):
            name = self._memory.space.named[table].table.layout.name
            raise UndeclaredWrite(
                f"the step changes {len(lacking)} rows of table {name!r} that are not rebuilt yet, such as "
                f"row {int(lacking[0])}: they were read past the module that ecemb watches. Look rows up "
                f'through that module, or call ecemb.protect(rebuild="blocking")'
            )

    def pause(self) -> None:
        """Drops parity that is in flight, and stops storing parity until `resume`.

        If steps are shorter than the time of a chunk, every chunk would be dropped: after `_MOST_LATE`
        dropped chunks in a row this call waits for the chunks in flight.
        """
        with self._changed:
            self._is_paused = True
            while (
                self._late_in_a_row >= _MOST_LATE
                and self._parity_in_flight
                and not (self._waits_for_resume or self._ended_s)
            ):
                self._changed.wait()
            if self._error is not None:
                raise self._error
            self._prepared += 1

    def resume(self) -> None:
        """Allows parity to be requested and stored again. Called after `committed` is stored, or an undo."""
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    def stats(self) -> dict[str, Any]:
        """Progress of the rebuild: rows left by table, bytes left, bytes per second, and time of waits."""
        passed_s = (self._ended_s or time.monotonic()) - self._began_s
        return {
            "rows_left": self._missing.rows_left(),
            "bytes_left": self._missing.bytes_left,
            "bytes_per_s": (self._lost_bytes - self._missing.bytes_left) / max(passed_s, 1e-9),
            "waited_s": self._waited_s,
            "waited_by_table_s": dict(self._waited_by_table_s),
        }

    def stop(self, wait_s: float = 1.0) -> bool:
        """Stops sending requests; see `Background.stop`. Words that have not arrived stay missing."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        return super().stop(wait_s)

    def _wait(self, is_met: Callable[[], bool], progress: Progress | None = None) -> float:
        """Waits until `is_met()`; returns the time of the wait in seconds.

        Raises:
            PeerFailure: the requesting thread has ended before; or the error that ended it.
        """
        began_s, left = time.monotonic(), self._missing.bytes_left
        with self._changed, self._activity.waiting():
            while not is_met():
                if self._ended_s:
                    raise self._error or PeerFailure(
                        f"rank {self._memory.rank} is closed before its rows are there: restart the job"
                    )
                self._changed.wait()
                if progress is not None:
                    progress.advance(left - self._missing.bytes_left)
                    left = self._missing.bytes_left
        waited_s = time.monotonic() - began_s
        self._waited_s += waited_s
        return waited_s

    # --- the requesting thread ---

    def _run(self) -> None:
        try:
            self._memory.record_lacking(self._missing.bytes_left)
            while not self._missing.is_whole():
                demand = self._next_demand()
                if demand is not None:
                    self._meet(demand)
                else:
                    self._stream()
            self._receive_all()
            self._memory.record_lacking(0)
            _go_live(self._memory)
            self._holders.send_end()
            self._is_whole = True
        except _Closed:
            self._holders.send_end()
        except BaseException as error:  # noqa: BLE001 - the thread that trains raises it
            self._error = error
        finally:
            self._run_delay.close()
            with self._changed:
                self._ended_s = time.monotonic()
                self._changed.notify_all()

    def _next_demand(self) -> Demand | None:
        """Waits for a demand, and returns it; None if the next chunk is due before.

        Raises:
            _Closed: `stop` was called.
        """
        with self._changed:
            while True:
                if self._is_closing:
                    raise _Closed
                if self._demands:
                    return self._demands[0]
                if self._demands_of_all or self._in_flight or not (wait_s := self._throttle.wait_s()):
                    return None
                self._changed.wait(wait_s)

    def _meet(self, demand: Demand) -> None:
        """Requests the rows of a demand, and stores them. The demand stays the next one if some are GONE."""
        width = self._memory.space.named[demand.table].table.layout.record_words
        lacking = self._missing.lacks(demand.table, demand.ids)
        asked = [
            self._ask(block, offsets, width, partial(self._missing.store_rows_, demand.table, ids))
            for block, ids, offsets in self._missing.place(demand.table, lacking)
        ]
        self._holders.send()
        self._missing.back_rows(demand.table, lacking)  # while the holders answer
        is_stored = [self._receive(in_flight) for in_flight in asked]
        if all(is_stored):
            with self._changed:
                self._demands.remove(demand)
                self._changed.notify_all()

    def _stream(self) -> None:
        """Requests the chunks that are due, and receives the first chunk in flight."""
        if self._demands_of_all:
            self._throttle.hurry()
        is_due = not self._throttle.wait_s()
        while is_due and len(self._in_flight) < self._throttle.most_in_flight:
            if self._is_paused and self._in_flight:
                break  # `pause` may wait for the chunks in flight
            chunk = self._missing.next_chunk(self._demanded_tables())
            if chunk is None:
                break
            self._in_flight.append(self._ask_for_chunk(chunk))
        if not self._in_flight:
            self._missing.rewind()
            return
        first = self._in_flight.popleft()
        if not self._receive(first):
            self._receive_all()
            self._missing.rewind()
        own_delay_ns = self._run_delay.so_far_ns() - first.delay_ns
        delay_ns = max(own_delay_ns, *(request.delay_ns for request in first.requests))
        self._throttle.received(first.runs * first.width, delay_ns)

    def _demanded_tables(self) -> list[int]:
        """Tables whose chunks come first: those that `ensure_all` waits for, then those with most demands."""
        with self._changed:
            whole = [table for table in self._demands_of_all if table is not None]
            return [*whole, *(table for table, _ in self._demanded_rows.most_common())]

    def _ask_for_chunk(self, chunk: Chunk) -> InFlight:
        offsets, width = np.array([chunk.start]), chunk.stop - chunk.start
        if chunk.is_parity:
            prepared = self._wait_for_resume()
            store = partial(self._missing.store_parity_, chunk.stripe_class, chunk.start)
        else:
            prepared, store = None, partial(self._missing.store_span_, chunk.block, chunk.start)
        return self._ask(chunk.block, offsets, width, lambda words: store(words.reshape(-1)), prepared)

    def _wait_for_resume(self) -> int:
        """Waits while this rank is between `pause` and `resume`, and counts a request for parity.

        Returns:
            How many transactions this rank has prepared.

        Raises:
            _Closed: `stop` was called.
        """
        with self._changed:
            while self._is_paused and not self._is_closing:
                self._waits_for_resume = True
                self._changed.notify_all()
                self._changed.wait()
            self._waits_for_resume = False
            if self._is_closing:
                raise _Closed
            self._parity_in_flight += 1
            return self._prepared

    def _ask(
        self,
        block: int,
        offsets: Ids,
        width: int,
        store: Callable[[Words], None],
        prepared: int | None = None,
    ) -> InFlight:
        """Requests runs of words of a lost block, as of the last committed transaction; see `Holders.ask`."""
        requests = self._holders.ask(block, offsets, width, self._memory.committed)
        return InFlight(requests, len(offsets), width, store, prepared, self._run_delay.so_far_ns())

    def _receive(self, asked: InFlight) -> bool:
        """Waits for requested words, and stores them.

        Returns:
            False, without a store, if the words are GONE, or if they are parity and this rank has prepared a
            transaction since the request.
        """
        words = self._holders.receive(asked)
        is_parity = asked.prepared is not None
        with self._changed:
            self._parity_in_flight -= is_parity
            self._changed.notify_all()
            if words is None:
                self._retry_s = min(max(_RETRY_S, 2 * self._retry_s), _LONGEST_RETRY_S)
                self._changed.wait(self._retry_s)
                return False
            self._retry_s = 0.0
            if is_parity:
                if asked.prepared != self._prepared:
                    self._late_in_a_row += 1
                    return False
                asked.store(words)
                self._late_in_a_row = 0
        if not is_parity:
            asked.store(words)  # without the lock: a row may be stored at any moment, also after `pause`
        self._memory.record_lacking(self._missing.bytes_left)
        with self._changed:
            self._changed.notify_all()
        return True

    def _receive_all(self) -> None:
        """Receives all chunks in flight."""
        while self._in_flight:
            self._receive(self._in_flight.popleft())


class Holders:
    """The holders of the blocks from which this rank is rebuilt: sends requests, and adds up the answers.

    Used by one thread. A holder answers requests in their order.

    Args:
        memory: this rank's memory.
        requests: connections with the holders.
        plan: the plan, the same on all ranks.
    """

    def __init__(self, memory: RankMemory, requests: Mesh, plan: RecoveryPlan) -> None:
        self._rank, self._kernels = memory.rank, memory.kernels
        self._tasks = {task.block: task for task in plan.rebuild if task.rank == memory.rank}
        generator = memory.geometry.generator
        self._weights = {
            block: weights_of(generator, block, task.sources).reshape(1, -1)
            for block, task in self._tasks.items()
        }
        self._ranks = partners(plan, memory.rank)
        self._channels = requests.channels(self._ranks)
        self._unsent = {rank: list[Words]() for rank in self._ranks}
        self._pending = deque[Pending]()
        self._buffers: list[Words] = []

    def ask(self, block: int, offsets: Ids, width: int, of: int) -> list[Pending]:
        """Queues requests for runs of words of a lost block, which `send` or `receive` then sends.

        Args:
            block: number of the block in its stripe: data 0..k-1, parity k..n-1.
            offsets: the words at which the runs begin, counted from the block's start, int64 [m]; read.
            width: words of a run.
            of: the transaction as of which the words are needed.

        Returns:
            The requests, each for at most `CHUNK_WORDS` words.
        """
        task, runs = self._tasks[block], max(1, CHUNK_WORDS // max(1, width))
        requests: list[Pending] = []
        for run in range(0, len(offsets), runs):
            for word in range(0, width, CHUNK_WORDS):
                begins = offsets[run : run + runs] + word
                size = min(CHUNK_WORDS, width - word)
                for other, rank in task.sources:
                    request = Request(task.stripe_class, other, of, size, len(begins), int(begins[0]))
                    self._unsent[rank].append(request.words)
                    if len(begins) > 1:
                        self._unsent[rank].append(begins.view(np.uint64))
                requests.append(Pending(task, run, word, len(begins), size))
        self._pending += requests
        return requests

    def send(self) -> None:
        """Sends queued requests, as far as the connections take them without a wait.

        Raises:
            PeerFailure: a holder died.
        """
        self._run({}, "asking for lost rows")

    def receive(self, asked: InFlight) -> Words | None:
        """Waits for the answers of all holders to these requests, and to all earlier ones.

        Returns:
            The words, uint64 [runs, width], new; None if a holder's answer is GONE.

        Raises:
            PeerFailure: a holder died, or refused a request.
        """
        for request in asked.requests:
            while not request.is_answered:
                self._receive_next()
        if len(asked.requests) == 1:
            return asked.requests[0].received
        words = np.empty((asked.runs, asked.width), np.uint64)
        for request in asked.requests:
            if request.received is None:
                return None
            rows = slice(request.run, request.run + request.runs)
            words[rows, request.word : request.word + request.width] = request.received
        return words

    def send_end(self) -> None:
        """Receives all pending answers, and sends the last request, which has no runs, to all holders."""
        try:
            while self._pending:
                self._receive_next()
            for unsent in self._unsent.values():
                unsent.append(Request().words)
            self._run({}, "the end of a rebuild", all_sent=True)
        except PeerFailure as error:  # the failure detector acts on the rank's end
            logger.debug("the holders of what rank %d lost: %s", self._rank, error)

    def _receive_next(self) -> None:
        """Receives all holders' answers to the oldest pending request, and adds them up."""
        pending = self._pending.popleft()
        task, size = pending.task, pending.runs * pending.width
        sources, what = task.sources, f"asking for block {task.block} of stripe class {task.stripe_class}"
        heads = {rank: np.empty(ANSWER_WORDS, np.uint64) for _, rank in sources}
        self._run(heads, what)
        pending.delay_ns = max(int(head[1]) for head in heads.values())
        blocks = {rank: self._buffer(size) for rank, head in heads.items() if self._is_given(head, rank)}
        self._run(blocks, what)
        if len(blocks) == len(sources):
            total = np.empty(size, np.uint64)
            weights = self._weights[task.block]
            self._kernels.dot([blocks[rank] for _, rank in sources], weights, [total])
            pending.received = total.reshape(pending.runs, pending.width)
        if size >= CHUNK_WORDS // 2:
            self._buffers += list(blocks.values())[: _MOST_BUFFERS - len(self._buffers)]
        pending.is_answered = True

    def _run(self, outs: Mapping[int, Words], what: str, *, all_sent: bool = False) -> None:
        """Receives words from holders, and sends queued requests meanwhile.

        Args:
            outs: rank -> memory for its words; overwritten.
            what: name of the wait in errors.
            all_sent: whether to wait until all requests are sent.

        Raises:
            PeerFailure: a holder died.
        """
        for rank, unsent in self._unsent.items():
            if unsent:
                self._channels.send(rank, *unsent)
                unsent.clear()
        self._channels.expect(outs)
        self._channels.run(what, all_sent=all_sent)

    def _buffer(self, size: int) -> Words:
        """Memory for an answer, uint64 [size], with arbitrary content."""
        buffer = self._buffers.pop() if self._buffers else np.empty(0, np.uint64)
        return (buffer if len(buffer) >= size else np.empty(size, np.uint64))[:size]

    def _is_given(self, head: Words, rank: int) -> bool:
        """Whether words follow an answer's head.

        Raises:
            PeerFailure: the holder refused the request, or the answer is none of `Answer`.
        """
        answer = int(head[0])
        if answer == Answer.REFUSED:
            text = f"rank {rank} refuses to give rank {self._rank} what it lacks: see the log of rank {rank}"
            raise follows(PeerFailure(text))
        if answer > Answer.REFUSED:
            raise PeerFailure(
                f"rank {rank} answers {answer} to a request of rank {self._rank}, and answers are 0 to "
                f"{int(Answer.REFUSED)}: the network is damaged, or the ranks run different versions of "
                f"ecemb; restart the job"
            )
        return answer == Answer.GIVEN


def _poison(memory: RankMemory) -> None:
    for owner in {one.owner for one in memory.space.named}:
        table = memory.space.named[owner].table
        if rows := table.layout.rows:
            memory.back_rows(owner, np.zeros(1, np.int64), rows)
            for column in table.columns:
                column[:] = 0xFF


def _go_live(memory: RankMemory) -> None:
    memory.back_all()  # pages without a row, such as those between tables
    memory.go_live()
    logger.warning("rank %d: all lost rows and parity are rebuilt; memory may be lost again", memory.rank)
