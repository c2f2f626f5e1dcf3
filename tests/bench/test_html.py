"""The report for a browser, tried in one: it fetches nothing, sorts, and filters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import RESULTS
from bench.report import pages, tables
from bench.report.html import html
from support.browser import Browser, found

BROWSER = found()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser is here: apt-get install chromium")

FIRST = "document.querySelector('section table')"
HEADS = f"[...{FIRST}.tHead.rows[0].cells].map(one => one.textContent)"
COLUMN = f"[...{FIRST}.tBodies[0].rows].map(one => one.cells[%d].textContent)"
SHOWN = "[...document.querySelectorAll('tbody tr')].filter(one => one.checkVisibility())"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The report of all results, opened."""
    page = tmp_path_factory.mktemp("report") / "results.html"
    made = pages.render(tables.load(RESULTS), full=True)
    page.write_text(html(made, pages.DOCS), encoding="utf-8")
    with Browser(str(BROWSER)) as one:
        one.open(page)
        yield one


def test_it_is_whole_without_the_network(browser: Browser) -> None:
    assert browser.failed == []
    assert [one[:60] for one in browser.requested if not one.startswith(("file:", "data:"))] == []
    assert sum(one.startswith("file:") for one in browser.requested) == 1
    pictures = browser.value("[...document.images].map(one => one.complete && one.naturalWidth)")
    assert pictures and all(pictures)
    gone = (
        "[...document.links].filter(one => !document.getElementById(one.hash.slice(1))).map(one => one.href)"
    )
    assert [one for one in browser.value(gone) if not one.startswith("http")] == []


def test_a_click_on_a_head_sorts_its_table(tmp_path: Path) -> None:
    """On a page of its own: the report's tables have other columns when other questions are asked."""
    seconds = ["0.5 s", "3 s", "20 s", "1,000 s", ""]
    table = "\n".join(f"| {name} | {time} |" for name, time in zip("abcde", seconds, strict=True))
    lines = table.splitlines()
    drawn = "\n".join(lines[place] for place in (2, 4, 0, 3, 1))
    page = tmp_path / "sorted.html"
    page.write_text(
        html({"a.md": f"# A\n\n| method | takes |\n|---|---|\n{drawn}\n"}, tmp_path), encoding="utf-8"
    )
    with Browser(str(BROWSER)) as browser:
        browser.open(page)
        column = browser.value(HEADS).index("takes")
        assert browser.value(COLUMN % column) == [seconds[place] for place in (2, 4, 0, 3, 1)]
        head = f"{FIRST}.tHead.rows[0].cells[{column}].firstChild"
        for expected, direction in ((seconds, "ascending"), ([*seconds[3::-1], ""], "descending")):
            browser.click(head)
            assert browser.value(COLUMN % column) == expected
            assert browser.value(f"{head}.parentElement.ariaSort") == direction
        assert browser.failed == []


def test_each_table_of_the_report_can_be_sorted(browser: Browser) -> None:
    heads = "[...document.querySelectorAll('table')].map(one => [...one.tHead.rows[0].cells]).flat()"
    assert browser.value(f"{heads}.length") > 100
    assert browser.value(f"{heads}.filter(one => one.firstChild.tagName != 'BUTTON').length") == 0


def test_words_filter_rows_of_all_tables(browser: Browser) -> None:
    everything = browser.value(f"{SHOWN}.length")
    browser.click("document.querySelector('#filter')")
    browser.type("check-n-run full")
    left = browser.value(f"{SHOWN}.map(one => one.closest('section').textContent + one.textContent)")
    assert 0 < len(left) < everything
    assert all("check-n-run" in one.lower() and "full" in one.lower() for one in left)
    assert browser.value("document.querySelector('#count').textContent").startswith(f"{len(left):,} of ")
    empty = "[...document.querySelectorAll('section, table')].filter(one => one.checkVisibility()"
    assert (
        browser.value(f"{empty} && ![...one.querySelectorAll('tbody tr')].some(row => !row.hidden)).length")
        == 0
    )
    browser.value("document.querySelector('#filter').select()")
    browser.type("no row has this")
    assert browser.value(f"{SHOWN}.length") == 0
    browser.value("document.querySelector('#filter').select()")
    browser.type(" ")
    assert browser.value(f"{SHOWN}.length") == everything


def test_it_can_be_read_without_its_script(tmp_path: Path) -> None:
    page = tmp_path / "plain.html"
    whole = html(pages.render(tables.load(RESULTS), full=True), pages.DOCS)
    page.write_text(whole.partition("<script>")[0] + "</html>", encoding="utf-8")
    with Browser(str(BROWSER)) as browser:
        browser.open(page)
        assert browser.failed == []
        assert browser.value(f"{SHOWN}.length") > 100
