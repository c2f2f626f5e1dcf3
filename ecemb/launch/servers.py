"""The fork servers of this user on this host: finding, starting and replacing them.

Owns the files in `{arena_dir}/ecemb-{uid}/.warm`: `{name}.sock` of a server, `{name}.log` with its output,
and `lock`, which is held while a server is looked for and started. The socket listens before its server has
begun to import, so clients need not wait for it to appear; a socket without a listener is replaced. A server
that ends removes both files; the log of one that was killed is kept for a while.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Generator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..memory import private_files
from . import wire
from .command import Command

LEVEL = ".warm"
LOCK = "lock"
LISTENER, FOLDER = 3, 4
_CODE = (
    "import sys; del sys.path[: not getattr(sys.flags, 'safe_path', False)]; "
    "from ecemb.launch.server import main; main()()"
)
_LOCK_S = 60.0
_LOG_S = 3600.0
"""Seconds from the last line of a killed server's log to its removal."""


class Cold(Exception):
    """A worker can't be forked, for the given reason; a plain start replaces it."""


class Gone(Exception):
    """The server ended before it accepted the request: it was about to end, or this request ended it."""


@contextmanager
def place_of(arena_dir: str) -> Generator[int, None, None]:
    """A descriptor of the folder with the sockets; makes the folder if it is missing."""
    with private_files.opened(Path(os.path.abspath(arena_dir)), (LEVEL,), create=True) as place:
        yield place


def connected(place: int, name: str) -> socket.socket | None:
    """A connection to the server of that name; None if there is none.

    Raises:
        Cold: the server can't be reached, or its queue of waiting connections is full.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(f"/proc/self/fd/{place}/{name}.sock")  # a path that is never too long
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise Cold(f"the fork server can't be reached: {error}") from error
    connection.setblocking(True)
    return connection


def started(place: int, name: str, command: Command, numbers: list[int], blocked: Set[int]) -> socket.socket:
    """A connection to the server of that name; starts the server unless another process has started it."""
    with locked(place):
        connection = connected(place, name)
        if connection is not None:
            return connection
        waiting = wire.server_name(preloads(command), None)
        if is_there(place, waiting):
            for suffix in ("log", "sock"):
                os.rename(f"{waiting}.{suffix}", f"{name}.{suffix}", src_dir_fd=place, dst_dir_fd=place)
        else:
            start(place, name, command, numbers, blocked)
        connection = connected(place, name)
    if connection is None:
        raise Gone
    return connection


def is_there(place: int, name: str) -> bool:
    """Whether a server listens under that name."""
    connection = connected(place, name)
    if connection is not None:
        connection.close()
    return connection is not None


@contextmanager
def locked(place: int, patience_s: float = _LOCK_S) -> Generator[None, None, None]:
    """Holds the lock during the block.

    Raises:
        Cold: another process has held the lock for `patience_s` seconds.
    """
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=place)
    try:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Cold(f"another process has been starting a server for {patience_s:.0f} s") from None
                time.sleep(0.005)
        yield
    finally:
        os.close(lock)


def start(place: int, name: str, command: Command, numbers: list[int], blocked: Set[int]) -> None:
    """Starts a server in a new session; it listens when this returns. The caller holds the lock.

    Raises:
        OSError: it can't be started; none of its files is left.
    """
    _sweep(place)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        umask = os.umask(0o177)
        try:
            listener.bind(f"/proc/self/fd/{place}/{name}.sock")
        finally:
            os.umask(umask)
        try:
            listener.listen(1024)
            inode = os.stat(f"{name}.sock", dir_fd=place, follow_symlinks=False).st_ino
            _spawn(place, listener.fileno(), _config(name, inode, command), numbers, blocked)
        except BaseException:
            for suffix in ("sock", "log"):
                with contextlib.suppress(OSError):
                    os.unlink(f"{name}.{suffix}", dir_fd=place)
            raise


def _config(name: str, inode: int, command: Command) -> dict[str, Any]:
    return {
        **preloads(command),
        "name": name,
        "inode": inode,
        "folder": os.getcwd(),
        "idle_s": command.idle_s,
        "said": [],
        "shown": f"{'-m ' if command.is_module else ''}{command.target or ''}",
        "interpreter": [sys.executable, *interpreter_options(), "-c", _CODE],
    }


def _spawn(place: int, listener: int, config: dict[str, Any], numbers: list[int], blocked: Set[int]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    environment = {name: value for name, value in os.environ.items() if not wire.is_of_a_worker(name)}
    command = [*config["interpreter"], json.dumps(config)]
    with contextlib.ExitStack() as opened:
        log = os.open(f"{config['name']}.log", flags, 0o600, dir_fd=place)
        opened.callback(os.close, log)
        high: list[int] = []
        for one in (listener, place, log):
            high.append(fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10 + max(numbers, default=0)))
            opened.callback(os.close, high[-1])
        actions: list[Any] = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, high[2], 1),
            (os.POSIX_SPAWN_DUP2, high[2], 2),
            (os.POSIX_SPAWN_DUP2, high[0], LISTENER),
            (os.POSIX_SPAWN_DUP2, high[1], FOLDER),
            *((os.POSIX_SPAWN_CLOSE, number) for number in numbers if number > FOLDER),
        ]
        try:
            os.posix_spawn(
                sys.executable,
                command,
                environment,
                file_actions=actions,
                setsid=True,
                setsigmask=blocked,
                setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
            )
        except NotImplementedError as error:
            raise Cold(f"the fork server can't be started: {error}") from error


def _sweep(place: int) -> None:
    """Removes sockets without a listener, and logs that are old; the caller holds the lock."""
    names = {tuple(entry.rpartition(".")[::2]) for entry in os.listdir(place)}
    for name, suffix in names:
        with contextlib.suppress(OSError, Cold):  # another start may have it
            if suffix == "sock" and not is_there(place, name):
                os.unlink(f"{name}.sock", dir_fd=place)
            elif suffix == "log" and (name, "sock") not in names:
                age_s = time.time() - os.stat(f"{name}.log", dir_fd=place, follow_symlinks=False).st_mtime
                if age_s > _LOG_S:
                    os.unlink(f"{name}.log", dir_fd=place)


def interpreter_options() -> list[str]:
    """The interpreter's own options in this process's command line."""
    flags = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    return flags[:-1] if flags[-1:] == ["-m"] else flags


def preloads(command: Command) -> dict[str, Any]:
    """The modules that a server imports; with the properties of the process, they distinguish servers."""
    target = command.target
    return {
        "script": os.path.realpath(target) if target is not None and not command.is_module else None,
        "module": target if command.is_module else None,
        "preload": command.preload,
        "without": command.without,
    }
