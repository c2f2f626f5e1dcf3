"""All protected tables of this rank, whatever engine they are of.

Owns their order, which is that of the row space: engine by engine. Everything else is the engines' work.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import ConfigurationError, LayoutMismatch, UndeclaredWrite, UsageError
from ..rows import RowSpace, Table
from . import torchrec
from .engine import Engine, EngineTable, Hooks, Ids
from .image import Fetcher, Image, Putter
from .nn import ALIKE, ShardedEmbeddingBag, differing
from .sparse import SparseTables
from .supported import check_memory

Optimizer = torch.optim.Optimizer
Listener = Callable[[int, Ids], None]
"""Called with a table's index and rows of it that are about to change, int64 [m], m > 0, repeats allowed."""

_LISTENING = Hooks(lambda *_: None, is_open=lambda: True, on_undeclared=lambda: None, protects=False)
_found: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Tables]] = weakref.WeakKeyDictionary()


def optimizers_of(given: Any) -> list[Optimizer]:
    """The optimizers that a caller has named: one, several, or a mapping's values.

    Raises:
        ConfigurationError: something else is among them.
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
    """The tables sharded by hand that a caller has named by keys.

    Raises:
        ConfigurationError: they have no keys, or keys that are no strings.
    """
    if given is not None and not isinstance(given, (Mapping, nn.ModuleDict)):
        raise ConfigurationError(
            f"tables= takes a mapping of tables by keys of your choice, e.g. {{'user': table}}; it is a "
            f"{type(given).__name__}"
        )
    found: dict[Any, nn.Module] = dict(given or {})  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if others := [key for key in found if not isinstance(key, str)]:
        raise ConfigurationError(
            f"tables= takes a mapping of tables by keys of your choice, which are strings; {others[0]!r} is "
            f"a {type(others[0]).__name__}"
        )
    return found


def listed(given: Any) -> list[Any]:
    """What a caller has given as nothing, one object, several, or a mapping's values."""
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
        The tables, and the optimizers that hold state: what they are combined of.

    Raises:
        ConfigurationError: a table or its optimizer can't be protected.
    """
    modules: dict[str, nn.Module] = {
        name or "model": module
        for name, module in model.named_modules()
        if isinstance(module, ShardedEmbeddingBag)
    }
    if overlap := sorted(set(modules) & set(given)):
        raise ConfigurationError(f"tables= repeats keys that the model's own tables have: {overlap}")
    known = {id(module) for module in given.values()}
    modules = {name: m for name, m in modules.items() if id(m) not in known} | dict(given)
    optimizers = torchrec.leaves(model, optimizers)
    engines: list[Engine] = [SparseTables(modules, optimizers)]
    check_memory(model, modules)
    if (fused := torchrec.find(model)) is not None:
        engines.append(fused)
    found = Tables(engines)
    _found[model] = weakref.ref(found)
    return found, optimizers


def protected(model: nn.Module) -> Tables | None:
    """The tables that were found in a model, if a guard watches them."""
    found = _found.get(model, lambda: None)()
    return found if found is not None and found.is_protected else None


class Tables:
    """The tables of all engines, numbered through.

    Args:
        engines: in the order of the row space.

    Raises:
        ConfigurationError: two tables have one name.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self.tables: list[EngineTable] = [table for engine in engines for table in engine.tables]
        self._of: list[tuple[Engine, int]] = [
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
        self._listeners: list[Listener] = []
        self._images: dict[int, Image] = {}
        self._fetcher = Fetcher()

    @property
    def is_protected(self) -> bool:
        """Whether somebody watches, and not only listens."""
        return self._hooks is not None

    @property
    def have_images(self) -> bool:
        """Whether tables lie apart, so that `fetch` has something to do."""
        return bool(self._images)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the model shows of the tables: not part of replicated state."""
        return [parameter for engine in self._engines for parameter in engine.parameters]

    @property
    def stepped(self) -> dict[str, nn.Parameter]:
        """Those of them that change in an optimizer's `step()`, by the tables' names."""
        return {name: one for engine in self._engines for name, one in engine.stepped.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of the tables with their optimizers' state per row."""
        layouts = (table.layout for table in self.tables)
        return sum(layout.rows * column.row_bytes for layout in layouts for column in layout.columns)

    @property
    def aside(self) -> list[nn.Module]:
        """Modules whose buffers are not part of replicated state."""
        return [module for engine in self._engines for module in engine.aside]

    @property
    def averaged(self) -> list[nn.parallel.DistributedDataParallel]:
        """What averages the gradients of replicated tables, unseen by the model's `modules()`."""
        return [module for engine in self._engines for module in engine.averaged]

    def alike(self) -> list[Any]:
        """What has to be the same on other ranks, table by table, for `check_alike`; plain lists."""
        return [[table.name, *found] for table in self.tables if (found := table.alike()) is not None]

    def place(self, stored: Sequence[Table], *, fresh: bool) -> None:
        """Moves the tables into the arena; see `Engine.place`.

        Images are filled if `fresh`; else they hold what `put` will bring into the tables, once it is whole.
        """
        at = 0
        for engine in self._engines:
            engine.place(stored[at : at + len(engine.tables)], fresh=fresh)
            at += len(engine.tables)
        apart = [i for i, table in enumerate(self.tables) if table.is_apart]
        self._images = {i: Image(stored[i], list(self.tensors(i).values())) for i in apart}
        if fresh:
            for image in self._images.values():
                image.fill()

    def putter(self, space: RowSpace) -> Putter:
        """What brings images to tables that lie apart while rows are recovered; `note` comes after it."""
        return Putter(self._images, space)

    def put(self) -> None:
        """Overwrites tables that lie apart with their images, all rows, and takes that as declared."""
        for image in self._images.values():
            image.put()
        self.note()

    def begin(self) -> None:
        """A step begins.

        Raises:
            UndeclaredWrite: a table changed undeclared since the last one.
        """
        for image in self._images.values():
            image.forget()
        self.check()

    def fetch(self) -> None:
        """A step's body has ended: brings images up to date with what it has changed."""
        self._fetcher.fetch(self._images.values())

    def verify(self, rows: Sequence[tuple[int, range]]) -> None:
        """Raises UndeclaredWrite if rows of tables that lie apart differ from their images.

        Args:
            rows: by table.
        """
        for index, some in rows:
            image = self._images.get(index)
            if image is not None and len(wrong := image.differing(some)):
                name = self.tables[index].name
                raise UndeclaredWrite(
                    f"table {name!r} on {image.device} differs from its image in the arena in {len(wrong)} "
                    f"rows, first in row {wrong[0]}: something else than its optimizer's step has written to "
                    f"it, or its memory is defective. Parity fits the image: let the process end, and a "
                    f"restart takes the table from there. Declare writes with guard.touch({name!r}, rows)"
                )

    def take_back(self) -> None:
        """The step was undone in the arena: so it is in tables that lie apart. Takes all as declared."""
        for image in self._images.values():
            image.put_rows(image.changed())
        self.note()

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """See `Engine.tensors`."""
        engine, number = self._of[index]
        return engine.tensors(number)

    def watch(self, hooks: Hooks) -> None:
        """From here on, rows that change are told, and undeclared changes raise."""
        self._hooks = hooks
        self._engage(hooks)

    def unwatch(self) -> None:
        """Takes the hooks away; who listens goes on to hear."""
        self._hooks = None
        self._engage(_LISTENING if self._listeners else None)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """From here on, tells a listener of rows that are about to change, watched or not.

        Returns:
            Ends it; may be called twice.
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
        at = 0
        for engine in self._engines:
            engine.unwatch()
            if hooks is not None:
                engine.watch(dataclasses.replace(hooks, capture=partial(self._told, at)))
            at += len(engine.tables)

    def _told(self, base: int, index: int, ids: Ids) -> None:
        """Rows of an engine's table, the first of which is table `base`, are about to change."""
        if self._hooks is not None:
            self._hooks.capture(base + index, ids)
        if self._listeners or self._images:
            for table, rows in self._by_table(base + index, ids):
                if table in self._images:
                    self._images[table].tell(rows)
                for listener in list(self._listeners):
                    listener(table, rows)

    def _by_table(self, index: int, ids: Ids) -> Iterator[tuple[int, Ids]]:
        """Told rows, table by table: rows of a group count on through its tables."""
        while len(ids):
            rows = self.tables[index].layout.rows
            here = ids < rows
            if here.any():
                yield index, ids[here]
            ids, index = ids[~here] - rows, index + 1

    def touch(self, name: str, rows: torch.Tensor) -> None:
        """Declares a write by hand, before it: captures the rows (local ids, any integer tensor).

        Raises:
            UsageError: no such table, no open step, no row numbers, or a row that the shard doesn't have.
        """
        if name not in self._by_name:
            raise UsageError(f"no protected table is named {name!r}; there are {list(self._by_name)}")
        if self._hooks is None or not self._hooks.is_open():
            raise UsageError(f"guard.touch({name!r}, …) belongs inside `with guard.step():`")
        if (kind := _no_row_numbers(rows)) is not None:
            raise UsageError(
                f"guard.touch({name!r}, …) takes row numbers, an integer tensor; it was given a {kind}"
            )
        index = self._by_name[name]
        ids = np.unique(rows.detach().cpu().to(torch.int64).numpy())
        count = self.tables[index].layout.rows
        if len(ids) and not (ids[0] >= 0 and ids[-1] < count):
            raise UsageError(
                f"table {name!r} has local rows 0..{count - 1} on this rank; guard.touch() was given "
                f"{ids[0]}..{ids[-1]}: pass row numbers of the local shard"
            )
        engine, number = self._of[index]
        engine.touch(number, ids)

    def check(self) -> None:
        """Raises UndeclaredWrite if a table changed undeclared; called when a step begins and ends."""
        for engine in self._engines:
            engine.check()

    def note(self) -> None:
        """Takes everything as it is now as declared (after an undo)."""
        for engine in self._engines:
            engine.note()

    def state(self) -> dict[str, Any]:
        """What differs by rank and is not per row, by engine."""
        return {engine.name: engine.state() for engine in self._engines}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes it back.

        Raises:
            LayoutMismatch: other engines, or what they hold doesn't fit.
        """
        if set(state) != {engine.name for engine in self._engines}:
            raise LayoutMismatch(
                f"the job was started with tables of {sorted(state)}, and this model has tables of "
                f"{sorted(engine.name for engine in self._engines)}: run the script that started it, or use "
                f"another job="
            )
        for engine in self._engines:
            engine.set_state(state[engine.name])


def check_alike(told: Sequence[list[Any]]) -> None:
    """Raises ConfigurationError unless tables that are sharded over ranks are the same on all of these.

    Args:
        told: what `Tables.alike` gives on each rank.
    """
    everywhere: dict[str, tuple[list[int] | None, dict[int, dict[str, Any]]]] = {}
    for rank, tables in enumerate(told):
        for name, ranks, facts in tables:
            key = name if ranks is None else f"{name} {ranks}"  # groups may have tables of one name
            everywhere.setdefault(key, (ranks, {}))[1][rank] = {"name": name, **facts}
    for ranks, found in everywhere.values():
        some = next(iter(found))
        name = found[some]["name"]
        needed = range(len(told)) if ranks is None else ranks
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
    """What a caller has given in place of row numbers; None if it has given row numbers."""
    if not isinstance(rows, torch.Tensor):
        return f"{type(rows).__name__}: pass torch.tensor(rows)"
    if rows.dtype == torch.bool:
        return "bool tensor: of a mask, pass mask.nonzero()"
    if rows.is_floating_point() or rows.is_complex():
        return f"{str(rows.dtype).removeprefix('torch.')} tensor: pass rows.long()"
    return None
