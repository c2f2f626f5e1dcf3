"""One screen: what each method takes of a training in all, and what else decides between them.

What a training loses is the sum of what a method takes in steps and in saves, of work that runs again, and of
the time from a failure to the next step. Each part was measured at one size of the tables; their sum is
computed here, to first order, for other sizes and for other times between failures:

    overhead of steps + lost to a save / interval + (lost work + next step) / time between failures

Numbers are read from the answers. Typed are the words around them, and what papers say of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench import RESULTS
from bench.harness import register
from bench.questions.compare.cases import BY_METHOD, HALF_HOUR_S, Case, interval_s, takes_s
from bench.questions.compare.families import CONTROL, COST, NEXT, STEP, TAKES, is_certain
from bench.questions.simulate.methods import of_changes
from bench.report.choosing import ANY, CHOICES, UNPROTECTED, measured, worst
from bench.report.headlines import Documents, of
from bench.report.tables import grid

HOURS = (3.0, 14.0, 100.0)
"""Between two failures of the job."""
SIZES_GB = (1.0, 10.0, 100.0)
"""Of the tables of a rank and their optimizer state."""
MEASURED, SIMULATED, PUBLISHED = "*m*", "*s*", "*p*"
ROWS_BY_INTERVAL = 0.5
"""Power of an interval by which the rows grow that change in it, as the simulation chooses it."""
PAPERS = {"check-n-run intermittent": 1.0, "cpr vanilla": 0.0}
"""Method -> what its paper says that steps take longer by, in %: Check-N-Run less than that; and nothing, as
CPR's servers do nothing between saves."""
ALL_OF_IT = "all of it"
FORMULA = "overhead of steps + lost to a save / interval + (lost work + next step) / time between failures"
TOTALS, KEEPS = (
    ("method", *(f"{hours:g} h" for hours in HOURS)),
    ("method", "next step", "host memory", "may be lost", "same bits"),
)
"""Heads of the two tables."""

Row = Mapping[str, Any]
Values = Mapping[str, Row]


@dataclass(frozen=True)
class Line:
    """Seconds that grow with the tables of a rank.

    Attributes:
        fixed_s: Of tables of no size.
        per_gb_s: Of each GB.
    """

    fixed_s: float
    per_gb_s: float = 0.0

    def at(self, size_gb: float) -> float:
        """Seconds of tables of a size."""
        return self.fixed_s + self.per_gb_s * size_gb


@dataclass(frozen=True)
class Taken:
    """What a method takes, by its parts.

    Attributes:
        case: The method.
        ranks: Of the job.
        steps_pct: What steps take longer by.
        at_most: Whether they take less than that: the interval has 0 in it, or a paper says so.
        lost_s: That training loses to a save.
        written_s: Until a save counts.
        again_s: Of training, that runs again after a failure under a method that doesn't save.
        next_s: From a failure to the next step.
    """

    case: Case
    ranks: int
    steps_pct: float
    at_most: bool
    lost_s: Line
    written_s: Line
    again_s: float
    next_s: Line

    def total_pct(self, hours: float, size_gb: float) -> float:
        """What a training loses in all, in % of its time.

        Args:
            hours: Between two failures.
            size_gb: Of the tables of a rank.
        """
        mtbf_s = 3600 * hours
        lost_s, written_s, again_s = self.lost_s.at(size_gb), self.written_s.at(size_gb), self.again_s
        saves_pct = 0.0
        if self.case.saves:
            every_s = interval_s(self.case, max(lost_s, 1e-9), written_s, mtbf_s, self.ranks)
            if self.case.rule == "half an hour":
                changes_h = of_changes(lost_s / 3600, written_s / 3600, ROWS_BY_INTERVAL, hours, 0.5)
                every_s = 3600 * changes_h
                share = (every_s / HALF_HOUR_S) ** ROWS_BY_INTERVAL
                lost_s, written_s = share * lost_s, share * written_s
            saves_pct = 100 * lost_s / every_s
            forgets = not self.case.goes_back
            again_s = 0.0 if forgets else takes_s(self.case, every_s, written_s, self.ranks)
        return self.steps_pct + saves_pct + 100 * (again_s + self.next_s.at(size_gb)) / mtbf_s


