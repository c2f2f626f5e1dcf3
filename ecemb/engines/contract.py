"""The contract of every adapter: an engine of embedding tables, as ecemb uses it; and what all engines share.

An engine links one kind of tables to the arena. In the order of its calls: its constructor finds the tables
and refuses those whose rows may change undeclared; `place` moves them into the arena, except tables that stay
where they are, of which the arena holds images (`device_image`); from `watch` on, the engine reports through
`Hooks` which rows are about to change and, while rows are on their way to a replacement rank, which are about
to be read; `check` is called at the begin and the end of every step; `unwatch` ends the reports. A
`LiveTable`, which only listens, leaves out `place` and `check`. `Engine` has the code that all engines share,
and `Unit` that for tensors that are checked together; a new engine implements the abstract methods of both.

`Places` keeps the addresses of protected tensors, and checks that the tensors are still there. torch may
replace a tensor's memory without any sign. `share_memory_()` swaps the memory of a storage, and all views of
the storage move along, even a view that was kept for comparison. So an address is kept as a number, and the
address of host memory is taken from the arena's mapping, never from a tensor.

Must not know: journals, parity, other ranks.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..coding.rows import WORD_BYTES, Table, TableLayout
from ..errors import UndeclaredWrite
from ..kernels.contract import Ids

_CHUNK_BYTES = 16 << 20


def all_rows(layout: TableLayout) -> Iterator[Ids]:
    """The numbers of all rows of a table, for capture: int64, in chunks of at most 16 MiB of records.

    Yields one chunk at least, empty for a table without rows: a write is declared on ranks without rows as
    well. So a write of a whole table needs memory for one chunk, and for the journal: the table once, and 8
    bytes for each row.
    """
    step = max(1, _CHUNK_BYTES // (layout.record_words * WORD_BYTES))
    for first in range(0, max(layout.rows, 1), step):
        yield np.arange(first, min(first + step, layout.rows))


def _no_marks(index: int, rows: torch.Tensor) -> None:
    raise AssertionError(f"table {index} is outside the arena, and nothing marks its rows: hooks need `mark`")


@dataclasses.dataclass
class Hooks:
    """The functions of a guard or a listener that tables call.

    Attributes:
        capture: called with a table's index and the rows (int64 [m], in any order, repeats allowed) about to
            change. The first table of a group reports the rows of the group, as `rows.joined` says.
        mark: called in place of `capture` by tables outside the arena, so that the host needn't wait for
            their device: the rows are int64 [m] on that device, numbered from the table's first row on
            through the next tables of its group.
        is_open: whether a step is open.
        on_undeclared: called after an undeclared write is found, before UndeclaredWrite is raised.
        protects: whether undeclared changes are refused; else rows are only reported.
        ensure: waits until rows that are about to be read have arrived; called like `capture`. None if all
            rows are there, and set to None, by any thread, once the last ones have arrived.
        ensure_all: the same for all rows of a table.
    """

    capture: Callable[[int, Ids], None]
    is_open: Callable[[], bool]
    on_undeclared: Callable[[], None]
    mark: Callable[[int, torch.Tensor], None] = _no_marks
    protects: bool = True
    ensure: Callable[[int, Ids], None] | None = None
    ensure_all: Callable[[int], None] | None = None

    def wait_for(self, index: int, ids: Ids) -> None:
        """Waits for rows, unless all are there."""
        if (ensure := self.ensure) is not None:
            ensure(index, ids)

    def wait_for_table(self, index: int) -> None:
        """Waits for all rows of a table, unless all rows are there."""
        if (ensure_all := self.ensure_all) is not None:
            ensure_all(index)


class Tied:
    """A hook of a protected module; in a copy or a pickle of the module, an `Untied` replaces it.

    Args:
        hook: the function to call.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Calls the hook."""
        self._hook(*args, **kwargs)

    def __reduce__(self) -> tuple[type[Untied], tuple[()]]:
        return Untied, ()


class Untied:
    """Replaces a `Tied` hook in a copy of its module."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""
        return


