"""Products in GF(2^8) of a constant and a vector of bytes.

A product is linear in the bits of one factor: weight * x = XOR_j x_j · (weight * 2^j), where x_j is bit j of
x. So each weight is one 8 x 8 matrix of bits, and there are three ways to apply it to many bytes:

- `affine`: processors with GFNI multiply 64, 32 or 16 bytes by a matrix of bits in one instruction.
- `shuffle`: with SSSE3 or more, one instruction looks 16 to 64 bytes up in a table of 16: one table for the
  low four bits of x, one for the high four, as in Plank, Greenan, Miller: Screaming Fast Galois Field
  Arithmetic Using Intel SIMD Instructions, FAST 2013.
- `planes`: on every processor, bit by bit as in the formula.

Must not know: where the bytes lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ecemb.kernels.contract import POLYNOMIAL

from .llvm import I8, I64, Emitter, Value, features, ir, number, vector

Way = Literal["affine", "shuffle", "planes"]


@dataclass(frozen=True)
class Products:
    """A way to multiply, in vectors of 16, 32 or 64 bytes."""

    way: Way
    vector_bytes: int

    def constants(self) -> NDArray[np.uint8]:
        """Returns uint8 [256, c]: the bytes that `prepare` reads for each weight."""
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
        full = max(size, 16)  # the shortest vector of the instructions
        wide = _resized(emitter, factor, full)
        fitting = [_resized(emitter, constant, full) for constant in prepared]
        if self.way == "affine":
            name = f"llvm.x86.vgf2p8affineqb.{8 * full}"
            product = emitter.call(name, wide.type, wide, fitting[0], ir.Constant(I8, 0))
        else:
            low = make.and_(wide, ir.Constant(wide.type, [15] * full))
            high = make.lshr(wide, ir.Constant(wide.type, [4] * full))
            name = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}[full]
            looked_up = (
                emitter.call(f"llvm.x86.{name}", wide.type, table, index)
                for table, index in zip(fitting, (low, high), strict=True)
            )
            product = make.xor(*looked_up)
        return _resized(emitter, product, size)


def available() -> list[Products]:
    """Returns the ways that this processor supports, fastest first."""
    has = features()
    wide = {64} if "avx512bw" in has else set[int]()
    wide |= {32} if "avx2" in has else set[int]()
    sizes = sorted(wide, reverse=True)
    found = [Products("affine", size) for size in sizes if "gfni" in has]
    found += [Products("shuffle", size) for size in (*sizes, 16) if "ssse3" in has]
    return [*found, Products("planes", max(wide, default=16))]


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
    """A vector of `size` bytes that begins with those of `value`; bytes beyond its end are arbitrary."""
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
