"""The page of all results, docs/results.md, and its pictures, from what is in bench/results.

Nothing in that page is typed by hand: a question's title and explanation are the docstring of its module,
the rest is in the JSON, but for what other systems have published (`bench.headlines`). The same files always
give the same page.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import (
    check_n_run_picture,
    compare_picture,
    cpr_picture,
    drift_picture,
    headlines,
    quantization_picture,
    simulate_picture,
)
from bench.result import FIXED, Label

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "results.md"

ACROSS = ("source", "spread", "hosts", "kernel", "method", "over", "packing", "part", "buffer", "phase")
"""Labels whose values become columns, side by side; a table takes the first that varies in it."""

HEAD = """# Results

<!-- Written by `python -m bench report` from bench/results/*.json: change nothing here. -->

Each section was measured by `python -m bench QUESTION`, which verifies its results before it measures them.
A value is the median; in brackets are the smallest and the largest, where they differ.
"""

FIRST = "compare"
"""The question that the page begins with."""

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
        (
            *("interval_steps", "steps_run_again", "samples_lost", "given_up_steps", "bit_identical"),
            *("off_by", "log_loss_added", "auc", "auc_lost", "survives_ranks"),
        ),
        ("recovery_s", "caught_up_s", "prepare_s", "recovery_sent_bytes"),
        (
            *("overhead_cpu_pct", "overhead_wall_pct", "step_wall_ms", "stall_ms_per_step"),
            *("sent_bytes_per_step", "written_bytes_per_step", "memory_over_tables", "stored_over_tables"),
            "time_scale",
        ),
    ),
    "quality": (
        ("auc", "auc_lost", "log_loss", "loss_added", "bit_identical", "steps_run_again", "pls"),
        ("samples", "malformed_lines"),
    ),
}
"""Questions of which several metrics share a table, a column each, and which those are."""

_KEYS = ("question", "commit", "machine", "versions", "seed", "rows")
_MIB = 1 << 20
_SHORT_HASH = 12


PICTURED = ("timeline_ms", "loss_of_pair", "auc_of_pair", "best_ettr")
"""Metrics that are for a picture, and would make no table that anybody reads."""
PICTURES = {
    "check_n_run": (
        "check-n-run.svg",
        "What checkpoints write and keep by policy, and what restores from a few bits cost",
        check_n_run_picture.draw,
    ),
    "compare": (
        "head-to-head.svg",
        "What each method costs in each step, and what a failure takes under it",
        compare_picture.draw,
    ),
    "cpr": ("quality-against-pls.svg", "Quality against the portion of lost samples", cpr_picture.draw),
    "drift": ("drift.svg", "How far rows rebuilt from parity of floats are off", drift_picture.draw),
    "quantization": (
        "quantization-error.svg",
        "What rows lose by bits and method",
        quantization_picture.draw,
    ),
    "simulate": ("best-method.svg", "Which method is ahead, by faults and size", simulate_picture.draw),
}
"""Question -> the file of its picture, beside the page; what it shows; what draws it from all its rows."""
ELSEWHERE = ("failures", "kills", "soak")
"""What `make failures`, `kills` and `soak` write answers no question of bench/, and is not on this page."""


class BadResult(Exception):
    """A file in bench/results that no question of bench/ has written; the message names it."""


def write(results: Path = RESULTS, page: Path = PAGE) -> None:
    """Writes the page, and its pictures beside it; each whole or not at all.

    Raises:
        BadResult: A file is not in the form of `bench.result`, or of a question that is not asked any more.
    """
    documents = load(results)
    replace(page, render(documents))
    for question, (file, _, draw) in PICTURES.items():
        rows = [row for document in documents if document["question"] == question for row in document["rows"]]
        if rows:
            replace(page.with_name(file), draw(rows))


def replace(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def load(results: Path) -> list[dict[str, Any]]:
    """Reads all documents of a folder, in the order of their files' names.

    Raises:
        BadResult: One isn't in the form.
    """
    documents: list[dict[str, Any]] = []
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in _KEYS if key not in content]
        if missing:
            raise BadResult(
                f"{path} has no {', '.join(missing)}: write it by `python -m bench QUESTION --json`"
            )
        if content["question"] not in ELSEWHERE:
            documents.append(content)
    return documents


def render(documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns the page: a section for each question, `FIRST` first, else in the documents' order.

    Raises:
        BadResult: No module of bench/ asks the question, or rows of a document can't be told apart.
    """
    parts = [HEAD]
    asked_ = dict.fromkeys(document["question"] for document in documents)
    for question in sorted(asked_, key=lambda one: one != FIRST):
        title, explanation = asked(question)
        parts += [f"## {title}\n", f"{explanation}\n"] if explanation else [f"## {title}\n"]
        if question in PICTURES:
            file, shown, _ = PICTURES[question]
            parts.append(f"![{shown}]({file})\n")
        for document in documents:
            if document["question"] == question:
                parts.append(origin(document) + "\n")
                for names in SHEETS.get(question, ()):
                    parts.append(sheet([row for row in document["rows"] if row["metric"] in names]) + "\n")
                if question not in SHEETS:
                    parts += [part + "\n" for part in metrics(document["rows"])]
        if question == FIRST and (lines := headlines.lines(documents)):
            parts += [
                f"## {headlines.TITLE}\n",
                f"{headlines.EXPLANATION}\n",
                grid(headlines.HEADS, 4, lines) + "\n",
            ]
    return "\n".join(parts)


def asked(question: str) -> tuple[str, str]:
    """Returns a question's title and explanation: its module's docstring, which is not imported for it.

    Raises:
        BadResult: There is no such module, or it has no docstring.
    """
    path = Path(__file__).with_name(f"{question}.py")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else None
    if docstring is None:
        raise BadResult(f"bench/results has numbers for the question {question!r}, and no {path} explains it")
    title, _, explanation = docstring.partition("\n")
    return title, explanation.strip()


def origin(document: Mapping[str, Any]) -> str:
    """Says where and with what a document's numbers were measured."""
    machine, versions = document["machine"], document["versions"]
    commit, dirty, _ = document["commit"].partition("-dirty")
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    when = f" on {document['date']}" if "date" in document else ""
    quick = "A quick run, not for quoting. " if document.get("quick") else ""
    return (
        f"{quick}Measured{when} on {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}"
        f"{', ' + machine['gpu'] if 'gpu' in machine else ''}; {packages}; "
        f"commit {commit[:_SHORT_HASH]}{dirty}, seed {document['seed']}."
    )


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


def grid(heads: Sequence[str], names: int, lines: Sequence[Sequence[str | None]]) -> str:
    """Returns a table in Markdown; its first columns are so many names, the others are numbers."""
    ruler = [":--"] * names + ["--:"] * (len(heads) - names)
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
