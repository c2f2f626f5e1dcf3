"""Pages and pictures that scripts make are current, and every error says what to do."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    """A module of docs/scripts, which is no package."""
    path = ROOT / "docs" / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"docs_{name}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[f"docs_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


errors_page, api_page, pictures = script("errors"), script("api"), script("pictures")
torchrec_page = script("torchrec")


def test_the_page_is_current() -> None:
    shown = errors_page.PAGE.read_text(encoding="utf-8")
    assert shown == errors_page.render(), "run `make pages`"


def test_each_message_is_in_one_section() -> None:
    kinds = errors_page.tree(ROOT / "ecemb" / "errors.py")
    kinds["UsageError"].messages = {"ecemb/guard.py": ["too late"], "ecemb/net/links.py": ["too soon"]}
    for kind in kinds.values():
        sections = [errors_page.entry(kind, activity) for activity in errors_page.ACTIVITIES]
        assert len([section for section in sections if section]) == max(1, len(kind.messages))
        for message in [one for found in kind.messages.values() for one in found]:
            assert len([section for section in sections if message in section]) == 1


def test_the_api_is_current() -> None:
    assert api_page.PAGE.read_text(encoding="utf-8") == api_page.render(), "run `make pages`"


def test_the_table_of_torchrecs_members_is_current() -> None:
    shown = torchrec_page.PAGE.read_text(encoding="utf-8")
    assert shown == torchrec_page.render(shown), "run `make pages`"
    for family in torchrec_page.families().values():
        assert all(f"`{name}`" in shown for name in family)


def test_the_api_has_every_public_name() -> None:
    """But for errors, which have a page, and what only checkpoint writers of one's own need."""
    shown = {name for names in api_page.PARTS.values() for name in names}
    listed = (ROOT / "tests" / "docs" / "public_api.txt").read_text().splitlines()
    kinds = dict(line.partition(": ")[::2] for line in listed)
    tops = {name for name, kind in kinds.items() if kind != "module" and name.rpartition(".")[0] not in shown}
    tops = {name for name in tops if not name.startswith("ecemb.errors.")}
    again = {"ecemb.checkpoint.CheckpointReader", "ecemb.checkpoint.CheckpointWriter"}  # named twice
    members = {f"{one}." for one in again}
    missing = {name for name in tops - shown - again if not name.startswith(tuple(members))}
    assert missing == {"ecemb.checkpoint.is_stored"}


GOOGLE = """Does it. All ranks.

A paragraph:

- with a list.

Args:
    one: is read, and
        overwritten.
    two: is not.

Returns:
    What came of it.

    More of it.

Raises:
    E: if not.
"""


def test_a_docstring_as_markdown() -> None:
    assert "\n".join(api_page.told(GOOGLE)) == (
        "Does it. All ranks.\n\nA paragraph:\n\n- with a list.\n\n**Args**\n\n- `one`: is read, and "
        "overwritten.\n- `two`: is not.\n\n**Returns**\n\nWhat came of it.\n\nMore of it.\n\n**Raises**\n\n"
        "- `E`: if not.\n"
    )


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("def f(a, b=1): ...", "f(a, b=1)"),
        ("def f(self, *, c: int = 2) -> str: ...", "f(*, c: int = 2) -> str"),
        ("def f(*a: int, **b: str): ...", "f(*a: int, **b: str)"),
        (
            f"def f({'a' * 60}: int, {'b' * 60}: int): ...",
            f"f(\n    {'a' * 60}: int,\n    {'b' * 60}: int,\n)",
        ),
    ],
)
def test_signatures(source: str, shown: str) -> None:
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert api_page.signature("f", node) == shown


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
