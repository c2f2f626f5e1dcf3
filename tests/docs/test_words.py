"""`make lint` finds the words that the word list avoids."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.scripts import words


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("ecemb/one.py", '"""Nobody knows."""\n\nraise ValueError(f"{1} is told")  # too, is fine\n', [1, 3]),
        ("ecemb/two.py", "anew = 1  # begins anew\n", [1]),
        ("tests/three.py", '"""Plain.\n\nAs a whole."""\nx = "anew"  # anew\n', [3]),
        ("docs/four.md", "```\nso many\n```\nThis, too, is so many.\n", [4, 4]),
    ],
)
def test_each_avoided_word_is_found(
    name: str, content: str, lines: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "ROOT", tmp_path)
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(content)
    assert sorted(int(finding.split(":")[1]) for finding in words.findings(path)) == lines
