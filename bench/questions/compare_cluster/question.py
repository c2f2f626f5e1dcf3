"""On a cluster, head to head: what does each way of surviving failures cost a script there, and what is left?

`python -m bench compare` with --launcher, --hosts or --script. Each method trains the same script by whole
launches: the launcher starts torchrun's agent once on each host, and `ecemb-run` starts the ranks, under
every method alike. Each round has a launch of each method and two without any, in an order that the seed
draws; how many rounds there are is fixed before the first one. A method's cost compares its launches with the
first ones without any; `nothing` is the second ones.

- *Steps*: those of the first life after 30 of warm-up, without saves. `step_wall_pct`, `step_cpu_pct`: wall
  time of the slowest rank, and processor time of all ranks, over those of a training without protection, less
  1; in brackets the 95 % interval, by resampling the rounds. Of the same steps: `sent_bytes_per_step`, by a
  rank for protection; `link_bytes_per_step`, by a host over all its interfaces but the loopback.
  `bare_step_s`: without protection. `window_steps`: what "auto" chose. A window of ecemb's that is not full
  at the end of these steps is committed, and counts: that is more than its share.
- *Saves*: three in each launch, of methods that save. `save_stall_s`: that training stands still.
  `save_lost_s`: that, and what it slows four steps down by. `save_until_written_s`: until it counts, or four
  steps, if that is longer. They go to the folder that all hosts share, as fast as it takes them.
- *Failures*: of each launch, as many as asked for. A rank kills itself with SIGKILL after the optimizers of a
  step, with its memory, each time another one. torchrun restarts all ranks, and methods save each 3 steps.
  `next_step_s`: from the kill until every rank has ended a step; hosts' clocks are taken as NTP keeps them.
  `prepare_s`: the part of it that the method takes, on the slowest rank. `caught_up_s`: until every rank has
  passed the interrupted step. Medians, from the smallest to the largest. `restart_sent_bytes`: by all ranks.
- *Left*: `steps_run_again`, for each failure, on the rank with most. `steps_forgotten`: whose updates rows
  have lost; a step that one of N ranks forgot counts as 1/N. `bit_identical`: 1 if all state of all ranks
  ends with the bytes of an undisturbed training. `memory_over_tables`, `stored_over_tables`: the most memory
  of a machine that a method takes, and its files at the end, over a rank's tables with their optimizer state.
- `left_out`: a method that can't run there, and why.

`interval_s`, `saves_pct`, `training_longer_pct` and `failure_takes_s` follow as in the head to head on one
machine, by each method's own rule with 14 hours between failures, but from wall time, since a network takes
no processor's. A rank's death is no host's: `domain` says whether ecemb's blocks lie on different hosts,
which a code with n blocks needs n hosts for. Copies in others' memory lie on another host, if there are two.
"""

from __future__ import annotations

import random
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness.progress import Progress
from bench.harness.result import Arguments, BadOption, Incomplete, Label, Row, WrongResult, by_metric, once
from bench.harness.torchrun import LaunchFailed
from bench.methods.registry import METHODS, Domain
from bench.methods.registry import Place as MethodPlace
from bench.questions.compare.cases import BY_METHOD, NOTHING, Case
from bench.questions.compare.families import FAMILIES
from bench.questions.compare_cluster import answers as answered
from bench.questions.compare_cluster import rows as cluster_rows
from bench.questions.compare_cluster import steps
from bench.questions.compare_cluster.answers import Answers
from bench.questions.compare_cluster.launch import Place, clear, launch
from bench.questions.compare_cluster.options import Options, checked
from bench.questions.compare_cluster.rank import Order
from ecemb.launch.preload import imported_by

CPU_RANKS = 4
"""Ranks of a host without devices, by default."""
PRELOADED = (
    "bench.methods.registry",
    "bench.questions.compare_cluster.watched",
    "bench.workloads.training_rank",
)
WITHOUT, CONTROL = "without", NOTHING
"""Both launches of a round that have no method."""
TIMEOUT_S, SILENT_S = 1800.0, 300.0
"""Of a launch, and of a rank's waits for others."""
RESTARTS = 3
"""Of an agent's workers, for each kill."""


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    options = arguments.more if isinstance(arguments.more, Options) else checked(Options())
    return Comparison(options, arguments.seed).measure()


