"""The memory that stays when this process ends without closing its job: one line of rank 0 says so.

Owns that line. A process that torchrun is about to start again leaves it out, and so does one that is killed.
A hard exit says it before, since no exit handler runs.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading

from .._wording import counted
from ..arena.arena import Arena
from ..arena.header import Word
from ..errors import EcembError
from ..group.error_file import is_last_attempt
from ..group.failure_detector import before_hard_exit, forget, last_exception
from ..session import Session

logger: logging.Logger = logging.getLogger("ecemb")


class Remaining:
    """Says at the end of this process what stays of the job, unless `forget` has been called.

    Args:
        session: this process's.
        arena: this rank's, live.
    """

    def __init__(self, session: Session, arena: Arena) -> None:
        # Of the session the values alone: what exit handlers hold lives as long as the process, and the
        # session holds connections.
        self._job, self._hosts, self._directory = session.job, session.hosts, session.directory
        self._arena, self._pid = arena, os.getpid()
        self._whereabouts = session.whereabouts
        self._unsaid = threading.Lock()  # taken by the thread that says it
        if session.rank == 0:
            atexit.register(self._say)
            before_hard_exit(self._say_of_a_failed_process)

    def forget(self) -> None:
        """Nothing stays: the job is closed, or has left."""
        atexit.unregister(self._say)
        forget(self._say_of_a_failed_process)

    def _say(self) -> None:
        self._say_once(
            is_failed=isinstance(last_exception(), Exception) or self._whereabouts.failure is not None
        )

    def _say_of_a_failed_process(self) -> None:
        self._say_once(is_failed=True)

    def _say_once(self, *, is_failed: bool) -> None:
        is_restarted = is_failed and not is_last_attempt()
        if os.getpid() != self._pid or is_restarted or not _is_kept(self._arena):
            return
        if not self._unsaid.acquire(blocking=False):
            return
        logger.warning(
            "job %s was not closed: the memory of its %s stays in %s of %s. The same launch goes on from "
            "step %d; to remove it, on each host: %s",
            self._job,
            counted(len(self._hosts), "rank"),
            self._directory.arena_dir,
            counted(len(set(self._hosts)), "host"),
            self._arena.get(Word.COMMITTED),
            self._directory.removal,
        )


def _is_kept(arena: Arena) -> bool:
    """Whether the arena is open, and will still be found when this process has ended."""
    try:
        arena.check_open()
        return arena.is_named()
    except EcembError:
        return False
