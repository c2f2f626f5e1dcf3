"""Whether the ranks of one host name see one folder of arenas, as they must (docs/assumptions.md).

Two machines or containers of one name would pass for one failure domain, and a restart would look for memory
where it isn't. So the first rank of each name locks the folder of its host, and the other ranks of the name
look for the lock, after a collective of all ranks. A lock is no file: it takes no space, ends with its
process, and leaves nothing behind. `negotiate` sends to all ranks what each of them saw.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence

from .._wording import listed
from ..arena.private_files import Folder
from ..errors import RendezvousError


class HostFolder:
    """This rank's part of the comparison; the lock ends with the block, whatever happens in it.

    Args:
        folder: of this rank's host.
        hosts: rank -> its host.
        rank: this rank.

    Attributes:
        sees: whether this rank sees the lock that the first rank of its host's name holds; None if it can't
            tell, because the file system has no such locks, or the folder is gone or another launch's.
    """

    def __init__(self, folder: Folder, hosts: Sequence[str], rank: int) -> None:
        self.sees: bool | None = None
        self._folder = folder
        self._is_shared = hosts.count(hosts[rank]) > 1
        self._is_first = hosts.index(hosts[rank]) == rank
        self._fd: int | None = None

    def __enter__(self) -> HostFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # there are no locks here
                fcntl.flock(
                    self._fd, fcntl.LOCK_UN
                )  # a child that was forked meanwhile has the descriptor too
            os.close(self._fd)
            self._fd = None

    def lock(self) -> None:
        """Locks the folder, on the first rank of a name. A collective of all ranks follows, then `look`.

        Raises:
            ArenaInsecure: a level of the folder can't be trusted.
        """
        if self._is_shared and self._is_first:
            with self._folder.opened(create=True) as fd:
                self._fd = os.dup(fd)
            with contextlib.suppress(OSError):  # another launch looks, or there are no locks here
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.sees = True

    def look(self) -> None:
        """Looks for the lock, on the other ranks of the name, and for the locked folder on the first rank.

        Raises:
            ArenaInsecure: a level of the folder can't be trusted.
        """
        if not self._is_shared:
            return
        try:
            with self._folder.opened() as fd:
                if self._fd is None:
                    self.sees = _is_locked(fd)
                elif not os.path.samestat(os.fstat(fd), os.fstat(self._fd)):
                    self.sees = None
        except FileNotFoundError:
            self.sees = None


def _is_locked(fd: int) -> bool | None:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def check(hosts: Sequence[str], sees: Sequence[bool | None]) -> None:
    """Compares what the ranks saw. A pure function.

    Args:
        hosts: rank -> its host.
        sees: rank -> its `HostFolder.sees`, after all have looked.

    Raises:
        RendezvousError: ranks of one host name don't see one folder.
    """
    for host in dict.fromkeys(hosts):
        first, *others = [rank for rank, name in enumerate(hosts) if name == host]
        apart = [rank for rank in others if sees[rank] is False]
        if sees[first] and apart:
            raise RendezvousError(
                f"{listed([first, *others])} have the host name {host!r}, and {listed(apart)} can't see the "
                f"folder of rank {first} in arena_dir: these are containers or machines of one name with "
                f"memory of their own, or ranks that pass different arena_dir=. Nothing was written. Give "
                f"each of them its own name, init_process_group(host=), such as its pod's or machine's; or "
                f"let the ranks of one name share arena_dir"
            )
