"""Head to head: what does each way of surviving failures cost, and what is left after two of them?

Ranks train under stock torchrun, once under each method of `bench.methods.registry`, all on the same samples
from the same start. Two failures SIGKILL a rank and delete the memory of its machine. The first comes in the
middle of a given step, after the optimizers have changed rows. The second comes in the second life, by the
clock, at any moment of a step. torchrun restarts all ranks, and they train to the end. (6, 4) has 6 ranks,
and loses two of them at once in the first failure. All other methods have 4 ranks; `nothing` has both.

A step stands for 15 minutes of a long job with 14 hours between failures, as on CPR's cluster (published).
`time_scale` is the number of the job's seconds in one second here. Each method saves by its own published
rule (`rule`), which gives `interval_steps` here:

- *Young*: sqrt(2 O_save T_fail), where O_save is the time of a save here; for methods that go back to a save
  of everything.
- *PLS 0.1*: CPR's, 2 PLS N T_fail; those with priorities save an eighth as much eight times as often.
- *controller*: CPR's choice between the two.
- *half an hour*: Check-N-Run's, by a thread; a process of its own would have to import torch, which takes too
  long beside so short a job.
- *each step*, *each 16*: ecemb and float parity commit instead of saving. Live copies (`ecemb copies`) are
  ecemb's own codes (2, 1) and (3, 1).
- `nothing` has no interval: "-".

All methods have the same durable storage: a rank writes and reads at most at the speed of `storage`, above
the tables. DCP and Check-N-Run write beside training. At this speed, a save of everything takes about as many
minutes of the job as CPR's did (5.6, derived). Restarts are not scaled: they take their real time.

After the failures:

- `steps_run_again`: steps that began a second time, of both failures, on the rank with most; the interrupted
  steps are among them.
- `samples_lost`: samples whose updates the rows of some rank lost, summed over ranks (CPR's PLS, times all
  samples, times ranks). `given_up_steps`: the steps run again, plus the forgotten ones; a step that one of N
  ranks forgot counts as 1/N, as in CPR's PLS. With two failures, the loss since a save every 45 steps is a
  matter of luck: `cpr` and `quality` have many failures.
- `bit_identical`: 1 if tables, their optimizer state and dense parameters end, on all ranks, with the bytes
  of an undisturbed training.
- `off_by`: their distance from those bytes, by the L2 norm, over the distance that the training moved them.
- `log_loss_added`, `auc`, `auc_lost`: on held-out samples, against that training, of the same seed. Clicks
  have a signal: each category makes one more or less likely.
- `survives_ranks`: any this many ranks may be lost at once with their memory, by the method's rule; the
  number of ranks means all.
- `recovery_s`: from the kill until every rank has ended a step. Most of it is torchrun's restart and the
  imports, which `nothing` needs as well. `caught_up_s`: until every rank has passed the interrupted step.
  `prepare_s`: the part of it that the method takes before the first step, on the slowest rank.
- `recovery_sent_bytes`: bytes that all ranks send in that time.

Without failures, against an unprotected twin. The twin trains in the same processes, before the method in the
first life and after it in the last life; the life between has none:

- `overhead_cpu_pct`: processor time (user and system, all threads, all ranks) of the steps of a life except
  its first six, saves included, over that of the twin, less 1. Of all lives; in brackets, of single lives.
  The value of `nothing` is the error of this measurement, since `nothing` is its own twin, at another time:
  smaller differences are noise.
- `overhead_wall_pct`: the same for wall time. `step_wall_ms`: the wall time of the method's step.
- `stall_ms_per_step`: the time that the method keeps the training of a rank waiting, including waits for
  slower ranks.
- `sent_bytes_per_step`, `written_bytes_per_step`: by a rank, to the memory of other ranks, and to files.
- `memory_over_tables`, `stored_over_tables`: the most memory that a method takes of a machine beside the
  training's own, messages included, and its files at the end, over the bytes of the rank's tables and their
  optimizer state. Methods that save keep one save.

Some methods are not bit-identical. `cpr` loads only the failed rank's rows, as last saved, and counts what
they forgot. The other ranks keep their rows, and if the interrupted step had not ended on all ranks, they
take it twice. `check-n-run` with bits goes back to rounded rows. `float parity` solves for lost rows in
floating point. The rounding error is as large for all rows under a parity as for its largest number.
Adagrad's sums of squares begin at 0 and span many powers of ten, so those of rarely trained rows come back
with another size, and change the next steps of these rows. In float64 they come back. Float parity has no
transaction either: ranks that completed the interrupted step, and keep no parity of the dead rank, take it
twice. All other methods return to the bytes of one step, and continue from there.

Engines `sparse` and `torchrec`, and the dense part of a DLRM above them, are those of `python -m bench
overhead`. One thread a rank, all ranks on one machine. A method that breaks its promise fails the run.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from baselines.method import Promise
from bench.harness.result import Arguments, Incomplete, Label, Row, WrongResult
from bench.harness.torchrun import LaunchFailed, Torchrun
from bench.methods.ledger import account
from bench.methods.registry import METHODS, OF_TORCHREC, Place, ScaledJob
from bench.questions.compare.families import KILLS
from bench.questions.compare.rank import Order
from bench.questions.compare.rows import Told, rows_of

VICTIMS = (1, 2)
"""As many of them as a failure takes; in the second one, the last rank dies."""
UNDISTURBED = "nothing"
"""The undisturbed method, for reference."""
COMPARED = tuple(
    name for name in METHODS if "(3, " not in name and name not in ("ecemb (4, 2)", "float parity (4, 2)")
)
"""All but what needs three ranks, and what others stand for."""
RULES = {
    "nothing": "never",
    "cpr controlled": "controller",
    "cpr": "PLS 0.1",
    "check-n-run": "half an hour",
    "full": "Young",
    "snapshots": "Young",
    "coded": "Young",
}
"""How a method's name begins -> its interval's rule; the first that fits."""
MINUTES_H = 60


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        methods: Names of `METHODS`.
        ranks: All on this machine, one thread each; of codes with a larger n: n.
        tables: Number of tables.
        rows: Of each table, over all ranks.
        dim: Of each row.
        batch: Samples a rank takes in a step.
        held_out: Batches of each rank that the model is asked at the end.
        skew: See `training_rank.Order`.
        steps: Of a training.
        killed: The step that is cut off.
        later: How many steps after the restart, by the undisturbed training's clock, the next rank dies.
        twin_steps: Of the unprotected twin, each time.
        mtbf_steps: Mean time between failures.
        step_h: Hours that a step stands for.
        storage_mb_s: That a rank writes, or reads.
        memory: Folder on tmpfs, for what is lost with a machine.
        timeout_s: Of one launch.
    """

    methods: tuple[str, ...] = COMPARED
    ranks: int = 4
    tables: int = 26
    rows: int = 4000
    dim: int = 64
    batch: int = 128
    held_out: int = 16
    skew: float = 1.2
    steps: int = 112
    killed: int = 71
    later: int = 18
    twin_steps: int = 26
    mtbf_steps: int = 56
    step_h: float = 0.25
    storage_mb_s: float = 200.0
    memory: str = "/dev/shm"
    timeout_s: float = 600.0

    @property
    def setting(self) -> str:
        """What a row's label says of it."""
        return f"{self.tables} x {self.rows:,} x {self.dim}, batch {self.batch:,} a rank, skew {self.skew:g}"

    @property
    def storage(self) -> str:
        """The same."""
        return f"{self.storage_mb_s:g} MB/s a rank"

    @property
    def job(self) -> str:
        """The same."""
        minutes = self.step_h * MINUTES_H
        return f"{self.steps} steps of {minutes:g} min, MTBF {self.mtbf_steps * self.step_h:g} h"

    def ranks_of(self, method: str) -> int:
        """That train under it."""
        blocks = re.search(r"\((\d+), ", method)
        return max(self.ranks, int(blocks[1]) if blocks else 0)


