"""`make failures`: the whole matrix with real processes, its table, and its raw results."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from failures.draws import Lengths
from failures.driver import Death, Digests, Outcome, differences, run
from failures.hosts import SCENARIOS, Unexpected
from failures.matrix import MAIN, Chains, cells, hits
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
    """What undisturbed runs end with; each setting runs once."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._known: dict[Setting, Digests] = {}

    def of(self, setting: Setting) -> Digests:
        """The digests, which don't depend on who loads the data."""
        setting = setting.plain
        if setting not in self._known:
            outcome = run(Plan(setting, forked=True))
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
    parser.add_argument("--torchrun", action="store_true", help="all workers as its commands: takes longer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the raw results")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that runs are ended and cleared away
    asked, all_of_it = cells(*(args.cells or ()), device=args.device), args.cells is None
    if args.list:
        print(*asked, sep="\n")
        return 0
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed: {seed} (repeat with --seed {seed})", flush=True)
    lengths = Lengths()
    references = References(lengths)
    if args.plan:
        plan = Plan.read(args.plan)
        outcome = run(plan)
        return int(_told("run", plan, outcome, verdict(references.of(plan.setting), outcome)))
    began = time.monotonic()
    results = Results(seed)
    try:
        _matrix(Chains(seed, lengths, asked, forked=not args.torchrun), lengths, references, results)
        if all_of_it:
            _resumed(references, results)
        if not args.no_hosts and all_of_it:
            _hosts(results)
        if not args.no_controls:
            for part, event in CONTROLS.items():
                results.controls[part] = _is_noticed(part, event, references)
    except (KeyboardInterrupt, SystemExit):
        results.interrupt(asked)
    print(results)
    print(f"{time.monotonic() - began:.0f} s in all, seed {seed}")
    if args.json:
        results.write(args.json)
    return int(results.failed)


def _matrix(chains: Chains, lengths: Lengths, references: References, results: Results) -> None:
    for number, chain in enumerate(chains):
        reference = references.of(chain.plan.setting)
        outcome = run(chain.plan)
        lengths.learn(chain.plan.setting, outcome.lines, outcome.calls)
        wrong = verdict(reference, outcome)
        met = hits(chain, outcome)
        missed = [cell for index, cell in chain.cells.items() if index not in met]
        folder = str(outcome.folder)
        _told(f"run {number}", chain.plan, outcome, wrong)
        results.add(chain, outcome, met, wrong and f"{folder}: {wrong}")
        for cell in missed:
            if chains.missed(cell):
                print(f"    not met, to be tried again: {cell}")
            else:
                print(f"    NOT MET: {cell}")
                results.unmet.append(cell)


def _resumed(references: References, results: Results) -> None:
    """More memory is lost than the code survives, and a checkpoint is there: training resumes from it.

    In new arenas, whose rank state has another place, so that parity is compared with rows alone.
    """
    victims = tuple(Victim(rank, True) for rank in (2, 0, 3))
    plan = Plan(MAIN, (Exact(victims, "exchange", 17, 20),), forked=True, saves=5)
    outcome = run(plan)
    reference = {rank: digests | {"parity": ""} for rank, digests in references.of(MAIN).items()}
    for digests in outcome.digests.values():
        digests["parity"] = ""
    wrong = verdict(reference, outcome)
    seconds = [death.recovery_s for death in outcome.deaths[:1] if death.recovery_s is not None]
    wrong = wrong or ("" if seconds else "nobody died")
    results.others["3 lost, resumed from a checkpoint"] = Tally(1, int(not wrong), seconds)
    _told("more is lost than the code survives, and a checkpoint is there", plan, outcome, wrong)


def _hosts(results: Results) -> None:
    """The scenarios in which several agents of torchrun stand for hosts, as further lines."""
    for name, scenario in SCENARIOS.items():
        try:
            result = scenario()
        except NotPossible as error:
            print(f"hosts, {name}: left out: {error}", flush=True)
            continue
        except Unexpected as error:
            print(f"hosts, {name}: FAILED: {error}", flush=True)
            results.others[f"hosts: {name}"] = Tally(1, 0)
            continue
        print(f"hosts, {name}: {'identical' if result.identical else 'FAILED'}: {result.note}", flush=True)
        seconds = [] if result.seconds_recovery is None else [result.seconds_recovery]
        results.others[f"hosts: {name}"] = Tally(1, int(result.identical), seconds)


def _is_noticed(part: Sabotage, event: Exact, references: References) -> bool:
    plan = Plan(CONTROLLED, (event,), part, forked=True)
    reference = references.of(plan.setting)
    outcome = run(plan)
    noticed = bool(verdict(reference, outcome)) and bool(outcome.deaths)
    print(f"without {part!r}: {'noticed' if noticed else 'NOT NOTICED'}", flush=True)
    outcome.discard()
    return noticed


def _told(name: str, plan: Plan, outcome: Outcome, wrong: str) -> bool:
    """Say how a run ended; returns whether it failed."""
    setting = plan.setting
    loading = ", loading workers" if setting.workers else ""
    forked = ", forked" if plan.forked else ""
    what = f"{setting.ranks} ranks, {setting.code}, {setting.optimizer}{loading}{forked}"
    print(f"{name}: {what}: {'FAILED' if wrong else 'identical'}, {outcome.seconds:.0f} s")
    for (event, what), ranks in _grouped(outcome.deaths).items():
        print(f"    start {event}: {what.replace('RANKS', ' and '.join(map(str, ranks)))}")
        if event + 1 in outcome.refused:
            print(f"    start {event + 1}: refused by all, {outcome.refused[event + 1]:.1f} s after that")
    if wrong:
        print(f"    {wrong}\n    kept: {outcome.folder} (repeat with --plan {outcome.folder}/plan.json)")
    else:
        outcome.discard()
    print(end="", flush=True)
    return bool(wrong)


def _grouped(deaths: Iterable[Death]) -> dict[tuple[int, str], list[int]]:
    """Ranks that died together at the same place."""
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for death in deaths:
        groups[death.event, f"{death.what} RANKS: {death.where}"].append(death.rank)
    return groups
