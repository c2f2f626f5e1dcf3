"""How a worker ends by an exception: what it leaves for torchrun, what it tells the others, and when it ends.

Takes the place of sys.excepthook in a worker, whose script needs no decorator for it. In this order:

1. An error that another rank caused waits a moment for that rank's words, which the watch hears.
2. The error file is written: before the others hear of an error, so that torchrun shows the first one as the
   root cause, and not what followed from it.
3. The traceback is printed, once: an attempt that ends as the one before, without a step in between, says so
   in one line, and waits before it ends, longer each time. torchrun knows no error that it should not
   restart after, and would spend all its restarts within minutes.
4. The other ranks are told.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from types import TracebackType

from . import error_file
from .error_file import cause_of
from .errors import PeerFailure
from .watch import Watch
from .whereabouts import Whereabouts
from .words import short

logger: logging.Logger = logging.getLogger("ecemb")

_NEWS_S = 2.0  # for the rank whose error this one follows from to say what it is
_LONGEST_WAIT_S = 60.0


class ExceptHook:
    """What python calls with the exception that ends the main thread.

    Attributes:
        watch: over the other ranks, once there is one.
        whereabouts: say whether a step has ended since the start.
    """

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.whereabouts = Whereabouts()
        self._first = self._before = sys.excepthook
        self._pid = os.getpid()
        self._called = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Ends the worker's part in the job."""
        if self._called:  # by the one that it called, which torch.distributed has put over it
            self._first(kind, error, trace)
            return
        self._called = True
        if os.getpid() != self._pid or not isinstance(error, Exception):
            self._before(kind, error, trace)
            return
        cause = cause_of(error)
        name = cause or kind.__name__
        again = 0
        if not self.whereabouts.steps and (cause or not isinstance(error, PeerFailure)):
            again = error_file.repeats(name)
        self._leave_file(error, trace, name, again)
        if again and not error_file.is_last_attempt():
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
        else:
            self._before(kind, error, trace)
        if cause is None and self.watch is not None:
            self.watch.fail(short(f"{kind.__name__}: {error}", 100))

    def _leave_file(self, error: Exception, trace: TracebackType | None, name: str, again: int) -> None:
        later = cause_of(error) is not None
        text = f"{type(error).__name__}: {error}"
        stack = "".join(traceback.format_exception(type(error), error, trace))
        if later and self.watch is not None and (news := self.watch.news(_NEWS_S)):
            text = f"{news}; {text}"
            stack = f"{news}, and so this rank ended:\n{stack}"
        if self.whereabouts.steps or (isinstance(error, PeerFailure) and not cause_of(error)):
            name = ""
        try:
            error_file.leave(text, stack, later=later, name=name, repeats=again)
        except OSError as reason:
            logger.warning("torchrun will not show why this process ended: %s", reason)

    def prepare(self) -> None:
        """Makes this process end that way; again when another hook has been put over this one."""
        if sys.excepthook is not self:
            self._before, sys.excepthook = sys.excepthook, self


hook = ExceptHook()
"""That of this process."""
