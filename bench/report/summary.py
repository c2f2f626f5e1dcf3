"""Results in short: a table of the methods, when to use which, and a line for each question.

Numbers are read from the answers. Typed are the words around them, and when to use a method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.questions.compare.families import (
    CONTROL,
    GIVEN_UP,
    KILLS,
    OVERHEAD,
    noise_pct,
    of_methods,
    quiet_engine,
)
from bench.report.headlines import Documents, Unknown, cpr_base, of, value
from bench.report.tables import grid

OURS = "ecemb (4, 3)"
FULL_SAVES = "torch.distributed.checkpoint"
UNKNOWN = "cannot tell"
"""For an overhead that is smaller than the difference between the control and itself."""

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
        "**ecemb**, commit in each step",
        OURS,
        "ecemb (4, 3)",
        "no step may run again, the bits must be the same, and memory holds no second copy of the tables",
    ),
    Choice(
        "**ecemb**, `window=16`",
        "ecemb (4, 3) window 16",
        "ecemb (4, 3), window 16",
        "the same, but 16 steps may run again, and memory holds the rows that 16 steps change",
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
        "some steps may run again, and memory holds several copies of everything",
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
        "tables are large, few of their rows change between two saves, and steps may run again",
    ),
    Choice(
        "partial recovery (CPR)",
        "cpr vanilla",
        "CPR",
        "the model may forget some samples",
    ),
)
"""ecemb first."""

HEADS = (
    "method",
    "a step takes longer by",
    "a failure takes",
    "next new step after",
    "memory, over the tables'",
    "ranks that may be lost",
)
BITS, USE = "same bits", "use it if"
"""Columns that one of the tables has."""
UNPROTECTED = "no protection"
SIZES = (16, 64, 256, 1024, 4096)
"""Hosts of the simulation that are shown."""


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
    noise = noise_pct(rows, engine)
    named = [(choice.name, choice.method) for choice in CHOICES] + [(UNPROTECTED, CONTROL)]
    lines = [
        [name, *cells(found[method], noise), said(method, found[method])]
        for name, method in named
        if method in found
    ]
    return f"{grid((*HEADS, last), 1, lines, words=1)}\n\n{reading(engine, noise)}"


def shares(documents: Documents) -> str:
    """The share of time that trains, by simulation, of the same methods by number of hosts.

    Raises:
        Unknown: Nothing was simulated.
    """
    rows = of(documents, "simulate")
    lines = [
        [choice.name, *(trained(rows, choice.simulated, hosts) for hosts in SIZES)] for choice in CHOICES
    ]
    heads = ("method", *(f"{hosts:,} hosts" for hosts in SIZES))
    return (
        f"{grid(heads, 1, lines)}\n\nOf the time of a month; in brackets, of the worst and of the best "
        "month. By simulation: no cluster was used."
    )


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


def cells(values: Mapping[str, Row], noise: float) -> list[str]:
    """A method's cells under `HEADS`, but for the name."""
    protected = values[OVERHEAD]["method"] != CONTROL
    caught_up, lost = values["caught_up_s"], values["survives_ranks"]["value"]
    memory, ranks = values["memory_over_tables"]["value"], values[OVERHEAD]["ranks"]
    steps = values[GIVEN_UP]["value"] / KILLS
    return [
        overhead(values[OVERHEAD], noise if protected else 0.0),
        f"{steps:.3g} step{'s' * (steps != 1)}",
        f"{caught_up['value']:.1f} s",
        f"{memory:.2g}x" if memory else "none",
        f"any {lost:.0f} of {ranks}" if lost < ranks else "all" if protected else "all: back to step 0",
    ]


def overhead(row: Row, noise: float) -> str:
    """An overhead with its interval; without its value, if it is smaller than the noise."""
    interval = f"({row['low']:.2g} to {row['high']:.2g})"
    return f"{UNKNOWN} {interval}" if abs(row["value"]) < noise else f"{row['value']:.2g} % {interval}"


def reading(engine: str, noise: float) -> str:
    """How to read a table of the methods."""
    tables = {"sparse": "`ecemb.nn`", "torchrec": "TorchRec"}[engine]
    return (
        f"All ranks on one machine, tables of {tables}, two failures that delete a rank's memory. In "
        f"brackets: of single lives. *{UNKNOWN}*: a run without protection differs from its twin by up to "
        f"{noise:.2g} %. A failure takes steps that run again or are forgotten. Seconds count from the kill, "
        "and include torchrun's restart. Memory includes the buffers of a step, which do not grow with the "
        "tables; these tables are small."
    )


def trained(rows: Sequence[Row], method: str, hosts: int) -> str:
    """The effective training-time ratio of a method on some hosts; "-" if it was not simulated.

    Raises:
        Unknown: Nothing was.
    """
    if not rows:
        raise Unknown("simulate")
    labels = {"method": method, "hosts": hosts, "faults": "exponential"}
    try:
        found, low, high = (value(rows, "ettr", key, **labels) for key in ("value", "low", "high"))
    except Unknown:
        return "-"
    return f"{found:.2f} ({low:.2f} to {high:.2f})"


