"""A worker's end by an exception: its error file, its announcement to the others, and its delay.

Replaces sys.excepthook in a worker, so that the script needs no decorator. In this order:

1. An error that another rank caused waits a moment for that rank's announcement, from the failure detector.
2. The error file is written before the others learn of the error, so that torchrun shows the first error as
   the root cause, and not a consequence of it.
3. The traceback is printed, once. An attempt that ends like the attempt before, without a step in between,
   logs one line and waits before it ends, longer each time: torchrun restarts after any error, and would
   spend all its restarts within minutes. The traceback of an error that another rank caused shows only where
   this rank waited: one line is logged, and the traceback at DEBUG.
4. The failure is announced to the other ranks.
5. The end is enforced: from here on the process may be stuck (`enforced_end`).

The hook is an object of this module, which the fork server imports. So it keeps nothing of a process before
`prepare`, which the worker calls.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from types import TracebackType

from .._wording import short
from ..errors import PeerFailure
from . import error_file
from .enforced_end import enforce_end
from .error_file import cause_of, follows, is_lost_connection
from .failure_detector import FailureDetector, claim_last_line
from .whereabouts import Whereabouts

logger: logging.Logger = logging.getLogger("ecemb")

_NEWS_S = 2.0  # wait for the announcement of the rank that caused this error
_LONGEST_WAIT_S = 60.0
_LONGEST_LINE = 600  # of an error that another rank caused; only the reasons of many ranks are longer


class ExceptHook:
    """The function that python calls with the exception that ends the main thread.

    Attributes:
        watch: the failure detector, once it exists.
        whereabouts: show whether a step has ended since the start.
    """

    def __init__(self) -> None:
        self.watch: FailureDetector | None = None
        self.whereabouts = Whereabouts()
        self._first = self._before = sys.__excepthook__
        self._pid: int | None = (
            None  # of the process that has prepared it: not of one that it was forked from
        )
        self._called = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Ends the worker's part in the job, and sees to it that the process ends."""
        if self._called:  # by the hook that it called, which torch.distributed has put over it
            self._first(kind, error, trace)
            return
        self._called = True
        try:
            if os.getpid() != self._pid or isinstance(error, KeyboardInterrupt):
                self._before(kind, error, trace)
            else:
                self._end(kind, error, trace)
        finally:
            self._called = False

    def _end(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if isinstance(error, Exception):
                self._fail(kind, error, trace)
            else:
                self._before(kind, error, trace)
        finally:
            enforce_end()

    def _fail(self, kind: type[BaseException], error: Exception, trace: TracebackType | None) -> None:
        cause = cause_of(error)
        news: str | None = None
        if self.watch is not None and (cause is not None or is_lost_connection(error)):
            news = self.watch.news(_NEWS_S)
        if cause is None and news is not None:
            cause = cause_of(follows(error))
        name = "" if cause == "" or isinstance(error, PeerFailure) else kind.__name__
        name = "" if self.whereabouts.steps else cause or name
        again = error_file.repeats(name) if name else 0
        self._leave_file(error, trace, name, again, news)
        try:
            if again and not error_file.is_last_attempt():
                self._delay(name, error, again)
            elif cause is not None:
                self._log_consequence(error, news)
            else:
                self._before(kind, error, trace)
        finally:
            if news is None and self.watch is not None:
                self.watch.announce_failure(short(f"{kind.__name__}: {error}", 100))

    def _delay(self, name: str, error: Exception, again: int) -> None:
        wait_s = min(2.0**again, _LONGEST_WAIT_S)
        level = logging.ERROR if os.environ.get("LOCAL_RANK", "0") == "0" else logging.DEBUG
        logger.log(
            level,
            "start %d in a row that ends by %s, next in %.0f s: %s",
            again + 1,
            name,
            wait_s,
            short(error, 90),
        )
        time.sleep(wait_s)

    def _log_consequence(self, error: Exception, news: str | None) -> None:
        """Logs an error that another rank caused; at DEBUG if the failure detector has logged why."""
        text = " ".join(f"{news + '; ' if news else ''}{type(error).__name__}: {error}".split())
        logger.log(
            logging.ERROR if claim_last_line() else logging.DEBUG,
            "rank %s ends: %s (the log has the traceback at level DEBUG)",
            os.environ.get("RANK", "?"),
            short(text, _LONGEST_LINE),
        )
        logger.debug("it ends here:", exc_info=error)

    def _leave_file(
        self, error: Exception, trace: TracebackType | None, name: str, again: int, news: str | None
    ) -> None:
        later = cause_of(error) is not None
        text = f"{type(error).__name__}: {error}"
        stack = "".join(traceback.format_exception(type(error), error, trace))
        if news:
            text = f"{news}; {text}"
            stack = f"{news}, and so this rank ended:\n{stack}"
        try:
            error_file.write(text, stack, later=later, name=name, repeats=again)
        except OSError as reason:
            logger.warning("torchrun will not show why this process ended: %s", reason)

    def prepare(self) -> None:
        """Installs this hook in this process; does so again when another hook has been put over it."""
        if self._pid != os.getpid():
            self._pid, self._called = os.getpid(), False
            if sys.excepthook is not self:
                self._first = sys.excepthook
        if sys.excepthook is not self:
            self._before, sys.excepthook = sys.excepthook, self


hook = ExceptHook()
"""The hook of this process."""
