"""SIGTERM as a notice: this worker ends between two transactions, and not in the middle of one.

torchrun's agent passes the SIGTERM that announces the end of its machine to its workers, and kills them 30 s
later (`--shutdown-timeout`). A worker that ends between two transactions takes no step of the others with it.
An end at any other moment is as safe: this module saves work, and no rule of recovery depends on it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

from ..group.failure_detector import FailureDetector
from .transaction import Transactions

logger: logging.Logger = logging.getLogger("ecemb")


class Notice:
    """Ends this process after a SIGTERM, as soon as no transaction of it is undecided.

    A script with a handler of its own keeps it, and this object does nothing.

    Args:
        transactions: of this process.
        watch: announces the end to the other ranks; None if there are none.
    """

    def __init__(self, transactions: Transactions, watch: FailureDetector | None) -> None:
        self._transactions, self._watch = transactions, watch
        self._pid = os.getpid()
        self._came = self._listens = False

    def listen(self) -> None:
        """Handles SIGTERM from here on, if it would end the process."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._take)
            self._listens = True

    def stop(self) -> None:
        """SIGTERM ends the process at once again."""
        if self._listens and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._listens = False

    def obey(self) -> None:
        """Ends the process if the notice has come. Called after each step.

        Raises:
            The errors of `Transactions.settle`.
        """
        if self._came and self._transactions.is_between:
            self._transactions.settle()
            self._end()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if os.getpid() != self._pid:
            _end_by_signal()
        self.obey()

    def _end(self) -> None:
        logger.warning(
            "rank %d was asked to end (SIGTERM), and ends between two steps: step %d is next",
            self._transactions.rank,
            self._transactions.next_step,
        )
        if self._watch is not None:
            self._watch.announce_failure("SIGTERM, between two steps")
        _end_by_signal()


def _end_by_signal() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
