"""The packages of ecemb: imports go down, without a cycle, and all other code uses public names."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lowest first. A module imports from its own package and from packages before it, also for types and inside
# functions; within a package there is no cycle. A module at the top counts as a package of its own.
STORY = """
errors requirements
kernels coding memory
state net session
nn engines
recovery step checkpoint start
guard
place
launch tools integrations
__init__ __main__
"""
LEVEL = {package: level for level, package in enumerate(STORY.split())}
KNOWS_DISTRIBUTED = LEVEL["state"]  # the lowest package that may import torch.distributed
PUBLIC_MODULES = {
    f"ecemb{end}"
    for end in ("", ".nn", ".errors", ".checkpoint", ".integrations.metrics", ".integrations.lightning")
}


def module_name(path: Path) -> str:
    """`ecemb/kernels/cpu.py` -> kernels.cpu, `ecemb/kernels/__init__.py` -> kernels."""
    parts = path.relative_to(ROOT / "ecemb").with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a module in `package` imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join(filter(None, [*(parents if node.level else ()), node.module]))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def target(name: str, modules: set[str]) -> str:
    """The module of ecemb that a dotted name is from: ecemb.coding.code.Code -> code."""
    parts = name.split(".")[1:]
    found = [n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in modules]
    return ".".join(parts[: found[0]]) if found else "__init__"


def package(name: str) -> str:
    """The package of a module: coding.code -> coding, guard -> guard."""
    return name.partition(".")[0]


def dependencies(
    name: str, source: str, modules: set[str], *, is_package: bool = False
) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that module `name` of ecemb imports, with relative imports resolved."""
    package = ".".join(["ecemb", *(name.split(".") if is_package else name.split(".")[:-1])])
    yield from imports_of(source, package)


@functools.cache
def imports_of(source: str, package: str) -> list[tuple[int, str]]:
    return list(imported(ast.parse(source), package))


