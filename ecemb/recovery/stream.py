"""Brings a replacement rank its rows and its parity while it trains (docs/protocol.md, 9).

Owns the thread that asks, the order in which it asks, and the moments at which answers are stored. Rows that
a lookup waits for come first; behind them everything else comes in chunks, as fast as `rate` lets them.
Parity is stored while this rank is settled on the transaction that it asked for, and dropped otherwise; rows
are stored whenever they come.

Must not know: the ranks that hold the bytes, and the state of the arena.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..errors import PeerFailure, UndeclaredWrite
from ..group.channels import Mesh
from ..group.whereabouts import Whereabouts
from ..kernels.contract import Ids, Kernels, Words
from ..local.rank_memory import RankMemory
from .delays import Delays
from .missing import Chunk, Missing
from .plan import RecoveryPlan
from .progress import Progress
from .rate import Rate
from .sources import Asked, Sources

logger: logging.Logger = logging.getLogger("ecemb")

_MOST_DROPS = 4
"""After this many chunks of parity in a row that came too late, a step waits for those under way."""
_GONE_S, _LONGEST_GONE_S = 0.001, 0.05
"""First and longest rest after an answer that the words are gone."""


@dataclasses.dataclass(eq=False)
class _Wish:
    """Rows that a lookup waits for.

    Attributes:
        table: by its index in `RowSpace.named`.
        ids: int64, distinct, ascending.
        is_met: whether they are there.
    """

    table: int
    ids: Ids
    is_met: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class _Flight:
    """Words that were asked for.

    Attributes:
        asked: the request.
        store: stores them.
        pauses: how often this rank had prepared a transaction until then.
        delay_ns: for how long its training had waited for a processor until then.
        is_parity: whether they are parity.
        size: number of words.
    """

    asked: Asked
    store: Callable[[Words], int]
    pauses: int
    delay_ns: int
    is_parity: bool
    size: int


class _Closed(Exception):
    """The thread is to end."""


class Arrivals:
    """The rows and the parity of a replacement rank on their way.

    Args:
        memory: this rank's; its rows and parity are written by a thread of this object.
        requests: connections with the holders.
        kernels: add blocks up.
        plan: the same on all ranks.
        whereabouts: says that the thread that trains waits.
        on_whole: called once, by the thread, when all rows and all parity are there.
    """

    def __init__(
        self,
        memory: RankMemory,
        requests: Mesh,
        kernels: Kernels,
        plan: RecoveryPlan,
        whereabouts: Whereabouts,
        on_whole: Callable[[], None],
    ) -> None:
        self._memory, self._whereabouts, self._on_whole = memory, whereabouts, on_whole
        self._missing = Missing(memory)
        self._sources = Sources(memory, requests, kernels, plan)
        self._flights = deque[_Flight]()
        self._changed = threading.Condition()  # held by stores, and for all that follows
        self._wishes = deque[_Wish]()
        self._urgent: list[int | None] = []
        self._waited_for = Counter[int]()
        self._waited_by_table_s: dict[str, float] = {}
        self._pauses, self._is_paused, self._is_settling = 0, False, False
        self._parity_flights = self._drops = 0
        self._delays = Delays()
        self._is_closing = self._is_over = self._is_whole = False
        self._error: BaseException | None = None
        self._rate, self._gone_s = Rate(), 0.0
        self._began_s, self._ended_s, self._stored_bytes, self._waited_s = time.monotonic(), 0.0, 0, 0.0
        self._thread = threading.Thread(target=self._run, name="ecemb-arrivals", daemon=True)

    # --- of the thread that trains ---

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    @property
    def is_whole(self) -> bool:
        """Whether all rows and all parity are there, and `on_whole` has returned."""
        return self._is_whole

    def ensure(self, table: int, ids: Ids) -> None:
        """Waits until rows are there, which are about to be looked up.

        Args:
            table: by its index in `RowSpace.named`.
            ids: int64 [m], in any order, repeats allowed; read.

        Raises:
            PeerFailure: a holder died; the next start rebuilds again.
        """
        lacking = self._missing.lacks(table, ids)
        if not len(lacking):
            return
        wish = _Wish(table, lacking)
        with self._changed:
            self._wishes.append(wish)
            self._waited_for[table] += len(lacking)
            self._changed.notify_all()
        waited_s = self._wait(lambda: wish.is_met or self._is_whole)
        name = self._memory.space.named[table].layout.name
        self._waited_by_table_s = {
            **self._waited_by_table_s,
            name: self._waited_by_table_s.get(name, 0.0) + waited_s,
        }

    def ensure_all(self, table: int | None = None) -> None:
        """Waits until all rows of a table are there, or all rows and all parity. The stream rests no more.

        Args:
            table: by its index in `RowSpace.named`; None: all tables, and parity.

        Raises:
            PeerFailure: a holder died; the next start rebuilds again.
        """

        def is_met() -> bool:
            return self._is_whole or (table is not None and self._missing.table_is_whole(table))

        if is_met():
            return
        left = self._missing.bytes_left
        what = "all rows and parity" if table is None else self._memory.space.named[table].layout.name
        logger.info("rank %d waits for %s: %.1f MB are not rebuilt yet", self._memory.rank, what, left / 1e6)
        with self._changed:
            self._urgent.append(table)
            self._changed.notify_all()
        try:
            with Progress("rebuilding lost memory, this rank's part", left, shown=True) as progress:
                self._wait(is_met, progress)
        finally:
            with self._changed:
                self._urgent.remove(table)

    def assert_there(self, table: int, ids: Ids) -> None:
        """Raises if rows that are about to be saved and changed are not there.

        Args:
            table: by its index in `RowSpace.named`.
            ids: int64 [m], in any order, repeats allowed; read.

        Raises:
            UndeclaredWrite: a lookup did not wait for its rows.
        """
        lacking = self._missing.lacks(table, ids)
        if len(lacking):
            raise UndeclaredWrite(
                f"the step changes {len(lacking)} rows of table "
                f"{self._memory.space.named[table].layout.name!r} that are not rebuilt yet, such as row "
                f"{int(lacking[0])}: they were read past the module that ecemb watches. Look rows up through "
                f'that module, or call ecemb.protect(rebuild="blocking")'
            )

    def pause(self) -> None:
        """Drops parity that is under way: before this rank stores `prepared`. None is stored until `resume`.

        Where steps are shorter than a chunk takes, each would be dropped: some of them are waited for.

        Raises:
            EcembError: nothing arrives any more, because a holder refused, or has ended.
        """
        with self._changed:
            self._is_paused = True
            while self._drops >= _MOST_DROPS and self._parity_flights and not self._comes_no_more:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            self._pauses += 1

    @property
    def _comes_no_more(self) -> bool:
        """Whether the thread stores nothing before `resume`."""
        return self._is_settling or self._is_over

    def resume(self) -> None:
        """Lets parity arrive again: after this rank has stored `committed`."""
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    def stats(self) -> dict[str, Any]:
        """Where the rebuild stands: the rows left by table, the bytes left, their rate, and time of waits."""
        passed_s = (self._ended_s or time.monotonic()) - self._began_s
        return {
            "rows_left": self._missing.rows_left(),
            "bytes_left": self._missing.bytes_left,
            "bytes_per_s": self._stored_bytes / max(passed_s, 1e-9),
            "waited_s": self._waited_s,
            "waited_by_table_s": self._waited_by_table_s,
        }

    def close(self, wait_s: float = 1.0) -> bool:
        """Asks no more. What has not arrived stays missing.

        Args:
            wait_s: seconds to wait for the thread, which may be waiting for a holder.

        Returns:
            Whether it has ended.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _wait(self, is_met: Callable[[], bool], progress: Progress | None = None) -> float:
        """Waits until something is there; for how long, in seconds."""
        began_s, left = time.monotonic(), self._missing.bytes_left
        with self._changed, self._whereabouts.waiting():
            while not is_met():
                if self._is_over:
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

    # --- of the thread that asks ---

    def _run(self) -> None:
        try:
            self._memory.record_lacking(self._missing.bytes_left)
            while not self._missing.is_whole():
                wish = self._next()
                if wish is not None:
                    self._meet(wish)
                else:
                    self._stream()
            self._land()
            self._memory.record_lacking(0)
            self._on_whole()
            self._say_end()
            self._is_whole = True
        except _Closed:
            self._say_end()
        except BaseException as error:  # noqa: BLE001 - the thread that trains raises it
            self._error = error
        self._delays.close()
        with self._changed:
            self._ended_s = time.monotonic()
            self._is_over = True
            self._changed.notify_all()

    def _say_end(self) -> None:
        try:
            self._sources.end()
        except PeerFailure as error:  # its end is the failure detector's business
            logger.debug("the holders of what rank %d lost: %s", self._memory.rank, error)

    def _next(self) -> _Wish | None:
        """Waits for something to do: for rows that a lookup waits for, or None: for the stream."""
        with self._changed:
            while True:
                if self._is_closing:
                    raise _Closed
                if self._wishes:
                    return self._wishes[0]
                if self._urgent or self._flights or not (wait_s := self._rate.wait_s()):
                    return None
                self._changed.wait(wait_s)

    def _settled(self) -> int:
        """Waits while this rank is between `prepared` and `committed`; how often it has prepared."""
        with self._changed:
            while self._is_paused and not self._is_closing:
                self._is_settling = True
                self._changed.notify_all()
                self._changed.wait()
            self._is_settling = False
            if self._is_closing:
                raise _Closed
            self._parity_flights += 1
            return self._pauses

    def _hottest(self) -> list[int]:
        with self._changed:
            urgent = [table for table in self._urgent if table is not None]
            return [*urgent, *(table for table, _ in self._waited_for.most_common())]

    def _meet(self, wish: _Wish) -> None:
        """Brings rows that a lookup waits for, or some of them: all holders are asked at once."""
        width = self._memory.space.named[wish.table].layout.record_words
        lacking = self._missing.lacks(wish.table, wish.ids)
        flights = [
            self._sent(block, offsets, width, partial(self._missing.store_rows_, wish.table, ids))
            for block, ids, offsets in self._missing.place(wish.table, lacking)
        ]
        self._sources.send()
        self._missing.back_rows(wish.table, lacking)  # meanwhile
        taken = [self._take(flight) for flight in flights]
        if not all(taken):
            return
        with self._changed:
            self._wishes.remove(wish)
            wish.is_met = True
            self._changed.notify_all()

    def _stream(self) -> None:
        """Asks for the chunks that are due, and stores the first that was asked for."""
        if self._urgent:
            self._rate.hurry()
        may_ask = not self._rate.wait_s()
        while may_ask and len(self._flights) < self._rate.most_under_way:
            if self._is_paused and self._flights:
                break  # `pause` may wait for these
            chunk = self._missing.next_chunk(self._hottest())
            if chunk is None:
                break
            self._flights.append(self._chunk(chunk))
        if not self._flights:
            self._missing.give_again()
            return
        flight = self._flights.popleft()
        if not self._take(flight):
            self._land()
            self._missing.give_again()
        delay_ns = max(flight.asked.delay_ns, self._delays.so_far_ns() - flight.delay_ns)
        self._rate.came(flight.size, delay_ns)

    def _land(self) -> None:
        """Waits for all chunks that are under way."""
        while self._flights:
            self._take(self._flights.popleft())

    def _chunk(self, chunk: Chunk) -> _Flight:
        def store(words: Words) -> int:
            if chunk.is_parity:
                return self._missing.store_parity_(chunk.stripe_class, chunk.start, words.reshape(-1))
            return self._missing.store_span_(chunk.block, chunk.start, words.reshape(-1))

        pauses = self._settled() if chunk.is_parity else 0
        size = chunk.stop - chunk.start
        return self._sent(
            chunk.block, np.array([chunk.start]), size, store, pauses, is_parity=chunk.is_parity
        )

    def _sent(
        self,
        block: int,
        offsets: Ids,
        width: int,
        store: Callable[[Words], int],
        pauses: int = 0,
        *,
        is_parity: bool = False,
    ) -> _Flight:
        """Asks for runs of a block, as of the last committed transaction."""
        asked = self._sources.ask(block, offsets, width, self._memory.committed)
        return _Flight(asked, store, pauses, self._delays.so_far_ns(), is_parity, len(offsets) * width)

    def _take(self, flight: _Flight) -> bool:
        """Waits for words, and stores them; False if they are gone, or if parity has come too late."""
        words = flight.asked.wait()
        with self._changed:
            self._parity_flights -= flight.is_parity
            self._changed.notify_all()
            if words is None:
                self._gone_s = min(max(_GONE_S, 2 * self._gone_s), _LONGEST_GONE_S)
                self._changed.wait(self._gone_s)
                return False
            self._gone_s = 0.0
            if flight.is_parity and flight.pauses != self._pauses:
                self._drops += 1
                return False
            stored = flight.store(words) if flight.is_parity else None
            if flight.is_parity:
                self._drops = 0
        if stored is None:
            stored = flight.store(words)  # a row may come at any moment, and `pause` waits for none
        self._memory.record_lacking(self._missing.bytes_left)
        with self._changed:
            self._stored_bytes += stored
            self._changed.notify_all()
        return True
