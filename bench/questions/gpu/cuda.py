"""Kernels on a GPU, in Triton; by its interpreter (TRITON_INTERPRET=1, before the import) on any machine.

Owns how `triton_loops` are launched: on tensors that the device reaches, rows copied (`copy_rows_`) and
compared (`differ_rows_`), and products in GF(2^8) added (`multiply_add_rows_`, `multiply_add_`); and the
contract of `ecemb.kernels` (`Cuda`), whose arrays are host memory. Memory that is registered with CUDA (by
cudaHostRegister, or pinned by torch) is read and written in place, over the bus; any other is copied to the
device and back.

A product by a constant is linear in the bits of the other factor: with T_b the constant times 2^b,
`weight * x = XOR_b T_b * (bit b of x)`. The bits b of four bytes are one shift and one mask, their products
with T_b < 256 one multiplication of 32 bits, since no byte carries into the next one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray

from bench.questions.gpu import triton_loops as loops
from ecemb.errors import KernelUnavailable
from ecemb.kernels.contract import POLYNOMIAL, Columns, Elements, Ids, Kernels, RowSet, Words
from ecemb.kernels.reference import distinct, forget_

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs on the CPU: as it was when this module was imported."""

_interpreter = threading.Lock()  # it changes Triton's own functions while one of ours runs
# What one program takes; the interpreter takes its time for each program.
_ELEMENTS, _COLUMNS = (4096, 64) if INTERPRETED else (2048, 128)
_NARROW = 16
_BLOCK, _LARGEST_BLOCK = 2048, 1 << 16 if INTERPRETED else 2048
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def copy_rows_(
    target: torch.Tensor,
    source: torch.Tensor,
    *,
    to: torch.Tensor | None = None,
    of: torch.Tensor | None = None,
) -> None:
    """Copies rows: `target[to[i]] = source[of[i]]`.

    Begun on the device's current stream; not waited for. Tensors are the device's, or registered with CUDA.

    Args:
        target: int8/16/32/64 [*, w], whose rows may lie at any distance, each of them contiguous; those
            named are overwritten.
        source: of the same kind [*, w]; read. Not overlapping `target`.
        to: int64 [m], each row once; read. 0..m-1 when None.
        of: int64 [m], in any order, repeats allowed; read. 0..m-1 when None.
    """
    numbers = of if of is not None else to
    rows, width = len(source if numbers is None else numbers), source.shape[1]
    if rows and width:
        grid, blocks = _tiles(rows, width)
        loops.copy[grid](
            source,
            source if of is None else of,
            source.stride(0),
            target,
            target if to is None else to,
            target.stride(0),
            rows,
            width,
            by_source=of is not None,
            by_target=to is not None,
            **blocks,
        )


def differ_rows_(out: torch.Tensor, old: torch.Tensor, table: torch.Tensor, ids: torch.Tensor) -> None:
    """Computes how rows of a table differ from records: `out[i] = table[ids[i]] XOR old[i]`.

    Begun on the device's current stream; not waited for. Tensors are the device's, or registered with CUDA.

    Args:
        out: int8/16/32/64 [m, w], whose rows may lie at any distance, each of them contiguous; overwritten.
        old: of the same kind [m, w]; read.
        table: of the same kind [*, w]; read.
        ids: int64 [m], in any order, repeats allowed; read.
    """
    rows, width = len(ids), table.shape[1]
    if rows and width:
        grid, blocks = _tiles(rows, width)
        strides = table.stride(0), old.stride(0), out.stride(0)
        loops.differ[grid](table, ids, old, out, *strides, rows, width, **blocks)


def multiply_add_rows_(
    dst: torch.Tensor, offsets: torch.Tensor, src: torch.Tensor, weight: int, *, apart: bool
) -> None:
    """Adds weighted rows: `dst[offsets[i]:offsets[i]+w] ^= weight * src[i]`.

    Begun on the device's current stream; not waited for.

    Args:
        dst: int64 [S], contiguous; updated.
        offsets: int64 [m], where each row begins in `dst`; read.
        src: int64 [m, w], contiguous; read.
        weight: 0..255.
        apart: no two rows overlap in `dst`; else they are added by atomic operations.
    """
    rows, width = src.shape
    grid, blocks = _tiles(rows, 2 * width)
    loops.add_rows[grid](
        dst.view(torch.int32),
        offsets,
        src.reshape(-1).view(torch.int32),
        rows,
        2 * width,
        *_constants(weight),
        atomic=not apart,
        **blocks,
    )


