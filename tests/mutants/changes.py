"""Mutants: the product with one small change each, made from its syntax tree.

Left out is what no test can or should notice: annotations, docstrings, the texts of errors and of the log,
and constants at a module's top, whose values are often arbitrary (a deadline, a size of blocks).
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_SILENT = ("_log", "log", "_logger", "logger", "warnings")
"""Objects whose methods only say something."""


@dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes:
        path: of the module, below the root.
        function: the function's qualified name.
        start: of the bytes that are replaced.
        end: behind them.
        kind: of change.
        old: what is replaced, in one line.
        new: what replaces it.
        repeat: how many changes above it in the function read the same.
    """

    path: str
    function: str
    start: int
    end: int
    kind: str
    old: str
    new: str
    repeat: int

    @property
    def name(self) -> str:
        """What is changed and how, without line numbers, which change with the file."""
        again = f" (#{self.repeat + 1})" if self.repeat else ""
        return f"{self.path}::{self.function}: {self.old} -> {self.new}{again}"

    def apply(self, source: bytes) -> bytes:
        """The module's source with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants(root: Path, path: Path) -> list[Mutant]:
    """All changes of a module, in the order of its lines."""
    source = path.read_bytes()
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    found: list[Mutant] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for function, node, kind, new in _walk(ast.parse(source), "", inside=False):
        assert isinstance(node, ast.stmt | ast.expr) and node.end_lineno and node.end_col_offset is not None
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        old = " ".join(ast.unparse(node).split())
        where = path.relative_to(root).as_posix()
        found.append(Mutant(where, function, start, end, kind, old, new, seen[function, old, new]))
        seen[function, old, new] += 1
    return sorted(found, key=lambda one: (one.start, one.end, one.kind))


def _walk(node: ast.AST, function: str, *, inside: bool) -> Iterator[tuple[str, ast.AST, str, str]]:
    """The changes below a node: the function, what is replaced, the kind, the new text.

    Args:
        node: Where to begin.
        function: The qualified name of the function or class around it.
        inside: Whether that is a function: elsewhere nothing is changed.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        name = f"{function}.{node.name}" if function else node.name
        for statement in node.body:
            yield from _walk(statement, name, inside=True)
        return
    if isinstance(node, ast.ClassDef):
        for statement in node.body:
            yield from _walk(statement, f"{function}.{node.name}" if function else node.name, inside=False)
        return
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Lambda) or _is_silent(node):
        return
    if inside:
        for kind, new in _changes(node):
            yield function, node, kind, new
        if isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(
            node.test, ast.Name | ast.Attribute | ast.Call
        ):
            yield function, node.test, "condition", f"(not {ast.unparse(node.test)})"
    if isinstance(node, ast.Raise):  # its message
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "pattern"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child, function, inside=inside)


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(ops=[operation]) if type(operation) in _COMPARISONS:
            yield "comparison", _with(node, ops=[_COMPARISONS[type(operation)]()])
        case ast.BinOp(op=operation) if type(operation) in _ARITHMETIC:
            yield "arithmetic", _with(node, op=_ARITHMETIC[type(operation)]())
        case ast.BoolOp(op=operation):
            yield "logic", _with(node, op=ast.Or() if isinstance(operation, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "logic", f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", str(value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield "left out", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "left out", "pass"
        case ast.Break():
            yield "loop", "continue"
        case ast.Continue():
            yield "loop", "break"
        case _:
            pass


def _with(node: ast.expr, **fields: object) -> str:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return f"({ast.unparse(ast.fix_missing_locations(other))})"


def _is_silent(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    called = node.value.func
    while isinstance(called, ast.Attribute):
        called = called.value
    return isinstance(called, ast.Name) and called.id in _SILENT
