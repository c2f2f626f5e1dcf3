"""Which stored values a training's tables are read from: its own under other names, or another training's.

Owns the rules by which stored tables stand for the tables of a model: other names (`renamed=`), TorchRec's
ranges of columns, and the engines' names of one optimizer state. Each broken rule adds a text to a list, so
that one error can name all of them. A table is *described* as in a checkpoint's facts: [name, rows of the
whole table or None, rows of the rank's own if that is None, [[column, dtype, width], ...]].

Owns `Transfer`, the request that a new training begin with another's tables: the check of all of it before
anything is written, and the reading of rows by their ids.

Must not know: arenas, other ranks' memory, how checkpoints are stored.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..coding.rows import PART, base
from ..errors import CheckpointMismatch, ConfigurationError
from .interface import CheckpointReader, Piece, Stored

Described = Sequence[Any]
"""A table, as the facts of a checkpoint describe it."""

WEIGHT = "weight"
_SAME_STATE = {"sum": "momentum1", "momentum1": "sum"}
"""Adagrad's sum of squares, one for each value of the row, in torch.optim and in FBGEMM."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Stored values that a column of a table, or a range of its values, is read from.

    Attributes:
        table: key of the stored table.
        column: name of the stored column.
        shape: of the stored tensor, [rows, width].
        values: range of the values in a stored row.
        into: range that they fill in a row of the table.
    """

    table: str
    column: str
    shape: tuple[int, int]
    values: slice
    into: slice

    @property
    def key(self) -> str:
        """Name of the stored tensor."""
        return f"{self.table}.{self.column}"

    def is_whole(self, width: int) -> bool:
        """Whether a stored row is read whole, as a row of a column of this width."""
        return self.values == self.into == slice(0, width) and self.shape[1] == width


Sources = dict[str, list[Source]]
"""Name of a tensor of a rank's tables ("{table}.{column}") -> the stored values that it is read from."""


@dataclasses.dataclass(frozen=True)
class StoredRange:
    """A stored table, or a range of its columns that was sharded by itself.

    Attributes:
        name: its key.
        values: the range of the whole table's columns.
        rows: of the whole table.
        columns: name -> (dtype, width).
    """

    name: str
    values: range
    rows: int
    columns: dict[str, tuple[str, int]]

    def held(self) -> str:
        """Its columns, in words."""
        return ", ".join(f"{name} ({width} x {dtype})" for name, (dtype, width) in self.columns.items())


def _range(name: str, width: int) -> range:
    found = PART.fullmatch(name)
    return range(width) if found is None else range(int(found[2]), int(found[3]))


