"""The setting `verification`: what it costs to compare parity with rows beside training.

One guard trains in blocks of steps. In each round there is a block in which parity is compared with rows, at
the default share, and two in which it is not, in random order; the second of these is the control. The first
pass is over before the first round, so the share is that of all later passes.

- `verification_cpu_pct`: processor time of all ranks in the blocks with comparisons over that in those
  without, less 1, with the 95 % interval by resampling rounds; `control` is to include 0.
- `verification_wall_pct`: the same for wall time of the slowest rank.
- `verification_phase_pct`: the guard's own clock, phase "verify" of its statistics, over the wall time of the
  blocks with comparisons; the mean over ranks. A second witness, where other load makes the pairs wide.
- `verified_pct`: words of a pass that were compared in these blocks.
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
from bench.workloads.models import ENGINES
from bench.workloads.pairs import turns
from bench.workloads.training_rank import WARM_UP, Bare, Order, Protected, draw, protect, run
from ecemb.recovery.verify import VERIFY_SHARE, Verifier

NAME = "verification"
COMPARED, NOT, CONTROL = METHODS = "compared", "not compared", "control"
STEPS = 200
"""Steps of a block, so that several comparisons are in it; their interval is some 100 steps."""
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
    step = guard._transactions.next_step
    verifier = Verifier(guard._memory, guard._transport, guard._scrubber, VERIFY_SHARE, step)
    guard._verifier = verifier
    while verifier.age_s is None:
        run(method, batches)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    compared_s, words = guard.stats()["seconds"]["verify"], verifier.verified_words
    size, ended = len(batches), (guard._transactions.next_step, time.perf_counter())
    for names in turns(order.steps, METHODS, order.seed):
        for name in names:
            guard._verifier = verifier if name == COMPARED else never
            if name == COMPARED:  # other blocks' steps and time are not of its account
                now = guard._transactions.next_step, time.perf_counter()
                _shift(verifier, now[0] - ended[0], now[1] - ended[1])
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for number in range(STEPS):
                method.train(batches[number % size])
            method.end()
            taken[name].append((time.process_time() - cpu, time.perf_counter() - wall))
            if name == COMPARED:
                ended = guard._transactions.next_step, time.perf_counter()
    stats, total = guard.stats(), verifier.verified_words - words
    line.send(
        {
            "blocks": taken,
            "verify_s": stats["seconds"]["verify"] - compared_s,
            "verified": total / verifier._total,
            "wrong_words": verifier.wrong_words,
        }
    )
    guard.close()
    dist.destroy_process_group()


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
            found = strata.ratio(each[name], each[NOT]).times(100, less=1)
            cells: dict[str, Label] = {**labels, "method": name}
            rows.append(Row(f"{NAME}_{metric}_pct", found.value, "%", found.low, found.high, rounds, cells))
    wall_s = sum(wall for _, wall in answers[0]["blocks"][COMPARED])
    phase = 100 * float(np.mean([answer["verify_s"] for answer in answers])) / wall_s
    rows.append(once(f"{NAME}_phase_pct", "%", phase, **labels))
    rows.append(once("verified_pct", "%", 100 * answers[0]["verified"], **labels))
    return rows
