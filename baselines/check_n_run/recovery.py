"""Check-N-Run as a method: `baselines.rollback`, with checkpoints of what has changed, written beside it.

At a checkpoint, training waits until the one before it is whole (published: never two at a time), and for the
copy of the rows that go into it, and of all other state, which is always taken whole; all else happens in the
background. The first checkpoint is full. All ranks choose alike, from sizes that they know alike.

A checkpoint may be restored into another number of ranks. Rows go by their place in the whole table; what a
rank had alone comes from the rank of the same number, or from rank 0 if there was none, and random generators
start over. So what `Training.state` has, as the position in the data, must mean the same in any number of
ranks, or the number stays. Tables that are sharded by hand ask for the same number.

Parameters: one whole checkpoint is kept, with all that it stands on (chosen); chunks of 16 MiB (chosen); rank
0 waits for the others for half an hour, which is the paper's default interval (chosen).

Must not know: how a checkpoint is written, how rows are stored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from baselines.method import Costs, Training
from baselines.rollback import Rollback
from baselines.state import Table, TrainingState
from baselines.stopwatch import Stopwatch
from ecemb.errors import ConfigurationError

from .background import Background
from .buffer import Buffer, Rows
from .codec import schemes_of
from .manifest import OWN, SHARED, Facts, Manifest, drawn, number_of
from .model_tracker import ModelTracker, last_name
from .policy import policy_of
from .quantize_scheme import EXACT, Scheme
from .restoring import Shard, described, last_chain, rest, rows
from .retention import kept
from .store import PacedReads, store_at
from .tracking import TouchedRows
from .writing import CHUNK_BYTES, WriteTask, above_zero

PATIENCE = timedelta(minutes=30)


class ShardedTable(Table, Protocol):
    """One of `ecemb.tables`."""

    rows: int

    @property
    def whole(self) -> tuple[int, int] | None:
        """Where the shard stands in the whole table: its first row, and the whole's rows; None: unknown."""
        ...


