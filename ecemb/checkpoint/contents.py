"""The content of a checkpoint: its tensors, their names, and the way back into a job.

Owns the names of tensors in a checkpoint:

    {table}.{column}            rows of a table of ecemb.nn or TorchRec, as one tensor in the table's order;
                                columns are "weight" and the optimizer's states ("sum", "momentum1", ...); a
                                table that is sharded by columns is one table per range of columns
    {table}/rank{r}.{column}    a table that was sharded by hand, whose order over ranks ecemb doesn't know
    {name}                      dense parameters and buffers, as the model names them
    optimizers.{i}.state.{j}.{name}    dense optimizer state; i counts optimizers with dense parameters
    ecemb/outline               replicated state without its tensors (`outline`)
    rank_state/{r}              a rank's packed state (`state.rank_state`)

Must not know: how checkpoints are stored, other ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..coding.rows import Column, TableLayout, base
from ..errors import CheckpointMismatch, ConfigurationError
from ..memory.rank_memory import RankMemory, StateStore
from ..state import rank_state as rank_states
from ..state.flatten import blank, in_front, outline_of, unpacked
from ..state.rank_state import RankState, scalars_in
from ..state.replicated import ReplicatedState
from .folder_store import one_tells
from .interface import CheckpointReader, Piece, Stored
from .transfer import Match, Sources, Taking, read_ids, read_pieces

FORMAT = 2
CHUNK_BYTES = 1 << 27
OUTLINE = "ecemb/outline"
Read = Callable[[Stored, Sequence[Piece]], None]
"""As `CheckpointReader.read`."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """The position of a rank's rows in the whole table.

    Attributes:
        layout: the shard's layout.
        start: the whole table's row at which the shard begins.
        rows: rows of the whole table; None if its order over the ranks isn't known.
    """

    layout: TableLayout
    start: int = 0
    rows: int | None = None

    def key(self, rank: int) -> str:
        """The table's key in a checkpoint; a table that is sharded by hand has one key per rank."""
        return self.layout.name if self.rows is not None else f"{self.layout.name}/rank{rank}"

    def describe(self) -> list[Any]:
        """The properties that must be the same at a resume, as plain values."""
        columns = [[c.name, c.dtype, _width(c.dtype, c.row_bytes)] for c in self.layout.columns]
        return [self.layout.name, self.rows, self.layout.rows if self.rows is None else None, columns]


@dataclasses.dataclass(frozen=True)
class JobIdentity:
    """A job, as its checkpoints describe it.

    Attributes:
        name: the job's name.
        lineage: random, made at the fresh start; a job that resumes from a checkpoint keeps the checkpoint's.
        code: (n, k).
    """

    name: str
    lineage: str
    code: tuple[int, int]


# --- into a checkpoint -----------------------------------------------------------------------------


def _width(dtype: str, row_bytes: int) -> int:
    return row_bytes // getattr(torch, dtype).itemsize


def values_of(column: Column, rows: NDArray[np.uint8]) -> torch.Tensor:
    """The values in a column's bytes (uint8 [rows, row_bytes], contiguous): [rows, width], a view."""
    values = torch.from_numpy(rows.reshape(-1)).view(getattr(torch, column.dtype))
    return values.reshape(len(rows), _width(column.dtype, column.row_bytes))