@dataclasses.dataclass(frozen=True)
class Match:
    """Matches the tables of a rank with those of a checkpoint.

    Attributes:
        facts: of the checkpoint.
        everywhere: names of the tables of all ranks.
        renamed: base name of a table -> its base name in the checkpoint, where the two differ.
        states: whether state of optimizers is read, and has to fit.
    """

    facts: Mapping[str, Any]
    everywhere: Collection[str]
    renamed: Mapping[str, str]
    states: bool = True

    @functools.cached_property
    def stored(self) -> dict[str, list[StoredRange]]:
        """The checkpoint's tables whose order over ranks is known, by base name, in the order of columns."""
        found: dict[str, dict[str, StoredRange]] = {}
        for of_rank in self.facts["tables"]:
            for name, rows, _, columns in of_rank:
                if rows is not None:
                    held = {column: (dtype, width) for column, dtype, width in columns}
                    one = StoredRange(name, _range(name, held[WEIGHT][1]), rows, held)
                    found.setdefault(base(name), {})[name] = one
        return {
            name: sorted(parts.values(), key=lambda one: one.values.start) for name, parts in found.items()
        }

    @functools.cached_property
    def by_hand(self) -> set[str]:
        """Names of the checkpoint's tables that were sharded by hand."""
        return {table[0] for of_rank in self.facts["tables"] for table in of_rank if table[1] is None}

    @functools.cached_property
    def widths(self) -> dict[str, int]:
        """Base name -> values of a whole row, for tables of this training that are sharded by columns."""
        found: dict[str, int] = {}
        for name in self.everywhere:
            if part := PART.fullmatch(name):
                found[part[1]] = max(found.get(part[1], 0), int(part[3]))
        return found

    def then(self, name: str) -> str:
        """The base name in the checkpoint of a table of this training.

        A checkpoint that was saved after the renaming has the new name.
        """
        own = base(name)
        return own if own in self.stored else self.renamed.get(own, own)

    def problems_of_names(self) -> Iterator[str]:
        """The rules that `renamed` breaks."""
        stored = {*self.stored, *self.by_hand}
        here = {base(name) for name in self.everywhere}
        for now, then in self.renamed.items():
            if now not in here:
                yield f"renamed= has {now!r}, and this model has no table of this name"
            if then in here:
                yield f"renamed= has {then!r} as an earlier name, and this model has a table of this name"
            elif {now, then} <= stored:
                yield f"renamed= says that {now!r} was {then!r}, and the checkpoint has tables of both names"
        if len(set(self.renamed.values())) < len(self.renamed):
            yield f"renamed= gives one table to several: {dict(self.renamed)}"

    def sources(self, table: Described, then: str, problems: list[str]) -> Sources:
        """The stored values of a table of this rank that is not sharded by hand.

        Args:
            table: the table.
            then: its base name in the checkpoint.
            problems: takes a text for each thing that doesn't fit.

        Returns:
            By tensor; not all of them if there are problems.
        """
        name, rows, _, columns = table
        parts = self.stored.get(then, [])
        if not parts:
            hand = then in self.by_hand
            what = "there it was sharded by hand, in an order that isn't known" if hand else "it isn't there"
            if then != base(name):
                what = f"{what}, as {then!r}"
            problems.append(f"table {name!r}: {what}")
            return {}
        found: list[str] = []
        if parts[0].rows != rows:
            found.append(f"{rows} rows now, and {parts[0].rows} there")
        width = next(width for column, _, width in columns if column == WEIGHT)
        mine = _range(name, width)
        now, before = self.widths.get(base(name), width), parts[-1].values.stop
        if now != before:
            found.append(f"rows of {now} values now, and of {before} there")
        sources: Sources = {}
        for column, dtype, size in columns if now == before else ():
            if column == WEIGHT or self.states:
                taken = self._column(parts, mine, column, dtype, size, by_row=size != width)
                sources[f"{name}.{column}"] = taken
                if sum(one.into.stop - one.into.start for one in taken) != size:
                    found.append(f"{column} ({size} x {dtype}) now, and {parts[0].held()} there")
        if self.states and not found:
            used = {(one.table, one.column) for taken in sources.values() for one in taken}
            parts = [part for part in parts if range(*_both(part.values, mine))]
            left = [f"{part.name}.{one}" for part in parts for one in part.columns]
            left = [key for key in left if key not in {f"{table}.{one}" for table, one in used}]
            found += [f"{key} is there, and this optimizer keeps no such state" for key in left]
        problems += [f"table {name!r}: {text}" for text in found]
        return sources

    @staticmethod
    def _column(
        parts: Sequence[StoredRange], mine: range, column: str, dtype: str, size: int, *, by_row: bool
    ) -> list[Source]:
        """The stored values of one column; not for all its values if some are not in the checkpoint."""
        taken: list[Source] = []
        for part in parts:
            start, stop = _both(part.values, mine)
            names = [column] if column in part.columns or by_row else [_SAME_STATE.get(column, column)]
            stored = next((one for one in names if one in part.columns), None)
            if start >= stop or stored is None or part.columns[stored][0] != dtype:
                continue
            width = part.columns[stored][1]
            if width != len(part.values):  # one value for each row, of exactly these columns
                values = slice(0, size) if part.values == mine and width == size else None
                into = slice(0, size)
            else:
                values = slice(start - part.values.start, stop - part.values.start)
                into = slice(start - mine.start, stop - mine.start)
            if values is not None and into.stop <= size:
                taken.append(Source(part.name, stored, (part.rows, width), values, into))
        return taken


