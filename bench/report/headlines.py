"""What each system is published for, beside what came out here, and why they differ.

What is published is typed, with where it is from: the paper's abstract, its poster, or a secondary summary.
What came out here is read from the answers to `compare` and `cpr`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Documents = Sequence[Mapping[str, Any]]

TITLE = "Published figures, beside those measured here"
HEADS = ("system", "published", "here", "why they differ")
EXPLANATION = """The published figures are typed; ours are read from the results. Unless a line names another
question, they are those of the head to head, on its engines (sparse / torchrec). In brackets after a cost is
its 95 % interval, and that of the control in the same steps."""
ENGINES = ("sparse", "torchrec")
OURS, AUTO, FILES, SNAPSHOTS = "ecemb (4, 3)", "ecemb (4, 3) window auto", "full files", "snapshots x2"
INTERMITTENT, ROW_WISE = "check-n-run intermittent", "row-wise Adagrad, exact"
HALF_HOUR_S = 1800.0
NOT_MEASURED = "not measured"
UNKNOWN = "cannot tell"
"""On one engine."""


class Unknown(Exception):
    """It was not measured; the message says what."""


class Find(Protocol):
    """Finds a figure of the head to head, on one engine."""

    def __call__(self, metric: str, method: str, key: str = "value") -> float:
        """A metric of a method: its value, or "low" or "high".

        Raises:
            Unknown: There is none.
        """
        ...


def of(documents: Documents, question: str) -> list[Mapping[str, Any]]:
    """The rows of all answers to a question."""
    return [row for one in documents if one["question"] == question for row in one["rows"]]


def value(rows: Sequence[Mapping[str, Any]], metric: str, key: str = "value", **labels: Any) -> float:
    """The value, or another key, of the first row with these labels.

    Raises:
        Unknown: There is none.
    """
    for row in rows:
        if row["metric"] == metric and all(row.get(name) == label for name, label in labels.items()):
            return row[key]
    raise Unknown(f"{metric} of {labels}")


def on_engines(said: Callable[[Find], str]) -> Callable[[Documents], str]:
    """Says something of the head to head, for each engine that was measured.

    What is unknown on one engine doesn't hide another's figure.
    """

    def here(documents: Documents) -> str:
        rows = of(documents, "compare")
        measured = {row["engine"] for row in rows}

        def on(engine: str) -> str | None:
            def find(metric: str, method: str, key: str = "value") -> float:
                return value(rows, metric, key, method=method, engine=engine)

            try:
                return said(find)
            except Unknown:
                return None

        found = [on(engine) for engine in ENGINES if engine in measured]
        if not any(found):
            raise Unknown("compare")
        return " / ".join(one or UNKNOWN for one in found)

    return here


def faster(slow: str, fast: str) -> Callable[[Documents], str]:
    """How many times longer a failure takes under one method: until the next step, and training again."""

    def of_method(find: Find, method: str) -> float:
        return find("next_step_s", method) + find("failure_takes_s", method)

    return on_engines(lambda find: f"{of_method(find, slow) / of_method(find, fast):.3g}x")


def slowed(find: Find) -> str:
    """By how much ecemb with a commit in each step makes training slower."""
    found, low, high = (find("step_cpu_pct", OURS, key) for key in ("value", "low", "high"))
    control = [find("control_cpu_pct", OURS, key) for key in ("low", "high")]
    return f"{found:.3g} % ({low:.3g} to {high:.3g}; control {control[0]:.2g} to {control[1]:.2g})"


def reduced(find: Find) -> str:
    """By how much ecemb's cost is below that of full checkpoints; negative if it is above."""
    ours, files = (find("training_longer_pct", method) for method in (AUTO, FILES))
    if files <= 0:
        raise Unknown("a cost of full checkpoints")
    return f"{100 * (1 - ours / files):.0f} %"


