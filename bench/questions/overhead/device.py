"""The setting `device`: what protection costs where a device trains, and the processors are nearly idle.

Tables lie in host memory that stands for a device's: the guard holds images of them in its arena. A step
changes rows there, and then sleeps until the device part of it is over, 50 or 10 ms from its begin; what the
stand-in itself costs is so within the step's time. Rows change at a third of the rate that one core commits
(`CORE_S_PER_GB`, as `python -m bench host` measures it), or of a rank's share of the cores, if there are
fewer cores than ranks. The window is "auto", beside the steps that follow.

In each round there is a block of steps of the protected model, and of two bare ones, in random order. A block
begins with a window that is not timed, so that in the windows that are, one is committed beside each.

- `device_wall_pct`: wall time of the slowest rank in the blocks of the protected model over that in those of
  the first bare one, less 1; the 95 % interval by resampling rounds. `control` compares the bare ones, and is
  to include 0. At most 1 is asked for.
- `device_cores`: of a rank, what protection takes while it trains, in cores: the difference of processor
  time, over wall time.
- `replayed_windows`: steps that a failure would replay, in windows: those that are not committed yet at the
  end of a step, the mean over steps and ranks. At most 0.6 is asked for.
- `device_window_steps`: what "auto" chose. `device_mb_per_s`: rows that a rank's steps change.

After the rounds all models have to hold the same bytes, and parity has to fit the rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecemb
from bench.harness.ranks import Line
from bench.harness.result import Label, Row, WrongResult, once
from bench.questions.overhead.estimate import Floats, Strata
from bench.workloads.pairs import CHOOSING, turns
from bench.workloads.training_rank import BARE, CONTROL, PROTECTED, Order, digest

NAME = "device"
METHODS = PROTECTED, BARE, CONTROL
STEPS_MS = (50, 10)
"""How long the device part of a step is."""
CORE_S_PER_GB = 1.5
"""Processor time of a commit, in seconds for each GB of changed rows: of `bench host`, for r = 1."""
OF_RATE = 3
"""Rows change at the rate that a core commits, over this."""
TIMED = 1
"""Windows of a block that are timed, after the first one."""
BUDGET_S, LEAST_ROUNDS = 900.0, 4
"""As many rounds as take this long, but not fewer than four: a window may take half a minute."""
STAND_IN = "ecemb.engines.sparse.is_off_arena"
"""Says which tables lie in a device's memory."""
LR = 0.5


class Model:
    """One table whose rows are changed by gradients that are given.

    Args:
        order: what the ranks do.
        step_s: how long the device part of a step is.
    """

    def __init__(self, order: Order, step_s: float) -> None:
        torch.manual_seed(order.seed)
        self.model = nn.ModuleDict({"table": ecemb.nn.ShardedEmbeddingBag(order.rows, order.dim)})
        self.weight: Any = self.model["table"].weight
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.guard: ecemb.Guard | None = None
        self._step_s = step_s
        self._meet = torch.zeros(1)

    def train(self, rows: Tensor, *, sleeps: bool = True) -> None:
        """One step, which changes these rows (int64 [m], ascending). All ranks."""
        if self.guard is None:
            self._body(rows, sleeps=sleeps)
        else:
            with self.guard.step():
                self._body(rows, sleeps=sleeps)

    def end(self) -> None:
        """The last window is committed."""
        if self.guard is not None:
            self.guard._drain()

    def _body(self, rows: Tensor, *, sleeps: bool) -> None:
        until = time.monotonic() + self._step_s
        values = torch.ones(len(rows), self.weight.shape[1])
        self.weight.grad = torch.sparse_coo_tensor(
            rows[None], values, self.weight.shape, is_coalesced=True, check_invariants=False
        )
        self.optimizer.step()
        if sleeps:
            time.sleep(max(0.0, until - time.monotonic()))
        dist.all_reduce(self._meet)  # as ranks meet in each step


def rows_a_step(order: Order, step_s: float, cores: int) -> int:
    """Rows that a rank changes in a step."""
    share = min(1.0, cores / order.n)
    return max(1, round(share * step_s * 1e9 / (OF_RATE * CORE_S_PER_GB * 4 * order.dim)))


def rounds_of(most: int, window: int, step_s: float) -> int:
    """How many rounds there are, `most` at the most."""
    return min(most, max(LEAST_ROUNDS, int(BUDGET_S / (len(METHODS) * (1 + TIMED) * window * step_s))))


def work(line: Line, order: Order, step_ms: int, max_replay_s: float | None) -> None:
    """What one rank does; `order.steps` is the number of rounds. `max_replay_s` bounds "auto", if given."""
    torch.set_num_threads(order.threads)
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    line.send(_measured(order, step_ms / 1e3, max_replay_s))
    dist.destroy_process_group()


