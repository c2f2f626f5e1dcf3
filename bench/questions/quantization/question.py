"""What do rows lose in being stored in a few bits, and how fast are they stored?

Rows are quantized for the stored copy by `baselines.check_n_run`, as Check-N-Run has it: symmetric,
asymmetric, adaptive (a greedy search for the range), and k-means, with two float32 of metadata, but for
symmetric (one) and k-means (2^bits). Tables: "normal" and "uniform" are random; "trained" are rows, looked up
20 times or more, of a small DLRM trained by Adagrad on clicks that are drawn with a signal in them.

Rivals: scikit-learn's k-means, one for each row, with the same start (evenly over the row's range) and as
many iterations (25); PyTorch's search for the range, with the same bins and ratio; FBGEMM's row-wise
quantizers; and torchao's, whose codes are a byte each. Metadata of the latter three is two float16, with
FBGEMM's 8 bits two float32, and with torchao a float32 and an int32.

On all rows, every number comes back within one step, adaptive is not worse than asymmetric, and with
float16 not worse than PyTorch's search on any row, or there is no answer.

- `l2_error`: mean over rows of the L2 norm of what a row loses.
- `error_over_kmeans`: that, over scikit-learn's k-means. Below 1, other centroids were better: scikit-learn
  moves those that nothing is nearest to elsewhere. The larger the share of a row's numbers that have a
  centroid of their own, the further is a uniform grid behind; `compression` says what centroids take.
- `error_over_torchs_search`: adaptive with float16 over PyTorch's search, row by row: median, smallest and
  largest.
- `rows_per_s`, `encode_gb_per_s`: of float32 that are encoded, one thread. `decode_gb_per_s`: that come back.
- `times_faster_than`: rows/s of adaptive over those of others that search for the least error.
- `compression`: bytes of float32 over bytes stored.
- `moves`: of the search that `choose_search` chooses on these rows, and its bins and ratio: the fewest within
  0.5 % of the least error.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.check_n_run.quantize import decode, encode, l2_errors
from baselines.check_n_run.quantize_scheme import BITS, KMEANS_BITS, METADATA, METHODS, Method, Scheme
from baselines.check_n_run.quantize_search import choose_search
from bench.harness.result import Arguments, Label, Row, WrongResult, once, summary
from bench.harness.timing import interleaved
from bench.questions.quantization.rivals import (
    SCIKIT_LEARN,
    TORCH,
    Rival,
    rivals,
    scikit_learn,
    torchs_search,
)
from bench.questions.quantization.tables import normal, trained, uniform

SLACK = 1e-4
"""Of an error, by which it may be above another that it should not be above: sums are rounded."""
SEARCHING = ("kmeans", SCIKIT_LEARN, TORCH)
"""Methods that search for a small error, beside adaptive."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        dims: Of the rows.
        rows: Whose errors are measured.
        timed_rows: That are encoded in one call.
        slow_rows: That PyTorch's search is timed with, in one call as well.
        steps: Of the training.
        batch: Samples in each.
        repeats: Of each timing.
        at_least_s: That each takes.
    """

    dims: tuple[int, ...] = (32, 64, 128)
    rows: int = 300
    timed_rows: int = 20_000
    slow_rows: int = 500
    steps: int = 300
    batch: int = 256
    repeats: int = 5
    at_least_s: float = 0.03


FULL = Scale()
QUICK = Scale(
    dims=(32,), rows=30, timed_rows=1000, slow_rows=50, steps=20, batch=128, repeats=2, at_least_s=0.001
)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question.

    Raises:
        WrongResult: What comes back is further off than it may be.
    """
    scale = QUICK if arguments.quick else FULL
    threads = torch.get_num_threads()
    found: list[Row] = []
    for dim in scale.dims:
        tables = {
            "trained": trained(scale.rows, dim, arguments.seed, steps=scale.steps, batch=scale.batch),
            "normal": normal(scale.rows, dim, arguments.seed),
            "uniform": uniform(scale.rows, dim, arguments.seed),
        }
        torch.set_num_threads(1)
        try:
            seconds: dict[int, list[float]] = {}
            for name, rows in tables.items():
                for bits in BITS:
                    found += errors(rows, bits, seconds, {"table": name, "dim": dim, "bits": bits})
            found += sizes(tables["normal"])
            found += rates(normal(scale.timed_rows, dim, arguments.seed), scale, seconds)
        finally:
            torch.set_num_threads(threads)
    order = list(dict.fromkeys(row.metric for row in found))
    return sorted(found, key=lambda row: order.index(row.metric))


def methods(bits: int) -> list[Method]:
    """The methods of `baselines.check_n_run` that make codes of these bits."""
    return [name for name in METHODS[1:] if name != "kmeans" or bits in KMEANS_BITS]