def breaches(name: str, source: str, modules: set[str], *, is_package: bool = False) -> list[str]:
    """Where the source of module `name` of ecemb breaks the rules about imports between packages."""
    level = LEVEL[package(name)]
    found: list[str] = []
    for line, dotted in dependencies(name, source, modules, is_package=is_package):
        top = dotted.split(".")[0]
        if top in ("baselines", "bench", "tests", "examples"):
            found.append(f"{name}:{line} imports {dotted}, which stands on ecemb")
        elif f"{dotted}.".startswith("torch.distributed.") and level < KNOWS_DISTRIBUTED:
            found.append(f"{name}:{line} imports {dotted}, which its package must not know")
        elif top == "ecemb" and (other := package(target(dotted, modules))) != package(name):
            if LEVEL.get(other, 0) > level:
                found.append(f"{name}:{line} imports {dotted}, which is in a later package")
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle of imports, or none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def private_uses(source: str, public: set[str]) -> list[str]:
    """Where code outside of ecemb uses what is not one of its public names."""
    tree = ast.parse(source)
    found: list[str] = []
    for line, dotted in imported(tree, "baselines"):
        if dotted.split(".")[0] == "ecemb" and dotted not in PUBLIC_MODULES:
            base, _, name = dotted.rpartition(".")
            if base not in PUBLIC_MODULES or (base == "ecemb" and name not in public):
                found.append(f"line {line} imports {dotted}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "ecemb" and node.attr not in public:
                found.append(f"line {node.lineno} uses ecemb.{node.attr}")
    return found


def public_names() -> set[str]:
    """What `ecemb/__init__.py` lists in `__all__`."""
    for node in ast.parse((ROOT / "ecemb" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError("ecemb/__init__.py has no __all__")


SOURCES = {module_name(path): path for path in sorted((ROOT / "ecemb").rglob("*.py"))}
OUTSIDERS = sorted((ROOT / "baselines").rglob("*.py"))


def test_every_module_is_in_a_room() -> None:
    assert {package(name) for name in SOURCES} == LEVEL.keys()


def test_the_package_reads_as_a_story() -> None:
    assert len(LEVEL) <= 25


def is_package(name: str) -> bool:
    return SOURCES[name].name == "__init__.py" and name != "__init__"


def test_imports_go_down() -> None:
    found = [
        breach
        for name, path in SOURCES.items()
        for breach in breaches(name, path.read_text(), set(SOURCES), is_package=is_package(name))
    ]
    assert not found


def test_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for name, path in SOURCES.items():
        found = dependencies(name, path.read_text(), set(SOURCES), is_package=is_package(name))
        named = {target(dotted, set(SOURCES)) for _, dotted in found if dotted.split(".")[0] == "ecemb"}
        graph[name] = named - {name}
    assert not cycle(graph)


def test_other_libraries_are_those_that_pyproject_has() -> None:
    """Neither galois nor numba, which the tests compare with."""
    found: dict[str, set[str]] = {}
    for name, path in SOURCES.items():
        for _, dotted in dependencies(name, path.read_text(), set(SOURCES), is_package=is_package(name)):
            found.setdefault(dotted.split(".")[0], set()).add(package(name))
    for name in {"ecemb", *sys.stdlib_module_names}:
        found.pop(name, None)
    assert found.keys() - {"torch", "numpy", "llvmlite"} == {"rich", "prometheus_client"}
    assert found["rich"] | found["prometheus_client"] <= RIM


RIM = {"launch", "tools", "integrations", "__init__", "__main__"}


def test_the_core_imports_none_of_the_rim() -> None:
    found: set[tuple[str, str]] = set()
    for name, path in SOURCES.items():
        for _, dotted in dependencies(name, path.read_text(), set(SOURCES), is_package=is_package(name)):
            if dotted.split(".")[0] == "ecemb" and package(name) not in RIM:
                other = target(dotted, set(SOURCES))
                if package(other) in RIM or other == "checkpoint.follower":
                    found.add((name, other))
    assert {name for name, _ in found} <= {"checkpoint"}, found


def test_a_cycle_is_seen() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not cycle({"a": {"b", "c"}, "b": {"c"}})


def test_baselines_use_public_names_only() -> None:
    found = {path.name: private_uses(path.read_text(), public_names()) for path in OUTSIDERS}
    assert not any(found.values()), found


def test_the_public_face_is_narrow() -> None:
    names = public_names()
    assert len(names - {"__version__"}) <= 13


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("coding.code", "from ecemb.memory.header import Header"),
        ("coding.code", "from ..memory.header import Header"),
        ("coding.code", "import ecemb.memory.header"),
        ("coding.code", "from ecemb import Code"),
        ("coding.code", "def f():\n    from ..memory import arena"),
        ("coding.code", "if TYPE_CHECKING:\n    from ecemb.memory.arena import Arena"),
        ("kernels.cpu", "from ..coding.rows import Rows"),
        ("coding.rows", "import torch.distributed as dist"),
        ("coding.rows", "from torch import distributed"),
        ("coding.rows", "from torch.distributed import barrier"),
        ("guard", "import bench.methods"),
        ("guard", "from baselines import checkfreq"),
    ],
)
def test_the_walk_sees_every_form_of_import(name: str, source: str) -> None:
    assert len(breaches(name, source, set(SOURCES))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("coding.code", "from ecemb.errors import CodeError"),
        ("kernels.cpu", "from ecemb.kernels.contract import Kernels\nfrom . import llvm"),
        ("state.data", "from ..coding import rows\nimport torch.distributed"),
        ("coding.rows", "import torch\nfrom torch import Tensor, distributions"),
        ("__init__", "from . import errors, nn\nfrom .coding.code import Code"),
    ],
)
def test_the_walk_lets_pass_what_is_allowed(name: str, source: str) -> None:
    assert not breaches(name, source, set(SOURCES))


def test_private_names_are_seen() -> None:
    public = {"Code", "nn", "errors"}
    for source in (
        "from ecemb import memory",
        "from ecemb.coding.code import Code",
        "import ecemb.guard",
        "import ecemb\necemb.memory",
    ):
        assert len(private_uses(source, public)) == 1, source
    for source in (
        "import ecemb\necemb.Code",
        "import ecemb.nn",
        "from ecemb import Code, nn",
        "from ecemb.errors import EcembError",
    ):
        assert not private_uses(source, public), source