def blocked(find: Find) -> str:
    """How many times longer a save to files stops training than a snapshot does."""
    files, snapshots = (find("save_stall_s", method) for method in (FILES, SNAPSHOTS))
    return f"{files / snapshots:.3g}x"


def cpr_base(documents: Documents) -> str:
    """Full and partial recovery's overhead in CPR's own emulation, on both its data sets."""
    rows = of(documents, "cpr")

    def overhead(data: str, recovery: str) -> str:
        found = value(rows, "overhead_pct", data=data, recovery=recovery, setting="base", source="emulated")
        return f"{found:.3g} %"

    return ", ".join(
        f"{overhead(data, 'full')} -> {overhead(data, 'partial')}" for data in ("kaggle", "terabyte")
    )


def cpr_quality(documents: Documents) -> str:
    """What CPR's failures add to the log loss, with its interval, on each data."""
    said = [
        f"{row['value']:.2g} nats added ({row['low']:.2g} to {row['high']:.2g}) on {row['data']}"
        for row in of(documents, "quality")
        if row["metric"] == "loss_added" and row["method"] == "cpr vanilla"
    ]
    if not said:
        raise Unknown("loss_added")
    return "; ".join(sorted(said, key=len))


def cpr_jobs(documents: Documents) -> str:
    """What failures cost jobs under full recovery, on average and one of ten at least, at both MTBFs."""
    rows = of(documents, "cpr")

    def found(statistic: str) -> str:
        costs = [
            row["value"]
            for row in rows
            if row["metric"] == "handling_pct"
            and row["statistic"] == statistic
            and row["source"] != "published"
        ]
        if not costs:
            raise Unknown("handling_pct")
        return f"{min(costs):.0f} to {max(costs):.0f} %"

    return f"{found('mean')} on average, {found('P90')} for one of ten"


def in_few_bits(metric: str) -> Callable[[Documents], str]:
    """How many times less 8 to 2 bits take, of rows whose state of row-wise Adagrad stays exact."""

    def here(documents: Documents) -> str:
        found = {
            row["bits"]: row["value"]
            for row in of(documents, "check_n_run")
            if row["metric"] == metric
            and row.get("state") == ROW_WISE
            and (row["pattern"], row["policy"]) == ("published", "intermittent")
        }
        if not {"8", "4", "2"} <= found.keys():
            raise Unknown(metric)
        return f"{found['8']:.2g} to {found['2']:.2g}x, with 4 bits {found['4']:.2g}x"

    return here


def hours_to_failure(documents: Documents) -> str:
    """What 90 and 99 % of the failures of a job come within, on each trace's hosts and with processes."""
    rows = [row for row in of(documents, "simulate") if row["metric"] == "hours_to_failure"]
    hours: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["faults"] == "hosts and processes":
            hours.setdefault(row["source"], {})[row["percent"]] = row["value"]
    if not hours:
        raise Unknown("hours_to_failure")
    return "; ".join(f"{found[90]:.0f} h and {found[99]:.0f} h ({name})" for name, found in hours.items())


def cpr_production(documents: Documents) -> str:
    """What of the overhead goes in its production set-up, over all the intervals that it may have had."""
    found = [
        row["value"]
        for row in of(documents, "cpr")
        if row["metric"] == "overhead_removed_pct"
        and row["source"] == "emulated"
        and row["setting"].startswith("production")
    ]
    if not found:
        raise Unknown("overhead_removed_pct")
    return f"{min(found):.0f} to {max(found):.0f} %"


@dataclass(frozen=True)
class Headline:
    """One published figure.

    Attributes:
        system: Who published it.
        published: What, and where.
        here: Finds ours; raises `Unknown`.
        why: They differ.
    """

    system: str
    published: str
    here: Callable[[Documents], str]
    why: str


