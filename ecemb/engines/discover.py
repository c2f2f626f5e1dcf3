"""All protected tables of this rank, of all engines; and their public view, `ecemb.tables`.

Owns the order of the tables, which is that of the row space: engine by engine. The rest is the engines' work.

`LiveTable` is a thin layer over them: live tensors, and reports of rows about to change. Listeners get the
rows that a guard would capture, from the same hooks.

Must not know: guards, arenas.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ..coding.rows import Table, joined_to
from ..errors import ConfigurationError, UndeclaredWrite, UsageError
from ..nn import ALIKE, ShardedTable, differing
from . import torchrec
from .contract import Engine, EngineTable, Hooks, Ids
from .device_image import Image, Images
from .internals import Before
from .sparse import RowsOf, SparseTables, announced, check_memory

Optimizer = torch.optim.Optimizer
Listener = Callable[[int, Ids], None]
"""Called with a table's index and rows of it that are about to change, int64 [m], m > 0, repeats allowed."""

_LISTENING = Hooks(lambda *_: None, is_open=lambda: True, on_undeclared=lambda: None, protects=False)
_found: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Tables]] = weakref.WeakKeyDictionary()


def optimizers_of(given: Any) -> list[Optimizer]:
    """The optimizers in an argument: one optimizer, several, or a mapping's values.

    Raises:
        ConfigurationError: an item is no optimizer.
    """
    several = listed(given)
    for one in several:
        if not isinstance(one, Optimizer):
            raise ConfigurationError(
                f"optimizers= takes torch.optim optimizers, e.g. [torch.optim.SGD(...)]; one is a "
                f"{type(one).__name__}"
            )
    return several


def modules_of(given: Any) -> dict[str, nn.Module]:
    """The tables sharded by hand in an argument, by keys.

    Raises:
        ConfigurationError: they have no keys, or keys that are not strings, or an empty one.
    """
    if given is not None and not isinstance(given, (Mapping, nn.ModuleDict)):
        raise ConfigurationError(
            f"tables= takes a mapping of tables by keys of your choice, e.g. {{'user': table}}; it is a "
            f"{type(given).__name__}"
        )
    found: dict[Any, nn.Module] = {
        key: RowsOf(one) if isinstance(one, nn.Parameter) else one
        for key, one in (given or {}).items()  # pyright: ignore[reportUnknownVariableType]
    }
    if others := [key for key in found if not isinstance(key, str)]:
        raise ConfigurationError(
            f"tables= takes a mapping of tables by keys of your choice, which are strings; {others[0]!r} is "
            f"a {type(others[0]).__name__}"
        )
    if "" in found:
        raise ConfigurationError(
            "tables= takes a mapping of tables by keys of your choice, by which errors and checkpoints name "
            "them; '' is empty: give this table a name"
        )
    return found


