"""`python docs/scripts/errors.py`: writes docs/errors.md from the errors that ecemb's source raises.

Nothing in that page is typed by hand. What a class means, and what to do about it, is its docstring in
ecemb/errors.py; the messages are the arguments of every `raise` and `return` of one of those classes in the
package, with the values that a message is given in braces. Nothing is imported: the source is read.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"

HEAD = """# Errors

<!-- Written by `python docs/scripts/errors.py` from ecemb's source: change nothing here. -->

Every error that ecemb raises on purpose is an `ecemb.errors.EcembError`. A message names the thing, the
rule, the value, and the way out. `{name}` stands for a value. Search this page for words of your message.

Do not catch an error of a step or of `protect`: let the process end. torchrun restarts all workers, and
training continues with the step that was in flight.

| you were | kinds of error |
| :-- | :-- |
"""


@dataclass(frozen=True)
class Activity:
    """What a user does when an error comes, and the section of the page for it.

    Attributes:
        title: of the section.
        meaning: what the errors of the section have in common.
    """

    title: str
    meaning: str


LAUNCHING = Activity("Launching a job", "The workers do not start, or do not find each other.")
PROTECTING = Activity(
    "Protecting a model", "`ecemb.protect()`, or a table that you build for it, refuses an argument."
)
TRAINING = Activity(
    "Training a step",
    "A call in the training loop is refused, or a step does not commit.",
)
RESTARTING = Activity(
    "Restarting after a failure", "`ecemb.protect()` finds a job's memory and cannot continue from it."
)
SAVING = Activity("Saving and resuming", "A checkpoint cannot be written or read.")
OPERATING = Activity(
    "Operating arenas", "The memory that outlives the workers: its folder, its space, its owner, its metrics."
)
PLANNING = Activity("Planning and benchmarks", "A code, a placement, or a kernel that you ask for by name.")
ANY = Activity("At any time", "Bases of the other kinds, and errors that should not happen.")

ACTIVITIES = (LAUNCHING, PROTECTING, TRAINING, RESTARTING, SAVING, OPERATING, PLANNING, ANY)
"""In the order of the page."""

RULES: tuple[tuple[str, str, Activity], ...] = (
    ("", "ecemb/checkpoint/", SAVING),
    ("", "ecemb/tools/cost.py", PLANNING),
    ("", "ecemb/tools/job.py", PLANNING),
    ("NotEnoughSpace", "", OPERATING),
    ("ArenaInsecure", "", OPERATING),
    ("ArenaError", "", OPERATING),
    ("PeerFailure", "", TRAINING),
    ("StepFailed", "", TRAINING),
    ("UndeclaredWrite", "", TRAINING),
    ("ArenaBusy", "", RESTARTING),
    ("ArenaDamaged", "", RESTARTING),
    ("ArenaIncompatible", "", RESTARTING),
    ("LayoutMismatch", "", RESTARTING),
    ("RecoveryError", "", RESTARTING),
    ("TooManyErasures", "", RESTARTING),
    ("InconsistentArenas", "", RESTARTING),
    ("JobFinished", "", RESTARTING),
    ("StateLost", "", RESTARTING),
    ("CheckpointError", "", SAVING),
    ("CodeError", "", PLANNING),
    ("PlacementError", "", PLANNING),
    ("KernelError", "", PLANNING),
    ("KernelUnavailable", "", PLANNING),
    ("EcembError", "", ANY),
    ("", "ecemb/net/", LAUNCHING),
    ("", "ecemb/launch/", LAUNCHING),
    ("", "ecemb/tools/check.py", LAUNCHING),
    ("", "ecemb/__main__.py", LAUNCHING),
    ("", "ecemb/memory/", OPERATING),
    ("", "ecemb/tools/", OPERATING),
    ("", "ecemb/integrations/metrics.py", OPERATING),
    ("", "ecemb/recovery/scrub.py", OPERATING),
    ("UsageError", "", TRAINING),
    ("", "ecemb/step", TRAINING),
    ("", "ecemb/guard.py", TRAINING),
    ("", "ecemb/", PROTECTING),
)
"""Name of a class or "", beginning of a module's path or "", activity: the first rule that fits holds."""