class CheckNRun(Rollback):
    """Differential checkpoints, written in the background. All ranks.

    Args:
        target: a folder that all ranks see, or any URL that fsspec knows; of this job alone.
        memory: folder of this rank's machine alone, on tmpfs, for the copy; the job's own.
        policy: of `policy.POLICIES`.
        every: steps between checkpoints; or
        mtbf: mean time between failures of the whole job, for Young's interval.
        weights: how they are stored; or how many restores the job expects, by which `choose_bits` says how.
        states: how per-row optimizer state is stored.
        keep: whole checkpoints that stay, with all that they stand on.
        process: written by a process of its own, else by a thread; `memory://` needs a thread.
        bytes_per_s: a rank writes, or reads, at most this much, on average; None: as fast as it goes.
        chunk_bytes: rows of an object take at most this many, but for one row.
        model_tracker: changes of TorchRec's tables are noted by its own `ModelDeltaTracker`, not by bits.
        patience: how long rank 0 waits until the other ranks have written, when it has.
        progress: progress bars on stderr.
        options: of fsspec's file system.

    Raises:
        ValueError: not exactly one of `every` and `mtbf`, or it is not above 0; no such policy or protocol; a
            number that is not above 0, or, of restores, below it.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        memory: Path,
        *,
        policy: str = "intermittent",
        every: int | None = None,
        mtbf: timedelta | None = None,
        weights: Scheme | float = EXACT,
        states: Scheme = EXACT,
        keep: int = 1,
        process: bool = True,
        bytes_per_s: float | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        model_tracker: bool = False,
        patience: timedelta = PATIENCE,
        progress: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every, mtbf, behind=1)
        above_zero(keep=keep, chunk_bytes=chunk_bytes, bytes_per_s=bytes_per_s)
        if process and os.fspath(target).startswith("memory://"):
            raise ValueError("memory:// is seen by one process alone: give process=False, or another target")
        self._name, self._policy = policy, policy_of(policy)
        self._weights, self._states = weights, states
        self._restores = 0
        self._target, self._options = os.fspath(target), dict(options or {})
        self._files = store_at(self._target, self._options)
        self._memory, self._process = memory, process
        self._settings: dict[str, Any] = {
            "chunk_bytes": chunk_bytes,
            "bytes_per_s": bytes_per_s,
            "keep": keep,
            "patience_s": patience.total_seconds(),
            "progress": progress,
        }
        self._touching = Stopwatch()
        self._touched: dict[str, TouchedRows] = {}
        self._wants_tracker = model_tracker
        self._tracker: ModelTracker | None = None
        self._ends: list[Callable[[], None]] = []
        self._last: Facts | None = None
        self._own_bytes: dict[str, int] = {}
        self._needs: dict[str, Sequence[str]] = {}
        self._number = self._written_bytes = self._memory_bytes = 0
        self.promise = replace(self.promise, bit_identical=weights == EXACT and states == EXACT)
        schemes_of(weights, states, 0)  # raises

    def prepare(self, training: Training) -> int:
        """See `Rollback.prepare`."""
        self._buffer = Buffer(self._memory / f"rank-{dist.get_rank()}")
        self._background = Background(self._target, self._options, process=self._process)
        self._tracker = ModelTracker.of(training.model) if self._wants_tracker else None
        return super().prepare(training)

    def memory(self) -> Sequence[Path]:
        """The copy."""
        return [self._buffer.path] if self._buffer.path.exists() else []

    def costs(self) -> Costs:
        """Of this life until now, in whole checkpoints."""
        stored = kept(self._needs, self._settings["keep"]) if self._needs else ()
        return Costs(
            stalled_s=self._stalled.seconds + self._touching.seconds,
            written_bytes=self._written_bytes,
            stored_bytes=sum(self._own_bytes.get(name, 0) for name in stored),
            memory_bytes=self._memory_bytes,
        )

    def close(self) -> None:
        """Waits until what is being saved is whole. All ranks."""
        with self._stalled.running():
            self._finish()
        for end in self._ends:
            end()
        self._background.close()
        self._buffer.remove()

    def _restore(self, state: TrainingState) -> int | None:
        """See `Rollback`.

        Raises:
            Damaged: the newest checkpoint can't be read as it was written, or stands on some that are gone.
            ValueError: it is another training's.
        """
        told: list[Any] = [None, 0]
        rank = dist.get_rank()
        if rank == 0:
            told = [last_chain(self._files), max(map(_number, self._files.paths()), default=0)]
        dist.broadcast_object_list(told, src=0)
        checkpoints: list[Manifest] | None = told[0]
        self._number = told[1]
        if checkpoints is None:
            self._watch(state)
            return None
        last = checkpoints[-1]
        ranks = last.facts.world_size
        source = rank if rank < ranks else 0
        files = PacedReads(self._files, self._settings["bytes_per_s"])
        state.put(rest(files, last, [source]), resharded=ranks != dist.get_world_size())
        self._watch(state)
        shards = [Shard(_key(table), *_place(table), table.tensors) for table in state.tables if table.rows]
        rows(files, checkpoints, shards, self._changed, progress=self._settings["progress"])
        self._restores = last.facts.restores + 1
        if last.facts.policy == self._name:  # else the next checkpoint is full: it knows of other rows
            self._last = last.facts
        for one in checkpoints:
            self._know(one.facts, sum(receipt.size_bytes for receipt in one.ranks if receipt.rank == rank))
        return last.facts.step

    def _store(self, step: int, state: TrainingState) -> None:
        self._finish()
        self._memory_bytes = max(self._memory_bytes, self._read_tracker(state.tables))
        full = self._last is None or self._policy.takes_full(self._last.sizes)
        taken = [
            Rows(
                _key(table),
                _place(table)[0],
                table.tensors,
                None if full else self._touched[_key(table)].numbers(),
            )
            for table in state.tables
            if table.rows
        ]
        facts = self._agree(step, state, taken, full=full)
        own, shared = state.rest()
        copy = self._buffer.fill(taken, {OWN: own, SHARED: shared} if dist.get_rank() == 0 else {OWN: own})
        if full or self._policy.is_chained:
            for touched in self._touched.values():
                touched.clear()
        bits = sum(touched.memory_bytes for touched in self._touched.values())
        self._memory_bytes = max(self._memory_bytes, self._buffer.memory_bytes + bits)
        self._background.start(WriteTask(facts, dist.get_rank(), copy, **self._settings))
        self._last = facts

    def _agree(self, step: int, state: TrainingState, taken: Sequence[Rows], *, full: bool) -> Facts:
        """The facts of the next checkpoint. All ranks."""
        all_bytes = sum(tensor.nbytes for table in state.tables for tensor in table.tensors.values())
        tables = {
            _key(table): {"rows": _place(table)[2], "tensors": described(table.tensors)}
            for table in state.tables
            if table.rows
        }
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, (drawn(), sum(map(_size, taken)), all_bytes, tables))
        nonce = said[0][0]
        changed, whole = (sum(one[place] for one in said) for place in (1, 2))
        everywhere: dict[str, Any] = {}
        for *_, of_rank in said:
            everywhere |= of_rank
        needs: tuple[str, ...] = ()
        sizes: tuple[float, ...] = ()
        if not full and self._last is not None:
            needs = self._policy.needs(self._last.name, self._last.needs)
            sizes = (*self._last.sizes, changed / max(1, whole))
        self._number += 1
        return Facts(
            self._number,
            nonce,
            step,
            len(said),
            self._name,
            needs,
            sizes,
            everywhere,
            schemes_of(self._weights, self._states, self._restores),
            self._restores,
        )

    def _finish(self) -> None:
        """Waits for the checkpoint in the making."""
        if (done := self._background.wait()) is not None:
            job, receipt = done
            self._written_bytes += receipt.size_bytes
            self._know(job.facts, receipt.size_bytes)

    def _know(self, facts: Facts, own_bytes: int) -> None:
        """A checkpoint is whole."""
        self._own_bytes[facts.name], self._needs[facts.name] = own_bytes, facts.needs

    def _watch(self, state: TrainingState) -> None:
        """From here on, follows the rows of all tables."""
        for table in state.tables:
            touched = self._touched[_key(table)] = TouchedRows(table.rows)
            if self._tracker is not None and last_name(table.name) in self._tracker.tables:
                continue
            with suppress(ConfigurationError):  # nothing trains it: no row of it ever changes
                self._ends.append(table.on_touch(self._timed(touched.touch)))

    def _read_tracker(self, tables: Sequence[ShardedTable]) -> int:
        """Marks the rows that TorchRec has noted; returns the bytes that it took for them."""
        if self._tracker is None:
            return 0
        memory_bytes = self._tracker.memory_bytes
        found = self._tracker.read()
        for table in tables:
            if (rows := found.get(last_name(table.name))) is not None:
                self._touched[_key(table)].touch(rows)
        return memory_bytes

    def _timed(self, touch: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def hook(numbers: Tensor) -> None:
            with self._touching.running():
                touch(numbers)

        return hook

    def _changed(self, shard: Shard, numbers: Tensor) -> None:
        """Rows that the checkpoint restored has, on top of a full one."""
        if not self._policy.is_chained:
            self._touched[shard.table].touch(numbers)


def _number(path: str) -> int:
    return number_of(path) or 0


def _key(table: ShardedTable) -> str:
    """Of a table in a checkpoint: a table that is sharded by hand is one for each rank."""
    return table.name if table.whole is not None else f"{table.name}/rank{dist.get_rank()}"


def _place(table: ShardedTable) -> tuple[int, int, int]:
    """Where a shard begins in the whole table, its rows, and those of the whole."""
    start, whole_rows = table.whole or (0, table.rows)
    return start, table.rows, whole_rows


def _size(rows: Rows) -> int:
    """Bytes of the rows' tensors."""
    count = len(rows.tensors["weight"]) if rows.numbers is None else len(rows.numbers)
    return sum(count * tensor[:1].nbytes for tensor in rows.tensors.values())
