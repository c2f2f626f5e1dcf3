"""Imports between bench/, baselines/ and ecemb: down only, and in no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BELOW = {"ecemb": (), "baselines": ("ecemb",), "bench": ("ecemb", "baselines")}
"""Top-level package -> those that it imports, besides itself and what is installed."""
TOPS = {*BELOW, "tests", "examples"}


def modules(top: str) -> dict[str, Path]:
    """Dotted name -> file, of all modules of a package."""
    found: dict[str, Path] = {}
    for path in sorted((ROOT / top).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(source: str, package: str) -> Iterator[str]:
    """Dotted names of all that a module of `package` imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join(filter(None, [*parents, node.module]))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def graph(top: str) -> dict[str, set[str]]:
    """Module -> modules of the same top-level package that it imports."""
    files = modules(top)
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        dotted = imported(path.read_text(encoding="utf-8"), package)
        targets = {one if one in files else one.rpartition(".")[0] for one in dotted}
        found[name] = targets & files.keys() - {name}
    return found


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty when there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("top", BELOW)
def test_imports_go_down(top: str) -> None:
    wrong = [
        f"{name} imports {dotted}"
        for name, path in modules(top).items()
        for dotted in imported(path.read_text(encoding="utf-8"), name)
        if dotted.split(".")[0] in TOPS - {top, *BELOW[top]}
    ]
    assert not wrong


@pytest.mark.parametrize("top", ["baselines", "bench"])
def test_no_modules_import_each_other(top: str) -> None:
    assert not circle(graph(top))


def test_circles_are_seen() -> None:
    assert not circle({"a": {"b"}, "b": set()})
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert list(imported("from . import x\nfrom .y import z\nimport bench.a", "bench.b")) == [
        *("bench.b.x", "bench.b.y.z", "bench.a")
    ]
