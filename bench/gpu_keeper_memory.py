"""A process that owns memory of a device, and those that attach to it: the keeper of `gpu_keeper`.

The keeper allocates one block of bytes and tells whoever asks for it over a Unix socket how to open it. What
others write there stays when they are killed, until the keeper ends: when it is dismissed, or its caller is
gone. Both ends look at the other's user before they say or believe anything; one line is asked, one line of
JSON is answered, so that nothing that arrives can do more than be wrong.

How a block is opened is all that depends on the device, and lies in `DeviceBlock` and `HostBlock`.

Must not know: what is in the block.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch

from bench.devices import APART, CUDA, begin, settle
from bench.ranks import Line

ASKED = b"attach\n"
MOST_BYTES = 1 << 16
"""Of an answer."""
PATIENCE_S = 1.0
"""For one who has connected to ask: others wait meanwhile."""
_CREDENTIALS = struct.Struct("3i")
"""A process, its user and its group."""


class Refused(Exception):
    """What is at the address is not a keeper of ours, or took us for a stranger; the message says which."""


@dataclass(frozen=True)
class Keeping:
    """What a keeper is to do.

    Attributes:
        device: One of `BLOCKS`.
        address: Of its socket, in a folder of this user alone.
        size_bytes: Of the block.
    """

    device: str
    address: str
    size_bytes: int


class DeviceBlock:
    """Memory of a CUDA device, zeros at first, given away as a CUDA IPC handle.

    Torch hands over the whole of what it got from cudaMalloc, and the offset in it; for each that opens it,
    a counter that says that it is in use. One that is killed never counts back: the block is in use until
    this process ends, which is as it should be. With `expandable_segments:True` in PYTORCH_CUDA_ALLOC_CONF
    torch opens another process's file descriptors instead, which containers may forbid (pytorch issues
    165685 and 179220).
    """

    def __init__(self, size_bytes: int) -> None:
        begin(CUDA)
        self._storage = torch.zeros(size_bytes, dtype=torch.uint8, device=CUDA).untyped_storage()
        settle(CUDA)

    def ticket(self) -> Sequence[Any]:
        """For one that opens it: bytes, numbers and truth values."""
        return self._storage._share_cuda_()

    @staticmethod
    def opened(ticket: Sequence[Any]) -> torch.UntypedStorage:
        """The block, in another process that has a context on that device."""
        return torch.UntypedStorage._new_shared_cuda(*ticket)


class HostBlock:
    """Memory of the host that no file names, zeros at first: taken for a device's."""

    def __init__(self, size_bytes: int) -> None:
        self._fd = os.memfd_create("ecemb-bench")
        self._size_bytes = size_bytes
        os.ftruncate(self._fd, size_bytes)

    def ticket(self) -> Sequence[Any]:
        """For one that opens it."""
        return (f"/proc/{os.getpid()}/fd/{self._fd}", self._size_bytes)

    @staticmethod
    def opened(ticket: Sequence[Any]) -> torch.UntypedStorage:
        """The block, in another process."""
        path, size_bytes = ticket
        return torch.UntypedStorage.from_file(path, True, size_bytes)


BLOCKS: dict[str, type[DeviceBlock] | type[HostBlock]] = {CUDA: DeviceBlock, APART: HostBlock}
"""By the device, one of `devices`."""


def keep(line: Line, order: Keeping) -> None:
    """What the keeper does: says that it is there, and answers until it is dismissed."""
    block = BLOCKS[order.device](order.size_bytes)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(order.address)
        listener.listen()
        line.tell(os.getpid())
        while line not in wait([listener, line]):
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # who has gone again needs no answer
                answer(connection, block)


def answer(connection: socket.socket, block: DeviceBlock | HostBlock) -> None:
    """Tells who has connected how to open the block; another user, or who asks something else, nothing."""
    if user_of(connection) == os.geteuid() and line_from(connection, len(ASKED), PATIENCE_S) == ASKED:
        told = [{"hex": one.hex()} if isinstance(one, bytes) else one for one in block.ticket()]
        connection.sendall(json.dumps(told).encode() + b"\n")


def attached(device: str, address: str, timeout_s: float) -> torch.UntypedStorage:
    """The block of the keeper at an address.

    Args:
        device: One of `BLOCKS`, of which this process has a context.
        address: Of the keeper's socket.
        timeout_s: How long its answer may take.

    Raises:
        Refused: It is another user's, or didn't answer.
        OSError: Nobody listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address)
        if user_of(connection) != os.geteuid():
            raise Refused(f"{address} is a socket of user {user_of(connection)}, and this is {os.geteuid()}")
        connection.sendall(ASKED)
        told = line_from(connection, MOST_BYTES, timeout_s)
    if told is None:
        raise Refused(f"the keeper at {address} gave no answer within {timeout_s:.0f} s")
    ticket = [bytes.fromhex(one["hex"]) if isinstance(one, dict) else one for one in json.loads(told)]
    return BLOCKS[device].opened(ticket)


def user_of(connection: socket.socket) -> int:
    """The user at the other end, as the kernel knows it."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(told)[1]


def line_from(connection: socket.socket, most_bytes: int, timeout_s: float) -> bytes | None:
    """What the other end says, its newline included; None if that is longer, too late, or never ends."""
    until = time.monotonic() + timeout_s
    said = b""
    while len(said) < most_bytes and not said.endswith(b"\n"):
        connection.settimeout(max(1e-3, until - time.monotonic()))
        try:
            more = connection.recv(most_bytes - len(said))
        except OSError:
            return None
        if not more or time.monotonic() > until:
            return None
        said += more
    return said if said.endswith(b"\n") else None
