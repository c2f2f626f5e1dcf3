"""The loops of the compiled kernels. All arguments are integers: addresses, and sizes in bytes or rows.

Row i lies at base + indices[i] · scale. Loops prefetch some rows ahead, since most of the time of a scattered
row is waiting for memory. Nothing is checked here.
"""

from __future__ import annotations

from typing import Final

from .gf_products import Products
from .llvm import I64, LINE_BYTES, Emitter, Value, ir, number, vector

WORD_BYTES: Final = number(8)

AHEAD_ROWS: Final = 24
AHEAD_BITS: Final = 16
"""How far ahead the words of a bitmap are prefetched, in rows."""

AHEAD_BYTES: Final = 1024
"""Bytes of a row that are prefetched. The processor itself prefetches the rest of a long row."""

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
    """(ids, count, seen, out): returns the number of words written to out, in the order of ids.

    Tests a bit per id, and writes nothing for those that are known.
    """
    e = Emitter("distinct", 4)
    ids, count, seen, out = e.arguments
    last = e.make.sub(count, number(1))
    with e.loop(count, carried=[number(0)]) as each:
        ahead = _at_most(e, e.make.add(each.index, number(AHEAD_BITS)), last)
        soon, _ = _bit(e, e.word(ids, ahead))
        e.prefetch(e.place(seen, soon, WORD_BYTES), write=True)
        row = e.word(ids, each.index)
        place, bit = _bit(e, row)
        address = e.place(seen, place, WORD_BYTES)
        known = e.load(I64, address)
        new = e.make.icmp_signed("==", e.make.and_(bit, known), number(0))
        with e.make.if_then(new):
            e.store(e.make.or_(known, bit), address)
            e.store(row, e.place(out, each.carried[0], WORD_BYTES))
        each.following = [e.make.add(each.carried[0], e.make.zext(new, I64))]
    return e.end(each.carried[0])


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
