"""The loops of the compiled kernels. All arguments are integers: addresses, and sizes in bytes or rows.

Row i lies at base + indices[i] · scale. Loops prefetch some rows ahead, since most of the time of a scattered
row is waiting for memory. Nothing is checked here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from .gf_products import Products
from .llvm import I64, LINE_BYTES, Emitter, Value, ir, number, vector

WORD_BYTES: Final = number(8)

AHEAD_ROWS: Final = 24
AHEAD_BITS: Final = 16
"""How far ahead the words of a bitmap are prefetched, in rows."""

AHEAD_BYTES: Final = 1024
"""Bytes of a row that are prefetched. The processor itself prefetches the rest of a long row."""

DIGITS: Final = 256
"""Values of a byte, by which rows are sorted."""

MOST_OUTPUTS: Final = 4
"""Sums that `dot` keeps in registers at the same time."""


def copy(unit: int) -> Emitter:
    """(base, indices, count, scale, width, out, stride): out[i · stride ..] = row i, `width` bytes."""
    return _move("copy", unit, put=False)


def put(unit: int) -> Emitter:
    """(base, indices, count, scale, width, records, stride): row i = records[i · stride ..]."""
    return _move("put", unit, put=True)


def _move(name: str, unit: int, *, put: bool) -> Emitter:
    e = Emitter(name, 7)
    base, indices, count, scale, width, records, stride = e.arguments
    with e.loop(count) as rows:
        row = _row(e, base, indices, count, scale, width, rows.index, write=put)
        record = e.place(records, rows.index, stride)
        source, target = (record, row) if put else (row, record)

        def act(at: Value, size: int) -> None:
            e.store(e.load(vector(size), e.make.add(source, at)), e.make.add(target, at))

        e.pieces(width, unit, 1, act)
    return e.end()


def change(unit: int) -> Emitter:
    """(base, indices, count, scale, width, old, out, stride): out[i · stride ..] = row i XOR old[there]."""
    e = Emitter("change", 8)
    base, indices, count, scale, width, old, out, stride = e.arguments
    with e.loop(count) as rows:
        source = _row(e, base, indices, count, scale, width, rows.index, write=False)
        before, target = e.place(old, rows.index, stride), e.place(out, rows.index, stride)

        def act(at: Value, size: int) -> None:
            new, was = (e.load(vector(size), e.make.add(start, at)) for start in (source, before))
            e.store(e.make.xor(new, was), e.make.add(target, at))

        e.pieces(width, unit, 1, act)
    return e.end()


def pack(unit: int, widths: Sequence[int]) -> Emitter:
    """(columns, indices, count, out): out[i] = the record of row i, from columns of these widths.

    `columns` are the addresses of their first rows, which follow each other without gaps; a record is padded
    with zeros to words. The sizes are a part of the code, which takes half the time of `copy` for each.
    """
    return _records("pack", unit, widths, changes=False)


def differ(unit: int, widths: Sequence[int]) -> Emitter:
    """(columns, indices, count, out, old): out[i] = the record of row i, as in `pack`, XOR old[i]."""
    return _records("differ", unit, widths, changes=True)


def _records(name: str, unit: int, widths: Sequence[int], *, changes: bool) -> Emitter:
    e = Emitter(name, 5 if changes else 4)
    columns, indices, count, *outputs = e.arguments
    make = e.make
    starts = [e.word(columns, number(column)) for column in range(len(widths))]
    ends = list(itertools.accumulate(widths))
    words = -(-sum(widths) // 8)
    last = make.sub(count, number(1))
    with e.loop(count) as rows:
        soon = e.word(indices, _at_most(e, make.add(rows.index, number(AHEAD_ROWS)), last))
        row = e.word(indices, rows.index)
        records = [e.place(output, rows.index, number(8 * words)) for output in outputs]
        for start, width in zip(starts, widths, strict=True):
            ahead = e.place(start, soon, number(width))
            for line in range(0, min(width, AHEAD_BYTES), LINE_BYTES):
                e.prefetch(make.add(ahead, number(line)), write=False)
        for start, width, end in zip(starts, widths, ends, strict=True):
            source = e.place(start, row, number(width))
            _copy_record(e, source, [make.add(one, number(end - width)) for one in records], width, unit)
        for at, size in _cut(8 * words - sum(widths), 4):
            end = number(sum(widths) + at)
            e.store(ir.Constant(vector(size), 0), make.add(records[0], end))
    return e.end()


def _copy_record(e: Emitter, source: Value, records: Sequence[Value], width: int, unit: int) -> None:
    """Writes `width` bytes to the first of `records`, XOR those of the second if there is one."""
    target, *old = records

    def act(at: Value, size: int) -> None:
        values = [e.load(vector(size), e.make.add(start, at)) for start in (source, *old)]
        e.store(functools.reduce(e.make.xor, values), e.make.add(target, at))

    if width > AHEAD_BYTES:
        e.pieces(number(width), unit, 1, act)
        return
    for at, size in _cut(width, unit):
        act(number(at), size)


def _cut(size: int, largest: int) -> Iterator[tuple[int, int]]:
    """The pieces of some bytes, as of `Emitter.pieces`: where each begins, and its size."""
    at = 0
    while at < size:
        piece = min(largest, 1 << (size - at).bit_length() - 1)
        yield at, piece
        at += piece


def add(unit: int, products: Products | None, *, journalled: bool = False) -> Emitter:
    """(base, indices, count, scale, width, src, constants): row i ^= weight * src[i · width ..].

    Without `products` the weight is 1, and `constants` is not read. With `journalled` there are three more
    arguments, saved, stride and mark, an address: before row i changes, it is copied to
    saved + (number mod 2) · stride, and then its number is stored at `mark`; it is what is stored there in
    the beginning, plus i + 1.
    """
    e = Emitter("add", 10 if journalled else 7)
    base, indices, count, scale, width, src, constants, *journal = e.arguments
    prepared = products.prepare(e, constants) if products else []
    before = e.load(I64, journal[2]) if journalled else None
    with e.loop(count) as rows:
        target = _row(e, base, indices, count, scale, width, rows.index, write=True)
        source = e.place(src, rows.index, width)
        if journalled:
            saved, stride, mark = journal
            row = e.make.add(e.make.add(before, rows.index), number(1))
            _keep(e, unit, target, width, e.place(saved, e.make.and_(row, number(1)), stride))
            e.in_order()
            e.store_word(row, mark)
            e.in_order()

        def act(at: Value, size: int) -> None:
            for part in range(0, size, unit):
                first = e.make.add(at, number(part))
                kind = vector(min(size, unit))
                added = e.load(kind, e.make.add(source, first))
                if products:
                    added = products.multiply(e, prepared, added)
                there = e.make.add(target, first)
                e.store(e.make.xor(e.load(kind, there), added), there)

        e.pieces(width, 2 * unit, 8, act)
    return e.end()


def _keep(e: Emitter, unit: int, row: Value, width: Value, place: Value) -> None:
    """Copies a row to a place."""

    def act(at: Value, size: int) -> None:
        for part in range(0, size, unit):
            first = e.make.add(at, number(part))
            kind = vector(min(size, unit))
            e.store(e.load(kind, e.make.add(row, first)), e.make.add(place, first))

    e.pieces(width, 2 * unit, 8, act)


def dot(products: Products, outputs: int) -> Emitter:
    """(blocks, constants, stride, count, outs, size): outs[q] = XOR_j weight[q, j] * blocks[j], q < outputs.

    `blocks` and `outs` are arrays of addresses, `constants` those of weight[q, j] at q · count + j, each
    `stride` bytes; blocks have `size` bytes.
    """
    e = Emitter("dot", 6)
    blocks, constants, stride, count, outs, size = e.arguments
    unit = products.vector_bytes
    targets = [e.word(outs, number(q)) for q in range(outputs)]

    def act(at: Value, piece: int) -> None:
        kind = vector(min(piece, unit))
        parts = range(0, piece, unit)
        zeros = [ir.Constant(kind, None)] * (outputs * len(parts))
        with e.loop(count, carried=zeros) as each:
            source = e.make.add(e.word(blocks, each.index), at)
            factors = [e.load(kind, e.make.add(source, number(part))) for part in parts]
            sums = iter(each.carried)
            for q in range(outputs):
                number_of = e.make.add(e.make.mul(number(q), count), each.index)
                prepared = products.prepare(e, e.place(constants, number_of, stride))
                each.following += [
                    e.make.xor(next(sums), products.multiply(e, prepared, factor)) for factor in factors
                ]
        sums = iter(each.carried)
        for target in targets:
            for part in parts:
                e.store(next(sums), e.make.add(e.make.add(target, at), number(part)))

    e.pieces(size, 4 * unit, 8, act)
    return e.end()


def distinct() -> Emitter:
    """(ids, count, seen, out, spare, counts, digits): returns the number of words written to out, ascending.

    Tests a bit per id. New rows go to `spare`, which has room for all and one more: without a branch, which
    would often be mispredicted. They are sorted by byte after byte, from the lowest of `digits` on, an odd
    number: to `out`, back to `spare`, and so on. `counts` has a word for each value of a byte.
    """
    e = Emitter("distinct", 7)
    ids, count, seen, out, spare, counts, digits = e.arguments
    make, one = e.make, number(1)
    last = make.sub(count, one)
    with e.loop(count, carried=[number(0)]) as each:
        ahead = _at_most(e, make.add(each.index, number(AHEAD_BITS)), last)
        soon, _ = _bit(e, e.word(ids, ahead))
        e.prefetch(e.place(seen, soon, WORD_BYTES), write=True)
        row = e.word(ids, each.index)
        place, bit = _bit(e, row)
        address = e.place(seen, place, WORD_BYTES)
        known = e.load(I64, address)
        new = make.icmp_signed("==", make.and_(bit, known), number(0))
        e.store(make.or_(known, bit), address)
        e.store(row, e.place(spare, each.carried[0], WORD_BYTES))
        each.following = [make.add(each.carried[0], make.zext(new, I64))]
    total = each.carried[0]

    def counter(source: Value, index: Value, digit: Value) -> tuple[Value, Value, Value]:
        """A row, its counter's address, and its counter."""
        row = e.word(source, index)
        value = make.and_(make.lshr(row, make.mul(digit, number(8))), number(DIGITS - 1))
        at = e.place(counts, value, WORD_BYTES)
        return row, at, e.load(I64, at)

    with e.loop(digits, carried=[spare, out]) as digit:
        source, target = digit.carried
        with e.loop(number(DIGITS)) as each:
            e.store(number(0), e.place(counts, each.index, WORD_BYTES))
        with e.loop(total) as each:
            _, at, before = counter(source, each.index, digit.index)
            e.store(make.add(before, one), at)
        with e.loop(number(DIGITS), carried=[number(0)]) as each:
            at = e.place(counts, each.index, WORD_BYTES)
            each.following = [make.add(each.carried[0], e.load(I64, at))]
            e.store(each.carried[0], at)
        with e.loop(total) as each:
            row, at, before = counter(source, each.index, digit.index)
            e.store(row, e.place(target, before, WORD_BYTES))
            e.store(make.add(before, one), at)
        digit.following = [target, source]
    return e.end(total)


