"""`python -m bench report`: all pages and pictures from raw JSON, and one file for a browser with all tables.

docs/results.md is the summary; docs/results/ has a page and a picture for each question, with the tables that
`bench.report.excerpts` chooses. Nothing in them is typed by hand. A question's title and its definitions are
the docstring of its module, what other systems have published is in `bench.report.headlines`, and the rest is
in the JSON. The same files give the same pages.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import RESULTS, ROOT
from bench.questions.check_n_run import picture as check_n_run_picture
from bench.questions.compare import picture as compare_picture
from bench.questions.cpr import picture as cpr_picture
from bench.questions.drift import picture as drift_picture
from bench.questions.quantization import picture as quantization_picture
from bench.questions.simulate import picture as simulate_picture
from bench.report import excerpts, figures, headlines, provenance, screen, summary, tables
from bench.report.html import html
from bench.report.tables import BadResult

DOCS = ROOT / "docs"
SUMMARY = "results.md"
FOLDER = "results"
"""Of the questions' pages and pictures, beside the summary."""
PUBLISHED = f"{FOLDER}/published.md"

MARK = "<!-- Written by `python -m bench report` from bench/results/*.json: change nothing here. -->"

HEAD = f"""# Results

{MARK}

Every number is in bench/results, as JSON: a median, in brackets the smallest and the largest; where a page \
says so, a mean with its 95 % interval. *Stale*: the code that was measured, or its input, has changed.
"""

SIDE_BY_SIDE = "[Which method](choosing.md) has the methods side by side."
MORE = "All figures, in tables to sort and to filter: `python -m bench report` writes build/results.html."

Draw = Callable[[Sequence[Mapping[str, Any]]], str]

PICTURES: dict[str, tuple[tuple[str, str, Draw], ...]] = {
    "check_n_run": (
        (
            "check-n-run.svg",
            "What checkpoints write and keep, by policy",
            check_n_run_picture.draw,
        ),
        (
            "check-n-run-quality.svg",
            "What restores from a few bits cost",
            check_n_run_picture.draw_quality,
        ),
    ),
    "compare": (
        (
            "head-to-head.svg",
            "What methods cost a training, and what a failure takes from it",
            compare_picture.draw,
        ),
    ),
    "cpr": (("quality-against-pls.svg", "Quality against the portion of lost samples", cpr_picture.draw),),
    "drift": (("drift.svg", "How far rows rebuilt from parity of floats are off", drift_picture.draw),),
    "quantization": (
        (
            "quantization-error.svg",
            "What rows lose by bits and method",
            quantization_picture.draw,
        ),
    ),
    "simulate": (
        ("best-method.svg", "Which method is ahead, by faults and size", simulate_picture.draw),
        ("turning.svg", "What would turn it", simulate_picture.turning),
    ),
}
"""Question -> of each of its pictures the file, beside its page; what it shows; what draws it from rows."""

NAMED = ("compare", "compare_cluster", "network")
"""Questions whose pages other pages name."""

Documents = Sequence[Mapping[str, Any]]


def write(results: Path | None = None) -> Path:
    """Writes the pages and pictures of all results, the figures of other pages, and one file for a browser.

    Args:
        results: Folder of other answers: pages, pictures and results.html go there; no other page changes.

    Returns:
        Where the file for a browser is.

    Raises:
        BadResult: A file is not in the form of `bench.harness.result`, or answers no question of bench/.
    """
    if results is None:
        with contextlib.suppress(provenance.NoHistory):
            tables.replace(RESULTS / provenance.STALE, provenance.text(provenance.stale()))
    documents = tables.load(results or RESULTS)
    folder = results or DOCS
    made = render(documents, NAMED if results is None else ()) | drawn(documents)
    for name, text in made.items():
        tables.replace(folder / name, text)
    for page in (folder / FOLDER).glob("*.md"):
        if f"{FOLDER}/{page.name}" not in made:
            page.unlink()  # of a question that bench/results doesn't answer any more
    if results is None:
        figures.write()
    browsed = results / "results.html" if results is not None else ROOT / "build" / "results.html"
    tables.replace(browsed, html(render(documents, full=True), folder))
    return browsed