class EngineTable:
    """One table shard of this rank, as an engine describes it.

    Args:
        layout: of the shard, in bytes.
        is_off_arena: whether its tensors stay where they are, and the arena holds an image of them
            (`device_image`).

    Attributes:
        name: the table's key.
        announces_lookups: whether `Hooks.ensure` gets the rows of each lookup before the lookup reads them.
            Other tables need all their rows before the first step.
    """

    def __init__(self, layout: TableLayout, *, is_off_arena: bool = False) -> None:
        self.name, self.layout, self.is_off_arena = layout.name, layout, is_off_arena
        self.announces_lookups = False

    @property
    def sees_all_changes(self) -> bool:
        """Whether the engine learns of every change of the table's rows."""
        return True

    def whole(self, world_size: int) -> tuple[int, int] | None:
        """The shard's position in the whole table, for checkpoints.

        Returns:
            Its first row, and the whole table's number of rows; None if the order of the shards over
            `world_size` ranks isn't known.
        """
        return None

    def alike(self) -> tuple[list[int] | None, dict[str, Any]] | None:
        """The properties that must be the same on every rank with a table of this name.

        Returns:
            The ranks that must have the table, None for all; and plain values by their names. None if the
            ranks' tables of this name may differ, as tables that are sharded by hand do.
        """
        return None


_REST = (
    "The tensors in training are not the protected ones, and are not committed: let the process end, and a "
    "restart goes on from the last commit"
)


class Form(NamedTuple):
    """A tensor's address, sizes, strides and type."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def holds(self, tensor: object) -> bool:
        """Whether a tensor has this form; address and strides don't count for a tensor without elements."""
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.shape == self.shape
            and tensor.dtype == self.dtype
            and (not tensor.numel() or (_address(tensor) == self.address and tensor.stride() == self.stride))
        )


class Places:
    """The forms that a sequence of tensors must keep; empty at first."""

    def __init__(self) -> None:
        self._named: list[str] = []
        self._forms: list[Form] = []
        self._addresses: list[int] = []

    def keep(self, what: str, tensor: torch.Tensor, memory: NDArray[Any] | None = None) -> None:
        """Adds a tensor's form.

        Args:
            what: names the tensor and its table, for messages.
            tensor: the tensor that training uses, after `Unit.place`.
            memory: the arena's memory for it; None to keep its present address, as for a tensor on a device.
        """
        address = _address(tensor) if memory is None else int(memory.ctypes.data)
        self._named.append(what)
        self._forms.append(Form(address, tensor.shape, tuple(tensor.stride()), tensor.dtype))
        self._addresses.append(address)

    def check(self, tensors: Sequence[object]) -> None:
        """Raises UndeclaredWrite unless each tensor, in the order of `keep`, still has its form."""
        if list(map(_form, tensors)) != self._forms:  # runs in each step for each table: has to be fast
            self._find(tensors)

    def check_addresses(self, tensors: Sequence[object]) -> None:
        """Like `check` by addresses alone, in a third of the time: for views of tensors in training."""
        if list(map(_address, tensors)) != self._addresses:
            self._find(tensors)

    def _find(self, tensors: Sequence[object]) -> None:
        for what, form, tensor in zip(self._named, self._forms, tensors, strict=True):
            if not form.holds(tensor):
                raise UndeclaredWrite(_moved(what, form, tensor))


def _form(tensor: Any) -> tuple[Any, ...] | None:
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    except (AttributeError, RuntimeError):  # equals no form, so that `Form.holds` decides
        return None


def _address(tensor: Any) -> int:
    try:
        return tensor.data_ptr()
    except (AttributeError, RuntimeError):  # no tensor; a subclass without its own memory, such as DTensor
        return -1


