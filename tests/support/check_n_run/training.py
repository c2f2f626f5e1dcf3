"""A training whose state is known at every step, for tests of Check-N-Run: two ranks in one process.

Row i of the table holds the last step that changed it, so that any restored state tells which steps it has.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from baselines.check_n_run.buffer import Buffer, Rows
from baselines.check_n_run.manifest import OWN, SHARED, Facts, Manifest, drawn, number_of
from baselines.check_n_run.policy import policy_of
from baselines.check_n_run.quantize_scheme import EXACT
from baselines.check_n_run.restoring import Shard, described, last_chain, rest, rows
from baselines.check_n_run.store import Store
from baselines.check_n_run.tracking import TouchedRows
from baselines.check_n_run.writing import WriteTask, write

ROWS, DIM = 60, 3
TABLE = "table"


def changed(step: int) -> Tensor:
    """The rows that a step changes; step 0 changes all."""
    generator = np.random.default_rng(step)
    return torch.arange(ROWS) if step == 0 else torch.from_numpy(generator.integers(0, ROWS, 6))


def state(step: int) -> dict[str, Tensor]:
    """What there is before a step."""
    last = torch.zeros(ROWS)
    for earlier in range(step):
        last[changed(earlier)] = float(earlier)
    return {"weight": last[:, None] * torch.arange(1, DIM + 1), "sum": last.clone()}


class Rank:
    """One rank's part of a training.

    Args:
        rank: which.
        bounds: of all ranks' rows.
        memory: for its copies.
    """

    def __init__(self, rank: int, bounds: Sequence[int], memory: Path) -> None:
        self.rank, self.start, stop = rank, bounds[rank], bounds[rank + 1]
        self.tensors = {name: value[self.start : stop].clone() for name, value in state(0).items()}
        self.touched = TouchedRows(stop - self.start)
        self.buffer = Buffer(memory / str(rank))

    def step(self, step: int) -> None:
        here = changed(step) - self.start
        here = here[(here >= 0) & (here < self.touched.rows)]
        self.touched.touch(here)
        self.tensors["weight"][here] = float(step) * torch.arange(1, DIM + 1)
        self.tensors["sum"][here] = float(step)


class Life:
    """A training from its last checkpoint on.

    Args:
        store: of its checkpoints.
        memory: for copies.
        policy: its name.
        ranks: how many.
        chunk_bytes: of chunks.
        keep: whole checkpoints that stay.
    """

    def __init__(
        self,
        store: Store,
        memory: Path,
        policy: str,
        *,
        ranks: int = 2,
        chunk_bytes: int = 100,
        keep: int = 1,
    ) -> None:
        self.store, self.policy, self.name = store, policy_of(policy), policy
        bounds = [ROWS * rank // ranks for rank in range(ranks + 1)]
        self.ranks = [Rank(rank, bounds, memory) for rank in range(ranks)]
        self.chunk_bytes, self.keep = chunk_bytes, keep
        self.last: Facts | None = None
        self.next = 0
        self.number = max([number_of(path) or 0 for path in store.paths()], default=0)
        if (found := last_chain(store)) is not None:
            self._restore(found)

    def step(self) -> None:
        for one in self.ranks:
            one.step(self.next)
        self.next += 1

    def save(self) -> None:
        """Rank 1 and those above in threads, rank 0 here: in one order for equal timings."""
        jobs = self.jobs()
        others = [threading.Thread(target=write, args=(job, self.store)) for job in jobs[1:]]
        for other in others:
            other.start()
        for other in others:
            other.join()
        write(jobs[0], self.store)

    def jobs(self) -> list[WriteTask]:
        full = self.last is None or self.policy.takes_full(self.last.sizes)
        taken = [
            Rows(TABLE, one.start, one.tensors, None if full else one.touched.numbers()) for one in self.ranks
        ]
        size = sum(one.touched.count() for one in self.ranks) / ROWS
        self.number += 1
        facts = Facts(
            self.number,
            drawn(),
            self.next,
            len(self.ranks),
            self.name,
            () if full or self.last is None else self.policy.needs(self.last.name, self.last.needs),
            () if full or self.last is None else (*self.last.sizes, size),
            {TABLE: {"rows": ROWS, "tensors": described(self.ranks[0].tensors)}},
            {"weight": asdict(EXACT), "state": asdict(EXACT)},
        )
        if full or self.policy.is_chained:
            for one in self.ranks:
                one.touched.clear()
        self.last = facts
        kinds = [
            {OWN: {"rank": torch.tensor(one.rank)}, SHARED: {"step": torch.tensor(self.next)}}
            for one in self.ranks
        ]
        return [
            WriteTask(
                facts,
                one.rank,
                one.buffer.fill([rows_], rest_),
                self.chunk_bytes,
                bytes_per_s=None,
                progress=False,
                keep=self.keep,
                patience_s=300.0,
            )
            for one, rows_, rest_ in zip(self.ranks, taken, kinds, strict=True)
        ]

    def whole(self) -> dict[str, Tensor]:
        """The table's tensors."""
        return {name: torch.cat([one.tensors[name] for one in self.ranks]) for name in ("weight", "sum")}

    def _restore(self, found: Sequence[Manifest]) -> None:
        last = found[-1].facts
        for one in self.ranks:
            source = one.rank if one.rank < last.world_size else 0
            kept = rest(self.store, found[-1], [source])
            assert {key: int(value) for key, value in kept.items()} == {"rank": source, "step": last.step}
            shard = Shard(TABLE, one.start, one.touched.rows, ROWS, one.tensors)
            rows(self.store, found, [shard], lambda _, numbers, to=one: self._mark(to, numbers))
        self.next, self.last = last.step, last

    def _mark(self, to: Rank, numbers: Tensor) -> None:
        if not self.policy.is_chained:
            to.touched.touch(numbers)


def is_right(life: Life) -> bool:
    """Whether a life's state is that of its step."""
    wanted = state(life.next)
    return all(torch.equal(value, wanted[name]) for name, value in life.whole().items())
