"""A rebuild beside training: what each rank does until no rank lacks rows (docs/protocol.md, 9).

A replacement rank asks for what it lacks (`Arrivals`); the ranks that hold it answer (`Serving`); the others
do nothing. The training's thread says when the rank stands on one transaction, and when it does not.

Must not know: what a step is, and how ranks agree.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..group.channels import Mesh
from ..group.whereabouts import Whereabouts
from ..kernels.contract import Ids, Kernels
from ..local.rank_memory import RankMemory
from .plan import RecoveryPlan
from .serving import Serving, asking
from .sources import holders
from .stream import Arrivals

logger: logging.Logger = logging.getLogger("ecemb")

POISON = "ECEMB_POISON"
"""With this variable set, rows that are not there yet are NaN: a lookup that did not wait for them shows."""


def partners(plan: RecoveryPlan, rank: int) -> list[int]:
    """The ranks that a rank asks while it is rebuilt, or that ask it, ascending."""
    return holders(plan, rank) if rank in plan.lost else asking(plan, rank)


class Background:
    """This rank's part; until `begin`, no rank lacks anything.

    Attributes:
        is_over: whether all ranks are known to lack nothing.
        at_end: called when that is known.
    """

    def __init__(self) -> None:
        self._requests: Mesh | None = None
        self._arrivals: Arrivals | None = None
        self._serving: Serving | None = None
        self.is_over = True
        self.at_end: Callable[[], None] = lambda: None

    def begin(
        self,
        memory: RankMemory,
        requests: Mesh,
        plan: RecoveryPlan,
        kernels: Kernels,
        whereabouts: Whereabouts,
    ) -> None:
        """Begins to ask, or to answer. All ranks, when all stand on the plan's transaction.

        Args:
            memory: this rank's: a survivor's, or a replacement's in state REBUILDING without rows and parity.
            requests: connections with the `partners` of this rank.
            plan: the same on all ranks.
            kernels: do the arithmetic.
            whereabouts: says that the thread that trains waits.
        """
        self._requests, self.is_over = requests, False
        if memory.rank in plan.lost:
            if os.environ.get(POISON):
                _poison(memory)
            on_whole = partial(_tell_whole, memory)
            self._arrivals = Arrivals(memory, requests, kernels, plan, whereabouts, on_whole)
            self._arrivals.start()
        else:
            self._serving = Serving(memory, requests, plan)
            self._serving.start()

    @property
    def is_lacking(self) -> bool:
        """Whether this rank lacks rows or parity: its arena is REBUILDING."""
        return self._arrivals is not None and not self._arrivals.is_whole

    def ensure(self, table: int, ids: Ids) -> None:
        """Waits until rows are there. The training's thread, between `resume` and `pause`.

        Args:
            table: index of the table, as for capture.
            ids: int64 [m], in any order, repeats allowed.

        Raises:
            PeerFailure: a rank that holds them died.
        """
        if self._arrivals is not None:
            self._arrivals.ensure(table, ids)

    def ensure_all(self, table: int | None = None) -> None:
        """Waits until all rows of a table are there; without a table, until nothing is lacking.

        Raises:
            PeerFailure: a rank that holds them died.
        """
        if self._arrivals is not None:
            self._arrivals.ensure_all(table)

    def assert_there(self, table: int, ids: Ids) -> None:
        """Raises unless rows that are about to change are there.

        Raises:
            UndeclaredWrite: they were looked up before they were there: with bytes of no step.
        """
        if self._arrivals is not None:
            self._arrivals.assert_there(table, ids)

    def pause(self) -> None:
        """Nothing is stored from here on; before `prepared` is."""
        if self._arrivals is not None:
            self._arrivals.pause()

    def resume(self) -> None:
        """Goes on, as of the transaction that was just committed."""
        if self._arrivals is not None:
            self._arrivals.resume()

    def stats(self) -> dict[str, Any]:
        """What is left to rebuild on this rank, and how fast it comes; see `Guard.stats`."""
        if self._arrivals is None:
            return {}
        return self._arrivals.stats()

    def end(self) -> None:
        """Ends the threads and their connections: no rank lacks anything, or this process ends."""
        if self.is_over:
            return
        self.is_over = True
        self.at_end()
        if self._requests is None:
            return
        parts = [part for part in (self._arrivals, self._serving) if part is not None]
        for part in parts:
            part.close()
        self._requests.hang_up()
        if all(part.close() for part in parts):  # else a thread may use the number of a socket once more
            self._requests.close()


def _poison(memory: RankMemory) -> None:
    for owner in {owner for owner, _ in memory.space.owners}:
        table = memory.space.named[owner]
        if rows := table.layout.rows:
            memory.back_rows(owner, np.zeros(1, np.int64), rows)
            for column in table.columns:
                column[:] = 0xFF


def _tell_whole(memory: RankMemory) -> None:
    memory.back_all()  # what no row has, such as the space between tables
    memory.go_live()
    logger.warning("rank %d: all lost rows and parity are rebuilt; memory may be lost again", memory.rank)
