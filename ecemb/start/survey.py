"""The state that `protect` would protect, and the script's state that it would not: `ecemb check`.

Owns the survey of a training where it calls `protect`: tables, replicated state, rank state, objects of the
script in none of these, memory, and tolerated losses. Only reads; nothing is written on any rank.

Must not know: arenas, journals, how a survey is printed.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import logging
import os
import random
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ..coding.placement import Placement
from ..coding.rows import WORD_BYTES, TableLayout, arrange
from ..engines.discover import Tables
from ..errors import ConfigurationError
from ..memory import capacity
from ..session import CHECKED, Session
from ..state.data import Batches
from ..state.metric_states import is_metric, states_of
from ..state.rank_state import objects_of, owned_generators
from .create import Start
from .request import Request, Training

logger: logging.Logger = logging.getLogger("ecemb")

_DEEP = 6  # attributes and items to follow from an object that the script names
_MOST_NAMED = 6  # objects in a log line
_MOST_ITEMS = 256  # a container with more items is data, and is not searched
_LIBRARIES = ("ecemb", "torchrec", "fbgemm_gpu", "pytorch_lightning", "lightning", "torch.distributed")
_ONCE = (
    *(type(iter(one)) for one in ((), [], range(0), {}.items())),
    *(zip, map, filter, enumerate, itertools.chain, itertools.cycle, itertools.islice),
)
"""Iterators of one pass over data."""
_LEAVES = (type, torch.Tensor, ModuleType, FunctionType, MethodType)  # objects that are not searched
_PARTS = (
    "tables",
    "parity",
    "dense",
    "dense",
    "rank_state",
)  # parts of a rank's memory; dense state is in two slots
_NOT_OF_THE_SCRIPT = (os.path.dirname(os.path.dirname(__file__)), sysconfig.get_path("stdlib"), "<")
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Surveyed(BaseException):
    """Ends a script that is only checked, where it calls `protect`.

    Attributes:
        survey: the survey, the same on all ranks.
    """

    def __init__(self, survey: Survey) -> None:
        super().__init__("the script is only checked")
        self.survey = survey


@dataclass(frozen=True)
class Unknown:
    """An object of the script with state that is not recovered after a failure.

    Attributes:
        name: expression by which the script reaches the object.
        kind: the object's class.
        lost: its state after a restart, and what to do, as text.
    """

    name: str
    kind: str
    lost: str


@dataclass(frozen=True)
class Survey:
    """The state that a start of the training would protect.

    Attributes:
        job: the job's name.
        hosts: rank -> host.
        code: (n, k).
        tables: key -> [rows of each rank that has the table], and text with its columns.
        replicated: name of each dense parameter and buffer -> text with its shape and dtype.
        optimizers: text with the class of each optimizer of dense parameters, and their number.
        generators: libraries whose global random generators are recovered.
        state: classes, and names if they have some, of the `state=` objects of rank 0.
        metrics: name of each metric in `state=` or the model -> its class, and names of its states.
        unknown: objects whose state is not recovered.
        bytes: per rank, bytes of `tables`, `parity`, `dense` (its slices, in one of two slots) and
            `rank_state`.
        survives: text with the losses that are survived.
    """

    job: str
    hosts: tuple[str, ...]
    code: tuple[int, int]
    tables: dict[str, tuple[list[int], str]]
    replicated: dict[str, str]
    optimizers: list[str]
    generators: list[str]
    state: list[str]
    metrics: dict[str, tuple[str, list[str]]]
    unknown: list[Unknown]
    bytes: list[dict[str, int]]
    survives: str


def survey(start: Start) -> Survey:
    """The survey of the training, the same on all ranks. All ranks."""
    session, request, world, training = start.session, start.request, start.world, start.training
    tables, replicated = training.tables, training.replicated
    kept, dense = replicated.kept
    *layouts, own = world.layouts
    mine = {
        "tables": [layout.to_json() for layout in layouts],
        "bytes": {
            "tables": arrange(layouts)[1],
            "parity": world.parity_bytes,
            "dense": world.dense_bytes(replicated),
            "rank_state": own.words * WORD_BYTES,
        },
        "unknown": [asdict(one) for one in unknown(request, training, is_thorough=True)],
    }
    texts = start.transport.gather(json.dumps(mine).encode(), "comparing surveys")
    answers = [json.loads(text) for text in texts]
    if session.check is not None and session.check.host is None:
        here = [one for one, host in enumerate(session.hosts) if host == session.directory.host]
        needed = sum(answers[rank]["bytes"][part] for rank in here for part in _PARTS)
        start.transport.together("asking for space", lambda: _check_space(session, needed))
    rows: dict[str, tuple[list[int], str]] = {}
    for one in (TableLayout.from_json(fields) for rank in answers for fields in rank["tables"]):
        rows.setdefault(one.name, ([], ", ".join(f"{c.name} {c.dtype}" for c in one.columns)))[0].append(
            one.rows
        )
    missed: dict[str, Unknown] = {}
    for one in (Unknown(**fields) for rank in answers for fields in rank["unknown"]):
        missed.setdefault(one.name, one)
    return Survey(
        job=session.job.removesuffix(CHECKED),
        hosts=session.hosts,
        code=(request.code.n, request.code.k),
        tables=rows,
        replicated={name: _described(tensor) for name, tensor in kept.items()},
        optimizers=[f"{type(one).__name__} of {_count(one, tables)}" for one in dense],
        generators=["torch", "numpy", "python", *(["cuda"] if torch.cuda.is_initialized() else [])],
        state=[
            f"{key} ({type(item).__name__})" if isinstance(key, str) else type(item).__name__
            for key, item in objects_of(request.state).items()
        ],
        metrics={
            name: (type(metric).__name__, states_of(metric))
            for name, metric in training.rank_state.metrics.items()
        },
        unknown=list(missed.values()),
        bytes=[rank["bytes"] for rank in answers],
        survives=survives(world.placement, session.hosts),
    )


def _check_space(session: Session, needed_bytes: int) -> None:
    with session.directory.opened() as fd:
        capacity.check(needed_bytes, fd, session.directory.path)


def survives(placement: Placement | None, hosts: Sequence[str]) -> str:
    """Text with the losses that are survived with a placement on these hosts."""
    crashes = "all processes may die at any moment while the hosts stay up"
    if placement is None:
        return f"{crashes}; one rank has no parity, and its memory may not be lost"
    r = placement.r
    ranks = f"the memory of any {r} ranks" if r > 1 else "the memory of any one rank"
    if len(set(hosts)) == len(hosts) or placement.spread(hosts):
        return (
            f"{crashes}; any {r} hosts may be lost at once"
            if r > 1
            else f"{crashes}; any one host may be lost"
        )
    if fragile := placement.fragile(hosts):
        return f"{crashes}; {ranks} may be lost, but not host {fragile[0]} with all its ranks"
    return f"{crashes}; {ranks} may be lost at once, or any one host, but not any {r} hosts"


class Forgotten:
    """Names the script's objects that no recovery restores, each once.

    Args:
        start: the start of this process.
    """

    def __init__(self, start: Start) -> None:
        self._request, self._training = start.request, start.training
        self._level = logging.WARNING if start.session.rank == 0 else logging.DEBUG
        self._named: set[str] = set()
        self._numbers = _numbers(start.request)

    def name(self, *, knows_position: bool = True, counts_steps: bool = True) -> None:
        """Logs the objects that are not named yet, and numbers of optimizers that have changed.

        Args:
            knows_position: whether the script has asked for the number of a step, or for positions in data.
            counts_steps: whether its loop runs the steps that are left: then it may draw its data.

        Raises:
            ConfigurationError: there are some, and `protect` was called with strict=True.
        """
        found = [one for one in unknown(self._request, self._training) if one.name not in self._named]
        for name, number in _numbers(self._request).items():
            if number != self._numbers.get(name) and name not in self._named:
                lost = "a restart begins with the number that the script sets: derive it from guard.next_step"
                found.append(Unknown(name, type(number).__name__, lost))
        if not (knows_position or objects_of(self._request.state)):
            found += _lost_positions(counts_steps=counts_steps)
        if not found:
            return
        listed = [f"{one.name} ({one.kind}): {one.lost}" for one in found[:_MOST_NAMED]]
        if len(found) > _MOST_NAMED:
            listed.append(f"and {len(found) - _MOST_NAMED} more, which ecemb check lists")
        text = "; ".join(listed)
        if self._request.strict:
            raise ConfigurationError(f"protect(strict=True): no recovery restores {text}")
        self._named.update(one.name for one in found)
        logger.log(
            self._level,
            "no recovery restores %s. What has no effect on the training may stay as it is; "
            "protect(strict=True) refuses to start with any",
            text,
        )


def _lost_positions(*, counts_steps: bool) -> list[Unknown]:
    """What of the script begins again at its first batch: iterators, or its loop."""
    lost = (
        "after a failure it begins again at its first batch, with the weights of a later step: choose "
        "batches by step.number, in a loop over guard.steps(), or take them from guard.batches(loader)"
    )
    if not counts_steps:
        how = "neither guard.next_step nor a step's number is read"
        return [Unknown("the position in the data", how, lost)]
    return [
        Unknown(name, type(one).__name__, lost)
        for name, one in reachable(inspect.currentframe())
        if isinstance(one, _ONCE)
        or (isinstance(one, Iterator) and type(one).__module__ == DataLoader.__module__)  # pyright: ignore[reportUnknownArgumentType]
        or (isinstance(one, GeneratorType) and is_of_the_script(one.gi_code.co_filename))
    ]


def _numbers(request: Request) -> dict[str, int | float]:
    """Numbers in attributes of the script's own classes of optimizers, such as a wrapper's counter."""
    named = [(f"optimizers[{i}]", one) for i, one in enumerate(request.optimizers)]
    return {
        f"{path}.{name}": value
        for path, one in _walk(named)
        if isinstance(one, torch.optim.Optimizer) and not _is_of(type(one).__module__, ("torch", *_LIBRARIES))
        for name, value in vars(one).items()
        if type(value) in (int, float)
    }


def unknown(request: Request, training: Training, *, is_thorough: bool = False) -> list[Unknown]:
    """Objects that the script can reach, and whose state is not recovered.

    Args:
        request: the user's arguments.
        training: the state that is recovered.
        is_thorough: whether to look for optimizers to which no name leads as well, which takes half a second.
    """
    tables, (kept, dense) = training.tables, training.replicated.kept
    given = list(objects_of(request.state).values())
    held = {id(one): one for _, one in _walk(("", item) for item in (*given, *request.optimizers, *dense))}
    held.update((id(module), module) for module in request.model.modules())
    parameters = {id(one) for one in (*tables.parameters, *kept.values())}
    parameters.update(id(one) for module in request.model.modules() for one in buffers_of(module).values())
    for optimizer in (*request.optimizers, *dense):
        parameters.update(id(one) for group in optimizer.param_groups for one in group["params"])
    for item in given:
        if isinstance(item, nn.Module):
            held.update((id(module), module) for module in item.modules())
    for position in training.rank_state.positions:
        if isinstance(position, Batches):
            parts = position.source.parts
            held.update((id(one), one) for one in (*parts, *owned_generators(parts)))
    states = {id(one.state) for one in held.values() if isinstance(one, torch.optim.Optimizer)}
    held[id(torch.default_generator)] = torch.default_generator
    reached = reachable(inspect.currentframe())
    if is_thorough:
        seen = {id(one) for _, one in reached}
        gc.collect()
        for one in gc.get_objects():
            if issubclass(type(one), torch.optim.Optimizer) and id(one) not in seen:
                reached.append(("(no name of the script leads to it)", one))
    found: list[Unknown] = []
    for name, one in reached:
        if id(one) not in held and (said := _judged(one, name, held, parameters, states)) is not None:
            found.append(Unknown(name, type(one).__name__, said))
            if isinstance(one, nn.Module):  # its submodules are not reported again
                held.update((id(module), module) for module in one.modules())
    found += [
        Unknown(
            name,
            type(metric).__name__,
            "a metric that lists all samples begins empty: use its binned form (thresholds=), or give it in "
            "state= and reset it often",
        )
        for name, metric in training.rank_state.growing.items()
    ]
    return [*found, *_loose_tensors(request.model, tables, parameters)]


def reachable(frame: FrameType | None) -> list[tuple[str, object]]:
    """The script's objects, by the expressions by which it reaches them, the shortest first.

    Args:
        frame: a function that the script calls.
    """
    return list(_walk(_named(frame)))


def _judged(
    one: object, name: str, held: Collection[int], parameters: set[int], states: set[int]
) -> str | None:
    """`Unknown.lost` of an object that is not protected; None if it has no state to lose.

    Args:
        one: the object.
        name: expression by which the script reaches the object.
        held: ids of objects that are recovered, or reported already.
        parameters: ids of tensors that are recovered.
        states: ids of the states of optimizers that are recovered.
    """
    if isinstance(one, torch.optim.Optimizer):
        if id(one.state) in states or _of_a_library(one):
            return None
        return "its state and options begin again: name it in optimizers="
    if isinstance(one, nn.Module):
        return _judged_module(one, name, held, parameters)
    if isinstance(one, _GENERATORS):
        return (
            "it begins again at its seed: draw from the global generators, give an object that keeps its "
            "state in state=, or, if it is a loader's, give that to guard.batches()"
        )
    owners = [kind for kind in type(one).__mro__ if "load_state_dict" in vars(kind)]
    if owners and hasattr(type(one), "state_dict") and not _is_of(owners[0].__module__, _LIBRARIES):
        if isinstance(one, torch.utils.data.DataLoader) or hasattr(type(one), "__iter__"):
            return "its position begins again: give it to guard.batches() after ecemb.protect()"
        return "it begins as the script makes it: give it in state="
    return None


def _judged_module(one: nn.Module, name: str, held: Collection[int], parameters: set[int]) -> str | None:
    if any(id(tensor) not in parameters and not tensor.is_meta for tensor in one.parameters()):
        return "its parameters begin as the script builds them: make it part of model="
    apart = [module for module in one.modules() if id(module) not in held]
    cure = f"state={{{name.rpartition('.')[2]!r}: {name}}}"
    if is_metric(one) or any(map(is_metric, apart)):
        return f"a metric begins empty, as its state_dict() is empty by default: give it in {cure}"
    if any(id(tensor) not in parameters for module in apart for tensor in buffers_of(module).values()):
        return f"its buffers begin again, as the script builds them: give it in {cure}"
    return None


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own buffers, by name.

    None of libraries for tables; none of torch's losses, whose buffers are weights that the script passes.
    """
    if _is_of(type(module).__module__, (*_LIBRARIES, "torch.nn.modules.loss")):
        return {}
    return {name: tensor for name, tensor in vars(module)["_buffers"].items() if tensor is not None}


