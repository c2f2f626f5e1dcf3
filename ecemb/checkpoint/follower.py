"""Rows for serving, from the checkpoints of a training that goes on: `Follower`.

Owns the way from one snapshot to the next: increments are applied to copies of the tables that they change,
and the new snapshot then takes the place of the old one by one assignment. So a reader never sees two
checkpoints mixed, and an error leaves the last snapshot in place.

The follower only reads. It holds no lock and leaves no mark, so the writer's retention never waits for it. If
the writer removes a checkpoint that is being read, the follower starts over from the newest one.

A chain of checkpoints is a full one, and increments on top of it. `IncrementReader` is the protocol by which
it is read, and `FullReader` makes any `CheckpointReader` one whose chains have one checkpoint.

Must not know: how checkpoints are stored, arenas, process groups.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import CheckpointFailed, CheckpointMismatch, ConfigurationError
from .folder_store import reader_of
from .interface import CheckpointReader, Piece, Stored

logger: logging.Logger = logging.getLogger("ecemb")


ATTEMPTS: Final = 5
"""Most checkpoints that one refresh begins to read, if the writer removes each of them meanwhile."""
POLL_S: Final = 0.2
"""Default seconds between two looks for a newer checkpoint."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The rows of one checkpoint. It never changes: the next one is another object.

    Attributes:
        name: of the checkpoint.
        step: number of the step that the training runs next after it: all earlier steps are in it, no later.
        tables: table -> column -> its rows, [rows, ...]. Shared: read them only.
        dense: dense parameters and buffers by name. Shared: read them only.
    """

    name: str
    step: int
    tables: Mapping[str, Mapping[str, Tensor]]
    dense: Mapping[str, Tensor] = dataclasses.field(default_factory=dict[str, Tensor])

    @torch.no_grad()
    def rows(self, table: str, ids: Tensor | Sequence[int], column: str = "weight") -> Tensor:
        """Copies rows.

        Args:
            table: its name in the model; of a table that was sharded by hand, "{name}/rank{r}".
            ids: int64 [m], row numbers in the whole table, in any order, repeats allowed. Read.
            column: "weight", or a state of the optimizer.

        Returns:
            [m, ...], on the CPU, of the column's dtype.

        Raises:
            ConfigurationError: no such table, column or row.
        """
        columns = self.tables.get(table)
        if columns is None or column not in columns:
            there = sorted(f"{name}.{one}" for name, held in self.tables.items() for one in held)
            raise ConfigurationError(
                f"this follower has no {column!r} of a table {table!r}; it has {there}: name one of these, "
                "or pass tables= and columns= to the Follower"
            )
        numbers = torch.as_tensor(ids, dtype=torch.int64, device="cpu").reshape(-1)
        held = columns[column]
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(held):
            raise ConfigurationError(
                f"table {table!r} has rows 0 to {len(held) - 1}, and ids has {int(numbers.min())} to "
                f"{int(numbers.max())}: ids are row numbers in the whole table"
            )
        return held.index_select(0, numbers)


@dataclasses.dataclass(frozen=True)
class _Built:
    """A snapshot, with the facts from which the next one is built.

    Attributes:
        snapshot: what readers see.
        chain: the checkpoints that it is made of.
        changed: bool [rows] by table: rows that are not from the chain's first checkpoint.
    """

    snapshot: Snapshot
    chain: Chain
    changed: Mapping[str, Tensor]


class Follower:
    """Follows the checkpoints of a training, and gives rows of the newest one.

    It only reads, and needs no process group. `refresh` and `wait` look for a newer checkpoint, in any
    thread; other threads read rows meanwhile, of one checkpoint at a time. Memory: the tables, once more
    while a checkpoint is applied, and as long as a reader keeps an older `Snapshot`.

    Args:
        source: the folder that the training saves to with `guard.save(path)`; or an `IncrementReader`, which
            reads what has changed only, or any `CheckpointReader`.
        tables: those to follow; None: all.
        columns: those to follow, where a table has them: "weight", and states of the optimizer.
        dense: tensors like the dense parameters and buffers to follow, by the names that the model has for
            them, such as the state_dict() of a model without tables. Of these, dtypes and shapes are read.

    Raises:
        ConfigurationError: `source` is none of these; or it is a URL, which a reader has to be made for.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | IncrementReader | CheckpointReader,
        *,
        tables: Collection[str] | None = None,
        columns: Collection[str] = ("weight",),
        dense: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._dense = {name: (one.dtype, one.shape) for name, one in (dense or {}).items()}
        if not isinstance(source, IncrementReader):
            source = FullReader(reader_of(source, "Follower(source=), if it is no IncrementReader,"))
        self._source = source
        self._tables = None if tables is None else sorted(tables)
        self._columns = sorted(columns)
        self._reading = threading.Lock()
        self._built: _Built | None = None
        self._behind = 0

    @property
    def snapshot(self) -> Snapshot:
        """The newest checkpoint that was read. Take it once for rows that belong together.

        Raises:
            CheckpointFailed: none was read yet.
        """
        built = self._built
        if built is None:
            raise CheckpointFailed(
                f"no checkpoint of {self._source} was read yet: call refresh() or wait(), and see that the "
                f"training saves there"
            )
        return built.snapshot

    @property
    def step(self) -> int:
        """`Snapshot.step` of the newest checkpoint that was read; -1 if none was."""
        built = self._built
        return -1 if built is None else built.snapshot.step

    @property
    def behind(self) -> int:
        """How often the writer removed a checkpoint while it was read, so that reading started over."""
        return self._behind

    def rows(self, table: str, ids: Tensor | Sequence[int], column: str = "weight") -> Tensor:
        """Copies rows of the newest checkpoint that was read; see `Snapshot.rows`.

        Two calls may see two checkpoints: take `snapshot` for rows that belong together.
        """
        return self.snapshot.rows(table, ids, column)

    def refresh(self) -> bool:
        """Reads the newest checkpoint, unless it is the one that was read last.

        Returns:
            Whether there is a new snapshot.

        Raises:
            CheckpointFailed: the newest checkpoint is damaged, or was removed while it was read, and so were
                the next ones; or there is none any more. The last snapshot stays, as after each error.
            CheckpointInsecure: another user could have written it.
            CheckpointMismatch: it is another training's than the one that was read first, or lacks a table.
        """
        with self._reading, torch.no_grad():
            return self._refresh()

    def wait(self, timeout_s: float | None = None, *, poll_s: float = POLL_S) -> bool:
        """Refreshes until there is another snapshot than at the call.

        Args:
            timeout_s: seconds to wait at most; None: without end.
            poll_s: seconds between two looks.

        Returns:
            Whether there is one.

        Raises:
            CheckpointFailed, CheckpointInsecure, CheckpointMismatch: see `refresh`.
        """
        before, deadline = self._built, None if timeout_s is None else time.monotonic() + timeout_s
        while not self.refresh() and self._built is before:
            left_s = poll_s if deadline is None else min(poll_s, deadline - time.monotonic())
            if left_s <= 0:
                return False
            time.sleep(left_s)
        return True

    def _refresh(self) -> bool:
        shown, chain = self._built, self._newest()
        for _ in range(ATTEMPTS):
            if chain is None:
                if shown is None:
                    return False
                raise CheckpointFailed(
                    f"{self._source} has no complete checkpoint any more; rows of step {shown.snapshot.step} "
                    "stay: put the checkpoints back, or make another Follower"
                )
            if shown is not None and chain.links == shown.chain.links:
                return False
            try:
                self._built = self._made(chain)
                return True
            except CheckpointFailed as error:
                newer = self._newest()
                if newer is not None and newer.links[-1] == chain.links[-1]:
                    raise
                self._behind += 1
                logger.warning(
                    "%s: fell behind: %s was removed while it was read (%s); reading the newest one instead",
                    self._source,
                    chain.name,
                    error,
                )
                chain = newer
        raise CheckpointFailed(
            f"{self._source}: {ATTEMPTS} checkpoints one after the other were removed while they were read: "
            "keep more of them (guard.save(keep=)), or save less often"
        )

    def _newest(self) -> Chain | None:
        """The newest chain; tries again if the writer removes a checkpoint while its chain is read."""
        for _ in range(ATTEMPTS - 1):
            try:
                return self._source.chain()
            except CheckpointFailed:
                continue
        return self._source.chain()

    def _made(self, chain: Chain) -> _Built:
        """Builds a chain's snapshot: on the last snapshot, if that gives the same rows, else completely."""
        wanted, shown = self._wanted(chain), self._built
        if shown is None or shown.chain.links[0] != chain.links[0]:
            return self._applied(chain, wanted, 0, None)
        pairs = zip(shown.chain.links, chain.links, strict=False)
        same = next((i for i, (old, new) in enumerate(pairs) if old != new), len(shown.chain.links))
        same = min(same, len(chain.links))
        if same == len(shown.chain.links):
            return self._applied(chain, wanted, same, shown)
        if same == 1:  # an increment on the same full checkpoint, in place of the last one
            bare = dataclasses.replace(shown, changed={key: _none_of(one) for key, one in wanted.items()})
            made = self._applied(chain, wanted, 1, bare)
            if not any(bool((rows & ~made.changed[key]).any()) for key, rows in shown.changed.items()):
                return made
        return self._applied(chain, wanted, 0, None)

    def _applied(
        self, chain: Chain, wanted: Mapping[str, StoredTable], same: int, on: _Built | None
    ) -> _Built:
        """Applies a chain's links from number `same` on to copies of the tables of `on`, or to new tables."""
        tables: dict[str, dict[str, Tensor]] = {}
        changed: dict[str, Tensor] = {}
        fresh = {key for link in chain.links[same:] for key in link.tables & wanted.keys()}
        for key, table in wanted.items():
            if on is None:
                tables[key] = {column: empty(table, column) for column in table.columns}
                changed[key] = _none_of(table)
            elif key in fresh:
                tables[key] = {column: rows.clone() for column, rows in on.snapshot.tables[key].items()}
                changed[key] = on.changed[key].clone()
            else:
                tables[key], changed[key] = dict(on.snapshot.tables[key]), on.changed[key]
        for number, link in enumerate(chain.links[same:], same):
            into: Tables = {key: tables[key] for key in sorted(link.tables & wanted.keys())}
            for key, rows in self._source.apply_(link, into).items() if into else ():
                if number:
                    changed[key][slice(None) if rows is None else rows] = True
        dense = {
            name: torch.empty(shape, dtype=dtype, device="cpu")
            for name, (dtype, shape) in self._dense.items()
        }
        if dense:
            self._source.dense_(dense)
        return _Built(Snapshot(chain.name, chain.step, tables, dense), chain, changed)

    def _wanted(self, chain: Chain) -> dict[str, StoredTable]:
        """The tables to follow, with the columns to follow.

        Raises:
            CheckpointMismatch: some are missing, or the chain is another training's than before.
        """
        keys = sorted(chain.tables) if self._tables is None else self._tables
        if missing := [key for key in keys if key not in chain.tables.keys() & chain.links[0].tables]:
            raise CheckpointMismatch(
                f"{chain.name} in {self._source} (job {chain.job!r}) has no table {missing[0]!r}; it has "
                f"{sorted(chain.tables)}: follow the folder of the right model, or name other tables="
            )
        wanted = {key: _only(chain.tables[key], self._columns) for key in keys}
        if bare := [key for key, table in wanted.items() if not table.columns]:
            raise CheckpointMismatch(
                f"table {bare[0]!r} of {chain.name} in {self._source} has none of columns={self._columns}; "
                f"it has {sorted(chain.tables[bare[0]].columns)}: name some of these"
            )
        if self._built is not None:
            before = self._built.chain
            followed = before.tables if self._tables is None else self._tables
            then = {key: _only(before.tables[key], self._columns) for key in followed}
            if before.training != chain.training or then != wanted:
                raise CheckpointMismatch(
                    f"{self._source} now holds checkpoints of another training (job {chain.job!r}, step "
                    f"{chain.step}) than those that were followed (job {before.job!r}, step {before.step}), "
                    "whose rows stay: make another Follower for it, or save it to another folder"
                )
        return wanted


