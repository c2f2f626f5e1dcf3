"""The contract of every adapter: an engine of embedding tables, as ecemb uses it.

An engine links one kind of tables to the arena. In the order of its calls: its constructor finds the tables
and refuses those whose rows may change undeclared; `place` moves them into the arena, except tables that stay
where they are, of which the arena holds images (`host_mirror`); from `watch` on, the engine reports through
`Hooks` which rows are about to change and, while rows are on their way to a replacement rank, which are about
to be read; `check` is called at the begin and the end of every step; `unwatch` ends the reports. A
`LiveTable`, which only listens, leaves out `place` and `check`.

Must not know: journals, parity, other ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..coding.rows import WORD_BYTES, Table, TableLayout
from ..kernels.contract import Ids

_CHUNK_BYTES = 16 << 20


def all_rows(layout: TableLayout) -> Iterator[Ids]:
    """The numbers of all rows of a table, for capture: int64, in chunks of at most 16 MiB of records.

    There is one at least: a write of a table is declared on the ranks that have no rows of it as well. So a
    write of a whole table needs a chunk's memory, besides the journal's, which is the table once and 8 bytes
    for each row.
    """
    step = max(1, _CHUNK_BYTES // (layout.record_words * WORD_BYTES))
    for first in range(0, max(layout.rows, 1), step):
        yield np.arange(first, min(first + step, layout.rows))


def _no_marks(index: int, rows: torch.Tensor) -> None:
    raise AssertionError(f"table {index} is apart, and nothing marks its rows: hooks need `mark`")


@dataclasses.dataclass
class Hooks:
    """The calls that tables make to their guard or listener.

    Attributes:
        capture: called with a table's index and the rows (int64 [m], in any order, repeats allowed) about to
            change. The first table of a group reports the rows of the group, as `rows.joined` says.
        mark: called instead by tables that are apart, which needn't wait for their device: the rows are a
            tensor there, int64 [m], numbered from this table on through the next ones of its group.
        is_open: whether a step is open.
        on_undeclared: called after an undeclared write is found, before UndeclaredWrite is raised.
        protects: whether undeclared changes are refused; else rows are only reported.
        ensure: returns when rows that are about to be read are there; called like `capture`. None when all
            rows are there, from the begin or from any later moment on.
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
    """A hook of a protected module that stays with it: copied or pickled with the module, it does nothing.

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


class EngineTable(Protocol):
    """One table shard of this rank, as an engine shows it."""

    @property
    def name(self) -> str:
        """The table's key."""
        ...

    @property
    def layout(self) -> TableLayout:
        """The shard's layout in bytes."""
        ...

    @property
    def sees_all_changes(self) -> bool:
        """Whether the engine learns of every change of its rows."""
        ...

    @property
    def is_apart(self) -> bool:
        """Whether its tensors stay where they are, and the arena holds an image of them (`host_mirror`)."""
        ...

    @property
    def announces_lookups(self) -> bool:
        """Whether `Hooks.ensure` gets the rows of each lookup before it reads them.

        Of other tables all rows have to be there before the first step.
        """
        ...

    def whole(self, world_size: int) -> tuple[int, int] | None:
        """The shard's position in the whole table, for checkpoints.

        Returns:
            Its first row, and the whole table's number of rows; None if the order of the shards over
            `world_size` ranks isn't known.
        """
        ...

    def alike(self) -> tuple[list[int] | None, dict[str, Any]] | None:
        """The properties that must be the same on every rank with a table of this name.

        Returns:
            The ranks that must have the table, None for all; and plain values by their names. None if the
            ranks' tables of this name may differ, as tables that are sharded by hand do.
        """
        ...


class Engine(Protocol):
    """The tables of one engine on this rank."""

    @property
    def name(self) -> str:
        """The engine's name, unique."""
        ...

    @property
    def tables(self) -> Sequence[EngineTable]:
        """Its tables; tables of one group are neighbours."""
        ...

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The tables' parameters in the model: not part of replicated state."""
        ...

    @property
    def stepped(self) -> Mapping[str, nn.Parameter]:
        """The parameters that change in an optimizer's `step()`, by the tables' names."""
        ...

    @property
    def aside(self) -> Sequence[nn.Module]:
        """Modules whose buffers belong to the engine, and not to replicated state."""
        ...

    @property
    def averaged(self) -> Sequence[DistributedDataParallel]:
        """The wrappers that average the gradients of replicated tables, not among the model's `modules()`."""
        ...

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """The training's own tensors of a table by name: the weight, then the existing per-row state."""
        ...

    def place(self, stored: Sequence[Table], *, fresh: bool) -> None:
        """Moves the tables into the arena.

        For tables that stay where they are, only makes sure that `tensors` has all columns of the layout.

        Args:
            stored: the arena's memory of each table.
            fresh: the memory is to be filled with the tables' values; else it already holds them, and the
                tables only point to it.
        """
        ...

    def watch(self, hooks: Hooks) -> None:
        """From here on, changes of rows are reported, and undeclared changes raise.

        If `hooks.ensure` is given, lookups, `state_dict()` and writes by hand wait for their rows.
        """
        ...

    def unwatch(self) -> None:
        """Removes all hooks."""
        ...

    def touch(self, index: int, ids: Ids) -> None:
        """Captures rows of a table that are about to be written by hand."""
        ...

    def check(self) -> None:
        """Raises UndeclaredWrite if a table changed undeclared; called when a step begins and ends."""
        ...

    def mark_clean(self) -> None:
        """Accepts the present state of all tables as declared (after an undo)."""
        ...

    def state(self) -> dict[str, Any]:
        """The state that differs by rank and is not per row, as plain values and tensors."""
        ...

    def set_state(self, state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        """Restores that state. Tables that it doesn't have, of another engine then, keep theirs.

        Args:
            state: the result of `state`.
            renamed: key of a table -> its key in the state, unless that has its key now.

        Raises:
            LayoutMismatch: the state doesn't fit.
        """
        ...
