"""Head to head: what does each way of surviving failures cost, and what is left after them?

Each method of `bench.methods.registry` that is compared is measured in three ways, all on the tables, the
dense part and the engines of `python -m bench overhead`:

1. *Steps*. One model under the method and two bare ones are trained in the same processes. In each round each
   of them trains one step on the same batch, in random order. Rounds are of two launches.
   - `step_cpu_pct`, `step_wall_pct`: processor time of all ranks, and wall time of the slowest, in the
     method's steps over that in the bare models', less 1. In brackets the 95 % interval, by resampling the
     rounds; so are all others, unless said otherwise. `control_cpu_pct` and `control_wall_pct` compare the
     two bare models in the same rounds: their intervals have to include 0. `nothing` is a third bare model.
   - `bare_step_s`; `window_steps`: what "auto" chose; `sent_bytes_per_step`: by a rank, for protection.
   - Full checkpoints and snapshots do nothing between two saves, and have no such rows.
2. *Saves*, of methods that save now and then: each of them is timed. A rank writes or reads at most at the
   speed of `storage`. Check-N-Run saves the rows that half an hour changes, by `check_n_run`'s published
   pattern of access.
   - `save_stall_s`: that training stands still. `save_until_written_s`: until it counts. `save_lost_s`: what
     training loses: that it stands still, and the processor time that the save takes of all ranks after that,
     over the cores, since the ranks keep all cores busy.
   - `fixed_..._s`, `..._per_gb`: the same of tables of no size, and for each GB of a rank's tables and their
     optimizer state, by a line through tables of two sizes.
   - `save_written_bytes`, `save_sent_bytes`: by a rank.
3. *Failures*. Ranks train under torchrun, all started by `ecemb-run`. torchrun restarts all of them, but
   under CPR: there `ecemb-run` replaces the rank that died, and the others stay in their processes
   (`ecemb.run`), as its paper's servers do. Six times, or three times under methods that the summary leaves
   out, one is killed with the memory of its machine: the first time after the optimizers of a step, then at
   any moment. Codes with six blocks have six ranks, and lose two of them at once in the first failure.
   Methods that save do so each eight steps here.
   - `next_step_s`: from the kill until every rank has ended a step; the restart is in it, and the
     script's own building of its tables, which takes the same time under every method. `prepare_s`: the part
     of it that the method takes, on the slowest rank. `caught_up_s`: until every rank has passed the
     interrupted step. Medians, from the smallest to the largest. `restart_sent_bytes`: by all ranks.
   - `steps_run_again`: for each failure, on the rank with most; the interrupted steps are among them.
     `steps_forgotten`: for each failure, whose updates rows have lost; a step that one of N ranks forgot
     counts as 1/N, as in CPR's PLS.
   - `bit_identical`: 1 if tables, their optimizer state and dense parameters end, on all ranks, with the
     bytes of an undisturbed training. `off_by`: their distance from those bytes, in a sixteenth of the rows,
     by the L2 norm, over the distance that the training moved them.
   - `survives_ranks`: any this many ranks may be lost at once with their memory, by the method's rule; the
     number of ranks means all.
   - `memory_over_tables`, `stored_over_tables`: the most memory that a method takes of a machine beside the
     training's own, messages included, and its files at the end, over the bytes of the rank's tables and
     their optimizer state. Methods that save keep one save.

What a job of days costs follows from these. Its mean time between failures is 14 hours, as on CPR's cluster
(published), and `tables` says how large a rank's are: as measured, or, by the lines above, 8 GB.

- `interval_s`: between saves, by the method's own rule. *Young*: sqrt(2 O_save T_fail), where O_save is
  `save_lost_s`. *PLS 0.1*: CPR's, 2 PLS N T_fail; with priorities an eighth of it. *half an hour*:
  Check-N-Run's, or Young's where that is shorter. In brackets: with the save at the ends of its interval.
- `saves_pct`: `save_lost_s` over that. `training_longer_pct`: that and `step_cpu_pct` together.
- `failure_takes_s`: of training. That of ecemb with a commit in each step is measured. A window is longer
  than there are steps between two kills here: half of its other steps, and one. Of methods that save, it is
  half an interval, and the time until a save counts if that is beside training. Under CPR it is divided by
  the ranks, since the failed one alone forgets.

Some methods are not bit-identical. `cpr` loads only the failed rank's rows, as last saved, and counts what
they forgot. The other ranks keep their rows, and if the interrupted step had not ended on all ranks, they
take it twice. `check-n-run` with bits goes back to rounded rows. All other methods return to the bytes of one
step, and continue from there. Live copies (`ecemb copies`) are ecemb's own code (2, 1).

One thread a rank, all ranks on one machine. A method that breaks its promise fails the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.harness.progress import Progress
from bench.harness.ranks import RankFailed
from bench.harness.result import Arguments, BadOption, Incomplete, Label, Row, WrongResult, by_metric
from bench.harness.torchrun import LaunchFailed
from bench.questions.compare import charged, failures, measured
from bench.questions.compare.cases import BY_METHOD, CASES, NOTHING, PRIORITIES, Case, on
from bench.questions.compare.failures import Deaths
from bench.questions.compare.families import FAMILIES
from bench.questions.compare.measured import Measured


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        methods: Of `CASES`.
        costs: Of steps and saves.
        deaths: When ranks are killed.
    """

    methods: tuple[str, ...] = tuple(case.method for case in CASES)
    costs: measured.Scale = field(default_factory=measured.Scale)
    deaths: Deaths = field(default_factory=Deaths)

    def labels(self, engine: str, case: Case) -> dict[str, Label]:
        """What tells a method's rows from others."""
        costs = self.costs
        tables = f"{costs.tables} x {costs.rows:,} x {costs.dim}"
        return {
            "engine": engine,
            "setting": f"{tables}, batch {costs.batch:,} a rank, skew {costs.skew:g}",
            "storage": f"{costs.storage_mb_s:g} MB/s a rank",
            "ranks": case.ranks,
            "method": case.method,
            "rule": case.rule if case.guard is None else "each step" if case.guard.window == 1 else "window",
        }


