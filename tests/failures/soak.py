"""`make soak`: random kills of every kind every few seconds, for minutes, under training that loses nothing.

    python tests/failures soak [--minutes 15] [--seed N] [--json FILE]

torchrun starts the workers by `ecemb-run`; with `--start stays` the training is in `ecemb.run` as well, and
workers' processes stay when others die; with `--start forked` they are forked from torchrun's agent.

Ends with code 1 if a step was lost, if the end differs by one bit from that of an undisturbed run of as many
steps, if a scrub saw something wrong, or if memory, files, descriptors or threads grew.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from bench.harness.result import Arguments, Row, document, once, summary, write
from failures.board import PHASES, STARTING, Board
from failures.driver import Job, Outcome, differences, follow, run
from failures.plan import Plan, Setting, Timed, Victim

SOAKED = Setting(6, 6, 4, "Adagrad", steps=10**7)
IN_WINDOWS = dataclasses.replace(SOAKED, window=5, overlap=True)
"""With fewer exchanges; a failure takes back steps."""
WHOLE_STEPS = 25
"""A rebuild beside training is over after this number of steps, at most."""
MARGIN_STEPS = 500  # from the furthest step seen to the last one: nobody has passed that when it is fixed
TRAINING_S = (0.3, 3.0)  # from the first step of a start to the kill
STARTING_S = 0.5  # from a phase of a start to the kill, at most
STOPPED_S = 22.0  # how long a rank stays stopped, if nobody ends it
OLD_STARTS = 6
WARM, STAYS, FORKED = STARTS = ("warm", "stays", "forked")
KINDS = {"processes": 32, "memory": 28, "while starting": 26, "torchrun": 8, "stopped": 6}  # out of 100
SLACK_BYTES = 16 << 20


class Soak(Job):
    """A job whose events are drawn while it runs, until its time is over.

    Args:
        seed: of all choices.
        seconds: how long to kill.
        setting: what is trained.
        start: how workers start, one of `STARTS`.
    """

    def __init__(self, seed: int, seconds: float, setting: Setting = SOAKED, *, start: str = WARM) -> None:
        self._random = random.Random(seed)
        self._events: dict[int, Timed] = {}
        self._kinds: dict[int, str] = {}
        self._lost: set[int] = set()  # ranks whose memory may be gone when the next start begins
        self._lost_last: set[int] = set()  # in the last event
        self._stopped: tuple[Board, float] | None = None
        self._until = time.monotonic() + seconds
        self.steps = -1
        self._setting = setting
        super().__init__(Plan(setting, forked=True, warm=start != FORKED, stays=start == STAYS, soak=True))

    def watch(self) -> None:
        super().watch()
        now = time.monotonic()
        if self._stopped is not None and now > self._stopped[1]:
            if self._stopped[0].alive:
                os.kill(self._stopped[0].get("pid"), signal.SIGKILL)
            self._stopped = None
        if now > self._until and self.steps < 0:
            self.steps = MARGIN_STEPS + max((b.get("step") for b in [*self._past, *self._look()]), default=0)
            partial = self.folder / "stop.new"
            partial.write_text(str(self.steps))
            partial.rename(self.folder / "stop")
        for path, board in list(self._boards.items()):
            if 0 <= board.get("start") < self._start - OLD_STARTS:  # -1: its process is only beginning
                self._past.append(self._boards.pop(path))
                path.unlink()

    def event(self, start: int, boards: list[Board]) -> Timed | None:
        if start not in self._events and self.steps < 0:
            before = (board for board in self._boards.values() if board.get("start") == start - 1)
            if any(board.get("whole") == 1 for board in before):  # then the last event came
                self._lost = set(self._lost_last)
            self._kinds[start] = self._random.choices(list(KINDS), list(KINDS.values()))[0]
            self._events[start] = self._draw(self._kinds[start])
        return self._events.get(start) if self.steps < 0 else None

    def kill(self, victims: dict[Board, bool], event: Timed) -> None:
        if self._kinds.get(self._start) != "stopped":
            super().kill(victims, event)
            return
        for board in victims:
            if board.alive:
                os.kill(board.get("pid"), signal.SIGSTOP)
                board.fell(self._start, lost=False)
                self._stopped = board, time.monotonic() + STOPPED_S

    def _draw(self, kind: str) -> Timed:
        starting = kind == "while starting"
        if not (starting or self._setting.background):  # training has begun, so what was lost is rebuilt
            self._lost = set()
        ranks, r = self._setting.ranks, self._setting.tolerated
        count = 1 if kind == "stopped" else self._random.randint(1, r)
        losing = kind == "memory" or (kind in ("while starting", "torchrun") and self._random.random() < 0.5)
        victims: list[Victim] = []
        self._lost_last = set()
        for rank in self._random.sample(range(ranks), count):
            lost = losing and len(self._lost | {rank}) <= r
            if lost:
                self._lost.add(rank)
                self._lost_last.add(rank)
            victims.append(Victim(rank, lost))
        phases = [phase for phase, group in PHASES.items() if group in STARTING]
        if starting:
            pause_s = self._random.random() * STARTING_S
            return Timed(tuple(victims), self._random.choice(phases), None, pause_s)
        return Timed(tuple(victims), None, 0, self._random.uniform(*TRAINING_S), kind == "torchrun")

    @property
    def stayed(self) -> int:
        """How often a process stayed when another one had died, and trained again."""
        return sum(max(0, board.get("stayed")) for board in [*self._past, *self._look()])

    def kinds(self, outcome: Outcome) -> Counter[str]:
        """How often each kind of event has come."""
        return Counter(self._kinds[event] for event in {death.event for death in outcome.deaths})


@dataclasses.dataclass(frozen=True)
class Growth:
    """Something that was looked at after the same number of steps of every start, by every rank."""

    name: str
    early: float
    late: float
    allowed: float

    @property
    def grew(self) -> bool:
        return self.late > self.allowed

    def __str__(self) -> str:
        return f"{self.name}: {self.early:.0f} early, {self.late:.0f} late{', GREW' if self.grew else ''}"


def growth(samples: dict[int, list[dict[str, int]]]) -> list[Growth]:
    """Compares the first third of the starts that were looked at with the last one.

    Args:
        samples: start -> what its ranks saw.
    """
    starts = sorted(samples)
    third = max(1, len(starts) // 3)
    found: list[Growth] = []
    for name in next(iter(samples.values()))[0] if samples else ():
        early = [sample[name] for start in starts[:third] for sample in samples[start]]
        late = [sample[name] for start in starts[-third:] for sample in samples[start]]
        if name == "resident_bytes":
            middle = statistics.median(early)
            found.append(Growth(name, middle, statistics.median(late), 1.05 * middle + SLACK_BYTES))
        elif name == "arena_bytes":
            middle = statistics.median(early)
            found.append(Growth(name, middle, statistics.median(late), 1.05 * middle + (1 << 20)))
        else:
            found.append(Growth(name, max(early), max(late), max(early)))
    return found


def read_samples(folder: Path) -> dict[int, list[dict[str, int]]]:
    found: dict[int, list[dict[str, int]]] = defaultdict(list)
    for path in folder.glob("*.json"):
        found[int(path.name.split(".")[0])].append(json.loads(path.read_text()))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the soak; returns the exit code."""
    parser = argparse.ArgumentParser(prog="soak", description="random kills for minutes")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="how long to kill; the reference comes after"
    )
    parser.add_argument("--windows", action="store_true", help="train in windows, with overlap")
    parser.add_argument("--background", action="store_true", help="train on while what was lost is rebuilt")
    parser.add_argument(
        "--start",
        choices=STARTS,
        default=WARM,
        help="by ecemb-run, also in ecemb.run, or from torchrun's agent",
    )
    parser.add_argument("--seed", type=int, default=None, help="of all choices; printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the raw results")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the run is ended and cleared away
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed: {seed} (repeat with --seed {seed})", flush=True)
    here = {path.name for path in Path("/dev/shm").glob("ecemb-failures-*")}
    setting = IN_WINDOWS if args.windows else SOAKED
    setting = dataclasses.replace(setting, background=WHOLE_STEPS if args.background else 0)
    job = Soak(seed, 60 * args.minutes, setting, start=args.start)
    outcome = follow(job)
    left = {path.name for path in Path("/dev/shm").glob("ecemb-failures-*")} - here
    alarms = outcome.folder / "alarms"
    problems = [outcome.problem] if outcome.problem else []
    if alarms.exists():
        problems.append(f"scrubs saw something wrong: {alarms.read_text()}")
    if job.arenas.name in left:
        problems.append(f"left behind in /dev/shm: {job.arenas.name}")
    grown = growth(read_samples(outcome.folder / "samples"))
    problems += [str(one) for one in grown if one.grew]
    wrong: list[str] = []
    if not outcome.problem:
        print(f"{outcome.starts} starts, {job.steps} steps; now without any failure", flush=True)
        reference = run(Plan(dataclasses.replace(setting, steps=job.steps), forked=True, soak=True))
        wrong = differences(reference.digests, outcome.digests) or [reference.problem]
        wrong = [text for text in wrong if text]
        problems += wrong[:6]
        if not reference.problem:
            reference.discard()
    kinds, recoveries, stayed = job.kinds(outcome), _recoveries(outcome), job.stayed
    if args.start == STAYS and not stayed:
        problems.append("no process stayed when another one had died")
    identical = not wrong and not outcome.problem
    print(
        f"\n{setting.ranks} ranks, {setting.code}: {len(outcome.deaths)} deaths "
        f"in {outcome.starts - 1} events"
    )
    print("events: " + ", ".join(f"{kind} {count}" for kind, count in kinds.items()))
    print("died: " + ", ".join(f"{w} {n}" for w, n in Counter(d.what for d in outcome.deaths).items()))
    print(f"steps: {job.steps}; bit-identical: {identical}")
    if stayed:
        print(f"{stayed} times a process stayed, and trained again")
    if recoveries:
        print(
            f"recovery: {statistics.median(recoveries):.1f} s in the middle, {max(recoveries):.1f} s at most"
        )
    print(*grown, sep="\n")
    for problem in problems:
        print(f"FAILED: {problem}")
    if problems:
        print(f"kept: {outcome.folder}")
    else:
        outcome.discard()
    if args.json:
        rows = [
            once("soak_minutes", "min", args.minutes),
            once("soak_steps", "steps", job.steps),
            once("steps_lost", "steps", 0) if not outcome.problem else once("failed", "ratio", 1),
            once("bit_identical", "ratio", int(identical)),
            *(once("soak_events", "events", count, kind=kind) for kind, count in kinds.items()),
            *([once("soak_stayed", "processes", stayed)] if stayed else []),
            *(once("early", "count", one.early, of=one.name) for one in grown),
            *(once("late", "count", one.late, of=one.name) for one in grown),
        ]
        if recoveries:
            rows.append(summary("recovery_s", "s", recoveries, setting="soak"))
        _write(args.json, seed, rows)
    return int(bool(problems))


def _recoveries(outcome: Outcome) -> list[float]:
    """Seconds from each event to the next committed step; the last of those that came before it counts."""
    last = {death.event: death.recovery_s for death in outcome.deaths if death.recovery_s is not None}
    return [round(seconds, 2) for seconds in last.values()]


def _write(path: Path, seed: int, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, document("soak", Arguments(seed=seed), rows))
