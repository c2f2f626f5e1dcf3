"""The tables of a question's answer, in Markdown, from the JSON in bench/results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.result import FIXED, Label
from bench.report import provenance

ACROSS = ("source", "spread", "trace", "hosts", "kernel", "method", "over", "part", "buffer", "phase")
"""Labels whose values become columns, side by side; a table takes the first that varies in it."""

SHEETS = {
    "check_n_run": (
        ("changed_rows_pct",),
        ("written_pct", "stored_pct", "intervals_between_full"),
        ("bandwidth_reduction", "capacity_reduction"),
        ("log_loss", "auc"),
        ("budget_pct", "least_bits"),
        ("loss_added_pct", "loss_added", "auc_lost", "within_budget"),
        (
            *("stall_ms", "stall_over_synchronous", "whole_after_ms"),
            *("checkpoint_cpu_ms", "checkpoint_bytes", "tracking_pct"),
        ),
        ("tracking_ns_per_row",),
    ),
    "compare": (
        (*("training_longer_pct", "failure_takes_s", "saves_pct", "interval_s"),),
        (
            *("step_cpu_pct", "control_cpu_pct", "step_wall_pct", "control_wall_pct", "bare_step_s"),
            *("window_steps", "touched_rows_per_step", "sent_bytes_per_step"),
        ),
        (
            *("next_step_s", "prepare_s", "caught_up_s", "restart_sent_bytes", "steps_run_again"),
            *("steps_forgotten", "bit_identical", "off_by", "survives_ranks", "memory_over_tables"),
            "stored_over_tables",
        ),
        ("save_lost_s", "save_stall_s", "save_stall_cpu_s", "save_until_written_s"),
        (
            *("fixed_lost_s", "save_lost_s_per_gb", "fixed_stall_s", "save_stall_s_per_gb"),
            *("fixed_stall_cpu_s", "save_stall_cpu_s_per_gb", "fixed_until_written_s"),
            *("save_until_written_s_per_gb", "save_written_bytes", "save_sent_bytes"),
        ),
    ),
    "publish": (
        (
            *("freshness_s", "step_to_served_s", "written_mb"),
            *("first_read_s", "not_served", "changed_rows_pct"),
        ),
    ),
    "quality": (
        ("auc", "auc_lost", "log_loss", "loss_added", "bit_identical", "steps_run_again", "pls"),
        ("samples", "malformed_lines"),
    ),
}
"""Questions of which several metrics share a table, a column each, and which those are."""

BEFORE: dict[str, tuple[str, str]] = {
    "overhead": (
        "phases_cpu_pct",
        "This answer is older than the comparison by pairs: brackets span its rounds, and it has no control.",
    ),
}
"""Question -> a metric that its older answers lack, and what to say of them."""

_KEYS = ("question", "commit", "machine", "versions", "seed", "rows")
_MIB = 1 << 20
_SHORT_HASH = 12


PICTURED = ("timeline_ms", "loss_of_pair", "auc_of_pair", "best_ettr")
"""Metrics for a picture, with too many rows for a table."""
RENAMED = {"heads": "status"}
"""Former names of a step's phases, in results that are older than the new ones."""
ELSEWHERE = ("failures", "follower_kills", "kills", "soak")
"""What `make failures`, `follower-kills`, `kills` and `soak` write answers no question of bench/: no page."""


class BadResult(Exception):
    """A file in bench/results that no question of bench/ has written; the message names it."""


def replace(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def load(results: Path) -> list[dict[str, Any]]:
    """Reads all documents of a folder, in the order of their files' names; "stale" says what is old in one.

    Raises:
        BadResult: One isn't in the form.
    """
    documents: list[dict[str, Any]] = []
    old = provenance.noted(results)
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in _KEYS if key not in content]
        if missing:
            raise BadResult(
                f"{path} has no {', '.join(missing)}: write it by `python -m bench QUESTION --json`"
            )
        if content["question"] not in ELSEWHERE:
            rows = [row | _renamed(row) for row in content["rows"]]
            documents.append(
                content | {"rows": rows} | ({"stale": old[path.name]} if path.name in old else {})
            )
    return documents


def _renamed(row: Mapping[str, Any]) -> dict[str, Any]:
    """The labels of a row that have another name since it was made."""
    return {key: RENAMED[row[key]] for key in ("phase", "span") if row.get(key) in RENAMED}


