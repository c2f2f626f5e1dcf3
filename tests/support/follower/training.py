"""A training that saves as `guard.save` does, for tests of followers: two ranks in one process, two tables.

Each rank's rows go through a writer of its own, in the order of `ecemb.checkpoint.CheckpointWriter`. A life
begins from the newest checkpoint, as `protect(resume=)` does after a loss of all memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.check_n_run.durable import DurableTier
from baselines.check_n_run.following import Increments
from baselines.check_n_run.manifest import facts_of
from baselines.check_n_run.quantize_scheme import EXACT, Scheme
from ecemb.checkpoint import DifferentialWriter, Follower, IncrementReader, Piece, Snapshot
from ecemb.checkpoint.folder_store import CheckpointFolder
from ecemb.checkpoint.follower import FullReader

TABLES = {"items": 90, "users": 150}
"""Table -> rows."""
DIM, RANKS = 16, 2
COLUMNS = {"weight": DIM, "sum": 1}
CHUNK_BYTES = 800
FULL = "torch.distributed.checkpoint"
KINDS = {
    FULL: EXACT,
    **{f"{name}, exact": EXACT for name in ("full", "one_shot", "consecutive", "intermittent")},
    **{f"{name}, 4 bits": Scheme("adaptive", 4) for name in ("one_shot", "consecutive", "intermittent")},
}
"""How a training saves: by whom, and how weights are stored."""

Columns = dict[str, dict[str, Tensor]]


def digest(tables: Mapping[str, Mapping[str, Tensor]], dense: Mapping[str, Tensor]) -> str:
    """Of all bytes of all tables, and of what is dense."""
    found = hashlib.sha256(b"".join(dense[name].numpy().tobytes() for name in sorted(dense)))
    for name, columns in sorted(tables.items()):
        for column, rows in sorted(columns.items()):
            found.update(f"{name}.{column}".encode())
            found.update(rows.contiguous().numpy())
    return found.hexdigest()


def values(table: str, column: str, rows: Tensor, step: int) -> Tensor:
    """What a step writes to rows, float32 [m, width]."""
    places = torch.arange(COLUMNS[column])[None, :] + 31 * rows[:, None] + 977 * step + len(table)
    return torch.sin(places.double()).float()


def changed(table: str, step: int) -> Tensor:
    """The rows that a step changes: int64 [m]; step 0 changes all."""
    if step == 0:
        return torch.arange(TABLES[table])
    if step % 3 == 0 and table == "users":
        return torch.arange(0)  # increments without rows of a table
    return torch.from_numpy(np.random.default_rng([step, len(table)]).integers(0, TABLES[table], 6)).unique()


def state(step: int) -> Columns:
    """What there is before a step, if nothing was rounded."""
    found = {name: {column: torch.zeros(rows, width) for column, width in COLUMNS.items()}
             for name, rows in TABLES.items()}  # fmt: skip
    for earlier in range(step):
        train_(found, earlier)
    return found


def train_(tables: Columns, step: int) -> None:
    for name, columns in tables.items():
        rows = changed(name, step)
        for column, held in columns.items():
            held[rows] = values(name, column, rows, step)


def head(step: int) -> Tensor:
    """What is dense before a step."""
    return torch.cos(torch.arange(DIM) + step)


def digest_of(snapshot: Snapshot) -> str:
    """Of all that a follower shows."""
    return digest(snapshot.tables, snapshot.dense)


class Log:
    """Lines of JSON that several lives append to one file; a line is there or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, **line: Any) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)

    def lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]


