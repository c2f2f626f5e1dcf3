"""`python -m bench report`: all pages and pictures from raw JSON, and one file of the same for a browser."""

from __future__ import annotations

from pathlib import Path

from bench import performance, tables, web


def write(results: Path | None = None) -> Path:
    """Writes docs/results.md, the figures of other pages, and build/results.html; or pages of other answers.

    Args:
        results: Folder of other answers: results.md, pictures and results.html go there.

    Returns:
        Where the file for a browser is.

    Raises:
        BadResult: See `tables.write` and `performance.write`.
    """
    if results is None:
        page, browsed = tables.PAGE, tables.ROOT / "build" / "results.html"
        tables.write()
        performance.write()
    else:
        page, browsed = results / "results.md", results / "results.html"
        tables.write(results, page)
    tables.replace(browsed, web.html(page.read_text(encoding="utf-8"), page.parent))
    return browsed