def _both(one: range, other: range) -> tuple[int, int]:
    """Begin and end of the overlap of two ranges; the begin is not below the end if there is none."""
    return max(one.start, other.start), min(one.stop, other.stop)


Ids = NDArray[np.int64]
FRESH = -1


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Tables of another training, for `protect(transfer=)`: the new one begins with their rows.

    Args:
        source: folder that `Guard.save` saved to, or a CheckpointReader. Its newest checkpoint is read, also
            if that training is finished, and nothing is written there.
        tables: the tables to take: keys, or a mapping from a table's key to its key in `source`. None: all of
            the model's. A key is the table's path in the model, without a range of columns. All other
            tables begin as the script makes them.
        rows: ids in `source` by table: row i takes row rows[key][i] of the stored table, and begins fresh if
            that is -1, or if the ids end before i. A range, or integers [at most the rows of the whole
            table], as a sequence, an array or a tensor; the same on all ranks. range(n) takes the first n
            rows as they are. Needed where the numbers of rows differ.
        states: whether to take the optimizer's state of the rows. Without it, state begins fresh, and the
            optimizer may be another one.
    """

    source: str | os.PathLike[str] | CheckpointReader
    tables: Mapping[str, str] | Sequence[str] | None = None
    rows: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    states: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tables, str):
            raise ConfigurationError(
                f"Transfer(tables=) takes keys of tables, as a list or a mapping; it is the string "
                f"{self.tables!r}: write [{self.tables!r}]"
            )
        if not isinstance(self.rows, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"Transfer(rows=) takes a mapping from keys of tables to ids; it is a "
                f"{type(self.rows).__name__}"
            )

    def names(self, everywhere: Collection[str]) -> dict[str, str]:
        """Base name of each table that is taken -> its base name in the source.

        Args:
            everywhere: names of the tables of all ranks.
        """
        if self.tables is None:
            return {base(name): base(name) for name in everywhere}
        return dict(self.tables) if isinstance(self.tables, Mapping) else {name: name for name in self.tables}


@dataclasses.dataclass(frozen=True)
class Taking:
    """The stored values that this rank reads for a transfer.

    Attributes:
        stored: the checkpoint.
        sources: the stored values of each tensor.
        rows: ids in the source by base name, for tables that take rows by id.
        names: base names of the tables that are taken, on any rank.
    """

    stored: Stored
    sources: Sources
    rows: Mapping[str, Sequence[int] | Ids]
    names: tuple[str, ...]


def examine(
    transfer: Transfer, stored: Stored, tables: Sequence[Sequence[Any]], everywhere: Collection[str]
) -> tuple[Taking, list[str]]:
    """Finds the stored values that this rank would read, and everything that doesn't fit.

    Args:
        transfer: what the user asks for.
        stored: the checkpoint.
        tables: this rank's tables, described as in a checkpoint's facts.
        everywhere: names of the tables of all ranks.

    Returns:
        The stored values that this rank would read, and a text for each thing that doesn't fit.
    """
    names = transfer.names(everywhere)
    here = {base(name) for name in everywhere}
    match = Match(stored.facts, everywhere, {}, states=transfer.states)
    problems = [f"table {name!r}: this model has no such table" for name in names if name not in here]
    problems += [f"rows= has {name!r}, which is not taken" for name in transfer.rows if name not in names]
    ids: dict[str, Sequence[int] | Ids] = {}
    sources: Sources = {}
    for table in tables:
        name, rows = base(table[0]), table[1]
        if name not in names:
            continue
        then = names[name]
        if rows is None or then in match.by_hand:
            problems.append(f"table {name!r}: it is sharded by hand, in an order that isn't known")
            continue
        if then in match.stored:
            count = match.stored[then][0].rows
            if name in transfer.rows:
                given = _ids(transfer.rows[name])
                wrong = [given] if isinstance(given, str) else list(_wrong(given, rows, count))
                problems += [f"rows[{name!r}]: {text}" for text in wrong]
                if not isinstance(given, str):
                    ids[name] = given
            elif rows != count:
                problems.append(
                    f"table {name!r}: {rows} rows now, and {count} there: give the ids to take, "
                    f"rows={{{name!r}: ...}}"
                )
            rows = count
        sources |= match.sources([table[0], rows, *table[2:]], then, problems)
    return Taking(stored, sources, ids, tuple(sorted(names))), problems


def refusal(place: str, stored: Stored, problems: Collection[str]) -> CheckpointMismatch:
    """The error that names everything that doesn't fit, on all ranks."""
    return CheckpointMismatch(
        f"{place} ({stored.name} of job {stored.facts['job']!r}) doesn't fit what transfer= takes from it: "
        f"{'; '.join(problems)}. Nothing was taken: take fewer tables, or change what differs"
    )


