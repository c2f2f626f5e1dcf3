"""`python docs/scripts/words.py`: finds words that the prose here avoids, and prints what to write instead.

It reads docstrings, comments and messages of the code, docstrings of tests/, the pages of documentation,
and the names of ecemb/.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WORDS = {
    r"\banew\b": "again",
    r"\b(any|every|no|some)body\b|\bwhoever\b": "the process, rank or user: name it",
    r"\btold\b(?!:)": "reported, informed, or the subject that says it",
    r"\bso many\b": "this many, or the number",
    r"\bas a whole\b": "whole, or completely",
    r"\w, too(?=[,.;:)]|$)": "also",
    r"\bthat is (?-i:none)\b": "not a ..., or without ...",
    r"\b(to|can|can't|cannot) be had\b": "available",
    r"\b(albeit|hitherto|lest|thereof|therein|whence|wherein|whereof|whilst)\b": "a plain conjunction",
    r"\bnewcomers?\b": "replacement rank",
    r"\bin vain\b": "without success",
    r"\bfor ever\b": "forever",
    r"\bhas not (all|any|both|its|the)\b": "lacks, or doesn't have",
}
NAMES = {
    "told": "answers, or what they are",
    "heard": "received, or what it is",
    "former": "old",
    "whereabouts": "activity",
}
"""Names that ecemb/ avoids."""
FOLDERS = ("ecemb", "baselines", "bench", "examples", "tests")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(first line, text) of all prose in a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield 1, re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), source, flags=re.DOTALL)
        return
    in_tests = path.is_relative_to(ROOT / "tests")
    for node in ast.walk(ast.parse(source)):
        text = node if not in_tests else node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield text.lineno, text.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not in_tests:
            yield token.start[0], token.string


def findings(path: Path) -> Iterator[str]:
    """A line for each avoided word in a file."""
    if path.is_relative_to(ROOT / "ecemb"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.NAME and (better := NAMES.get(token.string.strip("_"))):
                yield f"{path.relative_to(ROOT)}:{token.start[0]}: the name {token.string}; write: {better}"
    for first, text in texts(path):
        for word, better in WORDS.items():
            for found in re.finditer(word.replace(" ", r"\s+"), text, re.IGNORECASE):
                line = first + text[: found.start()].count("\n")
                yield f"{path.relative_to(ROOT)}:{line}: {found[0]!r}; write: {better}"


def files() -> Iterator[Path]:
    """All files whose prose is checked."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    pages = [
        *(ROOT / "docs").rglob("*.md"),
        *(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),
    ]
    yield from sorted([*paths, *pages])


def main() -> list[str]:
    """Returns the findings in all files."""
    return sorted({finding for path in files() for finding in findings(path)})


if __name__ == "__main__":
    if found := main():
        sys.exit("\n".join(found))
