"""How ecemb raises its errors, by its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ecemb import errors

ROOT = Path(__file__).resolve().parents[2]
WHOLE = (errors.ConfigurationError, errors.ArenaInsecure, errors.NotEnoughSpace)
"""Their messages hold all that a user needs of the error that they are raised in place of."""
IMPORTS = ("ImportError", "AttributeError")
"""The chain shows which import of another library fails, and where."""


def chained() -> Iterator[tuple[str, int, str]]:
    """(module, line, class) of each such error that shows another one's traceback as well."""
    for path in sorted((ROOT / "ecemb").rglob("*.py")):
        for handler in ast.walk(ast.parse(path.read_text())):
            if not isinstance(handler, ast.ExceptHandler):
                continue
            caught = "" if handler.type is None else ast.unparse(handler.type)
            for one in ast.walk(handler):
                if not isinstance(one, ast.Raise) or not isinstance(one.exc, ast.Call):
                    continue
                kind = getattr(errors, ast.unparse(one.exc.func), None)
                if not isinstance(kind, type) or not issubclass(kind, WHOLE):
                    continue
                no_chain = isinstance(one.cause, ast.Constant) and one.cause.value is None
                if not no_chain and not any(name in caught for name in IMPORTS):
                    yield str(path.relative_to(ROOT)), one.lineno, kind.__name__


def test_errors_that_say_all_show_no_other_traceback() -> None:
    assert list(chained()) == []
