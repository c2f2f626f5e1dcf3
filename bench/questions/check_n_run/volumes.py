"""What Check-N-Run's checkpoints write and keep, by policy, bits and optimizer state.

Each run is a training of one rank, under `baselines.check_n_run.recovery` as it is, to a store in memory. The
rows that a pattern of access changes in an interval are changed by the table's own optimizer, in one step.
After each checkpoint, the store is looked into: it has the newest checkpoint and what that one stands on, and
nothing else. At the end, what is restored must be what was trained, exactly or within one step of the codes.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecemb
from baselines.check_n_run import restoring
from baselines.check_n_run.codec import kind_of
from baselines.check_n_run.manifest import manifest_path
from baselines.check_n_run.policy import POLICIES
from baselines.check_n_run.quantize_scheme import BITS, EXACT, Scheme
from baselines.check_n_run.recovery import CheckNRun, ShardedTable
from baselines.check_n_run.store import Store, store_at
from baselines.method import Training
from bench.harness.result import Label, Row, WrongResult, once, summary
from bench.questions.check_n_run.access import LONG, Pattern, patterns
from bench.workloads.models import ENGINES, INTEGERS, Batch

MEMORY: Final = "/dev/shm"
WRITER: Final = "check-n-run"
"""Name of the thread that writes."""
INTERMITTENT: Final = "intermittent"
PUBLISHED: Final = {"least": (6.0, 2.5), "most": (17.0, 8.0)}
"""Reductions of bandwidth and of capacity."""
SLACK: Final = 1.01
"""Of a step of the codes, since decoding rounds."""


class Script(Protocol):
    """A training that changes given rows."""

    training: Training

    def change(self, rows: Tensor) -> None:
        """One step, in which these rows change: int64 [m], ascending."""
        ...


class Sparse:
    """A table of ecemb.nn under an optimizer of torch, with gradients that are drawn.

    Args:
        rows: Of the table.
        dim: Of each.
        optimizer: Makes it.
    """

    def __init__(self, rows: int, dim: int, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self._generator = torch.Generator().manual_seed(0)
        table = ecemb.nn.ShardedEmbeddingBag(rows, dim, generator=self._generator)
        self._weight = table.weight
        self._optimizer = optimizer([table.weight], lr=0.05)
        self.training = Training(nn.Sequential(table), [self._optimizer])

    def change(self, rows: Tensor) -> None:
        shape = self._weight.shape
        values = torch.randn(len(rows), shape[1], generator=self._generator)
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # torch's default, less a warning
            self._weight.grad = torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True)
            self._optimizer.step()


class RowWise:
    """A table of TorchRec under its fused row-wise Adagrad, below a small dense part."""

    def __init__(self, rows: int, dim: int) -> None:
        torch.manual_seed(0)
        self._twin = ENGINES["torchrec"](1, rows, dim, "small")
        self.training = Training(self._twin.model, self._twin.optimizers)

    def change(self, rows: Tensor) -> None:
        clicks = torch.randint(2, (len(rows), 1)).float()
        self._twin.train(Batch(torch.rand(len(rows), INTEGERS), rows[None, :, None], clicks))


@dataclass(frozen=True)
class State:
    """Per-row optimizer state, and how it is stored.

    Attributes:
        script: Makes the training, of a number of rows of this dimension.
        scheme: Of the state.
    """

    script: Callable[[int, int], Script]
    scheme: Scheme = EXACT


NONE: Final = "none"
STATES: Final[Mapping[str, State]] = {
    NONE: State(lambda rows, dim: Sparse(rows, dim, torch.optim.SGD)),
    "row-wise Adagrad, exact": State(RowWise),
    "Adagrad, exact": State(lambda rows, dim: Sparse(rows, dim, torch.optim.Adagrad)),
    "Adagrad, 8 bits": State(
        lambda rows, dim: Sparse(rows, dim, torch.optim.Adagrad), Scheme("asymmetric", 8)
    ),
}
NEEDS: Final = {"row-wise Adagrad, exact": "torchrec"}
"""State -> the package without which it is left out."""
WEIGHTS: Final[Mapping[str, Scheme]] = {
    "exact": EXACT,
    **{str(bits): Scheme("asymmetric", bits) for bits in reversed(BITS)},
}
"""By bits. Adaptive's rows take as many bytes as asymmetric's, which are found sooner."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        rows: Of the table.
        dims: Of them; the first with all optimizer states, the others without.
        intervals: After the first checkpoint.
        patterns: How many of `patterns()`.
        states: Of `STATES`.
    """

    rows: int = 50_000
    dims: tuple[int, ...] = (64, 128)
    intervals: int = 24
    patterns: int = 3
    states: tuple[str, ...] = tuple(STATES)

    def jobs(self) -> Iterator[tuple[str, int]]:
        """State and dimension of each."""
        for dim in self.dims:
            for state in self.states if dim == self.dims[0] else (NONE,):
                if state not in NEEDS or find_spec(NEEDS[state]) is not None:
                    yield state, dim


@dataclass(frozen=True)
class Look:
    """What the store had when a checkpoint was whole, of rows.

    Attributes:
        written: Bytes of that checkpoint.
        stored: Bytes of all that was left.
        is_full: It stands on no other.
    """

    written: int
    stored: int
    is_full: bool


@dataclass(frozen=True)
class Volumes:
    """What became of one training.

    Attributes:
        full_bytes: Of all rows and their state, as float32.
        looks: At each checkpoint, the first one included.
    """

    full_bytes: int
    looks: Sequence[Look]

    @property
    def written(self) -> list[float]:
        """By each interval, over a full float32 checkpoint."""
        return [look.written / self.full_bytes for look in self.looks[1:]]

    @property
    def stored(self) -> list[float]:
        """After each interval, as well."""
        return [look.stored / self.full_bytes for look in self.looks[1:]]

    @property
    def between_full(self) -> list[int]:
        """Intervals from each full checkpoint to the next."""
        return [b - a for a, b in pairwise(i for i, look in enumerate(self.looks) if look.is_full)]


OfPart = tuple[list[Row], list[Row]]
"""Bytes by policy, and reductions by bits."""
Part = tuple[int, str, int]
"""The number of a pattern, per-row optimizer state, and the rows' dimension."""
Each = Callable[[Callable[[Part], OfPart], Sequence[Part]], Iterable[OfPart]]


