"""Every citation resolves: paths, headings of documents, links with anchors, and dotted names of modules."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ecemb", "bench", "baselines")
SOURCES = sorted(
    path
    for folder in (*PACKAGES, "tests", "examples", "docs/scripts")
    for path in (ROOT / folder).rglob("*.py")
    if path != Path(__file__).resolve()
)
RULES = ("SECURITY.md", "GOVERNANCE.md", "CODE_OF_CONDUCT.md")
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *RULES)]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
ON_THE_SITE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site, as documents in docs/ link to them -> the file."""

PATH = (
    r"(?<![\w./-])(?:ecemb|bench|baselines|tests|examples|docs)/(?:[\w-]+/)*[\w-]+\.(?:py|md|json|svg|txt)\b"
)
NUMBERS = r"\d+(?:\.\d+)*(?:(?:, | and | to )\d+(?:\.\d+)*)*"
DOTTED = re.compile(rf"(?<![\w./\"'])(?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+")
MEMBER = re.compile(rf"`([A-Za-z_][\w.]*)`[^`|]{{0,30}} (?:in|of) `({PATH})`")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^()\s]+)\)")
NUMBERED = re.compile(r"(?:(\d+(?:\.\d+)*)\.? )?(.*)")
LONG_STRING_OR_COMMENT = re.compile(
    r'"""(.*?)"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#([^\n]*)', flags=re.DOTALL
)
NOT_NAMES = {"ecemb.capture", "ecemb.exchange", "ecemb.json"}
"""Spans that torch.profiler shows, and a file: they look like names of modules."""


def prose(path: Path) -> str:
    """A document's text without its code blocks; a module's comments and long strings (docstrings)."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(match[1] or match[2] or "" for match in LONG_STRING_OR_COMMENT.finditer(text))


@functools.cache
def headings(document: Path) -> tuple[dict[str, str], set[str]]:
    """The headings of a document: title -> number (or nothing); and their anchors."""
    titles = re.findall(r"^#+ (.+?)\s*$", prose(document), flags=re.MULTILINE)
    anchors = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
    matches = [NUMBERED.fullmatch(title) for title in titles]
    return {match[2]: match[1] or "" for match in matches if match}, anchors


def unresolved_paths(text: str) -> list[str]:
    """Paths in the repository that lead nowhere, and headings that their document lacks."""
    found: list[str] = []
    text = re.sub(r"\s*\n[ \t#]*", " ", text)
    for match in re.finditer(rf'({PATH})(?:, (?:({NUMBERS})|"([^"]+)"))?', text):
        path, numbers, title = match.groups()
        if not (ROOT / path).exists():
            found.append(path)
        elif path.endswith(".md") and (numbers or title):
            there = headings(ROOT / path)[0]
            missing = set(re.findall(r"\d+(?:\.\d+)*", numbers or "")) - set(there.values())
            found += [f"{path}, {one}" for one in sorted(missing)]
            found += [f'{path}, "{title}"'] if title and title not in there else []
    return found


def unresolved_links(document: Path, text: str) -> list[str]:
    """Links of a document whose file or anchor doesn't exist."""
    found: list[str] = []
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (document.parent / path).resolve() if path else document
        if not target.exists() and document.is_relative_to(ROOT / "docs"):
            target = ROOT / ON_THE_SITE.get(path, path)
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in headings(target)[1]):
            found.append(link)
    return found


@functools.cache
def members(module: Path) -> dict[str, set[str]]:
    """What a module defines, imports or lists at its top -> what each of its classes defines."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            inner = {n for statement in node.body for n in names(statement)}
            attributes = {
                a.attr
                for a in ast.walk(node)
                if isinstance(a, ast.Attribute) and isinstance(a.value, ast.Name) and a.value.id == "self"
            }
            found[node.name] = inner | attributes
        elif isinstance(node, ast.stmt):
            found |= {name: set() for name in names(node) if name not in found}
    return found


def names(statement: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a package, a module, or something that one of them has."""
    first, *rest = dotted.split(".")
    place = ROOT / first
    while rest and ((place / rest[0]).is_dir() or (place / f"{rest[0]}.py").exists()):
        place /= rest.pop(0)
    if not rest:
        return True
    module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not module.exists() or rest[0] not in (has := members(module)):
        return False
    return len(rest) == 1 or not has[rest[0]] or rest[1] in has[rest[0]]


def unresolved_names(text: str) -> list[str]:
    """Dotted names of ecemb, bench and baselines that no module has."""
    return sorted(name for name in set(DOTTED.findall(text)) - NOT_NAMES if not resolves(name))


def unresolved_members(text: str) -> list[str]:
    """Names that a text says are in a module, and aren't."""
    found = MEMBER.findall(text)
    return [
        name for name, path in found if not resolves(f"{path.removesuffix('.py').replace('/', '.')}.{name}")
    ]


