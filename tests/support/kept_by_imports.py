"""The values that modules fix at their import and that belong to one process: a program that finds them.

    kept_by_imports.py FILE MODULE...

Two processes, one after the other, import what the fork server imports, and the given modules. The second one
forks a worker, which is set up as the server's are. Each process lists what can be reached from the names of
all modules: numbers, text, and the states of generators. A value that differs between the two imports belongs
to a process: its pid, a thread, a time, its environment, randomness. If the worker has the value of the
process that it was forked from, nothing has renewed it. The program prints their places and values.

Both processes are forked from a third, so that addresses and the seed of hashes are the same in them.
"""

from __future__ import annotations

import bisect
import gc
import json
import os
import random
import re
import sys
import traceback
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

PLAIN = (bool, int, float, complex, str, bytes)
OPAQUE = (types.ModuleType, types.CodeType, types.FrameType, types.TracebackType)
_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
_TEXTS = ("MASTER_ADDR", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


def worker_environment() -> dict[str, str]:
    """The variables that torchrun sets for a worker, with values of this process's own."""
    own = str(os.getpid())
    return {**dict.fromkeys(_NUMBERS, own), **{name: f"{name} of {own}" for name in _TEXTS}}


def values() -> dict[str, list[str]]:
    """Place -> values there, of all that can be reached from the names of this process's modules.

    Of several places of an object, one with the shortest name path counts. Members of a set have one place:
    their order is that of addresses. Addresses are left out: a forked process has the same memory.
    """
    found: defaultdict[str, list[str]] = defaultdict(list)
    seen: dict[int, Any] = {}
    is_address = addresses()
    modules = {name: module for name, module in sys.modules.items() if name != "__main__"}
    waiting: deque[tuple[str, Any]] = deque((name, vars(module)) for name, module in sorted(modules.items()))
    while waiting:
        place, value = waiting.popleft()
        if issubclass(type(value), PLAIN):
            if type(value) is not int or not is_address(value):
                found[place].append(repr(value))
        elif not issubclass(type(value), OPAQUE) and id(value) not in seen:
            seen[id(value)] = value  # kept, so that no other object gets its address
            state = generator_state(value)
            if state is None:
                waiting.extend(parts(place, value))
            else:
                found[place].append(state)
    return {place: sorted(every) for place, every in found.items()}


def container(place: str) -> str:
    """The place of the object that holds the value."""
    return re.sub(r"( keys|\{\}|\[\]|/\d+|\.[^./\[{ ]+)$", "", place)


def by_container(found: Mapping[str, Iterable[str]], containers: set[str]) -> dict[str, set[str]]:
    """All values in each of these containers: their order in it may be that of addresses."""
    grouped: defaultdict[str, set[str]] = defaultdict(set)
    starts = tuple(containers)
    for place, every in found.items():
        if place.startswith(starts) and (name := container(place)) in containers:
            grouped[name].update(every)
    return grouped


def addresses() -> Callable[[int], bool]:
    """Whether a number is an address in this process's memory."""
    begins, ends = [], []
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.partition(" ")[0].partition("-")
        begins.append(int(begin, 16))
        ends.append(int(end, 16))
    return lambda number: begins[0] <= number < ends[bisect.bisect(begins, number) - 1]


def generator_state(value: Any) -> str | None:
    """The state of a generator of random numbers; None for any other object."""
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if issubclass(type(value), random.SystemRandom):
        return ""
    if issubclass(type(value), random.Random):
        return repr(value.getstate())
    if numpy is not None and issubclass(type(value), numpy.BitGenerator):
        return repr(value.state)
    if torch is not None and issubclass(type(value), torch.Generator):
        return repr(value.get_state().tolist())
    return None


def parts(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that an object refers to, with their places."""
    if issubclass(type(value), dict):
        for key, one in list(value.items()):
            if key != "__builtins__":
                yield f"{place}.{key}" if type(key) is str else f"{place}[]", one
            if type(key) is not str:
                yield f"{place} keys", key
        return
    with suppress(AttributeError):
        if type(attributes := object.__getattribute__(value, "__dict__")) is dict:
            yield place, attributes
    globals_ = value.__globals__ if type(value) is types.FunctionType else None
    ordered = not issubclass(type(value), (set, frozenset))
    for number, one in enumerate(gc.get_referents(value)):
        if one is not globals_:
            yield place if type(one) is dict else f"{place}/{number}" if ordered else f"{place}{{}}", one


def import_all(names: Sequence[str]) -> None:
    """Imports as the fork server does, in an environment of this process's own."""
    os.environ.update(worker_environment())
    from ecemb.launch import preload

    for name in preload.names(None, names, []):
        with suppress(ImportError):  # of a package that isn't installed
            preload.load(name)


def set_up(server: int) -> None:
    """Makes a process that was just forked a worker, as the fork server does."""
    from ecemb.launch.worker import become

    message = {
        "is_module": False,
        "target": "train.py",
        "arguments": [],
        "script_folder": None,
        "command_line": [sys.executable, "train.py"],
        "environment": {**os.environ, **worker_environment()},
        "unbuffered": False,
        "umask": 0o22,
        "processors": sorted(os.sched_getaffinity(0)),
        "ignored": [],
        "replaced": 0,
        "blocked": [],
        "descriptors": [0, 1, 2],
    }
    taken = [os.open(".", os.O_PATH), *map(os.dup, range(3))]
    become(message, taken, server, {}, sys.modules["torch"].initial_seed(), None)


def importing(names: Sequence[str], work: Callable[[], None]) -> None:
    """Imports modules in a forked process, calls a function in it, and waits for its end.

    Raises:
        SystemExit: it failed.
    """
    if (child := os.fork()) == 0:
        ends_well(lambda: (import_all(names), work()))
    wait(child)


def ends_well(work: Callable[[], object]) -> NoReturn:
    """Ends this process after a function's end, or its error."""
    try:
        work()
        sys.stdout.flush()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - no code of the caller may run in this process
        traceback.print_exc()
        os._exit(1)


def wait(child: int) -> None:
    if os.waitpid(child, 0)[1]:
        sys.exit(1)


def main(file: Path, names: Sequence[str]) -> None:
    """Prints the values that a worker has to renew, and doesn't.

    Args:
        file: for the values of one process.
        names: of modules.
    """
    warnings.simplefilter("ignore")  # about names that are deprecated: all are read
    gc.disable()  # each walk makes millions of objects that stay: collections took half of its time

    def writes() -> None:
        file.write_text(json.dumps(values()))

    def forks() -> None:
        before, others, server = values(), json.loads(file.read_text()), os.getpid()

        def compares() -> None:
            set_up(server)
            after = values()
            suspects = {
                place: own
                for place, own in before.items()
                if place in others and others[place] != own and after.get(place) == own
            }
            elsewhere = by_container(others, {container(place) for place in suspects})
            kept = {
                place: own
                for place, own in suspects.items()
                if not elsewhere[container(place)].issuperset(own)
            }
            json.dump({"values": len(before), "kept": kept}, sys.stdout)

        if (worker := os.fork()) == 0:
            ends_well(compares)
        wait(worker)

    for work in (writes, forks):
        importing(names, work)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