def volumes(scale: Scale, seed: int, each: Each = map) -> list[Row]:
    """Bytes by policy, then reductions by bits and state.

    Args:
        scale: How much.
        seed: Of what is drawn.
        each: Calls a function for each part.

    Raises:
        WrongResult: Something else was restored than was stored, or the store has something else.
    """
    chosen = patterns()[: scale.patterns]
    parts = [(number, state, dim) for number in range(len(chosen)) for state, dim in scale.jobs()]
    found = list(each(partial(of_part, scale, seed), parts))
    described = [row for pattern in chosen for row in shares(pattern)]
    by_policy = [row for rows, _ in found for row in rows]
    return [*described, *by_policy, *published(), *(row for _, rows in found for row in rows)]


def of_part(scale: Scale, seed: int, part: Part) -> OfPart:
    """What is written and kept under a pattern, with one state and dimension; by policy with the first."""
    number, state, dim = part
    pattern = patterns()[number]
    drawn = pattern.changed(scale.rows, scale.intervals, np.random.default_rng([seed, number]))
    touched = [torch.from_numpy(rows) for rows in drawn]
    by_policy: list[Row] = []
    reduced: list[Row] = []
    with alone():
        for policy in POLICIES if (state, dim) == (NONE, scale.dims[0]) else ():
            script = STATES[NONE].script(scale.rows, dim)
            by_policy += of_policy(pattern.name, policy, checkpointed(script, touched, policy))
        for bits, weights in WEIGHTS.items():
            script = STATES[state].script(scale.rows, dim)
            found = checkpointed(script, touched, INTERMITTENT, weights, STATES[state].scheme)
            labels: dict[str, Label] = {"pattern": pattern.name, "state": state, "dim": dim}
            reduced += reductions(found, {**labels, "bits": bits, "policy": INTERMITTENT})
    return by_policy, reduced


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def checkpointed(
    script: Script,
    touched: Sequence[Tensor],
    policy: str,
    weights: Scheme = EXACT,
    states: Scheme = EXACT,
) -> Volumes:
    """Trains, with a checkpoint after each step.

    Args:
        script: What is trained.
        touched: Rows that each step changes.
        policy: Of the checkpoints.
        weights: How they are stored.
        states: How per-row optimizer state is.

    Raises:
        WrongResult: See `volumes`.
    """
    target = f"memory://{secrets.token_hex(8)}"
    store = store_at(target)
    schemes = {"weight": weights, "state": states}
    with tempfile.TemporaryDirectory(prefix="ecemb-bench-", dir=MEMORY) as memory:
        method = CheckNRun(
            target, Path(memory), policy=policy, every=1, weights=weights, states=states, process=False
        )
        method.prepare(script.training)
        looks = [look(store)]
        for rows in touched:
            with method.step():
                script.change(rows)
            looks.append(look(store))
        method.close()
    tables = ecemb.tables(script.training.model, optimizers=script.training.optimizers)
    check(store, tables, schemes)
    store.remove(store.paths())
    return Volumes(sum(one.nbytes for table in tables for one in table.tensors.values()), looks)