def multiply_add_(dst: torch.Tensor, src: torch.Tensor, weight: int) -> None:
    """Adds a weighted block, `dst ^= weight * src`; begun on the device's current stream, not waited for.

    Args:
        dst: int64 [S], contiguous; updated.
        src: int64 [S], contiguous; read.
        weight: 0..255.
    """
    size = 2 * src.numel()
    block = max(_BLOCK, min(_LARGEST_BLOCK, 1 << size.bit_length()))
    loops.add[(-(-size // block),)](
        dst.view(torch.int32), src.view(torch.int32), size, *_constants(weight), block=block
    )


def _tiles(rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """How rows of some elements are shared among programs: the grid, and what one takes.

    Of narrow rows it takes more, or most of its lanes had nothing to do. Other sizes would be compiled again.
    """
    columns = _NARROW if width <= _NARROW else _COLUMNS
    taken = _ELEMENTS // columns
    return (-(-rows // taken), -(-width // columns)), {"block_rows": taken, "block_columns": columns}


def rows_at_words(words: torch.Tensor, width: int) -> torch.Tensor:
    """Every row of `width` words that there is in `words` (int64 [S], contiguous), numbered by its first one.

    Returns:
        A view, int64 [S - width + 1, width], whose rows overlap.
    """
    return words.as_strided((len(words) - width + 1, width), (1, 1))


def _constants(weight: int) -> list[int]:
    """T_b, weight times 2^b, for b = 0..7."""
    found = [int(weight)]
    while len(found) < 8:
        twice = found[-1] << 1
        found.append(twice ^ POLYNOMIAL if twice > 0xFF else twice)
    return found


def _are_apart(places: Ids, width: int) -> bool:
    """Whether rows of `width` elements, each from its place on, don't overlap; in ascending order only."""
    return len(places) < 2 or int(np.diff(places).min()) >= width


class _Reached:
    """Arrays of the host as the kernels reach them: in place, or as copies on the device.

    Leaving the block without an exception waits for the device, and brings copies of outputs back.
    """

    def __init__(self) -> None:
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> _Reached:
        if INTERPRETED:
            _interpreter.acquire()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if INTERPRETED:
            _interpreter.release()
        elif kind is None:
            for held, copy in self._back:
                held.copy_(copy)
            torch.cuda.current_stream().synchronize()

    def reads(self, array: NDArray[Any]) -> torch.Tensor:
        """An array that is only read."""
        return self._reached(array if array.flags.writeable else array.copy())[0]

    def writes(self, array: NDArray[Any]) -> torch.Tensor:
        """An array that is written, at least in parts."""
        reached, held = self._reached(array)
        if reached is not held:
            self._back.append((held, reached))
        return reached

    @staticmethod
    def _reached(array: NDArray[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        held = torch.from_numpy(array.view(_SIGNED[array.itemsize]))
        return (held if INTERPRETED or held.is_pinned() else held.cuda()), held


@final
class Cuda(Kernels):
    """On the current CUDA device, or interpreted.

    Args:
        threads: of no meaning here.

    Raises:
        KernelUnavailable: there is no CUDA device, and Triton doesn't interpret.
    """

    name: ClassVar[str] = "cuda"

    def __init__(self, threads: int = 1) -> None:
        super().__init__(threads)
        if not (INTERPRETED or torch.cuda.is_available()):
            raise KernelUnavailable(
                "the kernels 'cuda' need a CUDA device, and torch sees none: ask for 'cpu', or set "
                "TRITON_INTERPRET=1 before the import, to try them slowly"
            )

    def _scatter(self, table: Elements, ids: Ids, records: Elements, column: int) -> None:
        ids, records = _last(ids, records, 1)
        with _Reached() as reached:
            part = reached.reads(records)[:, column : column + table.shape[1]]
            copy_rows_(reached.writes(table), part, to=reached.reads(ids))

    def _gather_records(self, columns: Columns, ids: Ids, out: Words) -> None:
        out[:, -1:] = 0
        for rows, first in columns.parts:
            with _Reached() as reached:
                part = reached.writes(out.view(rows.dtype))[:, first : first + rows.shape[1]]
                copy_rows_(part, reached.reads(rows), of=reached.reads(ids))

    def _change_records(self, columns: Columns, ids: Ids, old: Words, out: Words) -> None:
        out[:, -1:] = 0
        for rows, first in columns.parts:
            at = slice(first, first + rows.shape[1])
            with _Reached() as reached:
                written = reached.writes(out.view(rows.dtype))[:, at]
                was = reached.reads(old.view(rows.dtype))[:, at]
                differ_rows_(written, was, reached.reads(rows), reached.reads(ids))

    def _distinct(self, ids: Ids, rows: RowSet, out: Ids) -> int:
        return distinct(ids, rows, out)  # the set is in host memory, and so are the ids

    def _forget(self, rows: RowSet, ids: Ids) -> None:
        forget_(rows, ids)

    def _gather_rows(self, src: Words, offsets: Ids, out: Words) -> None:
        if out.size:
            with _Reached() as reached:
                rows = rows_at_words(reached.reads(src), out.shape[1])
                copy_rows_(reached.writes(out), rows, of=reached.reads(offsets))

    def _mul_add_rows(self, dst: Words, offsets: Ids, src: Words, weight: int) -> None:
        if src.size:
            with _Reached() as reached:
                multiply_add_rows_(
                    reached.writes(dst),
                    reached.reads(offsets),
                    reached.reads(src),
                    weight,
                    apart=_are_apart(offsets, src.shape[1]),
                )

    def _mul_add_block(self, dst: Words, src: Words, weight: int) -> None:
        if src.size:
            with _Reached() as reached:
                multiply_add_(reached.writes(dst), reached.reads(src), weight)

    def _dot(self, blocks: Sequence[Words], weights: NDArray[np.uint8], outs: Sequence[Words]) -> None:
        for out in outs:
            out[:] = 0
        if outs and outs[0].size:
            with _Reached() as reached:
                targets = [reached.writes(out) for out in outs]
                for block, column in zip(blocks, weights.T, strict=True):
                    source = reached.reads(block)
                    for target, weight in zip(targets, column.tolist(), strict=True):
                        if weight:
                            multiply_add_(target, source, weight)


def _last(ids: Ids, records: Elements, width: int) -> tuple[Ids, Elements]:
    """Rows and their records, each row once, with the last of its records."""
    if _are_apart(ids, width):
        return ids, records
    found, place = np.unique(ids[::-1], return_index=True)
    return found, np.ascontiguousarray(records[::-1][place])
