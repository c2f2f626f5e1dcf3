from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench import tables, web
from bench.result import Arguments, document, once, summary, write

ROWS = [
    once("arena_over_tables", "ratio", 1.34, code="(4, 3)", bound=1.3633),
    summary("kernel_rows_per_s", "rows/s", [3e6, 1e6, 2e6], row_bytes=2 << 20, kernel="cpu"),
    once("kernel_rows_per_s", "rows/s", 12.34567, row_bytes=2 << 20, kernel="num|py"),
    once("kernel_rows_per_s", "rows/s", 5, row_bytes=100, kernel="cpu"),
]
DOCUMENT = document("memory", Arguments(seed=7), ROWS) | {
    "commit": "0123456789abcdef-dirty",
    "machine": {"processor": "A chip", "cores": 2, "memory_bytes": 3 << 30, "system": "Linux 6"},
    "versions": {"python": "3.11", "torch": "2.9"},
}


def test_the_page_is_what_the_results_give() -> None:
    written = tables.PAGE.read_text(encoding="utf-8")
    documents = tables.load(tables.RESULTS)
    assert written == tables.render(documents), "run `python -m bench report`"
    answered = {document["question"] for document in documents}
    for question, (file, *_) in tables.PICTURES.items():
        drawn = tables.PAGE.with_name(file).exists()
        assert drawn == (question in answered), "run `python -m bench report`"


def test_a_section_has_its_questions_docstring_and_the_numbers() -> None:
    page = tables.render([DOCUMENT])
    assert page.startswith(tables.HEAD)
    title, explanation = tables.asked("memory")
    assert title.endswith("?")
    assert (
        page[len(tables.HEAD) :]
        == f"""
## {title}

{explanation}

Measured on A chip, 2 cores, 3 GiB, Linux 6; python 3.11, torch 2.9; commit 0123456789ab-dirty, seed 7.

**`arena_over_tables`**, ratio

| code | bound | ratio |
| :-- | :-- | --: |
| (4, 3) | 1.3633 | 1.34 |

**`kernel_rows_per_s`**, rows/s

| row_bytes | cpu | num\\|py |
| :-- | --: | --: |
| 2 MiB | 2,000,000 (1,000,000 to 3,000,000) | 12.35 |
| 100 | 5 |  |
"""
    )


def test_a_question_that_was_answered_twice_is_explained_once() -> None:
    page = tables.render([DOCUMENT, DOCUMENT | {"date": "2025-11-21"}])
    assert page.count(tables.asked("memory")[0]) == 1
    assert page.count("Measured on A chip") == 1
    assert page.count("Measured on 2025-11-21 on A chip") == 1


def test_the_command_writes_the_page_and_one_for_browsers(tmp_path: Path) -> None:
    write(tmp_path / "memory.json", DOCUMENT)
    for _ in range(2):
        command.main(["report", "--json-dir", str(tmp_path)])
        assert (tmp_path / "results.md").read_text(encoding="utf-8") == tables.render([DOCUMENT])
        browsed = (tmp_path / "results.html").read_text(encoding="utf-8")
        assert '<td style="text-align:left">1.3633</td>\n<td style="text-align:right">1.34</td>' in browsed
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["memory.json", "results.html", "results.md"]


def test_a_page_for_browsers_is_whole(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text("<svg/>")
    page = "# Results\n<!-- made -->\n\n## One & two\n\n![A picture](a.svg)\n\n| a |\n| --: |\n| 1 |\n"
    browsed = web.html(page, tmp_path)
    assert "<title>ecemb: Results</title>" in browsed and "made" not in browsed
    assert '<a href="#s1">One &amp; two</a>' in browsed and '<h2 id="s1">One &amp; two</h2>' in browsed
    assert 'src="data:image/svg+xml;base64,PHN2Zy8+"' in browsed and "a.svg" not in browsed


def test_a_quick_answer_says_so() -> None:
    assert "A quick run, not for quoting. Measured on" in tables.render([DOCUMENT | {"quick": True}])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"question": "weather"}, "numbers for the question 'weather'"),
        ({"rows": [ROWS[0].to_json()] * 2}, "two rows of arena_over_tables have the same labels"),
    ],
)
def test_a_document_that_makes_no_sense(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(tables.BadResult, match=complaint):
        tables.render([DOCUMENT | change])


def test_a_file_that_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"question": "memory", "rows": []}))
    with pytest.raises(tables.BadResult, match=r"other\.json has no commit, machine, versions, seed"):
        tables.load(tmp_path)
