"""The modules that the fork server imports before it forks, and the checks that they are fit for that.

A forked process has one thread, no context on a device, and reads its rank when it runs. So a module can't be
imported before the fork if its import leaves threads, child processes or an open device behind, or reads a
variable that differs between workers. An import can't be undone, so the caller starts again without it.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder

from .wire import is_of_a_worker

ALWAYS = (
    "torch",
    "torch.distributed",
    "torch.distributed.nn.functional",
    "torch._dynamo",  # every optimizer imports it at its construction
    "torch.profiler",
    "torch.utils.serialization.config",  # torch.load imports it at its first call
    "encodings.idna",  # imported for a connection to a host by name
    "ecemb",
)
_IMPORTED_LATE = {"torchrec": ("torch.distributed.optim",)}
"""Library -> modules that its functions import: not its import, and yet each worker's training."""
_DEVICE = re.compile(r"/dev/(nvidia(\d+|-uvm)|kfd|dri/)")
_INSTALLED = {"site-packages", "dist-packages"}


def names(script: str | None, wanted: Sequence[str], unwanted: Sequence[str]) -> list[str]:
    """The modules to import, in order: those of every training, the script's, and the requested ones.

    Args:
        script: path of the script, or None.
        wanted: further modules to import.
        unwanted: modules to leave out, with all below them.
    """
    found = [*ALWAYS, *(imported_by(script) if script is not None else ()), *wanted]
    for library, modules in _IMPORTED_LATE.items():
        if library in {name.partition(".")[0] for name in found}:
            found += modules
    without = tuple(f"{one}." for one in unwanted)
    return [name for name in dict.fromkeys(found) if not f"{name}.".startswith(without)]


def imported_by(script: str) -> list[str]:
    """The installed modules that a script imports whenever it runs: found by reading it, not by running it.

    A module that isn't installed may change between two starts, and is left to the script, like Python's own
    library.
    """
    try:
        with open(script, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return []  # the script's run will show the error
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found.append(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*"]
    folder = os.path.dirname(os.path.realpath(script))
    top_names = {name.partition(".")[0] for name in found}
    installed = {name for name in top_names if _is_installed(name, folder)}
    return [name for name in found if name.partition(".")[0] in installed and _found(name)]


def script_of(module: str, folder: str) -> str | None:
    """The file that `python -m module` would run in a folder; None if finding it takes an import."""
    path = [folder, *sys.path]
    found = _found(f"{module}.__main__", path) or _found(module, path)
    return None if found is None else found.origin


def load(name: str) -> None:
    """Imports a module; of ecemb all modules that workers use, with their machine code compiled.

    Raises:
        ImportError: the module is missing.
        Exception: any error of its import.
    """
    module = importlib.import_module(name)
    if name == "ecemb":
        for public in module.__all__:
            getattr(module, public)
        importlib.import_module("ecemb.kernels.contract").get_kernels("cpu")
        importlib.import_module("ecemb.net.mesh").loop()
        importlib.import_module("ecemb.net.watch").beat_loop()


def prepare(widths: Collection[tuple[int, ...]]) -> None:
    """Compiles the loops for records of these widths in a process that has ecemb imported; else does nothing.

    Args:
        widths: bytes of each column of a record; of several tables.
    """
    contract = sys.modules.get("ecemb.kernels.contract")
    if contract is None or "ecemb.kernels.cpu" not in sys.modules:
        return
    for one in widths:
        contract.get_kernels("cpu").prepare(one)
    gc.collect()  # what compiling has left is not for workers to collect
    gc.freeze()


def residue(children: int) -> str | None:
    """Describes a leftover of imports that a forked process can't inherit; None if there is none.

    Args:
        children: processes that this process had started before.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about the threads that this function looks for
        fork = os.fork()  # a linear algebra library ends its own threads before a fork
    if fork == 0:
        os._exit(0)
    os.waitpid(fork, 0)
    if (threads := len(os.listdir("/proc/self/task")) - 1) > 0:
        return f"starts {threads} {'thread' if threads == 1 else 'threads'} when it is imported"
    if started := child_count() - children:
        return f"starts {started} {'process' if started == 1 else 'processes'} when it is imported"
    if device := next(filter(_DEVICE.match, _open_files()), None):
        return f"opens {device} when it is imported, and forked processes could not use it"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "initializes CUDA when it is imported, and forked processes could not use it"
    return None


def child_count() -> int:
    """Processes that this process has started and not waited for."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return len(file.read().split())
    except OSError:
        return 0


class Watched(type(os.environ)):
    """The environment during imports: it records the variables read that differ by worker."""

    read: set[str] = set()  # noqa: RUF012 - one for the process, like the environment

    def __getitem__(self, key: str) -> str:
        if isinstance(key, str) and is_of_a_worker(key):  # pyright: ignore[reportUnnecessaryIsInstance]
            self.read.add(key)
        return super().__getitem__(key)


def watch_environment(on: bool) -> None:
    """Begins or ends the record of variables that are read."""
    os.environ.__class__ = Watched if on else Watched.__base__  # pyright: ignore[reportAttributeAccessIssue]


def shadowed(folder: str | None, before: frozenset[str]) -> str | None:
    """Finds a file in a script's folder that a plain start would import instead of a loaded module.

    Args:
        folder: the script's; None if the interpreter would not search it.
        before: modules that Python itself had loaded before it searched any folder.
    """
    if not folder:
        return None
    try:
        entries = os.listdir(folder)
    except OSError:
        return None
    for entry in entries:
        name, dot, _ = entry.partition(".")
        module = sys.modules.get(name)
        if module is None or name in before or (dot and not entry.endswith((".py", ".so", ".pyc"))):
            continue
        path = os.path.join(folder, entry)
        if not dot and not os.path.exists(os.path.join(path, "__init__.py")):
            continue
        loaded = getattr(module, "__file__", None)
        if loaded is None or os.path.realpath(loaded).startswith(os.path.realpath(path)):
            continue
        return path
    return None


def _is_installed(name: str, folder: str) -> bool:
    if _found(name, [folder]) is not None:
        return False  # a file of the script's own goes first
    found = _found(name)
    places = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
    return any(_INSTALLED & set(place.split(os.sep)) for place in places if place)


def _found(name: str, path: list[str] | None = None) -> ModuleSpec | None:
    """The spec of the module of a dotted name; None if the name is not a module's. Imports nothing."""
    found = None
    for part in name.split("."):
        found = PathFinder.find_spec(part, path)
        if found is None:
            break
        path = list(found.submodule_search_locations or ())
    return found


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