def unexplained(text: str) -> list[str]:
    """Citations of what the repository doesn't hold: numbers of decisions, documents without their folder."""
    text = re.sub(r"#\s*noqa\S*(?: [A-Z]+\d+,?)*", "", text)
    return re.findall(r"\bD\d{1,2}\b|(?<![\w./\[(-])protocol\.md|\bsections? \d+(?:\.\d+)*", text)


def test_citations_resolve() -> None:
    found: dict[str, list[str]] = {}
    for path in (*SOURCES, *DOCUMENTS):
        text = prose(path)
        found[str(path.relative_to(ROOT))] = [
            *unresolved_paths(text),
            *unresolved_members(text),
            *unexplained(text),
            *(unresolved_names(text) if path.name != "CHANGELOG.md" else []),  # names that a version had
            *(unresolved_links(path, text) if path.suffix == ".md" else []),
        ]
    assert not {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize("name", ["protocol.md", "design.md"])
def test_chapters_are_numbered_without_a_gap(name: str) -> None:
    numbers = [n for n in headings(ROOT / "docs" / name)[0].values() if n]
    chapters = [int(n) for n in numbers if "." not in n]
    assert chapters == list(range(1, len(chapters) + 1))
    for chapter in chapters:
        inner = [n for n in numbers if n.startswith(f"{chapter}.")]
        assert inner == [f"{chapter}.{i}" for i in range(1, len(inner) + 1)]


def test_the_protocol_has_every_package_and_every_module() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", text.partition("| package |")[2], flags=re.MULTILINE)
    named = [(package, what) for packages, what in rows for package in re.findall(r"`(\w+)`", packages)]
    walk = next((ROOT / "tests").rglob("test_packages.py")).read_text(encoding="utf-8")
    story = re.search(r'STORY = """(.*?)"""', walk, flags=re.DOTALL)
    assert story and [package for package, _ in named][: len(story[1].split())] == story[1].split()
    for package, what in named[: len(story[1].split())]:
        modules = {path.stem for path in (ROOT / "ecemb" / package).glob("*.py")} - {"__init__"}
        assert modules <= set(re.findall(r"`(\w+)`", what)), package


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("as docs/protocol.md, 1.1 says", []),
        ('as docs/protocol.md, "The packages" says', []),
        ("docs/protocol.md, 1.1 and 1.4", []),
        ("docs/protocol.md,\n    1.1", []),
        ("docs/protocol.md, 77", ["docs/protocol.md, 77"]),
        ("docs/protocol.md, 1.1 and 1.99", ["docs/protocol.md, 1.99"]),
        ('docs/protocol.md, "The cellar"', ['docs/protocol.md, "The cellar"']),
        ("docs/no-such-page.md", ["docs/no-such-page.md"]),
        ("see ecemb/nowhere.py", ["ecemb/nowhere.py"]),
        ("https://pytorch.org/docs/stable/notes.md", []),
    ],
)
def test_paths_and_headings(text: str, found: list[str]) -> None:
    assert unresolved_paths(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`ecemb.protect` and `ecemb.Code`", []),
        ("`ecemb.coding.rows.arrange`", []),
        ("`ecemb.coding.code.Code`, ecemb.nn.ShardedEmbeddingBag", []),
        ("`ecemb.guard.Guard.no_such_thing`", ["ecemb.guard.Guard.no_such_thing"]),
        ("`ecemb.cellar` and bench.no_such_question", ["bench.no_such_question", "ecemb.cellar"]),
    ],
)
def test_dotted_names(text: str, found: list[str]) -> None:
    assert unresolved_names(text) == found


def test_members_of_a_module() -> None:
    assert not unresolved_members(
        "`Code` in `ecemb/coding/code.py`; `Code.r`, as it is in `ecemb/coding/code.py`"
    )
    assert unresolved_members("`Codex` in `ecemb/coding/code.py`") == ["Codex"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](docs/protocol.md#1-a-step) [b](docs/protocol.md)", []),
        ("[a](https://example.org/#x) [b](LICENSE)", []),
        ("[a](docs/protocol.md#99-a-cellar)", ["docs/protocol.md#99-a-cellar"]),
        ("[a](docs/cellar.md)", ["docs/cellar.md"]),
    ],
)
def test_links(text: str, found: list[str]) -> None:
    assert unresolved_links(ROOT / "README.md", text) == found


def test_a_bare_number_is_no_citation() -> None:
    assert unexplained("rows (D2), as protocol.md, section 3 says") == ["D2", "protocol.md", "section 3"]
    assert not unexplained("# noqa: D103\ndocs/protocol.md, 3, and [it](protocol.md); 2D and D100")
