"""A chain of checkpoints, as a `Follower` reads it: a full one, and increments on top of it.

Owns the protocol `IncrementReader`, and `FullReader`, by which any `CheckpointReader` is one whose chains
have one checkpoint.

Must not know: how checkpoints are stored, arenas, other ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .interface import CheckpointReader, Piece, Stored

Tables = Mapping[str, Mapping[str, Tensor]]
"""Table -> column -> its rows, [rows, ...]."""


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table in a chain of checkpoints.

    Attributes:
        rows: number of its rows.
        columns: dtype, as torch names it, and shape of a row, by the column's name: "weight", and those of
            the optimizer's states.
    """

    rows: int
    columns: Mapping[str, tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Link:
    """One checkpoint of a chain.

    Attributes:
        name: distinguishes it from all other checkpoints of its store.
        tables: keys of the tables that it has rows of.
        save: distinguishes it from an earlier one of that name, in a store that may have one.
    """

    name: str
    tables: frozenset[str]
    save: str = ""


@dataclasses.dataclass(frozen=True)
class Chain:
    """The newest complete checkpoint, after those that it is based on.

    Attributes:
        links: in the order in which they are applied; the first one has all rows of all tables.
        step: number of the step to run next, at the last one.
        training: the same for all checkpoints of one training; "" if the store doesn't say.
        job: name of the job; "" if the store doesn't say.
        tables: by their keys.
    """

    links: tuple[Link, ...]
    step: int
    training: str
    job: str
    tables: Mapping[str, StoredTable]

    @property
    def name(self) -> str:
        """The newest checkpoint's name."""
        return self.links[-1].name


@runtime_checkable
class IncrementReader(Protocol):
    """A store that a `Follower` reads, while other processes write it and remove from it.

    `chain` is called again and again; after it `apply_` for the links that are new, in their order, and
    `dense_`.
    """

    def chain(self) -> Chain | None:
        """The newest complete checkpoint, after those that it is based on; None if there is none.

        Raises:
            CheckpointFailed: it can't be read, or what it is based on is gone.
            CheckpointInsecure: another user could have written it.
            CheckpointMismatch: the store holds other things.
        """
        ...

    def apply_(self, link: Link, tables: Tables) -> Mapping[str, Tensor | None]:
        """Overwrites the rows that one checkpoint of the last chain has.

        Args:
            link: of the last chain.
            tables: whole tables, of those that the link has rows of; any of their columns. Overwritten, also
                in part, if this raises.

        Returns:
            The rows that were overwritten, int64 [m], by table; None: all.

        Raises:
            CheckpointFailed: it was removed, or is not as it was written.
            CheckpointInsecure: another user could have written it.
            CheckpointMismatch: it has other tables.
        """
        ...

    def dense_(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites dense parameters and buffers with those of the last chain's newest checkpoint.

        Args:
            tensors: by the names that the model has for them. Overwritten, also in part, if this raises.

        Raises:
            CheckpointFailed, CheckpointInsecure: see `apply_`.
            CheckpointMismatch: it has no such tensor, or one of another dtype or shape.
        """
        ...


class FullReader:
    """An `IncrementReader` of a store that is read as full checkpoints.

    Args:
        reader: of the store.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._stored: Stored | None = None

    def __str__(self) -> str:
        return str(self._reader)

    def chain(self) -> Chain | None:
        """See `IncrementReader`."""
        self._stored = self._reader.newest()
        if self._stored is None:
            return None
        facts, tables = self._stored.facts, tables_of(self._stored.facts)
        link = Link(self._stored.name, frozenset(tables), str(facts.get("save", "")))
        return Chain(
            (link,), self._stored.step, str(facts.get("lineage", "")), str(facts.get("job", "")), tables
        )

    def apply_(self, link: Link, tables: Tables) -> Mapping[str, Tensor | None]:
        """See `IncrementReader`."""
        pieces = [
            Piece(f"{table}.{column}", tuple(tensor.shape), 0, tensor, table)
            for table, columns in tables.items()
            for column, tensor in columns.items()
        ]
        self._reader.read(self._newest(), pieces)
        return dict.fromkeys(tables)

    def dense_(self, tensors: Mapping[str, Tensor]) -> None:
        """See `IncrementReader`."""
        pieces = [Piece(name, tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()]
        self._reader.read(self._newest(), pieces)

    def _newest(self) -> Stored:
        if self._stored is None:
            raise RuntimeError("chain() comes before apply_() and dense_()")
        return self._stored


def tables_of(facts: Mapping[str, Any]) -> dict[str, StoredTable]:
    """The tables of a checkpoint by their keys, from `Stored.facts`."""
    found: dict[str, StoredTable] = {}
    for rank, tables in enumerate(facts["tables"]):
        for name, whole_rows, own_rows, columns in tables:
            key = name if whole_rows is not None else f"{name}/rank{rank}"
            rows = own_rows if whole_rows is None else whole_rows
            found[key] = StoredTable(rows, {column: (dtype, (width,)) for column, dtype, width in columns})
    return found


def empty(table: StoredTable, column: str) -> Tensor:
    """A tensor for all rows of a table's column, [rows, ...], undefined."""
    dtype, shape = table.columns[column]
    return torch.empty((table.rows, *shape), dtype=getattr(torch, dtype), device="cpu")
