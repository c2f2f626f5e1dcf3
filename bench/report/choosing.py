"""Which method: those that the pages show side by side, what simulation says of them, and the worst case.

Numbers are read from the answers. Typed are the words around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.questions.compare.families import of_methods, quiet_engine
from bench.questions.simulate.verdicts import ALL, EXACT, LEAN
from bench.report.headlines import Documents, Unknown, of
from bench.report.tables import grid

OURS = "ecemb (4, 3)"
PANELS = {
    ALL: "samples may be lost",
    EXACT: "no sample may be lost",
    LEAN: "nor memory hold a second copy",
}
"""Panel of the map -> what it allows."""
UNKNOWN = "cannot tell"
"""Of methods whose ranges overlap."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """One of the methods that the pages show side by side.

    Attributes:
        name: for reading.
        method: its name in the head to head.
        simulated: its name in the simulation.
    """

    name: str
    method: str
    simulated: str


CHOICES = (
    Choice('**ecemb**, `window="auto"`', "ecemb (4, 3) window auto", "ecemb (4, 3), window auto"),
    Choice("**ecemb**, commit in each step", OURS, "ecemb (4, 3)"),
    Choice("live copies (two of each row)", "ecemb copies x2", "live copies x2"),
    Choice("snapshots in memory (two of each)", "snapshots x2", "snapshots x2"),
    Choice("full checkpoints", "full files", "full"),
    Choice("full checkpoints, asynchronous", "full dcp async", "full, async"),
    Choice("Check-N-Run", "check-n-run intermittent", "Check-N-Run"),
    Choice("partial recovery (CPR)", "cpr vanilla", "CPR"),
)
"""ecemb first."""

UNPROTECTED = "no protection"
ANY = "any"
"""`tables` of what doesn't depend on their size."""
SIZES = (16, 64, 256, 1024, 4096)
"""Hosts of the simulation that are shown."""
MTBF_H = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Hours between failures that are shown."""


def shares(documents: Documents) -> str:
    """The share of time that trains, by simulation, of the same methods by number of hosts.

    Raises:
        Unknown: Nothing was simulated.
    """
    heads = [(hosts, f"{hosts:,} hosts") for hosts in SIZES]
    return simulated(documents, "by_hosts", "hosts", heads, "")


def mtbfs(documents: Documents) -> str:
    """The same by the time between failures.

    Raises:
        Unknown: Nothing was simulated.
    """
    heads = [(hours, f"{hours:g} h") for hours in MTBF_H]
    return simulated(documents, "by_mtbf", "mtbf_h", heads, " of 128 hosts")


def simulated(
    documents: Documents, metric: str, label: str, heads: Sequence[tuple[float, str]], job: str
) -> str:
    """A table of the effective training-time ratio, and of who is ahead in each column.

    Raises:
        Unknown: It was not simulated.
    """
    rows = [row for row in of(documents, "simulate") if row["metric"] == f"ettr_{metric}"]
    if not rows:
        raise Unknown(f"ettr_{metric}")
    profile = rows[0]["job"]
    found = {(row["method"], row[label]): row for row in rows if row["job"] == profile}
    lines = [
        [choice.name, *(ratio(found.get((choice.simulated, size))) for size, _ in heads)]
        for choice in CHOICES
    ]
    ahead = [row for row in of(documents, "simulate") if row["metric"] == f"ahead_{metric}"]
    for one in dict.fromkeys(row["job"] for row in ahead):
        for among, said in PANELS.items():
            at = {row[label]: row for row in ahead if (row["job"], row["among"]) == (one, among)}
            lines.append([f"*ahead, {one}, {said}*", *(leader(at.get(size)) for size, _ in heads)])
    return (
        f"{grid(('method', *(head for _, head in heads)), 1, lines)}\n\nThe share of time that trains{job}, "
        f"by simulation: no cluster was used. Of methods: of jobs with {profile}; in brackets with one group "
        "of inputs at either end of its range. *Ahead*: the kind of method that is first at the likeliest "
        "inputs, in bold where it is first over the whole range of all inputs, else with those that may be."
    )


def ratio(row: Row | None) -> str:
    """A ratio with its range, if one would see it; "-" if it was not simulated."""
    if row is None:
        return "-"
    value, low, high = (f"{row[key]:.2f}" for key in ("value", "low", "high"))
    return value if low == high else f"{value} ({low} to {high})"


def leader(row: Row | None) -> str:
    """The kind that is ahead, bold if for certain, else with those that may be ahead as well."""
    if row is None:
        return "-"
    first, *others = row["candidates"].split(", ")
    return f"{first} (or {', '.join(others)})" if others else f"**{first}**"


def leads(rows: Sequence[Row], metric: str) -> dict[tuple[str, str], dict[str, float]]:
    """(profile of jobs, panel of its map) -> kind of method -> cells.

    Args:
        rows: Of the simulation.
        metric: "cells_ahead" for certain, which has `UNKNOWN` as well, or "cells_first".

    Raises:
        Unknown: There is no map.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["metric"] == metric:
            found.setdefault((row["job"], row["among"]), {})[row["method"]] = row["value"]
    if not found:
        raise Unknown(metric)
    return found


