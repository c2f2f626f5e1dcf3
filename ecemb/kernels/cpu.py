"""Kernels for the CPU: loops compiled for this machine's vector units, on one thread or several.

Owns: the loops, the choice of loops for each operation, and products in GF(2^8). The loops are compiled when
the kernels are made, in some tens of milliseconds, and run without the interpreter's lock. The contract
checks all arguments; the loops check nothing. All arguments of loops are integers: addresses, and sizes in
bytes or rows.

Row i is at the address base + indices[i] · scale. Loops prefetch some rows ahead, since most of the time for
a scattered row is spent waiting for memory.

A product is linear in the bits of one factor: weight * x = XOR_j x_j · (weight * 2^j), where x_j is bit j of
x. So each weight is one 8 x 8 matrix of bits, and there are three ways to apply it to many bytes:

- `affine`: processors with GFNI multiply 64, 32 or 16 bytes by a matrix of bits in one instruction.
- `shuffle`: with SSSE3 or more, one instruction looks 16 to 64 bytes up in a table of 16: one table for the
  low four bits of x, one for the high four, as in Plank, Greenan, Miller: Screaming Fast Galois Field
  Arithmetic Using Intel SIMD Instructions, FAST 2013. On aarch64, NEON looks 16 bytes up.
- `planes`: on every processor, bit by bit as in the formula.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from .contract import POLYNOMIAL, ROWS_PER_WORD, Columns, Elements, Ids, Kernels, RowSet, Words, are_apart
from .llvm import I8, I64, LINE_BYTES, Emitter, Value, compiled, features, ir, number, vector


@final
class Cpu(Kernels):
    """Kernels compiled for this machine's vector units.

    Args:
        products: how to multiply; by default the fastest way that this processor supports.
        threads: threads that share large operations. `scatter_` is shared if its rows ascend, since it may
            otherwise write to a row twice. `distinct` and `forget_` are shared by ranges of rows, so that
            each word of the set has one thread. `update_rows_` uses one thread, since it changes rows in
            order, and `update_lanes_` one for each lane.

    Attributes:
        products: the way to multiply.
    """

    name: ClassVar[str] = "cpu"

    def __init__(self, products: Products | None = None, threads: int = 1) -> None:
        super().__init__(threads)
        self.products: Products = products or available()[0]
        self._constants, self._start = self.products.constants(), np.zeros(1, np.int64)
        self._weights, self._zero = _address(self._constants), _address(self._start)
        self._copy, self._put, self._collect, self._collect_range, self._drop, *adds = _loops(self.products)
        self._add, self._multiply, self._add_journalled, self._multiply_journalled = adds

    def _scatter(self, table: Elements, ids: Ids, records: Elements, column: int) -> None:
        width, stride = table.shape[1] * table.itemsize, records.shape[1] * records.itemsize
        base, places, source = _address(table), _address(ids), _address(records) + column * records.itemsize

        def some(first: int, stop: int) -> None:
            at = source + first * stride
            self._put(base, places + 8 * first, stop - first, width, width, at, stride)

        if self._team.parts(ids.size, 2 * width) > 1 and _ascend(ids):
            self._team.share(ids.size, 2 * width, some)
        else:
            some(0, ids.size)

    def _gather_records(self, columns: Columns, ids: Ids, out: Words) -> None:
        pack, _ = self._record_loops(columns.widths)
        self._share_records(pack, columns, ids, _address(out))

    def _change_records(self, columns: Columns, ids: Ids, old: Words, out: Words) -> None:
        _, differ = self._record_loops(columns.widths)
        self._share_records(differ, columns, ids, _address(out), _address(old))

    def has_loops(self, widths: tuple[int, ...]) -> bool:
        """As in `Kernels`: whether this process has compiled the loops, or the one it was forked from."""
        return (self.products.vector_bytes, widths) in _record_code

    def prepare(self, widths: tuple[int, ...]) -> None:
        """As in `Kernels`: compiles the loops, in 20 to 30 ms."""
        self._record_loops(widths)

    def _record_loops(self, widths: tuple[int, ...]) -> list[Callable[..., int]]:
        unit = self.products.vector_bytes
        if (found := _record_code.get((unit, widths))) is None:
            loops = (record_loop(unit, widths, changes=one) for one in (False, True))
            found = _record_code[unit, widths] = compiled(*loops)
        return found

    def _share_records(self, loop: Callable[..., int], columns: Columns, ids: Ids, *records: int) -> None:
        bases, places, stride = _address(columns.addresses), _address(ids), 8 * columns.words

        def some(first: int, stop: int) -> None:
            loop(bases, places + 8 * first, stop - first, *(at + first * stride for at in records))

        self._team.share(ids.size, (1 + len(records)) * stride, some)

    def _distinct(self, ids: Ids, rows: RowSet, out: Ids) -> int:
        parts = self._team.parts(ids.size, ID_BYTES)
        if parts < 2:
            return self._distinct_in(ids, rows, out)
        found = [out] * parts
        if _ascend(ids):
            edges = _word_edges(ids, parts)

            def some(part: int) -> None:
                own = ids[edges[part] : edges[part + 1]]
                new = np.empty(own.size, np.int64)
                found[part] = new[: self._distinct_in(own, rows, new)]

        else:
            bounds = _row_bounds(ids, rows.rows, parts)

            def some(part: int) -> None:
                new = np.empty(ids.size, np.int64)
                found[part] = new[: self._distinct_in(ids, rows, new, *bounds[part : part + 2])]

        self._team.each(parts, some)
        total = sum(new.size for new in found)
        np.concatenate(found, out=out[:total])
        return total

    def _distinct_in(self, ids: Ids, rows: RowSet, out: Ids, *bounds: int) -> int:
        """Does `_distinct` by one thread, for all of `ids` or for those within `bounds`."""
        digits = -(-rows.rows.bit_length() // 8) | 1
        spare = np.empty(ids.size + 2 + DIGITS, np.int64)
        places = _address(spare), _address(spare) + 8 * (ids.size + 2)
        collect = self._collect_range if bounds else self._collect
        return collect(_address(ids), ids.size, _address(rows.seen), _address(out), *places, digits, *bounds)

    def _forget(self, rows: RowSet, ids: Ids) -> None:
        def some(first: int, stop: int) -> None:
            self._drop(_address(ids) + 8 * first, stop - first, _address(rows.seen))

        parts = self._team.parts(ids.size, ID_BYTES)
        if parts < 2 or not _ascend(ids):
            some(0, ids.size)
            return
        edges = _word_edges(ids, parts)
        self._team.each(parts, lambda part: some(*edges[part : part + 2]))

    def _gather_rows(self, src: Words, offsets: Ids, out: Words) -> None:
        base, places, count, scale, width = _places(src, offsets, out)
        target = _address(out)

        def some(first: int, stop: int) -> None:
            at = target + first * width
            self._copy(base, places + 8 * first, stop - first, scale, width, at, width)

        self._team.share(count, 2 * width, some)

    def _mul_add_rows(self, dst: Words, offsets: Ids, src: Words, weight: int) -> None:
        base, places, count, scale, width = _places(dst, offsets, src)
        source = _address(src)

        def some(first: int, stop: int) -> None:
            self._add_weighted(
                weight, base, places + 8 * first, stop - first, scale, width, source + first * width
            )

        if self._team.threads > 1 and not are_apart(offsets, src.shape[1]):
            some(0, count)
        else:
            self._team.share(count, 3 * width, some)

    def _update_rows(
        self, dst: Words, offsets: Ids, src: Words, weight: int, saved: Words, mark: Ids
    ) -> None:
        arguments = (*_places(dst, offsets, src), _address(src))
        journal = (_address(saved), saved.strides[0], _address(mark))
        if weight == 1:
            self._add_journalled(*arguments, 0, *journal)
        else:
            constants = self._weights + int(weight) * self._constants.shape[1]
            self._multiply_journalled(*arguments, constants, *journal)

    def _mul_add_block(self, dst: Words, src: Words, weight: int) -> None:
        target, source = _address(dst), _address(src)

        def some(first: int, stop: int) -> None:  # words, as one row at offset 0
            size = 8 * (stop - first)
            self._add_weighted(weight, target + 8 * first, self._zero, 1, 8, size, source + 8 * first)

        self._team.share(src.size, 3 * 8, some)

    def _add_weighted(self, weight: int, *arguments: int) -> None:
        if weight == 1:
            self._add(*arguments, 0)
        else:
            self._multiply(*arguments, self._weights + int(weight) * self._constants.shape[1])

    def _dot(self, blocks: Sequence[Words], weights: NDArray[np.uint8], outs: Sequence[Words]) -> None:
        for row in range(0, len(outs), MOST_OUTPUTS):
            end = row + MOST_OUTPUTS
            self._dot_to_few(blocks, weights[row:end], outs[row:end])

    def _dot_to_few(self, blocks: Sequence[Words], weights: NDArray[np.uint8], outs: Sequence[Words]) -> None:
        combine, constants = _combination(self.products, len(outs)), self._constants[weights]
        sources, targets = (np.array([_address(one) for one in many], np.int64) for many in (blocks, outs))
        arguments = _address(constants), constants.shape[-1], len(blocks)

        def some(first: int, stop: int) -> None:
            starts, ends = sources + 8 * first, targets + 8 * first
            combine(_address(starts), *arguments, _address(ends), 8 * (stop - first))

        self._team.share(outs[0].size, 8 * (len(blocks) + len(outs)), some)


# Compiled once in a process, and kept by processes that are forked. The widths of records are known late, and
# most processes never combine blocks.


@functools.cache
def _loops(products: Products) -> list[Callable[..., int]]:
    unit = products.vector_bytes
    return compiled(
        move_loop(unit, put=False),
        move_loop(unit, put=True),
        distinct_loop(unit, ranged=False),
        distinct_loop(unit, ranged=True),
        forget_loop(),
        add_loop(unit, None),
        add_loop(unit, products),
        add_loop(unit, None, journalled=True),
        add_loop(unit, products, journalled=True),
    )


_record_code: dict[tuple[int, tuple[int, ...]], list[Callable[..., int]]] = {}
"""Bytes of a vector, widths of a record's columns -> their two loops."""