def _measured(order: Order, step_s: float, max_replay_s: float | None) -> dict[str, Any]:
    models = {name: Model(order, step_s) for name in METHODS}
    count = rows_a_step(order, step_s, len(os.sched_getaffinity(0)))
    shard = len(models[BARE].weight)
    generator = torch.Generator().manual_seed(order.seed + dist.get_rank())
    began = digest([models[BARE].weight.detach()])

    def drawn(steps: int) -> list[Tensor]:
        return [torch.randint(shard, (count,), generator=generator).unique() for _ in range(steps)]

    protected = models[PROTECTED]
    with mock.patch(STAND_IN, lambda tensor: not tensor.is_meta):
        guard = protected.guard = ecemb.protect(
            protected.model,
            optimizers=[protected.optimizer],
            code=ecemb.Code(n=order.n, k=order.k),
            window=order.window,
            mtbf=None if order.mtbf_s is None else timedelta(seconds=order.mtbf_s),
            max_replay=max_replay_s,
            overlap=order.overlap,
            failure_domain="rank",
            verify=0,
        )
        for rows in drawn(CHOOSING):
            for name in METHODS:
                models[name].train(rows, sleeps=name == PROTECTED)
        protected.end()
        window = int(guard.stats()["window"])
        _keep_window(guard)
        blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
        undecided: list[int] = []
        for names in turns(rounds_of(order.steps, window, step_s), METHODS, order.seed):
            batches = drawn((1 + TIMED) * window)
            for name in names:
                blocks[name].append(_block(models[name], batches, window, undecided))
        report = guard.scrub()
        answer = {
            "window": window,
            "rows": count,
            "bytes_per_s": count * 4 * order.dim / step_s,
            "blocks": blocks,
            "undecided": float(np.mean(undecided)),
            "began": began,
            "digests": {name: digest([one.weight.detach()]) for name, one in models.items()},
            "wrong_words": report.wrong_words,
            "scrubbed": report.complete,
        }
        guard.close()
    return answer


def _keep_window(guard: ecemb.Guard) -> None:
    """The window stays as it was chosen: steps of the other models would change it."""
    window = guard._transactions.window
    setattr(window, "begin", lambda: None)  # noqa: B010 - of this object alone
    setattr(window, "end", lambda _: None)  # noqa: B010


def _block(model: Model, batches: Sequence[Tensor], first: int, undecided: list[int]) -> tuple[float, float]:
    """Trains a block; processor time of this process and wall time, in seconds, after its first steps."""
    dist.barrier()
    wall = cpu = 0.0
    for number, rows in enumerate(batches):
        if number == first:
            wall, cpu = time.perf_counter(), time.process_time()
        model.train(rows)
        if number >= first and model.guard is not None:
            undecided.append(model.guard.next_step - model.guard._memory.committed)
    spent = time.process_time() - cpu, time.perf_counter() - wall
    model.end()
    return spent


def rows_of(answers: Sequence[Mapping[str, Any]], labels: Mapping[str, Label]) -> list[Row]:
    """All metrics of one length of a step.

    Raises:
        WrongResult: the models differ, or parity doesn't fit the rows.
    """
    for rank, answer in enumerate(answers):
        ends = answer["digests"]
        if len(set(ends.values())) > 1 or ends[BARE] == answer["began"]:
            raise WrongResult(f"rank {rank}: the models end as {ends}, from {answer['began']}")
        if answer["wrong_words"] or not answer["scrubbed"]:
            raise WrongResult(f"rank {rank}: {answer['wrong_words']} words of parity don't fit the rows")
    rounds = len(answers[0]["blocks"][BARE])
    strata, window = Strata([True] * rounds, 1), answers[0]["window"]
    cpu, wall = ({name: _each(answers, name, place) for name in METHODS} for place in (0, 1))
    slowest = {name: each.max(axis=0) for name, each in wall.items()}
    rows: list[Row] = []
    for name in (PROTECTED, CONTROL):
        found = strata.ratio(slowest[name], slowest[BARE]).times(100, less=1)
        cells: dict[str, Label] = {**labels, "method": name}
        rows.append(Row("device_wall_pct", found.value, "%", found.low, found.high, rounds, cells))
    cores = float(((cpu[PROTECTED] - cpu[BARE]) / wall[PROTECTED]).mean())
    undecided = float(np.mean([answer["undecided"] for answer in answers]))
    return [
        *rows,
        once("device_cores", "cores", cores, **labels),
        once("replayed_windows", "windows", undecided / window, **labels),
        once("device_window_steps", "steps", window, **labels),
        once("device_mb_per_s", "MB/s", answers[0]["bytes_per_s"] / 1e6, **labels),
    ]


def _each(answers: Sequence[Mapping[str, Any]], name: str, place: int) -> Floats:
    """Seconds of each rank's blocks, [ranks, rounds]."""
    return np.array([[block[place] for block in answer["blocks"][name]] for answer in answers])
