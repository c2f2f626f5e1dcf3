"""Float parity as a method: each step's differences go to the keepers, lost rows are solved for.

At a step's end each rank sends the differences of the rows that it has changed, with their optimizer state.
When all that it keeps parity of have sent theirs, it adds them to its parity and takes its own new rows over
into memory that outlives the process. No more is agreed on: there is no transaction.

What is no row is copied each step: what all ranks share by each, a rank's own (generators, data position) to
the r keepers of its first block.

Must not know: which stripe is where, how messages look.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import ecemb
from baselines import packing
from baselines.method import Costs, Promise, Training
from baselines.ring import Ring
from baselines.rows import distinct
from baselines.slots import Slots, Stamp
from baselines.snapshot.moves import carry_out
from baselines.snapshot.plan import SHARED, own, plan
from baselines.state import TrainingState
from baselines.stopwatch import Stopwatch

from .arithmetic import Ids, clear_signs_, widths
from .coefficients import vandermonde
from .live import Columns, LiveParity
from .memory import Memory
from .stripes import ParityLost, Shape, Stripes
from .wire import Bytes


class ParityPoisoned(RuntimeError):
    """Rows were rebuilt to NaN or infinities."""


class FloatParity:
    """Sums of rows, times real coefficients, at other ranks, updated in each step. All ranks.

    Args:
        folder: of this machine's memory, on tmpfs; the job's own, and another one on each machine.
        code: (n, k): any r = n - k ranks may be lost; as many ranks as n, or more.
        dtype: of parity and of what is sent: float32 or float64.

    Raises:
        ValueError: another dtype.
    """

    interval_steps = 1

    def __init__(self, folder: Path, code: ecemb.Code, *, dtype: str = "float32") -> None:
        if dtype not in ("float32", "float64"):
            raise ValueError(f"dtype is float32 or float64, not {dtype!r}")
        self._code, self._dtype = code, np.dtype(dtype)
        self.promise = Promise(bit_identical=False, steps_again=0, survives=code.n - code.k)
        self._matrix = vandermonde(code.n - code.k, code.k)
        self._path, self._slots = folder / "rows-and-parity", Slots(folder)
        self._parts: _Parts | None = None
        self._stalled = Stopwatch()
        self._moved_bytes = self._memory_bytes = 0

    def prepare(self, training: Training) -> int:
        """Makes parity of the initial rows, or rebuilds what is lost. All ranks.

        Returns:
            The step to run next.

        Raises:
            ParityLost: more is lost than parity can rebuild.
            ParityPoisoned: what it gives are no rows.
            ValueError: fewer ranks than n, a table that is not of floating point, or memory of another job.
        """
        with self._stalled.running():
            _begin_state(training)
            state = TrainingState(training)
            heard = _Touched(training)
            rows = {key: tensor for key, tensor in state.take()[0].items() if key.startswith("table/")}
            for key, tensor in rows.items():
                if tensor.dtype not in (torch.float16, torch.float32, torch.float64):
                    raise ValueError(f"{key} is {tensor.dtype}: of it there are no sums; use floating point")
            tables = heard.grouped(rows)
            shapes: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(shapes, [_shape([rows[key] for key in keys]) for keys in tables])
            stripes = Stripes(Ring(self._code.n, self._code.k, len(shapes)), tuple(map(tuple, shapes)))
            lengths = stripes.parity_lengths(dist.get_rank())
            owner = f"rank {dist.get_rank()} of {len(shapes)}, ({self._code.n}, {self._code.k})"
            memory = Memory(self._path, rows, lengths, self._dtype, owner)
            live = LiveParity(stripes, self._matrix, memory, tables)
            self._parts = parts = _Parts(state, heard, memory, live, tables)
            step = self._begin(parts)
            self._note_memory()
            return step

    @contextmanager
    def step(self) -> Generator[None]:
        """Around a step's body; parity is updated after it. All ranks."""
        parts = self._made()
        yield
        with self._stalled.running():
            self._update(parts, parts.heard.taken(), parts.step + 1)
            self._note_memory()

    def memory(self) -> Sequence[Path]:
        """Rows, parity and copies."""
        return [path for path in (self._path, *self._slots.paths) if path.exists()]

    def costs(self) -> Costs:
        """Of this life until now."""
        sent_bytes = self._moved_bytes + self._made().live.sent_bytes
        return Costs(stalled_s=self._stalled.seconds, sent_bytes=sent_bytes, memory_bytes=self._memory_bytes)

    def close(self) -> None:
        """Gives the memory back. All ranks."""
        dist.barrier()
        self._made().heard.end()
        for path in self.memory():
            path.unlink()

    def _begin(self, parts: _Parts) -> int:
        """Makes all that is missing, and brings the training to it. All ranks."""
        memory, ranks = parts.memory, range(dist.get_world_size())
        held: list[Any] = [None] * len(ranks)
        dist.all_gather_object(held, (self._slots.kept(), memory.step, memory.is_torn, memory.is_unmade))
        kept, steps, torn, unmade = zip(*held, strict=True)
        if not any(steps) and not any(stamp.step for names in kept for _, stamp in names):
            return self._begin_anew(parts)
        lost = [rank for rank in ranks if steps[rank] is None]
        found = plan(kept)
        if found is None or len(lost) == len(ranks):
            raise ParityLost(
                f"rows of ranks {lost} are lost, and of no step all that is no row is left; "
                f"train from the start, with an empty folder"
            )
        if lost and any(unmade):
            raise ParityLost(
                f"rows of ranks {lost} are lost, and parity of ranks {[r for r in ranks if unmade[r]]} was "
                f"being recomputed after an earlier failure; train from the start, with an empty folder"
            )
        self._slots.forget(found.stamp)
        self._moved_bytes += carry_out(found, self._slots)
        poisoned: list[Any] = [0] * len(ranks)
        dist.all_gather_object(poisoned, parts.live.rebuild(lost))
        if any(poisoned):
            raise ParityPoisoned(
                f"{sum(poisoned)} rows of ranks {lost} were rebuilt to NaN or infinities: "
                f"a row under the same parity once was that; train from the start, with an empty folder"
            )
        if dist.get_rank() in lost:
            clear_signs_(memory.columns)
        consistent = all(step in (None, found.stamp.step) for step in steps) and not any(torn)
        if dist.get_rank() in lost:
            memory.unmake(found.stamp.step)
        dist.barrier()  # what was lost is whole, before the first sum that it was rebuilt from is gone
        keepers = [rank for rank in ranks if not consistent or rank in lost or unmade[rank]]
        if dist.get_rank() in keepers:
            memory.unmake(parts.step)
        dist.barrier()  # all know of all that is to be made, before the first is done
        parts.live.encode(keepers)
        saved = parts.rows()
        for name in (own(dist.get_rank()), SHARED):
            saved |= packing.unpack(self._slots.read(name, found.stamp))
        parts.state.put(saved)
        memory.end(found.stamp.step)
        self._update(parts, parts.nothing(), found.stamp.step)  # copies of ranks' own parts are made again
        return found.stamp.step

    def _begin_anew(self, parts: _Parts) -> int:
        self._slots.forget()
        for key, tensor in parts.state.take()[0].items():
            if key in parts.memory.columns:
                parts.memory.columns[key][:] = tensor.detach().numpy()
        parts.live.encode(range(dist.get_world_size()))
        self._update(parts, parts.nothing(), 0)
        return 0

    def _update(self, parts: _Parts, rows: Sequence[Ids], step: int) -> None:
        """Takes over what a step has changed. All ranks.

        Args:
            parts: all there is.
            rows: that have changed, of each table.
            step: that comes next.
        """
        tables, late = parts.live_rows()
        own_, shared = parts.state.rest()
        rest = own_ | late
        passenger = np.empty(packing.size(rest), np.uint8)
        packing.pack(rest, passenger)
        arrived = parts.live.exchange(tables, rows, passenger)
        stamp = Stamp(step, 0)
        parts.memory.begin()
        parts.live.take_over(arrived, tables, rows)
        self._keep(own(dist.get_rank()), stamp, passenger)
        for message in arrived:
            if message.block == 0:
                self._keep(own(message.source), stamp, message.passenger)
        packing.pack(shared, self._slots.begin(SHARED, packing.size(shared)))
        self._slots.seal(stamp)
        parts.memory.end(step)
        parts.live.finish()

    def _keep(self, name: str, stamp: Stamp, content: Bytes) -> None:
        self._slots.begin(name, len(content))[:] = content
        self._slots.seal(stamp)

    def _note_memory(self) -> None:
        parts = self._made()
        now_bytes = parts.memory.nbytes + self._slots.kept_bytes + parts.live.message_bytes
        self._memory_bytes = max(self._memory_bytes, now_bytes)

    def _made(self) -> _Parts:
        if self._parts is None:
            raise RuntimeError("prepare() comes first")
        return self._parts


