"""The methods that pages and the picture show, and which rows of an answer are theirs.

Must not know: how rows are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.svg import FAMILIES as COLOURS

Rows = Sequence[Mapping[str, Any]]

CONTROL = "nothing"
"""The method without protection: a third bare model."""
COST, TAKES = "training_longer_pct", "failure_takes_s"
STEP, TWIN = "step_cpu_pct", "control_cpu_pct"
NEXT = "next_step_s"


@dataclass(frozen=True)
class Family:
    """A method that stands for those that survive failures in the same way.

    Attributes:
        name: for reading.
        shown: the method.
        colour: of its mark.
    """

    name: str
    shown: str
    colour: str


FAMILIES = (
    Family("ecemb", "ecemb (4, 3) window auto", COLOURS["ecemb"]),
    Family("ecemb, each step", "ecemb (4, 3)", COLOURS["ecemb"]),
    Family("live copies", "ecemb copies x2", COLOURS["live copies"]),
    Family("snapshots in memory", "snapshots x2", COLOURS["snapshots"]),
    Family("full checkpoints", "full files", COLOURS["full"]),
    Family("full, asynchronous", "full dcp async", COLOURS["full"]),
    Family("Check-N-Run", "check-n-run intermittent", COLOURS["Check-N-Run"]),
    Family("CPR", "cpr vanilla", COLOURS["CPR"]),
)
"""ecemb as it is recommended first. Parity of floats is none of these: its rows may have rounding errors."""


def of_methods(rows: Rows, engine: str) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Method -> metric -> row, on one engine and the smallest number of ranks.

    Of what depends on the tables' size, the row of the smallest ones, which are those that were measured.
    """
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    ranks = min(row["ranks"] for row in rows)
    for row in rows:
        if row["engine"] == engine and row["ranks"] == ranks:
            found.setdefault(row["method"], {}).setdefault(row["metric"], row)
    return found


def reach_pct(rows: Rows, engine: str) -> float:
    """How far from 0 the interval of the control reaches on an engine; infinite without a control."""
    row = of_methods(rows, engine).get(CONTROL, {}).get(STEP)
    return float("inf") if row is None else max(abs(row["low"]), abs(row["high"]))


def quiet_engine(rows: Rows) -> str:
    """The engine on which the control reaches least far."""
    engines = dict.fromkeys(row["engine"] for row in rows)
    return min(engines, key=lambda engine: reach_pct(rows, engine))


def is_certain(row: Mapping[str, Any]) -> bool:
    """Whether a cost's interval leaves 0 out."""
    return row["low"] > 0 or row["high"] < 0 or row["low"] == row["high"]
