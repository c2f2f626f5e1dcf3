"""Other people's quantization of rows: what they lose, and what to time.

- `k-means (scikit-learn)`: a KMeans of its own for each row, which begins evenly over the row's range, as
  `baselines.check_n_run` does, and has as many iterations; Lloyd's algorithm, one start, no tolerance.
- `PyTorch's search`: `torch.choose_qparams_optimized` with the bins and ratio of adaptive, as float16, and
  what `torch.ops.quantized.embedding_bag_4bit_prepack` makes of it in one call (2 and 4 bits).
- `FBGEMM`: `FloatToFusedNBitRowwiseQuantizedSBHalf` (two float16 of metadata) with 2 and 4 bits, and with 8
  `FloatToFused8BitRowwiseQuantized` (two float32); it has no 3.
- `torchao`: `choose_qparams_affine` and `quantize_affine` with a block for each row; its codes are bytes,
  whatever their bits; its zero points are whole numbers, so that 0 comes back as 0. Left out where it is
  missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import fbgemm_gpu  # noqa: F401 - registers torch.ops.fbgemm
import numpy as np
import torch
from torch import Tensor

from baselines.check_n_run.quantize_scheme import KMEANS_ITERATIONS, RATIO, Scheme

SCIKIT_LEARN = "k-means (scikit-learn)"
TORCH = "PyTorch's search"
FBGEMM = "FBGEMM"
TORCHAO = "torchao"


class Rival(NamedTuple):
    """How rows of float32 are quantized into codes of some bits, in one call.

    Attributes:
        encode: Of rows.
        decode: Of what `encode` returns.
    """

    encode: Callable[[Tensor], object]
    decode: Callable[[Any], Tensor]


def rivals(bits: int) -> dict[str, Rival]:
    """All rivals that are available here for codes of these bits, but for `SCIKIT_LEARN`, by name."""
    found = {FBGEMM: fbgemm(bits)} if bits != 3 else {}
    if bits in (2, 4):
        bins, _ = Scheme("adaptive", bits).search
        prepack = getattr(torch.ops.quantized, f"embedding_bag_{bits}bit_prepack")
        unpack = getattr(torch.ops.quantized, f"embedding_bag_{bits}bit_unpack")
        found[TORCH] = Rival(lambda rows: prepack(rows, True, bins, RATIO), unpack)
    if importlib.util.find_spec("torchao") is not None:
        found[TORCHAO] = torchao(bits)
    return found


def fbgemm(bits: int) -> Rival:
    """FBGEMM's row-wise quantizer."""
    ops = torch.ops.fbgemm
    if bits == 8:
        return Rival(ops.FloatToFused8BitRowwiseQuantized, ops.Fused8BitRowwiseQuantizedToFloat)
    return Rival(
        lambda rows: ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, bits),
        lambda packed: ops.FusedNBitRowwiseQuantizedSBHalfToFloat(packed, bits),
    )


def torchao(bits: int) -> Rival:
    """torchao's affine quantization, a block for each row."""
    with _quiet():
        from torchao.quantization import quant_primitives as primitives
    top = 2**bits - 1

    def encode(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        block, asymmetric = (1, rows.shape[1]), primitives.MappingType.ASYMMETRIC
        scale, zero = primitives.choose_qparams_affine(rows, asymmetric, block, torch.uint8, 0, top)
        return primitives.quantize_affine(rows, block, scale, zero, torch.uint8, 0, top), scale, zero

    def decode(encoded: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        codes, scale, zero = encoded
        return primitives.dequantize_affine(codes, (1, codes.shape[1]), scale, zero, torch.uint8, 0, top)

    return Rival(encode, decode)


def scikit_learn(rows: Tensor, bits: int) -> Tensor:
    """L2 errors of rows, each under a KMeans of its own: float64 [m]."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    errors: list[float] = []
    with threadpool_limits(torch.get_num_threads()), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a row with fewer numbers than centroids
        for row in rows.numpy():
            begin = np.linspace(row.min(), row.max(), 2**bits, dtype=np.float32)[:, None]
            means = KMeans(2**bits, init=begin, n_init=1, max_iter=KMEANS_ITERATIONS, tol=0)
            errors.append(float(means.fit(row[:, None]).inertia_) ** 0.5)
    return torch.tensor(errors, dtype=torch.float64)


def torchs_search(rows: Tensor, bits: int) -> Tensor:
    """L2 errors of rows, each under `torch.choose_qparams_optimized`: float64 [m]."""
    top, (bins, _) = 2**bits - 1, Scheme("adaptive", bits).search
    found = [torch.choose_qparams_optimized(row, len(row), bins, RATIO, bits) for row in rows]
    high, low = (torch.stack([pair[i].reshape(1) for pair in found]) for i in (0, 1))
    low = low.half().float()
    step = ((high - low) / top).half().float()
    codes = ((rows - low) * torch.where(step == 0, 0, 1 / step)).round().clamp(0, top)
    return torch.linalg.vector_norm(rows.double() - (codes * step + low).double(), dim=1)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What a library says of its own builds when it is imported is none of our warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
