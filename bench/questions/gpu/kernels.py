"""How fast are the kernels on a GPU, and the copies between a table there and its image? A part of `gpu`.

Everything on one device and its current stream, timed until the device is done. Taken for a device, the CPU
shows in small, with Triton's interpreter, that it works.

- `copy_gb_per_s`: the ceilings, in this run: a copy within the device's memory (bytes read and written), and
  from and to pinned host memory (bytes copied).
- `multiply_add_gb_per_s`: `dst ^= weight * src` in GF(2^8), which is how parity is updated: bytes read and
  written. In whole blocks, and in rows at scattered places.
- `multiply_add_over_copy`: that, over the copy within the device's memory.
- `take_ms`: marking that many rows of a table with row-wise state, and setting them aside on the device when
  a window ends, which training waits for. `bring_ms`: that, and bringing them to the image, which a commit
  does beside training; `bring_over_copy`: over copying as many bytes to pinned memory.
- `put_gb_per_s`, `put_over_copy`: a whole table from its image, as after a restart, and over the copy from
  pinned memory.

Results are compared with the reference kernels' before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.harness.devices import CUDA
from bench.harness.result import Arguments, Row, WrongResult, summary
from bench.harness.timing import interleaved
from ecemb.coding.rows import Column, Table, TableLayout, arrange
from ecemb.engines.device_image import Image, Images, StagedRows
from ecemb.kernels.contract import get_kernels
from ecemb.kernels.reference import product

WEIGHT = 142
"""Of every product."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        block_words: Of a block that is multiplied or copied, 8 bytes each.
        rows: Of the table.
        dim: Values of a row, float32, beside one of state.
        touched: Rows that a step changes.
        repeats: Of every measurement.
        at_least_s: See `timing.interleaved`.
    """

    block_words: int
    rows: int
    dim: int
    touched: int
    repeats: int
    at_least_s: float


FULL = Scale(block_words=1 << 27, rows=1 << 20, dim=127, touched=200_000, repeats=7, at_least_s=0.05)
QUICK = Scale(block_words=1 << 22, rows=1 << 18, dim=127, touched=20_000, repeats=3, at_least_s=0.02)
INTERPRETED = Scale(block_words=1 << 12, rows=1 << 9, dim=127, touched=100, repeats=2, at_least_s=0.0)


def run(arguments: Arguments, device: str, until: float) -> Iterator[Row]:
    """Measures this part.

    Args:
        arguments: Of the question.
        device: Where tables are, one of `devices`.
        until: When it has to be done, on time.monotonic(); its share is known to do.
    """
    scale = INTERPRETED if device != CUDA else QUICK if arguments.quick else FULL
    yield from measure(scale, torch.device(CUDA if device == CUDA else "cpu"), arguments.seed)


def measure(scale: Scale, device: torch.device, seed: int) -> Iterator[Row]:
    """Measures all metrics on a device."""
    generator = torch.Generator(device).manual_seed(seed)
    block_bytes = 8 * scale.block_words
    source = torch.randint(-(2**62), 2**62, (scale.block_words,), device=device, generator=generator)
    target = torch.zeros_like(source)
    pinned = torch.empty(scale.block_words, dtype=torch.int64, pin_memory=device.type == "cuda")
    tensors = [torch.rand(scale.rows, width, device=device, generator=generator) for width in (scale.dim, 1)]
    table, image = imaged(tensors)
    table_bytes = sum(tensor.nbytes for tensor in tensors)
    ids = torch.randperm(scale.rows, device=device, generator=generator)[: scale.touched]
    images = Images({0: image})

    def take() -> StagedRows:
        images.mark(0, ids)
        return images.take()

    def bring() -> None:
        take().store(lambda *_: None)

    fetched_bytes = scale.touched * image.record_bytes
    products = _products(source, target, generator)
    _check(source, target, products)
    image.fill()
    if not np.array_equal(table.columns[0], tensors[0].cpu().view(torch.uint8).numpy()):
        raise WrongResult("the image differs from its table")

    seconds = interleaved(
        {
            "copy on the device": _whole(device, lambda: target.copy_(source)),
            "copy to the host": _whole(device, lambda: pinned.copy_(source, non_blocking=True)),
            "copy to the device": _whole(device, lambda: target.copy_(pinned, non_blocking=True)),
            **{name: _whole(device, call) for name, call in products.items()},
            "take": _whole(device, take),
            "bring": _whole(device, bring),
            "put": _whole(device, image.put),
        },
        repeats=scale.repeats,
        at_least_s=scale.at_least_s,
    )
    moved = {
        "copy on the device": 2 * block_bytes,
        "copy to the host": block_bytes,
        "copy to the device": block_bytes,
        **dict.fromkeys(products, 3 * block_bytes),
        "take": 2 * fetched_bytes,
        "bring": fetched_bytes,
        "put": table_bytes,
    }
    rates = {name: [moved[name] / 1e9 / s for s in taken] for name, taken in seconds.items()}
    for name in ("copy on the device", "copy to the host", "copy to the device"):
        yield summary("copy_gb_per_s", "GB/s", rates[name], what=name)
    for name in products:
        yield summary("multiply_add_gb_per_s", "GB/s", rates[name], of=name)
        yield summary("multiply_add_over_copy", "ratio", _over(rates, name, "copy on the device"), of=name)
    for name in ("take", "bring"):
        yield summary(f"{name}_ms", "ms", [1000 * s for s in seconds[name]], rows=scale.touched)
    yield summary("bring_over_copy", "ratio", _over(rates, "copy to the host", "bring"), rows=scale.touched)
    yield summary("put_gb_per_s", "GB/s", rates["put"], table_bytes=table_bytes)
    yield summary(
        "put_over_copy", "ratio", _over(rates, "copy to the device", "put"), table_bytes=table_bytes
    )


def imaged(tensors: Sequence[Tensor]) -> tuple[Table, Image]:
    """An image of a table of tensors [rows, width], zeros at first, and the host memory that it is in."""
    columns = (
        Column(f"column {i}", str(one.dtype).removeprefix("torch."), one.shape[1] * one.itemsize)
        for i, one in enumerate(tensors)
    )
    layout = TableLayout("table", len(tensors[0]), tuple(columns))
    (starts,), size = arrange([layout])
    table = Table(layout, np.zeros(size, np.uint8), starts, get_kernels("cpu", torch.get_num_threads()))
    return table, Image(table, tensors)


def _over(rates: Mapping[str, list[float]], name: str, other: str) -> list[float]:
    return [a / b for a, b in zip(rates[name], rates[other], strict=True)]


def _whole(device: torch.device, call: Callable[[], object]) -> Callable[[], None]:
    """The call, until the device is done."""

    def waited() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return waited


def _products(source: Tensor, target: Tensor, generator: torch.Generator) -> dict[str, Callable[[], None]]:
    """Multiply-adds of a block's size, by what they are of."""
    from bench.questions.gpu.cuda import multiply_add_, multiply_add_rows_

    found: dict[str, Callable[[], None]] = {"blocks": lambda: multiply_add_(target, source, WEIGHT)}
    for row_bytes in (64, 512):
        width = row_bytes // 8
        rows = source.view(-1, width)
        offsets = torch.randperm(len(rows), device=source.device, generator=generator) * width
        found[f"rows of {row_bytes} bytes"] = lambda rows=rows, offsets=offsets: multiply_add_rows_(
            target, offsets, rows, WEIGHT, apart=True
        )
    return found


def _check(source: Tensor, target: Tensor, products: Mapping[str, Callable[[], None]]) -> None:
    """Raises WrongResult if a multiply-add is wrong, by sums that don't depend on where rows go."""
    begun = source[: 1 << 12].cpu().numpy().view(np.uint64)
    products["blocks"]()
    if not np.array_equal(target[: 1 << 12].cpu().numpy().view(np.uint64), product(WEIGHT, begun)):
        raise WrongResult("the product of a block is wrong")
    expected = target.cpu().numpy().sum()  # of the same words in another order, by wrapping sums
    for name, call in products.items():
        if name != "blocks":
            target.zero_()
            call()
            if target.cpu().numpy().sum() != expected:
                raise WrongResult(f"the product of {name} is wrong")
