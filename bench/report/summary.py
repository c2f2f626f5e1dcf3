"""Each question's answer in a line. Numbers are read from the answers; typed are the words around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.methods import JOB_MTBF
from bench.questions.compare.families import COST, NEXT
from bench.questions.recovery.question import COLD, REPLACED, STAYS, WARM
from bench.report import restarts, screen
from bench.report.choosing import CHOICES, EXACT, OURS, counted, leads, measured
from bench.report.headlines import Documents, Unknown, cpr_base, of, value

IN_WORDS = {
    STAYS: "processes stay",
    REPLACED: "are replaced",
    WARM: "restarted warm",
    COLD: "restarted cold",
}
"""Start, in few words."""
FULL_SAVES = "torch.distributed.checkpoint"

Row = Mapping[str, Any]


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
    """Of each setting and engine: by commits in each step and, where it was measured, by "auto".

    A setting that several runs measured has the values of all.
    """
    found: dict[str, dict[Any, list[float]]] = {}
    for row in of(documents, "overhead"):
        if row["metric"] == "overhead_cpu_pct" and (row["code"], row["method"]) == ("(4, 3)", "protected"):
            place = f"{row['setting'].partition(':')[0]}, {row['engine']}"
            if row["window"] == "auto" or (row["window"], row["overlap"]) == (1, "none"):
                found.setdefault(place, {}).setdefault(row["window"], []).append(row["value"])

    def shown(values: Sequence[float]) -> str:
        low, high = (f"{value:.2g}" for value in (min(values), max(values)))
        return f"{low} %" if low == high else f"{low} to {high} %"

    def of_place(place: str) -> str:
        autos = found[place].get("auto")
        return f"{place}: {shown(found[place][1])}{f', window auto {shown(autos)}' if autos else ''}"

    said = [of_place(place) for place, windows in found.items() if 1 in windows]
    return f"a step with (4, 3) takes more processor time. {'; '.join(said)}" if said else ""


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
    rows = of(documents, "recovery")

    def after(lost: str) -> str:
        found = restarts.seconds(rows, lost)
        if not found:
            raise Unknown(restarts.NEXT)
        return ", ".join(f"{IN_WORDS[start]} {seconds:.2g} s" for start, seconds in found.items())

    return (
        f"from a kill to the next step: {after('a process')}; "
        f"with 256 MiB of lost memory to rebuild: {after('256 MiB of memory, rebuilt first')}"
    )


def of_rebuild(documents: Documents) -> str:
    rows = of(documents, "rebuild")
    uniform = [row | {"value": row["table_bytes"]} for row in rows if row.get("setting") == "uniform"]
    sizes = tuple(map(int, most(uniform, "kill_to_step_s")))

    def seconds(rebuild: str) -> str:
        each = (value(rows, "kill_to_step_s", rebuild=rebuild, table_bytes=size) for size in sizes)
        return " and ".join(f"{one:.1f}" for one in each) + " s"

    share = value(
        rows, "throughput_while_rebuilding", rebuild="background", setting="dlrm", dense="accelerator"
    )
    return (
        f"with {sizes[0] >> 20:,} and {sizes[1] >> 20:,} MiB of lost memory from a kill to the next step "
        f"{seconds('background')} "
        f"(rebuilt first: {seconds('blocking')}); "
        f"`dlrm` beside an accelerator, at {share:.2f} times the speed until all is there"
    )


def of_elastic(documents: Documents) -> str:
    moves = [
        f"{row['from']} to {row['to']} ranks in {row['value']:.1f} s{', a host lost' if row['lost'] else ''}"
        for row in of(documents, "elastic")
        if row["metric"] == "move_s"
    ]
    return f"tables move from {'; from '.join(moves)}" if moves else ""


def of_kernels(documents: Documents) -> str:
    """Over ISA-L or, where its library was not there, over zfec."""
    rows = of(documents, "kernels")
    others = {row["over"] for row in rows if row["metric"] == "update_speedup"}
    name, shown = ("isal", "ISA-L") if "isal" in others else ("zfec", "zfec")
    low, high = most(rows, "update_speedup", kernel="cpu", over=name, access="scattered")
    packed = most(rows, "update_speedup", kernel="cpu", over=name, access="packed")
    return (
        f"updates of parity run at {low:.2g} to {high:.2g} times the speed of {shown} on scattered rows, "
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


def of_host(documents: Documents) -> str:
    rows = of(documents, "host")
    cores, threads = (
        value(rows, metric, commit="this", code="(4, 3)", **labels)
        for metric, labels in (
            ("core_s_per_gb", {"phase": "all", "threads": 1}),
            ("two_threads_over_one", {}),
        )
    )
    over = value(rows, "put_over_copy", commit="this", threads=2)
    ranks = value(rows, "two_ranks_over_one", commit="this")
    return (
        f"{cores:.2g} core-seconds for each GB of changed rows with (4, 3); two threads are {threads:.2g} "
        f"times as fast as one; tables are put back at {over:.2g} times the speed of a copy; two ranks "
        f"together allocate {ranks:.2g} times as fast as one"
    )


def of_network(documents: Documents) -> str:
    """Of each link, what a commit in each step adds, and how fast lost memory comes back."""
    rows = of(documents, "network")
    links = dict.fromkeys(row["link"] for row in rows if row["metric"] == "added_wall_ms")

    def said(link: str) -> str:
        added, speed = (
            value(rows, metric, link=link, **labels)
            for metric, labels in (("added_wall_ms", {"window": 1}), ("rebuild_mb_per_s", {}))
        )
        return f"{link}: {added:.2g} ms and {speed:.0f} MB/s"

    if not links:
        raise Unknown("added_wall_ms")
    return f"what a commit adds to a step, and a rebuild's speed: {'; '.join(map(said, links))}"


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
    found = leads(of(documents, "simulate"), "cells_first")
    said = [f"{job}: {counted(cells)}" for (job, among), cells in found.items() if among == EXACT]
    return f"cells of the map, first at the likeliest inputs where no sample may be lost: {'; '.join(said)}"


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
    """What each method takes in all of the training that was measured."""
    found = measured(documents)[1]
    size, hours = screen.size_gb(found), JOB_MTBF.total_seconds() / 3600
    said = [
        f"{choice.name} {screen.total(screen.taken(values, size, None), hours, (size,), '').strip()} %"
        for choice in CHOICES
        if screen.is_whole(values := found.get(choice.method, {}))
    ]
    if not said:
        raise Unknown(NEXT)
    return f"time lost in all with {size:.2g} GB a rank and {hours:.0f} h between failures: {'; '.join(said)}"


def of_compare_cluster(documents: Documents) -> str:
    rows = of(documents, "compare_cluster")
    named = {"each step": OURS, 'window "auto"': "ecemb (4, 3) window auto", "full checkpoints": "full files"}
    said = [
        f"{name}: {found[COST]:.2g} % longer, next step after {found[NEXT]:.1f} s"
        for name, method in named.items()
        if {COST, NEXT}
        <= (found := {row["metric"]: row["value"] for row in rows if row["method"] == method}).keys()
    ]
    if not said:
        raise Unknown(NEXT)
    return f"{rows[0]['hosts']} hosts, {rows[0]['network']}; {'; '.join(said)}"


ANSWERS: dict[str, Callable[[Documents], str]] = {
    "compare": of_compare,
    "compare_cluster": of_compare_cluster,
    "overhead": of_overhead,
    "recovery": of_recovery,
    "rebuild": of_rebuild,
    "elastic": of_elastic,
    "memory": of_memory,
    "simulate": of_simulate,
    "quality": of_quality,
    "scaling": of_scaling,
    "agreement": of_agreement,
    "network": of_network,
    "start": of_start,
    "profile": of_profile,
    "host": of_host,
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
