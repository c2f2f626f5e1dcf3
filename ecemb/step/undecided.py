"""The end of a process that has prepared a transaction and can't decide it (docs/protocol.md, 1.1)."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

from .._wording import short
from ..group import error_file
from ..group.error_file import cause_of
from ..group.failure_detector import EXIT_UNDECIDED, say_last_words

logger: logging.Logger = logging.getLogger("ecemb")


def end_process(transaction: int, error: BaseException) -> NoReturn:
    """Ends the process, because only recovery may decide a prepared transaction.

    Args:
        transaction: The one that is prepared.
        error: What this rank met after it had prepared.
    """
    logger.critical(
        "step %d is prepared but undecided on this rank (%s: %s); ending the process, so that "
        "recovery decides from the arenas",
        transaction - 1,
        type(error).__name__,
        short(error),
    )
    with suppress(OSError):
        stack = "".join(traceback.format_exception(error))
        error_file.write(f"{type(error).__name__}: {error}", stack, later=cause_of(error) is not None)
    say_last_words()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_UNDECIDED)
