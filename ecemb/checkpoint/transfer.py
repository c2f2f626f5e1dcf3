"""Tables that a new training begins with: rows of another training's checkpoint.

Owns `Transfer`, the check of all of it before anything is written, and the reading of rows by their ids.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..coding.rows import base
from ..errors import CheckpointMismatch, ConfigurationError
from .interface import CheckpointReader, Piece, Stored
from .matching import Match, Source, Sources

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
        rows: ids in `source` by table: row i takes row rows[key][i] of the stored table, and begins fresh
            where that is -1, or beyond the end. A range, or integers [at most the rows of the whole table],
            as a sequence, an array or a tensor; the same on all ranks. range(n) takes the first n rows as
            they are. Needed where the numbers of rows differ.
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
    """What this rank reads for a transfer.

    Attributes:
        stored: the checkpoint.
        sources: the stored values of each tensor.
        rows: ids in the source by base name, for tables whose rows are not the same.
        names: base names of the tables that are taken, on any rank.
    """

    stored: Stored
    sources: Sources
    rows: Mapping[str, Sequence[int] | Ids]
    names: tuple[str, ...]


def examine(
    transfer: Transfer, stored: Stored, tables: Sequence[Sequence[Any]], everywhere: Collection[str]
) -> tuple[Taking, list[str]]:
    """What this rank would read, and everything that doesn't fit.

    Args:
        transfer: what the user asks for.
        stored: the checkpoint.
        tables: this rank's tables, described as in a checkpoint's facts.
        everywhere: names of the tables of all ranks.

    Returns:
        The former, and a text for each thing that doesn't fit.
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