def _rows(memory: RankMemory, shards: Sequence[Shard]) -> list[Piece]:
    """This rank's rows: views of the arena, cut into runs of at most CHUNK_BYTES."""
    pieces: list[Piece] = []
    for shard, table in zip(shards, memory.space.tables, strict=False):
        key = shard.key(memory.rank)
        for column, values in zip(shard.layout.columns, table.columns, strict=True):
            rows, width = values_of(column, values), _width(column.dtype, column.row_bytes)
            shape = (shard.layout.rows if shard.rows is None else shard.rows, width)
            run = max(1, CHUNK_BYTES // max(1, column.row_bytes))
            for at in range(0, shard.layout.rows, run) or ([0] if shard.rows is None else []):
                part = rows[at : at + run]
                pieces.append(Piece(f"{key}.{column.name}", shape, shard.start + at, part, key))
    return pieces


def _whole(key: str, tensor: torch.Tensor) -> Piece:
    return Piece(key, tuple(tensor.shape), 0, tensor)


def _bytes(key: str, data: NDArray[np.uint8]) -> Piece:
    return _whole(key, torch.from_numpy(data))


def _dense(slot: NDArray[np.uint8], rank: int, world_size: int) -> list[Piece]:
    """The tensors of replicated state that this rank writes; the ranks share the bytes about equally."""
    _, names, tensors = unpacked(slot)
    whole = [_whole(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
    whole.append(_bytes(OUTLINE, in_front(slot)))
    loads = [0] * world_size
    mine: list[Piece] = []
    for piece in sorted(whole, key=lambda piece: (-piece.tensor.nbytes, piece.key)):
        writer = loads.index(min(loads))
        loads[writer] += piece.tensor.nbytes
        if writer == rank:
            mine.append(piece)
    return mine


def account(memory: RankMemory, shards: Sequence[Shard], replicated: ReplicatedState) -> dict[str, Any]:
    """This rank's description of the state that it would save, as plain values."""
    step = memory.committed
    front = in_front(memory.slots.read(step))
    return {
        "step": step,
        "dense": replicated.digest(),
        "names": blank(outline_of(front))[0] if memory.rank == 0 else [],
        "outline": len(front),
        "tables": [shard.describe() for shard in shards],
        "rank_state": len(rank_states.read(memory.rank_state)),
    }


def facts_of(job: JobIdentity, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of a checkpoint, from all ranks' accounts.

    Raises:
        ConfigurationError: two tensors would have one name, or ranks differ in a table of ecemb.nn.
    """
    tables = [one["tables"] for one in answers]
    _check_names(answers[0]["names"], tables)
    return {
        "format": FORMAT,
        "job": job.name,
        "lineage": job.lineage,
        "step": answers[0]["step"],
        "world_size": len(answers),
        "code": list(job.code),
        "torch": torch.__version__,
        "tables": tables,
        "rank_state_bytes": [one["rank_state"] for one in answers],
        "outline_bytes": answers[0]["outline"],
    }


def pieces_of(memory: RankMemory, slots: StateStore, shards: Sequence[Shard], world_size: int) -> list[Piece]:
    """The pieces that one rank writes: views of the arena, which the next step overwrites.

    Args:
        memory: the rank's.
        slots: hold all of the replicated state of the last committed transaction.
        shards: the rank's tables.
        world_size: number of ranks.
    """
    state = np.frombuffer(bytearray(rank_states.read(memory.rank_state)), np.uint8)
    pieces = _rows(memory, shards)
    pieces += _dense(slots.read(memory.committed), memory.rank, world_size)
    return [*pieces, _bytes(f"rank_state/{memory.rank}", state)]


def _whole_tables(tables: Sequence[Sequence[Sequence[Any]]]) -> dict[str, list[list[Any]]]:
    """Name -> descriptions of each table whose order over ranks is known: one, if the ranks agree."""
    found: dict[str, list[list[Any]]] = {}
    for table in (list(table) for of_rank in tables for table in of_rank if table[1] is not None):
        if table not in found.setdefault(table[0], []):
            found[table[0]].append(table)
    return found


def _check_names(dense: Sequence[str], tables: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Raises ConfigurationError if two tensors have one name."""
    whole = _whole_tables(tables)
    if differing := {name: said for name, said in whole.items() if len(said) > 1}:
        raise ConfigurationError(
            f"a table must have the same shape and columns on all ranks that have a part of it to be saved; "
            f"these differ: {'; '.join(_shown(one) for said in differing.values() for one in said)}. Build "
            f"them alike, or give them different names"
        )
    taken = {f"{name}.{column[0]}" for name, (table,) in whole.items() for column in table[3]}
    if both := sorted(taken.intersection(dense)):
        raise ConfigurationError(
            f"{both} would name both a table's tensor and a dense one in a checkpoint: give the table "
            f"another key in tables="
        )


# --- out of a checkpoint ---------------------------------------------------------------------------


def check_format(stored: Stored) -> None:
    """Raises CheckpointMismatch unless this version of ecemb reads the checkpoint."""
    if stored.facts["format"] != FORMAT:
        raise CheckpointMismatch(
            f"{stored.name} has format {stored.facts['format']}, and this ecemb reads format {FORMAT}: use "
            f"the version of ecemb that wrote it"
        )


def check(
    stored: Stored,
    shards: Sequence[Shard],
    rank: int,
    world_size: int,
    everywhere: Collection[str],
    renamed: Mapping[str, str],
) -> Sources:
    """The stored values that this rank's tables are read from.

    Args:
        stored: the checkpoint.
        shards: this rank's tables.
        rank: this rank.
        world_size: number of ranks now.
        everywhere: names of the tables of all ranks.
        renamed: base name of a table -> its base name in the checkpoint, where the two differ.

    Raises:
        CheckpointMismatch: the checkpoint doesn't fit this rank's tables, or the number of ranks.
    """
    facts = stored.facts
    check_format(stored)
    match = Match(facts, everywhere, renamed)
    hand = match.by_hand | {shard.layout.name for shard in shards if shard.rows is None}
    if hand and facts["world_size"] != world_size:
        raise CheckpointMismatch(
            f"{stored.name} was saved by {facts['world_size']} ranks, and these are {world_size}: tables "
            f"{sorted(hand)} are of their ranks (sharded by hand, maps of ids, or in groups of ranks), so "
            f"ecemb can't shard them again. Start {facts['world_size']} ranks. Of tables that are sharded by "
            f"hand, ecemb.protect(shards=) says where their rows stand, when they are saved and here"
        )
    problems = list(match.problems_of_names())
    sources: Sources = {}
    mine = [shard.describe() for shard in shards]
    then = [table for table in facts["tables"][rank] if table[1] is None] if hand else []
    for table in mine:
        if table[1] is not None:
            sources |= match.sources(table, match.then(table[0]), problems)
        elif table not in then:
            problems.append(f"{_shown(table)} is not there")
    problems += [f"{_shown(table)} is only there" for table in then if table not in mine]
    left = match.stored.keys() - {match.then(name) for name in everywhere}
    problems += [f"table {name!r} is only there" for name in sorted(left)]
    if problems:
        raise CheckpointMismatch(
            f"{stored.name} (job {facts['job']!r}) holds other tables than this model has on rank {rank}: "
            f"{'; '.join(problems)}. Run the script that saved it, give other names in renamed=, or pass "
            f"another resume="
        )
    return sources


def _shown(table: Sequence[Any]) -> str:
    """The result of `Shard.describe`, in words."""
    name, whole, by_hand, columns = table
    rows = f"{whole} rows in all" if whole is not None else f"{by_hand} rows on this rank"
    held = " and ".join(f"{column} ({width} x {dtype})" for column, dtype, width in columns)
    return f"table {name!r} of {rows} with {held}"


def take(reader: CheckpointReader, taking: Taking, memory: RankMemory, shards: Sequence[Shard]) -> None:
    """Overwrites rows of this rank's tables with those of another training. One rank, by itself.

    Args:
        reader: the reader that found the checkpoint.
        taking: the stored values to read.
        memory: a new arena's, whose tables hold their initial values.
        shards: this rank's tables.

    Raises:
        CheckpointError: the checkpoint can't be read.
    """
    one_tells(reader, memory.rank)
    same: list[Piece] = []
    for piece in _rows(memory, shards):
        if piece.key in taking.sources:
            if (ids := taking.rows.get(base(piece.table or ""))) is None:
                same.append(piece)
            else:
                read_ids(reader, taking.stored, piece, taking.sources[piece.key], ids, CHUNK_BYTES)
    read_pieces(reader, taking.stored, same, taking.sources)


def restore_rows(
    reader: CheckpointReader, stored: Stored, memory: RankMemory, shards: Sequence[Shard], sources: Sources
) -> None:
    """Overwrites this rank's rows with the stored ones. One rank, by itself.

    Args:
        reader: the reader that found `stored`.
        stored: the checkpoint; `check` has passed.
        memory: a new arena's; its rows are overwritten.
        shards: this rank's tables.
        sources: the result of `check`.

    Raises:
        CheckpointError: the checkpoint can't be read, or doesn't fit.
    """
    pieces = _rows(memory, shards)
    read_pieces(reader, stored, [piece for piece in pieces if piece.key in sources], sources)
    if by_hand_too := [piece for piece in pieces if piece.key not in sources]:
        reader.read(stored, by_hand_too)


def restore_state(
    read: Read,
    stored: Stored,
    rank: int,
    world_size: int,
    replicated: ReplicatedState,
    rank_state: RankState,
) -> bytes:
    """Restores replicated state and rank state. One rank, by itself.

    Args:
        read: that of the reader that found `stored`, or of old arenas in place of a checkpoint.
        stored: the checkpoint; `check` has passed.
        rank: this rank.
        world_size: number of ranks now.
        replicated: its model and optimizers are overwritten.
        rank_state: its objects and generators are overwritten.

    Returns:
        The tables' scalars in the rank states that this rank has read, for `RankState.take_scalars` on all
        ranks.

    Raises:
        CheckpointError: the checkpoint can't be read, or doesn't fit.
        LayoutMismatch: dense state doesn't fit the model and its optimizers.
    """
    facts = stored.facts
    outline = torch.empty(facts["outline_bytes"], dtype=torch.uint8, device="cpu")
    read(stored, [_whole(OUTLINE, outline)])
    plain = outline_of(outline.numpy())
    names, blanks = blank(plain)
    tensors = [torch.empty(one.shape, dtype=one.dtype, device="cpu") for one in blanks]
    read(stored, [_whole(name, tensor) for name, tensor in zip(names, tensors, strict=True)])
    replicated.restore(plain, tensors)

    sizes = facts["rank_state_bytes"]
    ranks = states_of(len(sizes), rank, world_size)
    packed = [torch.empty(sizes[one], dtype=torch.uint8, device="cpu") for one in ranks]
    pieces = zip(ranks, packed, strict=True)
    read(stored, [_whole(f"rank_state/{one}", tensor) for one, tensor in pieces])
    states = [tensor.numpy().tobytes() for tensor in packed]
    if rank < len(sizes):
        rank_state.unpack(states[0], positions=len(sizes) == world_size)
    else:
        rank_state.unpack_common(states)
    return scalars_in(states)


def states_of(old_size: int, rank: int, world_size: int) -> Sequence[int]:
    """The ranks of the old job whose states a rank reads: its own first; all, if the old job had fewer ranks.

    At least one rank reads each state: the tables whose scalars are in it may be on any rank now.
    """
    return range(rank, old_size, world_size) if rank < old_size else range(old_size)
