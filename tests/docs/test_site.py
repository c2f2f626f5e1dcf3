"""The site: each page fits a phone and a laptop, in a real browser; pages link to what they are made of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import Browser, found

ROOT = Path(__file__).resolve().parents[2]
BROWSER = found()
WIDTHS = {"phone": 390, "laptop": 1366}
"""Pixels of CSS."""
HEIGHT = 100
"""What is below isn't painted."""
REPOSITORY = "https://example.org/owner/ecemb"

WIDER = """
(() => {
  const root = document.documentElement, limit = root.clientWidth
  const scrolls = one => getComputedStyle(one).overflowX != 'visible'
  const wide = [...document.querySelectorAll('body *')].filter(one => {
    if (one.getBoundingClientRect().right <= limit + 1 || !one.checkVisibility()) return false
    for (let at = one.parentElement; at; at = at.parentElement) if (scrolls(at)) return false
    return true
  })
  return {
    beyond: root.scrollWidth - limit,
    wide: wide.slice(0, 3).map(one => `${one.tagName} ${one.textContent.trim().slice(0, 60)}`),
    bare: [...document.querySelectorAll('article table:not([class])')]
      .filter(one => !one.closest('.md-typeset__scrollwrap')).length,
  }
})()
"""
"""What of a page is wider than the window: pixels, elements that don't scroll by themselves, bare tables."""
NOTHING = {"beyond": 0, "wide": [], "bare": 0}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, as if the repository's address were known."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"ECEMB_REPOSITORY": REPOSITORY, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
        timeout=600,
    )
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("no browser is here: apt-get install chromium")
    with Browser(BROWSER) as one:
        yield one


def widths(browser: Browser) -> dict[str, Any]:
    """What is wider than the window, by the window's name."""
    measured: dict[str, Any] = {}
    now = browser.value("innerWidth")
    for name in sorted(WIDTHS, key=lambda name: WIDTHS[name] != now):  # the page has this layout already
        if WIDTHS[name] != now:
            browser.resize(WIDTHS[name], HEIGHT)
        measured[name] = browser.value(WIDER)
    return measured


def test_no_page_is_wider_than_a_window(site: Path, browser: Browser) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    wider: dict[str, Any] = {}
    for page in pages:
        browser.open(page)
        measured = widths(browser)
        if any(one != NOTHING for one in measured.values()):
            wider[page.relative_to(site).as_posix()] = measured
    assert wider == {} and browser.failed == []


SCROLLED = """
[...document.querySelectorAll('article table:not([class])')].slice(0, 2)
  .flatMap(one => [one, one.closest('.md-typeset__scrollwrap')])
  .map(one => one.scrollWidth - one.clientWidth)
"""
"""By how many pixels the first two tables of a page are wider than their place."""


def test_the_first_tables_of_methods_fit_a_phone(site: Path, browser: Browser) -> None:
    browser.resize(WIDTHS["phone"], HEIGHT)
    browser.open(site / "choosing" / "index.html")
    assert browser.value(SCROLLED) == [0] * 4


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<p style='width: 1000px'>wide</p>", {"beyond": 610, "wide": ["P wide"], "bare": 0}),
        ("<pre style='overflow: auto'><b style='display: block; width: 1000px'>a</b></pre>", NOTHING),
        ("<article><table><tr><td>a</td></tr></table></article>", {**NOTHING, "bare": 1}),
    ],
    ids=["too wide", "scrolls by itself", "a table that would not scroll"],
)
def test_what_is_wider_is_found(
    body: str, expected: dict[str, Any], browser: Browser, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><body style='margin: 0; height: 10px'>{body}</body>")
    browser.open(page)
    assert widths(browser) == {"phone": expected, "laptop": {**NOTHING, "bare": expected["bare"]}}


@pytest.mark.parametrize(
    ("page", "source"),
    [
        ("index.html", "edit/main/docs/index.md"),
        ("guides/hosts/index.html", "edit/main/docs/guides/hosts.md"),
        ("contributing/index.html", "edit/main/CONTRIBUTING.md"),
        ("changelog/index.html", "edit/main/CHANGELOG.md"),
        ("api/index.html", None),
        ("errors/index.html", None),
        ("results/overhead/index.html", None),
    ],
)
def test_a_page_links_to_what_it_is_made_of(site: Path, page: str, source: str | None) -> None:
    """Pages that scripts write have no link."""
    text = (site / page).read_text(encoding="utf-8")
    assert re.findall(rf'href="{REPOSITORY}/(edit/[^"]*)"', text) == ([source] if source else [])
    if source:
        assert (ROOT / source.removeprefix("edit/main/")).is_file()


def test_the_site_has_search_and_its_version(site: Path) -> None:
    from ecemb import __version__

    assert "Code(4, 3)" in (site / "search" / "search_index.json").read_text(encoding="utf-8")
    text = (site / "index.html").read_text(encoding="utf-8")
    assert f"ecemb {__version__}" in text and 'data-md-component="search"' in text