def forget() -> Emitter:
    """(ids, count, seen): clears the bits."""
    e = Emitter("forget", 3)
    ids, count, seen = e.arguments
    with e.loop(count) as each:
        place, bit = _bit(e, e.word(ids, each.index))
        address = e.place(seen, place, WORD_BYTES)
        e.store(e.make.and_(e.load(I64, address), e.make.not_(bit)), address)
    return e.end()


def _row(
    e: Emitter,
    base: Value,
    indices: Value,
    count: Value,
    scale: Value,
    width: Value,
    index: Value,
    *,
    write: bool,
) -> Value:
    """The address of row `index`. Prefetches the row that is `AHEAD_ROWS` ahead."""
    make = e.make
    last = make.sub(count, number(1))
    ahead = _at_most(e, make.add(index, number(AHEAD_ROWS)), last)
    soon = e.place(base, e.word(indices, ahead), scale)
    most = number(AHEAD_BYTES)
    with e.loop(make.select(make.icmp_signed("<", width, most), width, most), LINE_BYTES) as lines:
        e.prefetch(make.add(soon, lines.index), write=write)
    return e.place(base, e.word(indices, index), scale)


def _at_most(e: Emitter, value: Value, most: Value) -> Value:
    return e.make.select(e.make.icmp_signed("<", value, most), value, most)


def _bit(e: Emitter, index: Value) -> tuple[Value, Value]:
    """The number of the word with bit `index` in a bitmap, and a word with only that bit set."""
    inner = e.make.and_(index, number(63))
    return e.make.lshr(index, number(6)), e.make.shl(number(1), inner)
