"""`make failures`: the whole matrix with real processes, its table, and its raw results."""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from bench.harness.result import commit
from failures.draws import Lengths
from failures.driver import ROOT, Death, Digests, Outcome, differences, run
from failures.hosts import SCENARIOS, Unexpected
from failures.matrix import MAIN, Chain, Chains, cells, hits
from failures.namespaces import NotPossible
from failures.plan import Exact, Plan, Sabotage, Setting, Victim
from failures.report import Results, Tally

PARITY = "stripe classes whose parity is wrong"  # one of the digests

# For each part of recovery, and for each rule of a step: a death after which it is needed.
CONTROLS: dict[Sabotage, Exact] = {
    "undo": Exact((Victim(1, False),), "exchange", 9, 20),
    "redo": Exact((Victim(1, False),), "apply", 9, 1, torn=True),
    "generators": Exact((Victim(1, False),), "between steps", 9, 3),
    "replicated": Exact((Victim(1, False),), "between steps", 9, 3),
    "rebuild": Exact((Victim(1, True),), "between steps", 9, 3),
    "agreement": Exact((Victim(1, False),), "prepare", 9, 1),
    "journal": Exact((Victim(1, False),), "state", 9, 3),
    "inbox": Exact((Victim(1, False),), "exchange", 9, 20),
}
CONTROLLED = Setting(4, 4, 3, "Adagrad", steps=16)


class References:
    """What undisturbed runs end with; each setting runs once, whichever thread asks first."""

    def __init__(self, lengths: Lengths, stop: threading.Event | None = None) -> None:
        self._lengths, self._stop = lengths, stop
        self._known: dict[Setting, Digests] = {}
        self._turns: dict[Setting, threading.Lock] = defaultdict(threading.Lock)

    def of(self, setting: Setting) -> Digests:
        """The digests, which don't depend on who loads the data."""
        setting = setting.plain
        with self._turns[setting]:
            return self._run(setting)

    def _run(self, setting: Setting) -> Digests:
        if setting not in self._known:
            outcome = run(Plan(setting, forked=True), self._stop)
            wrong = [d for d in outcome.digests.values() if d[PARITY] != "[]"]
            if outcome.problem or wrong or len(outcome.digests) != setting.ranks:
                raise RuntimeError(f"the undisturbed run failed: {outcome.problem}; see {outcome.folder}")
            self._lengths.learn(setting, outcome.lines, outcome.calls)
            self._known[setting] = outcome.digests
            outcome.discard()
        return self._known[setting]