Raised = tuple["ast.FunctionDef | None", ast.Call]

_ELLIPSIS = "…"
_MOST_SOURCES = 12
"""Of one message: what a variable or a function may stand for."""
_SENTENCE_WORDS = 5


@dataclass
class Kind:
    """A class of the tree, and the messages that it is raised with.

    Attributes:
        name: of the class.
        bases: names of its bases.
        docstring: what it means, then what to do.
        messages: the templates, by the module that raises them.
    """

    name: str
    bases: tuple[str, ...]
    docstring: str
    messages: dict[str, list[str]] = field(default_factory=dict)


def main() -> None:
    PAGE.write_text(render(), encoding="utf-8")


def render() -> str:
    """Returns the page."""
    source = ROOT / "ecemb" / "errors.py"
    kinds = tree(source)
    modules = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "ecemb").rglob("*.py"))
    }
    shared = sentences(modules.values())
    for name, module in modules.items():
        collect(name, module, kinds, shared)
    index: list[str] = []
    sections: list[str] = []
    for activity in ACTIVITIES:
        entries = {kind.name: part for kind in kinds.values() if (part := entry(kind, activity))}
        named = ", ".join(f"`{name}`" for name in entries)
        index.append(
            f"| [{activity.title[0].lower()}{activity.title[1:]}](#{anchor(activity.title)}) | {named} |"
        )
        sections += [f"## {activity.title}\n", f"{activity.meaning}\n", *entries.values()]
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    drawn = [line for line in docstring.splitlines() if line.startswith("    ")]
    sections += ["## The tree of errors\n", f"```text\n{textwrap.dedent(chr(10).join(drawn))}\n```\n"]
    return "\n".join([HEAD + "\n".join(index) + "\n", *sections])


def entry(kind: Kind, activity: Activity) -> str:
    """What the page says of a class in the section of an activity: "" if nothing."""
    messages = {name: found for name, found in kind.messages.items() if rule(kind.name, name) is activity}
    if not messages and (kind.messages or rule(kind.name) is not activity):
        return ""
    summary, _, advice = kind.docstring.partition("\n\n")
    bases = " and ".join(f"`{base}`" for base in kind.bases)
    parts = [f"### {kind.name}\n", f"A kind of {bases}. {_one_line(summary)}\n"]
    if advice:
        parts.append(f"**What to do.** {_one_line(advice.partition(chr(10) + chr(10) + 'Attributes:')[0])}\n")
    for module, found in messages.items():
        parts += [f"`{module}`\n", "\n".join(f"- {_code(message)}" for message in found) + "\n"]
    return "\n".join(parts)


def rule(kind: str, module: str = "ecemb/errors.py") -> Activity:
    """What a user does when a module raises a class."""
    return next(activity for name, path, activity in RULES if name in ("", kind) and module.startswith(path))


def anchor(title: str) -> str:
    """The name of a section in links."""
    return title.lower().replace(" ", "-")


