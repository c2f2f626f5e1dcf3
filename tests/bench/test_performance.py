"""The page's figures are those of the results, and the picture shows all spans."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bench import RESULTS
from bench.harness.result import Arguments, Row, document, once, write
from bench.questions.profile import picture
from bench.report import figures, tables

SPANS = (
    ("step", 0.0, 50.0),
    ("forward", 0.1, 9.9),
    ("backward", 10.0, 20.0),
    ("capture", 25.0, 1.5),
    ("capture", 27.0, 0.5),
    ("optimizer", 30.0, 1.0),
    ("delta", 31.5, 1.25),
    ("exchange", 33.0, 17.0),
)


def timeline(code: str, slower: float = 1) -> list[Row]:
    return [
        once("timeline_ms", "ms", ms * slower, engine="e", code=code, setting="s", span=name, begin_ms=begin)
        for name, begin, ms in SPANS
    ]


PROFILE = document("profile", Arguments(), [*timeline("(4, 3)"), *timeline("(4, 2)", 3)])
FIGURE = re.compile(r"(-?[\d,.]+)(?: %| times| \w+(?:/s)?)? \((-?[\d,.]+) to (-?[\d,.]+)\)")
"""A value, and its interval."""


def test_the_page_has_the_figures_that_the_results_give() -> None:
    documents = figures.load(RESULTS)
    for page in figures.PAGES:
        written = page.read_text(encoding="utf-8")
        assert written == figures.fill(written, documents), "run `python -m bench report`"
    drawn = figures.PAGES[0].with_name(figures.PICTURE).exists()
    assert drawn == bool(figures.of(documents, "profile")), "run `python -m bench report`"


def test_each_figure_with_an_interval_is_in_the_results() -> None:
    rows = [row for document in tables.load(RESULTS) for row in document["rows"]]
    measured = [[row[key] for key in ("value", "low", "high")] for row in rows]
    found = FIGURE.findall(figures.PAGES[0].read_text(encoding="utf-8"))
    assert len(found) > 60
    for figure in found:
        said = [one.replace(",", "") for one in figure]
        margins = [0.5001 * 10.0 ** -len(one.partition(".")[2]) for one in said]
        near = (
            all(
                abs(float(one) - value) <= margin
                for one, value, margin in zip(said, row, margins, strict=True)
            )
            for row in measured
        )
        assert any(near), f"no result is {figure[0]} ({figure[1]} to {figure[2]})"


def test_a_goal_is_reached_only_where_the_whole_interval_is_below_it() -> None:
    page = figures.PAGES[0].read_text(encoding="utf-8")
    found = re.findall(r"\((-?[\d.]+) to (-?[\d.]+)\) \|.*\| (\d+): (\w+) \|$", page, re.MULTILINE)
    assert len(found) == 6
    for low, high, goal, said in found:
        expected = "reached" if float(high) < float(goal) else "missed" if float(low) > float(goal) else ""
        assert said == (expected or "undecided")


def test_figures_are_replaced_and_text_stays() -> None:
    page = "before\n<!-- picture: profile -->\nold\n<!-- end -->\nafter\n"
    filled = figures.fill(page, [PROFILE])
    assert filled == (
        "before\n<!-- picture: profile -->\n\n"
        "![One step of one rank](protected-step.svg)\n\n<!-- end -->\nafter\n"
    )
    assert figures.fill(filled, [PROFILE]) == filled


def test_what_is_not_measured_yet_is_said() -> None:
    page = "<!-- picture: profile -->\n<!-- end -->\n<!-- screen: compare -->\n<!-- end -->\n"
    assert figures.fill(page, []).count("Not measured yet: `python -m bench ") == 2


def test_the_picture_is_written_beside_the_page(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text("<!-- picture: profile -->\n<!-- end -->\n")
    write(tmp_path / "profile.json", PROFILE)
    figures.write(tmp_path, [page])
    drawn = page.with_name(figures.PICTURE).read_text(encoding="utf-8")
    figures.write(tmp_path, [page])
    assert drawn == page.with_name(figures.PICTURE).read_text(encoding="utf-8")
    assert sorted(path.name for path in page.parent.iterdir()) == ["performance.md", figures.PICTURE]


def test_the_picture_shows_the_first_codes_spans() -> None:
    drawn = picture.draw(PROFILE["rows"])
    assert len(drawn) < 100_000
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text]
    named = [text for text in texts if text.endswith(" ms") and ", " in text and len(text) < 20]
    assert sorted(named) == [
        "backward, 20 ms",
        "capture, 2 ms",
        "delta, 1.25 ms",
        "exchange, 17 ms",
        "forward, 9.9 ms",
        "optimizer, 1 ms",
    ]
    assert texts.count("ms") == 2 and any(text.startswith("e, code (4, 3), s; ") for text in texts)
