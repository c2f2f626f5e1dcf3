"""One step of training, as the body of `with guard.step():` sees it."""

from __future__ import annotations

import logging

from .._wording import short
from ..errors import UsageError
from .transaction import Transactions

logger: logging.Logger = logging.getLogger("ecemb")


class Step:
    """One step of training, as `guard.step()` gives it.

    Attributes:
        number: The step's number from 0, the same on all ranks; use it to choose the batch.
        aborted: Whether any rank aborted the step; the same on all ranks once the step has ended.
    """

    def __init__(self, number: int, transactions: Transactions) -> None:
        self.number = number
        self.aborted = False
        self._transactions = transactions

    def abort(self, reason: str = "") -> None:
        """Votes against this step, e.g. for a loss that is NaN; one rank's vote is enough. This rank.

        When the body ends, all ranks undo the step: rows, dense parameters, optimizer state, generators and
        `state=` objects are as after the last commit, so what changed in front of the step is undone as well.
        Positions of `guard.batches` and the step's number advance all the same. The body still runs to its
        end here, because other ranks may wait in its collectives.

        Args:
            reason: Text for the log.

        Raises:
            UsageError: the step has ended; or `window=` of `ecemb.protect` is not 1, so that good steps would
                be undone with this one.
        """
        if self._transactions.in_flight != self.number + 1:
            raise UsageError(f"step {self.number} has ended: call step.abort() inside `with guard.step():`")
        level = logging.DEBUG if self._transactions.aborting else logging.WARNING  # not for each micro-batch
        self._transactions.abort()
        why = f": {short(reason)}" if reason else ""
        logger.log(level, "rank %d aborts step %d%s", self._transactions.rank, self.number, why)
