"""A file mapped as shared memory, without a second descriptor of the file.

The standard library's `mmap` duplicates the descriptor and closes the copy with the mapping, when the last
view is gone. Closing any descriptor of a file drops the record lock that claims it. So this module maps files
itself. Must not know the content of the file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MOST_LOCKED_BYTES = 1 << 16
"""So few are backed with the interpreter's lock held: to wait for the lock again takes longer."""
_with_lock = ctypes.PyDLL(None, use_errno=True)
_with_lock.madvise.argtypes = _libc.madvise.argtypes


class _Mapping:
    """Keeps `size_bytes` of a file mapped for as long as it lives. NumPy's views keep it alive."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED | _MAP_NORESERVE, fd, 0)
        if address is None or address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        weakref.finalize(self, _unmap, address, size_bytes, os.getpid()).atexit = False
        if _libc.madvise(address, size_bytes, mmap.MADV_DONTFORK) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size_bytes,),
            "data": (address, False),
        }


def map_shared(fd: int, size_bytes: int) -> NDArray[np.uint8]:
    """The file of `fd` as writable uint8 [size_bytes], shared with all processes that map it.

    It is unmapped when the last view of the array is gone; `fd` may be closed earlier. A forked child doesn't
    have the mapping: touching a view there ends the child with SIGSEGV.

    Raises:
        OSError: the kernel refuses; the error has its reason.
    """
    return np.asarray(_Mapping(fd, size_bytes))


def populate(mapped: NDArray[np.uint8]) -> None:
    """Maps the pages of a part of a mapping (uint8 [m]), so that no access has to: no content changes.

    All of it must be backed by memory. Other threads may write to it meanwhile.
    """
    if mapped.size and populate_runs(mapped, [(0, mapped.size)]):
        np.bitwise_or.reduce(mapped[:: mmap.PAGESIZE])  # an older kernel: reading maps a page as well


def populate_runs(mapped: NDArray[np.uint8], runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Backs runs of bytes of a mapping by memory, and maps their pages: no content changes.

    Args:
        mapped: uint8 [m], a part of a mapping.
        runs: start and end of each, in bytes.

    Returns:
        The runs for which the kernel has not done it, as it lacks the call or the memory.
    """
    address, page = mapped.__array_interface__["data"][0], mmap.PAGESIZE
    left: list[tuple[int, int]] = []
    for start, stop in runs:
        first = (address + start) // page * page
        size_bytes = address + stop - first
        madvise = (_with_lock if size_bytes <= _MOST_LOCKED_BYTES else _libc).madvise
        if madvise(first, size_bytes, _MADV_POPULATE_WRITE) != 0:
            left.append((start, stop))
    return left


def _unmap(address: int, size_bytes: int, pid: int) -> None:
    # A forked child doesn't have the mapping: its address may be in other use there.
    if os.getpid() == pid:
        _libc.munmap(address, size_bytes)
