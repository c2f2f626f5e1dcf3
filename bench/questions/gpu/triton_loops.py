# pyright: basic
"""Loops over elements in Triton's language: what `cuda` launches.

A program takes a block of rows and columns, or of elements; what lies beyond is masked. How it multiplies is
explained in `cuda`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


# Numbers that change from call to call are left general: each kind of number would be compiled again. Where
# rows are only moved, so are their widths, and what is aligned: few of a table's columns are.
@triton.jit(
    do_not_specialize=["source_stride", "target_stride", "rows", "width"],
    do_not_specialize_on_alignment=["source", "source_rows", "target", "target_rows"],
)
def _copy(
    source,
    source_rows,
    source_stride,
    target,
    target_rows,
    target_stride,
    rows,
    width,
    by_source: tl.constexpr,
    by_target: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1).to(tl.int64) * block_columns + tl.arange(0, block_columns)
    there = row < rows
    here = there[:, None] & (column < width)[None, :]
    begin, end = row, row
    if by_source:
        begin = tl.load(source_rows + row, mask=there, other=0)
    if by_target:
        end = tl.load(target_rows + row, mask=there, other=0)
    values = tl.load(source + (begin * source_stride)[:, None] + column[None, :], mask=here)
    tl.store(target + (end * target_stride)[:, None] + column[None, :], values, mask=here)


@triton.jit(
    do_not_specialize=["table_stride", "old_stride", "out_stride", "rows", "width"],
    do_not_specialize_on_alignment=["table", "ids", "old", "out"],
)
def _differ(
    table,
    ids,
    old,
    out,
    table_stride,
    old_stride,
    out_stride,
    rows,
    width,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1).to(tl.int64) * block_columns + tl.arange(0, block_columns)
    there = row < rows
    here = there[:, None] & (column < width)[None, :]
    begin = tl.load(ids + row, mask=there, other=0)
    new = tl.load(table + (begin * table_stride)[:, None] + column[None, :], mask=here)
    before = tl.load(old + (row * old_stride)[:, None] + column[None, :], mask=here)
    tl.store(out + (row * out_stride)[:, None] + column[None, :], new ^ before, mask=here)


@triton.jit
def _product(x, t0, t1, t2, t3, t4, t5, t6, t7):
    y = (x & 0x01010101) * t0
    y ^= ((x >> 1) & 0x01010101) * t1
    y ^= ((x >> 2) & 0x01010101) * t2
    y ^= ((x >> 3) & 0x01010101) * t3
    y ^= ((x >> 4) & 0x01010101) * t4
    y ^= ((x >> 5) & 0x01010101) * t5
    y ^= ((x >> 6) & 0x01010101) * t6
    y ^= ((x >> 7) & 0x01010101) * t7
    return y


@triton.jit(do_not_specialize=["rows", *(f"t{bit}" for bit in range(8))])
def _add_rows(
    dst,
    offsets,
    src,
    rows,
    width,
    t0,
    t1,
    t2,
    t3,
    t4,
    t5,
    t6,
    t7,
    atomic: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1).to(tl.int64) * block_columns + tl.arange(0, block_columns)
    there = row < rows
    here = there[:, None] & (column < width)[None, :]
    x = tl.load(src + (row * width)[:, None] + column[None, :], mask=here, other=0)
    y = _product(x, t0, t1, t2, t3, t4, t5, t6, t7)
    begin = tl.load(offsets + row, mask=there, other=0) * 2  # of words, each two elements
    place = dst + begin[:, None] + column[None, :]
    if atomic:
        tl.atomic_xor(place, y, mask=here)
    else:
        tl.store(place, tl.load(place, mask=here, other=0) ^ y, mask=here)


@triton.jit(do_not_specialize=[f"t{bit}" for bit in range(8)])
def _add(dst, src, size, t0, t1, t2, t3, t4, t5, t6, t7, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    here = at < size
    y = _product(tl.load(src + at, mask=here, other=0), t0, t1, t2, t3, t4, t5, t6, t7)
    tl.store(dst + at, tl.load(dst + at, mask=here, other=0) ^ y, mask=here)


# Launching one is a subscript with the grid, and a call: no type checker knows it.
copy: Any = _copy
differ: Any = _differ
add_rows: Any = _add_rows
add: Any = _add
