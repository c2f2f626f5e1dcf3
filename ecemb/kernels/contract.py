"""Kernels: the few operations on bulk bytes that everything else is built on.

Owns: the contract (`Kernels`), the checks of its arguments, and the choice of an implementation by name
(`get_kernels`). All implementations share `Columns`, the columns of a table, which are separate arrays and
side by side in its records, and `RowSet`, a set of rows as a bitmap, since a table may have billions of rows.
`reference` is plain numpy, slow and easy to read, and is the specification. The others are fast and equal to
it bit for bit.

Invariant: arguments are checked before the first byte is written, so a call either does all of its work or
raises `KernelError` and has written nothing. No kernel reads or writes outside of its arguments.

Knows nothing of: codes, placement, tables, ranks. All arrays are numpy, C-contiguous, aligned and
in the machine's byte order. A *word* is 8 bytes (uint64); `ids` and `offsets` are int64.
Calls keep no state (a `RowSet` belongs to the caller) and may run in several threads on different outputs.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, TypeAlias, cast, final

import numpy as np
from numpy.typing import NDArray

from ..errors import KernelError, KernelUnavailable
from .threads import Team

Words: TypeAlias = NDArray[np.uint64]
Ids: TypeAlias = NDArray[np.int64]
Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]

POLYNOMIAL: Final = 0x11D
"""The field polynomial of GF(2^8) that the products use: x^8 + x^4 + x^3 + x^2 + 1."""

_MODULES: Final = {
    "reference": ("ecemb.kernels.reference", "Reference"),
    "cpu": ("ecemb.kernels.cpu", "Cpu"),
}

NAMES: Final = tuple(_MODULES)
"""The names that `get_kernels` takes. The import of a kernel's module may still fail on this machine."""


def get_kernels(name: str, threads: int = 1) -> Kernels:
    """Returns the kernels of this name, imported on the first call, or raises: no other kernels replace them.

    Args:
        name: One of `NAMES`.
        threads: Threads that share the work of one call, where the kernels support it.

    Raises:
        KernelUnavailable: There are no kernels of this name, or a package that they need is not installed.
    """
    return _cached(name, threads)


@functools.cache
def _cached(name: str, threads: int) -> Kernels:
    if name not in _MODULES:
        raise KernelUnavailable(
            f"there are no kernels named {name!r}; the names are {', '.join(map(repr, NAMES))}"
        )
    module, kind = _MODULES[name]
    try:
        return cast("type[Kernels]", getattr(importlib.import_module(module), kind))(threads=threads)
    except ImportError as error:
        raise KernelUnavailable(
            f"the kernels {name!r} can't be imported here: {error}; install the missing package, or "
            "use 'reference', which is slow and needs only numpy"
        ) from error


