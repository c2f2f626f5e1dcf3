"""Intel's ISA-L as a rival: its erasure code, called in the shared library that the system has.

Debian and Ubuntu have it as libisal2. ISA-L uses the same field as ecemb (GF(2^8) / 0x11D), and
computes with the coefficients that it is given, so its parity can be compared byte for byte.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIBRARY = "libisal.so.2"

Bytes = NDArray[np.uint8]
_Pointers = ctypes.Array[ctypes.c_void_p]


class IsalUnavailable(Exception):
    """The library isn't installed here; the message says how to have it."""


@functools.cache
def load() -> Isal:
    """Returns the library.

    Raises:
        IsalUnavailable: It isn't installed.
    """
    try:
        return Isal(ctypes.CDLL(LIBRARY))
    except OSError as error:
        raise IsalUnavailable(
            f"{LIBRARY} can't be loaded ({error}); on Debian and Ubuntu: apt-get install libisal2"
        ) from error


class Isal:
    """ISA-L's `ec_encode_data` and `ec_encode_data_update`, on numpy arrays."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("ec_init_tables", "ec_encode_data", "ec_encode_data_update"):
            getattr(library, name).restype = None

    @property
    def version(self) -> str:
        """The version in the library's file name, or "unknown"."""
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        found = re.search(r"libisal\.so\.(\d+)\.\d+\.(\d+)", maps)
        for path in re.findall(r"/\S*libisal\.so\S*", maps):
            found = found or re.search(r"so\.(\d+)\.\d+\.(\d+)", str(Path(path).resolve()))
        return f"{found[1]}.{found[2]}" if found else "unknown"

    def tables(self, coefficients: Bytes) -> Bytes:
        """Expands coefficients, uint8 [r, k], for `encode` and `update`: uint8 [32 * r * k]."""
        if coefficients.dtype != np.uint8 or coefficients.ndim != 2:
            raise ValueError(f"coefficients have to be uint8 [r, k], not {coefficients.dtype}")
        rows, k = coefficients.shape
        given = np.ascontiguousarray(coefficients)
        expanded = np.empty(32 * rows * k, np.uint8)
        self._library.ec_init_tables(
            k, rows, given.ctypes.data_as(ctypes.c_void_p), expanded.ctypes.data_as(ctypes.c_void_p)
        )
        return expanded

    def encode(self, tables: Bytes, data: Sequence[Bytes], parity: Sequence[Bytes]) -> Call:
        """Returns the call that overwrites parity by the coefficients times all data blocks."""
        size = _checked(tables, len(data) * len(parity), (*data, *parity))
        arguments = (size, len(data), len(parity), _pointer(tables))
        return Call(
            self._library.ec_encode_data,
            (*arguments, _pointers(data), _pointers(parity)),
            (tables, *data, *parity),
        )

    def update(self, tables: Bytes, k: int, block: int, delta: Bytes, parity: Sequence[Bytes]) -> Call:
        """Returns the call that adds column `block` of the coefficients times delta to parity."""
        if not 0 <= block < k:
            raise ValueError(f"block {block} is no data block of {k}")
        size = _checked(tables, k * len(parity), (delta, *parity))
        arguments = (size, k, len(parity), block, _pointer(tables), _pointer(delta))
        return Call(
            self._library.ec_encode_data_update,
            (*arguments, _pointers(parity)),
            (tables, delta, *parity),
        )

    def update_rows(
        self,
        tables: Bytes,
        k: int,
        block: int,
        delta: Bytes,
        parity: Sequence[Bytes],
        places: NDArray[np.int64],
    ) -> Call:
        """Returns the call that does `update` row by row: row i lies at byte places[i] of every parity block.

        The library is called by a compiled loop, so that no time of Python's is in it.
        """
        size = len(delta) // len(places)
        _checked(tables, k * len(parity), [delta[:size], *(whole[:size] for whole in parity)])
        if not 0 <= block < k or size * len(places) != len(delta):
            raise ValueError(f"block {block} of {k}, {len(delta)} bytes for {len(places)} rows")
        if places.min() < 0 or places.max() > min(map(len, parity)) - size:
            raise ValueError(f"rows of {size} bytes are not all within parity")
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int] * 4, *[ctypes.c_void_p] * 3)
        function = kind(("ec_encode_data_update", self._library))
        bases = np.array([whole.ctypes.data for whole in parity])
        arguments = (size, k, block, tables, delta, bases, places, np.empty_like(bases))
        return Call(_row_loop(function), arguments, parity)


def _row_loop(update: Any) -> Callable[..., None]:
    import numba  # every question imports this module, and few have a use for it

    @numba.njit
    def loop(
        size: int,
        k: int,
        block: int,
        tables: Bytes,
        delta: Bytes,
        bases: NDArray[np.int64],
        places: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> None:
        for i in range(len(places)):
            for q in range(len(bases)):
                targets[q] = bases[q] + places[i]
            source = delta.ctypes.data + i * size
            update(size, k, len(bases), block, tables.ctypes.data, source, targets.ctypes.data)

    return loop


class Call:
    """A call made ready, so that timing it times the library and not ctypes' conversions."""

    def __init__(self, function: Callable[..., object], arguments: tuple[object, ...], alive: object) -> None:
        self._function = function
        self._arguments = arguments
        self._alive = alive  # The arrays that the pointers point into.

    def __call__(self) -> None:
        self._function(*self._arguments)


def _checked(tables: Bytes, coefficients: int, blocks: Sequence[Bytes]) -> int:
    """Returns the length of all blocks, once it is safe to hand them to C."""
    size = blocks[0].size
    if tables.size != 32 * coefficients:
        raise ValueError(f"{tables.size} bytes of tables are not for {coefficients} coefficients")
    for block in (tables, *blocks):
        if block.dtype != np.uint8 or block.ndim != 1 or not block.flags.c_contiguous:
            raise ValueError(f"a block has to be contiguous uint8, not {block.dtype} {block.shape}")
    if any(block.size != size for block in blocks) or size >= 2**31:
        raise ValueError(f"blocks have to be equally long, below 2 GiB: {[b.size for b in blocks]}")
    return size


def _pointer(array: Bytes) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _pointers(arrays: Sequence[Bytes]) -> _Pointers:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