FULL = Scale()
QUICK = Scale(
    ("ecemb copies x2", "full files", "cpr vanilla"),
    ranks=2,
    tables=4,
    rows=2000,
    dim=16,
    batch=64,
    steps=40,
    killed=13,
    later=5,
    twin_steps=10,
    mtbf_steps=20,
    storage_mb_s=20.0,
)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    return measure(QUICK if arguments.quick else FULL, arguments.engine, arguments.seed)


def measure(scale: Scale, engine: str, seed: int) -> list[Row]:
    """Kills ranks under every method, and compares with an undisturbed training.

    Raises:
        Incomplete: Methods broke their promises, or torchrun would not end the training under them.
        WrongResult, LaunchFailed: The undisturbed training failed.
    """
    rows: list[Row] = []
    failed: list[str] = []
    compared = [one for one in scale.methods if engine == "torchrec" or one not in OF_TORCHREC]
    sizes = sorted({scale.ranks_of(method) for method in compared})
    of_size = {
        ranks: [one for one in compared if scale.ranks_of(one) == ranks or one == UNDISTURBED]
        for ranks in sizes
    }
    bar = tqdm(total=sum(map(len, of_size.values())), desc=f"compare, {engine}", unit="method", disable=None)
    for ranks, methods in of_size.items():
        with launched(scale, engine, UNDISTURBED, ranks, seed) as reference:
            for method in methods:
                bar.set_postfix_str(method)
                try:
                    rows += under(scale, engine, method, ranks, seed, reference)
                except (WrongResult, LaunchFailed) as error:
                    failed.append(str(error))
                bar.update()
    bar.close()
    if failed:
        raise Incomplete(rows, "\n\n".join(failed))
    return rows