class Training:
    """One life.

    Args:
        folder: of this kind's checkpoints, copies and log of commits.
        kind: of `KINDS`.
        lineage: of the training.
        keep: complete checkpoints that stay.
    """

    def __init__(self, folder: Path, kind: str, *, lineage: str = "one", keep: int = 1) -> None:
        self.store, self.kind, self.lineage, self.keep = store_of(folder), kind, lineage, keep
        self.commits = Log(folder / "commits.jsonl")
        self.writers = [self._writer(folder) for _ in range(RANKS)]
        self.tables, self.next = state(0), 0
        self.dense = {"head": head(0)}
        bounds = {name: [rows * rank // RANKS for rank in range(RANKS + 1)] for name, rows in TABLES.items()}
        self.held = [{name: list(map(range, ends, ends[1:]))[rank] for name, ends in bounds.items()}
                     for rank in range(RANKS)]  # fmt: skip
        stored = self.writers[0].newest()
        if stored is not None:
            self.next = stored.step
            for rank, writer in enumerate(self.writers):
                writer.read(writer.newest() or stored, self.pieces(rank))
            self.commits.add(name=stored.name, step=self.next, digest=digest(self.tables, self.dense))
        for writer, held in zip(self.writers, self.held, strict=True):
            if isinstance(writer, DifferentialWriter):
                writer.follow(held)

    def step(self) -> None:
        for writer, held in zip(self.writers, self.held, strict=True):
            for name, own in held.items():
                rows = changed(name, self.next)
                rows = rows[(rows >= own.start) & (rows < own.stop)] - own.start
                if isinstance(writer, DifferentialWriter) and len(rows):
                    writer.touched(name, rows)
        train_(self.tables, self.next)
        self.next += 1
        self.dense = {"head": head(self.next)}

    def save(self) -> str:
        """As `guard.save`; gives the checkpoint's name. What is exact is logged before it can be seen."""
        facts, first = self.facts(), self.writers[0]
        token = first.prepare(self.next, facts)
        if not token:
            return ""
        name = f"step-{self.next:012d}" if self.kind == FULL else facts_of(token.encode()).name
        receipts: list[str] = []
        for rank, writer in enumerate(self.writers):
            pieces = self.pieces(rank)
            if isinstance(writer, DifferentialWriter):
                writer.take(token, rank, pieces)
                pieces = []
            receipts.append(writer.write(token, rank, RANKS, pieces))
        if KINDS[self.kind] == EXACT:
            self.commits.add(name=name, step=self.next, digest=digest(self.tables, self.dense))
        first.commit(token, facts, receipts)
        if KINDS[self.kind] != EXACT:
            self.commits.add(name=name, step=self.next, digest=self._rounded())
        first.retain(self.keep)
        return name

    def pieces(self, rank: int) -> list[Piece]:
        dense = [Piece(name, tuple(one.shape), 0, one) for name, one in self.dense.items()]
        rows = [
            Piece(f"{name}.{column}", tuple(whole.shape), held.start, whole[held.start : held.stop], name)
            for name, held in self.held[rank].items()
            for column, whole in self.tables[name].items()
        ]
        return rows + (dense if rank == RANKS - 1 else [])

    def facts(self) -> dict[str, Any]:
        columns = [[column, "float32", width] for column, width in COLUMNS.items()]
        tables = [[name, rows, None, columns] for name, rows in TABLES.items()]
        common = {"step": self.next, "lineage": self.lineage, "job": "job", "world_size": RANKS}
        return {**common, "tables": [tables] * RANKS}

    def _writer(self, folder: Path) -> Any:
        if self.kind == FULL:
            return CheckpointFolder(self.store)
        policy, memory, scheme = self.kind.partition(",")[0], folder / "memory", KINDS[self.kind]
        return DurableTier(self.store, memory, policy=policy, weights=scheme, chunk_bytes=CHUNK_BYTES)

    def _rounded(self) -> str:
        """Of what a restore gives, by the way of `protect(resume=)`."""
        reader, own = self._writer(self.store.parent), self.tables
        self.tables = {name: {column: torch.empty_like(rows) for column, rows in columns.items()}
                       for name, columns in own.items()}  # fmt: skip
        stored = reader.newest()
        for rank in range(RANKS):
            reader.read(stored, self.pieces(rank))
        found, self.tables = digest(self.tables, self.dense), own
        return found


def store_of(folder: Path) -> Path:
    """Where checkpoints lie."""
    return folder / "store"


def source_of(folder: Path, kind: str) -> IncrementReader:
    """What a follower reads."""
    store = store_of(folder)
    return FullReader(CheckpointFolder(store)) if kind == FULL else Increments(store)


def follower_of(folder: Path, kind: str) -> Follower:
    """Of both columns of all tables."""
    return followed(source_of(folder, kind))


def followed(source: Any) -> Follower:
    """A follower of all that a training saves."""
    return Follower(source, columns=tuple(COLUMNS), dense={"head": torch.empty(DIM)})
