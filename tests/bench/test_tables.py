from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import RESULTS
from bench import __main__ as command
from bench.harness.result import Arguments, document, once, write
from bench.harness.result import summary as summarized
from bench.questions.compare import families
from bench.report import choosing, excerpts, figures, pages, provenance, summary, tables
from bench.report.html import html

ROWS = [
    once("arena_over_tables", "ratio", 1.34, code="(4, 3)", bound=1.3633),
    summarized("kernel_rows_per_s", "rows/s", [3e6, 1e6, 2e6], row_bytes=2 << 20, kernel="cpu"),
    once("kernel_rows_per_s", "rows/s", 12.34567, row_bytes=2 << 20, kernel="num|py"),
    once("kernel_rows_per_s", "rows/s", 5, row_bytes=100, kernel="cpu"),
]
DOCUMENT = document("memory", Arguments(seed=7), ROWS) | {
    "commit": "0123456789abcdef-dirty",
    "machine": {"processor": "A chip", "cores": 2, "memory_bytes": 3 << 30, "system": "Linux 6"},
    "versions": {"python": "3.11", "torch": "2.9"},
}


PAGE = "results/memory.md"
SAME_ENDS = re.compile(r"\((-?[\d.,]+) to \1\)")


def test_the_pages_are_what_the_results_give() -> None:
    documents = tables.load(RESULTS)
    made = pages.render(documents, pages.NAMED)
    for name, text in made.items():
        assert (pages.DOCS / name).read_text(encoding="utf-8") == text, "run `python -m bench report`"
    there = {f"{pages.FOLDER}/{path.name}" for path in (pages.DOCS / pages.FOLDER).glob("*.md")}
    assert there == set(made) - {pages.SUMMARY}
    answered = {document["question"] for document in documents}
    for question, pictures in pages.PICTURES.items():
        for file, *_ in pictures:
            drawn = (pages.DOCS / pages.FOLDER / file).exists()
            assert drawn == (question in answered), "run `python -m bench report`"


def test_each_picture_says_what_it_shows_in_its_title() -> None:
    files = [pages.DOCS / pages.FOLDER / file for of in pages.PICTURES.values() for file, *_ in of]
    answered = [file for file in files if file.exists()]
    for file in [*answered, pages.DOCS / figures.PICTURE]:
        drawn = ElementTree.fromstring(file.read_text(encoding="utf-8"))
        title = next(drawn.iter("{http://purl.org/dc/elements/1.1/}title"))
        shown = {element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")}
        assert title.text and title.text.strip() in shown, file


def test_the_picture_of_the_readme_is_of_rows_that_its_table_has() -> None:
    methods = [choice.method for choice in choosing.CHOICES]
    assert [family for family in families.FAMILIES if family.shown not in methods] == []
    assert len(methods) == 8 and methods[0] == families.FAMILIES[0].shown
    assert choosing.OURS in methods


def test_the_summary_is_one_screen_and_answers_each_question() -> None:
    assert summary.ANSWERS.keys() == command.QUESTIONS.keys() - set(command.ON_GPUS)
    documents = tables.load(RESULTS)
    text = pages.render(documents)[pages.SUMMARY]
    assert len(text.splitlines()) < 50
    for question in {one["question"] for one in documents}:
        answer = summary.answer(question, documents)
        assert answer and f"({pages.FOLDER}/{question}.md) | {answer} |" in text


def test_no_interval_has_twice_the_same_end() -> None:
    shown = pages.render(tables.load(RESULTS))
    shown |= {path.name: path.read_text(encoding="utf-8") for path in figures.PAGES}
    found = [f"{name}: {match[0]}" for name, text in shown.items() for match in SAME_ENDS.finditer(text)]
    assert not found


def test_seconds_of_lost_memory_are_of_one_size() -> None:
    documents = tables.load(RESULTS)
    for question in ("recovery", "rebuild"):
        assert re.search(r"with 256 (and [\d,]+ )?MiB of lost memory", summary.answer(question, documents))


def test_the_pages_are_short_and_nothing_that_they_are_to_show_is_missing() -> None:
    documents = tables.load(RESULTS)
    lines = {name: text.count("\n") for name, text in pages.render(documents).items()}
    assert max(lines.values()) < 150 and sum(lines.values()) < 90 * len(lines), lines
    for question, chosen in excerpts.EXCERPTS.items():
        answers = figures.of(documents, question)
        for excerpt in chosen if answers else ():
            rows = excerpt.rows(answers)
            metrics = {row["metric"] for row in rows}
            assert metrics <= set(excerpt.metrics), excerpt
            assert metrics == set(excerpt.metrics), excerpt
            for label, values in excerpt.where.items():
                shown = {str(row.get(label)).partition(":")[0] for row in rows}
                assert shown == set(map(str, values)), excerpt


def test_a_page_has_excerpts_of_the_numbers_then_its_questions_docstring() -> None:
    made = pages.render([DOCUMENT])
    title, explanation = pages.asked("memory")
    assert title.endswith("?")
    parts = f"""# {title}

{pages.MARK}

[What the columns mean](#definitions) is below the tables.

## An arena, over its tables

`arena_over_tables`, ratio; code (4, 3); bound 1.3633:

| ratio |
| --: |
| 1.34 |

{pages.MORE}

Measured on A chip, 2 cores, 3 GiB, Linux 6; python 3.11, torch 2.9; commit 0123456789ab-dirty, seed 7.

## Definitions

{explanation}
"""
    assert made[PAGE] == parts
    everything = """**`arena_over_tables`**, ratio

| code | bound | ratio |
| :-- | :-- | --: |
| (4, 3) | 1.3633 | 1.34 |

**`kernel_rows_per_s`**, rows/s

| row_bytes | cpu | num\\|py |
| :-- | --: | --: |
| 2 MiB | 2,000,000 (1,000,000 to 3,000,000) | 12.35 |
| 100 | 5 |  |"""
    assert pages.render([DOCUMENT], full=True)[PAGE] == parts.replace(pages.MORE, everything)
    nothing_chosen = pages.render([DOCUMENT | {"rows": DOCUMENT["rows"][1:]}])[PAGE]
    assert everything.partition("\n\n**")[2] in nothing_chosen and pages.MORE not in nothing_chosen
    assert set(made) == {PAGE, pages.SUMMARY} and f"[{title}]({PAGE}) | an arena" in made[pages.SUMMARY]


def test_a_question_that_was_answered_twice_is_explained_once() -> None:
    first, second = ({"file": name} for name in ("memory", "memory-again"))
    page = pages.render([DOCUMENT | first, DOCUMENT | second | {"date": "2025-11-21"}])[PAGE]
    assert "| file | ratio |\n| :-- | --: |\n| memory | 1.34 |\n| memory-again | 1.34 |\n" in page
    assert "\n- `memory-again`: Measured on 2025-11-21" in page
    assert page.count(pages.asked("memory")[0]) == 1
    assert page.count("Measured on A chip") == 1
    assert page.count("Measured on 2025-11-21 on A chip") == 1


def test_the_command_writes_the_pages_and_one_file_for_browsers(tmp_path: Path) -> None:
    write(tmp_path / "memory.json", DOCUMENT)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "weather.md").write_text("not asked any more")
    for _ in range(2):
        command.main(["report", "--json-dir", str(tmp_path)])
        for name, text in pages.render([DOCUMENT]).items():
            assert (tmp_path / name).read_text(encoding="utf-8") == text
        browsed = (tmp_path / "results.html").read_text(encoding="utf-8")
        assert '<td style="text-align:left">1.3633</td>\n<td style="text-align:right">1.34</td>' in browsed
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert names == ["memory.json", "results", "results.html", "results.md", "results/memory.md"]


