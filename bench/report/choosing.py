"""Which method: tables of those that the pages show side by side, and sentences that carry verdicts.

Numbers are read from the answers. Typed are the words around them, and when to use a method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.methods import JOB_MTBF
from bench.questions.compare.cases import CASES
from bench.questions.compare.families import (
    CONTROL,
    COST,
    NEXT,
    TAKES,
    TWIN,
    is_certain,
    of_methods,
    quiet_engine,
)
from bench.questions.compare.picture import duration
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
"""Of a cost whose interval contains 0, and of methods whose intervals overlap."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """One of the methods that the pages show side by side.

    Attributes:
        name: for reading.
        method: its name in the head to head.
        simulated: its name in the simulation.
        use: it, if this holds.
    """

    name: str
    method: str
    simulated: str
    use: str


CHOICES = (
    Choice(
        '**ecemb**, `window="auto"`',
        "ecemb (4, 3) window auto",
        "ecemb (4, 3), window auto",
        "the bits must be the same, a failure may take some seconds, and memory holds the rows of a window",
    ),
    Choice(
        "**ecemb**, commit in each step",
        OURS,
        "ecemb (4, 3)",
        "no step may run again, the bits must be the same, and memory holds no second copy of the tables",
    ),
    Choice(
        "live copies (two of each row)",
        "ecemb copies x2",
        "live copies x2",
        "no step may run again, and memory holds a second copy of the tables",
    ),
    Choice(
        "snapshots in memory (two of each)",
        "snapshots x2",
        "snapshots x2",
        "minutes may run again, and memory holds several copies of everything",
    ),
    Choice(
        "full checkpoints",
        "full files",
        "full",
        "failures are rare, or the job has few hosts and small tables",
    ),
    Choice(
        "full checkpoints, asynchronous",
        "full dcp async",
        "full, async",
        "the same, but a save would stop the training for too long, and memory holds a copy",
    ),
    Choice(
        "Check-N-Run",
        "check-n-run intermittent",
        "Check-N-Run",
        "tables are large, few of their rows change between two saves, and minutes may run again",
    ),
    Choice(
        "partial recovery (CPR)",
        "cpr vanilla",
        "CPR",
        "the model may forget some samples",
    ),
)
"""ecemb first."""

FORGETS = tuple(case.method for case in CASES if case.rule == "PLS 0.1")
"""Methods of the head to head under which a failure loses samples."""
HEADS = (
    "method",
    "training takes longer by",
    "a failure takes",
    "next step after",
    "memory, over the tables'",
    "ranks that may be lost",
)
ALTOGETHER = "all together"
"""Heads columns of what training takes longer by when its failures are counted, by the size of tables."""
LOSES = ("CPR",)
"""Methods of the simulation under which a failure loses samples."""
BITS, USE = "same bits", "use it if"
"""Columns that one of the tables has."""
UNPROTECTED = "no protection"
ANY = "any"
"""`tables` of what doesn't depend on their size."""
SIZES = (16, 64, 256, 1024, 4096)
"""Hosts of the simulation that are shown."""
MTBF_H = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Hours between failures that are shown."""


def methods(documents: Documents) -> str:
    """The methods of the head to head, the control last, and under them how to read the table.

    Raises:
        Unknown: The head to head was not measured.
    """

    def same_bits(_: str, values: Mapping[str, Row]) -> str:
        return "yes" if values["bit_identical"]["value"] == 1 else "no"

    return side_by_side(documents, BITS, same_bits)


def choices(documents: Documents) -> str:
    """The same with when to use which method.

    Raises:
        Unknown: The head to head was not measured.
    """
    uses = {choice.method: choice.use for choice in CHOICES} | {CONTROL: "the job is short"}
    return side_by_side(documents, USE, lambda method, _: uses[method])


def side_by_side(documents: Documents, last: str, said: Callable[[str, Mapping[str, Row]], str]) -> str:
    """The methods under `HEADS`, and one column more.

    Args:
        documents: All answers.
        last: Its head.
        said: Gives its cell for a method and its rows.

    Raises:
        Unknown: The head to head was not measured.
    """
    rows, found, engine = measured(documents)
    sizes = [
        size for size in dict.fromkeys(row["tables"] for row in rows if row["metric"] == COST) if size != ANY
    ]
    named = [(choice.name, choice.method) for choice in CHOICES] + [(UNPROTECTED, CONTROL)]
    lines: list[list[str]] = []
    for name, method in named:
        if {COST, NEXT} <= found.get(method, {}).keys():
            of_method = [row for row in rows if (row["engine"], row["method"]) == (engine, method)]
            totals = [altogether(of_method, size) for size in sizes]
            lines.append([name, *cells(found[method]), *totals, said(method, found[method])])
    heads = (*HEADS, *(f"{ALTOGETHER}, {size}" for size in sizes), last)
    under = " ".join([reading(documents, rows, engine), *worst(documents)])
    return f"{grid(heads, 1, lines, words=1)}\n\n{under}"


def on_a_cluster(rows: Sequence[Row]) -> str:
    """The methods of a comparison on a cluster, the control last; what it left out; how to read the table.

    Args:
        rows: Of `bench compare` with a launcher, hosts or a script, as JSON has them.
    """
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["method"], {}).setdefault(row["metric"], row)
    names = {choice.method: choice.name for choice in CHOICES}
    order = [*(name for name in names if name in found), *(name for name in found if name not in names)]
    lines: list[list[str]] = []
    for method in sorted(order, key=lambda name: name == CONTROL):
        values = found[method]
        if {COST, NEXT, "survives_ranks", "bit_identical"} <= values.keys():
            name = UNPROTECTED if method == CONTROL else names.get(method, method)
            of_method = [row for row in rows if row["method"] == method]
            totals = altogether(of_method, values[COST]["tables"])
            if TAKES in values and not is_certain(values[COST]):
                totals = UNKNOWN
            lines.append([name, *cells(values), totals, "yes" if values["bit_identical"]["value"] else "no"])
    said = [
        f"- **{method}** is left out: {v['left_out']['why']}."
        for method, v in found.items()
        if "left_out" in v
    ]
    first = rows[0] if rows else {}
    place = (
        f"{first['script']}: {first['hosts']} hosts with {first['ranks_per_host']} ranks each, on "
        f"{first['device']}, {first['backend']}, launcher {first['launcher']}, network {first['network']}. "
        if first
        else ""
    )
    under = (
        f"{place}Training: wall time of steps over that without protection, and the time that saves take at "
        "the method's own interval with 14 hours between failures; in brackets the 95 % interval, by "
        f"resampling launches. *{UNKNOWN}*: the interval contains 0. *{UNPROTECTED.capitalize()}* compares "
        "two such launches. A failure takes training that runs again, or is forgotten. The next step: the "
        f"median time from a rank's SIGKILL to it. *{ALTOGETHER.capitalize()}*: steps, saves, what runs "
        "again, and the next step."
    )
    table = grid((*HEADS, ALTOGETHER, BITS), 1, lines, words=1)
    return "\n\n".join(filter(None, [table, "\n".join(said), under]))


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
    """A ratio with its range; "-" if it was not simulated."""
    return "-" if row is None else f"{row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


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


def cells(values: Mapping[str, Row]) -> list[str]:
    """A method's cells under `HEADS`, but for the name."""
    protected = values[COST]["method"] != CONTROL
    lost, ranks = values["survives_ranks"]["value"], values[COST]["ranks"]
    memory = values["memory_over_tables"]["value"]
    return [
        overhead(values),
        duration(values[TAKES]["value"]) if TAKES in values else "all of it",
        f"{values[NEXT]['value']:.1f} s",
        f"{memory:.2g}x" if memory else "none",
        f"any {lost:.0f} of {ranks}" if lost < ranks else "all" if protected else "all: back to step 0",
    ]


