"""What a checkpoint keeps training waiting, what it takes of the processors, and what following rows takes.

Equal models are trained by turns in the same processes, one under each writer, and each block of steps ends
with a checkpoint. What is written in the background is waited for before the next writer's turn, so that it
disturbs no other, and its processor time is known.
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import ecemb
from baselines.check_n_run.quantize_scheme import EXACT, Scheme
from baselines.check_n_run.recovery import CheckNRun
from baselines.check_n_run.tracking import TouchedRows
from baselines.full import FullRecovery
from baselines.full.writers import AsyncDcp, Dcp, Files, Writer
from baselines.method import Method, Training
from bench.harness.ranks import Line, Ranks
from bench.harness.result import Label, Row, WrongResult, summary
from bench.harness.timing import interleaved
from bench.methods.registry import Place
from bench.questions.check_n_run.volumes import MEMORY, drain
from bench.workloads.models import ENGINES, Batch
from bench.workloads.training_rank import draw

SYNCHRONOUS: Final = "files, synchronous"
Drain = Callable[[], object]
"""Waits until nothing is being written."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        ranks: All on this machine, one thread each.
        tables: Number of tables.
        rows: Of each table, over all ranks.
        dim: Of each row.
        lookups: Rows of each table that a sample looks up.
        batch: Samples a rank takes in a step.
        skew: See `training_rank.Order`.
        every: Steps between checkpoints.
        repeats: Checkpoints of each writer that count; one before them, and the one of the start, don't.
        table_rows: Of the tables whose rows are followed, alone.
        followed: Lookups that are followed in one call.
        at_least_s: That each timing of it takes.
        timeout_s: Of all.
    """

    ranks: int = 2
    tables: int = 8
    rows: int = 20_000
    dim: int = 64
    lookups: int = 1
    batch: int = 1024
    skew: float = 1.0
    every: int = 8
    repeats: int = 5
    table_rows: tuple[int, ...] = (1_000_000, 100_000_000)
    followed: int = 65_536
    at_least_s: float = 0.1
    timeout_s: float = 900.0

    @property
    def setting(self) -> str:
        """What a row's label says of it."""
        size = f"{self.tables} x {self.rows:,} x {self.dim}, batch {self.batch:,} a rank, skew {self.skew:g}"
        return f"{self.ranks} ranks, {size}, every {self.every} steps"


@dataclass(frozen=True, kw_only=True)
class Order(Scale):
    """What the ranks are to do.

    Attributes:
        seed: Of all that is drawn.
        job: The job's name.
        files: Folder that is synced.
        memory: Folder on tmpfs.
    """

    seed: int
    job: str
    files: str
    memory: str


@dataclass(frozen=True)
class Block:
    """What one rank measured of one block.

    Attributes:
        stall_s: That the checkpoint kept training waiting.
        whole_s: Until it was whole.
        cpu_s: Of processors in this time, of this rank.
        touching_s: That following rows took, in the steps before.
        steps_s: That these steps took.
    """

    stall_s: float
    whole_s: float
    cpu_s: float
    touching_s: float
    steps_s: float


@dataclass(frozen=True)
class Told:
    """One rank's answer.

    Attributes:
        blocks: Of each writer.
        written_bytes: By each, in a checkpoint, on average.
    """

    blocks: Mapping[str, Sequence[Block]]
    written_bytes: Mapping[str, float]


def fully(writer: Callable[[], Writer]) -> Callable[[Place], tuple[Method, Drain]]:
    """Full checkpoints."""

    def make(place: Place) -> tuple[Method, Drain]:
        made = writer()
        return FullRecovery(place.files, made, every=place.every), made.wait

    return make


def changes(policy: str, weights: Scheme, *, process: bool) -> Callable[[Place], tuple[Method, Drain]]:
    """Check-N-Run's."""

    def make(place: Place) -> tuple[Method, Drain]:
        method = CheckNRun(
            place.files, place.memory, policy=policy, every=place.every, weights=weights, process=process
        )
        return method, drain

    return make