class _Touched:
    """Which rows of the tables a step changes, as the tables' hooks report."""

    def __init__(self, training: Training) -> None:
        found = ecemb.tables(training.model, optimizers=training.optimizers, tables=training.tables)
        self._tables = [table for table in found if table.rows]
        self._told: list[list[Tensor]] = [[] for _ in self._tables]
        self._ends = [
            table.on_touch(self._hook(told)) for table, told in zip(self._tables, self._told, strict=True)
        ]

    def grouped(self, keys: Collection[str]) -> list[list[str]]:
        """Keys of `TrainingState`'s rows, by table."""
        return [
            [key for key in keys if key.removeprefix(f"table/{table.name}/") in table.tensors]
            for table in self._tables
        ]

    def taken(self) -> list[Ids]:
        """Of each table, int64 [m], ascending and distinct: reported since the last call."""
        empty = torch.empty(0, dtype=torch.int64)
        rows = [distinct(torch.cat([empty, *told]).numpy()) for told in self._told]
        for told in self._told:
            told.clear()
        return rows

    def end(self) -> None:
        """Listens no more."""
        for end in self._ends:
            end()

    @staticmethod
    def _hook(told: list[Tensor]) -> Callable[[Tensor], None]:
        return lambda rows: told.append(rows.clone())


