"""A page in Markdown as one file for a browser: pictures are in it, and nothing is fetched."""

from __future__ import annotations

import base64
import html as escapes
import re
from pathlib import Path

STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 12px; margin: 1em 0 }
th, td { border: 1px solid #ccc; padding: 2px 8px; vertical-align: top }
th { background: #eee } tr:nth-child(even) td { background: #f8f8f8 }
code { font-size: 92% } img { max-width: 100% } nav li { list-style: none }
"""

_PICTURE = re.compile(r'src="([\w.-]+\.svg)"')
_HEADING = re.compile(r"<h2>(.*?)</h2>")
_TITLE = re.compile(r"^# (.*)$", re.MULTILINE)


def html(text: str, folder: Path) -> str:
    """Returns the page, with a list of its sections.

    Args:
        text: In Markdown, with tables.
        folder: Of the pictures that it names.
    """
    from markdown_it import MarkdownIt

    def picture(match: re.Match[str]) -> str:
        data = base64.b64encode((folder / match[1]).read_bytes()).decode()
        return f'src="data:image/svg+xml;base64,{data}"'

    titles: list[str] = []

    def heading(match: re.Match[str]) -> str:
        titles.append(match[1])
        return f'<h2 id="s{len(titles)}">{match[1]}</h2>'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(_without_comments(text))
    body = _HEADING.sub(heading, _PICTURE.sub(picture, body))
    sections = "".join(f'<li><a href="#s{number}">{title}</a></li>' for number, title in enumerate(titles, 1))
    title = _TITLE.search(text)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f"<title>ecemb: {escapes.escape(title[1] if title else '')}</title><style>{STYLE}</style>\n"
        f"<nav><ul>{sections}</ul></nav>\n{body}</html>\n"
    )


def _without_comments(text: str) -> str:
    return re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
