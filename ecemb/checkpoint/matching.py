"""Which stored values the tables of a training are read from, where the two are not the same.

Owns the rules by which stored tables stand for the tables of a model: other names (`renamed=`), TorchRec's
ranges of columns, and the engines' names of one optimizer state. A rule that is broken is a text in a list,
so that an error can name all of them. A table is *described* as in a checkpoint's facts:
[name, rows of the whole table or None, else rows of the rank's own, [[column, dtype, width], ...]].

Must not know: arenas, other ranks' memory, how checkpoints are stored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..coding.rows import PART, base

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
        values: which values of a stored row.
        into: the place of these values in a row of the table.
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
        """Whether a stored row is a row of a column of this width."""
        return self.values == self.into == slice(0, width) and self.shape[1] == width


Sources = dict[str, list[Source]]
"""Tensors of a rank's tables, by name ("{table}.{column}"), and the stored values that they are read from."""


@dataclasses.dataclass(frozen=True)
class Stored:
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


def stored_tables(facts: Mapping[str, Any]) -> dict[str, list[Stored]]:
    """The tables of a checkpoint whose order over ranks is known, by base name, in the order of columns."""
    found: dict[str, dict[str, Stored]] = {}
    for of_rank in facts["tables"]:
        for name, rows, _, columns in of_rank:
            if rows is not None:
                held = {column: (dtype, width) for column, dtype, width in columns}
                one = Stored(name, _range(name, held[WEIGHT][1]), rows, held)
                found.setdefault(base(name), {})[name] = one
    return {name: sorted(parts.values(), key=lambda one: one.values.start) for name, parts in found.items()}


def by_hand(facts: Mapping[str, Any]) -> set[str]:
    """Names of the checkpoint's tables that were sharded by hand."""
    return {table[0] for of_rank in facts["tables"] for table in of_rank if table[1] is None}


@dataclasses.dataclass(frozen=True)
class Match:
    """The tables of a rank against those of a checkpoint.

    Attributes:
        facts: of the checkpoint.
        everywhere: names of the tables of all ranks.
        renamed: base name of a table -> its base name in the checkpoint, where the two differ.
        states: whether state of optimizers is read, and has to be the same.
    """

    facts: Mapping[str, Any]
    everywhere: Collection[str]
    renamed: Mapping[str, str]
    states: bool = True

    @functools.cached_property
    def stored(self) -> dict[str, list[Stored]]:
        """See `stored_tables`."""
        return stored_tables(self.facts)

    @functools.cached_property
    def by_hand(self) -> set[str]:
        """See `by_hand`."""
        return by_hand(self.facts)

    @functools.cached_property
    def widths(self) -> dict[str, int]:
        """Values of a row, by base name, of tables of this training that are sharded by columns."""
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
        parts: Sequence[Stored], mine: range, column: str, dtype: str, size: int, *, by_row: bool
    ) -> list[Source]:
        """The stored values of one column; less than all if some have no place in the checkpoint."""
        taken: list[Source] = []
        for part in parts:
            start, stop = _both(part.values, mine)
            names = [column] if column in part.columns or by_row else [_SAME_STATE.get(column, column)]
            stored = next((one for one in names if one in part.columns), None)
            if start >= stop or stored is None or part.columns[stored][0] != dtype:
                continue
            width = part.columns[stored][1]
            if width != len(part.values):  # a value for each row: of exactly these columns
                values = slice(0, size) if part.values == mine and width == size else None
                into = slice(0, size)
            else:
                values = slice(start - part.values.start, stop - part.values.start)
                into = slice(start - mine.start, stop - mine.start)
            if values is not None and into.stop <= size:
                taken.append(Source(part.name, stored, (part.rows, width), values, into))
        return taken


def _both(one: range, other: range) -> tuple[int, int]:
    """The first value of both ranges, and the end."""
    return max(one.start, other.start), min(one.stop, other.stop)