def drain() -> None:
    """Waits until Check-N-Run writes nothing; where a process writes, a thread waits for it."""
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join()


def look(store: Store) -> Look:
    """Looks into the store when nothing is being written to it."""
    drain()
    chain = restoring.last_chain(store)
    if chain is None:
        raise WrongResult("no checkpoint is whole")
    wanted = {manifest_path(one.name) for one in chain} | {part.path for one in chain for part in one.chunks}
    if (there := set(store.paths())) != wanted:
        raise WrongResult(f"the store differs in {sorted(there ^ wanted)[:3]} from what a restore needs")
    sizes = [sum(part.size_bytes for part in one.chunks if part.is_rows) for one in chain]
    return Look(sizes[-1], sum(sizes), len(chain) == 1)


def check(store: Store, tables: Sequence[ShardedTable], schemes: Mapping[str, Scheme]) -> None:
    """Restores, and compares with what was trained.

    Raises:
        WrongResult: It is something else.
    """
    chain = restoring.last_chain(store) or []
    for table in tables:
        start, whole_rows = table.whole or (0, table.rows)
        back = {name: torch.full_like(live, torch.nan) for name, live in table.tensors.items()}
        shard = restoring.Shard(table.name, start, table.rows, whole_rows, back)
        restoring.rows(store, chain, [shard], lambda *_: None)
        for name, live in table.tensors.items():
            scheme = schemes[kind_of(name)]
            off = (back[name] - live).abs()
            allowed = torch.zeros(())
            if scheme != EXACT and live.ndim == 2:
                low, high = live.aminmax(dim=1, keepdim=True)
                allowed = SLACK * (high - low) / (2**scheme.bits - 1)
            if not bool((off <= allowed).all()):
                raise WrongResult(f"{name} is restored {float(off.max())} off, as {scheme}")


def shares(pattern: Pattern) -> Iterator[Row]:
    """What a pattern changes."""
    law = pattern.law
    labels: dict[str, Label] = {"pattern": pattern.name, "alpha": round(law.alpha, 3)}
    labels["cutoff"] = "none" if law.cutoff == np.inf else round(law.cutoff, 1)
    for intervals in (1, LONG, 2 * LONG):
        share = 100 * pattern.share(intervals)
        yield once("changed_rows_pct", "%", share, **labels, intervals=intervals, of="all rows")


def of_policy(pattern: str, policy: str, found: Volumes) -> Iterator[Row]:
    """What a policy writes and keeps."""
    labels: dict[str, Label] = {"pattern": pattern, "policy": policy, "bits": "exact"}
    for metric, parts in (("written", found.written), ("stored", found.stored)):
        percents = [100 * part for part in parts]
        yield Row(
            f"{metric}_pct", mean(percents), "%", min(percents), max(percents), len(percents), {**labels}
        )
        for interval, percent in enumerate(percents, 1):
            yield once(f"{metric}_of_interval", "%", percent, **labels, interval=interval)
    if policy == INTERMITTENT and found.between_full:
        yield summary("intervals_between_full", "intervals", found.between_full, **labels)


def reductions(found: Volumes, labels: Mapping[str, Label]) -> Iterator[Row]:
    """How much less is written on average, and kept at most, than of full float32 checkpoints."""
    yield once("bandwidth_reduction", "ratio", 1 / mean(found.written), **labels)
    yield once("capacity_reduction", "ratio", 1 / max(found.stored), **labels)


def published() -> Iterator[Row]:
    """The same, as the paper has it."""
    for end, (bandwidth, capacity) in PUBLISHED.items():
        labels: dict[str, Label] = {"pattern": f"the paper's jobs, the {end}", "policy": INTERMITTENT}
        yield once("bandwidth_reduction", "ratio", bandwidth, **labels)
        yield once("capacity_reduction", "ratio", capacity, **labels)