FOUR = Scheme("adaptive", 4)
WRITERS: Final[Mapping[str, Callable[[Place], tuple[Method, Drain]]]] = {
    SYNCHRONOUS: fully(Files),
    "DCP, synchronous": fully(Dcp),
    "DCP, asynchronous": fully(AsyncDcp),
    "check-n-run full, exact, process": changes("full", EXACT, process=True),
    "check-n-run intermittent, exact, thread": changes("intermittent", EXACT, process=False),
    "check-n-run intermittent, exact, process": changes("intermittent", EXACT, process=True),
    "check-n-run intermittent, 4 bits, thread": changes("intermittent", FOUR, process=False),
    "check-n-run intermittent, 4 bits, process": changes("intermittent", FOUR, process=True),
}


def stalls(scale: Scale, seed: int) -> list[Row]:
    """What checkpoints and following rows take.

    Raises:
        WrongResult: Models of two writers have ended differently.
        RankFailed: A rank did.
    """
    return [*rows_of(told(scale, seed), scale), *tracking(scale, seed)]


def told(scale: Scale, seed: int) -> list[Told]:
    """Returns the ranks' answers."""
    with (
        tempfile.TemporaryDirectory(prefix="ecemb-bench-") as files,
        tempfile.TemporaryDirectory(prefix="ecemb-bench-", dir=MEMORY) as memory,
    ):
        job = f"bench-check-n-run-{secrets.token_hex(4)}"
        order = Order(**asdict(scale), seed=seed, job=job, files=files, memory=memory)
        with Ranks(scale.ranks, work, order, deadline_s=scale.timeout_s) as ranks:
            answers = ranks.answers()
            ranks.finished()
    return answers


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    arenas = Path(order.memory, "arenas")
    arenas.mkdir(exist_ok=True, mode=0o700)
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=arenas, timeout=timeout)
    line.send(measured(order))
    dist.destroy_process_group()


def measured(order: Order) -> Told:
    """What this rank measures. All ranks.

    Raises:
        WrongResult: Models of two writers have ended differently.
    """
    batches = draw(order, dist.get_rank(), (1 + order.repeats) * order.every)
    contenders = {name: Contender(name, order) for name in WRITERS}
    blocks: dict[str, list[Block]] = {name: [] for name in WRITERS}
    rng = random.Random(order.seed)
    for number in range(1 + order.repeats):
        block = batches[number * order.every : (number + 1) * order.every]
        for name in rng.sample(list(WRITERS), len(WRITERS)):
            blocks[name].append(contenders[name].train(block))
    written = {name: one.close() / (2 + order.repeats) for name, one in contenders.items()}
    (first, *others) = (one.twin.tensors() for one in contenders.values())
    for name, tensors in zip(list(contenders)[1:], others, strict=True):
        if not all(map(torch.equal, first, tensors)):
            raise WrongResult(f"what was trained under {name} is not what was under {SYNCHRONOUS}")
    return Told({name: found[1:] for name, found in blocks.items()}, written)


class Contender:
    """A model under one writer. All ranks.

    Args:
        name: Of `WRITERS`.
        order: What the ranks do.
    """

    def __init__(self, name: str, order: Order) -> None:
        torch.manual_seed(order.seed)
        self.twin = ENGINES["sparse"](order.tables, order.rows, order.dim, "dlrm")
        place = name.replace(",", "").replace(" ", "-")
        memory = Path(order.memory, f"{place}-{dist.get_rank()}")
        self._method, self._drain = WRITERS[name](Place(Path(order.files, place), memory, order.every))
        self._method.prepare(Training(self.twin.model, self.twin.optimizers))
        self._drain()

    def train(self, batches: Sequence[Batch]) -> Block:
        """A block: the steps between two checkpoints."""
        gc.collect()
        dist.barrier()
        touched_s, began = self._method.costs().stalled_s, time.perf_counter()
        for batch in batches[:-1]:
            with self._method.step():
                self.twin.train(batch)
        steps_s = time.perf_counter() - began
        touched_s = self._method.costs().stalled_s - touched_s
        with self._method.step():
            self.twin.train(batches[-1])
            dist.barrier()
            cpu_s, began = used_s(), time.perf_counter()
        stall_s = time.perf_counter() - began
        self._drain()
        whole_s = time.perf_counter() - began
        cpu_s = used_s() - cpu_s
        dist.barrier()
        return Block(stall_s, whole_s, cpu_s, touched_s, steps_s)

    def close(self) -> int:
        """Bytes that were written in all."""
        self._method.close()
        return self._method.costs().written_bytes


