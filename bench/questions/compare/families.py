"""The six families of methods, the noise of the measurement, and the engine on which it is smallest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.svg import FAMILIES as COLOURS

Rows = Sequence[Mapping[str, Any]]

CONTROL = "nothing"
"""The method without protection: its overhead against its own twin is the noise of the measurement."""
OVERHEAD = "overhead_wall_pct"
GIVEN_UP = "given_up_steps"
KILLS = 2
"""Failures of each run."""


@dataclass(frozen=True)
class Family:
    """Methods that survive failures in the same way.

    Attributes:
        name: for reading.
        shown: the method that stands for the family.
        colour: of its marks.
    """

    name: str
    shown: str
    colour: str


FAMILIES = (
    Family("ecemb", "ecemb (4, 3)", COLOURS["ecemb"]),
    Family("live copies", "ecemb copies x2", COLOURS["live copies"]),
    Family("snapshots in memory", "snapshots x2", COLOURS["snapshots"]),
    Family("full checkpoints", "full files", COLOURS["full"]),
    Family("partial recovery (CPR)", "cpr vanilla", COLOURS["CPR"]),
    Family("Check-N-Run", "check-n-run intermittent", COLOURS["Check-N-Run"]),
)
"""ecemb first. Parity of floats is none of these: its rows may come back with rounding errors."""


def of_methods(rows: Rows, engine: str) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Method -> metric -> row, on one engine and the smallest number of ranks."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    ranks = min(row["ranks"] for row in rows)
    for row in rows:
        if row["engine"] == engine and row["ranks"] == ranks:
            found.setdefault(row["method"], {})[row["metric"]] = row
    return found


def noise_pct(rows: Rows, engine: str) -> float:
    """The largest overhead, up or down, that the control shows on an engine; 0 without a control."""
    row = of_methods(rows, engine).get(CONTROL, {}).get(OVERHEAD)
    return 0.0 if row is None else max(abs(row[key]) for key in ("value", "low", "high"))


def quiet_engine(rows: Rows) -> str:
    """The engine on which the control shows least."""
    engines = dict.fromkeys(row["engine"] for row in rows)
    return min(engines, key=lambda engine: noise_pct(rows, engine))