def render(documents: Documents, named: Sequence[str] = (), *, full: bool = False) -> dict[str, str]:
    """Returns the pages by name: the summary, then a page for each question, and one of published figures.

    Args:
        documents: All answers.
        named: Questions that also have a page without an answer.
        full: With all tables of each question, and not only those of `bench.report.excerpts`.

    Raises:
        BadResult: No module of bench/ asks a question, or rows of a document have the same labels.
    """
    answered = {document["question"] for document in documents}
    order = [question for question in summary.ANSWERS if question in answered]
    order += sorted(answered - set(order))
    pages = {
        f"{FOLDER}/{question}.md": of_question(question, documents, full=full)
        for question in dict.fromkeys([*order, *named])
    }
    if lines := headlines.lines(documents):
        shown = tables.grid(headlines.HEADS, len(headlines.HEADS), lines)
        pages[PUBLISHED] = f"# {headlines.TITLE}\n\n{MARK}\n\n{shown}\n\n{headlines.EXPLANATION}\n"
    return {SUMMARY: summarized(order, documents)} | pages


def summarized(order: Sequence[str], documents: Documents) -> str:
    """The summary of all questions, on one screen."""
    parts = [HEAD, f"{SIDE_BY_SIDE}\n"]
    lines = [
        [
            f"[{asked(question)[0]}]({FOLDER}/{question}.md)",
            summary.answer(question, documents),
            commits(question, documents),
        ]
        for question in order
    ]
    if headlines.lines(documents):
        lines.append(
            [
                f"[{headlines.TITLE}]({PUBLISHED})",
                f"{len(headlines.HEADLINES)} claims, and why ours differ",
                "",
            ]
        )
    return "\n".join(
        [*parts, "## The questions\n", tables.grid(("question", "in short", "of commit"), 3, lines) + "\n"]
    )


def commits(question: str, documents: Documents) -> str:
    """The commits that a question's numbers are of, and which of these are stale."""
    found = [
        f"{document['commit'][:8]}{' (stale)' if 'stale' in document else ''}"
        for document in documents
        if document["question"] == question
    ]
    return ", ".join(dict.fromkeys(found))


def of_question(question: str, documents: Documents, *, full: bool) -> str:
    """A question's page: its picture, its tables, then what they mean.

    Raises:
        BadResult: See `render`.
    """
    title, explanation = asked(question)
    answers = [document for document in documents if document["question"] == question]
    chosen = excerpts.of(question, answers)
    stale = [
        f"**Stale**, of commit {answer['commit'][:8]}: {answer['stale']}."
        for answer in answers
        if "stale" in answer
    ]
    parts = [f"# {title}", MARK, listed(stale)]
    if explanation:
        parts.append("[What the columns mean](#definitions) is below the tables.")
    if answers:
        if question == "compare_cluster":
            parts += [screen.on_a_cluster(answer["rows"]) for answer in answers]
        parts += chosen
        parts += [f"![{shown}]({file})" for file, shown, _ in PICTURES.get(question, ())]
    else:
        parts.append(f"Not measured yet: `python -m bench {question}`.")
    if full or not chosen:
        for answer in answers:
            parts += [*tables.metrics(answer["rows"]), tables.origin(answer)]
    else:
        files = [f"`{answer['file']}`: " if len(answers) > 1 else "" for answer in answers]
        origins = [tables.origin(answer) for answer in answers]
        parts += [MORE, listed([file + said for file, said in zip(files, origins, strict=True)])]
    if explanation:
        parts += ["## Definitions", explanation]
    return "\n\n".join(filter(None, parts)) + "\n"


def listed(lines: Sequence[str]) -> str:
    """One line as it is, or several as a list."""
    return "\n".join(f"- {line}" if len(lines) > 1 else line for line in lines)


def drawn(documents: Documents) -> dict[str, str]:
    """Returns the pictures of the questions by name, as SVG."""
    found: dict[str, str] = {}
    for question, pictures in PICTURES.items():
        rows = [row for document in documents if document["question"] == question for row in document["rows"]]
        if rows:
            found |= {f"{FOLDER}/{file}": draw(rows) for file, _, draw in pictures}
    return found


def asked(question: str) -> tuple[str, str]:
    """Returns a question's title and definitions: its module's docstring, which is not imported for it.

    Raises:
        BadResult: There is no such module, or it has no docstring.
    """
    path = ROOT / "bench" / "questions" / question / "question.py"
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else None
    if docstring is None:
        raise BadResult(f"bench/results has numbers for the question {question!r}, and no {path} explains it")
    title, _, explanation = docstring.partition("\n")
    return title, explanation.strip()
