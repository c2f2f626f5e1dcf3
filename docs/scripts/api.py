"""`python docs/scripts/api.py`: writes docs/api.md from ecemb's source: public names, with their docstrings.

Nothing in that page is typed by hand but the order of its parts. Nothing is imported: the source is read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"

HEAD = """# API

<!-- Written by `python docs/scripts/api.py` from ecemb's source: change nothing here. -->

All public names. Calls marked "all ranks" are made by every rank, at the same place of the script. Errors
are in [a page of their own](errors.md).
"""
PARTS = {
    "Starting": ["ecemb.init_process_group", "ecemb.protect", "ecemb.Code", "ecemb.run", "ecemb.place.Place"],
    "Training": ["ecemb.Guard", "ecemb.Step", "ecemb.RecoveryReport", "ecemb.ScrubReport"],
    "Tables": [
        "ecemb.nn.ShardedEmbeddingBag",
        "ecemb.nn.ShardedEmbedding",
        "ecemb.tables",
        "ecemb.engines.discover.LiveTable",
    ],
    "Watching": [
        "ecemb.integrations.metrics.TensorBoard",
        "ecemb.integrations.metrics.Prometheus",
        "ecemb.integrations.metrics.Tracker",
        "ecemb.integrations.metrics.values",
        "ecemb.integrations.lightning.Protection",
    ],
    "Checkpoints": [
        "ecemb.CheckpointWriter",
        "ecemb.CheckpointReader",
        "ecemb.checkpoint.Transfer",
        "ecemb.checkpoint.DifferentialWriter",
        "ecemb.checkpoint.Piece",
        "ecemb.checkpoint.Stored",
    ],
    "Serving": [
        "ecemb.checkpoint.Follower",
        "ecemb.checkpoint.Snapshot",
        "ecemb.checkpoint.IncrementReader",
        "ecemb.checkpoint.Chain",
        "ecemb.checkpoint.Link",
        "ecemb.checkpoint.StoredTable",
    ],
}
"""Title -> public names, in the order of the page."""
MEMBERS = {"ecemb.Code": ["r"], "ecemb.integrations.lightning.Protection": ["guard", "batches", "close"]}
"""Where not all members are for scripts, those that are."""
UNTYPED = {"ecemb.Guard", "ecemb.Step"}
"""Classes that scripts don't make themselves."""
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
_WIDTH = 110

Definition = ast.FunctionDef | ast.ClassDef


def main() -> None:
    PAGE.write_text(render(), encoding="utf-8")


def render() -> str:
    """Returns the page."""
    parts = [HEAD]
    for title, names in PARTS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _entry(name)
    return "\n".join(parts)


def _entry(name: str) -> Iterator[str]:
    node = found(name)
    yield f"### {name}\n"
    if isinstance(node, ast.FunctionDef):
        yield f"```text\n{signature(name, node)}\n```\n"
        yield from told(ast.get_docstring(node) or "")
        return
    made = next((one for one in _methods(node) if one.name == "__init__"), None)
    if made is not None and name not in UNTYPED:
        yield f"```text\n{signature(name, made)}\n```\n"
    elif fields := [one for one in node.body if isinstance(one, ast.AnnAssign)]:
        yield f"```text\n{_folded(name, [ast.unparse(one) for one in fields], '')}\n```\n"
    yield from told(ast.get_docstring(node) or "")
    chosen = MEMBERS.get(name)
    for method in _methods(node):
        if method.name.startswith("_") or (chosen is not None and method.name not in chosen):
            continue
        if not (doc := ast.get_docstring(method)):
            continue
        yield f"#### {name.rpartition('.')[2]}.{method.name}\n"
        if "property" in map(ast.unparse, method.decorator_list):
            yield f"```text\n{method.name}: {ast.unparse(method.returns) if method.returns else 'Any'}\n```\n"
        else:
            yield f"```text\n{signature(method.name, method)}\n```\n"
        yield from told(doc)


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [one for one in node.body if isinstance(one, ast.FunctionDef)]


def found(name: str) -> Definition:
    """The definition of a public name, through the imports of the modules on its way."""
    module, _, last = name.rpartition(".")
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node in [*body, *(inner for outer in body if isinstance(outer, ast.If) for inner in outer.body)]:
        if isinstance(node, Definition) and node.name == last:
            return node
        if isinstance(node, ast.ImportFrom) and last in [one.asname or one.name for one in node.names]:
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            return found(".".join([*above, *([node.module] if node.module else []), last]))
    raise LookupError(f"{path} defines no {last}, which docs/api.md is to show")


def signature(name: str, node: ast.FunctionDef) -> str:
    """How a function is called: on one line, or with a line for each parameter."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    shown = [_parameter(one, default) for one, default in zip(plain, defaults, strict=True)]
    shown = shown[1:] if plain and plain[0].arg in ("self", "cls") else shown
    if given.vararg:
        shown.append(f"*{_parameter(given.vararg, None)}")
    elif given.kwonlyargs:
        shown.append("*")
    shown += [_parameter(one, two) for one, two in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        shown.append(f"**{_parameter(given.kwarg, None)}")
    returns = "" if node.name == "__init__" or node.returns is None else f" -> {ast.unparse(node.returns)}"
    return _folded(name, shown, returns)


def _folded(name: str, parameters: list[str], returns: str) -> str:
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {one}," for one in parameters), f"){returns}"])


def _parameter(one: ast.arg, default: ast.expr | None) -> str:
    text = one.arg if one.annotation is None else f"{one.arg}: {ast.unparse(one.annotation)}"
    if default is None:
        return text
    return f"{text}{'=' if one.annotation is None else ' = '}{ast.unparse(default)}"


def told(docstring: str) -> Iterator[str]:
    """A docstring in Google's style as Markdown: its text, then its sections as lists."""
    lines = cleandoc(docstring).splitlines()
    while lines:
        if (title := lines[0].rstrip(":")) in SECTIONS and lines[0].endswith(":"):
            end = next(
                (i for i, line in enumerate(lines[1:], 1) if line and not line.startswith(" ")), len(lines)
            )
            body = cleandoc("\n".join(["", *lines[1:end]]))
            yield f"**{title}**\n"
            yield f"{body}\n" if title in ("Returns", "Yields") else f"{_listed(body)}\n"
        else:
            end = next((i for i, line in enumerate(lines) if line.rstrip(":") in SECTIONS), len(lines))
            yield "\n".join(lines[:end]).strip() + "\n"
        lines = lines[end:]


def _listed(body: str) -> str:
    """`name: text` for each entry, whose further lines are indented."""
    entries = re.sub(r"\n +", " ", body)
    return "\n".join(
        f"- `{name}`: {text.strip()}" if text else f"- {name}"
        for name, _, text in (entry.partition(":") for entry in entries.splitlines() if entry)
    )


if __name__ == "__main__":
    main()
