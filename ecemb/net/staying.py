"""How this process stays after another worker's death, in place of being replaced (docs/protocol.md, 3.6).

`ecemb.run` makes the `Stay` of a process. When another worker's process has died, the failure detector's
thread calls `await_return`. It ends the main thread's waits: a thread hangs up ecemb's connections and those
to the store, and aborts the process groups, which may hang itself. The main thread then ends all that belongs
to the session, and calls `is_back`. If it is not back in time, whatever it or the abort waits for, the
failure detector ends the process as without a `Stay`, and `ecemb-run` replaces it.

Whatever is made for one session and would outlive it registers its end here (`at_end`).

Must not know: arenas, guards, and the meaning of connections.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import replacement

AWAY_S = 2.0
"""How long the main thread may take to come back. The others wait longer for this process's replacement."""
_LOOK_S = 0.02


class Stay:
    """One for a call of `ecemb.run`.

    Attributes:
        is_possible: whether this process may stay: a later start of it is a recovery, as all ranks have begun
            to train.
        began: when the present session began, on time.monotonic(); None in the first session.
        rank: the rank whose state this process has; None before it has trained.
        arena_id: id of the arena that it has trained with; "" before.
    """

    def __init__(self) -> None:
        self.is_possible: bool = False
        self.began: float | None = None
        self.rank: int | None = None
        self.arena_id: str = ""
        self._ends = ExitStack()
        self._hang_ups: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._is_caught, self._is_aborted, self._back = (threading.Event() for _ in range(3))
        self._is_late = False

    def at_hang_up(self, call: Callable[[], None]) -> None:
        """Has a function called by a thread of its own that ends waits of the main thread; it may raise."""
        self._hang_ups.append(call)

    def at_end(self, call: Callable[[], object]) -> None:
        """Has a function called when this session ends and the process stays, the last one first."""
        self._ends.callback(call)

    def await_return(self) -> bool:
        """Ends the main thread's waits, and waits until it is back. Called by the failure detector's thread.

        Returns:
            Whether it is back. If not, it never will be: the caller ends the process.
        """
        threading.Thread(target=self._abort, name="ecemb-abort", daemon=True).start()
        self._back.wait(AWAY_S)
        with self._lock:
            self._is_late = not self._back.is_set()
            return not self._is_late

    def end_session(self) -> None:
        """Calls the functions of `at_end`, once the thread that aborts has ended. Called by the main thread.

        Raises:
            Exception: the error of such a function.
        """
        self._is_caught.set()
        self._is_aborted.wait()  # without a deadline: the failure detector has one
        self._hang_ups.clear()
        self._ends.close()

    def is_back(self) -> bool:
        """Says that the main thread is back. Called by it.

        Returns:
            False if the process ends: it is too late, or this process has left the job.
        """
        with self._lock:
            if self._is_late or not replacement.stay():
                return False
            self._back.set()
        return True

    def begin_session(self, now: float) -> None:
        """Begins another session of this process.

        Args:
            now: on time.monotonic().
        """
        self.began = now
        self._begin()

    def has_trained(self, rank: int, arena_id: str) -> None:
        """All ranks train from here on: a later start of the job is a recovery, for which this process stays.

        Args:
            rank: this rank.
            arena_id: id of its arena.
        """
        self.rank, self.arena_id = rank, arena_id
        self.is_possible = replacement.is_possible()

    def release(self) -> None:
        """From here on this process does not stay any more, and nothing is ended for it."""
        self.is_possible = False
        self._ends.pop_all()
        self._hang_ups.clear()

    def _abort(self) -> None:
        """Ends waits of the main thread, also in groups that it is about to make, until it is in `run`."""
        for call in tuple(self._hang_ups):
            with suppress(Exception):
                call()
        aborted: list[dist.ProcessGroup] = []
        while True:
            is_caught = self._is_caught.is_set()
            _hang_up_stores()
            for group in _groups():
                if all(group is not one for one in aborted):
                    aborted.append(group)
                    with suppress(Exception):  # it is being made, or has ended
                        group.abort()
            if is_caught:
                break
            self._is_caught.wait(_LOOK_S)
        self._is_aborted.set()


def _hang_up_stores() -> None:
    """Ends this process's connections to torchrun's store: torch waits there when it makes a group.

    torch does not show their descriptors. No descriptor is copied or closed: closing one of an arena's file
    would drop the lock of the arena.
    """
    port = int(os.environ.get("MASTER_PORT", "0"))
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # not a socket, not connected, or closed by now
            connection = socket.socket(fileno=number)
            try:
                if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()


def _groups() -> list[dist.ProcessGroup]:
    """The process groups of torch.distributed, the last one first."""
    world: Any = distributed_c10d._world  # pyright: ignore[reportPrivateUsage]
    names: dict[dist.ProcessGroup, str] = dict(world.pg_names)
    return sorted(names, key=lambda one: names[one], reverse=True)


_stay: Stay | None = None


def current() -> Stay | None:
    """This process's; None if its script doesn't call `ecemb.run`."""
    return _stay


def use(stay: Stay | None) -> None:
    """Makes a `Stay` this process's, until `use(None)`."""
    global _stay
    _stay = stay
