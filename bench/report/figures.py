"""The figures of pages whose text is written by hand: README.md, docs/performance.md, docs/choosing.md.

What lies between `<!-- picture: QUESTION -->`, alone on its line, and `<!-- end -->` is replaced by a
picture; what follows `<!-- screen: compare -->` by that of `bench.report.screen`;
`<!-- shares: simulate -->`, `<!-- mtbfs: simulate -->` or `<!-- verdicts: simulate -->` by that of
`bench.report.choosing`;
`<!-- restarts: recovery -->` or `<!-- seconds: recovery -->` by that of `bench.report.restarts`; and
`<!-- versions: compat -->` by that of `bench.report.versions`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import RESULTS, ROOT
from bench.questions.profile.picture import draw
from bench.report import choosing, restarts, screen, tables, versions
from bench.report.headlines import Unknown

PAGES = (ROOT / "docs" / "performance.md", ROOT / "docs" / "choosing.md", ROOT / "README.md")
PICTURE = "protected-step.svg"
HEAD = "docs/results/head-to-head.svg"
SHOWS = {
    "profile": ("One step of one rank", PICTURE),
    "compare": ("What methods cost a training, and what a failure takes from it", HEAD),
}
"""Question -> what its picture shows, and where it is from the pages that have it."""

Documents = Sequence[Mapping[str, Any]]

SHOWN = {
    "screen": screen.screen,
    "shares": choosing.shares,
    "mtbfs": choosing.mtbfs,
    "verdicts": choosing.verdicts,
    "restarts": restarts.table,
    "seconds": restarts.sentence,
    "versions": versions.table,
}
"""Mark -> what makes its table, or its sentences."""

_BLOCK = re.compile(rf"(<!-- (picture|{'|'.join(SHOWN)}): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write(results: Path = RESULTS, pages: Sequence[Path] = PAGES) -> None:
    """Replaces the pages' figures, and writes the picture beside them; each whole or not at all.

    Raises:
        BadResult: A file in `results` is not in the form.
    """
    documents = load(results)
    for page in pages:
        tables.replace(page, fill(page.read_text(encoding="utf-8"), documents))
    profiles = of(documents, "profile")
    if profiles:
        tables.replace(pages[0].with_name(PICTURE), draw(profiles[0]["rows"]))


def load(results: Path = RESULTS) -> list[dict[str, Any]]:
    """The documents that the pages have figures of."""
    return tables.load(results, (versions.QUESTION,))


def fill(text: str, documents: Documents) -> str:
    """Returns the page with figures of these documents."""

    def block(match: re.Match[str]) -> str:
        opening, kind, question, closing = match.groups()
        if not of(documents, question):
            made = f"make {question}" if question in tables.ELSEWHERE else f"python -m bench {question}"
            content = f"Not measured yet: `{made}`."
        elif kind == "picture":
            content = "![{}]({})".format(*SHOWS[question])
        else:
            try:
                content = SHOWN[kind](documents)
            except Unknown:
                content = f"Not in the answer yet: `python -m bench {question}`."
        return f"{opening}\n{content}\n\n{closing}"

    return _BLOCK.sub(block, text)


def of(documents: Documents, question: str) -> list[Mapping[str, Any]]:
    """The documents that answer a question."""
    return [document for document in documents if document["question"] == question]
