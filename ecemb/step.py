"""One step of training, as the body of `with guard.step():` sees it."""

from __future__ import annotations

import logging

from .errors import UsageError
from .transaction import Transactions
from .words import short

logger: logging.Logger = logging.getLogger("ecemb")


class Step:
    """One step of training, as `guard.step()` gives it.

    Attributes:
        number: counts from 0 and is the same on all ranks: the batch to take.
        aborted: whether the step was aborted, by whatever rank; the same on all ranks once it has ended.
    """

    def __init__(self, number: int, transactions: Transactions) -> None:
        self.number = number
        self.aborted = False
        self._transactions = transactions

    def abort(self, reason: str = "") -> None:
        """Votes against this step, e.g. for a loss that is NaN; one rank's vote is enough. This rank.

        When the body has ended, all ranks undo the step: rows, dense parameters, optimizer state, generators
        and `state=` objects are what they were when it began; positions of `guard.batches` move on, and so
        does the step's number. The body goes on to its end here: other ranks may wait for its collectives.

        Args:
            reason: logged.

        Raises:
            UsageError: the step has ended.
        """
        if self._transactions.in_flight != self.number + 1:
            raise UsageError(f"step {self.number} has ended: call step.abort() inside `with guard.step():`")
        level = logging.DEBUG if self._transactions.aborting else logging.WARNING  # not for each micro-batch
        why = f": {short(reason)}" if reason else ""
        logger.log(level, "rank %d aborts step %d%s", self._transactions.rank, self.number, why)
        self._transactions.abort()