def under(scale: Scale, engine: str, method: str, ranks: int, seed: int, reference: Told) -> list[Row]:
    """Measures one method.

    Raises:
        WrongResult: It broke its promise.
        LaunchFailed: torchrun did, and will not end the training.
    """
    with launched(scale, engine, method, ranks, seed, reference) as told:
        job = ScaledJob(scale.mtbf_steps, reference.step_s, scale.step_h, ranks)
        promise = METHODS[method](Place(Path(), Path(), job=job)).promise
        check(told, reference, promise)
        return rows_of(told, reference, promise.survives, labels_of(scale, engine, method, ranks))


def labels_of(scale: Scale, engine: str, method: str, ranks: int) -> dict[str, Label]:
    """What tells a method's rows from others."""
    return {
        "engine": engine,
        "setting": scale.setting,
        "job": scale.job,
        "storage": scale.storage,
        "method": method,
        "rule": rule(method),
        "ranks": ranks,
    }


def rule(method: str) -> str:
    """By which it chooses its interval."""
    otherwise = "each 16" if method.endswith("window 16") else "each step"
    return next((said for begin, said in RULES.items() if method.startswith(begin)), otherwise)


@contextmanager
def launched(
    scale: Scale, engine: str, method: str, ranks: int, seed: int, reference: Told | None = None
) -> Iterator[Told]:
    """Trains under torchrun; with a reference, ranks are killed. What is left is deleted after the block."""
    with (
        tempfile.TemporaryDirectory(prefix="ecemb-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="ecemb-bench-", dir=scale.memory) as memory,
    ):
        step_s = 0.0 if reference is None else reference.step_s
        order = Order(
            engine=engine,
            method=method,
            folder=folder,
            memory=memory,
            reference="" if reference is None else reference.order.folder,
            job=f"bench-compare-{secrets.token_hex(4)}",
            tables=scale.tables,
            rows=scale.rows,
            dim=scale.dim,
            lookups=1,
            dense="dlrm",
            batch=scale.batch,
            skew=scale.skew,
            steps=scale.steps,
            held_out=scale.held_out,
            killed=scale.killed,
            victims=() if reference is None else VICTIMS[: 2 if ranks > scale.ranks else 1],
            killed_after_s=scale.later * step_s,
            next_victim=ranks - 1,
            mtbf_steps=scale.mtbf_steps,
            step_h=scale.step_h,
            step_s=step_s,
            bytes_per_s=scale.storage_mb_s * 1e6,
            twin_steps=scale.twin_steps,
            seed=seed,
            timeout_s=scale.timeout_s,
        )
        with Torchrun(
            ranks,
            KILLS,
            "bench.questions.compare.rank",
            str(order.write()),
            folder=Path(folder),
            name=method,
            timeout_s=scale.timeout_s,
        ) as torchrun:
            torchrun.wait()
        lives = len(account(order.ledgers(), 0).lives)
        twins = {0, lives - 1}  # in a life between, ranks are killed before its turn comes
        yield Told(
            order,
            [json.loads(order.end(rank).read_text(encoding="utf-8")) for rank in range(ranks)],
            [account(order.ledgers(), rank) for rank in range(ranks)],
            [{life: account(order.ledgers(life), rank) for life in twins} for rank in range(ranks)],
        )


def check(told: Told, reference: Told, promise: Promise) -> None:
    """Compares what became of a training with what its method promises.

    Raises:
        WrongResult: It is less; or no rank was killed, or NaN has come of it.
    """
    order, name = told.order, told.order.method
    if not all(math.isfinite(end["squared_distance"]) for end in told.ends):
        raise WrongResult(f"{name} ended with NaN or infinities in the model")
    for rank, one in enumerate(told.accounts):
        if len(one.lives) != KILLS + 1:
            raise WrongResult(f"{name}, rank {rank}: {len(one.lives)} lives, and {KILLS + 1} were to be")
        if promise.steps_again is not None and one.steps_again > KILLS * (promise.steps_again + 1):
            raise WrongResult(
                f"{name}, rank {rank}: {one.steps_again} steps were begun again, and not at most "
                f"{promise.steps_again} and the one that was cut off, {KILLS} times"
            )
        if one.costs.samples_lost and not promise.samples_lost:
            raise WrongResult(f"{name}, rank {rank}: {one.costs.samples_lost:g} samples are lost")
    for life, victims in enumerate((order.victims, (order.next_victim,))):
        struck = tuple(
            rank for rank, one in enumerate(told.accounts) if one.lives[life].struck_at_s is not None
        )
        if struck != victims:
            raise WrongResult(f"{name}, life {life}: ranks {struck} were killed, and not {victims}")
    if promise.bit_identical and not told.is_as(reference):
        raise WrongResult(f"{name} ended with other bytes than without a kill")
