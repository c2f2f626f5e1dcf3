"""What do Check-N-Run's checkpoints write, keep and stall, and what do restores from few bits cost?

`baselines.check_n_run`, which follows Eisenman et al. (NSDI 2022), beside what is published: write bandwidth
6-17 times lower, storage capacity 2.5-8 times lower, no loss of quality beyond 0.01 %, one baseline in about
8 intervals, tracking below 1 % of the time. What rows lose by bits and method is asked by `quantization`.

Bytes, on a table of one rank whose rows change by a pattern of access:

- "published" is **calibrated** so that 26 % of the rows change in an interval and 52 % in 11, as published.
  "locality 2021" and "locality 2022" have the spread of rates of recorded production batches of Meta's, an
  interval being one such batch; since the statistics don't say how many rows the tables have, that is
  **calibrated** on the published 52 %. None is tuned to bytes, reductions or baselines.
- `changed_rows_pct`: what patterns come to, in 1, 11 and 22 intervals, and their laws.
- `written_pct`, `stored_pct`: bytes of rows that a checkpoint writes, and that are kept when it is whole, in
  percent of a full one; all exact, without optimizer state. Mean over 24 intervals, smallest and largest. The
  first checkpoint, which is always full, doesn't count. While a checkpoint is being written, the one before
  it is kept as well. The upper panels of the picture.
- `intervals_between_full`: from one baseline of intermittent to the next.
- `bandwidth_reduction`, `capacity_reduction`: bytes of full float32 checkpoints, over the mean that is
  written and the most that is kept. `state`: per-row optimizer state, which a full checkpoint also has,
  and how it is stored: one float a row (row-wise Adagrad), or as many as the weight has. Codes have two
  float32 of metadata a row.

Where reductions are in the published range, and where not: that range is over the paper's jobs, whose
dimensions, optimizer states and bits are not published. Differentials alone reduce what is written about
twice, and keep more than full checkpoints do: a baseline beside the differential. All else is bits: rows of
64 take 3.6, 6.4, 8 and 10.7 times less with 8, 4, 3 and 2 bits, wider rows less still. So without state, or
with one float a row, 8 to 3 bits come to about 7 to 17 times less written, and 8 to 2 bits to about 2.4 to 7
times less kept. 2 bits write less than the paper has at best: all that is counted here is rows. State of as
many floats as the weight has, exact, leaves about 4 times less written and hardly less kept, whatever the
bits of the weights; with state in 8 bits, 8 to 12 times less is written, and 2.4 to 3.6 times less kept.

Quality, in trainings as those of `cpr`, restored L times, evenly spread, from checkpoints of b bits
(adaptive; asymmetric with 8), each beside the training of the same seed that is never restored:

- `log_loss`, `auc`: of that one, on what is held out.
- `loss_added_pct`, `loss_added`, `auc_lost`: means over seeds, with confidence intervals of 95 % by Student's
  t. The lower panels of the picture. "2, then 8" is a job that planned for one restore, and falls back to 8
  bits when there are more. `rule`: what `choose_bits` says of these bits for L restores.
- `budget_pct`: what may be added to the log loss. "published": the paper's budget. "calibrated": in round
  figures, the least by which the rule chooses here.
- `within_budget`: whether the mean of `loss_added_pct` is within it. `least_bits`: the fewest that are, 32
  standing for exact rows, beside those that the rule chooses.

The rule holds here, for 1, 3 and 20 restores, with a budget that is 25 times the published one: it then takes
the fewest bits that will do, and one bit less costs four to seven times as much. The published budget asks
for more bits in trainings like these. They are short, 128,000 samples where the paper's have billions: of 20
restores the last is 24 steps before the end, and most rows are not met again by then, so that nothing of what
was rounded is trained away. Trainings that are 4 times as long, with the chosen bits, lose as much: rows that
are rarely met stay rounded. A short job that has to keep to 0.01 % takes 4 bits for a few restores, and 8 for
many.

Times, of two ranks with one thread each, under all writers by turns; all sync to
the same disk:

- `stall_ms`: from the end of a step's body until training goes on, on the slowest rank.
- `stall_over_synchronous`: that, over the stall of synchronous files in the same round.
- `whole_after_ms`: until the checkpoint is whole; training waits meanwhile, as it wouldn't in earnest.
- `checkpoint_cpu_ms`: processor time of both ranks and of the processes that write for them, until then.
- `checkpoint_bytes`: written by both ranks, the mean over all checkpoints, full ones included.
- `tracking_pct`: what following rows takes, of the other time of a step. The optimizer's gradient names each
  row of the rank's shard once a step.
- `tracking_ns_per_row`: the time to mark a row, for each of 65,536 lookups, repeats included, in tables of
  `table_rows` rows; low row numbers are frequent. TorchRec's own `ModelDeltaTracker` keeps ids and makes them
  distinct when they are read, here after each batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from bench.harness.result import Arguments, Row
from bench.harness.side_by_side import side_by_side
from bench.questions.check_n_run.quality import Size, quality
from bench.questions.check_n_run.stall import Scale as Stalls
from bench.questions.check_n_run.stall import stalls
from bench.questions.check_n_run.volumes import Scale as Volumes
from bench.questions.check_n_run.volumes import volumes


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        volumes: Of bytes.
        quality: Of trainings.
        stalls: Of times.
    """

    volumes: Volumes
    quality: Size
    stalls: Stalls


FULL = Scale(Volumes(), Size(), Stalls())
QUICK = Scale(
    Volumes(rows=20_000, dims=(16,), intervals=9, patterns=1, states=("none",)),
    Size(steps=40, batch=64, held_out=2000, seeds=2, restores=(1,), longer=(50,)),
    Stalls(
        ranks=1,
        tables=2,
        rows=500,
        dim=16,
        batch=32,
        every=2,
        repeats=2,
        table_rows=(10_000,),
        followed=1000,
        at_least_s=0.001,
    ),
)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question.

    Raises:
        WrongResult: Something else was restored than was stored, or no pattern is like what was recorded.
        RankFailed: A rank of the times did.
    """
    scale = QUICK if arguments.quick else FULL
    each = partial(side_by_side, quick=arguments.quick)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operators of the trainings are too small to be shared
    try:
        return [
            *volumes(scale.volumes, arguments.seed, each),
            *quality(scale.quality, arguments.seed, each),
            *stalls(scale.stalls, arguments.seed),
        ]
    finally:
        torch.set_num_threads(threads)
