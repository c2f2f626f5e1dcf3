"""Tables that stock torch.optim optimizers update through sparse gradients.

Owns the link between an `nn.Embedding(Bag)`-like module, its optimizer's per-row state, and the arena's
memory: moves the tensors, learns the rows that a step is about to change from the optimizer's pre-hook, and
refuses or detects undeclared changes of rows.

Owns the checks that modules and optimizers change only the rows that a sparse gradient names, and the hooks
that wait for rows before a module's lookups and before its `state_dict()`. These hooks are registered only
while rows are on their way to a replacement rank (docs/protocol.md, 9.1). They don't see a read of the weight
that bypasses the module, such as `functional.embedding(ids, table.weight)`.

`StepHooks` run directly before and directly after an optimizer's update, without another hook of the
optimizer in between: rows that other hooks write are not part of the update, and have to be declared. An
optimizer calls its hooks in the order of registration; a global pre-hook, which torch calls before them,
moves `StepHooks` next to the update in each step. The global hook is registered once and never removed: torch
iterates over global hooks while they run, and a garbage collection meanwhile must not change them.

Must not know: journals, parity, other ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..coding.rows import Column, Table, TableLayout
from ..errors import (
    LayoutMismatch,
    UndeclaredWrite,
    UnsupportedOptimizer,
    UnsupportedTable,
    UsageError,
)
from ..nn import ShardedEmbedding, ShardedEmbeddingBag, ShardedTable, facts_of, ranks_of
from ..state.optimizers import drop_options, options
from .contract import Engine, EngineTable, Hooks, Ids, Move, Tied, Unit
from .device_image import is_off_arena
from .internals import After, Before

Optimizer = torch.optim.Optimizer

_MUST_BE_ZERO = ("momentum", "weight_decay")


class SparseTable(EngineTable, Unit):
    """One protected table of this rank: a module's weight and its optimizer's per-row state.

    Args:
        name: the table's key.
        module: the module with the table's weight, [rows, dim], on the CPU, a CUDA device, or the meta device
            (`check_module`).
        optimizer: the optimizer of the weight; None if it has none.

    Raises:
        UnsupportedOptimizer: the optimizer would change rows undeclared.
    """

    def __init__(self, name: str, module: nn.Module, optimizer: Optimizer | None) -> None:
        Unit.__init__(self, f"table {name!r}", "its optimizer's step", f"{name!r}, rows")
        self.module = module
        self.weight: nn.Parameter = module.weight  # pyright: ignore[reportAttributeAccessIssue,reportAssignmentType]
        self.optimizer = optimizer
        self.states: tuple[str, ...] = () if optimizer is None else states_of(name, optimizer)
        self.kept = ("weight", *self.states)
        self._like = [self.weight, *(self._form(name, state) for state in self.states)]
        columns = tuple(_column(*one) for one in zip(self.kept, self._like, strict=True))
        layout = TableLayout(name, len(self.weight), columns)
        EngineTable.__init__(self, layout, is_off_arena=is_off_arena(self.weight))
        self.check_options()

    def _form(self, table: str, name: str) -> torch.Tensor:
        """A tensor with the type and shape of a part of the optimizer's per-row state.

        Raises:
            UnsupportedOptimizer: the optimizer has no such state of this table.
        """
        if type(self.optimizer) in _KNOWN:
            return self.weight
        found, device = self._state().get(name), self.weight.device.type
        if isinstance(found, torch.Tensor) and found.shape[:1] == self.weight.shape[:1]:
            if found.device.type == ("cpu" if device == "meta" else device):
                return found
        raise UnsupportedOptimizer(
            f"{type(self.optimizer).__name__}.{ROW_STATE} is {self.states}, and the optimizer holds "
            f"no tensor {name!r} with {len(self.weight)} rows on the device of table {table!r} before the "
            f"first step: create it before ecemb.protect(), or leave the name out"
        )

    @property
    def sees_all_changes(self) -> bool:
        """See `EngineTable.sees_all_changes`: the optimizer reports changes."""
        return self.optimizer is not None or not self.weight.requires_grad

    def whole(self, world_size: int) -> tuple[int, int] | None:
        """See `EngineTable.whole`."""
        if isinstance(self.module, ShardedTable) and self.module.world_size == world_size:
            return self.module.rows.start, self.module.num_embeddings
        return None

    def alike(self) -> tuple[list[int] | None, dict[str, Any]] | None:
        """See `EngineTable.alike`."""
        if not isinstance(self.module, ShardedTable):
            return None
        optimizer = None if self.optimizer is None else type(self.optimizer).__name__
        return ranks_of(self.module), {**facts_of(self.module), "its optimizer": optimizer}

    def tensors(self, table: int) -> dict[str, torch.Tensor]:
        """See `Unit.tensors`."""
        state = self._state()
        return {
            "weight": self.weight.detach(),
            **{name: state[name] for name in self.states if name in state},
        }

    def place(self, stored: Sequence[Table], *, fresh: bool) -> list[Move]:
        """See `Unit.place`. A fresh table on the meta device is initialised by its reset_parameters()."""
        if self.is_off_arena:
            self._begin_off_arena()
            self.keep()
            return []
        columns = stored[0].columns
        views = [
            torch.from_numpy(column.reshape(-1)).view(like.dtype).reshape(like.shape)
            for column, like in zip(columns, self._like, strict=True)
        ]
        was_meta = self.weight.is_meta
        with torch.no_grad():
            if was_meta:
                placed = nn.Parameter(views[0], requires_grad=self.weight.requires_grad)
                torch.utils.swap_tensors(self.weight, placed)
                if fresh:
                    self.module.reset_parameters()  # pyright: ignore[reportCallIssue]
            else:
                if fresh:
                    views[0].copy_(self.weight)
                self.weight.data = views[0]
            if self.optimizer is not None:
                self._place_states(self.optimizer, views[1:], fresh, was_meta)
        self.keep(columns)
        return []

    def _begin_off_arena(self) -> None:
        """Creates the optimizer's per-row state on the table's device, as its first step would do later.

        Raises:
            UnsupportedTable: a tensor of the table is not contiguous.
        """
        for name, tensor in zip(self.kept, self.trained(), strict=True):
            if tensor is not None and not tensor.is_contiguous():
                raise UnsupportedTable(
                    f"{name} of table {self.name!r} on {tensor.device} is not contiguous: make it so before "
                    f"ecemb.protect()"
                )
        if self.optimizer is not None:
            state: dict[str, Any] = self.optimizer.state[self.weight]
            self._begin_state(state)
            for name in self.states:
                state.setdefault(name, torch.zeros_like(self.weight, requires_grad=False))

    def _begin_state(self, state: dict[str, Any]) -> None:
        if not state and isinstance(self.optimizer, torch.optim.SparseAdam):
            state["step"] = 0  # as the optimizer's first step would set it without state

    def _place_states(
        self, optimizer: Optimizer, views: Sequence[torch.Tensor], fresh: bool, was_meta: bool
    ) -> None:
        state: dict[str, Any] = optimizer.state[self.weight]
        self._begin_state(state)
        for name, view in zip(self.states, views, strict=True):
            held = state.get(name)
            if fresh and held is not None and not held.is_meta:
                view.copy_(held)
            elif fresh and was_meta:
                view.fill_(self._option("initial_accumulator_value") if name == "sum" else 0)
            state[name] = view

    def _option(self, name: str, default: float = 0) -> float:
        for group in self.optimizer.param_groups if self.optimizer else ():
            if any(parameter is self.weight for parameter in group["params"]):
                return group.get(name, default)
        return default

    def check_options(self) -> None:
        """Raises UnsupportedOptimizer if an option makes the optimizer change untouched rows."""
        for option in _MUST_BE_ZERO if type(self.optimizer) in _KNOWN else ():
            if value := self._option(option):
                raise UnsupportedOptimizer(
                    f"{type(self.optimizer).__name__} with {option}={value} changes rows of table "
                    f"{self.name!r} that a step doesn't touch, so their parity would be wrong: set "
                    f"{option}=0 for this table (dense parameters may keep it in a separate group)"
                )

    def touched(self) -> torch.Tensor | None:
        """The rows that the optimizer's step is about to change, with repeats; None without a gradient.

        Returns:
            int64 [m] on the gradient's device.

        Raises:
            UndeclaredWrite: the gradient is dense.
        """
        grad = self.weight.grad
        if grad is None:
            return None
        if not grad.is_sparse:
            raise UndeclaredWrite(
                f"table {self.name!r} has a dense gradient, with which the optimizer would change every "
                f"row: look it up through an embedding with sparse=True only"
            )
        return grad._indices()[0]

    def check_storage(self) -> None:
        """Raises UndeclaredWrite if the trained tensors are not in the arena any more."""
        if self.module.weight is not self.weight:
            raise UndeclaredWrite(
                f"the parameter of table {self.name!r} was replaced (by load_state_dict(assign=True)?): the "
                f"tensors in training are not the protected ones. Do it before ecemb.protect()"
            )
        super().check_storage()

    def scalars(self) -> dict[str, Any]:
        """The optimizer's state of this table that is not per row, e.g. Adagrad's step."""
        return {key: value for key, value in self._state().items() if key not in self.states}

    def set_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restores the result of `scalars`; scalars that are not in it are removed."""
        if self.optimizer is not None:
            state = self.optimizer.state[self.weight]
            for key in self.scalars().keys() - scalars.keys():
                del state[key]
            state.update(scalars)

    def trained(self) -> list[Any]:
        """See `Unit.trained`."""
        state = self._state()
        return [self.weight, *(state.get(name) for name in self.states)]

    def _state(self) -> dict[str, Any]:
        return {} if self.optimizer is None else self.optimizer.state.get(self.weight, {})


