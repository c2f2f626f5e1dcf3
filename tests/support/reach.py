"""Which tests start processes, and which need TorchRec: read from the names that their code reaches.

A test reaches the names in its body, its decorators and its fixtures, and what those reach in turn, through
the modules of tests/, bench/ and baselines/. Nothing is imported for this.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READ = (ROOT / "tests", ROOT)
"""Where modules that are read are looked for."""
KINDS = {
    "processes": ("subprocess", "multiprocessing", "os.fork", "os.posix_spawn", "torch.multiprocessing"),
    "torchrec": ("torchrec", "fbgemm_gpu"),
}
"""Marker -> modules and functions; a test that reaches one of them has the marker."""
HARMLESS = (
    *(f"multiprocessing.{module}" for module in ("connection", "context", "process", "synchronize", "util")),
    "torch.multiprocessing.reductions",
    "bench.harness.result",  # asks git for the commit
)


@dataclass
class Source:
    """What a module defines and imports.

    Attributes:
        names: each name of the module's top -> the dotted names in its definition.
        imports: each imported name, wherever it is imported -> its dotted name.
    """

    names: dict[str, set[str]] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)


@functools.cache
def path_of(module: str) -> Path | None:
    """The file of a module of tests/, bench/ or baselines/; None for any other."""
    parts = module.split(".")
    for folder in READ:
        for path in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if parts[0] != "ecemb" and path.is_file():
                return path
    return None


@functools.cache
def read(path: Path) -> Source:
    """Reads a module."""
    source = Source()
    package = path.relative_to(ROOT).parent.parts
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        dotted, stored = set[str](), set[str]()
        for node in nodes_of(statement):
            if isinstance(node, ast.Name):
                dotted.add(node.id)
                if isinstance(node.ctx, ast.Store):
                    stored.add(node.id)
            elif isinstance(node, ast.Attribute):
                parts: list[str] = []
                one: ast.AST = node
                while isinstance(one, ast.Attribute):
                    parts.append(one.attr)
                    one = one.value
                if isinstance(one, ast.Name):
                    dotted.add(".".join([one.id, *reversed(parts)]))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    shown = alias.asname or alias.name.partition(".")[0]
                    source.imports[shown] = alias.name if alias.asname else shown
            elif isinstance(node, ast.ImportFrom):
                parents = package[: len(package) + 1 - node.level] if node.level else ()
                base = ".".join([*parents, *filter(None, [node.module])])
                source.imports |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        is_named = isinstance(statement, ast.FunctionDef | ast.ClassDef)
        for name in {statement.name} if is_named else stored:
            source.names.setdefault(name, set()).update(dotted)
    return source


def nodes_of(statement: ast.AST) -> Iterator[ast.AST]:
    """A statement and all nodes in it: as `ast.walk`, and faster."""
    waiting = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        for value in vars(node).values():
            if isinstance(value, list):
                waiting += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.Load):
                waiting.append(value)


@functools.cache
def kinds(path: Path, names: frozenset[str]) -> frozenset[str]:
    """The markers of a test: of a function and its fixtures, which are names of one module."""
    found: set[str] = set()
    seen: set[tuple[Path, str]] = set()
    waiting = [(path, name) for name in names]
    while waiting:
        path, name = waiting.pop()
        if (path, name) in seen:
            continue
        seen.add((path, name))
        own, next_ones = reached_from(path, name)
        found |= own
        waiting += next_ones
    return frozenset(found)


@functools.cache
def reached_from(path: Path, name: str) -> tuple[set[str], set[tuple[Path, str]]]:
    """The markers of the names in one definition, and the definitions of these names."""
    found: set[str] = set()
    definitions: set[tuple[Path, str]] = set()
    source = read(path)
    for one in source.names.get(name, ()):
        first, _, rest = one.partition(".")
        if first in source.names:
            definitions.add((path, first))
        elif first in source.imports:
            full = ".".join(filter(None, [source.imports[first], rest]))
            found |= own_kinds(full)
            definitions.update(defined_in(full))
    return found, definitions


@functools.cache
def own_kinds(name: str) -> frozenset[str]:
    """The markers of one dotted name."""
    return frozenset(kind for kind, starts in KINDS.items() if within(name, starts))


def within(name: str, starts: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{start}.") for start in starts) and not harmless(name)


def harmless(name: str) -> bool:
    return any(f"{name}.".startswith(f"{start}.") for start in HARMLESS)


@functools.cache
def defined_in(name: str) -> tuple[tuple[Path, str], ...]:
    """The module that defines a dotted name, and the name there."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        if (path := path_of(module)) is not None and not harmless(module):
            source, here = read(path), (path, parts[count])
            if parts[count] not in source.names and parts[count] in source.imports:  # shown again
                return (here, *defined_in(source.imports[parts[count]]))
            return (here,)
    return ()