def tree(path: Path) -> dict[str, Kind]:
    """The classes that a module defines, in its order, by name."""
    return {
        node.name: Kind(
            node.name, tuple(ast.unparse(base) for base in node.bases), ast.get_docstring(node) or ""
        )
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


def collect(name: str, module: ast.Module, kinds: dict[str, Kind], shared: dict[str, str]) -> None:
    """Adds the messages of a module to the classes that it raises."""
    functions = {node.name: node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
    source = Source(functions, shared)
    for function, call in _raised(module):
        kind = kinds.get(ast.unparse(call.func))
        if kind is None or not call.args:
            continue
        known = kind.messages.setdefault(name, [])
        for text in source.templates(call.args[0], function):
            if text.strip(_ELLIPSIS) and text not in known:
                known.append(text)
        if not known:
            del kind.messages[name]


def _raised(module: ast.Module) -> Iterator[Raised]:
    """Each call that makes an error to be raised or returned, with the function that it is in."""

    def within(node: ast.AST, function: ast.FunctionDef | None) -> Iterator[Raised]:
        for child in ast.iter_child_nodes(node):
            inside = child if isinstance(child, ast.FunctionDef) else function
            made = child.exc if isinstance(child, ast.Raise) else None
            made = child.value if isinstance(child, ast.Return) else made
            if (
                isinstance(made, ast.Call) and _last_name(made.func) == "follows"
            ):  # marks an error, and gives it
                made = made.args[0]
            if isinstance(made, ast.Call):
                yield inside, made
            yield from within(child, inside)

    yield from within(module, None)


@dataclass
class Source:
    """What the expressions of a module may name.

    Attributes:
        functions: the module's, by name.
        sentences: text that modules of the package share: constants, and properties that return a sentence.
    """

    functions: dict[str, ast.FunctionDef]
    sentences: dict[str, str]

    def templates(self, message: ast.expr | None, function: ast.FunctionDef | None) -> list[str]:
        """What an expression for a message may come to: text, with its values in braces.

        Args:
            message: the expression.
            function: where it stands, whose variables it may name.
        """
        if isinstance(message, ast.Constant) and isinstance(message.value, str):
            return [message.value]
        if isinstance(message, ast.JoinedStr):
            return ["".join(self._part(part) for part in message.values)]
        if isinstance(message, ast.IfExp):
            return [*self.templates(message.body, function), *self.templates(message.orelse, function)]
        if isinstance(message, ast.BinOp) and isinstance(message.op, ast.Add):
            left, right = self.templates(message.left, function), self.templates(message.right, function)
            return [one + other for one in left for other in right][:_MOST_SOURCES]
        found: list[str] = []
        if isinstance(message, ast.Call) and (called := self.functions.get(_last_name(message.func))):
            found = self.returned(called)
        elif isinstance(message, ast.Name) and function is not None:
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == message.id:
                    found += self.templates(node.value, None)
        return found[:_MOST_SOURCES] or [_ELLIPSIS]

    def returned(self, function: ast.FunctionDef) -> list[str]:
        """What a function may return, as `templates`; nothing where that is another call's result."""
        return [
            text
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and not isinstance(node.value, ast.Call)
            for text in self.templates(node.value, function)
        ]

    def _part(self, part: ast.expr) -> str:
        if isinstance(part, ast.Constant):
            return str(part.value)
        value = part.value if isinstance(part, ast.FormattedValue) else part
        name = ("." if isinstance(value, ast.Attribute) else "") + _last_name(value)
        return self.sentences.get(name) or "{" + _value_name(value) + "}"


def sentences(modules: Iterable[ast.Module]) -> dict[str, str]:
    """Text that messages of several modules end with, by name; that of a property begins with a dot."""
    found: dict[str, str] = {}
    for module in modules:
        for node in module.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.JoinedStr)):
                [text] = Source({}, found).templates(node.value, None)
                if text != _ELLIPSIS and (name := ast.unparse(node.targets[0])).isupper():
                    found[name] = text
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and "property" in map(ast.unparse, node.decorator_list):
                for text in Source({}, found).returned(node):
                    if len(text.split()) >= _SENTENCE_WORDS:
                        found[f".{node.name}"] = text
    return found


def _value_name(value: ast.expr) -> str:
    """A word for a value: the last name of an expression, if it has one."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Attribute):
        return "type" if value.attr == "__name__" else value.attr
    if isinstance(value, ast.Subscript):
        return _value_name(value.value)
    if isinstance(value, ast.BinOp):
        return _value_name(value.left)
    if isinstance(value, ast.Call) and value.args and _last_name(value.func) not in ("join", "len"):
        return _value_name(value.args[0])
    return _ELLIPSIS


def _last_name(expression: ast.expr) -> str:
    if isinstance(expression, ast.Name):
        return expression.id
    return expression.attr if isinstance(expression, ast.Attribute) else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _code(text: str) -> str:
    """A message as code, whatever quotes are in it."""
    text = _one_line(text)
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    main()
