"""Rows of float32 as packed codes, and back: pure functions, on as many threads as torch may use.

What `encode` returns are named tensors, for any writer of tensors:

- of `Scheme("none")`: `rows`, as they came;
- of the others: `codes`, uint8 [m, bytes of a row] (`bits` says in which order); `kept`, float16 or float32
  [m, scheme.kept], of each row; `exact_rows`, int64 [e], the rows that the scheme can't store, ascending; and
  `exact`, float32 [e, width], these, bit for bit.

The same rows give the same bytes on the same processor, however they are divided among threads.

Optimizer state is a column like any other, with a scheme of its own, or `EXACT`. State of one number a row is
no row to quantize: its own metadata would take more than it does. Give it as it is and `EXACT`; or, as rows
of 64 of these numbers, with any scheme.

Needs numba: `pip install 'ecemb[bench]'`.

Must not know: tables, files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
from torch import Tensor

from . import quantize_rows as loops
from .bits import packed_bytes, padded
from .quantize_scheme import KMEANS_ITERATIONS, Scheme

METHODS: Final = {
    "symmetric": loops.SYMMETRIC,
    "asymmetric": loops.ASYMMETRIC,
    "adaptive": loops.ADAPTIVE,
}
_LEAST_BYTES: Final = 1 << 18
"""Of rows for a thread of its own: less is done sooner than another thread is started."""

Encoded = dict[str, Tensor]


def encode(rows: Tensor, scheme: Scheme) -> Encoded:
    """Stores rows by a scheme.

    Args:
        rows: on the CPU, float32 [m, width], width >= 1; of any type and shape if the scheme is "none". Read.
        scheme: How.

    Returns:
        Tensors by name, on the CPU; see the module. `rows` of "none" is the given tensor itself.

    Raises:
        ValueError: rows of another type or shape.
    """
    if scheme.method == "none":
        return {"rows": rows}
    if rows.dtype != torch.float32 or rows.ndim != 2 or rows.shape[1] < 1 or rows.device.type != "cpu":
        raise ValueError(
            f"rows to be quantized are float32 [m, width] on the CPU, with a width of 1 or more; they are "
            f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape)} on {rows.device}: convert them, or "
            f"store them by Scheme('none')"
        )
    given = rows.detach().contiguous().numpy()
    m, width = given.shape
    codes = np.empty((m, packed_bytes(width, scheme.bits)), np.uint8)
    kept = np.empty((m, scheme.kept), np.float32)
    fits = np.empty(m, np.bool_)
    half = scheme.metadata == "float16"
    loops.load_sums()

    def act(first: int, stop: int) -> None:
        part = slice(first, stop)
        buffer = np.zeros(padded(width), np.uint8)
        into = buffer, codes[part], kept[part], fits[part]
        if scheme.method == "kmeans":
            loops.encode_kmeans(given[part], scheme.bits, half, KMEANS_ITERATIONS, *into)
        else:
            method, search = METHODS[scheme.method], scheme.search
            loops.encode_uniform(given[part], method, scheme.bits, half, *search, *into)

    _share(m, given.nbytes, act)
    exact = np.flatnonzero(~fits)
    return {
        "codes": torch.from_numpy(codes),
        "kept": torch.from_numpy(kept.astype(scheme.metadata, copy=False)),
        "exact_rows": torch.from_numpy(exact.astype(np.int64, copy=False)),
        "exact": torch.from_numpy(given[exact]),
    }


def decode(encoded: Mapping[str, Tensor], scheme: Scheme, width: int) -> Tensor:
    """Undoes `encode`, as far as its scheme allows.

    Args:
        encoded: What it returned. Read.
        scheme: The same.
        width: of the rows; of no meaning if the scheme is "none".

    Returns:
        float32 [m, width], new; or `rows` of "none", as they are.

    Raises:
        ValueError: tensors that `encode` can't have returned for this scheme and width.
    """
    _check(encoded, scheme, width)
    if scheme.method == "none":
        return encoded["rows"]
    codes = encoded["codes"].contiguous().numpy()
    kept = encoded["kept"].contiguous().numpy().astype(np.float32, copy=False)
    out = np.empty((len(codes), width), np.float32)
    loop = loops.decode_kmeans if scheme.method == "kmeans" else loops.decode_uniform

    def act(first: int, stop: int) -> None:
        part = slice(first, stop)
        loop(codes[part], kept[part], scheme.bits, np.empty(padded(width), np.uint8), out[part])

    _share(len(out), out.nbytes, act)
    rows = torch.from_numpy(out)
    rows[encoded["exact_rows"]] = encoded["exact"]
    return rows


def l2_errors(rows: Tensor, scheme: Scheme) -> Tensor:
    """The L2 norm of what each row loses in being stored: sqrt(sum over j of (x_j - decoded x_j)^2).

    Args:
        rows: As of `encode`, all finite.
        scheme: How they are stored.

    Returns:
        float64 [m].
    """
    stored = decode(encode(rows, scheme), scheme, rows.shape[1])
    return torch.linalg.vector_norm(rows.double() - stored.double(), dim=1)


def _check(encoded: Mapping[str, Tensor], scheme: Scheme, width: int) -> None:
    expected = {"rows"} if scheme.method == "none" else {"codes", "kept", "exact_rows", "exact"}
    if set(encoded) != expected:
        raise ValueError(f"{scheme} stores {sorted(expected)}; there are {sorted(encoded)}")
    if scheme.method == "none":
        return
    m, e = len(encoded["codes"]), len(encoded["exact_rows"])
    shapes = {
        "codes": (torch.uint8, (m, packed_bytes(width, scheme.bits))),
        "kept": (getattr(torch, scheme.metadata), (m, scheme.kept)),
        "exact_rows": (torch.int64, (e,)),
        "exact": (torch.float32, (e, width)),
    }
    for name, (dtype, shape) in shapes.items():
        found = encoded[name]
        if found.dtype != dtype or tuple(found.shape) != shape:
            raise ValueError(
                f"{name} of {m} rows of width {width} under {scheme} is {dtype} {list(shape)}; it is "
                f"{found.dtype} {list(found.shape)}: they were stored by another scheme, or are damaged"
            )
    rows = encoded["exact_rows"]
    if e and not (int(rows.min()) >= 0 and int(rows.max()) < m):
        raise ValueError(f"exact_rows of {m} rows are from {int(rows.min())} to {int(rows.max())}: damaged")


def _share(rows: int, size_bytes: int, act: Callable[[int, int], None]) -> None:
    """Calls `act(first, stop)` on parts of 0..rows-1, all of them between them, at the same time."""
    parts = max(1, min(torch.get_num_threads(), rows, size_bytes // _LEAST_BYTES))
    edges = [rows * part // parts for part in range(parts + 1)]
    if parts == 1:
        act(0, rows)
        return
    with ThreadPoolExecutor(parts - 1, "quantize") as pool:  # which ends when all of them have
        others = [pool.submit(act, *edges[part : part + 2]) for part in range(1, parts)]
        act(*edges[:2])
    for other in others:
        other.result()