def screen(documents: Documents) -> str:
    """Both tables and how to read them, from the head to head on one machine.

    Raises:
        Unknown: The head to head was not measured.
    """
    rows, found, engine = measured(documents)
    speed = rebuild_gb_per_s(documents, engine)
    totals, keeps = lines(found, SIZES_GB, speed)
    setting = next(row["setting"] for row in rows if row["engine"] == engine)
    storage = next(row["storage"] for row in rows if row["engine"] == engine)
    kills = max(row["repeats"] for row in rows if row["metric"] == NEXT)
    tables = {"sparse": "`ecemb.nn`", "torchrec": "TorchRec"}[engine]
    sizes = " / ".join(f"{size:g}" for size in SIZES_GB)
    rebuilt = f"{speed:.2g} GB/s (measured by `recovery`)" if speed else "the speed of a rebuild"
    title = (
        f"**Time lost in all**, in % of the training, by hours between failures: {sizes} GB of tables a rank."
        f"{origin(documents)}"
    )
    marks = (
        f"{MEASURED} measured. {SIMULATED} simulated: computed from measured parts, or the method's rule. "
        f"{PUBLISHED} the same with the overhead of steps that the method's paper has. ≤: that overhead is "
        "known to be less."
    )
    sums = (
        f"**Time lost** is {FORMULA}. The interval is the method's own for each cell. Lost work is half of "
        "it, and the time until a save counts; CPR forgets it instead. More GB come back at "
        f"{rebuilt} under ecemb, from storage at {storage}, from snapshots as fast as one is taken."
    )
    steps = f"**Overhead of steps**, processor time, with the 95 % interval: {overheads(found)}."
    place = (
        f"**Measured** with tables of {tables} ({setting}), all ranks on one machine; the next step is the "
        f"median of {kills} failures that delete a rank's memory, and the script builds its tables again "
        "meanwhile."
    )
    yours = (
        "**Your own job**: `python -m bench compare --script train.py` measures the methods on it, and "
        "prints both tables."
    )
    below = [marks, sums, steps, place, *worst(documents), never(documents), yours]
    listed = "\n".join(f"- {one}" for one in below)
    return "\n\n".join([title, grid(TOTALS, 1, totals), grid(KEEPS, 1, keeps, words=2), listed])


def on_a_cluster(rows: Sequence[Row]) -> str:
    """The same of a comparison on a cluster or of a script, at the size of its tables.

    Args:
        rows: Of `bench compare` with a launcher, hosts or a script, as JSON has them.
    """
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["method"], {}).setdefault(row["metric"], row)
    whole = {method: values for method, values in found.items() if is_whole(values)}
    totals, keeps = lines(whole, (size_gb(whole),), None)
    said = [
        f"- **{method}** is left out: {values['left_out']['why']}."
        for method, values in found.items()
        if "left_out" in values
    ]
    first = rows[0] if rows else {}
    place = (
        f"{first['script']}: {first['hosts']} hosts with {first['ranks_per_host']} ranks each, on "
        f"{first['device']}, {first['backend']}, launcher {first['launcher']}, network {first['network']}. "
        if first
        else ""
    )
    under = (
        f"{place}The first table: time lost in all, in % of the training, by hours between failures, with "
        f"tables of {size_gb(whole):.2g} GB a rank. It is {FORMULA}, at the method's own interval. "
        f"{MEASURED} measured, {SIMULATED} simulated, {PUBLISHED} with the overhead of steps that the "
        "method's paper has; ≤: it is known to be less. Overhead of steps, wall time, with the 95 % interval "
        f"by resampling launches: {overheads(whole)}. The next step: the median time from a rank's SIGKILL "
        "to it."
    )
    tables = [grid(TOTALS, 1, totals), grid(KEEPS, 1, keeps, words=2)]
    return "\n\n".join(filter(None, [*tables, "\n".join(said), under]))