def _ids(given: Any) -> Sequence[int] | Ids | str:
    """The ids of a table's rows, or why they can't be ids."""
    if isinstance(given, range):
        return given
    array = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        return f"ids are a range or integers [rows]; these are {array.dtype} {list(array.shape)}"
    return array.astype(np.int64, copy=False)


def _wrong(ids: Sequence[int] | Ids, rows: int, stored_rows: int) -> Iterator[str]:
    """The rules that ids break.

    Args:
        ids: by row.
        rows: of the table.
        stored_rows: of the stored table.
    """
    if len(ids) > rows:
        yield f"{len(ids)} ids, and the table has {rows} rows"
    if not len(ids):
        return
    low, high = (min(ids), max(ids)) if isinstance(ids, range) else (int(np.min(ids)), int(np.max(ids)))
    if low < FRESH or high >= stored_rows:
        yield f"ids are in [{low}, {high}], and the stored table has the rows 0 to {stored_rows - 1}"


def read_pieces(
    reader: CheckpointReader, stored: Stored, pieces: Sequence[Piece], sources: Mapping[str, Sequence[Source]]
) -> None:
    """Overwrites pieces of tables with the stored values that stand for them, row by row.

    Args:
        reader: the reader that found `stored`.
        stored: the checkpoint.
        pieces: as this training names them.
        sources: by the pieces' keys.
    """
    alike: list[Piece] = []
    for piece in pieces:
        one, *others = sources[piece.key]
        if not others and one.is_whole(piece.shape[1]):
            alike.append(Piece(one.key, one.shape, piece.start, piece.tensor, one.table))
            continue
        for source in (one, *others):
            rows = piece.tensor.new_empty(len(piece.tensor), source.shape[1])
            reader.read(stored, [Piece(source.key, source.shape, piece.start, rows, source.table)])
            piece.tensor[:, source.into] = rows[:, source.values]
    if alike:
        reader.read(stored, alike)


def read_ids(
    reader: CheckpointReader,
    stored: Stored,
    piece: Piece,
    sources: Sequence[Source],
    ids: Sequence[int] | Ids,
    chunk_bytes: int,
) -> None:
    """Overwrites the rows of a piece that take a stored row; others keep their values.

    Reads the stored rows between the first and the last one that is taken, run by run.

    Args:
        reader: the reader that found `stored`.
        stored: the checkpoint.
        piece: as this training names it.
        sources: of its column.
        ids: by row of the whole table.
        chunk_bytes: most bytes of a run.
    """
    own = np.asarray(ids[piece.start : piece.start + len(piece.tensor)], np.int64)
    rows = np.flatnonzero(own >= 0)
    rows = rows[np.argsort(own[rows], kind="stable")]
    wanted = own[rows]
    for source in sources if len(wanted) else ():
        run = max(1, chunk_bytes // (piece.tensor.element_size() * source.shape[1]))
        at = 0
        while at < len(wanted):
            first = int(wanted[at])
            end = int(np.searchsorted(wanted, first + run))
            held = piece.tensor.new_empty(int(wanted[end - 1]) + 1 - first, source.shape[1])
            reader.read(stored, [Piece(source.key, source.shape, first, held, source.table)])
            values = held[torch.from_numpy(wanted[at:end] - first)][:, source.values]
            piece.tensor[torch.from_numpy(rows[at:end]), source.into] = values
            at = end
