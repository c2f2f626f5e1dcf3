"""What an engine of embedding tables is to ecemb: the contract that every adapter fulfils.

An engine owns the link between one kind of tables and the arena. In the order of its calls: its constructor
finds the tables and refuses what would change rows that nobody declared; `place` moves them into the arena,
but for those that stay apart, of which the arena holds images (`image`);
`watch` begins to tell, through `Hooks`, which rows are about to change; `check` stands at the beginning and
at the end of every step; `unwatch` ends it. Who only listens (`LiveTable`) leaves out `place` and `check`.

Must not know: journals, parity, other ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..rows import Table, TableLayout

Ids = NDArray[np.int64]


@dataclasses.dataclass
class Hooks:
    """What tables tell, and ask, whoever protects them.

    Attributes:
        capture: called with a table's index and the rows (int64 [m], in any order, repeats allowed) about to
            change. Rows of a group of tables are told by its first table, as `rows.joined` says.
        is_open: whether a step is open.
        on_undeclared: called when rows turn out to have been written undeclared, before it is raised.
        protects: whether undeclared changes are refused; else rows are told, and that is all.
    """

    capture: Callable[[int, Ids], None]
    is_open: Callable[[], bool]
    on_undeclared: Callable[[], None]
    protects: bool = True


class Tied:
    """A hook of a protected module that stays with it: copied or pickled with the module, it does nothing.

    Args:
        hook: what a call calls.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Calls the hook."""
        self._hook(*args, **kwargs)

    def __reduce__(self) -> tuple[type[Untied], tuple[()]]:
        return Untied, ()


class Untied:
    """What becomes of a `Tied` hook in a copy of its module."""

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
        """What the shard looks like in bytes."""
        ...

    @property
    def is_told(self) -> bool:
        """Whether the engine hears of every change of its rows."""
        ...

    @property
    def is_apart(self) -> bool:
        """Whether its tensors stay where they are, and the arena holds an image of them (`image`)."""
        ...

    def whole(self, world_size: int) -> tuple[int, int] | None:
        """Where the shard stands in the whole table, for checkpoints.

        Returns:
            Its first row, and the whole table's number of rows; None if the order of the shards over
            `world_size` ranks isn't known.
        """
        ...

    def alike(self) -> tuple[list[int] | None, dict[str, Any]] | None:
        """What has to be the same on every rank that has a table of this name.

        Returns:
            The ranks that have to have one, None for all; and plain values by what they are called. None if
            another rank's table of this name may be another one, as of tables that are sharded by hand.
        """
        ...


class Engine(Protocol):
    """The tables of one engine on this rank."""

    @property
    def name(self) -> str:
        """The engine's, unique."""
        ...

    @property
    def tables(self) -> Sequence[EngineTable]:
        """Its tables; those of one group are neighbours."""
        ...

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """What the model shows of the tables: not part of replicated state."""
        ...

    @property
    def stepped(self) -> Mapping[str, nn.Parameter]:
        """Those that change in an optimizer's `step()`, by the tables' names."""
        ...

    @property
    def aside(self) -> Sequence[nn.Module]:
        """Modules whose buffers are the engine's own affair, and not part of replicated state either."""
        ...

    @property
    def averaged(self) -> Sequence[DistributedDataParallel]:
        """What averages the gradients of replicated tables, unseen by the model's `modules()`."""
        ...

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """The training's own tensors of a table by name: the weight, then what per-row state there is yet."""
        ...

    def place(self, stored: Sequence[Table], *, fresh: bool) -> None:
        """Moves the tables into the arena.

        Of those that stay apart it makes sure that `tensors` has all columns of the layout, and that is all.

        Args:
            stored: the arena's memory of each table.
            fresh: the memory is to be filled with the tables' values; else it holds them, and is only
                pointed to.
        """
        ...

    def watch(self, hooks: Hooks) -> None:
        """From here on, rows that change are told, and undeclared changes raise."""
        ...

    def unwatch(self) -> None:
        """Takes all hooks away."""
        ...

    def touch(self, index: int, ids: Ids) -> None:
        """Captures rows of a table that are about to be written by hand."""
        ...

    def check(self) -> None:
        """Raises UndeclaredWrite if a table changed undeclared; called when a step begins and ends."""
        ...

    def note(self) -> None:
        """Takes everything as it is now as declared (after an undo)."""
        ...

    def state(self) -> dict[str, Any]:
        """What differs by rank and is not per row, as plain values and tensors."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes it back.

        Raises:
            LayoutMismatch: it doesn't fit.
        """
        ...