@dataclass(frozen=True)
class Comparison:
    """All launches of a comparison.

    Attributes:
        options: What is compared, and where.
        seed: Of what is drawn.
    """

    options: Options
    seed: int

    @property
    def place(self) -> Place:
        """Where launches run."""
        options = self.options
        ranks = options.ranks_per_host or ranks_here(options)
        return Place(
            options.launcher,
            options.hosts,
            ranks,
            (*PRELOADED, *dict.fromkeys(imported_by(str(options.script)))),
        )

    def cases(self) -> tuple[list[Case], dict[str, str]]:
        """The methods that are measured, and of those that can't be, why.

        Raises:
            BadOption: A method is unknown.
        """
        names = self.options.methods or tuple(family.shown for family in FAMILIES)
        if unknown := sorted({*names} - BY_METHOD.keys()):
            raise BadOption(f"--methods has {unknown[0]!r}; there are: {', '.join(BY_METHOD)}")
        chosen = [BY_METHOD[name] for name in dict.fromkeys(names) if name != NOTHING]
        why = {
            case.method: reason
            for case in chosen
            if (reason := hindrance(case, self.options, self.place.ranks))
        }
        return [case for case in chosen if case.method not in why], why

    def measure(self) -> list[Row]:
        """Launches all, and returns the rows.

        Raises:
            BadOption: See `cases`.
            Incomplete: Methods broke their promises, or launches failed.
            LaunchFailed: A launch without protection failed.
        """
        cases, why = self.cases()
        rounds = self.options.launches
        order = random.Random(self.seed)
        turns = [
            order.sample(names, len(names))
            for names in [[WITHOUT, CONTROL, *(c.method for c in cases)]] * rounds
        ]
        found: dict[str, list[Answers]] = {}
        failed: dict[str, str] = {}
        with self._shared() as shared, Progress("compare", 1 + rounds * (2 + len(cases))) as progress:
            progress.part(f"{NOTHING}, with failures")
            few = self._launched(shared, NOTHING, plain=0, kills=self.options.kills)
            for name in (name for turn in turns for name in turn):
                progress.part(name)
                if name in failed:
                    continue
                try:
                    found.setdefault(name, []).append(self._launched(shared, name))
                except LaunchFailed as error:
                    if name in (WITHOUT, CONTROL):
                        raise
                    failed[name] = str(error)
        undisturbed = found[WITHOUT][0]
        labels = self._labels(undisturbed)
        rows = cluster_rows.without(found[WITHOUT], found[CONTROL], few, labels)
        for case in cases:
            if case.method in failed:
                continue
            try:
                promise = METHODS[case.method](MethodPlace(Path(), Path(), every=steps.EVERY)).promise
                for one in found[case.method]:
                    answered.check(one, undisturbed.ends, promise)
                of_case = {**labels, **self._of_case(case)}
                rows += cluster_rows.of(case, found[case.method], found[WITHOUT], promise, of_case)
            except WrongResult as error:
                failed[case.method] = str(error)
        rows += [
            once("left_out", "methods", 1, **labels, method=name, why=reason) for name, reason in why.items()
        ]
        if failed:
            raise Incomplete(by_metric(rows), "\n\n".join(failed.values()))
        return by_metric(rows)

    @contextmanager
    def _shared(self) -> Iterator[Path]:
        """A folder of this comparison that all hosts see, which is removed after it."""
        above = self.options.shared
        if above is not None:
            above.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="ecemb-compare-", dir=above) as folder:
            yield Path(folder).resolve()

    def _launched(
        self, shared: Path, name: str, *, plain: int | None = None, kills: int | None = None
    ) -> Answers:
        """Trains once.

        Args:
            shared: Folder that all hosts see.
            name: Of the method, or `WITHOUT`.
            plain: Steps whose cost is measured; by default as the options say.
            kills: By default as the options say, and none without a method.

        Raises:
            LaunchFailed: The launch failed, or another training came of it.
        """
        options, place = self.options, self.place
        method = NOTHING if name == WITHOUT else name
        planned = steps.of(options.steps, options.kills)
        kills = kills if kills is not None else 0 if method == NOTHING else options.kills
        plain = planned.plain if plain is None else plain
        few = steps.APART * options.kills + steps.TAIL
        job = f"bench-compare-{secrets.token_hex(4)}"
        folder = shared / job
        for part in ("ledgers", "marks"):
            (folder / part).mkdir(parents=True)
        cut_off = planned.kill_steps if plain else range(steps.APART - 1, few - steps.TAIL, steps.APART)
        order = Order(
            folder=str(folder),
            memory=str(options.memory / job),
            job=job,
            method=method,
            script=str(options.script.resolve()),
            settings=options.settings,
            device=options.device,
            backend=options.backend,
            domain=domain(BY_METHOD[method], options.hosts),
            ranks_per_host=place.ranks_per_host,
            plain=plain,
            kills=kills,
            steps=options.steps if plain else few,
            cut_off=tuple(cut_off) if kills else (),
            victims=tuple(victims(place, options.kills)),
            noted=0 if kills else few,
            seed=self.seed,
            timeout_s=SILENT_S,
        )
        try:
            launch(place, name, order.write(), RESTARTS * (kills + 1), TIMEOUT_S)
            return answered.read(order, place.ranks)
        except (LaunchFailed, OSError, KeyError, StopIteration) as error:
            clear(place, order.memory, folder)
            if isinstance(error, LaunchFailed):
                raise
            raise LaunchFailed(
                f"{name} has not left what it was to: {type(error).__name__}: {error}"
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _labels(self, undisturbed: Answers) -> dict[str, Label]:
        """What tells this comparison's rows from another's."""
        options, place = self.options, self.place
        speeds = sorted({speed for host in undisturbed.hosts for speed in host["mbit_s"].values()})
        known = ", ".join(f"{speed:,} Mbit/s" for speed in speeds) or "unknown"
        return {
            "script": " ".join([options.script.stem, *options.settings]),
            "hosts": options.hosts,
            "ranks": place.ranks,
            "ranks_per_host": place.ranks_per_host,
            "device": options.device,
            "backend": options.backend,
            "launcher": options.launcher,
            "network": options.network or ("none" if options.hosts == 1 else known),
        }

    def _of_case(self, case: Case) -> dict[str, Label]:
        rule = case.rule if case.guard is None else "each step" if case.guard.window == 1 else "window"
        return {"method": case.method, "rule": rule, "domain": domain(case, self.options.hosts)}


def ranks_here(options: Options) -> int:
    """Ranks of a host like this one.

    Raises:
        BadOption: There is no device.
    """
    if options.device == "cpu":
        return CPU_RANKS
    import torch

    if count := torch.cuda.device_count():
        return count
    raise BadOption(
        "--device cuda has a rank for each device of a host, and this one has none: give --ranks-per-host"
    )


def hindrance(case: Case, options: Options, ranks: int) -> str:
    """Why a method can't run there; empty if it can."""
    if case.guard is not None and case.guard.code.n > ranks:
        return f"its code has n = {case.guard.code.n} blocks on as many ranks, and there are {ranks}"
    if case.method.startswith("snapshots") and ranks == 1:
        return "its copies are in the memory of other ranks, and there are none"
    if case.method in ("cpr mfu", "cpr ssu", "cpr scar") and options.device == "cuda":
        return "its priorities are counted in the host's memory, and --device is cuda"
    return ""


def domain(case: Case, hosts: int) -> Domain:
    """Over which the blocks of a method's code are spread: hosts, if there are enough of them."""
    return "host" if case.guard is not None and hosts >= case.guard.code.n else "rank"


def victims(place: Place, kills: int) -> list[int]:
    """The ranks that die one after the other: on other hosts in turn, from the last one on."""
    stride = place.ranks_per_host + 1 if place.hosts > 1 else 1
    return [(place.ranks - 1 - stride * number) % place.ranks for number in range(kills)]