def _moved(what: str, form: Form, tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return (
            f"{what} is gone, or is no longer a tensor (was the optimizer's state cleared?). {_REST}. "
            f"Do it before ecemb.protect()"
        )
    if tensor.shape != form.shape or tensor.dtype != form.dtype:
        return (
            f"{what} was replaced: it is {tensor.dtype} {list(tensor.shape)} now, and {form.dtype} "
            f"{list(form.shape)} is protected (by .to(), resize_() or an assignment?). {_REST}. Do it "
            f"before ecemb.protect()"
        )
    if _is_shared(tensor):
        return (
            f"{what} was moved from the arena ({form.address:#x}) to other shared memory "
            f"({_address(tensor):#x}). share_memory_() does that to tensors and modules, and so does sending "
            f"them to another process: a torch.multiprocessing queue or pipe, or a DataLoader with "
            f"spawn or forkserver. {_REST}. Send other processes a copy: tensor.detach().clone()"
        )
    return (
        f"the storage of {what} was replaced: {_address(tensor):#x} now, and {form.address:#x} is "
        f"protected (by load_state_dict(assign=True), .to(), set_(), swap_tensors() or an assignment to "
        f".data?). {_REST}. Do it before ecemb.protect(); to write rows later, write in place, in a step, "
        f"after guard.touch(table, rows)"
    )


def _is_shared(tensor: torch.Tensor) -> bool:
    try:
        return tensor.device.type == "cpu" and tensor.is_shared()
    except (RuntimeError, NotImplementedError):  # see `_address`
        return False


@dataclasses.dataclass(frozen=True)
class Move:
    """The move of a buffer to the arena. Keeps the old storage alive, so that no other gets its address.

    Attributes:
        left: the old storage.
        span: the arena's tensor that replaces it, one-dimensional.
    """

    left: torch.UntypedStorage
    span: torch.Tensor


def repoint(moves: Sequence[Move]) -> None:
    """Repoints every tensor of this process that views an abandoned storage to the arena.

    Such views are in many places: the local shards of state_dict(), the states of fused optimizers, the
    parameters of the model, and variables of the script. The garbage collector lists them all.
    """
    if not moves:
        return
    places = {move.left.data_ptr(): move.span for move in moves}
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor):
                continue
            try:
                span = places.get(thing.untyped_storage().data_ptr())
            except (RuntimeError, NotImplementedError):  # a tensor without its own storage
                continue
            if span is not None:
                values = span.view(thing.dtype)  # a view may read the bytes as another type
                thing.data = values.as_strided(thing.size(), thing.stride(), thing.storage_offset())


class Unit(ABC):
    """Tensors that are written and checked together: those of a table, of a batch of tables, or of a map.

    Args:
        what: names the tensors, for messages.
        writer: names the only writer whose changes need no `guard.touch`, for messages.
        touch: the arguments of `guard.touch` that declare any other write, for messages.

    Attributes:
        kept: names of the tensors, in order.
        base: the engine's number of the first table of the unit.
        spans: for `check_views`, the tensors that own the memory after `place`: the arena's, or for a unit
            outside of it the tensors themselves.
    """

    def __init__(self, what: str, writer: str, touch: str) -> None:
        self.what, self.writer, self.touch = what, writer, touch
        self.kept: Sequence[str] = ()
        self.base = 0
        self.spans: list[torch.Tensor] = []
        self._places = Places()
        self._versions: list[int | None] = []

    @abstractmethod
    def tensors(self, table: int) -> dict[str, torch.Tensor]:
        """See `Engine.tensors`; of the unit's table with this number."""

    @abstractmethod
    def place(self, stored: Sequence[Table], *, fresh: bool) -> list[Move]:
        """Moves the tensors into the arena, and keeps their addresses; see `Engine.place`.

        Returns:
            The moves after which other tensors may still view the old storage.
        """

    @abstractmethod
    def trained(self) -> list[Any]:
        """The tensors that training uses now, in the order of `kept`."""

    def keep(self, memory: Sequence[NDArray[Any]] = ()) -> None:
        """Keeps the forms of the tensors, with the arena's memory of each, or their present addresses."""
        self._places = Places()
        places = memory or [None] * len(self.kept)
        for name, tensor, here in zip(self.kept, self.trained(), places, strict=True):
            self._places.keep(f"{name} of {self.what}", tensor, here)

    def move(self, tensor: torch.Tensor, memory: NDArray[np.uint8], *, fresh: bool) -> list[Move]:
        """Moves a one-dimensional tensor to the arena's memory (uint8 [bytes]).

        Args:
            tensor: the tensor; its storage is replaced.
            memory: the memory; holds the values already unless `fresh`.
            fresh: whether to copy the tensor's values there first.

        Returns:
            The move; none for a tensor without elements.
        """
        span = torch.from_numpy(memory).view(tensor.dtype)
        self.spans.append(span)
        if not tensor.numel():
            return []
        if fresh:
            with torch.no_grad():
                span.copy_(tensor)
        left = tensor.untyped_storage()
        tensor.data = span
        return [Move(left, span)]

    def check_views(self) -> None:
        """Raises UnsupportedTable unless the library's views of the tensors have moved as well."""
        return

    def mark_clean(self) -> None:
        """Accepts the tensors' present versions as declared."""
        self._versions = self._now()

    def is_written(self) -> bool:
        """Whether a tensor, or a view of it, was written in place through torch since `mark_clean`."""
        return self._now() != self._versions

    def check_storage(self) -> None:
        """Raises UndeclaredWrite if the tensors in training are not the protected ones any more."""
        self._places.check(self.trained())

    def _now(self) -> list[int | None]:
        return [getattr(tensor, "_version", None) for tensor in self.trained()]


_Unit = TypeVar("_Unit", bound=Unit)


