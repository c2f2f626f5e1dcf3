"""The floors of the package: imports go strictly down, and everybody else uses public names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. A module imports from the lines above its own only, also for types and inside
# functions; a module that is on no line fails the test.
FLOORS = """
errors threads progress error_file whereabouts words between
kernels.checks kernels.rowset kernels.emit kernels.team kernels.triton_loops
code placement kernels header lock mapping folder space
launch launch.wire launch.processes launch.identity launch.command
launch.preload launch.worker launch.servers
launch.server launch.stub
kernels.products directory odds beats judgement
kernels.loops planner
kernels.reference kernels.cpu
kernels.cuda
rows arena delta packing generators members optimizers look wholeness fit
outline slots
journal parity transport replicated rankstate loaders buckets plan roster links checkpoint
memory meeting watch dcp window announcement replicas
stripes rollcall ending
rebuild
transaction recovery rendezvous scrub durable store
adapters adapters.engine adapters.image adapters.nn adapters.places batches saver step
adapters.supported history
adapters.sparse adapters.fbgemm
adapters.torchrec
adapters.tables
adapters.live agreement leftovers
survey
opening
guard nn
metrics lightning top check
__init__
__main__
"""
LEVEL = {name: level for level, line in enumerate(FLOORS.split("\n")) for name in line.split()}
KNOWS_DISTRIBUTED = LEVEL["journal"]  # the lowest floor that may import torch.distributed
LONGEST_LINES = 450
PUBLIC_MODULES = {f"ecemb{end}" for end in ("", ".nn", ".errors", ".checkpoint", ".metrics", ".lightning")}


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
    """The module of ecemb that a dotted name is from: ecemb.code.Code -> code."""
    parts = name.split(".")[1:]
    found = [n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in modules]
    return ".".join(parts[: found[0]]) if found else "__init__"


def breaches(name: str, source: str, modules: set[str], *, is_package: bool = False) -> list[str]:
    """Where the source of module `name` of ecemb breaks the rules about imports."""
    package = ".".join(["ecemb", *(name.split(".") if is_package else name.split(".")[:-1])])
    found: list[str] = []
    for line, dotted in imported(ast.parse(source), package):
        top = dotted.split(".")[0]
        if top in ("baselines", "bench", "tests", "examples"):
            found.append(f"{name}:{line} imports {dotted}, which stands on ecemb")
        elif f"{dotted}.".startswith("torch.distributed.") and LEVEL[name] < KNOWS_DISTRIBUTED:
            found.append(f"{name}:{line} imports {dotted}, of which its floor knows nothing")
        elif top == "ecemb" and LEVEL.get(target(dotted, modules), 0) >= LEVEL[name]:
            found.append(f"{name}:{line} imports {dotted}, which is not on a lower floor")
    return found


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


def test_every_module_is_on_a_floor() -> None:
    assert not SOURCES.keys() - LEVEL.keys()


@pytest.mark.parametrize("name", sorted(SOURCES.keys() & LEVEL.keys()))
def test_imports_go_strictly_down(name: str) -> None:
    path = SOURCES[name]
    is_package = path.name == "__init__.py" and name != "__init__"
    assert not breaches(name, path.read_text(), set(SOURCES), is_package=is_package)


@pytest.mark.parametrize("name", SOURCES)
def test_a_module_says_what_it_owns_and_is_short(name: str) -> None:
    source = SOURCES[name].read_text()
    assert ast.get_docstring(ast.parse(source)), f"{name} has no docstring"
    assert source.count("\n") <= LONGEST_LINES


@pytest.mark.parametrize("path", OUTSIDERS, ids=lambda path: path.stem)
def test_baselines_use_public_names_only(path: Path) -> None:
    assert not private_uses(path.read_text(), public_names())


def test_the_public_face_is_narrow() -> None:
    names = public_names()
    assert len(names - {"__version__"}) <= 12


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("code", "from ecemb.placement import Placement"),
        ("code", "from .placement import Placement"),
        ("code", "import ecemb.placement"),
        ("code", "from ecemb import Code"),
        ("code", "def f():\n    from . import arena"),
        ("code", "if TYPE_CHECKING:\n    from ecemb.arena import Arena"),
        ("kernels.cpu", "from .reference import Reference"),
        ("kernels.cpu", "from ..rows import Rows"),
        ("rows", "import torch.distributed as dist"),
        ("rows", "from torch import distributed"),
        ("rows", "from torch.distributed import barrier"),
        ("guard", "import bench.methods"),
        ("guard", "from baselines import checkfreq"),
    ],
)
def test_the_walk_sees_every_form_of_import(name: str, source: str) -> None:
    assert len(breaches(name, source, set(LEVEL))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("code", "from ecemb.errors import CodeError"),
        ("kernels.cpu", "from ecemb.kernels import Kernels\nfrom . import Words"),
        ("journal", "from . import rows\nimport torch.distributed"),
        ("rows", "import torch\nfrom torch import Tensor, distributions"),
        ("__init__", "from . import errors, nn\nfrom .code import Code"),
    ],
)
def test_the_walk_lets_pass_what_is_allowed(name: str, source: str) -> None:
    assert not breaches(name, source, set(LEVEL))


def test_private_names_are_seen() -> None:
    public = {"Code", "nn", "errors"}
    for source in (
        "from ecemb import arena",
        "from ecemb.code import Code",
        "import ecemb.guard",
        "import ecemb\necemb.arena",
    ):
        assert len(private_uses(source, public)) == 1, source
    for source in (
        "import ecemb\necemb.Code",
        "import ecemb.nn",
        "from ecemb import Code, nn",
        "from ecemb.errors import EcembError",
    ):
        assert not private_uses(source, public), source