HEADLINES = (
    Headline(
        "Liu & Xu (CMU)",
        "24 % overhead on training throughput (abstract)",
        on_engines(slowed),
        "theirs codes entries of parameter servers, each update a message; here a step's rows go together, "
        "and bits are coded, with a journal; four ranks share two cores, so that waiting for "
        "each other is most of it",
    ),
    Headline(
        "ECRec",
        "overhead up to 66 % below that of checkpoints (abstract)",
        on_engines(reduced),
        "theirs are whole checkpoints each 30 or 60 minutes of a table of 100 GB, and sends without "
        "acknowledgement or transaction; here full checkpoints come at Young's interval, of small tables",
    ),
    Headline(
        "ECRec",
        "recovery up to 9.8 times faster than from checkpoints (abstract)",
        faster(FILES, OURS),
        "theirs loads 100 GB and runs half an interval again, while servers stay up; here all ranks start "
        "again under every method, and half an interval by Young's formula runs again",
    ),
    Headline(
        "CPR",
        "overhead 8.2 to 8.5 % -> 0.53 to 0.68 % (abstract)",
        cpr_base,
        "`cpr`, emulated; costs are calibrated on these figures, so this shows the formulas only",
    ),
    Headline(
        "CPR",
        "over 91 % of the overhead removed in production (poster)",
        cpr_production,
        "`cpr`, emulated; the poster doesn't give its costs or its PLS target, and ours are the base's",
    ),
    Headline(
        "CPR",
        "failures cost production's jobs 13 % on average, one of ten 30 % or more (poster)",
        cpr_jobs,
        "`cpr`, emulated, with failures each 30 to 14 h; jobs' lengths and costs are not published",
    ),
    Headline(
        "CPR",
        "quality on par with full recovery (abstract)",
        cpr_quality,
        "`quality`, log loss added by 20 failures; `cpr` has its own sweeps",
    ),
    Headline(
        "Check-N-Run",
        "6 to 17 times less written (abstract), by row-wise Adagrad",
        in_few_bits("bandwidth_reduction"),
        "`check_n_run`, with the access that is published; one float of state for a row of 64, exact",
    ),
    Headline(
        "Check-N-Run",
        "2.5 to 8 times less stored (abstract), by row-wise Adagrad",
        in_few_bits("capacity_reduction"),
        "the same",
    ),
    Headline(
        "Check-N-Run",
        "a checkpoint each 30 minutes stalls training for under 7 s: under 0.39 % of the time (secondary)",
        on_engines(lambda find: f"{100 * find('save_stall_s', INTERMITTENT) / HALF_HOUR_S:.2g} %"),
        "four ranks on two cores copy the rows that half an hour changes, 26 % of them, of small tables; "
        "`check_n_run` has the stall beside that of a synchronous checkpoint",
    ),
    Headline(
        "Check-N-Run",
        "90 % of the failures of its jobs come within 13.5 h, 99 % within 53.9 h (figure 3, as recalled)",
        hours_to_failure,
        "`simulate`, of a job on 16 hosts: traces have lost hosts alone, and processes die as DLRover has "
        "it; its jobs fail of all causes, as errors in their own code",
    ),
    Headline(
        "GEMINI",
        "recovery 13 times faster than from remote storage (abstract)",
        faster(FILES, SNAPSHOTS),
        "theirs reads large models over a slow network; here both save by Young's formula, see ECRec",
    ),
    Headline(
        "DLRover",
        "training blocked for 0.2 s and not 2 min by a save: 600 times less (secondary)",
        on_engines(blocked),
        "theirs blocks for the copy to shared memory alone; here a snapshot is also sent before training "
        "continues",
    ),
)


def lines(documents: Documents) -> list[list[str]]:
    """Returns the table's lines; none if nothing of it was measured."""
    found: list[list[str]] = []
    measured = False
    for one in HEADLINES:
        try:
            here, measured = one.here(documents), True
        except Unknown:
            here = NOT_MEASURED
        found.append([one.system, one.published, here, one.why])
    return found if measured else []
