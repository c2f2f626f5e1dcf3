"""Pages in Markdown as one file for a browser, in which tables are sorted and filtered.

Pictures, style and script are in it, and nothing is fetched. Without the script, it can be read all the same.
"""

from __future__ import annotations

import base64
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

SCRIPT = Path(__file__).with_name("browse.js")
STYLE = SCRIPT.with_suffix(".css")

_PICTURE = re.compile(r'src="([\w./-]+\.svg)"')
_HEADING = re.compile(r"<h([12])>(.*?)</h\1>")
_LINK = re.compile(r'<a href="(?!http)([^"#]*)(?:#([^"]*))?">(.*?)</a>')


def html(pages: Mapping[str, str], folder: Path) -> str:
    """Returns the pages one after the other, with a list of them and a filter.

    Links between pages lead to their places in the file; those to other files are plain text.

    Args:
        pages: In Markdown, with tables, by the name of their file.
        folder: Of these files; the pictures that a page names are beside it.
    """
    from markdown_it import MarkdownIt

    numbers = {name: number for number, name in enumerate(pages, 1)}
    titles: dict[str, str] = {}
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")

    def body(name: str, text: str) -> str:
        here = f"s{numbers[name]}"

        def picture(match: re.Match[str]) -> str:
            data = base64.b64encode(((folder / name).parent / match[1]).read_bytes()).decode()
            return f'src="data:image/svg+xml;base64,{data}"'

        def heading(match: re.Match[str]) -> str:
            level, title = match[1], match[2]
            if level == "1":
                titles.setdefault(name, title)
                return f"<h1>{title}</h1>"
            return f'<h2 id="{_place(here, title.lower())}">{title}</h2>'

        def link(match: re.Match[str]) -> str:
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), match[1])) if match[1] else name
            )
            if target not in numbers:
                return match[3]
            return f'<a href="#{_place(f"s{numbers[target]}", match[2])}">{match[3]}</a>'

        rendered = _LINK.sub(link, parser.render(_without_comments(text)))
        rendered = _HEADING.sub(heading, _PICTURE.sub(picture, rendered))
        return f'<section id="{here}">\n{rendered}</section>\n'

    bodies = "".join(body(name, text) for name, text in pages.items())
    contents = "".join(f'<li><a href="#s{numbers[name]}">{title}</a></li>' for name, title in titles.items())
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f"<title>ecemb: results</title><style>\n{STYLE.read_text(encoding='utf-8')}</style>\n"
        f'<div id="bar"><input id="filter" type="search" placeholder="words that rows have, as ecemb 4096" '
        f'aria-label="filter"> <span id="count" role="status"></span></div>\n'
        f"<nav><ul>{contents}</ul></nav>\n{bodies}"
        f"<script>\n{SCRIPT.read_text(encoding='utf-8')}</script>\n</html>\n"
    )


def _place(section: str, part: str | None) -> str:
    """The name of a place in the file."""
    return f"{section}-{re.sub(r'[^a-z0-9]+', '-', part)}" if part else section


def _without_comments(text: str) -> str:
    return re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