def used_s() -> float:
    """Processor time of this process and of those that it has started and still run."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    spent = time.process_time()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, parent, *fields = path.read_text().rpartition(")")[2].split()
        except (OSError, ValueError):  # it has just ended
            continue
        if int(parent) == os.getpid():
            spent += tick_s * (int(fields[9]) + int(fields[10]))  # utime and stime; see proc(5)
    return spent


def rows_of(answers: Sequence[Told], scale: Scale) -> Iterator[Row]:
    """Of each writer: over ranks, the longest waits, and all processor time and bytes."""
    setting: dict[str, Label] = {"setting": scale.setting}
    synchronous = [max(one.stall_s for one in blocks) for blocks in of(answers, SYNCHRONOUS)]
    for name in answers[0].blocks:
        blocks = of(answers, name)
        stall = [max(one.stall_s for one in block) for block in blocks]
        ratios = [mine / theirs for mine, theirs in zip(stall, synchronous, strict=True)]
        whole = [1000 * max(one.whole_s for one in block) for block in blocks]
        cpu = [1000 * sum(one.cpu_s for one in block) for block in blocks]
        written = sum(one.written_bytes[name] for one in answers)
        yield summary("stall_ms", "ms", [1000 * one for one in stall], **setting, writer=name)
        yield summary("stall_over_synchronous", "ratio", ratios, **setting, writer=name)
        yield summary("whole_after_ms", "ms", whole, **setting, writer=name)
        yield summary("checkpoint_cpu_ms", "ms", cpu, **setting, writer=name)
        yield summary("checkpoint_bytes", "bytes", [written], **setting, writer=name)
        if name.startswith("check"):
            parts = [one for block in blocks for one in block]
            percents = [100 * one.touching_s / (one.steps_s - one.touching_s) for one in parts]
            yield summary("tracking_pct", "% of a step", percents, **setting, writer=name)


def of(answers: Sequence[Told], name: str) -> list[tuple[Block, ...]]:
    """Of each block of a writer, what each rank measured."""
    return list(zip(*(one.blocks[name] for one in answers), strict=True))


def torchrecs_store(looked_up: Tensor) -> dict[str, Callable[[], object]]:
    """What TorchRec's `ModelDeltaTracker` does with a batch's ids until they are read, if it is there.

    Raises:
        WrongResult: It notes other rows.
    """
    if find_spec("torchrec") is None:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parts that its build for the CPU lacks
        from torchrec.distributed.model_tracker.delta_store import DeltaStoreTrec

    store: Any = DeltaStoreTrec()

    def note() -> Tensor:
        store.append(0, "table", looked_up)
        found: Tensor = store.get_unique()["table"].ids
        store.delete()
        return found

    if not note().equal(looked_up.unique()):
        raise WrongResult("TorchRec's ModelDeltaTracker notes other rows than were looked up")
    return {"ids, by TorchRec's ModelDeltaTracker": note}


def tracking(scale: Scale, seed: int) -> Iterator[Row]:
    """What it takes to note a looked-up row: by one bit, and, for comparison, by torch in a byte.

    Raises:
        WrongResult: Other rows are noted than were looked up.
    """
    rng = np.random.default_rng(seed)
    for rows in scale.table_rows:
        looked_up = torch.from_numpy((rows ** rng.random(scale.followed)).astype(np.int64) - 1)
        touched, mask = TouchedRows(rows), torch.zeros(rows, dtype=torch.bool)
        calls: dict[str, Callable[[], object]] = {
            "one bit": partial(touched.touch, looked_up),
            "a byte, by torch": partial(mask.index_fill_, 0, looked_up, True),
            **torchrecs_store(looked_up),
        }
        for call in calls.values():
            call()
        expected, by_torch = looked_up.unique(), mask.nonzero()[:, 0]
        if not (touched.numbers().equal(expected) and by_torch.equal(expected)):
            raise WrongResult(f"other rows are noted than were looked up, of {rows}")
        found = interleaved(calls, repeats=scale.repeats, at_least_s=scale.at_least_s)
        for name, seconds in found.items():
            per_row = [1e9 * one / scale.followed for one in seconds]
            labels: dict[str, Label] = {"table_rows": rows, "lookups": scale.followed}
            yield summary("tracking_ns_per_row", "ns", per_row, **labels, noted_in=name)
