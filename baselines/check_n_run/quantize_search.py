"""Bins and ratio of adaptive's search, chosen on a small sample of a table's rows.

Follows Check-N-Run (Eisenman et al., NSDI 2022). That a sample decides, and one of 0.001 % of the rows:
recalled. At least `LEAST_ROWS` of them, what is tried, and that the least work wins of all that come within
`SLACK` of the least error: chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from .quantize import l2_errors
from .quantize_scheme import Scheme

SHARE: Final = 1e-5
LEAST_ROWS: Final = 1000
BINS: Final = tuple(range(5, 55, 5))
RATIOS: Final = tuple(tenths / 10 for tenths in range(1, 11))
SLACK: Final = 0.005
"""Of the least mean L2 error."""


def sample(rows: int, generator: torch.Generator | None = None) -> Tensor:
    """Row numbers of a sample, each once, ascending: int64 [`SHARE` of them, at least `LEAST_ROWS` or all].

    Args:
        rows: of the table, 0 or more.
        generator: on the CPU, that draws them; torch's if not given.
    """
    wanted = min(rows, max(LEAST_ROWS, int(SHARE * rows)))
    # Of a large table nearly all draws are of different rows, and all rows needn't be shuffled.
    drawn = torch.randint(max(rows, 1), (2 * wanted,), generator=generator) if rows > 4 * wanted else None
    if drawn is None:
        drawn = torch.randperm(rows, generator=generator)
    distinct = drawn.unique(sorted=False)
    kept = distinct[torch.randperm(len(distinct), generator=generator)[:wanted]]
    return kept.sort().values


def choose_search(
    rows: Tensor, scheme: Scheme, bins: Sequence[int] = BINS, ratios: Sequence[float] = RATIOS
) -> Scheme:
    """Chooses bins and ratio.

    Args:
        rows: a sample, float32 [m, width] on the CPU. Read.
        scheme: adaptive, whose bits and metadata stay.
        bins: to be tried.
        ratios: to be tried.

    Returns:
        The scheme with the bins and ratio of the fewest moves among those whose mean L2 error is within
        `SLACK` of the least. The given scheme, if there is no finite row.

    Raises:
        ValueError: the scheme isn't adaptive, or see `quantize.encode`.
    """
    if scheme.method != "adaptive":
        raise ValueError(f"bins and ratio are of adaptive's search; the method is {scheme.method!r}")
    finite = rows[rows.isfinite().all(dim=1)]
    if not len(finite):
        return scheme
    tried = [dataclasses.replace(scheme, bins=cut, ratio=ratio) for cut in bins for ratio in ratios]
    errors = {candidate: float(l2_errors(finite, candidate).mean()) for candidate in tried}
    most = min(errors.values()) * (1 + SLACK)
    good = [candidate for candidate in tried if errors[candidate] <= most]
    return min(good, key=lambda candidate: (candidate.search[1], errors[candidate]))
