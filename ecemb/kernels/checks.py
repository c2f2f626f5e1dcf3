"""The checks of a kernel's arguments, before the first byte is written.

Owns the array types of the contract and the rules about dtype, shape, layout, range and overlap. Each check
raises `KernelError`, which names the operation and the argument. Must not know: what a kernel computes.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ecemb.errors import KernelError

Words: TypeAlias = NDArray[np.uint64]
Ids: TypeAlias = NDArray[np.int64]
Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]

WORD: Final = np.dtype(np.uint64)
INDEX: Final = np.dtype(np.int64)
BYTE: Final = np.dtype(np.uint8)
ELEMENTS: Final = tuple(np.dtype(kind) for kind in (np.uint8, np.uint16, np.uint32, np.uint64))


def check_array(
    operation: str,
    label: str,
    array: object,
    dimensions: int,
    dtypes: tuple[np.dtype[Any], ...],
) -> None:
    """Raises unless `array` is a contiguous numpy array of one of `dtypes` with `dimensions` dimensions."""
    if not isinstance(array, np.ndarray):
        raise KernelError(f"{operation}: {label} has to be a numpy array, not {type(array).__name__}")
    known = cast("NDArray[Any]", array)
    if known.dtype not in dtypes:
        rule = "/".join(str(dtype) for dtype in dtypes)
        raise KernelError(
            f"{operation}: {label} has the dtype {known.dtype}; it has to be {rule}: pass a view"
        )
    if known.ndim != dimensions:
        raise KernelError(
            f"{operation}: {label} has the shape {list(known.shape)}; it has to have {dimensions} "
            "dimension(s)"
        )
    if not (known.flags.c_contiguous and known.flags.aligned):
        raise KernelError(
            f"{operation}: {label} has to be C-contiguous and aligned; its shape is "
            f"{list(known.shape)} and its strides are {list(known.strides)} bytes"
        )


def check_output(operation: str, label: str, output: NDArray[Any], **inputs: NDArray[Any]) -> None:
    """Raises unless `output` is writeable and shares no memory with `inputs`."""
    if not output.flags.writeable:
        raise KernelError(f"{operation}: {label} is written to, but the array is read-only")
    for name, array in inputs.items():
        # Exact for contiguous arrays: it compares their bounds.
        if np.may_share_memory(output, array):
            raise KernelError(
                f"{operation}: {label} is written to while {name} is read; their memory overlaps"
            )


def check_length(
    operation: str, label: str, array: NDArray[Any], other: str, reference: NDArray[Any]
) -> None:
    """Raises unless `array` is as long as `reference`."""
    if array.size != reference.size:
        raise KernelError(
            f"{operation}: {label} has {array.size} words; it has to have {other}'s {reference.size}"
        )


def check_weight(operation: str, weight: int) -> None:
    """Raises unless `weight` is an element of the field."""
    if not isinstance(cast(object, weight), int | np.integer) or not 0 <= weight <= 255:
        raise KernelError(
            f"{operation}: weight {weight!r} is not an element of GF(2^8); the elements are the ints 0..255"
        )


def check_rows(operation: str, table: Elements, ids: Ids, label: str, records: Elements, column: int) -> None:
    """Raises unless `ids` are rows of `table`, and its width fits in `records` from `column` on."""
    check_array(operation, "table", table, 2, ELEMENTS)
    check_array(operation, label, records, 2, (table.dtype,))
    check_array(operation, "ids", ids, 1, (INDEX,))
    rows, width = table.shape
    if records.shape[0] != ids.size:
        raise KernelError(
            f"{operation}: {label} has {records.shape[0]} rows; it has to have one for each of "
            f"the {ids.size} ids"
        )
    if not 0 <= column <= records.shape[1] - width:
        raise KernelError(
            f"{operation}: the table's {width} columns from column {column} on are not within "
            f"{label}'s {records.shape[1]}"
        )
    check_ids(operation, ids, rows, "table")


def check_ids(operation: str, ids: Ids, rows: int, owner: str) -> None:
    """Raises unless every id is a row, 0..rows-1, of `owner`."""
    if not within(ids, rows):
        i = int(np.flatnonzero((ids < 0) | (ids >= rows))[0])
        raise KernelError(
            f"{operation}: ids[{i}] = {ids[i]} is not a row of the {owner}, which has {rows} rows"
        )


def within(indices: Ids, stop: int) -> bool:
    """Whether all of `indices` are 0..stop-1."""
    # Negative numbers are the largest when read as unsigned, so one pass is enough.
    return not indices.size or int(np.maximum.reduce(indices.view(np.uint64))) < stop


def check_places(operation: str, sparse: str, words: Words, offsets: Ids, dense: str, packed: Words) -> None:
    """Raises unless `words` [S] has room for a row of `packed` [m, w] at each of `offsets` [m]."""
    check_array(operation, sparse, words, 1, (WORD,))
    check_array(operation, dense, packed, 2, (WORD,))
    check_array(operation, "offsets", offsets, 1, (INDEX,))
    count, width = packed.shape
    if count != offsets.size:
        raise KernelError(
            f"{operation}: {dense} has {count} rows; it has to have one for each of the {offsets.size} "
            "offsets"
        )
    last = words.size - width
    if not within(offsets, last + 1):
        i = int(np.flatnonzero((offsets < 0) | (offsets > last))[0])
        raise KernelError(
            f"{operation}: row {i} of {width} words at offsets[{i}] = {offsets[i]} is not within {sparse}'s "
            f"{words.size} words"
        )