class Engine(ABC, Generic[_Unit]):
    """The tables of one engine on this rank.

    Args:
        units: its units, in order.
        tables: the tables of each.
        parameters: the tables' parameters in the model: not part of replicated state.

    Attributes:
        name: the engine's name, unique.
        tables: its tables; tables of one group are neighbours.
        stepped: the parameters that change in an optimizer's `step()`, by the tables' names.
        left_out: modules whose buffers belong to the engine, and not to replicated state.
        averaged: the DistributedDataParallel wrappers of replicated tables, which the model's `modules()`
            doesn't list.
    """

    name: str

    def __init__(
        self,
        units: Sequence[_Unit],
        tables: Sequence[Sequence[EngineTable]],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.tables: list[EngineTable] = []
        self.parameters = list(parameters)
        self.stepped: dict[str, nn.Parameter] = {}
        self.left_out: list[nn.Module] = []
        self.averaged: list[DistributedDataParallel] = []
        self._units = list(units)
        self._unit_of: list[_Unit] = []
        for unit, its in zip(units, tables, strict=True):
            unit.base = len(self.tables)
            self.tables += its
            self._unit_of += [unit] * len(its)
        self._handles: list[Any] = []
        self._touched: set[_Unit] = set()  # written by hand since the last check

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """The training's own tensors of a table by name: the weight, then the existing per-row state."""
        unit = self._unit_of[index]
        return unit.tensors(index - unit.base)

    def place(self, stored: Sequence[Table], *, fresh: bool) -> None:
        """Moves the tables into the arena, with all of this process's views of them.

        For tables that stay where they are, only makes sure that `tensors` has all columns of the layout.

        Args:
            stored: the arena's memory of each table.
            fresh: the memory is to be filled with the tables' values; else it already holds them, and the
                tables only point to it.
        """
        edges = [*(unit.base for unit in self._units), len(stored)]
        parts = [stored[a:b] for a, b in itertools.pairwise(edges)]
        units = zip(self._units, parts, strict=True)
        # The moves get no name, so that the memory in which the tables were built is freed with the list.
        repoint([move for unit, part in units for move in unit.place(part, fresh=fresh)])
        for unit in self._units:
            unit.check_views()
        self.mark_clean()

    @abstractmethod
    def watch(self, hooks: Hooks) -> None:
        """From here on, changes of rows are reported, and undeclared changes raise.

        If `hooks.ensure` is given, lookups, `state_dict()` and writes by hand wait for their rows.
        """
        self._hooks = hooks

    def unwatch(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def touch(self, index: int, ids: Ids) -> None:
        """Captures rows of a table (int64 [m], m may be 0) that are about to be written by hand.

        Without rows too, the table's tensors may then be written until the next `check`.
        """
        if (unit := self._unit_of[index]) not in self._touched:
            self._check(unit)
        if len(ids):
            self._capture(index, ids)
        self._touched.add(unit)

    def touch_all(self, index: int) -> None:
        """Captures all rows of a table."""
        self._hooks.wait_for_table(index)
        for ids in all_rows(self.tables[index].layout):
            self.touch(index, ids)

    def check(self) -> None:
        """Raises UndeclaredWrite if a table changed undeclared; called when a step begins and ends."""
        for unit in self._units:
            if unit in self._touched:
                unit.mark_clean()
            self._check(unit)
        self._touched.clear()

    def mark_clean(self) -> None:
        """Accepts the present state of all tables as declared (after an undo)."""
        self._touched.clear()
        for unit in self._units:
            unit.mark_clean()

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The state that differs by rank and is not per row, as plain values and tensors."""

    @abstractmethod
    def set_state(self, state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        """Restores the result of `state`. Tables that are not in it, as another engine had them, keep theirs.

        Args:
            state: the result of `state`.
            renamed: key of a table -> its key in `state`; for tables whose present key is not there.

        Raises:
            LayoutMismatch: the state doesn't fit.
        """

    def _capture(self, index: int, ids: Ids) -> None:
        self._hooks.wait_for(index, ids)
        self._hooks.capture(index, ids)

    def _check(self, unit: _Unit) -> None:
        if not self._hooks.protects:
            return
        unit.check_storage()
        if unit.is_written():
            self._hooks.on_undeclared()
            raise UndeclaredWrite(
                f"{unit.what} was written in place, but not by {unit.writer}: declare such rows with "
                f"guard.touch({unit.touch}) inside the step, before the write. Restart the job: it computes "
                f"parity again from the present rows"
            )
