"""The figures of pages whose text is written by hand: README.md, docs/performance.md, docs/choosing.md.

What lies between `<!-- table: QUESTION METRIC ... -->`, alone on its line, and `<!-- end -->` is replaced by
these metrics' tables from bench/results; with `sheet` for `table`, by one table, a column for each metric;
what follows `<!-- picture: QUESTION -->` by a picture; what follows `<!-- methods: compare -->`,
`<!-- choices: compare -->`, `<!-- shares: simulate -->`, `<!-- mtbfs: simulate -->` or `<!-- verdicts:
simulate -->` by that of `bench.report.choosing`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import RESULTS, ROOT
from bench.harness.result import FIXED
from bench.questions.profile.picture import draw
from bench.report import choosing, tables
from bench.report.headlines import Unknown
from bench.report.tables import BadResult

PAGES = (ROOT / "docs" / "performance.md", ROOT / "docs" / "choosing.md", ROOT / "README.md")
PICTURE = "protected-step.svg"
HEAD = "docs/results/head-to-head.svg"
SHOWS = {
    "profile": ("One step of one rank", PICTURE),
    "compare": ("What methods cost a training, and what a failure takes from it", HEAD),
}
"""Question -> what its picture shows, and where it is from the pages that have it."""

_KINDS = "table|sheet|picture|methods|choices|shares|mtbfs|verdicts"
_BLOCK = re.compile(rf"(<!-- ({_KINDS}): (\w+)((?: \w+)*) -->\n).*?(<!-- end -->)", re.DOTALL)

Documents = Sequence[Mapping[str, Any]]

SHOWN = {
    "methods": choosing.methods,
    "choices": choosing.choices,
    "shares": choosing.shares,
    "mtbfs": choosing.mtbfs,
    "verdicts": choosing.verdicts,
}
"""Mark -> what makes its table, or its sentences."""


def write(results: Path = RESULTS, pages: Sequence[Path] = PAGES) -> None:
    """Replaces the pages' figures, and writes the picture beside them; each whole or not at all.

    Raises:
        BadResult: A file in `results` is not in the form, or lacks metrics that a page asks for.
    """
    documents = tables.load(results)
    for page in pages:
        tables.replace(page, fill(page.read_text(encoding="utf-8"), documents))
    profiles = of(documents, "profile")
    if profiles:
        tables.replace(pages[0].with_name(PICTURE), draw(profiles[0]["rows"]))


def fill(text: str, documents: Documents) -> str:
    """Returns the page with figures of these documents.

    Raises:
        BadResult: See `write`.
    """

    def block(match: re.Match[str]) -> str:
        opening, kind, question, metrics, closing = match.groups()
        found = of(documents, question)
        if not found:
            content = f"Not measured yet: `python -m bench {question}`."
        elif kind == "picture":
            content = "![{}]({})".format(*SHOWS[question])
        elif kind in SHOWN:
            try:
                content = SHOWN[kind](documents)
            except Unknown:
                content = f"Not in the answer yet: `python -m bench {question}`."
        else:
            shown = figures if kind == "table" else in_one
            content = "\n\n".join(shown(document, metrics.split()) for document in found)
        return f"{opening}\n{content}\n\n{closing}"

    return _BLOCK.sub(block, text)


def of(documents: Documents, question: str) -> list[Mapping[str, Any]]:
    """The documents that answer a question."""
    return [document for document in documents if document["question"] == question]


def figures(document: Mapping[str, Any], metrics: Sequence[str]) -> str:
    """Returns the tables of some metrics of one document, and under them what all rows have in common.

    Metrics that the document lacks are named: the question has learned them since it was answered.
    """
    lacking = missing(document, metrics)
    chosen = rows_of(document, [one for one in metrics if one not in lacking] or metrics)
    fixed = {
        name: value
        for name, value in chosen[0].items()
        if name not in FIXED and len(chosen) > 1 and all(row.get(name) == value for row in chosen)
    }
    varying = [{name: value for name, value in row.items() if name not in fixed} for row in chosen]
    said = ", ".join(f"{name} {tables.labelled(name, value)}" for name, value in fixed.items())
    without = f"Not in this answer: {', '.join(f'`{one}`' for one in lacking)}." if lacking else ""
    origin = " ".join(filter(None, [said and f"All with {said}.", without, tables.origin(document)]))
    return "\n\n".join([*tables.metrics(varying), origin])


def in_one(document: Mapping[str, Any], metrics: Sequence[str]) -> str:
    """Returns one table of some metrics of one document, under what all rows have in common."""
    return f"{tables.sheet(rows_of(document, metrics))}\n\n{tables.origin(document)}"


def rows_of(document: Mapping[str, Any], metrics: Sequence[str]) -> list[Mapping[str, Any]]:
    """The rows of some metrics.

    Raises:
        BadResult: There are none of one of them.
    """
    if lacking := missing(document, metrics):
        raise BadResult(f"the answer to {document['question']} has no {sorted(lacking)}: ask it again")
    return [row for row in document["rows"] if row["metric"] in metrics]


def missing(document: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    """Those of some metrics that a document lacks."""
    found = {row["metric"] for row in document["rows"]}
    return [metric for metric in metrics if metric not in found]
