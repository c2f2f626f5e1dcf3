"""The setting `verification`: what it costs to compare parity with rows beside training.

One guard trains in blocks of steps. In each round there is a block in which parity is compared with rows, and
two in which it is not, in random order; the second of these is the control. The first pass is over before the
first round, so the share is that of all later passes. In these blocks the share of training's time that
comparisons may take is `TIMES` the default: its cost then is large enough for pairs to decide. Comparisons of
the default are as long, and rarer by this factor. After the rounds follows one block at the default.

- `verification_cpu_pct`: processor time of all ranks in the blocks with comparisons over that in those
  without, less 1, divided by `TIMES`; the 95 % interval by resampling rounds; `control` is to include 0, and
  is divided as well.
- `verification_wall_pct`: the same for wall time of the slowest rank.
- `verification_phase_pct`: the guard's own clock, phase "verify" of its statistics, over the wall time of the
  block at the default share; the mean over ranks. A second witness.
- `verified_pct`: words of a pass that were compared in this block.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ecemb
from bench.harness.devices import begin
from bench.harness.ranks import Line
from bench.harness.result import Label, Row, WrongResult, once
from bench.questions.overhead.estimate import Strata
from bench.workloads.models import ENGINES, Batch
from bench.workloads.pairs import turns
from bench.workloads.training_rank import WARM_UP, Bare, Order, Protected, draw, protect, run
from ecemb.recovery.verify import VERIFY_SHARE, Verifier

NAME = "verification"
COMPARED, NOT, CONTROL = METHODS = "compared", "not compared", "control"
TIMES = 20
"""The share in the rounds over the default."""
STEPS, AT_DEFAULT = 100, 1000
"""Steps of a block in the rounds, and of the one at the default: several comparisons are in each."""
DRAWN = 32
"""Batches, which take turns."""


def work(line: Line, order: Order) -> None:
    """What one rank does; `order.steps` is the number of rounds."""
    torch.set_num_threads(order.threads)
    begin(order.device, int(os.environ["RANK"]))
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group(order.backend, job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    batches = draw(order, dist.get_rank(), DRAWN)
    torch.manual_seed(order.seed)
    twin = ENGINES[order.engine](order.tables, order.rows, order.dim, order.dense)
    run(Bare(twin), batches[:WARM_UP])
    guard = protect(twin, order)
    method, never = Protected(twin, guard), guard._verifier
    verifier = _passed_once(method, TIMES * VERIFY_SHARE, batches)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    ended = guard._transactions.next_step, time.perf_counter()
    for names in turns(order.steps, METHODS, order.seed):
        for name in names:
            guard._verifier = verifier if name == COMPARED else never
            if name == COMPARED:  # other blocks' steps and time are not of its account
                now = guard._transactions.next_step, time.perf_counter()
                _shift(verifier, now[0] - ended[0], now[1] - ended[1])
            taken[name].append(_block(method, batches, STEPS))
            if name == COMPARED:
                ended = guard._transactions.next_step, time.perf_counter()
    wrong = verifier.wrong_words
    verifier = _passed_once(method, VERIFY_SHARE, batches)
    compared_s, words = guard.stats()["seconds"]["verify"], verifier.verified_words
    _, wall_s = _block(method, batches, AT_DEFAULT)
    line.send(
        {
            "blocks": taken,
            "verify_s": guard.stats()["seconds"]["verify"] - compared_s,
            "wall_s": wall_s,
            "verified": (verifier.verified_words - words) / verifier._total,
            "wrong_words": wrong + verifier.wrong_words,
        }
    )
    guard.close()
    dist.destroy_process_group()


def _passed_once(method: Protected, share: float, batches: Sequence[Batch]) -> Verifier:
    """A verifier that the guard has now, after its first pass."""
    guard = method.guard
    step = guard._transactions.next_step
    guard._verifier = Verifier(guard._memory, guard._transport, guard._scrubber, share, step)
    while guard._verifier.age_s is None:
        run(method, batches)
    return guard._verifier


def _block(method: Protected, batches: Sequence[Batch], steps: int) -> tuple[float, float]:
    """Trains a number of steps; their processor time in this process, and wall time, in seconds."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for number in range(steps):
        method.train(batches[number % len(batches)])
    method.end()
    return time.process_time() - cpu, time.perf_counter() - wall


def _shift(verifier: Verifier, steps: int, seconds: float) -> None:
    """Makes the last comparison, and the next one, later by a number of steps and seconds."""
    verifier._ended_s += seconds
    if verifier._pace is not None:
        verifier._pace._last += steps
        verifier._pace.due += steps


def rows_of(answers: Sequence[Mapping[str, Any]], labels: Mapping[str, Label]) -> list[Row]:
    """All metrics.

    Raises:
        WrongResult: A comparison found a difference, or there was none.
    """
    rounds = len(answers[0]["blocks"][NOT])
    for rank, answer in enumerate(answers):
        if answer["wrong_words"] or not answer["verified"]:
            raise WrongResult(f"rank {rank}: {answer['wrong_words']} wrong words, or nothing was compared")
    strata = Strata([True] * rounds, 1)
    rows: list[Row] = []
    for place, (metric, fold) in enumerate((("cpu", np.sum), ("wall", np.max))):
        each = {
            name: fold([[block[place] for block in one["blocks"][name]] for one in answers], axis=0)
            for name in METHODS
        }
        for name in (COMPARED, CONTROL):
            found = strata.ratio(each[name], each[NOT]).times(100 / TIMES, less=1)
            cells: dict[str, Label] = {**labels, "method": name}
            rows.append(Row(f"{NAME}_{metric}_pct", found.value, "%", found.low, found.high, rounds, cells))
    phase = 100 * float(np.mean([answer["verify_s"] / answer["wall_s"] for answer in answers]))
    rows.append(once(f"{NAME}_phase_pct", "%", phase, **labels))
    rows.append(once("verified_pct", "%", 100 * answers[0]["verified"], **labels))
    return rows