def test_a_file_for_browsers_is_whole(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for name in ("a.svg", "results/b.svg"):
        (tmp_path / name).write_text("<svg/>")
    made = {
        "all.md": "# Results\n<!-- made -->\n\n![A picture](a.svg) and [more](results/one.md)\n",
        "results/one.md": "# One & two\n\n![A picture](b.svg)\n\n| a |\n| --: |\n| 1 |\n",
    }
    browsed = html(made, tmp_path)
    assert "made" not in browsed and "one.md" not in browsed
    assert '<a href="#s2">One &amp; two</a>' in browsed and '<a href="#s2">more</a>' in browsed
    assert '<section id="s2">\n<h1>One &amp; two</h1>' in browsed
    assert browsed.count('src="data:image/svg+xml;base64,PHN2Zy8+"') == 2 and ".svg" not in browsed


def test_what_is_stale_and_how_it_was_made_are_said(tmp_path: Path) -> None:
    write(tmp_path / "memory.json", DOCUMENT | {"command": "python -m bench memory", "minutes": 1.5})
    write(tmp_path / "kills.json", DOCUMENT | {"question": "kills"})
    (tmp_path / provenance.STALE).write_text("kills.json: no\nmemory.json: changed since: ecemb/step\n")
    made = pages.render(tables.load(tmp_path))
    assert "\n**Stale**, of commit 01234567: changed since: ecemb/step.\n" in made[PAGE]
    assert "Made by `python -m bench memory` in 1.5 minutes. Measured on" in made[PAGE]
    assert "| 01234567 (stale) |" in made[pages.SUMMARY]
    assert "made before results were signed" not in made[PAGE]
    (tmp_path / "memory.json").write_text(json.dumps(DOCUMENT))
    assert "seed 7; made before results were signed." in pages.render(tables.load(tmp_path))[PAGE]


def test_a_quick_answer_says_so() -> None:
    assert "A quick run, not for quoting. Measured on" in pages.render([DOCUMENT | {"quick": True}])[PAGE]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"question": "weather"}, "numbers for the question 'weather'"),
        ({"rows": [ROWS[0].to_json()] * 2}, "two rows of arena_over_tables have the same labels"),
    ],
)
def test_a_document_that_makes_no_sense(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(tables.BadResult, match=complaint):
        pages.render([DOCUMENT | change])


def test_a_file_that_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"question": "memory", "rows": []}))
    with pytest.raises(tables.BadResult, match=r"other\.json has no commit, machine, versions, seed"):
        tables.load(tmp_path)
