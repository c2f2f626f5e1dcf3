"""What does partial recovery, as CPR has it, save in overhead, and what does it cost in quality?

Maeng et al. (MLSys 2021) beside `baselines.cpr`: the formulas, an emulation of saves and failures event by
event, and an emulation in trainings: N logical servers in one process hold the tables, save and fail, by the
same code that real ranks run (`baselines.cpr.saver`, `saving`, `priority`). r = 0.125, of large tables only.

Costs are **calibrated** on the published overheads of the base setting: that these come out is no evidence.
There, formula and emulation must agree within 10 %, or there is no answer. The evidence is the rest: the
sweeps, the production set-up, PLS as counted, and quality. "on the clock": failures strike at any
time; "emulated": while it trains, which is what the formulas count. `why` says what makes the figures of a
line differ.

- `overhead_pct`: of the training time. The base: 56 h of training, 8 servers, 2 failures, PLS target 0.1.
- `overhead_removed_pct`: the part of full recovery's overhead that partial recovery saves: 18 servers, 50 h,
  5 failures of 4 servers each.
- `handling_pct`: what saves and failures cost jobs under full recovery, of their training time: on average,
  and what one of ten exceeds. Published of production's jobs (poster; in brackets the range with secondary
  figures), and emulated for jobs of 56 h with failures at any time.
- `pls`: the portion of lost samples, counted over failures of one job, whose length follows.
- `bookkeeping_memory_pct`: what priorities take, of the weights of the tables that they follow. Optimizer
  state of the rows' own size would halve it.
- `log_loss`, `auc`: of what is held out, after a training without failures. A DLRM with the example's layers
  and tables of Criteo's proportions, 200 times fewer rows, sees each of its samples once; they are drawn
  beforehand, with a signal in them.
- `pls_of_trainings`: the portion of lost samples in these trainings, the same for all methods.
- `loss_added`, `auc_lost`: by failures, against the same training without.
- `loss_below_vanilla`: how much less loss is added by saving the same volume by priority, at the same PLS.
- `loss_per_pls`, `auc_per_pls`: slopes over all trainings of a setting, by least squares through 0, one for
  each seed. A PLS target of 0.4 is beyond the paper's sweep. Published is that quality is close to linear in
  PLS, and not how steep.
- `loss_in_production`: beside the poster's.
- `bookkeeping_time_pct`: what following rows and saving to memory took, of the rest of a training; in
  one process with 8 servers and small tables, beside other trainings on other cores, so a hint.
- `emulated_speed`: hours of the paper's job for an hour of one core. A training has the job's saves and
  failures, and not its size.

Means, and in brackets confidence intervals of 95 %: over jobs or, by Student's t, over seeds. `log_loss`,
`auc`, `bookkeeping_time_pct` and `emulated_speed` have medians, the smallest and the largest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from baselines.cpr.priority import PRIORITIES, large_tables
from baselines.cpr.servers import Servers
from bench.harness.result import Arguments, Row, WrongResult, once
from bench.harness.side_by_side import side_by_side
from bench.questions.cpr.overhead import of_production_jobs, overheads, pls
from bench.questions.cpr.quality import Size, of_failures, quality
from bench.workloads.planted import KAGGLE_ROWS

RUNS, QUICK_RUNS = 1000, 200
LONG, QUICK_LONG = (1000, 20), (500, 4)
"""Failures of a long job, and how many such jobs."""
SIZE = Size(steps=500, batch=256, held_out=50_000, seeds=5)
QUICK_SIZE = Size(
    steps=40, batch=64, held_out=2000, seeds=2, settings=(of_failures(2, 0.2, ("vanilla", "mfu")),)
)
FEWER = 1000
"""By how much tables whose bookkeeping is weighed are smaller than Criteo's."""
MEMORY_PCT = {"mfu": (0.78, 6.25), "ssu": (0.097, 0.78), "scar": (100.0, 100.0)}
"""Published (recalled), from the least to the most."""
DIMS = (128, 16)
"""For which our bookkeeping comes out at the least and at the most (derived)."""
MEMORY_WHY = {
    "mfu": "32 bits a row; the dim of each end is ours",
    "ssu": "32 bits for each of r of the rows; the dim of each end is ours",
    "scar": "a copy of the rows",
}


def run(arguments: Arguments) -> list[Row]:
    """Answers the question.

    Raises:
        WrongResult: Model and emulation are too far apart, or bookkeeping takes more or less than published.
    """
    size = QUICK_SIZE if arguments.quick else SIZE
    runs = QUICK_RUNS if arguments.quick else RUNS
    failures, jobs = QUICK_LONG if arguments.quick else LONG
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operators are too small to be shared
    try:
        return [
            *overheads(runs, arguments.seed),
            *of_production_jobs(runs, arguments.seed),
            *pls(failures, jobs, arguments.seed),
            *memory(),
            *quality(size, arguments.seed, partial(side_by_side, quick=arguments.quick)),
        ]
    finally:
        torch.set_num_threads(threads)


def memory() -> Iterator[Row]:
    """Bytes of bookkeeping over those of weights."""
    for method in PRIORITIES:
        for dim, published in zip(DIMS, MEMORY_PCT[method], strict=True):
            tables = {f"table {i}": torch.zeros(-(-rows // FEWER), dim) for i, rows in enumerate(KAGGLE_ROWS)}
            servers = Servers(
                {name: {"weight": weight} for name, weight in tables.items()},
                8,
                1,
                every=8,
                priority=method,
            )
            sizes = [weight.nbytes for weight in tables.values()]
            taken = 100 * servers.priority_bytes / sum(sizes[table] for table in large_tables(sizes))
            if abs(taken / published - 1) > 0.01:
                raise WrongResult(f"{method} takes {taken} % for a dim of {dim}; published is {published} %")
            labels = {"dim": dim, "why": MEMORY_WHY[method]}
            for source, value in (("published", published), ("measured", taken)):
                yield once("bookkeeping_memory_pct", "%", value, priority=method, **labels, source=source)
