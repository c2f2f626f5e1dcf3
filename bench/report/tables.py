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

_KEYS = ("question", "commit", "machine", "versions", "seed", "rows")
_MIB = 1 << 20
_SHORT_HASH = 12

PICTURED = (
    *("timeline_ms", "loss_of_pair", "auc_of_pair", "best_ettr"),
    *("written_of_interval", "stored_of_interval"),
)
"""Metrics for a picture, with too many rows for a table."""
ELSEWHERE = ("cluster", "compat", "defects", "failures", "follower_kills", "kills", "mutants", "soak")
"""What `make` writes of these, besides questions: no page."""


class BadResult(Exception):
    """A file in bench/results that no question of bench/ has written; the message names it."""


def replace(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def load(results: Path, elsewhere: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Reads all documents of a folder, in the order of their files' names; of `ELSEWHERE`, those named.

    "file" is a file's name without its suffix; "stale" says what is old in a document, and
    "unsigned" that it was made before results were signed.

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
        if content["question"] not in ELSEWHERE or content["question"] in elsewhere:
            stale = {"stale": old[path.name]} if path.name in old else {}
            unsigned = {} if "seal" in content else {"unsigned": True}
            documents.append(content | {"file": path.stem} | stale | unsigned)
    return documents


def origin(document: Mapping[str, Any]) -> str:
    """Says where and with what a document's numbers were measured."""
    machine, versions = document["machine"], document["versions"]
    commit, dirty, _ = document["commit"].partition("-dirty")
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    when = f" on {document['date']}" if "date" in document else ""
    quick = "A quick run, not for quoting. " if document.get("quick") else ""
    unsigned = "; made before results were signed" if "unsigned" in document else ""
    made = (
        f"Made by `{document['command']}` in {document['minutes']:.3g} minutes. "
        if "command" in document
        else ""
    )
    return (
        f"{quick}{made}Measured{when} on {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}"
        f"{', ' + machine['gpu'] if 'gpu' in machine else ''}; {packages}; "
        f"commit {commit[:_SHORT_HASH]}{dirty}, seed {document['seed']}{unsigned}."
    )


def metrics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns one table for each metric, under its name and unit."""
    tables: list[str] = []
    for metric in dict.fromkeys(row["metric"] for row in rows if row["metric"] not in PICTURED):
        chosen = [row for row in rows if row["metric"] == metric]
        unit = chosen[0]["unit"]
        tables.append(f"**`{metric}`**, {unit}\n\n{table(chosen, unit)}")
    return tables


def table(rows: Sequence[Mapping[str, Any]], unit: str, columns_of: str = "") -> str:
    """Returns one metric's rows as a table in Markdown.

    Args:
        rows: Its rows.
        unit: Of the metric.
        columns_of: Label whose values become columns; by default one of `ACROSS`.

    Raises:
        BadResult: Two rows have the same labels.
    """
    labels = labels_of(rows)
    names = [columns_of] if columns_of else ACROSS
    varying = (name for name in names if name in labels and len({row.get(name) for row in rows}) > 1)
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


def labels_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the labels that rows have."""
    return list(dict.fromkeys(key for row in rows for key in row if key not in FIXED))


def sheet(rows: Sequence[Mapping[str, Any]], columns_of: str = "") -> str:
    """Returns rows as one table, under the labels that all of them share.

    Args:
        rows: Of one metric, as in `table`; or of several, which have a column each.
        columns_of: For one metric, see `table`.

    Raises:
        BadResult: Two rows of a metric have the same labels.
    """
    labels = labels_of(rows)
    shared = [label for label in labels if len({row.get(label) for row in rows}) == 1]
    said = [f"{name} {labelled(name, rows[0][name])}" for name in shared]
    down = [label for label in labels if label not in shared]
    units = {row["metric"]: row["unit"] for row in rows}
    if len(units) == 1:
        ((metric, unit),) = units.items()
        varying = [{name: row[name] for name in row if name not in shared} for row in rows]
        return f"{'; '.join([f'`{metric}`, {unit}', *said])}:\n\n{table(varying, unit, columns_of)}"
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
    return f"{'; '.join(said)}{':' if said else ''}\n\n{grid(heads, len(down), shown)}".lstrip()


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