def errors(
    rows: Tensor, bits: int, seconds: dict[int, list[float]], labels: dict[str, Label]
) -> Iterator[Row]:
    """What rows of one table lose.

    Args:
        rows: float32 [m, dim].
        bits: Of a code.
        seconds: Bits -> what scikit-learn took for each row of a table, which is added.
        labels: Of all rows of the answer.
    """
    lost = {name: l2_errors(rows, Scheme(name, bits)) for name in methods(bits)}
    half, search = l2_errors(rows, Scheme("adaptive", bits, "float16")), torchs_search(rows, bits)
    check(rows, bits, lost["adaptive"], lost["asymmetric"], half, search)
    means = {name: float(error.mean()) for name, error in lost.items()}
    if bits in KMEANS_BITS:
        scikit_learn(rows[:1], bits)  # imports it
        begin = time.perf_counter()
        means[SCIKIT_LEARN] = float(scikit_learn(rows, bits).mean())
        seconds.setdefault(bits, []).append((time.perf_counter() - begin) / len(rows))
    means[TORCH] = float(search.mean())
    for name, rival in rivals(bits).items():
        if name != TORCH:  # which has been asked row by row
            back = rival.decode(rival.encode(rows))
            means[name] = float(torch.linalg.vector_norm(rows.double() - back.double(), dim=1).mean())
    for name, mean in means.items():
        yield once("l2_error", "L2 norm", mean, **labels, method=name)
    if bits in KMEANS_BITS:
        for name in lost:
            yield once("error_over_kmeans", "ratio", means[name] / means[SCIKIT_LEARN], **labels, method=name)
    yield summary("error_over_torchs_search", "ratio", (half / search).tolist(), **labels)
    chosen = choose_search(rows, Scheme("adaptive", bits))
    yield once("moves", "moves", chosen.search[1], **labels, bins=chosen.bins, ratio=chosen.ratio)


def check(
    rows: Tensor, bits: int, adaptive: Tensor, asymmetric: Tensor, half: Tensor, search: Tensor
) -> None:
    """Raises unless errors are within their bounds: [m] each."""
    scheme = Scheme("asymmetric", bits)
    back = decode(encode(rows, scheme), scheme, rows.shape[1])
    low, high = rows.aminmax(dim=1, keepdim=True)
    if bool(((back - rows).abs() > (1 + SLACK) * (high - low) / (2**bits - 1)).any()):
        raise WrongResult(f"a number of {bits} bits is further off than one step")
    for name, less, more in (("asymmetric", adaptive, asymmetric), (TORCH, half, search)):
        if bool((less > (1 + SLACK) * more).any()):
            worst = int((less / more).argmax())
            raise WrongResult(
                f"adaptive with {bits} bits is worse than {name} on row {worst}: "
                f"{less[worst]} and {more[worst]}"
            )


def sizes(rows: Tensor) -> Iterator[Row]:
    """How much smaller rows are when they are stored."""
    for bits in BITS:
        for metadata in METADATA:
            labels: dict[str, Label] = {"dim": rows.shape[1], "bits": bits, "metadata": metadata}
            for name in methods(bits):
                stored = encode(rows, Scheme(name, bits, metadata)).values()
                ratio = rows.nbytes / sum(tensor.nbytes for tensor in stored)
                yield once("compression", "ratio", ratio, **labels, method=name)


def rates(rows: Tensor, scale: Scale, seconds: dict[int, list[float]]) -> Iterator[Row]:
    """How fast rows are stored, and come back.

    Args:
        rows: float32 [m, dim].
        scale: How long each is timed.
        seconds: Bits -> what scikit-learn took for each row of a table.
    """
    encoding: dict[tuple[int, str], Callable[[], object]] = {}
    decoding: dict[tuple[int, str], Callable[[], object]] = {}
    counts = {TORCH: scale.slow_rows}

    def timed(calls: dict[tuple[int, str], Callable[[], object]]) -> dict[tuple[int, str], list[float]]:
        found = interleaved(calls, repeats=scale.repeats, at_least_s=scale.at_least_s)
        return {key: [taken / counts.get(key[1], len(rows)) for taken in found[key]] for key in found}

    for bits in BITS:
        for name in methods(bits):
            encoding[bits, name], decoding[bits, name] = of(rows, Scheme(name, bits))
        for name, rival in rivals(bits).items():
            encoding[bits, name], decoding[bits, name] = of_rival(rows[: counts.get(name)], rival)
    per_row = timed(encoding) | {(bits, SCIKIT_LEARN): taken for bits, taken in seconds.items()}
    back = timed(decoding)
    dim = rows.shape[1]
    for (bits, name), taken in sorted(per_row.items(), key=lambda item: item[0][0]):
        labels: dict[str, Label] = {"dim": dim, "bits": bits, "method": name}
        yield summary("rows_per_s", "rows/s", [1 / one for one in taken], **labels)
        yield summary("encode_gb_per_s", "GB/s", [4e-9 * dim / one for one in taken], **labels)
        if name in SEARCHING:
            adaptive = statistics.median(per_row[bits, "adaptive"])
            yield summary("times_faster_than", "ratio", [one / adaptive for one in taken], **labels)
        if (bits, name) in back:
            rate = [4e-9 * dim / one for one in back[bits, name]]
            yield summary("decode_gb_per_s", "GB/s", rate, **labels)


def of(rows: Tensor, scheme: Scheme) -> tuple[Callable[[], object], Callable[[], object]]:
    """What encodes rows, and what decodes them."""
    encoded = encode(rows, scheme)
    return lambda: encode(rows, scheme), lambda: decode(encoded, scheme, rows.shape[1])


def of_rival(rows: Tensor, rival: Rival) -> tuple[Callable[[], object], Callable[[], object]]:
    """As well."""
    encoded = rival.encode(rows)
    return lambda: rival.encode(rows), lambda: rival.decode(encoded)