def _loose_tensors(model: nn.Module, tables: Tables, parameters: set[int]) -> Iterator[Unknown]:
    """Tensors that modules keep as plain attributes."""
    left_out = {id(one) for module in tables.left_out for one in module.modules()}
    for path, module in model.named_modules():
        if id(module) in left_out or _of_a_library(module) or is_metric(module):
            continue
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and id(value) not in parameters:
                yield Unknown(
                    f"model.{path}.{name}" if path else f"model.{name}",
                    "Tensor",
                    "it is neither a parameter nor a buffer, and begins as the script makes it: "
                    "register_buffer()",
                )


def _walk(named: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """(name, object) of the given objects and of objects in them, breadth first, each object once."""
    seen: set[int] = set()
    queue = [(name, value, _DEEP) for name, value in named]
    for path, one, left in queue:  # the queue grows, and keeps objects alive, so that ids stay unique
        if id(one) in seen or isinstance(one, _LEAVES):
            continue
        seen.add(id(one))
        yield path, one
        if left:
            queue += [(f"{path}{step}", item, left - 1) for step, item in _inside(one)]


def _inside(one: Any) -> Iterator[tuple[str, object]]:
    """(suffix of the name, object) of the items and attributes of an object."""
    if isinstance(one, dict):
        if len(one) <= _MOST_ITEMS:
            yield from ((f"[{_key(key)}]", item) for key, item in list(one.items()))
    elif isinstance(one, (list, tuple, set, frozenset)):
        if len(one) <= _MOST_ITEMS:
            yield from ((f"[{i}]", item) for i, item in enumerate(list(one)))
    elif isinstance(one, nn.Module):
        yield from ((f".{name}", child) for name, child in one.named_children())
        if not _of_a_library(one):
            yield from ((f".{key}", item) for key, item in vars(one).items() if not key.startswith("_"))
    elif isinstance(one, torch.utils.data.DataLoader):  # its own generator seeds its workers alone
        parts = [(key, item) for key, item in vars(one).items() if key != "generator" and key[0] != "_"]
        yield from ((f".{key}", item) for key, item in parts)
    elif hasattr(one, "__dict__") and not _of_a_library(one):
        yield from ((f".{key}", item) for key, item in list(vars(one).items()))


def _key(key: object) -> str:
    """A key of a dictionary as text: a tensor, as in an optimizer's state, by its class."""
    return type(key).__name__ if isinstance(key, torch.Tensor) else repr(key)


def _of_a_library(one: object) -> bool:
    """Whether an object's class is a library's, so that its own attributes are not the script's state."""
    module = str(type(one).__module__)
    return _is_of(module, _LIBRARIES) or (isinstance(one, nn.Module) and _is_of(module, ("torch",)))


def _is_of(module: str, packages: Iterable[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in packages)


def is_of_the_script(path: str) -> bool:
    """Whether a source file is the script's own: not Python's, ecemb's or another installed package's."""
    return not path.startswith(_NOT_OF_THE_SCRIPT) and "site-packages" not in path


def _named(frame: FrameType | None) -> Iterator[tuple[str, object]]:
    """(name, value) of the local and global variables of the script's functions on the call stack."""
    while frame is not None:
        if is_of_the_script(frame.f_code.co_filename):
            for scope in (frame.f_locals, frame.f_globals):
                yield from ((name, value) for name, value in list(scope.items()) if not name.startswith("__"))
        frame = frame.f_back


def _described(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _count(optimizer: torch.optim.Optimizer, tables: Tables) -> str:
    own = {id(parameter) for parameter in tables.parameters}
    count = sum(id(one) not in own for group in optimizer.param_groups for one in group["params"])
    return f"{count} dense parameter{'' if count == 1 else 's'}"