def lines(
    found: Mapping[str, Values], sizes_gb: Sequence[float], rebuild: float | None
) -> tuple[list[list[str]], list[list[str]]]:
    """The lines of both tables; the method without protection last.

    Args:
        found: Method -> metric -> row.
        sizes_gb: Of the tables of a rank, a number in each cell of the first table.
        rebuild: GB/s, if other sizes than that of the measurement are asked for.
    """
    names = {choice.method: choice.name for choice in CHOICES}
    order = [*(name for name in names if name in found), *(name for name in found if name not in names)]
    totals: list[list[str]] = []
    keeps: list[list[str]] = []
    for method in sorted(order, key=lambda name: name == CONTROL):
        values, name = found[method], names.get(method, method)
        if not is_whole(values):
            continue
        if method == CONTROL:
            totals.append([UNPROTECTED, *[f"{ALL_OF_IT} {SIMULATED}"] * len(HOURS)])
            keeps.append([UNPROTECTED, *kept(values)])
            continue
        of_method = taken(values, size_gb(found), rebuild)
        totals.append([name, *(total(of_method, hours, sizes_gb, SIMULATED) for hours in HOURS)])
        if method in PAPERS:
            as_published = replace(of_method, steps_pct=PAPERS[method], at_most=PAPERS[method] > 0)
            published = (total(as_published, hours, sizes_gb, PUBLISHED) for hours in HOURS)
            totals.append([f"{name}, steps as published", *published])
        keeps.append([name, *kept(values)])
    return totals, keeps


def total(of_method: Taken, hours: float, sizes_gb: Sequence[float], mark: str) -> str:
    """A cell of the first table."""
    each = [of_method.total_pct(hours, size) for size in sizes_gb]
    shown = " / ".join("> 100" if one > 100 else f"{one:.2g}" for one in each)
    return f"{'≤ ' if of_method.at_most else ''}{shown} {mark}"


def kept(values: Values) -> list[str]:
    """A method's cells of the second table."""
    protected = values[NEXT]["method"] != CONTROL
    lost, ranks = values["survives_ranks"]["value"], values[NEXT]["ranks"]
    memory, same = values["memory_over_tables"]["value"], values["bit_identical"]["value"] == 1
    survives = f"any {lost:.0f} of {ranks} {MEASURED}" if lost < ranks else f"all {SIMULATED}"
    return [
        f"{values[NEXT]['value']:.1f} s {MEASURED}",
        f"{f'{memory:.2g}x' if memory else 'none'} {MEASURED}",
        survives if protected else f"all: back to step 0 {SIMULATED}",
        f"{'yes' if same else 'no'} {MEASURED}",
    ]


def taken(values: Values, of_gb: float, rebuild: float | None) -> Taken:
    """A method's parts, from its rows by metric.

    Args:
        values: Of the method, with the tables that were measured.
        of_gb: The size of these.
        rebuild: GB/s of lost memory, or None if no other size is asked for.
    """
    method = values[NEXT]["method"]
    case = BY_METHOD[method]
    step = steps_of(values) if case.acts or case.guard is not None else None
    at_most = step is not None and not is_certain(step)
    steps_pct = 0.0 if step is None else step["high" if at_most else "value"]
    lost_s = line(values, "lost_s")
    written_s = line(values, "until_written_s" if case.behind else "stall_s") if case.saves else Line(0.0)
    per_gb_s = 0.0
    if case.guard is not None and rebuild:
        per_gb_s = 1 / rebuild
    elif method.startswith("snapshots"):
        per_gb_s = lost_s.per_gb_s
    elif case.saves and "storage" in values[NEXT]:
        mb_per_s = float(values[NEXT]["storage"].split()[0])
        per_gb_s = 1000 / mb_per_s * max(1.0, values["stored_over_tables"]["value"])
    next_s = values[NEXT]["value"]
    return Taken(
        case=case,
        ranks=values[NEXT]["ranks"],
        steps_pct=steps_pct,
        at_most=at_most,
        lost_s=lost_s,
        written_s=written_s,
        again_s=0.0 if case.saves else values[TAKES]["value"],
        next_s=Line(next_s - per_gb_s * of_gb, per_gb_s),
    )