def altogether(rows: Sequence[Row], size: str) -> str:
    """What steps, saves, work that runs again and restarts add to a training with tables of a size.

    What is forgotten does not run again. A restart is the one that was measured, of small tables.

    Args:
        rows: Of one method.
        size: A value of `tables`.
    """
    found = {row["metric"]: row["value"] for row in rows if row.get("tables", ANY) in (size, ANY)}
    if TAKES not in found:
        return "all of it"
    loses = rows[0]["method"] in FORGETS
    again_s = 0.0 if loses else found[TAKES]
    total = found[COST] + 100 * (again_s + found[NEXT]) / JOB_MTBF.total_seconds()
    return f"{total:.2g} %{', forgets' if loses else ''}"


def overhead(values: Mapping[str, Row]) -> str:
    """A cost with its interval, and that of the control beside it; without its value, if 0 is in it."""
    row, control = values[COST], values.get(TWIN)
    beside = f"; control {control['low']:.2g} to {control['high']:.2g}" if control is not None else ""
    low, value, high = (f"{row[key]:.2g}" for key in ("low", "value", "high"))
    if low == high and control is None:
        return f"{value} %"
    interval = f"({low} to {high}{beside})"
    return f"{value} % {interval}" if is_certain(row) else f"{UNKNOWN} {interval}"


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
    return [f"**Where tables are nearly all of a step** (`sparse-heavy` of `overhead`, r = 1 and 2), {said}."]


def origin(documents: Documents) -> str:
    """Where the head to head was measured, at which commit, and whether its code has changed since."""
    said: list[str] = []
    for document in documents:
        if document["question"] == "compare" and "machine" in document:
            machine, commit = document["machine"], document["commit"][:8]
            stale = ", **stale**: code that it measures has changed since" if "stale" in document else ""
            said.append(f"{machine['processor']}, {machine['cores']} cores, at commit {commit}{stale}")
    return f" Measured on {'; '.join(said)}." if said else ""


def reading(documents: Documents, rows: Sequence[Row], engine: str) -> str:
    """How to read a table of the methods."""
    tables = {"sparse": "`ecemb.nn`", "torchrec": "TorchRec"}[engine]
    setting = next(row["setting"] for row in rows if row["engine"] == engine)
    kills = max(row["repeats"] for row in rows if row["metric"] == NEXT)
    return (
        f"Tables of {tables} ({setting}), all ranks on one machine. Training: processor time of steps, and "
        f"the time that saves take, at the method's own interval with 14 hours between failures; in brackets "
        f"the 95 % interval, and the control's, which compares two bare models. *{UNKNOWN}*: the interval "
        f"contains 0. A failure takes training that runs again, or is forgotten. The next step: the median "
        f"time from the kill to it, over {kills} failures that delete a rank's memory, with warm starts; the "
        f"script builds its tables again meanwhile, as under no protection. *{ALTOGETHER.capitalize()}*: "
        "steps, saves and what runs again with tables of this size, and the next step as measured. Memory "
        f"includes the buffers of a step.{origin(documents)}"
    )