def most(rows: Sequence[Row], metric: str, **labels: Any) -> tuple[float, float]:
    """The smallest and the largest value of a metric's rows with these labels.

    Raises:
        Unknown: There are none.
    """
    found = [
        row["value"]
        for row in rows
        if row["metric"] == metric and all(row.get(name) == label for name, label in labels.items())
    ]
    if not found:
        raise Unknown(metric)
    return min(found), max(found)


def of_overhead(documents: Documents) -> str:
    """Of each engine and setting: by commits in each step and, where it was measured, by "auto"."""
    rows = [
        row
        for row in of(documents, "overhead")
        if row["metric"] == "overhead_cpu_pct" and row["code"] == "(4, 3)" and row["method"] == "protected"
    ]

    def shown(row: Row) -> str:
        return f"{row['value']:.2g} % ({row['low']:.2g} to {row['high']:.2g})"

    said: list[str] = []
    for row in rows:
        if (row["window"], row["overlap"]) != (1, "none"):
            continue
        autos = [
            f", window auto {shown(other)}"
            for other in rows
            if (other["window"], other["engine"], other["setting"]) == ("auto", row["engine"], row["setting"])
        ]
        place = f"{row['setting'].partition(':')[0]}, {row['engine']}"
        said.append(f"{shown(row)}{''.join(autos[:1])} ({place})")
    return f"a step with (4, 3) takes more processor time by {'; '.join(said)}" if said else ""


def of_agreement(documents: Documents) -> str:
    rows = of(documents, "agreement")
    messages, cpu = (
        {row["ranks"]: row["value"] for row in rows if row["metric"] == metric}
        for metric in ("agreement_messages_per_transaction", "agreement_cpu_ms")
    )
    if not messages or not cpu:
        raise Unknown("agreement_cpu_ms")
    few, many = min(messages), max(messages)
    return (
        f"a rank sends {messages[few]:.0f} messages a transaction with {few} ranks and "
        f"{messages[many]:.0f} with {many}, and takes {cpu[few]:.2g} and {cpu[many]:.2g} ms of processor time"
    )


def of_start(documents: Documents) -> str:
    rows = of(documents, "start")
    many = most([row | {"value": row["ranks"]} for row in rows], "restart_s")[1]
    restart = value(rows, "restart_s", ranks=many)
    stored = most(rows, "store_value_bytes_max", ranks=2048)[1]
    return (
        f"{many:.0f} ranks restart in {restart:.1f} s; with 2,048 ranks no value in the store exceeds "
        f"{stored / 1024:.0f} KiB"
    )


def of_memory(documents: Documents) -> str:
    rows = [row for row in of(documents, "memory") if row["metric"] == "arena_over_tables"]
    said = ", ".join(f"{row['value']:.2f} times with {row['code']}" for row in rows)
    return f"an arena, which holds the tables, is larger than they are: {said}" if said else ""


def of_recovery(documents: Documents) -> str:
    rows = [row for row in of(documents, "recovery") if row["metric"] == "kill_to_step_s"]

    def seconds(kind: str, size: int, start: str) -> str:
        of_kind = {"kind": kind, "killed": 1, "engine": "sparse", "table_bytes": size, "start": start}
        return f"{value(rows, 'kill_to_step_s', **of_kind):.1f} s"

    def both(kind: str, size: int) -> str:
        return f"{seconds(kind, size, 'warm')} (started cold: {seconds(kind, size, 'cold')})"

    return (
        f"from a kill to the next step {both('process', 64 << 20)}; "
        f"with 256 MiB of lost memory to rebuild {both('memory', 256 << 20)}"
    )


def of_rebuild(documents: Documents) -> str:
    rows = of(documents, "rebuild")
    size = int(most([row | {"value": row["table_bytes"]} for row in rows], "kill_to_step_s")[1])

    def seconds(rebuild: str) -> str:
        return f"{value(rows, 'kill_to_step_s', rebuild=rebuild, table_bytes=size):.1f} s"

    share = value(rows, "throughput_while_rebuilding", rebuild="background", table_bytes=size)
    return (
        f"with {size >> 20:,} MiB of lost memory from a kill to the next step {seconds('background')} "
        f"(rebuilt first: {seconds('blocking')}), and then at {share:.2f} times the speed until it is whole"
    )


def of_kernels(documents: Documents) -> str:
    rows = of(documents, "kernels")
    low, high = most(rows, "update_speedup", kernel="cpu", over="isal", access="scattered")
    packed = most(rows, "update_speedup", kernel="cpu", over="isal", access="packed")
    return (
        f"updates of parity run at {low:.2g} to {high:.2g} times ISA-L's speed on scattered rows, "
        f"at {packed[0]:.2g} to {packed[1]:.2g} times on packed rows"
    )