def origin(document: Mapping[str, Any]) -> str:
    """Says where and with what a document's numbers were measured."""
    machine, versions = document["machine"], document["versions"]
    commit, dirty, _ = document["commit"].partition("-dirty")
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    when = f" on {document['date']}" if "date" in document else ""
    quick = "A quick run, not for quoting. " if document.get("quick") else ""
    made = (
        f"Made by `{document['command']}` in {document['minutes']:.3g} minutes. "
        if "command" in document
        else ""
    )
    metric, lacking = BEFORE.get(document["question"], ("", ""))
    before = f"{lacking} " if lacking and all(row["metric"] != metric for row in document["rows"]) else ""
    return (
        f"{before}{quick}{made}Measured{when} on {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}"
        f"{', ' + machine['gpu'] if 'gpu' in machine else ''}; {packages}; "
        f"commit {commit[:_SHORT_HASH]}{dirty}, seed {document['seed']}.{old(document)}"
    )


def old(document: Mapping[str, Any]) -> str:
    """Says that a document is older than the code that it measures, if it is."""
    return f" **Stale**: {document['stale']}." if "stale" in document else ""


def metrics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns one table for each metric, under its name and unit."""
    tables: list[str] = []
    for metric in dict.fromkeys(row["metric"] for row in rows if row["metric"] not in PICTURED):
        chosen = [row for row in rows if row["metric"] == metric]
        unit = chosen[0]["unit"]
        tables.append(f"**`{metric}`**, {unit}\n\n{table(chosen, unit)}")
    return tables


def table(rows: Sequence[Mapping[str, Any]], unit: str) -> str:
    """Returns one metric's rows as a table in Markdown.

    Raises:
        BadResult: Two rows have the same labels.
    """
    labels = list(dict.fromkeys(key for row in rows for key in row if key not in FIXED))
    varying = (name for name in ACROSS if name in labels and len({row.get(name) for row in rows}) > 1)
    across = next(varying, None)
    down = [label for label in labels if label != across]
    columns = list(dict.fromkeys(row.get(across, "") for row in rows)) if across is not None else [unit]
    lines: dict[tuple[Label, ...], dict[Label, str]] = {}
    for row in rows:
        line = lines.setdefault(tuple(row.get(label, "") for label in down), {})
        column = row.get(across, "") if across is not None else unit
        if column in line:
            raise BadResult(f"two rows of {row['metric']} have the same labels: {row}")
        line[column] = cell(row)
    shown = [
        [*(labelled(name, value) for name, value in zip(down, key, strict=True)), *map(line.get, columns)]
        for key, line in lines.items()
    ]
    heads = [*down, *(labelled(str(across), column) for column in columns)]
    return grid(heads, len(down), shown)


def sheet(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns several metrics' rows as one table, a column each, under the labels that all rows share.

    Raises:
        BadResult: Two rows of a metric have the same labels.
    """
    labels = list(dict.fromkeys(key for row in rows for key in row if key not in FIXED))
    shared = [label for label in labels if len({row.get(label) for row in rows}) == 1]
    down = [label for label in labels if label not in shared]
    units = {row["metric"]: row["unit"] for row in rows}
    lines: dict[tuple[Label, ...], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(tuple(row.get(label, "") for label in down), {})
        if row["metric"] in line:
            raise BadResult(f"two rows of {row['metric']} have the same labels: {row}")
        line[row["metric"]] = cell(row)
    shown = [
        [
            *(labelled(name, value) for name, value in zip(down, key, strict=True)),
            *(line.get(metric, "-") for metric in units),
        ]
        for key, line in lines.items()
    ]
    heads = [*down, *(f"`{metric}`, {unit}" for metric, unit in units.items())]
    said = "; ".join(f"{name} {labelled(name, rows[0][name])}" for name in shared)
    return f"{said}:\n\n{grid(heads, len(down), shown)}"


def grid(heads: Sequence[str], names: int, lines: Sequence[Sequence[str | None]], words: int = 0) -> str:
    """Returns a table in Markdown; its first `names` and last `words` columns are words, not numbers."""
    ruler = [":--"] * names + ["--:"] * (len(heads) - names - words) + [":--"] * words
    return "\n".join(
        "| " + " | ".join(word or "" for word in words) + " |" for words in [heads, ruler, *lines]
    )


def cell(row: Mapping[str, Any]) -> str:
    """Returns a row's value, with its spread if one would see it."""
    value, low, high = (number(row[key]) for key in ("value", "low", "high"))
    return value if low == value == high else f"{value} ({low} to {high})"


def number(value: float) -> str:
    """Returns a number for reading: four digits, all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def labelled(name: str, value: Label) -> str:
    """Returns a label's value for reading."""
    if name.endswith("_bytes") and isinstance(value, int) and value and value % _MIB == 0:
        return f"{value // _MIB} MiB"
    return str(value).replace("|", "\\|")