class SparseTables(Engine[SparseTable]):
    """The engine of tables that torch.optim updates.

    Args:
        modules: the tables' modules by key.
        optimizers: all optimizers of the training.

    Raises:
        UnsupportedTable: a module's lookups or gradients would change rows undeclared.
        UnsupportedOptimizer: see `SparseTable`.
    """

    name = "sparse"

    def __init__(self, modules: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> None:
        owners = owners_of(optimizers)
        found: list[SparseTable] = []
        seen: dict[int, str] = {}
        for name, module in modules.items():
            check_module(name, module)
            weight: nn.Parameter = module.weight  # pyright: ignore[reportAttributeAccessIssue,reportAssignmentType]
            if (other := seen.setdefault(id(weight), name)) != name:
                raise UnsupportedTable(
                    f"tables {other!r} and {name!r} share one weight: name it once in tables="
                )
            found.append(SparseTable(name, module, owners.get(id(weight))))
        super().__init__(found, [[table] for table in found], [table.weight for table in found])
        self.stepped = {table.name: table.weight for table in found}
        weights = {id(weight) for weight in self.parameters}
        self._alone = [  # the optimizers without dense parameters: other ranks may not have them
            optimizer
            for optimizer in optimizers
            if all(id(p) in weights for group in optimizer.param_groups for p in group["params"])
        ]
        self._groups = [len(optimizer.param_groups) for optimizer in self._alone]

    def watch(self, hooks: Hooks) -> None:
        """Registers with optimizers and modules; from here on undeclared changes raise."""
        super().watch(hooks)
        for optimizer in {id(t.optimizer): t.optimizer for t in self._units if t.optimizer}.values():
            self._handles += [
                StepHooks(optimizer, self._before_step, self._after_step),
                optimizer.register_load_state_dict_pre_hook(self._before_optimizer_load),
            ]
        for table in self._units:
            before = Tied(functools.partial(self._before_load, table))
            self._handles.append(table.module.register_load_state_dict_pre_hook(before))
            if hooks.ensure is not None:
                self._handles += announce(table.module, table.base, hooks, lookups=table.announces_lookups)

    def scalars(self) -> dict[str, Any]:
        """The result of `SparseTable.scalars` by the table's name."""
        return {table.name: table.scalars() for table in self._units}

    def state(self) -> dict[str, Any]:
        """The state that differs by rank and is not per row: scalars and options.

        Raises:
            LayoutMismatch: a restart could not restore it.
        """
        for optimizer, before in zip(self._alone, self._groups, strict=True):
            if (now := len(optimizer.param_groups)) != before:
                raise LayoutMismatch(
                    f"the number of parameter groups of {type(optimizer).__name__} has changed under "
                    f"protection ({before} before, {now} now): after a failure the script would start "
                    f"without the change; make it before ecemb.protect()"
                )
        return {"scalars": self.scalars(), "options": self.options()}

    def set_state(self, state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        """See `Engine.set_state`. Options are restored only if `state` has exactly this engine's tables."""
        kept = state["scalars"]
        then = {one.name: one.name if one.name in kept else renamed.get(one.name) for one in self._units}
        if set(then.values()) == set(kept):
            self.set_options(state["options"])
        for table in self._units:
            if (own := kept.get(then[table.name])) is not None:
                table.set_scalars(own)

    def options(self) -> list[list[dict[str, Any]]]:
        """The options of optimizers that update tables alone, by optimizer and group."""
        return [[options(group) for group in optimizer.param_groups] for optimizer in self._alone]

    def set_options(self, kept: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Restores the result of `options`.

        Raises:
            LayoutMismatch: the number of optimizers, or of groups in one of them, is another.
        """
        then, now = [len(groups) for groups in kept], [len(one.param_groups) for one in self._alone]
        if then != now:
            raise LayoutMismatch(
                f"the numbers of parameter groups of the optimizers that update tables alone are {now}, and "
                f"were {then} when the job was started: run the script that started it, or use another job="
            )
        for optimizer, groups in zip(self._alone, kept, strict=True):
            for group, one in zip(optimizer.param_groups, groups, strict=True):
                drop_options(optimizer, group, one)
                group.update(one)

    def _of(self, optimizer: Optimizer) -> list[SparseTable]:
        return [table for table in self._units if table.optimizer is optimizer]

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._hooks.is_open():
            raise UsageError(
                f"{type(optimizer).__name__}.step() changes protected tables outside of a step: put it "
                f"inside `with guard.step():`"
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        loss = None
        if closure is not None:  # its gradients determine the rows: the step gets only the closure's result
            with torch.enable_grad():
                loss = closure()
        for table in self._of(optimizer):
            table.check_options()
            if table not in self._touched:
                self._check(table)
            rows = table.touched()
            if rows is not None and is_off_arena(table.weight):  # a LiveTable's weight may have moved
                self._hooks.mark(table.base, rows)
            elif rows is not None and len(rows):
                self._hooks.capture(table.base, np.ascontiguousarray(rows.numpy()))
        return None if closure is None else (args[:1], {"closure": lambda: loss})

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        for table in self._of(optimizer):
            table.mark_clean()

    def _before_optimizer_load(self, optimizer: Optimizer, state_dict: Any) -> None:
        for table in self._of(optimizer):
            if self._hooks.protects:
                raise UndeclaredWrite(
                    f"{type(optimizer).__name__}.load_state_dict() would replace the protected state of "
                    f"table {table.name!r}: load it before ecemb.protect()"
                )
            self.touch_all(table.base)

    def _before_load(self, table: SparseTable, *_: Any) -> None:
        if not self._hooks.is_open():
            raise UndeclaredWrite(
                f"load_state_dict() would overwrite protected table {table.name!r} outside of a "
                f"step: load before ecemb.protect(), or inside `with guard.step():`"
            )
        self.touch_all(table.base)


_KNOWN: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: (),
    torch.optim.Adagrad: ("sum",),
    torch.optim.SparseAdam: ("exp_avg", "exp_avg_sq"),
}
ROW_STATE = "ecemb_row_state"
"""Attribute by which another class of optimizers says that it changes only the rows in a sparse gradient: the
names of what it keeps of each row in `optimizer.state[weight]`, tensors [rows, ...] on the table's device (of
a table on "meta": on the CPU) that exist when `ecemb.protect` is called, and are written in place."""


class RowsOf(nn.Module):
    """A parameter as a table, of whatever module it is.

    Args:
        weight: the parameter.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def _column(name: str, like: torch.Tensor) -> Column:
    values = math.prod(like.shape[1:])
    return Column(name, str(like.dtype).removeprefix("torch."), values * like.element_size())


def check_module(name: str, module: nn.Module) -> None:
    """Raises UnsupportedTable unless only a sparse gradient can change the module's rows."""
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag, ShardedTable, RowsOf)):
        raise UnsupportedTable(
            f"table {name!r} is a {type(module).__name__}, of which ecemb doesn't know that a lookup changes "
            f"only the rows in a sparse gradient: tables= takes nn.Embedding and nn.EmbeddingBag, with "
            f"sparse=True, and the tables of ecemb.nn; name the embedding that holds the rows, not the "
            f"module around it. Of another class that keeps to this, name the parameter: "
            f"{{'user': module.weight}}. Modules that all ranks hold whole are protected without being named"
        )
    weight: object = getattr(module, "weight", None)
    if type(weight) is not nn.Parameter or weight.dim() != 2:
        raise UnsupportedTable(
            f"the weight of table {name!r} is a {type(weight).__name__}, and ecemb protects a plain, "
            f"two-dimensional nn.Parameter: take a parametrization, fully_shard() or a quantization of the "
            f"table away before ecemb.protect()"
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not module.sparse:
        raise UnsupportedTable(
            f"table {name!r} has sparse=False, so its optimizer changes every row in every step: "
            f"build it with sparse=True"
        )
    if getattr(module, "max_norm", None) is not None:
        raise UnsupportedTable(
            f"table {name!r} has max_norm={module.max_norm}, which rewrites rows during the lookup, "
            f"undeclared: build it without max_norm"
        )
    if weight.device.type not in ("cpu", "cuda", "meta"):
        raise UnsupportedTable(
            f"table {name!r} is on {weight.device}: ecemb protects tables on CPUs and CUDA devices; move "
            f"it there before ecemb.protect()"
        )


def check_memory(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Raises UnsupportedTable if a table's weight shares memory with another parameter or a buffer.

    Args:
        model: the whole model.
        modules: the tables' modules by key.
    """
    weights = {id(module.weight) for module in modules.values()}
    named = [(f"table {name!r}", module.weight) for name, module in modules.items()]
    others = itertools.chain(model.named_parameters(), model.named_buffers())
    named += [(repr(name), tensor) for name, tensor in others if id(tensor) not in weights]
    furthest = {True: (0, "", 0), False: (0, "", 0)}  # is it a table -> the highest end so far, name, id
    for start, end, name, tensor in sorted(_spans(named)):
        is_table = tensor in weights
        for kind in (True, False) if is_table else (True,):
            until, other, which = furthest[kind]
            if start < until and which != tensor:
                raise UnsupportedTable(
                    f"{other} and {name} share memory without being one parameter: ecemb.protect() moves "
                    f"tables, so only one of them would be trained. Give both modules the same "
                    f"nn.Parameter, and name one of them in tables=, or clone() before"
                )
        furthest[is_table] = max(furthest[is_table], (end, name, tensor))


def _spans(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[int, int, str, int]]:
    """Begin and end address, name and id of each plain tensor that has elements in memory."""
    for name, tensor in named:
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.numel() and not tensor.is_meta:
            sides = zip(tensor.shape, tensor.stride(), strict=True)
            items = 1 + sum((size - 1) * stride for size, stride in sides)
            start = tensor.data_ptr()
            yield start, start + items * tensor.element_size(), name, id(tensor)


def states_of(name: str, optimizer: Optimizer) -> tuple[str, ...]:
    """The names of an optimizer's per-row state, in the order of a record's columns.

    Raises:
        UnsupportedOptimizer: the optimizer may change rows that a sparse gradient doesn't name.
    """
    kind = type(optimizer)
    if kind in _KNOWN:
        return _KNOWN[kind]
    given: object = vars(kind).get(ROW_STATE)  # a subclass has to say so itself
    if isinstance(given, (list, tuple)) and all(isinstance(one, str) for one in given):  # pyright: ignore[reportUnknownVariableType]
        return tuple(given)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if given is not None:
        raise UnsupportedOptimizer(
            f"{kind.__name__}.{ROW_STATE} is a tuple of names, of what it keeps of each row; it is {given!r}"
        )
    known = ", ".join(one.__name__ for one in _KNOWN)
    raise UnsupportedOptimizer(
        f"table {name!r} is updated by {kind.__name__}, and ecemb doesn't know that it changes only the rows "
        f"in a sparse gradient: use one of {known}; or, if it does, say so: "
        f"{kind.__name__}.{ROW_STATE} = (...), the names of what it keeps of each row in "
        f"optimizer.state[weight]"
    )


def owners_of(optimizers: Iterable[Optimizer]) -> dict[int, Optimizer]:
    """The optimizer of each parameter, by the parameter's id.

    Raises:
        UnsupportedOptimizer: a parameter has two.
    """
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if owners.setdefault(id(parameter), optimizer) is not optimizer:
                    raise UnsupportedOptimizer(
                        "two of the optimizers= update the same parameter, of shape "
                        f"{tuple(parameter.shape)}: give each parameter to one optimizer"
                    )
    return owners


class StepHooks:
    """The last pre-hook and the first post-hook of an optimizer's step.

    Args:
        optimizer: the optimizer.
        before: as for `Optimizer.register_step_pre_hook`.
        after: as for `Optimizer.register_step_post_hook`.
    """

    def __init__(self, optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., None]) -> None:
        self._optimizer = optimizer
        self._before = optimizer.register_step_pre_hook(before)
        self._after = optimizer.register_step_post_hook(after)
        _alive.add(self)
        _move_in_each_step()

    def remove(self) -> None:
        """Removes both hooks. May be called twice."""
        _alive.discard(self)
        self._before.remove()
        self._after.remove()

    def move(self, optimizer: Optimizer) -> None:
        """Moves the hooks next to the update, if they belong to this optimizer.

        Raises:
            UsageError: the hooks were removed from the optimizer.
        """
        if optimizer is not self._optimizer:
            return
        before, after = (vars(optimizer)[f"_optimizer_step_{when}_hooks"] for when in ("pre", "post"))
        if self._before.id not in before or self._after.id not in after:
            raise UsageError(
                f"the hooks of {type(optimizer).__name__} were removed, and among them those that tell which "
                f"rows of protected tables a step changes: keep them, or remove yours by their handles"
            )
        before.move_to_end(self._before.id)
        after.move_to_end(self._after.id, last=False)


_alive: weakref.WeakSet[StepHooks] = weakref.WeakSet()


@functools.cache
def _move_in_each_step() -> None:
    """Registers the global pre-hook that moves `StepHooks` in each step. Further calls do nothing."""
    register_optimizer_step_pre_hook(_move)


def _move(optimizer: Optimizer, *_: Any) -> None:
    for one in list(_alive):
        one.move(optimizer)


_PLAIN = tuple(
    kind.forward for kind in (nn.Embedding, nn.EmbeddingBag, ShardedEmbedding, ShardedEmbeddingBag)
)
_ID_TYPES = (torch.int32, torch.int64)


def announced(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[str]:
    """Keys of the tables whose module sees every lookup, with rows that follow from the lookup's arguments.

    A table is left out if its module overrides `forward()`, or if another module of the model has its weight.

    Args:
        model: the whole model.
        modules: the tables' modules by key.
    """
    holders: dict[int, set[int]] = {}
    for module in (*model.modules(), *modules.values()):
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(id(module))
    return {
        name
        for name, module in modules.items()
        if type(module).forward in _PLAIN
        and "forward" not in vars(module)
        and holders[id(module.weight)] == {id(module)}
    }


def announce(module: nn.Module, index: int, hooks: Hooks, *, lookups: bool) -> list[Any]:
    """Registers hooks on a table's module that wait for rows before the module reads them.

    Args:
        module: the table's module.
        index: the number by which `hooks` know the table.
        hooks: their `wait_for_table` is called before each `state_dict()`, `wait_for` before lookups.
        lookups: whether lookups wait.

    Returns:
        Handles, whose `remove()` removes the hooks. A copy of the module has none of the hooks.
    """
    whole = Tied(lambda *_: hooks.wait_for_table(index))
    handles: list[Any] = [module.register_state_dict_pre_hook(whole)]
    if not lookups:
        return handles
    rows = len(module.weight)  # pyright: ignore[reportArgumentType]

    def wait(ids: object) -> None:
        if hooks.ensure is not None and len(found := _rows(ids, rows)):
            hooks.wait_for(index, found)

    eager: Any = torch.compiler.disable(wait)

    def before_lookup(input: object = None, *_: Any, **__: Any) -> None:
        eager(input)

    def after_route(route: Any, *_: Any) -> None:  # local_ids: the rows of this shard that ranks ask for
        eager(route.local_ids)

    if isinstance(module, ShardedTable):
        handles.append(After(module, "_route", after_route))
    else:
        handles.append(Before(module, "forward", before_lookup))
    return handles


def _rows(ids: object, rows: int) -> Ids:
    """The rows that a lookup reads, int64 [m], in any order; without ids that torch is going to refuse."""
    if not isinstance(ids, torch.Tensor) or ids.dtype not in _ID_TYPES:
        return np.empty(0, np.int64)
    found = ids.detach().reshape(-1).cpu().numpy().astype(np.int64)
    return found[(found >= 0) & (found < rows)]