FULL = Scale()
QUICK = Scale(
    (NOTHING, *(family.shown for family in FAMILIES)),
    measured.Scale(
        tables=4, rows=2000, few_rows=400, dim=16, batch=64, pairs=4, launches=1, saves=3, timeout_s=280
    ),
    Deaths(kills=1, fewer=1),
)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring.

    Raises:
        BadOption: A method is unknown.
    """
    scale = QUICK if arguments.quick else FULL
    if unknown := sorted({*arguments.methods} - BY_METHOD.keys()):
        raise BadOption(f"--methods has {unknown[0]!r}; there are: {', '.join(BY_METHOD)}")
    if arguments.methods:
        return measure(replace(scale, methods=arguments.methods), arguments.engine, arguments.seed)
    if arguments.setting:
        shown = {*measured.SHOWN, *PRIORITIES}
        scale = replace(scale, methods=tuple(name for name in scale.methods if name in shown))
    return measure(scale, arguments.engine, arguments.seed)


def measure(scale: Scale, engine: str, seed: int) -> list[Row]:
    """Measures every method, and kills ranks under it.

    Raises:
        Incomplete: Methods broke their promises, or ranks or torchrun failed under them.
        LaunchFailed: The undisturbed training failed.
    """
    cases = on(engine, scale.methods)
    with Progress(f"compare, {engine}", 2 * len(cases)) as progress:
        rows, failed = _measured(scale, engine, seed, cases, progress)
    if failed:
        raise Incomplete(by_metric(rows), "\n\n".join(failed))
    return by_metric(rows)


def _measured(
    scale: Scale, engine: str, seed: int, cases: Sequence[Case], progress: Progress
) -> tuple[list[Row], list[str]]:
    """The rows of all cases, and what failed."""
    rows: list[Row] = []
    failed: list[str] = []
    costs: dict[str, Measured] = {}
    for case in cases:
        progress.part(f"{case.method}, costs")
        try:
            costs[case.method] = cost(scale, engine, case, seed)
            rows += costs[case.method].rows
        except (WrongResult, RankFailed) as error:
            failed.append(str(error))
    for ranks in sorted({case.ranks for case in cases}):
        of_size = [case for case in cases if case.ranks == ranks]
        with failures.undisturbed(scale.costs, scale.deaths, engine, ranks, of_size, seed) as reference:
            for case in of_size:
                progress.part(f"{case.method}, failures")
                labels = scale.labels(engine, case)
                try:
                    found, again = failures.killed(
                        scale.costs, scale.deaths, engine, case, seed, reference, labels
                    )
                    rows += found
                    if case.method in costs:
                        rows += charged.rows_of(
                            case, costs[case.method], again, reference.told.step_s, labels
                        )
                except (WrongResult, LaunchFailed) as error:
                    failed.append(str(error))
    return rows, failed


def cost(scale: Scale, engine: str, case: Case, seed: int) -> Measured:
    """What a method costs without failures."""
    labels = scale.labels(engine, case)
    if case.guard is not None:
        return measured.guarded(scale.costs, engine, case, case.guard, seed, labels)
    return measured.rival(scale.costs, engine, case, seed, labels)
