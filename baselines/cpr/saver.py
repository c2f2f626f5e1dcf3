"""What a shard has saved, and what it takes up of that: the same for a real rank and for an emulated server.

Must not know: who saves and who failed, or where `Store` keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from baselines.state import put_in, rows_of

from .saved import Mark
from .saving import LiveTable, Saving


class Store(Protocol):
    """Where rows are as they were saved: files (`saved.SavedRank`), or memory (`servers.SavedServer`)."""

    def keys(self) -> set[str]:
        """Of the rows' tensors that were saved."""
        ...

    def save(self, rows: Mapping[str, Tensor], rest: Mapping[str, Tensor], mark: Mark) -> None:
        """Saves everything."""
        ...

    def save_rows(self, some: Mapping[str, Tensor], rest: Mapping[str, Tensor], mark: Mark) -> None:
        """Saves what `Saving.some` gives, on top of what is saved."""
        ...


class Saver:
    """One shard's saves.

    Args:
        store: where they go.
        saving: what they take, and when.

    Attributes:
        since: step since which samples count as lost, if this shard fails now; see `Mark.since`.
    """

    def __init__(self, store: Store, saving: Saving) -> None:
        self._store, self._saving = store, saving
        self.since = 0

    def save(
        self,
        tables: Sequence[LiveTable],
        rest: Mapping[str, Tensor],
        step: int,
        *,
        whole: bool = False,
    ) -> None:
        """Saves what is due, or everything.

        Args:
            tables: the shard's. Read.
            rest: all other tensors that are to be saved, by key. Read.
            step: that comes next.
            whole: everything.
        """
        some = None if whole else self._saving.some(tables)
        rows = rows_of(tables)
        if some is not None and self._store.keys() != rows.keys():
            some = None  # an optimizer has made state that was not there to be saved
        if some is None:
            self.since = step
            self._store.save(rows, rest, Mark(step, step))
        else:
            self.since = max(self.since, self._saving.since(step))
            self._store.save_rows(some, rest, Mark(step, self.since))
        self._saving.saved(tables, some)


def take_up(tables: Sequence[LiveTable], rows: Mapping[str, Tensor]) -> None:
    """A shard that failed takes up its saved rows, and of their optimizers' state what there is now.

    Args:
        tables: the shard's. Overwritten.
        rows: as they were saved, by key. Read.

    Raises:
        ValueError: they are another training's.
    """
    put_in(rows_of(tables), rows)