def verdict(reference: Digests, outcome: Outcome) -> str:
    """Empty if the run is bit-identical, else what is wrong with it."""
    found = differences(reference, outcome.digests)
    names = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
    return "; ".join(filter(None, [outcome.problem, names]))


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix; returns the exit code."""
    parser = argparse.ArgumentParser(description="the failure matrix, with real processes")
    parser.add_argument("--seed", type=int, default=None, help="of all choices; printed")
    parser.add_argument("--cells", nargs="+", metavar="PATTERN", help="only these, e.g. 'capture:*memory*'")
    parser.add_argument("--device", default="cpu", help="of tables that have images: cpu or cuda")
    parser.add_argument("--list", action="store_true", help="print the cells' names, and end")
    parser.add_argument("--plan", type=Path, help="repeat one run: a plan.json that was kept")
    parser.add_argument("--no-hosts", action="store_true", help="leave out those of several hosts")
    parser.add_argument("--no-controls", action="store_true", help="don't break recovery by hand")
    parser.add_argument(
        "--torchrun",
        action="store_true",
        help="all workers as its commands, and none forked from its agent: takes longer",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="so many runs at a time (2); does not change them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the raw results")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that runs are ended and cleared away
    asked, all_of_it = cells(*(args.cells or ()), device=args.device), args.cells is None
    if args.list:
        print(*asked, sep="\n")
        return 0
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed: {seed} (repeat with --seed {seed})", flush=True)
    lengths, stop = Lengths(), threading.Event()
    references = References(lengths, stop)
    if args.plan:
        plan = Plan.read(args.plan)
        outcome = run(plan)
        return int(_told("run", plan, outcome, verdict(references.of(plan.setting), outcome)))
    tree = commit()
    kept = args.json is not None and args.json.resolve().is_relative_to(ROOT / "bench" / "results")
    if kept and tree.endswith("-dirty"):
        print(f"the tree differs from its commit: {args.json} will not be written", flush=True)
    began = time.monotonic()
    results = Results(seed, args.jobs)
    matrix = _Matrix(
        Chains(seed, lengths, asked, forked=not args.torchrun), lengths, references, results, stop
    )
    rest: list[Callable[[], None]] = []
    if all_of_it:
        rest.append(functools.partial(_resumed, references, results, stop))
    if not args.no_hosts and all_of_it:
        rest += [functools.partial(_host, name, results) for name in SCENARIOS]
    if not args.no_controls:
        rest += [
            functools.partial(_control, part, event, references, results, stop)
            for part, event in CONTROLS.items()
        ]
    try:
        _side_by_side(args.jobs, matrix.run_all, rest, stop)
    except (KeyboardInterrupt, SystemExit):
        results.interrupt(asked)
    print(results)
    print(f"{time.monotonic() - began:.0f} s in all, {args.jobs} runs at a time, seed {seed}")
    if kept and commit() != tree:
        print(f"not written: the tree has changed since {tree}, which this ran on")
    elif args.json and not (kept and tree.endswith("-dirty")):
        results.write(args.json)
    return int(results.failed)


def _side_by_side(
    jobs: int, until_done: Callable[[], None], rest: list[Callable[[], None]], stop: threading.Event
) -> None:
    """Threads that take one thing after another: `until_done` in each, then what is left of the rest."""

    def work() -> None:
        until_done()
        while not stop.is_set():
            try:
                one = rest.pop(0)
            except IndexError:
                return
            one()

    with ThreadPoolExecutor(jobs) as threads:
        try:
            for done in as_completed([threads.submit(work) for _ in range(jobs)]):
                done.result()
        finally:
            stop.set()  # each then ends its run


class _Matrix:
    """Runs chains until every cell has been met or given up; from several threads."""

    def __init__(
        self,
        chains: Chains,
        lengths: Lengths,
        references: References,
        results: Results,
        stop: threading.Event,
    ) -> None:
        self._chains, self._lengths, self._references = chains, lengths, references
        self._results, self._stop = results, stop
        self._turn = threading.Lock()
        self._number = itertools.count()

    def run_all(self) -> None:
        """Take chain after chain, until none is left. Others may still come to miss some of theirs."""
        while not self._stop.is_set():
            with self._turn:
                chain = next(iter(self._chains), None)
                number = next(self._number)
            if chain is None:
                return
            reference = self._references.of(chain.plan.setting)
            outcome = run(chain.plan, self._stop)
            if not self._stop.is_set():
                with self._turn:
                    self._count(number, chain, reference, outcome)

    def _count(self, number: int, chain: Chain, reference: Digests, outcome: Outcome) -> None:
        self._lengths.learn(chain.plan.setting, outcome.lines, outcome.calls)
        wrong = verdict(reference, outcome)
        met = hits(chain, outcome)
        missed = [cell for index, cell in chain.cells.items() if index not in met]
        folder = str(outcome.folder)
        _told(f"run {number}", chain.plan, outcome, wrong)
        self._results.add(chain, outcome, met, wrong and f"{folder}: {wrong}")
        for cell in missed:
            if self._chains.missed(cell):
                print(f"    not met, to be tried again: {cell}")
            else:
                print(f"    NOT MET: {cell}")
                self._results.unmet.append(cell)


def _resumed(references: References, results: Results, stop: threading.Event) -> None:
    """More memory is lost than the code survives, and a checkpoint is there: training resumes from it.

    In new arenas, whose rank state has another place, so that parity is compared with rows alone.
    """
    victims = tuple(Victim(rank, True) for rank in (2, 0, 3))
    plan = Plan(MAIN, (Exact(victims, "exchange", 17, 20),), forked=True, saves=5)
    outcome = run(plan, stop)
    if stop.is_set():
        return
    reference = {rank: digests | {"parity": ""} for rank, digests in references.of(MAIN).items()}
    for digests in outcome.digests.values():
        digests["parity"] = ""
    wrong = verdict(reference, outcome)
    seconds = [death.recovery_s for death in outcome.deaths[:1] if death.recovery_s is not None]
    wrong = wrong or ("" if seconds else "nobody died")
    results.others["3 lost, resumed from a checkpoint"] = Tally(1, int(not wrong), seconds)
    _told("more is lost than the code survives, and a checkpoint is there", plan, outcome, wrong)


def _host(name: str, results: Results) -> None:
    """A scenario in which several agents of torchrun stand for hosts, as a further line."""
    try:
        result = SCENARIOS[name]()
    except NotPossible as error:
        print(f"hosts, {name}: left out: {error}", flush=True)
        return
    except Unexpected as error:
        print(f"hosts, {name}: FAILED: {error}", flush=True)
        results.others[f"hosts: {name}"] = Tally(1, 0)
        return
    print(f"hosts, {name}: {'identical' if result.identical else 'FAILED'}: {result.note}", flush=True)
    seconds = [] if result.seconds_recovery is None else [result.seconds_recovery]
    results.others[f"hosts: {name}"] = Tally(1, int(result.identical), seconds)


def _control(
    part: Sabotage, event: Exact, references: References, results: Results, stop: threading.Event
) -> None:
    plan = Plan(CONTROLLED, (event,), part, forked=True)
    reference = references.of(plan.setting)
    outcome = run(plan, stop)
    if stop.is_set():
        return
    noticed = bool(verdict(reference, outcome)) and bool(outcome.deaths)
    print(f"without {part!r}: {'noticed' if noticed else 'NOT NOTICED'}", flush=True)
    results.controls[part] = noticed
    outcome.discard()


def _told(name: str, plan: Plan, outcome: Outcome, wrong: str) -> bool:
    """Say how a run ended, in one piece; returns whether it failed."""
    setting = plan.setting
    loading = ", loading workers" if setting.workers else ""
    forked = ", staying" if plan.stays else ", warm" if plan.warm else ", forked" if plan.forked else ""
    what = f"{setting.ranks} ranks, {setting.code}, {setting.optimizer}{loading}{forked}"
    lines = [f"{name}: {what}: {'FAILED' if wrong else 'identical'}, {outcome.seconds:.0f} s"]
    for (event, what), ranks in _grouped(outcome.deaths).items():
        lines.append(f"    start {event}: {what.replace('RANKS', ' and '.join(map(str, ranks)))}")
        if event + 1 in outcome.refused:
            lines.append(
                f"    start {event + 1}: refused by all, {outcome.refused[event + 1]:.1f} s after that"
            )
    if wrong:
        lines += [
            f"    {wrong}",
            f"    kept: {outcome.folder} (repeat with --plan {outcome.folder}/plan.json)",
        ]
    else:
        outcome.discard()
    print("\n".join(lines), flush=True)
    return bool(wrong)


def _grouped(deaths: Iterable[Death]) -> dict[tuple[int, str], list[int]]:
    """Ranks that died together at the same place."""
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for death in deaths:
        groups[death.event, f"{death.what} RANKS: {death.where}"].append(death.rank)
    return groups
