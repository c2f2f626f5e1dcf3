"""The protocol of the command and its fork servers: messages on a stream socket, and the name of a server.

A message is one JSON object after its length; descriptors travel with its first byte. Nothing is ever
unpickled. Both ends check that the other is of the same user before a message is read.

The name says which server may replace a plain start of the interpreter. A forked worker has the values that
were read when the interpreter, the C library and each imported library were loaded: these must be the values
that it would have read itself. No list can name the variables that each library reads. So everything that a
process is started with is compared, and a difference leads to another server. Exceptions are variables that
differ between the workers of one launch, which an import must not read (`preload` checks that), and variables
that a terminal or a shell leaves behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import socket
import struct
import sys
from collections.abc import Mapping, Sequence

MOST_DESCRIPTORS = 250
"""Descriptors in one message; the kernel takes 253."""

MOST_BYTES = 1 << 27
"""Bytes of one message. The kernel takes 6 MiB of arguments and environment, which fit well when escaped."""

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("iII")
_CHUNK_BYTES = 1 << 16


class Foreign(Exception):
    """The other end is of another user."""


def check_peer(connection: socket.socket) -> None:
    """Returns if the process at the other end, or the one that made its listener, is this user's.

    Raises:
        Foreign: it belongs to another user.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise Foreign(f"the other end is of user {user}, and this process of user {os.geteuid()}")


def send(connection: socket.socket, message: Mapping[str, object], descriptors: Sequence[int] = ()) -> None:
    """Sends one message.

    Raises:
        OSError: the other end is gone; `BlockingIOError` if a connection that doesn't block has no room.
    """
    body = json.dumps(message).encode()
    data = _LENGTH.pack(len(body)) + body
    sent = socket.send_fds(connection, [data], descriptors) if descriptors else 0
    if left := data[sent:]:  # sending no bytes fails if the other end, which has all, is gone
        connection.sendall(left)


class Inbox:
    """The bytes that have come on a connection.

    Attributes:
        descriptors: received descriptors that no caller has taken; the taker closes them.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._bytes = bytearray()
        self.descriptors: list[int] = []

    def read(self) -> bool:
        """Reads the bytes that have come.

        Returns:
            False once the other end is gone.

        Raises:
            BlockingIOError: nothing has come yet, and the connection doesn't block.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._connection, _CHUNK_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False
        self._bytes += data
        self.descriptors += descriptors
        return bool(data)

    def take(self) -> dict[str, object] | None:
        """The next complete message; None if there is none yet.

        Raises:
            ValueError: the bytes are not a message.
            RecursionError: they are one of more levels than can be parsed.
        """
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > MOST_BYTES:
            raise ValueError(f"a message has at most {MOST_BYTES} bytes, and this one {length}")
        stop = _LENGTH.size + length
        if len(self._bytes) < stop:
            return None
        message = json.loads(bytes(self._bytes[_LENGTH.size : stop]))
        del self._bytes[:stop]
        if not isinstance(message, dict):
            raise ValueError("a message is a JSON object")
        return message


_WORKER = """
RANK LOCAL_RANK GROUP_RANK ROLE_RANK NODE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE
ROLE_NAME MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES TORCH_NCCL_ASYNC_ERROR_HANDLING
"""
_SHELL = """
_ PWD OLDPWD SHLVL COLUMNS LINES TERM TERM_PROGRAM TERM_PROGRAM_VERSION TERM_SESSION_ID COLORTERM WINDOWID
SSH_CLIENT SSH_CONNECTION SSH_TTY SSH_AUTH_SOCK XDG_SESSION_ID TMUX TMUX_PANE STY INVOCATION_ID JOURNAL_STREAM
"""
_OF_A_WORKER = frozenset(_WORKER.split())
_OF_A_SHELL = frozenset(_SHELL.split())
_LIMITS = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
_NAMESPACES = [f"/proc/self/ns/{name}" for name in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")]
_RIGHTS = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp")

STANDBY = "standby"
"""In place of the job in the name of a server that was started before its job."""


def is_of_a_worker(name: str) -> bool:
    """Whether an environment variable may differ between the workers of one launch."""
    return name in _OF_A_WORKER or name.startswith("TORCHELASTIC_")


def server_name(what: object, job: str | None) -> str:
    """The name of the server that may start a worker in place of this process, of 33 or 24 letters.

    Args:
        what: further properties that distinguish servers: the modules they preload; of JSON's types.
        job: the launch's own name for the job; None for a server that waits for a job.
    """
    return f"{_digest([_process(), what])}-{STANDBY if job is None else _digest(job)}"


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _process() -> list[object]:
    """The properties that a new process begins with, except those that a request carries."""
    status = [line for line in _read("/proc/self/status").splitlines() if line.startswith(_RIGHTS)]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_SHELL and not is_of_a_worker(name)
    }
    return [
        [sys.executable, sys.prefix, sys.base_prefix, sys.version, os.path.dirname(__file__)],
        [list(sys.flags), sys.warnoptions],
        sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)],  # the interpreter's options
        sorted(environment.items()),
        # The base of a relative PYTHONPATH, and a folder that an import may have read.
        _folder(),
        status,
        [[name, *resource.getrlimit(getattr(resource, name))] for name in _LIMITS],
        os.getpriority(os.PRIO_PROCESS, 0),
        _read("/proc/self/oom_score_adj"),
        # Workers are charged to the server's control group, and killed with it: it has to be the same.
        _read("/proc/self/cgroup"),
        [os.readlink(path) for path in _NAMESPACES if os.path.lexists(path)],
        # Libraries count processors when they are loaded, unless a variable sets their number of threads.
        None if "OMP_NUM_THREADS" in os.environ else sorted(os.sched_getaffinity(0)),
    ]


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def line(error: BaseException) -> str:
    """An error's text as one line."""
    return " ".join(str(error).split())


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
