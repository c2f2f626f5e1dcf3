"""Kernels: the few operations on bulk bytes that everything else is made of.

Owns: the contract (`Kernels`) and its checks, and the choice of an implementation by name (`get`).
`reference` is plain numpy, obvious and slow, and is the specification; the others are fast and
equal to it bit for bit.

Invariant: arguments are checked before the first byte is written, so a call either does all of its
work or raises `KernelError` and has written nothing. No kernel ever reads or writes outside of the
arrays that it was given.

Knows nothing of: codes, placement, tables, ranks. All arrays are numpy, C-contiguous, aligned and
in the machine's byte order. A *word* is 8 bytes (uint64); `ids`, `offsets` and `starts` are int64.
Calls hold no state and may run in several threads on different outputs.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, TypeAlias, cast, final

import numpy as np
from numpy.typing import NDArray

from ecemb.errors import KernelError, KernelUnavailable

Words: TypeAlias = NDArray[np.uint64]
Indices: TypeAlias = NDArray[np.int64]
Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]

POLYNOMIAL: Final = 0x11D
"""The field polynomial of GF(2^8) that the products use: x^8 + x^4 + x^3 + x^2 + 1."""

_WORD: Final = np.dtype(np.uint64)
_INDEX: Final = np.dtype(np.int64)
_BYTE: Final = np.dtype(np.uint8)
_ELEMENTS: Final = tuple(np.dtype(kind) for kind in (np.uint8, np.uint16, np.uint32, np.uint64))

_MODULES: Final = {
    "reference": ("ecemb.kernels.reference", "Reference"),
    "cpu": ("ecemb.kernels.cpu", "Cpu"),
}

NAMES: Final = tuple(_MODULES)
"""What `get` knows; whether it can be had here shows when it is asked for."""


@functools.cache
def get(name: str) -> Kernels:
    """Returns the kernels of that name, imported on the first call; never others in their place.

    Args:
        name: One of `NAMES`.

    Raises:
        KernelUnavailable: There are no kernels of that name, or what they are built on is not
            installed.
    """
    if name not in _MODULES:
        raise KernelUnavailable(
            f"there are no kernels named {name!r}; there are {', '.join(map(repr, NAMES))}"
        )
    module, kind = _MODULES[name]
    try:
        return cast("type[Kernels]", getattr(importlib.import_module(module), kind))()
    except ImportError as error:
        raise KernelUnavailable(
            f"the kernels {name!r} can't be imported here: {error}; install what is missing, or "
            "ask for 'reference', which needs numpy alone and is slow"
        ) from error


class Kernels(ABC):
    """The contract: public methods check and are final; an implementation fills in private ones.

    Implementations are final classes without state. In the formulas `*` is the product in GF(2^8) /
    0x11D of each byte.
    """

    name: ClassVar[str]

    @final
    def gather(self, table: Elements, ids: Indices, out: Elements, column: int) -> None:
        """Copies rows of a table into a column range of records.

        `out[:, column:column+w] = table[ids]`

        Args:
            table: uint8/16/32/64 [rows, w]; read.
            ids: int64 [m], row numbers, in any order, repeats allowed; read.
            out: the table's dtype [m, W]; columns column..column+w-1 are overwritten, the others
                left alone. Not overlapping the table.
            column: First column in `out`, in elements; column + w <= W.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        _check_rows("gather", table, ids, "out", out, column)
        _check_output("gather", "out", out, table=table)
        self._gather(table, ids, out, column)

    @final
    def scatter_(self, table: Elements, ids: Indices, records: Elements, column: int) -> None:
        """Copies a column range of records into rows of a table.

        `table[ids] = records[:, column:column+w]`

        In order: of a repeated id the last record stays.

        Args:
            table: uint8/16/32/64 [rows, w]; the rows named are overwritten, the others left alone.
            ids: int64 [m], row numbers; read.
            records: the table's dtype [m, W]; read. Not overlapping the table.
            column: First column in `records`, in elements; column + w <= W.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        _check_rows("scatter_", table, ids, "records", records, column)
        _check_output("scatter_", "table", table, records=records)
        self._scatter(table, ids, records, column)

    @final
    def xor(self, a: Words, b: Words, out: Words) -> None:
        """Computes the delta of two equal shapes: `out = a XOR b`.

        Args:
            a: uint64, any shape; read.
            b: uint64, the same shape; read.
            out: uint64, the same shape; overwritten. It may be `a` or `b`, but not overlap one by a
                part.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        for label, array in (("a", a), ("b", b), ("out", out)):
            _check_array("xor", label, array, None, (_WORD,))
            if array.shape != a.shape:
                raise KernelError(
                    f"xor: {label} has the shape {list(array.shape)}, and has to have a's, {list(a.shape)}"
                )
        # Of equal shapes that overlap, those that begin at the same byte are the same words.
        parts = {
            label: array
            for label, array in (("a", a), ("b", b))
            if np.may_share_memory(out, array) and array.ctypes.data != out.ctypes.data
        }
        _check_output("xor", "out", out, **parts)
        self._xor(a, b, out)

    @final
    def gather_words(self, src: Words, offsets: Indices, starts: Indices, out: Words) -> None:
        """Packs m spans of words one after the other.

        `out[starts[i]:starts[i+1]] = src[offsets[i]:offsets[i]+len_i]`, where len_i is
        starts[i+1] - starts[i]. `starts` ascends (equal neighbours are an empty span) and may begin
        above 0.

        Args:
            src: uint64 [S]; read.
            offsets: int64 [m], where each span begins in `src`, in words; any order, repeats and
                overlaps allowed; read.
            starts: int64 [m+1], where each span begins and the last one ends in `out`, in words;
                read.
            out: uint64 [at least starts[m]]; the spans are overwritten. Not overlapping `src`.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        _check_spans("gather_words", "src", src, offsets, starts, "out", out)
        _check_output("gather_words", "out", out, src=src)
        self._gather_words(src, offsets, starts, out)

    @final
    def scatter_words_(self, dst: Words, offsets: Indices, starts: Indices, src: Words) -> None:
        """Unpacks m spans of words.

        `dst[offsets[i]:offsets[i]+len_i] = src[starts[i]:starts[i+1]]`

        In order: where spans overlap in `dst` the last one stays.

        Args:
            dst: uint64 [S]; the spans are overwritten, the rest left alone.
            offsets: int64 [m], where each span begins in `dst`, in words; read.
            starts: int64 [m+1], ascending: where each span begins and the last one ends in `src`,
                in words; read.
            src: uint64 [at least starts[m]]; read. Not overlapping `dst`.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        _check_spans("scatter_words_", "dst", dst, offsets, starts, "src", src)
        _check_output("scatter_words_", "dst", dst, src=src)
        self._scatter_words(dst, offsets, starts, src)

    @final
    def mul_add_(self, dst: Words, offsets: Indices, starts: Indices, src: Words, weight: int) -> None:
        """Adds weighted spans of words.

        `dst[offsets[i]:offsets[i]+len_i] ^= weight * src[starts[i]:starts[i+1]]`

        This is how parity is updated by deltas.

        Args:
            dst: uint64 [S]; the spans are updated, the rest left alone.
            offsets: int64 [m], where each span begins in `dst`, in words; repeats and overlaps add
                up; read.
            starts: int64 [m+1], ascending: where each span begins and the last one ends in `src`,
                in words; read.
            src: uint64 [at least starts[m]]; read. Not overlapping `dst`.
            weight: 0..255; 0 changes nothing, 1 is plain XOR.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        _check_spans("mul_add_", "dst", dst, offsets, starts, "src", src)
        _check_output("mul_add_", "dst", dst, src=src)
        _check_weight("mul_add_", weight)
        if weight:
            self._mul_add(dst, offsets, starts, src, weight)

    @final
    def mul_add_block_(self, dst: Words, src: Words, weight: int) -> None:
        """Adds a weighted block: `dst ^= weight * src`.

        Args:
            dst: uint64 [S]; updated.
            src: uint64 [S]; read. Not overlapping `dst`.
            weight: 0..255; 0 changes nothing, 1 is plain XOR.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        _check_array("mul_add_block_", "dst", dst, 1, (_WORD,))
        _check_array("mul_add_block_", "src", src, 1, (_WORD,))
        _check_length("mul_add_block_", "src", src, "dst", dst)
        _check_output("mul_add_block_", "dst", dst, src=src)
        _check_weight("mul_add_block_", weight)
        if weight:
            self._mul_add_block(dst, src, weight)

    @final
    def dot(self, blocks: Sequence[Words], weights: NDArray[np.uint8], out: Words) -> None:
        """Combines blocks: `out = XOR_j weights[j] * blocks[j]`; zeros when there is no block.

        This is how parity is encoded and a lost block rebuilt.

        Args:
            blocks: k arrays uint64 [S]; read. Not overlapping `out`.
            weights: uint8 [k]; read.
            out: uint64 [S]; overwritten.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        _check_array("dot", "weights", weights, 1, (_BYTE,))
        _check_array("dot", "out", out, 1, (_WORD,))
        if len(blocks) != weights.size:
            raise KernelError(
                f"dot: {len(blocks)} blocks and {weights.size} weights; each block has one weight"
            )
        named = {f"blocks[{j}]": block for j, block in enumerate(blocks)}
        for label, block in named.items():
            _check_array("dot", label, block, 1, (_WORD,))
            _check_length("dot", label, block, "out", out)
        _check_output("dot", "out", out, **named)
        self._dot(blocks, weights, out)

    # What an implementation fills in. Arguments are checked already; a weight is not 0 (though it
    # may be in `_dot`).

    @abstractmethod
    def _gather(self, table: Elements, ids: Indices, out: Elements, column: int) -> None: ...

    @abstractmethod
    def _scatter(self, table: Elements, ids: Indices, records: Elements, column: int) -> None: ...

    @abstractmethod
    def _xor(self, a: Words, b: Words, out: Words) -> None: ...

    @abstractmethod
    def _gather_words(self, src: Words, offsets: Indices, starts: Indices, out: Words) -> None: ...

    @abstractmethod
    def _scatter_words(self, dst: Words, offsets: Indices, starts: Indices, src: Words) -> None: ...

    @abstractmethod
    def _mul_add(self, dst: Words, offsets: Indices, starts: Indices, src: Words, weight: int) -> None: ...

    @abstractmethod
    def _mul_add_block(self, dst: Words, src: Words, weight: int) -> None: ...

    @abstractmethod
    def _dot(self, blocks: Sequence[Words], weights: NDArray[np.uint8], out: Words) -> None: ...


def _check_array(
    operation: str,
    label: str,
    array: object,
    dimensions: int | None,
    dtypes: tuple[np.dtype[Any], ...],
) -> None:
    if not isinstance(array, np.ndarray):
        raise KernelError(f"{operation}: {label} has to be a numpy array, not {type(array).__name__}")
    known = cast("NDArray[Any]", array)
    if known.dtype not in dtypes:
        rule = "/".join(str(dtype) for dtype in dtypes)
        raise KernelError(
            f"{operation}: {label} has the dtype {known.dtype}, and has to be {rule}; pass a view"
        )
    if dimensions is not None and known.ndim != dimensions:
        raise KernelError(
            f"{operation}: {label} has the shape {list(known.shape)}, and has to have {dimensions} "
            "dimension(s)"
        )
    if not (known.flags.c_contiguous and known.flags.aligned):
        raise KernelError(
            f"{operation}: {label} has to be C-contiguous and aligned; its shape is "
            f"{list(known.shape)} and its strides are {list(known.strides)} bytes"
        )


def _check_output(operation: str, label: str, output: NDArray[Any], **inputs: NDArray[Any]) -> None:
    if not output.flags.writeable:
        raise KernelError(f"{operation}: {label} is written to, and the array given is read-only")
    for name, array in inputs.items():
        # Exact, and not only a guess, for contiguous arrays: it compares their bounds.
        if np.may_share_memory(output, array):
            raise KernelError(
                f"{operation}: {label} is written to while {name} is read; their memory overlaps"
            )


def _check_length(
    operation: str, label: str, array: NDArray[Any], other: str, reference: NDArray[Any]
) -> None:
    if array.size != reference.size:
        raise KernelError(
            f"{operation}: {label} has {array.size} words, and has to have {other}'s {reference.size}"
        )


def _check_weight(operation: str, weight: int) -> None:
    if not isinstance(cast(object, weight), int | np.integer) or not 0 <= weight <= 255:
        raise KernelError(
            f"{operation}: weight {weight!r} is no element of GF(2^8), which are the ints 0..255"
        )


def _check_rows(
    operation: str, table: Elements, ids: Indices, label: str, records: Elements, column: int
) -> None:
    _check_array(operation, "table", table, 2, _ELEMENTS)
    _check_array(operation, label, records, 2, (table.dtype,))
    _check_array(operation, "ids", ids, 1, (_INDEX,))
    rows, width = table.shape
    if records.shape[0] != ids.size:
        raise KernelError(
            f"{operation}: {label} has {records.shape[0]} rows, and has to have one for each of "
            f"the {ids.size} ids"
        )
    if not 0 <= column <= records.shape[1] - width:
        raise KernelError(
            f"{operation}: the table's {width} columns from column {column} on are not within "
            f"{label}'s {records.shape[1]}"
        )
    if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
        i = int(np.flatnonzero((ids < 0) | (ids >= rows))[0])
        raise KernelError(f"{operation}: ids[{i}] = {ids[i]} is no row of the table, which has {rows}")


def _check_spans(
    operation: str,
    sparse: str,
    words: Words,
    offsets: Indices,
    starts: Indices,
    dense: str,
    packed: Words,
) -> None:
    _check_array(operation, sparse, words, 1, (_WORD,))
    _check_array(operation, dense, packed, 1, (_WORD,))
    _check_array(operation, "offsets", offsets, 1, (_INDEX,))
    _check_array(operation, "starts", starts, 1, (_INDEX,))
    if starts.size != offsets.size + 1:
        raise KernelError(
            f"{operation}: {starts.size} starts for {offsets.size} offsets; there has to be one "
            "more, the end of the last span"
        )
    first, last = int(starts[0]), int(starts[-1])
    ascending = starts[:-1] <= starts[1:]
    if not ascending.all():
        i = int(np.flatnonzero(~ascending)[0])
        raise KernelError(
            f"{operation}: starts have to ascend, and starts[{i}] = {starts[i]} is followed by "
            f"{starts[i + 1]}"
        )
    if first < 0 or last > packed.size:
        raise KernelError(
            f"{operation}: starts run from {first} to {last}, and have to stay within {dense}'s "
            f"{packed.size} words"
        )
    if offsets.size == 0:
        return
    # The lengths are within `packed` and the offsets within one word of `words`: nothing overflows.
    room = words.size - np.diff(starts) - offsets.clip(-1, words.size + 1)
    if int(offsets.min()) < 0 or int(room.min()) < 0:
        i = int(np.flatnonzero((offsets < 0) | (room < 0))[0])
        raise KernelError(
            f"{operation}: span {i} of {starts[i + 1] - starts[i]} words at offsets[{i}] = "
            f"{offsets[i]} is not within {sparse}'s {words.size} words"
        )
