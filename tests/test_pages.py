"""Pages and pictures that scripts make are current, and every error says what to do."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def script(name: str) -> ModuleType:
    """A module of docs/scripts, which is no package."""
    path = ROOT / "docs" / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"docs_{name}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[f"docs_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


errors_page, pictures = script("errors"), script("pictures")


def test_the_page_is_current() -> None:
    shown = errors_page.PAGE.read_text(encoding="utf-8")
    assert shown == errors_page.render(), "run `make pages`"


def test_the_pictures_are_current() -> None:
    for name, draw in pictures.PICTURES.items():
        assert (pictures.FOLDER / name).read_text(encoding="utf-8") == draw().svg(), "run `make pages`"


def test_every_kind_says_what_to_do() -> None:
    kinds = errors_page.tree(ROOT / "ecemb" / "errors.py")
    assert kinds and not [kind.name for kind in kinds.values() if "\n\n" not in kind.docstring]


PROPERTY = """
class C:
    @property
    def way_out(self):
        return "way of just five words"
"""


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise E(f"table {self.name!r} has {len(rows)} rows")', ["table {name} has {…} rows"]),
        ('raise E(f"{size / 2**20:.1f} MiB, {rows[0]}, {type(x).__name__}")', ["{size} MiB, {rows}, {type}"]),
        ('raise E("one " if x else "two")', ["one ", "two"]),
        ('raise E("one " + (f"of {x}" if x else "two"))', ["one of {x}", "one two"]),
        ('raise E(why(1))\ndef why(x):\n    return f"because of {x}"', ["because of {x}"]),
        ('def f():\n    text = "so"\n    raise E(text) from None', ["so"]),
        ('def f():\n    return E("made here")', ["made here"]),
        ('RULE = f"of {x}"\nraise E(f"the rule {RULE}")', ["the rule of {x}"]),
        (PROPERTY + 'raise E(f"a {way_out}")', ["a {way_out}"]),
        (PROPERTY + 'raise E(f"a {self.way_out}")', ["a way of just five words"]),
        ("raise E(nobody(knows))\nraise E()\nraise F('another')", []),
    ],
)
def test_templates(source: str, found: list[str]) -> None:
    module = ast.parse(source)
    kinds = {"E": errors_page.Kind("E", (), "")}
    errors_page.collect("m.py", module, kinds, errors_page.sentences([module]))
    assert kinds["E"].messages == ({"m.py": found} if found else {})