def _only(table: StoredTable, columns: Collection[str]) -> StoredTable:
    kept = {name: described for name, described in table.columns.items() if name in columns}
    return dataclasses.replace(table, columns=kept)


def _none_of(table: StoredTable) -> Tensor:
    return torch.zeros(table.rows, dtype=torch.bool, device="cpu")


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
        self._stored: Stored  # of the last chain

    def __str__(self) -> str:
        return str(self._reader)

    def chain(self) -> Chain | None:
        """See `IncrementReader`."""
        stored = self._reader.newest()
        if stored is None:
            return None
        self._stored = stored
        facts, tables = stored.facts, tables_of(stored.facts)
        link = Link(stored.name, frozenset(tables), str(facts.get("save", "")))
        return Chain((link,), stored.step, str(facts.get("lineage", "")), str(facts.get("job", "")), tables)

    def apply_(self, link: Link, tables: Tables) -> Mapping[str, Tensor | None]:
        """See `IncrementReader`."""
        pieces = [
            Piece(f"{table}.{column}", tuple(tensor.shape), 0, tensor, table)
            for table, columns in tables.items()
            for column, tensor in columns.items()
        ]
        self._reader.read(self._stored, pieces)
        return dict.fromkeys(tables)

    def dense_(self, tensors: Mapping[str, Tensor]) -> None:
        """See `IncrementReader`."""
        pieces = [Piece(name, tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()]
        self._reader.read(self._stored, pieces)


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