class Kernels(ABC):
    """The contract. Public methods check their arguments and are final; private methods implement them.

    Implementations are final and keep no state. `*` is the product in GF(2^8) / 0x11D of each byte.

    Args:
        threads: Threads that share the work of one call, where the implementation supports it.
    """

    name: ClassVar[str]

    def __init__(self, threads: int = 1) -> None:
        self._team = Team(threads)

    @final
    def scatter_(self, table: Elements, ids: Ids, records: Elements, column: int) -> None:
        """Copies a column range of records into rows of a table.

        `table[ids] = records[:, column:column+w]`

        Records are written in order: the last record of a repeated id stays.

        Args:
            table: uint8/16/32/64 [rows, w]; the rows `ids` are overwritten, the others left alone.
            ids: int64 [m], row numbers; read.
            records: the table's dtype [m, W]; read. Not overlapping the table.
            column: First column in `records`, in elements; column + w <= W.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        check_array("scatter_", "table", table, 2, ELEMENTS)
        check_array("scatter_", "records", records, 2, (table.dtype,))
        check_array("scatter_", "ids", ids, 1, (INDEX,))
        rows, width = table.shape
        if records.shape[0] != ids.size:
            raise KernelError(
                f"scatter_: records has {records.shape[0]} rows; it has to have one for each of the "
                f"{ids.size} ids"
            )
        if not 0 <= column <= records.shape[1] - width:
            raise KernelError(
                f"scatter_: the table's {width} columns from column {column} on are not within records' "
                f"{records.shape[1]}"
            )
        check_ids("scatter_", ids, rows, "table")
        check_output("scatter_", "table", table, records=records)
        self._scatter(table, ids, records, column)

    def has_loops(self, widths: tuple[int, ...]) -> bool:
        """Whether nothing is left to compile for records of columns of these widths, in bytes."""
        return True

    def prepare(self, widths: tuple[int, ...]) -> None:  # noqa: B027 - others compile nothing
        """Compiles what records of columns of these widths need; otherwise their first use does so."""

    @final
    def gather_records(self, columns: Columns, ids: Ids, out: Words) -> None:
        """Copies records of a table: for each row its columns side by side, and then zeros.

        `out[i] = columns[ids[i]]`

        Args:
            columns: The table; read.
            ids: int64 [m], row numbers, in any order, repeats allowed; read.
            out: uint64 [m, columns.words]; overwritten. Not overlapping the table.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        columns.check("gather_records", ids, out=out)
        self._gather_records(columns, ids, out)

    @final
    def change_records(self, columns: Columns, ids: Ids, old: Words, out: Words) -> None:
        """Computes the XOR of records of a table and earlier records of the same rows.

        `out[i] = columns[ids[i]] XOR old[i]`

        Args:
            columns: The table; read.
            ids: int64 [m], row numbers, in any order, repeats allowed; read.
            old: uint64 [m, columns.words], zero after the columns, as `gather_records` writes them; read.
            out: uint64 [m, columns.words]; overwritten. Not overlapping the table or `old`.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        columns.check("change_records", ids, old=old, out=out)
        self._change_records(columns, ids, old, out)

    @final
    def distinct(self, ids: Ids, rows: RowSet, out: Ids) -> int:
        """Adds rows to a set, and returns the rows that were not in it before.

        Args:
            ids: int64 [m], row numbers, in any order, repeats allowed; read.
            rows: The set; afterwards all of `ids` are in it.
            out: int64 [at least m]; the first `count` elements are overwritten with the new rows, ascending,
                each once; the others are left alone. Not overlapping `ids`.

        Returns:
            `count`, the number of new rows.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        check_array("distinct", "ids", ids, 1, (INDEX,))
        check_array("distinct", "out", out, 1, (INDEX,))
        if out.size < ids.size:
            raise KernelError(f"distinct: out has room for {out.size} ids, and all {ids.size} may be new")
        check_ids("distinct", ids, rows.rows, "set")
        check_output("distinct", "out", out, ids=ids)
        return self._distinct(ids, rows, out)

    @final
    def forget_(self, rows: RowSet, ids: Ids) -> None:
        """Removes rows from a set.

        Args:
            rows: The set; afterwards none of `ids` is in it.
            ids: int64 [m], row numbers, in any order, in the set or not; read.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        check_array("forget_", "ids", ids, 1, (INDEX,))
        check_ids("forget_", ids, rows.rows, "set")
        self._forget(rows, ids)

    @final
    def gather_rows(self, src: Words, offsets: Ids, out: Words) -> None:
        """Packs m rows of w words.

        `out[i] = src[offsets[i]:offsets[i]+w]`

        Args:
            src: uint64 [S]; read.
            offsets: int64 [m], where each row begins in `src`, in words; any order, repeats and
                overlaps allowed; read.
            out: uint64 [m, w]; overwritten. Not overlapping `src`.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        check_places("gather_rows", "src", src, offsets, "out", out)
        check_output("gather_rows", "out", out, src=src)
        self._gather_rows(src, offsets, out)

    @final
    def mul_add_rows_(self, dst: Words, offsets: Ids, src: Words, weight: int) -> None:
        """Adds m weighted rows of w words.

        `dst[offsets[i]:offsets[i]+w] ^= weight * src[i]`

        Updates parity by deltas.

        Args:
            dst: uint64 [S]; the rows are updated, the rest left alone.
            offsets: int64 [m], where each row begins in `dst`, in words; repeats and overlaps add up; read.
            src: uint64 [m, w]; read. Not overlapping `dst`.
            weight: 0..255; 0 changes nothing, 1 is plain XOR.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        check_places("mul_add_rows_", "dst", dst, offsets, "src", src)
        check_output("mul_add_rows_", "dst", dst, src=src)
        check_weight("mul_add_rows_", weight)
        if weight:
            self._mul_add_rows(dst, offsets, src, weight)

    @final
    def update_rows_(
        self, dst: Words, offsets: Ids, src: Words, weight: int, saved: Words, mark: Ids
    ) -> None:
        """Adds m weighted rows of w words, so that the update can be completed if the process ends anywhere.

        `dst[offsets[i]:offsets[i]+w] ^= weight * src[i]`

        Rows are numbered on from the number in `mark`: row i has the number `mark[0] + 1 + i`. They change in
        order, and the stores for each row have this order: its old words to `saved[number % 2]`, its number
        to `mark`, its new words to `dst`.

        Args:
            dst: uint64 [S]; the rows are updated, the rest left alone.
            offsets: int64 [m], where each row begins in `dst`, in words; repeats and overlaps add up; read.
            src: uint64 [m, w]; read. Not overlapping `dst`.
            weight: 1..255; 1 is plain XOR.
            saved: uint64 [2, v], v >= w; overwritten. Not overlapping `dst` and `src`.
            mark: int64 [1]; raised by m.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        check_update("update_rows_", dst, offsets, src, weight, saved, "mark", mark, lane_dimensions=0)
        if not weight or mark.size != 1 or saved.shape[0] != 2 or saved.shape[1] < src.shape[1]:
            raise KernelError(
                f"update_rows_: rows of {src.shape[1]} words, the weight {weight}, a mark of {mark.size} and "
                f"saved {list(saved.shape)}; the weight has to be above 0, mark has to have one number, and "
                f"saved room for two rows"
            )
        self._update_rows(dst, offsets, src, weight, saved, mark)

    @final
    def share(self, items: int, item_bytes: int, act: Callable[[int, int], object]) -> None:
        """Shares other work between the threads of these kernels: see `Team.share`."""
        self._team.share(items, item_bytes, act)

    def lanes(self, rows: int, row_bytes: int) -> int:
        """The number of lanes, 1 or more, in which `update_lanes_` uses all threads that such rows are worth.

        Args:
            rows: number of rows.
            row_bytes: bytes of each.
        """
        return self._team.parts(rows, 3 * row_bytes)

    @final
    def update_lanes_(
        self,
        dst: Words,
        offsets: Ids,
        src: Words,
        weight: int,
        edges: Sequence[int],
        saved: Words,
        marks: Ids,
    ) -> None:
        """Does `update_rows_` for several runs of rows at the same time, each with a journal of its own.

        Lane i changes rows edges[i]..edges[i+1]-1 in order, with `saved[i]` and `marks[i]` in the place of
        `saved` and `mark`. Lanes change in any order. When the call returns, none changes any more.

        Args:
            dst: uint64 [S]; the rows are updated, the rest left alone.
            offsets: int64 [m], ascending, where each row begins in `dst`, in words; no rows overlap; read.
            src: uint64 [m, w]; read. Not overlapping `dst`.
            weight: 1..255; 1 is plain XOR.
            edges: lanes + 1 numbers, ascending from 0 to m.
            saved: uint64 [lanes, 2, v], v >= w; overwritten. Not overlapping `dst` and `src`.
            marks: int64 [lanes, v], v >= 1, of which the first column is used: each is raised by the lane's
                number of rows.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        check_update("update_lanes_", dst, offsets, src, weight, saved, "marks", marks, lane_dimensions=1)
        lanes, count = len(edges) - 1, offsets.size
        if not weight or lanes < 1 or sorted(edges) != list(edges) or (edges[0], edges[-1]) != (0, count):
            raise KernelError(
                f"update_lanes_: {count} rows, the weight {weight} and the edges {list(edges)}; the weight "
                f"has to be above 0, and the edges have to ascend from 0 to the number of rows"
            )
        places = saved.shape[0], marks.shape[0]
        if places != (lanes, lanes) or saved.shape[1] != 2 or saved.shape[2] < src.shape[1] or not marks.size:
            raise KernelError(
                f"update_lanes_: {lanes} lanes of rows of {src.shape[1]} words, marks {list(marks.shape)} "
                f"and saved {list(saved.shape)}; each lane has to have a mark, and saved room for two rows"
            )
        if not are_apart(offsets, src.shape[1]):
            raise KernelError(
                f"update_lanes_: rows of {src.shape[1]} words overlap, or don't ascend: use update_rows_"
            )

        def lane(i: int) -> None:
            part = slice(edges[i], edges[i + 1])
            self._update_rows(dst, offsets[part], src[part], weight, saved[i], marks[i, :1])

        self._team.each(lanes, lane)

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
        check_array("mul_add_block_", "dst", dst, 1, (WORD,))
        check_array("mul_add_block_", "src", src, 1, (WORD,))
        check_length("mul_add_block_", "src", src, "dst", dst)
        check_output("mul_add_block_", "dst", dst, src=src)
        check_weight("mul_add_block_", weight)
        if weight:
            self._mul_add_block(dst, src, weight)

    @final
    def dot(self, blocks: Sequence[Words], weights: NDArray[np.uint8], outs: Sequence[Words]) -> None:
        """Combines blocks: `outs[q] = XOR_j weights[q, j] * blocks[j]`; zeros when there is no block.

        Encodes parity and rebuilds lost blocks.

        Args:
            blocks: k arrays uint64 [S]; read. Not overlapping an output.
            weights: uint8 [p, k]; read.
            outs: p arrays uint64 [S]; overwritten. Not overlapping each other.

        Raises:
            KernelError: An argument breaks these rules; nothing was written.
        """
        check_array("dot", "weights", weights, 2, (BYTE,))
        if weights.shape != (len(outs), len(blocks)):
            shapes = f"{len(blocks)} blocks, {len(outs)} outs and weights {list(weights.shape)}"
            raise KernelError(f"dot: {shapes}; weights has to be [outs, blocks]")
        targets = {f"outs[{q}]": out for q, out in enumerate(outs)}
        named = {f"blocks[{j}]": block for j, block in enumerate(blocks)}
        for label, array in (targets | named).items():
            check_array("dot", label, array, 1, (WORD,))
            check_length("dot", label, array, *next(iter(targets.items()), (label, array)))
        for label, out in targets.items():
            check_output("dot", label, out, **named)
            named[label] = out
        self._dot(blocks, weights, outs)

    # Implementations define these methods. Arguments have been checked. A weight is not 0, except in `_dot`.

    @abstractmethod
    def _scatter(self, table: Elements, ids: Ids, records: Elements, column: int) -> None: ...

    @abstractmethod
    def _gather_records(self, columns: Columns, ids: Ids, out: Words) -> None: ...

    @abstractmethod
    def _change_records(self, columns: Columns, ids: Ids, old: Words, out: Words) -> None: ...

    @abstractmethod
    def _distinct(self, ids: Ids, rows: RowSet, out: Ids) -> int: ...

    @abstractmethod
    def _forget(self, rows: RowSet, ids: Ids) -> None: ...

    @abstractmethod
    def _gather_rows(self, src: Words, offsets: Ids, out: Words) -> None: ...

    @abstractmethod
    def _mul_add_rows(self, dst: Words, offsets: Ids, src: Words, weight: int) -> None: ...

    def _update_rows(
        self, dst: Words, offsets: Ids, src: Words, weight: int, saved: Words, mark: Ids
    ) -> None:
        for i in range(len(offsets)):
            number, words = int(mark[0]) + 1, src.shape[1]
            saved[number % 2, :words] = dst[offsets[i] : offsets[i] + words]
            mark[0] = number
            self._mul_add_rows(dst, offsets[i : i + 1], src[i : i + 1], weight)

    @abstractmethod
    def _mul_add_block(self, dst: Words, src: Words, weight: int) -> None: ...

    @abstractmethod
    def _dot(self, blocks: Sequence[Words], weights: NDArray[np.uint8], outs: Sequence[Words]) -> None: ...


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
    """Raises KernelError unless `array` is C-contiguous, aligned, of one of `dtypes`, with `dimensions`."""
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
    """Raises KernelError unless `output` is writeable and shares no memory with `inputs`."""
    if not output.flags.writeable:
        raise KernelError(f"{operation}: {label} is written to, but the array is read-only")
    for name, array in inputs.items():
        # Compares the bounds of both arrays, which is exact for contiguous arrays.
        if np.may_share_memory(output, array):
            raise KernelError(
                f"{operation}: {label} is written to while {name} is read; their memory overlaps"
            )


def check_length(
    operation: str, label: str, array: NDArray[Any], other: str, reference: NDArray[Any]
) -> None:
    """Raises KernelError unless `array` is as long as `reference`."""
    if array.size != reference.size:
        raise KernelError(
            f"{operation}: {label} has {array.size} words; it has to have {other}'s {reference.size}"
        )


def check_weight(operation: str, weight: int) -> None:
    """Raises KernelError unless `weight` is an element of GF(2^8), 0..255."""
    if not isinstance(cast(object, weight), int | np.integer) or not 0 <= weight <= 255:
        raise KernelError(
            f"{operation}: weight {weight!r} is not an element of GF(2^8); the elements are the ints 0..255"
        )


def check_update(
    operation: str,
    dst: Words,
    offsets: Ids,
    src: Words,
    weight: int,
    saved: Words,
    label: str,
    marks: Ids,
    *,
    lane_dimensions: int,
) -> None:
    """Raises KernelError unless rows of `dst` can change: see `Kernels.update_rows_` and `update_lanes_`.

    The weight may be 0 here, and the sizes of `saved` and `marks` are left to the caller. `label` is the name
    of `marks`. `saved` and `marks` have `lane_dimensions` in front of the others.
    """
    check_places(operation, "dst", dst, offsets, "src", src)
    check_output(operation, "dst", dst, src=src)
    check_weight(operation, weight)
    check_array(operation, "saved", saved, 2 + lane_dimensions, (WORD,))
    check_output(operation, "saved", saved, dst=dst, src=src)
    check_array(operation, label, marks, 1 + lane_dimensions, (INDEX,))
    check_output(operation, label, marks, dst=dst, src=src, saved=saved)


def check_ids(operation: str, ids: Ids, rows: int, owner: str) -> None:
    """Raises KernelError unless every id is a row, 0..rows-1, of `owner`."""
    if not within(ids, rows):
        i = int(np.flatnonzero((ids < 0) | (ids >= rows))[0])
        raise KernelError(
            f"{operation}: ids[{i}] = {ids[i]} is not a row of the {owner}, which has {rows} rows"
        )


def within(indices: Ids, stop: int) -> bool:
    """Whether all of `indices` are 0..stop-1."""
    # Negative numbers are the largest when read as unsigned, so one pass is enough.
    return not indices.size or int(np.maximum.reduce(indices.view(np.uint64))) < stop


def are_apart(offsets: Ids, words: int) -> bool:
    """Whether rows of `words` words are in ascending order and none overlaps the row before it."""
    return bool(np.all(offsets[1:] - offsets[:-1] >= words))


def check_places(operation: str, sparse: str, words: Words, offsets: Ids, dense: str, packed: Words) -> None:
    """Raises KernelError unless a row of `packed` [m, w] fits into `words` [S] at each of `offsets` [m]."""
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


_WORD_BYTES = 8


@final
class Columns:
    """The columns of a table, side by side in a record. The rest of a record's last word is 0.

    Args:
        rows: rows of the table, 0 or more.
        parts: for each column, in the order of a record, its array, uint8/16/32/64 [rows, w], and the index
            of its first element in a record, in elements of its dtype. Columns leave no gaps.

    Attributes:
        rows: as given.
        words: 8-byte words of a record.
        parts: as given.
        widths: for each column the bytes of a row.
        addresses: int64 [columns], address of row 0 of each column.

    Raises:
        KernelError: a column is not such an array, has another number of rows, or leaves a gap.
    """

    def __init__(self, rows: int, parts: Sequence[tuple[Elements, int]]) -> None:
        self.rows = rows
        self.parts: tuple[tuple[Elements, int], ...] = tuple(parts)
        widths: list[int] = []
        end = 0
        for number, (column, first) in enumerate(self.parts):
            check_array("records", f"column {number}", column, 2, ELEMENTS)
            at = first * column.itemsize
            if len(column) != rows or at != end:
                raise KernelError(
                    f"records: column {number} has {len(column)} rows and begins at byte {at}; it has to "
                    f"have {rows}, and to begin at byte {end}, where the column before it ends"
                )
            widths.append(column.shape[1] * column.itemsize)
            end += widths[-1]
        self.widths: tuple[int, ...] = tuple(widths)
        self.words: int = -(-end // _WORD_BYTES)
        addresses = [column.__array_interface__["data"][0] for column, _ in parts]
        self.addresses: NDArray[np.int64] = np.array(addresses, np.int64)
        self._named = {f"column {number} of the table": column for number, (column, _) in enumerate(parts)}

    def check(self, operation: str, ids: Ids, *, out: Words, **read: Words) -> None:
        """Raises KernelError unless `ids` are rows, and `out` and arrays of `read` have a record for each.

        `out` must be writeable, and share no memory with the columns or the arrays of `read`.
        """
        check_array(operation, "ids", ids, 1, (INDEX,))
        for label, records in {**read, "out": out}.items():
            check_array(operation, label, records, 2, (WORD,))
            if records.shape != (ids.size, self.words):
                raise KernelError(
                    f"{operation}: {label} has the shape {list(records.shape)}; it has to be "
                    f"[{ids.size}, {self.words}], a record for each id"
                )
        check_ids(operation, ids, self.rows, "table")
        check_output(operation, "out", out, **read, **self._named)


ROWS_PER_WORD = 64

_ALL = (1 << ROWS_PER_WORD) - 1
_LOOK_WORDS = 1 << 14
"""Words of a set that are processed together: intermediate results stay in the processor's cache."""

