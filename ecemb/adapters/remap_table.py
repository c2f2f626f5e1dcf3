"""What the maps of managed collision have in common: their tables of entries, and calls before their methods.

Must not know: which buffers a kind of map has, journals, parity, other ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ..coding.rows import Table, TableLayout
from .engine import Ids
from .fbgemm import own
from .residence import Move


class Before:
    """A method of an object with a call before it; a copy of the object gets the method without the call.

    Args:
        thing: the object, which gets this in place of its method.
        name: of the method.
        call: called with the method's arguments first.
    """

    def __init__(self, thing: object, name: str, call: Callable[..., None]) -> None:
        self._thing, self._name, self._call = thing, name, call
        self._method: Callable[..., Any] = own(thing, name)
        setattr(thing, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls both."""
        self._call(*args, **kwargs)
        return self._method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[object, str]]:
        return getattr, (self._thing, self._name)

    def remove(self) -> None:
        """Gives the object its own method back."""
        self._thing.__dict__.pop(self._name, None)


class After(Before):
    """The same with the call after the method: it gets the method's result, and then the arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls both; returns the method's result."""
        result = self._method(*args, **kwargs)
        self._call(result, *args, **kwargs)
        return result


@dataclasses.dataclass(frozen=True)
class RemapTable:
    """A map of this rank, or its history.

    Attributes:
        name: path of the module in the model, with "map" or "history".
        layout: an entry for a record.
        is_apart: whether its tensors stay where they are, and the arena holds an image of them.
    """

    name: str
    layout: TableLayout
    is_apart: bool = False

    @property
    def announces_lookups(self) -> bool:
        """See `EngineTable.announces_lookups`: a batch reads the whole map."""
        return False

    @property
    def sees_all_changes(self) -> bool:
        """See `EngineTable.sees_all_changes`: batches in training are the only ones to change it."""
        return True

    def whole(self, world_size: int) -> None:
        """See `EngineTable.whole`: which entries a rank has, its own ids decide."""
        return

    def alike(self) -> None:
        """See `EngineTable.alike`: histories may have different sizes."""
        return


class Map(Protocol):
    """One ManagedCollisionModule of this rank, as the engine of all maps uses it.

    Attributes:
        path: of the module in the model.
        tables: of its entries.
        parameters: of the model that are its buffers.
        spans: the tensors under its buffers, in the arena or apart.
    """

    path: str
    tables: list[RemapTable]
    parameters: list[nn.Parameter]
    spans: list[torch.Tensor]

    def tensors(self, table: int) -> dict[str, torch.Tensor]:
        """The buffers of a table."""
        ...

    def place(self, stored: Sequence[Table], *, fresh: bool) -> list[Move]:
        """Moves the buffers into the arena, unless they stay apart; returns the storages that they left."""
        ...

    def check_views(self) -> None:
        """Raises UnsupportedTable unless the tensors of state_dict() are those that are protected."""
        ...

    def watch(self, before: Callable[[], None], capture: Callable[[int, Ids], None]) -> list[Before]:
        """Calls `before` before a batch in training, and `capture` with a table and its changed entries."""
        ...

    def mark_clean(self) -> None:
        """Accepts the buffers' present versions as declared."""
        ...

    def is_written(self) -> bool:
        """Whether a buffer was written in place since `mark_clean`."""
        ...

    def check_storage(self) -> None:
        """Raises UndeclaredWrite if the buffers are not the protected ones any more."""
        ...

    def state(self) -> dict[str, Any]:
        """The counters that are not per entry."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores them."""
        ...
