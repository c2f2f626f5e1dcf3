"""Pages in Markdown as one file for a browser: pictures are in it, and nothing is fetched."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path

STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 12px; margin: 1em 0 }
th, td { border: 1px solid #ccc; padding: 2px 8px; vertical-align: top }
th { background: #eee } tr:nth-child(even) td { background: #f8f8f8 }
code { font-size: 92% } img { max-width: 100% } nav li { list-style: none }
"""

_PICTURE = re.compile(r'src="([\w./-]+\.svg)"')
_HEADING = re.compile(r"<h1>(.*?)</h1>")
_LINK = re.compile(r'<a href="(?!http)[^"]*">(.*?)</a>')


def html(pages: Mapping[str, str], folder: Path) -> str:
    """Returns the pages one after the other, with a list of them; links between them are plain text.

    Args:
        pages: In Markdown, with tables, by the name of their file.
        folder: Of these files; the pictures that a page names are beside it.
    """
    from markdown_it import MarkdownIt

    titles: list[str] = []
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")

    def heading(match: re.Match[str]) -> str:
        titles.append(match[1])
        return f'<h1 id="s{len(titles)}">{match[1]}</h1>'

    def body(name: str, text: str) -> str:
        def picture(match: re.Match[str]) -> str:
            data = base64.b64encode(((folder / name).parent / match[1]).read_bytes()).decode()
            return f'src="data:image/svg+xml;base64,{data}"'

        rendered = _LINK.sub(r"\1", parser.render(_without_comments(text)))
        return _HEADING.sub(heading, _PICTURE.sub(picture, rendered))

    bodies = "".join(body(name, text) for name, text in pages.items())
    contents = "".join(f'<li><a href="#s{number}">{title}</a></li>' for number, title in enumerate(titles, 1))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f"<title>ecemb: results</title><style>{STYLE}</style>\n"
        f"<nav><ul>{contents}</ul></nav>\n{bodies}</html>\n"
    )


def _without_comments(text: str) -> str:
    return re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