def listed(given: Any) -> list[Any]:
    """The items of an argument: None, one object, several objects, or a mapping."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.values())  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    return list(given) if isinstance(given, (list, tuple)) else [given]  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]


def find(
    model: nn.Module, given: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]
) -> tuple[Tables, list[Optimizer]]:
    """Finds all tables of a model.

    Args:
        model: the whole model.
        given: further tables, sharded by hand.
        optimizers: all optimizers of the training.

    Returns:
        The tables, and the optimizers that hold state, taken apart where an optimizer combines others.

    Raises:
        ConfigurationError: a table or its optimizer can't be protected.
    """
    modules: dict[str, nn.Module] = {
        name or "model": module for name, module in model.named_modules() if isinstance(module, ShardedTable)
    }
    if overlap := sorted(set(modules) & set(given)):
        raise ConfigurationError(f"tables= repeats keys that the model's own tables have: {overlap}")
    known = {id(module) for module in given.values()}
    modules = {name: m for name, m in modules.items() if id(m) not in known} | dict(given)
    leaves = torchrec.leaves(model, optimizers)
    sparse = SparseTables(modules, leaves)
    seen = announced(model, modules)
    for table in sparse.tables:
        # Rows that are rebuilt in the background reach a table's image only, not its tensors on a device.
        table.announces_lookups = table.name in seen and not table.is_off_arena
    engines: list[Engine[Any]] = [sparse]
    check_memory(model, modules)
    if (fused := torchrec.find(model)) is not None:
        engines.append(fused)
    if (maps := torchrec.find_maps(model)) is not None:
        engines.append(maps)
    found = Tables(engines, [*optimizers, *torchrec.fused_optimizers(model)])
    _found[model] = weakref.ref(found)
    return found, leaves


def protected(model: nn.Module) -> Tables | None:
    """The tables found in a model that a guard watches, if any."""
    found = _found.get(model, lambda: None)()
    return found if found is not None and found.is_protected else None


class Tables:
    """The tables of all engines, numbered consecutively.

    Args:
        engines: in the order of the row space.
        optimizers: optimizers whose `state_dict()` reads tables.

    Attributes:
        are_touched: whether a row has changed or is about to, since a caller set this to False.

    Raises:
        ConfigurationError: two tables have one name.
    """

    def __init__(self, engines: Sequence[Engine[Any]], optimizers: Sequence[Optimizer] = ()) -> None:
        self._engines = list(engines)
        self._optimizers = list(optimizers)
        self.tables: list[EngineTable] = [table for engine in engines for table in engine.tables]
        self._of: list[tuple[Engine[Any], int]] = [
            (engine, i) for engine in engines for i in range(len(engine.tables))
        ]
        self._by_name = {table.name: index for index, table in enumerate(self.tables)}
        if len(self._by_name) < len(self.tables):
            names = [table.name for table in self.tables]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigurationError(
                f"tables need distinct names; {twice} stand for several: rename in tables="
            )
        self._hooks: Hooks | None = None
        self._of_engines: list[Hooks] = []  # each engine's, which take its own numbers of tables
        self._handles: list[Before] = []
        self._named = joined_to([table.layout for table in self.tables])
        self._listeners: list[Listener] = []
        self.images: Images = Images({})
        self.are_touched: bool = False

    @property
    def is_protected(self) -> bool:
        """Whether a guard watches, and not only listeners."""
        return self._hooks is not None

    @property
    def unannounced(self) -> list[int]:
        """Numbers of the tables whose lookups read rows without a call of `Hooks.ensure`."""
        return [index for index, table in enumerate(self.tables) if not table.announces_lookups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The tables' parameters in the model: not part of replicated state."""
        return [parameter for engine in self._engines for parameter in engine.parameters]

    @property
    def stepped(self) -> dict[str, nn.Parameter]:
        """The parameters that change in an optimizer's `step()`, by the tables' names."""
        return {name: one for engine in self._engines for name, one in engine.stepped.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of the tables with their optimizers' state per row."""
        layouts = (table.layout for table in self.tables)
        return sum(layout.rows * column.row_bytes for layout in layouts for column in layout.columns)

    @property
    def left_out(self) -> list[nn.Module]:
        """Modules whose buffers are not part of replicated state."""
        return [module for engine in self._engines for module in engine.left_out]

    @property
    def averaged(self) -> list[nn.parallel.DistributedDataParallel]:
        """See `Engine.averaged`."""
        return [module for engine in self._engines for module in engine.averaged]

    def alike(self) -> list[Any]:
        """The properties that must be the same on other ranks, by table, for `check_alike`; plain lists."""
        return [[table.name, *found] for table in self.tables if (found := table.alike()) is not None]

    def place(self, stored: Sequence[Table], *, fresh: bool) -> None:
        """Moves the tables into the arena; see `Engine.place`.

        Images are filled if `fresh`; else they hold the values that `put` will copy to the tables.
        """
        at = 0
        for engine in self._engines:
            engine.place(stored[at : at + len(engine.tables)], fresh=fresh)
            at += len(engine.tables)
        outside = [i for i, table in enumerate(self.tables) if table.is_off_arena]
        self.images = Images({i: Image(stored[i], list(self.tensors(i).values())) for i in outside})
        if fresh:
            for image in self.images.all().values():
                image.fill()

    def put(self) -> None:
        """Overwrites tables outside of the arena with their images, all rows, and marks them clean."""
        for image in self.images.all().values():
            image.put()
        self.mark_clean()

    def verify(self, rows: Sequence[tuple[int, range]]) -> None:
        """Raises UndeclaredWrite if rows of tables outside of the arena differ from their images.

        Args:
            rows: pairs of a table's number and rows of it.
        """
        for index, some in rows:
            image = self.images.all().get(index)
            if image is not None and len(wrong := image.differing(some)):
                name = self.tables[index].name
                raise UndeclaredWrite(
                    f"table {name!r} on {image.device} differs from its image in the arena in {len(wrong)} "
                    f"rows, first in row {wrong[0]}: a write outside of its optimizer's step has changed it, "
                    f"or its memory is defective. Parity fits the image: let the process end, and a "
                    f"restart takes the table from there. Declare writes with guard.touch({name!r}, rows)"
                )

    def take_back(self) -> None:
        """Copies an undone step's rows from the arena to tables outside of it, and marks all clean."""
        self.images.take_back()
        self.mark_clean()

    def put_back(self) -> None:
        """After an undo, restores tables outside of the arena from their images, and marks all tables clean.

        Copies the rows that may differ; see `Images.put_back`.

        Raises:
            Exception: a copy to a device failed; the rows of other devices were copied.
        """
        self.images.put_back()
        self.mark_clean()

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """See `Engine.tensors`."""
        engine, number = self._of[index]
        return engine.tensors(number)

    def watch(self, hooks: Hooks) -> None:
        """From here on, changes of rows are reported, and undeclared changes raise."""
        self._hooks = hooks
        self._engage(hooks)

    def unwatch(self) -> None:
        """Removes the guard's hooks; listeners keep theirs."""
        self._hooks = None
        self._engage(_LISTENING if self._listeners else None)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Reports rows that are about to change to a listener, with or without a guard.

        Returns:
            A function that ends the reports; may be called twice.
        """

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
                if not self._listeners and self._hooks is None:
                    self._engage(None)

        self._listeners.append(listener)
        if self._hooks is None and len(self._listeners) == 1:
            self._engage(_LISTENING)
        return end

    def _engage(self, hooks: Hooks | None) -> None:
        self._of_engines.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        at = 0
        for engine in self._engines:
            engine.unwatch()
            if hooks is not None:
                own = dataclasses.replace(
                    hooks, capture=partial(self._capture, at), mark=partial(self._mark_changed, at)
                )
                if hooks.ensure is not None:
                    own.ensure = lambda index, ids, base=at: hooks.wait_for(base + index, ids)
                    own.ensure_all = lambda index, base=at: self.wait_for_table(base + index)
                self._of_engines.append(own)
                engine.watch(own)
            at += len(engine.tables)
        for optimizer in self._optimizers if hooks is not None and hooks.ensure is not None else ():
            self._handles.append(Before(optimizer, "state_dict", self._wait_for_all))

    def wait_for_table(self, index: int) -> None:
        """Waits until all rows of a table are there."""
        if self._hooks is not None:
            self._hooks.wait_for_table(self._named[index])

    def _wait_for_all(self, *_: Any, **__: Any) -> None:
        for index in range(len(self.tables)):
            self.wait_for_table(index)

    def all_are_there(self) -> None:
        """Ends the calls of `Hooks.ensure` and `Hooks.ensure_all`. May be called in any thread."""
        for hooks in filter(None, [*self._of_engines, self._hooks]):
            hooks.ensure = hooks.ensure_all = None

    def _capture(self, base: int, index: int, ids: Ids) -> None:
        """Captures rows of table `index` of the engine whose first table is `base`, before they change."""
        if base + index in self.images:
            self._mark_changed(base, index, torch.from_numpy(ids))
            return
        self.are_touched = True
        if self._hooks is not None:
            self._hooks.capture(base + index, ids)
        self._tell(base + index, ids)

    def _mark_changed(self, base: int, index: int, rows: torch.Tensor) -> None:
        """Marks rows of such a table outside the arena, before they change."""
        self.are_touched = True
        if self._hooks is not None:
            self.images.mark(base + index, rows)
        if self._listeners:
            self._tell(base + index, rows.cpu().numpy())

    def _tell(self, index: int, ids: Ids) -> None:
        for table, rows in self._by_table(index, ids) if self._listeners else ():
            for listener in list(self._listeners):
                listener(table, rows)

    def _by_table(self, index: int, ids: Ids) -> Iterator[tuple[int, Ids]]:
        """Splits reported rows by table: rows of a group are numbered through its tables."""
        while len(ids):
            rows = self.tables[index].layout.rows
            here = ids < rows
            if here.any():
                yield index, ids[here]
            ids, index = ids[~here] - rows, index + 1

    def touch(self, name: str, rows: torch.Tensor | None = None) -> None:
        """Declares a write by hand, before it: captures the rows (local ids, any integer tensor), or all.

        Raises:
            UsageError: no such table, no open step, no row numbers, or a row that the shard doesn't have.
        """
        if name not in self._by_name:
            raise UsageError(f"no protected table is named {name!r}; there are {list(self._by_name)}")
        if self._hooks is None or not self._hooks.is_open():
            raise UsageError(f"guard.touch({name!r}, …) belongs inside `with guard.step():`")
        engine, number = self._of[index := self._by_name[name]]
        if rows is None:
            engine.touch_all(number)
            return
        if (kind := _no_row_numbers(rows)) is not None:
            raise UsageError(
                f"guard.touch({name!r}, …) takes row numbers, an integer tensor; it got a {kind}"
            )
        ids = np.unique(rows.detach().cpu().to(torch.int64).numpy())
        count = self.tables[index].layout.rows
        if len(ids) and not (ids[0] >= 0 and ids[-1] < count):
            raise UsageError(
                f"table {name!r} has local rows 0..{count - 1} on this rank; guard.touch() got "
                f"{ids[0]}..{ids[-1]}: pass row numbers of the local shard"
            )
        engine.touch(number, ids)

    def check(self) -> None:
        """Raises UndeclaredWrite if a table changed undeclared; called when a step begins and ends."""
        for engine in self._engines:
            engine.check()

    def mark_clean(self) -> None:
        """Accepts the present state of all tables as declared (after an undo)."""
        for engine in self._engines:
            engine.mark_clean()

    def state(self) -> dict[str, Any]:
        """The state that differs by rank and is not per row, by engine."""
        return {engine.name: engine.state() for engine in self._engines}

    def set_state(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> None:
        """Restores the result of `state`. Tables that another engine had (in a checkpoint) keep the script's.

        Args:
            state: the result of `state`.
            renamed: key of a table -> its key in `state`; for tables whose present key is not there.

        Raises:
            LayoutMismatch: an engine's state doesn't fit.
        """
        for engine in self._engines:
            if engine.name in state:
                engine.set_state(state[engine.name], renamed or {})


def check_alike(of_ranks: Sequence[list[Any]]) -> None:
    """Raises ConfigurationError unless tables that are sharded over ranks are the same on all of these.

    Args:
        of_ranks: the result of `Tables.alike` on each rank.
    """
    everywhere: dict[str, tuple[list[int] | None, dict[int, dict[str, Any]]]] = {}
    for rank, tables in enumerate(of_ranks):
        for name, ranks, facts in tables:
            key = name if ranks is None else f"{name} {ranks}"  # groups may have tables of one name
            everywhere.setdefault(key, (ranks, {}))[1][rank] = {"name": name, **facts}
    for ranks, found in everywhere.values():
        some = next(iter(found))
        name = found[some]["name"]
        needed = range(len(of_ranks)) if ranks is None else ranks
        if missing := [rank for rank in needed if rank not in found]:
            raise ConfigurationError(
                f"table {name!r} is sharded over ranks {some} and {missing[0]}, and the model of rank "
                f"{missing[0]} has no table of this name: build the same model, with the same names, on all "
                f"ranks"
            )
        for fact in found[some]:
            if text := differing(fact, {rank: facts.get(fact) for rank, facts in found.items()}):
                raise ConfigurationError(f"table {name!r} is not the same on all ranks: {text}; {ALIKE}")


def _no_row_numbers(rows: Any) -> str | None:
    """Describes an argument that is not row numbers; None if it is row numbers."""
    if not isinstance(rows, torch.Tensor):
        return f"{type(rows).__name__}: pass torch.tensor(rows)"
    if rows.dtype == torch.bool:
        return "bool tensor: of a mask, pass mask.nonzero()"
    if rows.is_floating_point() or rows.is_complex():
        return f"{str(rows.dtype).removeprefix('torch.')} tensor: pass rows.long()"
    return None


TouchHook = Callable[[torch.Tensor], None]


def tables(
    model: nn.Module,
    *,
    optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer = (),
    tables: Mapping[str, nn.Module | nn.Parameter] | None = None,
) -> list[LiveTable]:
    """The sharded embedding tables of a model on this rank, protected or not.

    Finds the tables that `ecemb.protect` would find. For a model that a guard protects, these are the
    guard's own tables, and the other arguments are ignored.

    Args:
        model: the whole model.
        optimizers: the optimizers of the tables; TorchRec's fused ones need not be named.
        tables: further tables, sharded by hand, by a key of your choice.

    Returns:
        The tables, in the order of `guard.tables`.

    Raises:
        UnsupportedTable, UnsupportedOptimizer: as `ecemb.protect`: changes of rows can't be reported.
        ConfigurationError: two tables have one name, `optimizers` are not optimizers, or `tables` have no
            keys.
    """
    if (found := protected(model)) is None:
        found, _ = find(model, modules_of(tables), optimizers_of(optimizers))
    return [LiveTable(found, index) for index in range(len(found.tables))]


class LiveTable:
    """This rank's shard of one table, live.

    Attributes:
        name: the table's key, as in `guard.tables`.
        rows: number of rows of the shard, 0 allowed.
    """

    def __init__(self, of: Tables, index: int) -> None:
        self._of, self._index = of, index
        self._table = of.tables[index]
        self.name: str = self._table.name
        self.rows: int = self._table.layout.rows

    @property
    def whole(self) -> tuple[int, int] | None:
        """The shard's position in the whole table: its first row there, and the whole table's number of rows.

        None if the order of the shards over the ranks isn't known, as for a table that is sharded by hand.
        """
        return self._table.whole(dist.get_world_size() if dist.is_initialized() else 1)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The training's own tensors: "weight" [rows, dim], then each per-row optimizer state by its name.

        States are [rows] or [rows, dim]. Maps and histories of a managed collision have their buffers
        instead, int64 [rows]. Row i of each is row i of the shard. They are live: training uses
        the values written to them, and a guard needs such writes declared. Fetch the tensors each time you
        need them: `ecemb.protect` moves them, an optimizer may create state in its first step, and
        this waits for rows that are still on their way to a replacement rank.
        """
        self._of.wait_for_table(self._index)
        return self._of.tensors(self._index)

    def on_touch(self, hook: TouchHook) -> Callable[[], None]:
        """Calls `hook(rows)` whenever rows of this shard are about to change, just before they do.

        The optimizer's step changes them, or, with TorchRec, backward; `guard.touch` and load_state_dict()
        (all rows) count, writes by hand without a guard don't. `tensors` still has the old values then.
        Evaluation reports nothing; an undone step has reported its rows.

        Args:
            hook: called in the training's thread with int64 [m], m > 0: row numbers of the shard, in any
                order, repeats allowed. Read it, and copy it to keep it. Its errors are raised by the step.

        Returns:
            A function that ends the calls.

        Raises:
            ConfigurationError: the table is trained by none of `optimizers`, so changes can't be reported.
        """
        if not (self._table.sees_all_changes or self._of.is_protected):
            raise ConfigurationError(
                f"table {self.name!r} is updated by none of the optimizers that ecemb.tables() got, so "
                f"changes of its rows can't be reported: name them, ecemb.tables(model, optimizers=[...])"
            )

        def listener(index: int, ids: Ids) -> None:
            if index == self._index:
                hook(torch.from_numpy(ids))

        return self._of.listen(listener)