@dataclass
class _Parts:
    """What a rank has once it is prepared."""

    state: TrainingState
    heard: _Touched
    memory: Memory
    live: LiveParity
    tables: list[list[str]]
    _live_rows: tuple[list[Columns], dict[str, Tensor]] = field(default_factory=lambda: ([], {}))

    @property
    def step(self) -> int:
        """That comes next."""
        return self.memory.step or 0

    def live_rows(self) -> tuple[list[Columns], dict[str, Tensor]]:
        """Of each table its columns as they are trained; and, by key, what came too late to be in sums."""
        if self.state.has_changed() or not self._live_rows[0]:
            rows = self.state.rows()
            columns: list[Columns] = [
                [rows.pop(key).detach().numpy() for key in keys] for keys in self.tables
            ]
            self._live_rows = columns, rows
        return self._live_rows

    def rows(self) -> dict[str, Tensor]:
        """All rows as they were after the last whole step."""
        return {key: torch.from_numpy(column) for key, column in self.memory.columns.items()}

    def nothing(self) -> list[Ids]:
        """No rows of any table."""
        return [np.empty(0, np.int64) for _ in self.tables]


def _begin_state(training: Training) -> None:
    """Makes what SparseAdam would make in its first step: rows that come later would not be in the sums."""
    for optimizer in training.optimizers:
        if isinstance(optimizer, torch.optim.SparseAdam):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if not optimizer.state[param]:
                        zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                        optimizer.state[param] |= {"step": 0, **zeros}


def _shape(columns: Sequence[Tensor]) -> Shape:
    arrays = [column.detach().numpy() for column in columns]
    return len(arrays[0]), sum(widths(arrays))
