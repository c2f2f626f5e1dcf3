"""The interface of a rebuild beside training to the step and the guard (docs/protocol.md, 9).

A replacement rank begins to train without its rows and parity. It requests them from the ranks that hold the
other blocks of their stripes (`ecemb.recovery.requester`), and these answer (`ecemb.recovery.server`), until
all ranks have all rows and parity.

Must not know: what a step is, and how ranks agree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..kernels.contract import Ids
from ..net.mesh import Mesh
from .plan import RecoveryPlan


def partners(plan: RecoveryPlan, rank: int) -> list[int]:
    """The ranks that a rank exchanges requests with in a rebuild beside training, ascending.

    A replacement rank's partners are the holders of the blocks that it needs; a holder's partners are the
    replacement ranks that need its blocks.
    """
    pairs = {(task.rank, holder) for task in plan.rebuild for _, holder in task.sources}
    return sorted({a if b == rank else b for a, b in pairs if rank in (a, b)})


class Background:
    """A rank's part in a rebuild beside training. This base class is the part when no rank is rebuilt.

    Args:
        requests: connections with the rank's `partners`; None if no rank is rebuilt.
        threads: the threads that send requests, or answer them.

    Attributes:
        is_over: whether all ranks are known to have all rows and parity, or this process ends.
        at_end: called when `is_over` becomes True.
    """

    def __init__(self, requests: Mesh | None = None, threads: Sequence[threading.Thread] = ()) -> None:
        self._requests, self._threads = requests, threads
        self.is_over = requests is None
        self.at_end: Callable[[], None] = lambda: None

    @property
    def is_lacking(self) -> bool:
        """Whether this rank lacks rows or parity: its arena is REBUILDING."""
        return False

    def ensure(self, table: int, ids: Ids) -> None:
        """Waits until rows are rebuilt. Called by the training's thread, between `resume` and `pause`.

        Args:
            table: the table's index in `RowSpace.named`, as for capture.
            ids: rows, int64 [m], in any order, repeats allowed; read.

        Raises:
            PeerFailure: a rank that holds blocks of their stripes died; the next start rebuilds again.
        """

    def ensure_all(self, table: int | None = None) -> None:
        """Waits until all rows of a table are rebuilt; without a table, until all rows and parity are.

        Raises:
            PeerFailure: a rank that holds blocks of their stripes died; the next start rebuilds again.
        """

    def assert_there(self, table: int, ids: Ids) -> None:
        """Checks that rows are rebuilt before they are saved in a journal and changed.

        Raises:
            UndeclaredWrite: a row is not: its lookup did not wait for it, and read bytes that no step wrote.
        """

    def pause(self) -> None:
        """Stops storing rebuilt parity until `resume`. Called before this rank stores `prepared`.

        Raises:
            EcembError: the rebuild has failed, because a holder refused a request, or died.
        """

    def resume(self) -> None:
        """Allows rebuilt parity to be stored again, as of this rank's last committed transaction.

        Called after this rank has committed or undone the transaction for which it called `pause`.
        """

    def stats(self) -> dict[str, Any]:
        """Rows and bytes left to rebuild on this rank, and their rate; see `Guard.stats`."""
        return {}

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, wait_s: float = 1.0) -> bool:
        """Waits for the threads to end. A thread may wait for another rank until the connections hang up.

        Args:
            wait_s: seconds to wait for each thread.

        Returns:
            Whether all have ended.
        """
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(wait_s)
        return not any(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        """Ends the threads and connections. Called when all ranks have all rows and parity, or at exit."""
        if self.is_over or self._requests is None:
            return
        self.is_over = True
        self.at_end()
        self.stop()
        self._requests.hang_up()
        if self.stop():  # a thread that still runs may use the number of a closed socket
            self._requests.close()
