"""Seconds from a kill to the next step, by how processes start again: a table and a sentence of README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.questions.recovery.question import COLD, REPLACED, SPARSE, STAYS, TORCHREC, WARM
from bench.questions.recovery.rank import BACKGROUND, BLOCKING
from bench.report import tables
from bench.report.headlines import Documents, Unknown, of

NEXT = "kill_to_step_s"
STARTS: Mapping[str, str] = {
    STAYS: "processes stay (`ecemb.run`)",
    REPLACED: "`ecemb-run` replaces them",
    WARM: "torchrun restarts `ecemb-run`",
    COLD: "torchrun restarts python",
}
"""Start -> its column."""
WHERE: Mapping[str, str] = {
    STAYS: "the other processes stay",
    REPLACED: "`ecemb-run` replaces all",
    WARM: "torchrun restarts all by `ecemb-run`",
    COLD: "torchrun starts python again",
}
"""Start -> it in a sentence."""
_SPARSE = {"engine": SPARSE, "killed": 1}
_TORCHREC = {"engine": TORCHREC, "killed": 1}
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "a process": _SPARSE | {"kind": "process", "table_bytes": 64 << 20},
    "256 MiB of memory, rebuilt first": _SPARSE
    | {"kind": "memory", "table_bytes": 256 << 20, "rebuild": BLOCKING},
    "256 MiB of memory, rebuilt beside training": _SPARSE
    | {"kind": "memory", "table_bytes": 256 << 20, "rebuild": BACKGROUND},
    "a process, TorchRec's tables": _TORCHREC | {"kind": "process"},
    "256 MiB of memory, TorchRec's tables": _TORCHREC | {"kind": "memory", "rebuild": BLOCKING},
}
"""What is lost -> the labels of its rows; a row without one of them has it."""
OTHERS = {
    "With TorchRec's tables it takes": "a process, TorchRec's tables",
    "With 256 MiB of lost memory to rebuild beside that:": "256 MiB of memory, TorchRec's tables",
}
"""What the sentence says of slower cases -> the line of the table."""

Row = Mapping[str, Any]


def seconds(rows: Sequence[Row], lost: str) -> dict[str, float]:
    """Start -> the median of the seconds after a loss; of the starts that were measured, in their order."""
    found = {
        row["start"]: row["value"]
        for row in rows
        if row["metric"] == NEXT
        and all(row.get(name, label) == label for name, label in LOSSES[lost].items())
        and ("rebuild" in row or LOSSES[lost].get("rebuild") != BACKGROUND)
    }
    return {start: found[start] for start in STARTS if start in found}


def table(documents: Documents) -> str:
    """A line for each loss, a column for each start.

    Raises:
        Unknown: It was not measured.
    """
    rows = of(documents, "recovery")
    found = {lost: each for lost in LOSSES if (each := seconds(rows, lost))}
    if not found:
        raise Unknown(NEXT)
    starts = [start for start in STARTS if any(start in each for each in found.values())]
    lines = [
        [lost, *(f"{each[start]:.2g} s" if start in each else "" for start in starts)]
        for lost, each in found.items()
    ]
    shown = tables.grid(("lost", *(STARTS[start] for start in starts)), 1, lines)
    return f"{shown}\n\n{_reading(documents, rows)}"


def sentence(documents: Documents) -> str:
    """What follows the death of a process, by start.

    Raises:
        Unknown: It was not measured.
    """
    rows = of(documents, "recovery")
    found = seconds(rows, "a process")
    if not found:
        raise Unknown(NEXT)
    said = [f"{value:.2g} s where {WHERE[start]}" for start, value in found.items()]
    listed = " and ".join(filter(None, [", ".join(said[:-1]), said[-1]]))
    first = (
        f"**From the kill of a process to the next step of all ranks**, with tables of `ecemb.nn` and memory "
        f"that is still there: {listed} ([table](#a-training-that-loses-a-rank))."
    )
    lines = [first]
    for said_of, lost in OTHERS.items():
        if slower := sorted(seconds(rows, lost).values()):
            lines.append(f"{said_of} {slower[0]:.2g} to {slower[-1]:.2g} s.")
    return " ".join(lines)


def _reading(documents: Documents, rows: Sequence[Row]) -> str:
    kills = [row["repeats"] for row in rows if row["metric"] == NEXT]
    said = [
        f"{one['machine']['processor']}, {one['machine']['cores']} cores, at commit {one['commit'][:8]}"
        f"{', **stale**: code that it measures has changed since' if 'stale' in one else ''}"
        for one in documents
        if one["question"] == "recovery"
    ]
    return (
        f"Medians of {min(kills)} to {max(kills)} kills each, 4 ranks on one machine. "
        f"Measured on {'; '.join(said)}. [Phases and intervals](docs/results/recovery.md)."
    )
