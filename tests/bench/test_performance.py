"""The page's figures are those of the results, and the picture shows all spans."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench import RESULTS
from bench.harness.result import Arguments, Row, document, once, summary, write
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
COSTS = document(
    "compare",
    Arguments(),
    [
        summary("saved_pct", "%", [-1, 2, 3], network_gbit=1, method="a"),
        summary("saved_pct", "%", [-7], network_gbit=1, method="b"),
        once("pays", "0 or 1", 0, network_gbit=1, method="a"),
    ],
)


def test_the_page_has_the_figures_that_the_results_give() -> None:
    documents = tables.load(RESULTS)
    for page in figures.PAGES:
        written = page.read_text(encoding="utf-8")
        assert written == figures.fill(written, documents), "run `python -m bench report`"
    drawn = figures.PAGES[0].with_name(figures.PICTURE).exists()
    assert drawn == bool(figures.of(documents, "profile")), "run `python -m bench report`"


def test_figures_are_replaced_and_text_stays() -> None:
    page = "before\n<!-- table: compare saved_pct pays -->\nold\n<!-- end -->\nafter\n"
    filled = figures.fill(page, [COSTS])
    assert filled.startswith("before\n<!-- table: compare saved_pct pays -->\n\n**`saved_pct`**, %\n")
    assert "| 2 (-1 to 3) | -7 |" in filled
    assert "\n\nAll with network_gbit 1. Measured on " in filled
    assert filled.endswith("\n\n<!-- end -->\nafter\n")
    assert figures.fill(filled, [COSTS]) == filled


def test_what_is_not_measured_yet_is_said() -> None:
    page = "<!-- picture: profile -->\n<!-- end -->\n<!-- table: compare pays -->\n<!-- end -->\n"
    filled = figures.fill(page, [])
    assert filled.count("Not measured yet: `python -m bench ") == 2
    assert "![One step of one rank](protected-step.svg)" in figures.fill(filled, [PROFILE])


def test_results_without_what_the_page_shows() -> None:
    page = "<!-- table: compare recovery_s pays -->\n<!-- end -->\n"
    filled = figures.fill(page, [COSTS])
    assert "**`pays`**" in filled and "Not in this answer: `recovery_s`. Measured on" in filled
    page = "<!-- {} compare recovery_s -->\n<!-- end -->\n"
    for kind in ("table:", "sheet:"):
        with pytest.raises(tables.BadResult, match=r"to compare has no \['recovery_s'\]: ask it again"):
            figures.fill(page.format(kind), [COSTS])


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
