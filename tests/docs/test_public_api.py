"""What users may call is written down: a change of a name or a signature shows in a diff.

`PYTHONPATH=.:tests python tests/docs/test_public_api.py > tests/docs/public_api.txt` writes the list. Say in
CHANGELOG.md why it changes.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from support.without_lightning import lightning

LIST = Path(__file__).with_name("public_api.txt")
MODULES = [
    "ecemb",
    "ecemb.checkpoint",
    "ecemb.errors",
    "ecemb.integrations.lightning",
    "ecemb.integrations.metrics",
    "ecemb.nn",
]


def modules() -> Iterator[ModuleType]:
    """The public modules."""
    for name in MODULES:
        yield lightning() if name == "ecemb.integrations.lightning" else importlib.import_module(name)


def names(module: ModuleType) -> list[str]:
    """Its `__all__`, or whatever it defines itself."""
    if listed := getattr(module, "__all__", None):
        return sorted(listed)
    own = (name for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__)
    return sorted(name for name in own if not name.startswith("_"))


def public() -> Iterator[tuple[str, Any, str]]:
    """(dotted name, the object, how it is called or what it is) of all that users may use."""
    for module in modules():
        yield module.__name__, module, "module"
        for name in names(module):
            value = getattr(module, name)
            dotted = f"{module.__name__}.{name}"
            if isinstance(value, ModuleType) or name.startswith("__"):
                continue
            if not inspect.isclass(value):
                yield dotted, value, f"def {inspect.signature(value)}"
                continue
            if issubclass(value, Exception):
                yield dotted, value, f"class ({', '.join(base.__name__ for base in value.__bases__)})"
                continue
            yield dotted, value, f"class {inspect.signature(value)}"
            yield from members(dotted, value)


def members(dotted: str, kind: type) -> Iterator[tuple[str, Any, str]]:
    """The public methods and properties that ecemb's own classes give a class."""
    found: dict[str, Any] = {}
    for owner in reversed(kind.__mro__):
        if owner.__module__.split(".")[0] == "ecemb":
            found.update(vars(owner))
    for name, value in sorted(found.items()):
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            returns = inspect.signature(value.fget).return_annotation if value.fget else "?"
            yield f"{dotted}.{name}", value, f"property -> {returns}"
        elif isinstance(value, (classmethod, staticmethod)):
            yield f"{dotted}.{name}", value, f"{type(value).__name__} {inspect.signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"{dotted}.{name}", value, f"def {inspect.signature(value)}"


def listed() -> list[str]:
    return [f"{dotted}: {form}" for dotted, _, form in public()]


def test_the_public_api_is_the_one_that_is_written_down() -> None:
    assert listed() == LIST.read_text().splitlines(), "a public name or signature changed: see above"


def test_everything_public_says_what_it_is() -> None:
    bare = [dotted for dotted, value, _ in public() if not (getattr(value, "__doc__", None) or "").strip()]
    assert not bare


def test_names_are_sorted() -> None:
    for module in modules():
        every = getattr(module, "__all__", [])
        assert list(every) == sorted(every), module.__name__


if __name__ == "__main__":
    print("\n".join(listed()))