def verdicts(documents: Documents) -> str:
    """What the map says: who is first by profile and panel, and what turns it.

    Raises:
        Unknown: There is no map.
    """
    rows = of(documents, "simulate")
    certain, first = leads(rows, "cells_ahead"), leads(rows, "cells_first")
    lines: list[list[str]] = []
    for (job, among), cells in first.items():
        sure = certain[job, among]
        lines.append([job, PANELS[among], f"{sure[UNKNOWN]:.0f}", counted(sure, UNKNOWN), counted(cells)])
    heads = ("jobs", "where", UNKNOWN, "first for certain", "first at the likeliest inputs")
    return "\n\n".join([grid(heads, 2, lines, words=2), "\n".join(turning(rows))])


def counted(cells: Mapping[str, float], but: str = "") -> str:
    """Kinds of methods with their cells, the most first."""
    ranked = sorted(((n, name) for name, n in cells.items() if n and name != but), reverse=True)
    return ", ".join(f"{name} {n:.0f}" for n, name in ranked) or "none"


def turning(rows: Sequence[Row]) -> list[str]:
    """The inputs that turn most cells of each profile, at the ends of their ranges."""
    most: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["metric"] == "cells_turned" and row["among"] == EXACT:
            of_job = most.setdefault(row["job"], {})
            of_job[row["input"]] = max(row["value"], of_job.get(row["input"], 0.0))
    lines: list[str] = []
    for job, cells in most.items():
        ranked = sorted((name for name in cells if cells[name]), key=lambda name: -cells[name])[:3]
        said = ", ".join(f"{name} ({cells[name]:.0f})" for name in ranked)
        lines.append(f"- **{job}**, cells that turn where no sample may be lost: {said or 'none'}.")
    return lines


def measured(documents: Documents) -> tuple[list[Row], dict[str, dict[str, Row]], str]:
    """The rows of the head to head, those of the quietest engine by method and metric, and this engine.

    Raises:
        Unknown: The head to head was not measured.
    """
    rows = of(documents, "compare")
    if not rows:
        raise Unknown("compare")
    engine = quiet_engine(rows)
    return rows, of_methods(rows, engine), engine


def worst(documents: Documents) -> list[str]:
    """What a commit in each step costs where the tables are nearly all of a step; none if not measured."""
    rows = [
        row
        for row in of(documents, "overhead")
        if (row["metric"], row.get("method")) == ("overhead_cpu_pct", "protected")
        and row["setting"].startswith("sparse-heavy")
    ]
    found = {window: [row["value"] for row in rows if row["window"] == window] for window in (1, "auto")}
    if not all(found.values()):
        return []
    each, auto = (f"{min(values):.2g} to {max(values):.2g} %" for values in found.values())
    said = f'a commit in each step takes {each} more processor time, and `window="auto"` {auto}'
    case = "tables nearly all of a step (`sparse-heavy` of `overhead`, r = 1 and 2)"
    return [f"**The worst case**, {case}: {said}."]