@functools.cache
def _combination(products: Products, outputs: int) -> Callable[..., int]:
    return compiled(dot_loop(products, outputs))[0]


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]


def _ascend(ids: Ids) -> bool:
    """Whether each row is after the one before it."""
    return bool(np.all(ids[1:] > ids[:-1]))


def _word_edges(ids: Ids, parts: int) -> list[int]:
    """Cuts ascending rows into parts of about equal length that share no word of a set."""
    edges = [0]
    for part in range(1, parts):
        first = ids[ids.size * part // parts] // ROWS_PER_WORD * ROWS_PER_WORD
        edges.append(max(edges[-1], int(np.searchsorted(ids, first))))
    return [*edges, ids.size]


def _row_bounds(ids: Ids, rows: int, parts: int) -> list[int]:
    """Cuts 0..rows-1 into ranges that share no word of a set, and have about as many of `ids` each."""
    sample = np.sort(ids[:: max(1, ids.size // SAMPLE)])
    inner = [int(sample[sample.size * part // parts]) // ROWS_PER_WORD for part in range(1, parts)]
    return [0, *(ROWS_PER_WORD * word for word in inner), rows]


def _places(words: Words, offsets: Ids, rows: Words) -> tuple[int, int, int, int, int]:
    return _address(words), _address(offsets), offsets.size, 8, 8 * rows.shape[1]


WORD_BYTES: Final = number(8)

AHEAD_ROWS: Final = 24
AHEAD_BITS: Final = 16
"""Rows by which the words of a bitmap are prefetched ahead."""

AHEAD_BYTES: Final = 1024
"""Bytes of a row that are prefetched. The processor itself prefetches the rest of a long row."""

ID_BYTES: Final = 64
"""Bytes of a copy that take as long as to look a row up in a set and to sort it."""

SAMPLE: Final = 4096
"""Rows of a call from which `distinct` chooses ranges of rows for its threads."""

DIGITS: Final = 256
"""Number of values of a byte, the digit of the radix sort of rows."""

MOST_OUTPUTS: Final = 4
"""Number of outputs that `dot` computes at the same time, with their sums in registers."""


def move_loop(unit: int, *, put: bool) -> Emitter:
    """(base, indices, count, scale, width, records, stride): copies rows of `width` bytes.

    With `put` from the record at records + i · stride to row i, otherwise from row i to the record.
    """
    e = Emitter("put" if put else "copy", 7)
    base, indices, count, scale, width, records, stride = e.arguments
    with e.loop(count) as rows:
        row = _row(e, base, indices, count, scale, width, rows.index, write=put)
        record = e.place(records, rows.index, stride)
        source, target = (record, row) if put else (row, record)

        def act(at: Value, size: int) -> None:
            e.store(e.load(vector(size), e.make.add(source, at)), e.make.add(target, at))

        e.pieces(width, unit, 1, act)
    return e.end()


def record_loop(unit: int, widths: Sequence[int], *, changes: bool) -> Emitter:
    """(columns, indices, count, out): out[i] = the record of row i, from columns of these widths in bytes.

    `columns` has the address of row 0 of each column; the rows of a column follow each other without gaps. A
    record is padded with zeros to words. With `changes` there is one more argument, old: out[i] = the record
    XOR old[i]. The widths are constants in the code, which takes half the time of a `move_loop` for each
    column.
    """
    e = Emitter("differ" if changes else "pack", 5 if changes else 4)
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
    """Copies `width` bytes of `source` to the first of `records`, XOR those of the second if there is one."""
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
    """Cuts `size` bytes into pieces as `Emitter.pieces` does: yields the begin and the size of each."""
    at = 0
    while at < size:
        piece = min(largest, 1 << (size - at).bit_length() - 1)
        yield at, piece
        at += piece


def add_loop(unit: int, products: Products | None, *, journalled: bool = False) -> Emitter:
    """(base, indices, count, scale, width, src, constants): row i ^= weight * src[i · width ..].

    Without `products` the weight is 1, and `constants` is not read. With `journalled` there are three more
    arguments, saved, stride and mark, an address. Row i has the number that is stored at `mark` at the
    beginning, plus i + 1. Before row i changes, it is copied to saved + (number mod 2) · stride, and then its
    number is stored at `mark`.
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
    """Copies `width` bytes of a row to the address `place`."""

    def act(at: Value, size: int) -> None:
        for part in range(0, size, unit):
            first = e.make.add(at, number(part))
            kind = vector(min(size, unit))
            e.store(e.load(kind, e.make.add(row, first)), e.make.add(place, first))

    e.pieces(width, 2 * unit, 8, act)


def dot_loop(products: Products, outputs: int) -> Emitter:
    """(blocks, constants, stride, count, outs, size): outs[q] = XOR_j weight[q, j] * blocks[j], q < outputs.

    `blocks` and `outs` are arrays of addresses; blocks have `size` bytes. `constants` is an array whose
    element q · count + j, of `stride` bytes, has the constants of weight[q, j].
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


def distinct_loop(unit: int, *, ranged: bool) -> Emitter:
    """(ids, count, seen, out, spare, counts, digits): returns the number of words written to out, ascending.

    Tests and sets a bit for each id. Every id is stored to `spare`, and the next overwrites it unless it is
    new: without a branch, which would often be mispredicted. So `spare` has space for all ids and one more.
    With `ranged` there are two more arguments, low and high: ids outside low..high-1 are left out, and their
    bits are left alone, since another thread may have them. After its space for ids, `spare` then has the
    word that is read and written in place of these bits.
    The new rows are then sorted, unless they ascend already, by a radix sort on their lowest `digits` bytes,
    an odd number: from `spare` to `out`, back to `spare`, and so on. `counts` has a word for each value of a
    byte.
    """
    e = Emitter("distinct", 9 if ranged else 7)
    ids, count, seen, out, spare, counts, digits, *bounds = e.arguments
    make, one, none = e.make, number(1), number(0)
    last = make.sub(count, one)
    elsewhere = e.place(spare, make.add(count, one), WORD_BYTES)

    def word_of(row: Value) -> tuple[Value, Value, Value]:
        """The address of the word that has a row's bit, the bit, and whether the row counts."""
        place, bit = _bit(e, row)
        address = e.place(seen, place, WORD_BYTES)
        if not ranged:
            return address, bit, ir.Constant(ir.IntType(1), 1)
        low, high = bounds
        counts = make.icmp_unsigned("<", make.sub(row, low), make.sub(high, low))
        return make.select(counts, address, elsewhere), bit, counts

    with e.loop(count, carried=[none, number(-1), one]) as each:
        found, newest, ascend = each.carried
        ahead = _at_most(e, make.add(each.index, number(AHEAD_BITS)), last)
        e.prefetch(word_of(e.word(ids, ahead))[0], write=True)
        row = e.word(ids, each.index)
        address, bit, does_count = word_of(row)
        known = e.load(I64, address)
        is_new = make.and_(does_count, make.icmp_signed("==", make.and_(bit, known), none))
        e.store(make.or_(known, bit), address)
        e.store(row, e.place(spare, found, WORD_BYTES))
        is_after = make.zext(make.icmp_signed(">", row, newest), I64)
        each.following = [
            make.add(found, make.zext(is_new, I64)),
            make.select(is_new, row, newest),
            make.select(is_new, make.and_(ascend, is_after), ascend),
        ]
    total, _, ascend = each.carried

    def counter(source: Value, index: Value, digit: Value) -> tuple[Value, Value, Value]:
        """A row, its counter's address, and its counter."""
        row = e.word(source, index)
        value = make.and_(make.lshr(row, make.mul(digit, number(8))), number(DIGITS - 1))
        at = e.place(counts, value, WORD_BYTES)
        return row, at, e.load(I64, at)

    def copy(at: Value, piece: int) -> None:
        e.store(e.load(vector(piece), make.add(spare, at)), make.add(out, at))

    is_sorted = make.icmp_signed("!=", ascend, none)
    e.pieces(make.select(is_sorted, make.mul(total, WORD_BYTES), none), unit, 8, copy)
    with e.loop(make.select(is_sorted, none, digits), carried=[spare, out]) as digit:
        source, target = digit.carried
        with e.loop(number(DIGITS)) as each:
            e.store(none, e.place(counts, each.index, WORD_BYTES))
        with e.loop(total) as each:
            _, at, before = counter(source, each.index, digit.index)
            e.store(make.add(before, one), at)
        with e.loop(number(DIGITS), carried=[none]) as each:
            at = e.place(counts, each.index, WORD_BYTES)
            each.following = [make.add(each.carried[0], e.load(I64, at))]
            e.store(each.carried[0], at)
        with e.loop(total) as each:
            row, at, before = counter(source, each.index, digit.index)
            e.store(row, e.place(target, before, WORD_BYTES))
            e.store(make.add(before, one), at)
        digit.following = [target, source]
    return e.end(total)


def forget_loop() -> Emitter:
    """(ids, count, seen): clears the bit of each id in the bitmap `seen`."""
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
    """The address of row `index`. Prefetches the row that comes `AHEAD_ROWS` later."""
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


Way = Literal["affine", "shuffle", "planes"]

PSHUFB: Final = {16: "x86.ssse3.pshuf.b.128", 32: "x86.avx2.pshuf.b", 64: "x86.avx512.pshuf.b.512"}
"""LLVM's names of x86's instructions that look bytes up in a table of 16, by the size of their vectors."""
TBL: Final = {16: "aarch64.neon.tbl1.v16i8"}
"""The same for aarch64."""


@dataclass(frozen=True)
class Products:
    """A way to multiply in GF(2^8), in vectors of 16, 32 or 64 bytes.

    Attributes:
        way: which one of the three.
        vector_bytes: bytes of a vector.
        lookups: for `shuffle`, the processor's instruction that looks bytes up, for each size of a vector.
    """

    way: Way
    vector_bytes: int
    lookups: Mapping[int, str] = field(default_factory=lambda: PSHUFB, repr=False, compare=False)

    def constants(self) -> NDArray[np.uint8]:
        """Returns uint8 [256, c]: for each weight the bytes that `prepare` reads."""
        return _CONSTANTS[self.way]()

    def prepare(self, emitter: Emitter, constants: Value) -> list[Value]:
        """Loads the constants of one weight from their address into vectors."""
        make = emitter.make
        if self.way == "affine":
            return [_repeated(emitter, constants, 8, self.vector_bytes)]
        if self.way == "shuffle":
            halves = (constants, make.add(constants, number(16)))
            return [_repeated(emitter, half, 16, self.vector_bytes) for half in halves]
        bits = (make.add(constants, number(bit)) for bit in range(8))
        return [_repeated(emitter, bit, 1, self.vector_bytes) for bit in bits]

    def multiply(self, emitter: Emitter, prepared: list[Value], factor: Value) -> Value:
        """Multiplies each byte of a vector, of 8 bytes or more, by the weight of `prepared`."""
        make, size = emitter.make, factor.type.count
        if self.way == "planes":
            product = ir.Constant(factor.type, None)
            for bit, constant in enumerate(prepared):
                mask = ir.Constant(factor.type, [1 << bit] * size)
                chosen = make.icmp_unsigned("!=", make.and_(factor, mask), ir.Constant(factor.type, None))
                taken = make.and_(make.sext(chosen, factor.type), _resized(emitter, constant, size))
                product = make.xor(product, taken)
            return product
        full = max(size, 16)  # the instructions have vectors of 16 bytes or more
        wide = _resized(emitter, factor, full)
        fitting = [_resized(emitter, constant, full) for constant in prepared]
        if self.way == "affine":
            name = f"llvm.x86.vgf2p8affineqb.{8 * full}"
            product = emitter.call(name, wide.type, wide, fitting[0], ir.Constant(I8, 0))
        else:
            low = make.and_(wide, ir.Constant(wide.type, [15] * full))
            high = make.lshr(wide, ir.Constant(wide.type, [4] * full))
            looked_up = (
                emitter.call(f"llvm.{self.lookups[full]}", wide.type, table, index)
                for table, index in zip(fitting, (low, high), strict=True)
            )
            product = make.xor(*looked_up)
        return _resized(emitter, product, size)


def available() -> list[Products]:
    """Returns the ways that this processor supports, fastest first."""
    has = features()
    if "neon" in has:
        return [Products("shuffle", 16, TBL), Products("planes", 16)]
    sizes = [size for size, feature in ((64, "avx512bw"), (32, "avx2")) if feature in has]
    found = [Products("affine", size) for size in sizes if "gfni" in has]
    found += [Products("shuffle", size) for size in (*sizes, 16) if "ssse3" in has]
    return [*found, Products("planes", max(sizes, default=16))]


def _repeated(emitter: Emitter, address: Value, given: int, size: int) -> Value:
    """A vector of `size` bytes that repeats the `given` bytes at an address."""
    make = emitter.make
    kind, lanes = {1: (I8, size), 8: (I64, size // 8), 16: (vector(16), 1)}[given]
    loaded = emitter.load(kind, address)
    if given == 16:
        return _shuffled(emitter, loaded, [i % 16 for i in range(size)])
    undefined = ir.Constant(ir.VectorType(kind, lanes), ir.Undefined)
    one = make.insert_element(undefined, loaded, number(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), None)
    return make.bitcast(make.shuffle_vector(one, undefined, zeros), vector(size))


def _resized(emitter: Emitter, value: Value, size: int) -> Value:
    """A vector of `size` bytes that begins with those of `value`; further bytes are arbitrary."""
    count = value.type.count
    return value if count == size else _shuffled(emitter, value, [i % count for i in range(size)])


def _shuffled(emitter: Emitter, value: Value, order: list[int]) -> Value:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
    return emitter.make.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def _plane_constants() -> NDArray[np.uint8]:
    """Returns uint8 [256, 8]: `weight * 2^j` at [weight, j]."""
    table = np.empty((256, 8), np.uint8)
    power = np.arange(256)
    for j in range(8):
        table[:, j] = power
        power = (power << 1) ^ np.where(power > 127, POLYNOMIAL, 0)
    return table


def _affine_constants() -> NDArray[np.uint8]:
    """Returns uint8 [256, 8]: byte 7 - i has the bits of x that add up to bit i of weight * x."""
    bits = np.unpackbits(_plane_constants()[:, :, None], axis=2)  # [weight, j, 7 - i]
    return np.packbits(bits.transpose(0, 2, 1), axis=2, bitorder="little")[:, :, 0]


def _shuffle_constants() -> NDArray[np.uint8]:
    """Returns uint8 [256, 32]: weight times 0..15, and weight times 0, 16 .. 240."""
    planes = _plane_constants()
    table = np.zeros((256, 2, 16), np.uint8)
    for bit in range(4):
        chosen = (np.arange(16) >> bit & 1).astype(np.uint8)
        table ^= planes[:, [bit, bit + 4], None] * chosen
    return table.reshape(256, 32)


_CONSTANTS: Final = {
    "affine": _affine_constants,
    "shuffle": _shuffle_constants,
    "planes": _plane_constants,
}