_ONES = np.array([byte.bit_count() for byte in range(256)], np.uint8)


@final
class RowSet:
    """A set of row numbers below `rows`; empty at first.

    One thread may change a set at a time. While rows are only added, other threads may call `has`: a word is
    stored at once, so that they find a row either in the set or not yet.

    The owner keeps a set as long as the table, since a new set has to clear a bit of memory for each row.

    Args:
        rows: rows of the table, 0 or more.

    Attributes:
        rows: as given.
        seen: uint64 [ceil(rows / 64)], bit i % 64 of word i // 64 is set if row i is in the set.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.seen: NDArray[np.uint64] = np.zeros(-(-rows // ROWS_PER_WORD), np.uint64)

    def add_(self, row: int) -> bool:
        """Adds one row, as `Kernels.distinct` adds many; returns whether the row is new.

        Raises:
            KernelError: there is no such row.
        """
        if not 0 <= row < self.rows:
            raise KernelError(f"add_: {row} is not a row of the set, which has {self.rows} rows")
        word, bit = divmod(row, ROWS_PER_WORD)
        known = int(self.seen[word])
        self.seen[word] = known | 1 << bit
        return not known >> bit & 1

    def has(self, ids: Ids) -> NDArray[np.bool_]:
        """For each row, whether it is in the set.

        Args:
            ids: int64 [m], rows of the table, in any order, repeats allowed; read.

        Returns:
            bool [m]; new.
        """
        bits = self.seen[ids // ROWS_PER_WORD] >> (ids % ROWS_PER_WORD).astype(np.uint64)
        return (bits & np.uint64(1)).astype(np.bool_)

    def first_absent(self, first: int) -> int:
        """The first row that is not in the set, from `first` (0 or more) on; `rows` if there is none."""
        if first >= self.rows:
            return self.rows
        word, bit = divmod(first, ROWS_PER_WORD)
        absent = ~int(self.seen[word]) >> bit << bit & _ALL
        while not absent and (start := word + 1) < len(self.seen):
            full = self.seen[start : start + _LOOK_WORDS] == _ALL
            word = start + int(full.argmin()) if not full.all() else start + len(full) - 1
            absent = ~int(self.seen[word]) & _ALL
        if not absent:
            return self.rows
        return min(word * ROWS_PER_WORD + (absent & -absent).bit_length() - 1, self.rows)

    def count(self, first: int, stop: int) -> int:
        """The number of rows of first..stop-1 that are in the set."""
        low, high = first // ROWS_PER_WORD, stop // ROWS_PER_WORD
        count = self._count_below(stop) - self._count_below(first)
        for start in range(low, high, _LOOK_WORDS):
            count += int(_ONES[self.seen[start : min(start + _LOOK_WORDS, high)].view(np.uint8)].sum())
        return count

    def _count_below(self, row: int) -> int:
        """The number of rows in the set that are before `row` and in the same word."""
        word, bit = divmod(row, ROWS_PER_WORD)
        return (int(self.seen[word]) & (1 << bit) - 1).bit_count() if bit else 0

    def clear_(self) -> None:
        """Removes all rows: faster than `Kernels.forget_` for many rows."""
        self.seen.fill(0)