def of_profile(documents: Documents) -> str:
    rows = of(documents, "profile")
    memory, network = (
        value(rows, "moved_over_least", code="(4, 3)", where=where) for where in ("memory", "network")
    )
    return (
        f"a step moves {memory:.2f} times the fewest possible bytes in memory, {network:.2f} on the network"
    )


def of_scaling(documents: Documents) -> str:
    rows = [row for row in of(documents, "scaling") if row["metric"] == "sent_bytes_per_step"]
    found = {row["ranks"]: row["value"] for row in rows if row["kind"] == "deltas"}
    if not found:
        raise Unknown("sent_bytes_per_step")
    few, many = min(found), max(found)
    return (
        f"a rank sends {found[few] / 1000:,.0f} kB of deltas a step with {few} ranks, "
        f"{found[many] / 1000:,.0f} kB with {many}"
    )


def of_simulate(documents: Documents) -> str:
    rows = of(documents, "simulate")

    def ahead(method: str, among: str) -> float:
        return value(rows, "cells_ahead", method=method, among=among)

    everything, exact = "all", "that lose no samples"
    return (
        f"of the map's cells, CPR leads {ahead('CPR', everything):.0f} for certain; without lost samples, "
        f"Check-N-Run leads {ahead('Check-N-Run', exact):.0f}, live copies "
        f"{ahead('live copies', exact):.0f}, ecemb {ahead('ecemb', exact):.0f}, and of "
        f"{ahead('cannot tell', exact):.0f} one cannot tell"
    )


def of_quality(documents: Documents) -> str:
    rows = of(documents, "quality")
    ours, cpr, bits = (
        value(rows, "auc_lost", method=method)
        for method in ("ecemb (6, 4)", "cpr vanilla", "check-n-run, 4 bits")
    )
    return f"AUC lost: ecemb {ours:.2g}, CPR {cpr:.2g}, Check-N-Run with 4 bits {bits:.2g}"


def of_cpr(documents: Documents) -> str:
    return f"overhead of full -> partial recovery, emulated: {cpr_base(documents)}"


def of_check_n_run(documents: Documents) -> str:
    rows = of(documents, "check_n_run")
    labels = {"pattern": "published", "state": "none", "policy": "intermittent", "bits": "4"}
    written = value(rows, "bandwidth_reduction", **labels)
    kept = value(rows, "capacity_reduction", **labels)
    return f"with 4 bits, {written:.2g} times less written and {kept:.2g} times less kept"


def of_publish(documents: Documents) -> str:
    rows = of(documents, "publish")

    def said(writer: str, bits: str) -> str:
        seconds, size = (
            value(rows, metric, writer=writer, bits=bits) for metric in ("freshness_s", "written_mb")
        )
        return f"{seconds:.2g} s and {size:.3g} MB"

    return (
        f"from a commit to served rows, and written in an interval: full saves {said(FULL_SAVES, 'exact')}, "
        f"consecutive increments {said('consecutive', 'exact')}, with 4 bits {said('consecutive', '4')}"
    )


def of_drift(documents: Documents) -> str:
    rows = of(documents, "drift")
    floats, bits = (most(rows, "rebuilt_error_worst", method=method)[1] for method in ("float32", "bits"))
    return f"parity of float32: a row is off by up to {floats:.1g} of its norm; parity of bits: {bits:.1g}"


def of_quantization(documents: Documents) -> str:
    rows = of(documents, "quantization")
    low, high = most(rows, "error_over_kmeans", method="adaptive", bits=4)
    return f"4 bits, adaptive: {low:.2g} to {high:.2g} times the error of k-means"


def of_compare(documents: Documents) -> str:
    found = measured(documents)[1]
    seconds = [found[method]["caught_up_s"]["value"] for method in (OURS, "full files") if method in found]
    if len(seconds) != len(("ecemb", "files")):
        raise Unknown("caught_up_s")
    return (
        f"the table above; next new step after {seconds[0]:.1f} s, with full checkpoints {seconds[1]:.1f} s"
    )


ANSWERS: dict[str, Callable[[Documents], str]] = {
    "compare": of_compare,
    "overhead": of_overhead,
    "recovery": of_recovery,
    "rebuild": of_rebuild,
    "memory": of_memory,
    "simulate": of_simulate,
    "quality": of_quality,
    "scaling": of_scaling,
    "agreement": of_agreement,
    "start": of_start,
    "profile": of_profile,
    "kernels": of_kernels,
    "cpr": of_cpr,
    "check_n_run": of_check_n_run,
    "publish": of_publish,
    "quantization": of_quantization,
    "drift": of_drift,
}
"""Question -> its answer in a line; the order of the questions on the summary page."""


def answer(question: str, documents: Documents) -> str:
    """A question's answer in a line; "" where the numbers for it are missing."""
    try:
        return ANSWERS[question](documents) if question in ANSWERS else ""
    except Unknown:
        return ""
