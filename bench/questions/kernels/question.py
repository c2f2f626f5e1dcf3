"""How fast is parity encoded, updated and decoded, and rows moved, against zfec and ISA-L?

- `update_ns_per_row`: the time for the delta of one row, old XOR new, to reach r parity blocks by r
  weighted additions. `access` says where the rows lie in parity: `scattered` at random, as in
  training, where ISA-L's `ec_encode_data_update` is called for each row, by a compiled loop; or
  `packed` side by side, where it is called once. zfec can't update: it encodes again from all k = 4
  blocks, which lie packed.
- `encode_gb_per_s`, `decode_gb_per_s`: the data bytes of a stripe, whose blocks don't fit in the
  caches, over the time to make its r parity blocks, or to make min(r, k) lost data blocks of what is
  left.
- `kernel_rows_per_s`, `kernel_gb_per_s`: one kernel alone, in rows and in bytes of rows; `numpy` is
  what one would write without it. `distinct` finds the rows of a batch that are new, and forgets
  them again, for `np.unique`.
- `update_speedup`, `encode_speedup`, `decode_speedup`, `kernel_speedup`: the time of the kernel
  named `over`, divided by that of `kernel`, repeat by repeat.

Everything runs on one thread. Each result is compared with the field's algebra before it is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import zfec
from numpy.typing import NDArray

from bench.harness.isal import Isal, IsalUnavailable, load
from bench.harness.result import Arguments, Label, Row, WrongResult, summary
from bench.harness.timing import interleaved
from ecemb.coding.code import Code, multiply
from ecemb.kernels import contract
from ecemb.kernels.contract import Words

Bytes = NDArray[np.uint8]
Call = Callable[[], object]

MIB = 1 << 20
OURS = "cpu"
UPDATE_CODES = (Code(5, 4), Code(6, 4), Code(8, 4))
ENCODE_CODES = (Code(4, 3), Code(4, 2), Code(6, 4), Code(12, 10), Code(14, 10))
CHANGED_BLOCK = 1
"""The data block whose rows change in an update: its weights are neither 0 nor 1 when r >= 2."""


@dataclass(frozen=True)
class Scale:
    """How much is measured, and how often.

    Attributes:
        table_bytes: Of a table, and of a parity block that is updated.
        touched_rows: Rows in one call.
        reference_rows: The same for the reference kernels, which take their time.
        block_bytes: Of each block of a stripe that is encoded or decoded.
        reference_bytes: The same for the reference kernels.
        row_bytes: Sizes of a row.
        repeats: Measurements of each call.
        at_least_s: Time that a measurement takes.
    """

    table_bytes: int = 64 * MIB
    touched_rows: int = 8192
    reference_rows: int = 128
    block_bytes: int = 16 * MIB
    reference_bytes: int = MIB // 8
    row_bytes: tuple[int, ...] = (64, 128, 256, 512)
    repeats: int = 15
    at_least_s: float = 0.02


FULL = Scale()
QUICK = Scale(
    table_bytes=2 * MIB,
    touched_rows=512,
    reference_rows=32,
    block_bytes=MIB // 4,
    reference_bytes=MIB // 64,
    row_bytes=(256,),
    repeats=3,
    at_least_s=0.002,
)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale = QUICK if arguments.quick else FULL
    rng = np.random.default_rng(arguments.seed)
    try:
        intel = load()
    except IsalUnavailable as error:
        print(f"skipped: ISA-L: {error}", file=sys.stderr)
        intel = None
    rows: list[Row] = []
    for row_bytes in scale.row_bytes:
        for code in UPDATE_CODES:
            rows += update(scale, code, row_bytes, intel, rng)
    for code in ENCODE_CODES:
        rows += encode(scale, code, intel, rng)
        rows += decode(scale, code, intel, rng)
    for row_bytes in scale.row_bytes:
        rows += single_kernels(scale, row_bytes, rng)
    return rows + distinct_rows(scale, rng)


@dataclass(frozen=True)
class Case:
    """One call to be timed, and how many rows or bytes it handles."""

    call: Call
    amount: int


def update(
    scale: Scale, code: Code, row_bytes: int, intel: Isal | None, rng: np.random.Generator
) -> list[Row]:
    """Measures `update_ns_per_row` for one code and row size."""
    generator, count, width = code.generator(), scale.touched_rows, row_bytes // 8
    rows, weights = generator[code.k :], generator[code.k :, CHANGED_BLOCK]
    data = [noise(rng, count * row_bytes) for _ in range(code.k)]
    change = data[CHANGED_BLOCK]
    delta = words(change).reshape(count, width)
    cases: dict[tuple[str, str], Case] = {}

    parity = [noise(rng, scale.table_bytes) for _ in weights]
    ids = rng.choice(scale.table_bytes // row_bytes, count, replace=False).astype(np.int64)
    offsets = ids * width
    calls = {
        name: _scattered(name, parity, offsets[:some], delta[:some], weights)
        for name, some in (("reference", scale.reference_rows), (OURS, count))
    }
    if intel is not None:
        tables = intel.tables(rows)
        calls["isal"] = intel.update_rows(tables, code.k, CHANGED_BLOCK, change, parity, ids * row_bytes)
    for name, call in calls.items():
        some = scale.reference_rows if name == "reference" else count
        wanted = [block.copy() for block in parity]
        for block, weight in zip(wanted, weights, strict=True):
            products = scaled(weight, change[: some * row_bytes])
            block.reshape(-1, row_bytes)[ids[:some]] ^= products.reshape(-1, row_bytes)
        verified(f"update by {name}, scattered", call, parity, wanted)
        cases[name, "scattered"] = Case(call, some)

    packed = [noise(rng, count * row_bytes) for _ in weights]
    calls = {OURS: _packed(delta, packed, weights)}
    if intel is not None:
        calls["isal"] = intel.update(intel.tables(rows), code.k, CHANGED_BLOCK, change, packed)
    for name, call in calls.items():
        additions = (scaled(weight, change) for weight in weights)
        wanted = [block ^ added for block, added in zip(packed, additions, strict=True)]
        verified(f"update by {name}, packed", call, packed, wanted)
        cases[name, "packed"] = Case(call, count)
    cases["zfec", "packed"] = Case(zfec_encode(code, data), count)

    seconds = timed(scale, cases)
    labels: dict[str, Label] = {"row_bytes": row_bytes, "r": code.r}
    measured = [
        summary(
            "update_ns_per_row",
            "ns",
            [s * 1e9 / cases[name, access].amount for s in taken],
            kernel=name,
            **labels,
            access=access,
        )
        for (name, access), taken in seconds.items()
    ]
    for access in ("scattered", "packed"):
        rivals = {name: taken for (name, at), taken in seconds.items() if at == access or name == "zfec"}
        measured += speedups("update_speedup", rivals, **labels, access=access)
    return measured


def _scattered(
    name: str, parity: Sequence[Bytes], offsets: NDArray[np.int64], delta: Words, weights: Bytes
) -> Call:
    work, blocks = contract.get_kernels(name), [words(block) for block in parity]

    def call() -> None:
        for block, weight in zip(blocks, weights, strict=True):
            work.mul_add_rows_(block, offsets, delta, int(weight))

    return call


def _packed(delta: Words, parity: Sequence[Bytes], weights: Bytes) -> Call:
    work, blocks = contract.get_kernels(OURS), [words(block) for block in parity]

    def call() -> None:
        for block, weight in zip(blocks, weights, strict=True):
            work.mul_add_block_(block, delta.reshape(-1), int(weight))

    return call


def encode(scale: Scale, code: Code, intel: Isal | None, rng: np.random.Generator) -> list[Row]:
    """Measures `encode_gb_per_s` for one code."""
    generator = code.generator()
    data = [noise(rng, scale.block_bytes) for _ in range(code.k)]
    parity = [np.empty_like(data[0]) for _ in range(code.r)]
    cases = dot_cases(scale, "encode", data, generator[code.k :], parity, intel)
    call = zfec_encode(code, data)
    theirs = [np.frombuffer(block, np.uint8) for block in call()]
    expect("encode by zfec", theirs, combined(zfec_generator(code)[code.k :], data))
    cases["zfec"] = Case(call, code.k * scale.block_bytes)
    return throughput(scale, "encode", code, cases)


def decode(scale: Scale, code: Code, intel: Isal | None, rng: np.random.Generator) -> list[Row]:
    """Measures `decode_gb_per_s` for one code: the first data blocks are lost."""
    generator, count = code.generator(), min(code.r, code.k)
    data = [noise(rng, scale.block_bytes) for _ in range(code.k)]
    stripe = [*data, *combined(generator[code.k :], data)]
    available = list(range(count, count + code.k))
    weights = code.decode_weights(range(count), available, generator)
    rebuilt = [np.empty_like(data[0]) for _ in range(count)]
    survivors = [stripe[j] for j in available]
    cases = dot_cases(scale, "decode", survivors, weights, rebuilt, intel)
    for row, block in zip(weights, data[:count], strict=True):
        expect("the weights", combined(row[None], survivors), [block])

    blocks = tuple(block.tobytes() for block in [*data, *combined(zfec_generator(code)[code.k :], data)])
    decoder, numbers = zfec.Decoder(code.k, code.n), tuple(available)

    def call() -> list[bytes]:
        return decoder.decode([blocks[j] for j in numbers], numbers)

    expect("decode by zfec", [np.frombuffer(block, np.uint8) for block in call()], data)
    cases["zfec"] = Case(call, code.k * scale.block_bytes)
    return throughput(scale, "decode", code, cases)


def dot_cases(
    scale: Scale,
    doing: str,
    blocks: Sequence[Bytes],
    weights: Bytes,
    outputs: Sequence[Bytes],
    intel: Isal | None,
) -> dict[str, Case]:
    """Returns the verified calls of each kernel that make outputs = weights times blocks."""
    cases: dict[str, Case] = {}
    for name in contract.NAMES:
        size = scale.reference_bytes if name == "reference" else scale.block_bytes
        call = _dot(name, [b[:size] for b in blocks], weights, [out[:size] for out in outputs])
        wanted = combined(weights, [b[:size] for b in blocks])
        verified(f"{doing} by {name}", call, [out[:size] for out in outputs], wanted)
        cases[name] = Case(call, len(blocks) * size)
    if intel is not None:
        call = intel.encode(intel.tables(weights), blocks, outputs)
        verified(f"{doing} by isal", call, outputs, combined(weights, blocks))
        cases["isal"] = Case(call, len(blocks) * scale.block_bytes)
    return cases


def _dot(name: str, blocks: Sequence[Bytes], weights: Bytes, outputs: Sequence[Bytes]) -> Call:
    work, sources = contract.get_kernels(name), [words(block) for block in blocks]
    targets = [words(out) for out in outputs]

    return lambda: work.dot(sources, weights, targets)


def throughput(scale: Scale, doing: str, code: Code, cases: Mapping[str, Case]) -> list[Row]:
    """Times the calls of one code, and returns their GB/s and the speedups over the rivals."""
    label = f"({code.n}, {code.k})"
    seconds = timed(scale, cases)
    rows = [
        summary(
            f"{doing}_gb_per_s",
            "GB/s",
            [cases[name].amount / s / 1e9 for s in taken],
            kernel=name,
            code=label,
        )
        for name, taken in seconds.items()
    ]
    return rows + speedups(f"{doing}_speedup", seconds, code=label)


def single_kernels(scale: Scale, row_bytes: int, rng: np.random.Generator) -> list[Row]:
    """Measures `kernel_rows_per_s` and `kernel_gb_per_s` of each kernel alone."""
    count, width, weight = scale.touched_rows, row_bytes // 8, 0xB7
    work = contract.get_kernels(OURS)
    flat = words(noise(rng, scale.table_bytes))
    table, record = flat.reshape(-1, width), words(noise(rng, count * row_bytes))
    columns = contract.Columns(len(table), [(table, 0)])
    ids = rng.choice(len(table), count, replace=False).astype(np.int64)
    offsets = ids * width
    out, other = np.zeros_like(record), words(noise(rng, count * row_bytes))
    records, outs, others = (array.reshape(-1, width) for array in (record, out, other))

    def put() -> None:
        table[ids] = records

    def take() -> None:
        np.take(table, ids, axis=0, out=outs, mode="clip")

    def change() -> None:
        take()
        np.bitwise_xor(outs, others, out=outs)

    # operation -> kernel -> call, what it writes, and what has to be there afterwards
    picked = table[ids].reshape(-1)
    placed = table.copy()
    placed[ids] = records
    added, product = placed.copy(), words(scaled(weight, record.view(np.uint8)))
    added[ids] ^= product.reshape(-1, width)
    operations: dict[str, tuple[dict[str, Call], Words, Words]] = {
        "gather": ({OURS: lambda: work.gather_records(columns, ids, outs), "numpy": take}, out, picked),
        "gather_rows": ({OURS: lambda: work.gather_rows(flat, offsets, outs)}, out, picked),
        "change": (
            {OURS: lambda: work.change_records(columns, ids, others, outs), "numpy": change},
            out,
            picked ^ other,
        ),
        "scatter": (
            {OURS: lambda: work.scatter_(table, ids, records, 0), "numpy": put},
            flat,
            placed,
        ),
        "mul_add_rows": ({OURS: lambda: work.mul_add_rows_(flat, offsets, records, weight)}, flat, added),
    }
    rows: list[Row] = []
    for operation, (calls, written, wanted) in operations.items():
        for name, call in calls.items():
            verified(f"{operation} by {name}", call, [written], [wanted.reshape(-1)])
        seconds = timed(scale, {name: Case(call, count) for name, call in calls.items()})
        labels: dict[str, Label] = {"operation": operation, "row_bytes": row_bytes}
        for name, taken in seconds.items():
            rates = [count / s for s in taken]
            gb = [rate * row_bytes / 1e9 for rate in rates]
            rows.append(summary("kernel_rows_per_s", "rows/s", rates, kernel=name, **labels))
            rows.append(summary("kernel_gb_per_s", "GB/s", gb, kernel=name, **labels))
        rows += speedups("kernel_speedup", seconds, **labels)
    return rows


def distinct_rows(scale: Scale, rng: np.random.Generator) -> list[Row]:
    """Measures `kernel_rows_per_s` of finding new rows among those seen already."""
    work, rows = contract.get_kernels(OURS), scale.table_bytes // 64
    drawn = (rows * rng.random(4 * scale.touched_rows) ** 4).astype(np.int64)  # some are drawn often
    ids, every, found = contract.RowSet(rows), np.unique(drawn), np.empty_like(drawn)

    def call() -> None:
        found[work.distinct(drawn, ids, found) :] = 0
        work.forget_(ids, drawn)

    verified("distinct", call, [found], [np.pad(every, (0, len(drawn) - len(every)))])
    cases = {OURS: Case(call, len(drawn)), "numpy": Case(lambda: np.unique(drawn), len(drawn))}
    seconds = timed(scale, cases)
    labels: dict[str, Label] = {"operation": "distinct", "row_bytes": 64}
    measured = [
        summary("kernel_rows_per_s", "rows/s", [len(drawn) / s for s in taken], kernel=name, **labels)
        for name, taken in seconds.items()
    ]
    return measured + speedups("kernel_speedup", seconds, **labels)


def timed(scale: Scale, cases: Mapping[object, Case]) -> dict[object, list[float]]:
    """Times the cases against each other: seconds of a call, repeat by repeat."""
    calls = {key: case.call for key, case in cases.items()}
    return interleaved(calls, repeats=scale.repeats, at_least_s=scale.at_least_s)


def speedups(metric: str, seconds: Mapping[str, Sequence[float]], **labels: Label) -> list[Row]:
    """Returns how many times faster ours is than each rival that did as much in a call."""
    return [
        summary(
            metric,
            "ratio",
            [theirs / ours for theirs, ours in zip(taken, seconds[OURS], strict=True)],
            kernel=OURS,
            over=name,
            **labels,
        )
        for name, taken in seconds.items()
        if name not in (OURS, "reference")
    ]


# zfec


def zfec_encode(code: Code, data: Sequence[Bytes]) -> Callable[[], list[bytes]]:
    """Returns the call by which zfec makes the parity blocks."""
    encoder, wanted = zfec.Encoder(code.k, code.n), tuple(range(code.k, code.n))
    blocks = tuple(block.tobytes() for block in data)
    return lambda: encoder.encode(blocks, wanted)


def zfec_generator(code: Code) -> Bytes:
    """Returns zfec's generator, uint8 [n, k], read from its bytes; it isn't ours when r = 1."""
    unit_blocks = [row.tobytes() for row in np.eye(code.k, dtype=np.uint8)]
    encoded = zfec.Encoder(code.k, code.n).encode(unit_blocks)
    return np.frombuffer(b"".join(map(bytes, encoded)), np.uint8).reshape(code.n, code.k)


# Bytes, and what is right


def noise(rng: np.random.Generator, size: int) -> Bytes:
    return rng.integers(0, 256, size, np.uint8)


def words(block: Bytes) -> Words:
    return block.view(np.uint64)


def scaled(weight: np.uint8 | int, block: Bytes) -> Bytes:
    """Returns weight times block by table, uint8, new."""
    return multiply(np.uint8(weight), np.arange(256, dtype=np.uint8))[block]


def combined(weights: Bytes, blocks: Sequence[Bytes]) -> list[Bytes]:
    """Returns weights [p, k] times blocks by table, p blocks."""
    return [
        np.bitwise_xor.reduce([scaled(w, b) for w, b in zip(row, blocks, strict=True)]) for row in weights
    ]


def verified(what: str, call: Call, written: Sequence[NDArray], wanted: Sequence[NDArray]) -> None:
    """Runs the call once and compares what it wrote."""
    call()
    expect(what, written, wanted)


def expect(what: str, got: Sequence[NDArray], wanted: Sequence[NDArray]) -> None:
    """Compares byte for byte.

    Raises:
        WrongResult: They differ.
    """
    if len(got) != len(wanted) or not all(map(np.array_equal, got, wanted)):
        raise WrongResult(f"{what}: the result is not what the field's algebra gives")
