"""How a table's tensors are stored: exactly, or by a scheme of quantization, where that fits and takes less.

Schemes are for rows of float32. Tensors of other types, state of one number a row, and rows so narrow that a
scheme would take as much as they do are stored exactly: chosen.

numba is imported where rows are quantized. Must not know: tables, chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .choose_bits import scheme_for
from .quantize_scheme import Scheme

_EXACT = "rows"


def kind_of(tensor: str) -> str:
    """The kind of a table's tensor, by which its scheme is chosen: "weight", or "state" of its optimizer."""
    return tensor if tensor == "weight" else "state"


def schemes_of(weights: Scheme | float, states: Scheme, restores: int) -> dict[str, dict[str, Any]]:
    """How tensors are stored: fields of a scheme by kind.

    Args:
        weights: how; or how many restores the job expects, by which `choose_bits` says how.
        states: how per-row optimizer state is stored.
        restores: there have been until now.

    Raises:
        ValueError: neither a scheme nor a number that is 0 or more.
    """
    for name, given, known in (("weights", weights, (Scheme, int, float)), ("states", states, (Scheme,))):
        if not isinstance(given, known):
            raise ValueError(
                f"{name}= takes a Scheme, as EXACT or Scheme('adaptive', 4), or, for weights, the number of "
                f"restores that the job expects; got {given!r}"
            )
    chosen = weights if isinstance(weights, Scheme) else scheme_for(weights, restores)
    return {"weight": asdict(chosen), "state": asdict(states)}


def stored(rows: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """What is stored of rows.

    Args:
        rows: [m, ...] on the CPU, m > 0. Read.
        scheme: how, if it fits.

    Returns:
        Tensors by name; of rows that are stored exactly, these alone.
    """
    fits = rows.dtype == torch.float32 and rows.ndim == 2
    if scheme.method == "none" or not fits or scheme.row_bytes(rows.shape[1]) >= 4 * rows.shape[1]:
        return {_EXACT: rows}
    from .quantize import encode

    return encode(rows, scheme)


def loaded(parts: Mapping[str, Tensor], scheme: Scheme, like: Tensor) -> Tensor:
    """Rows as they were stored.

    Args:
        parts: what `stored` returned. Read.
        scheme: the same.
        like: another tensor [any, ...] of the same rows.
    """
    if _EXACT in parts:
        return parts[_EXACT]
    from .quantize import decode

    return decode(parts, scheme, like.shape[1])
