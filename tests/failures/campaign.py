"""Many runs, and the table of where the kills fell."""

from __future__ import annotations

import argparse
import dataclasses
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from failures.board import PHASES
from failures.draws import Dealer, Lengths
from failures.driver import WHAT, Death, Digests, Outcome, differences, run
from failures.plan import Exact, Plan, Sabotage, Setting, Victim

KILLS = 80
COLUMNS = (*WHAT, "identical")
PARITY = "stripe classes whose parity is wrong"  # one of the digests

# For each part of recovery: a death after which it is needed.
CONTROLS: dict[Sabotage, Exact] = {
    "undo": Exact((Victim(1, False),), "exchange", 9, 20),
    "redo": Exact((Victim(1, False),), "apply", 9, 1, torn=True),
    "generators": Exact((Victim(1, False),), "between steps", 9, 3),
    "replicated": Exact((Victim(1, False),), "between steps", 9, 3),
    "rebuild": Exact((Victim(1, True),), "between steps", 9, 3),
}


class References:
    """What undisturbed runs end with; each setting runs once."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._known: dict[Setting, Digests] = {}

    def of(self, setting: Setting) -> Digests:
        """The digests, which don't depend on who loads the data."""
        setting = dataclasses.replace(setting, workers=0)
        if setting not in self._known:
            outcome = run(Plan(setting))
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
    """Run the campaign; returns the exit code."""
    parser = argparse.ArgumentParser(description="kill real processes at random moments")
    parser.add_argument("--kills", type=int, default=KILLS, help="run until so many have fallen")
    parser.add_argument("--seed", type=int, default=None, help="of all choices; printed")
    parser.add_argument("--plan", type=Path, help="repeat one run: a plan.json that was kept")
    parser.add_argument("--no-controls", action="store_true", help="don't break recovery by hand")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that runs are ended and cleared away
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed: {seed} (repeat with --seed {seed})")
    began = time.monotonic()
    lengths = Lengths()
    references = References(lengths)
    plans = [Plan.read(args.plan)] if args.plan else Dealer(seed, lengths).plans()
    table = _Table()
    failed = 0
    for number, plan in enumerate(plans):
        if table.kills >= args.kills:
            break
        reference = references.of(plan.setting)
        outcome = run(plan)
        lengths.learn(plan.setting, outcome.lines, outcome.calls)
        wrong = verdict(reference, outcome)
        failed += _report(f"run {number}", plan, outcome, wrong)
        table.add(plan, outcome, not wrong)
    if not args.plan and not args.no_controls:
        for part, event in CONTROLS.items():
            plan = Plan(Setting(4, 4, 3, "Adagrad"), (event,), part)
            reference = references.of(plan.setting)
            outcome = run(plan)
            noticed = bool(verdict(reference, outcome))
            print(f"recovery without {part!r}: {'noticed' if noticed else 'NOT NOTICED'}", flush=True)
            failed += not noticed
            outcome.discard()
    print(table)
    print(f"{table.kills} kills, {time.monotonic() - began:.0f} s in all, seed {seed}, {failed} failed")
    return int(failed > 0)


def _report(name: str, plan: Plan, outcome: Outcome, wrong: str) -> bool:
    """Say how a run ended; returns whether it failed."""
    setting = plan.setting
    loading = ", loading workers" if setting.workers else ""
    what = f"{setting.ranks} ranks, code ({setting.n}, {setting.k}), {setting.optimizer}{loading}"
    print(f"{name}: {what}: {'NOT IDENTICAL' if wrong else 'identical'}, {outcome.seconds:.0f} s")
    for (event, what), ranks in _grouped(outcome.deaths).items():
        print(f"    start {event}: {what.replace('RANKS', ' and '.join(map(str, ranks)))}")
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


class _Table:
    """Deaths by phase, of processes and of memory; runs by setting."""

    def __init__(self) -> None:
        self._deaths: dict[str, Counter[str]] = defaultdict(Counter)
        self._runs: dict[str, list[tuple[bool, int, float]]] = defaultdict(list)

    @property
    def kills(self) -> int:
        """How many processes were killed."""
        return sum(row["process"] + row["memory"] for row in self._deaths.values())

    def add(self, plan: Plan, outcome: Outcome, identical: bool) -> None:
        """Count a run."""
        for death in outcome.deaths:
            row = self._deaths[death.phase]
            row[death.what] += 1
            row["identical" if identical else "different"] += 1
        setting = plan.setting
        key = f"{setting.ranks} ranks ({setting.n}, {setting.k}) {setting.optimizer}"
        for name in [key, "with loading workers"] if setting.workers else [key]:
            self._runs[name].append((identical, len(outcome.deaths), outcome.seconds))

    def __str__(self) -> str:
        lines = ["", f"{'died while':32}" + "".join(f"{name:>11}" for name in COLUMNS)]
        total = Counter[str]()
        for phase in PHASES:
            row = self._deaths[phase]
            total += row
            if row:
                lines.append(_row(phase, row))
        lines += [_row("all", total), ""]
        lines.append(f"{'trained':32}{'runs':>11}{'deaths':>11}{'identical':>11}{'seconds':>11}")
        for name, runs in sorted(self._runs.items()):
            same, kills = sum(run[0] for run in runs), sum(run[1] for run in runs)
            seconds = sum(run[2] for run in runs)
            lines.append(f"{name:32}{len(runs):11}{kills:11}{same:11}{seconds:11.0f}")
        return "\n".join(lines)


def _row(name: str, row: Counter[str]) -> str:
    return f"{name:32}" + "".join(f"{row[column]:11}" for column in COLUMNS)