def steps_of(values: Values) -> Row | None:
    """What steps take longer by: of a script wall time, else processor time; None if it was not measured."""
    return values.get("step_wall_pct" if "script" in values.get(NEXT, {}) else STEP)


def line(values: Values, metric: str) -> Line:
    """What a save takes, as far as it was measured: by size, or at one size."""
    if f"save_{metric}_per_gb" in values:
        return Line(values[f"fixed_{metric}"]["value"], values[f"save_{metric}_per_gb"]["value"])
    return Line(values[f"save_{metric}"]["value"] if f"save_{metric}" in values else 0.0)


def is_whole(values: Values) -> bool:
    """Whether a method was measured in all parts that the tables need."""
    needed = {NEXT, COST, "survives_ranks", "bit_identical", "memory_over_tables", "stored_over_tables"}
    return needed <= values.keys() and (TAKES in values or values[NEXT]["method"] == CONTROL)


def size_gb(found: Mapping[str, Values]) -> float:
    """Of the tables of a rank that were measured; 0 if no method has saved any."""
    labels = (values[COST]["tables"] for values in found.values() if COST in values)
    return next((float(label.split()[0]) for label in labels if label != ANY), 0.0)


def rebuild_gb_per_s(documents: Documents, engine: str) -> float | None:
    """How fast the lost memory of one rank is rebuilt, on this engine's tables if that was measured."""
    rows = [
        row
        for row in of(documents, "recovery")
        if row["metric"] == "rebuild_gb_per_s" and (row["killed"], row["rebuild"]) == (1, "blocking")
    ]
    rows.sort(key=lambda row: (row["engine"] != engine, -row["table_bytes"]))
    return rows[0]["value"] if rows else None


def overheads(found: Mapping[str, Values]) -> str:
    """What steps take longer by, of methods that do something in them, with the 95 % intervals."""
    names = {choice.method: choice.name for choice in CHOICES} | {CONTROL: UNPROTECTED}
    said: list[str] = []
    for method in sorted(found, key=lambda name: [*names, name].index(name)):
        values, case = found[method], BY_METHOD[method]
        row = steps_of(values)
        if row is not None and (case.acts or case.guard is not None or "script" not in row):
            said.append(
                f"{names.get(method, method)} {row['value']:.2g} ({row['low']:.2g} to {row['high']:.2g})"
            )
    return ", ".join(said) or "not measured"


def origin(documents: Documents) -> str:
    """Where and when the head to head was measured, at which commit, and whether that is stale."""
    said: list[str] = []
    for document in documents:
        if document["question"] == "compare" and "machine" in document:
            machine = document["machine"]
            place = f"{machine['processor']}, {machine['cores']} cores, at commit {document['commit'][:8]}"
            when = f" on {day}" if (day := date(document)) else ""
            stale = ", **stale**: code that it measures has changed since" if "stale" in document else ""
            said.append(f"{when} on {place}{stale}")
    return f" Measured{'; and'.join(said)}." if said else ""


def date(document: Mapping[str, Any]) -> str:
    """The day on which an answer was kept, by the register of runs; empty for one without a line there."""
    kept = [
        line["when"][:10]
        for line in register.lines(RESULTS / register.NAME)
        if "seal" in document and line.get("digest") == document["seal"]
    ]
    return kept[-1] if kept else ""


def never(documents: Documents) -> str:
    """What no answer is of."""
    compared = [*of(documents, "compare"), *of(documents, "compare_cluster"), *of(documents, "overhead")]
    if any(row.get("device", "cpu") not in ("cpu", "arena") for row in compared):
        return "**Never run**: hosts with more than one device under all methods."
    return (
        "**Never run**: any of this on GPUs or other devices, or on a cluster of real hosts. One machine, "
        "and network namespaces on it, are all that was measured."
    )
