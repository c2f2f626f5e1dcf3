"""A rebuild beside training, as the step and the guard see it (docs/protocol.md, 9).

A replacement rank begins to train without its rows and parity. It asks the ranks that hold them
(`ecemb.recovery.requester`), and they answer (`ecemb.recovery.server`), until no rank lacks anything.

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
    """The holders that a replacement rank asks, or the replacement ranks that ask a holder, ascending."""
    pairs = {(task.rank, holder) for task in plan.rebuild for _, holder in task.sources}
    return sorted({a if b == rank else b for a, b in pairs if rank in (a, b)})


class Background:
    """A rank's part in a rebuild beside training. This class is the part of a rank when none is rebuilt.

    Args:
        requests: connections with the rank's `partners`; None if no rank is rebuilt.
        threads: that ask or answer.

    Attributes:
        is_over: whether all ranks are known to lack nothing.
        at_end: called when that is known.
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
        """Waits until rows are there. The training's thread, between `resume` and `pause`.

        Args:
            table: by its index in `RowSpace.named`, as for capture.
            ids: int64 [m], in any order, repeats allowed; read.

        Raises:
            PeerFailure: a rank that holds them died; the next start rebuilds again.
        """

    def ensure_all(self, table: int | None = None) -> None:
        """Waits until all rows of a table are there; without a table, until nothing is lacking.

        Raises:
            PeerFailure: a rank that holds them died; the next start rebuilds again.
        """

    def assert_there(self, table: int, ids: Ids) -> None:
        """Raises unless rows that are about to be saved and changed are there.

        Raises:
            UndeclaredWrite: they were looked up before they were there: with bytes of no step.
        """

    def pause(self) -> None:
        """No parity is stored from here until `resume`; called before this rank stores `prepared`.

        Raises:
            EcembError: nothing arrives any more, because a holder refused, or has ended.
        """

    def resume(self) -> None:
        """Parity is stored again, as of the transaction that this rank has committed last."""

    def stats(self) -> dict[str, Any]:
        """What is left to rebuild on this rank, and how fast it comes; see `Guard.stats`."""
        return {}

    def start(self) -> None:
        """Begins to ask, or to answer."""
        for thread in self._threads:
            thread.start()

    def stop(self, wait_s: float = 1.0) -> bool:
        """Waits for the threads, of which some may wait for other ranks until the connections hang up.

        Args:
            wait_s: seconds to wait for each.

        Returns:
            Whether all have ended.
        """
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(wait_s)
        return not any(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        """Ends the threads and their connections: no rank lacks anything, or this process ends."""
        if self.is_over or self._requests is None:
            return
        self.is_over = True
        self.at_end()
        self.stop()
        self._requests.hang_up()
        if self.stop():  # else a thread may use the number of a socket once more
            self._requests.close()
