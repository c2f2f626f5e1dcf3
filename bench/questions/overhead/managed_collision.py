"""The setting `managed-collision`: in one run the same model on plain tables and with a managed collision."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.result import Row
from bench.workloads.models import EVICT_EVERY
from bench.workloads.training_rank import PROTECTED

NAME = "managed-collision"
TABLES = 8
PAIRS = 4 * EVICT_EVERY
PLAIN, MANAGED = ENGINES = "torchrec", "managed"
"""The engines of the two models."""


def whole_intervals(pairs: int) -> int:
    """The number of steps nearest to `pairs` that makes whole intervals between evictions."""
    return max(1, round(pairs / EVICT_EVERY)) * EVICT_EVERY


def managed_over_plain(managed: Sequence[Row], plain: Sequence[Row]) -> Row:
    """The overhead in processor time with a managed collision, over that of plain tables."""
    one, other = (
        next(row for row in rows if row.metric == "overhead_cpu_pct" and row.labels["method"] == PROTECTED)
        for rows in (managed, plain)
    )
    labels = {name: value for name, value in one.labels.items() if name != "engine"}
    value, low, high = (
        left / right if left is not None and right else float("nan")
        for left, right in ((one.value, other.value), (one.low, other.high), (one.high, other.low))
    )
    return Row("managed_over_plain", value, "ratio", low, high, one.repeats, labels)
