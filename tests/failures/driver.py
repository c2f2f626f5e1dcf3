"""Runs one plan: torchrun, its workers, and the deaths that come from outside.

To the driver a worker is a process, a board, and the file of an arena.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ecemb.net.wording import listed
from failures.board import NAMES, Board, fell_together
from failures.plan import Plan, Refused, Setting, Timed, Victim
from support import agents

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.004
START_S = 1200.0  # at most: a start, and the training after it
SOAK_START_S = 1800.0
END_S = 300.0  # at most: what orphans take to notice that they are

MANY = 10**6
WHAT = ("process", "memory", "exception", "torchrun")
TIMEOUT_S = 300.0  # what the workers give init_process_group
LIVE, FINISHED = (2, 3), 4  # states of an arena: what tells that the job had started, and that it is over

Digests = dict[int, dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Death:
    """Where a victim was when it died.

    Attributes:
        event: index of the plan's event.
        rank: its logical rank; torchrun's if it had none yet.
        phase: one of `board.PHASES`.
        step: the step that it was in last; -1 before the first of that start.
        what: that died: its "process", or with it its "memory", or it with "torchrun"; or nothing, if
            it was an "exception".
        place: the line at which it killed itself; empty if another process did.
        recovery_s: from then until all ranks had committed their next step; None if they never did.
    """

    event: int
    rank: int
    phase: str
    step: int
    what: str
    place: str
    recovery_s: float | None

    @property
    def where(self) -> str:
        """Phase, step and line in words."""
        step = f" of step {self.step}" if self.step >= 0 else ""
        return f"{self.phase}{step}" + (f" ({self.place})" if self.place else "")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        folder: plan, log, boards and results; `discard` removes it.
        digests: rank -> name -> digest.
        deaths: of all victims, by event.
        refused: start -> seconds from the kill until the last rank had refused, where it was refused.
        starts: how often the job was started.
        problem: why the run did not end as it should; empty if it did.
        seconds: from launch to end.
        lines: phase -> lines of code that it ran, where they were counted.
        calls: phase -> calls of kernels.
    """

    folder: Path
    digests: Digests
    deaths: tuple[Death, ...]
    refused: dict[int, float]
    starts: int
    problem: str
    seconds: float
    lines: Counter[str]
    calls: Counter[str]

    def discard(self) -> None:
        """Remove the run's folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def differences(reference: Digests, digests: Digests) -> list[str]:
    """What is not bit-identical: "rank 2: model users.weight", ...; ranks without results too."""
    found = [f"rank {rank}: no results" for rank in sorted(set(reference) - set(digests))]
    for rank in sorted(set(digests)):
        here, there = digests[rank], reference.get(rank, {})
        names = sorted(set(here) | set(there))
        found += [f"rank {rank}: {name}" for name in names if here.get(name) != there.get(name)]
    return found


def run(plan: Plan, stop: threading.Event | None = None) -> Outcome:
    """Run a plan to its end, or until a process says stop."""
    return follow(Job(plan), stop)


def follow(job: Job, stop: threading.Event | None = None) -> Outcome:
    """Watch a job to its end."""
    try:
        while not (job.ended or (stop is not None and stop.is_set())):
            job.watch()
            time.sleep(POLL_S)
    finally:
        job.close()
    return job.outcome()


class Job:
    """One torchrun, with the folders that its workers share with the driver."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.folder = Path(tempfile.mkdtemp(prefix="ecemb-failures-"))
        self.arenas = Path(tempfile.mkdtemp(prefix="ecemb-failures-", dir="/dev/shm"))
        for name in ("boards", "results", "lines", "refusals", "samples"):
            (self.folder / name).mkdir()
        plan.write(self.folder / "plan.json")
        self.problem = ""
        self.began = time.monotonic()
        self.seconds = 0.0
        self._boards: dict[Path, Board] = {}
        self._past: list[Board] = []  # of starts long ago
        self._start = -1
        self._start_began = self.began
        self._due: float | None = None
        self._done_events: set[int] = set()
        self._agents: set[int] = set()
        self._went_on_ns: dict[int, int] = {}  # of starts that all workers were seen to train in
        self.process = self._launch(0)

    def _launch(self, first: int) -> agents.Agent:
        """Torchrun, whose workers begin with start number `first`."""
        given = filter(None, [os.environ.get("PYTHONPATH")])
        self._environment = {
            **os.environ,
            "ECEMB_FAILURES": str(self.folder),
            "ECEMB_FAILURES_FIRST": str(first),
            "ECEMB_ARENAS": str(self.arenas),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *given]),
        }
        ranks, restarts = self.plan.setting.ranks, max(0, len(self.plan.events) - first)
        restarts = MANY if self.plan.soak else restarts
        options = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=0.05"]
        if self.plan.warm or not self.plan.forked:
            options += ["--no-python", *(self._ecemb_run if self.plan.warm else [sys.executable])]
        words = [*options, str(Path(__file__).with_name("worker.py"))]
        agent = agents.start("failures.preload", words, self.folder / "log", self._environment)
        self._agents.add(agent.pid)
        return agent

    @property
    def _ecemb_run(self) -> list[str]:
        return [sys.executable, "-m", "ecemb", "run", "--arena-dir", str(self.arenas)]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def watch(self) -> None:
        """Look once: at the time that has passed, and whether a process is to be killed now."""
        now = time.monotonic()
        boards = self._look()
        start = max((board.get("start") for board in boards), default=-1)
        if start != self._start:
            before, self._start, self._start_began = self._start, start, now
            self._due = None
            if self.plan.soak and before >= 0 and before not in self._done_events:
                self._give_up(f"start {before} ended by itself", boards)
        boards = [board for board in boards if board.get("start") == start]
        went_on = [board.get("went_on_ns") for board in boards]
        if len(went_on) == self.plan.setting.ranks and min(went_on) >= 0:
            self._went_on_ns.setdefault(start, max(went_on))
        limit_s = SOAK_START_S if self.plan.soak else START_S
        if now > self._start_began + limit_s:
            self._give_up(f"start {start} did not end within {limit_s:.0f} s", boards)
        elif start >= 0 and start not in self._done_events and len(boards) == self.plan.setting.ranks:
            event = self.event(start, boards)
            if event is not None:
                self._maybe_kill(event, boards, now)

    def event(self, start: int, boards: list[Board]) -> Timed | None:
        """Whom to kill in this start, all of whose workers are there."""
        event = self.plan.events[start] if start < len(self.plan.events) else None
        return event if isinstance(event, Timed) else None

    def _maybe_kill(self, event: Timed, boards: list[Board], now: float) -> None:
        victims = {victim.rank: victim for victim in event.victims}
        here = [board for board in boards if board.known_rank in victims]
        if self._due is None and any(_reached(board, event) for board in here):
            self._due = now + event.pause_s
        if self._due is None or now < self._due:
            return
        self._done_events.add(self._start)
        if event.agent:
            self._kill_agent(event, boards, victims)
            return
        self.kill({board: victims[board.known_rank].lost for board in here}, event)

    def kill(self, victims: dict[Board, bool], event: Timed) -> None:
        """End processes, and write it down; of those that are True, the memory goes as well."""
        fell_together([(b, lost, None) for b, lost in victims.items()], self._start, away=event.away)

    def _kill_agent(self, event: Timed, boards: list[Board], victims: dict[int, Victim]) -> None:
        alive = [board for board in boards if board.alive]
        if self.ended:
            return
        self.process.kill()
        self.process.wait()
        for board in alive:
            victim = victims.get(board.known_rank)
            if victim is not None and victim.lost:
                board.fell(self._start, lost=True, away=event.away)
            else:
                board.orphaned(self._start)
        self.process = self._launch(self._start + 1)

    def _look(self) -> list[Board]:
        with os.scandir(self.folder / "boards") as entries:
            for entry in entries:
                path = Path(entry.path)
                if path.suffix == ".board" and path not in self._boards:
                    self._boards[path] = Board(path)
        return list(self._boards.values())

    def _give_up(self, why: str, boards: list[Board]) -> None:
        """Have the workers write down where they hang, then end them."""
        self.problem = why
        for board in boards:
            if board.alive:
                os.kill(board.get("pid"), signal.SIGUSR1)
        time.sleep(1.0)
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Wait for every process of the run to be gone, and remove the arenas."""
        if not self.ended:
            self.problem = self.problem or "interrupted"
            self.process.kill()
            self.process.wait()
        self.seconds = time.monotonic() - self.began
        if self.plan.warm:  # fork servers of failed workers would wait for the next start
            subprocess.run(
                [*self._ecemb_run, "--stop"], env=self._environment, capture_output=True, check=False
            )
        deadline = time.monotonic() + (1.0 if self.problem else END_S)
        while left := list(self._processes()):
            if time.monotonic() > deadline:
                self.problem = self.problem or f"processes {left} did not end"
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                break
            time.sleep(50 * POLL_S)
        shutil.rmtree(self.arenas, ignore_errors=True)

    def _processes(self) -> Iterator[int]:
        """Those that were forked are in a session of one of the agents, and commands have the environment."""
        mark = f"ECEMB_FAILURES={self.folder}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
                if state in "ZX":
                    continue
                if int(session) in self._agents or mark in (path / "environ").read_bytes().split(b"\0"):
                    yield int(path.name)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue

    def outcome(self) -> Outcome:
        """What the run left behind."""
        boards = [*self._past, *self._look()]
        starts = 1 + max((board.get("start") for board in boards), default=-1)
        met = starts - len(_unmet(boards, self.plan.setting.ranks))
        fallen = [b for b in boards if 0 <= b.get("event") < starts - 1]  # else it had ended already
        deaths = sorted(
            (
                Death(
                    event=board.get("event"),
                    rank=board.known_rank,
                    phase=NAMES[board.get("fell")],
                    step=board.get("step"),
                    what=WHAT[board.get("lost")],
                    place=board.text("place"),
                    recovery_s=_recovery_s(board, boards, self._went_on_ns),
                )
                for board in fallen
            ),
            key=lambda death: (death.event, death.rank),
        )
        refused, found = _refusals(self.folder / "refusals", self.plan, boards)
        fatal = len({death.event for death in deaths})
        problem = self.problem
        if not problem and self.process.returncode:
            problem = f"torchrun ended with exit code {self.process.returncode}"
        if not problem and met != fatal + len(refused) + 1:
            problem = (
                f"{met} starts, though {fatal} times somebody was killed, and {len(refused)} were refused"
            )
        problem = "; ".join(filter(None, [problem, *found, *lost_steps(boards, self.plan.saves)]))
        results = (self.folder / "results").glob("*.json")
        digests = {int(path.stem): json.loads(path.read_text()) for path in results}
        counted = [json.loads(p.read_text()) for p in (self.folder / "lines").glob("*.json")]
        lines, calls = Counter[str](), Counter[str]()
        for one in counted:
            lines |= Counter(one["lines"])
            calls |= Counter(one["calls"])
        return Outcome(
            self.folder, digests, tuple(deaths), refused, starts, problem, self.seconds, lines, calls
        )


def _recovery_s(fallen: Board, boards: list[Board], went_on_ns: Mapping[int, int]) -> float | None:
    """Seconds from a death until training went on.

    Args:
        fallen: the board of the process that died.
        boards: all that there are: that of a process that has stayed tells its last start.
        went_on_ns: when it went on, of the starts that were seen meanwhile.
    """
    ends_ns = dict(went_on_ns)
    for board in boards:
        if board.get("went_on_ns") >= 0:
            start = board.get("start")
            ends_ns[start] = max(ends_ns.get(start, 0), board.get("went_on_ns"))
    first = min((start for start in ends_ns if start > fallen.get("event")), default=None)
    return None if first is None else (ends_ns[first] - fallen.get("fell_ns")) / 1e9


def _unmet(boards: list[Board], ranks: int) -> set[int]:
    """The starts in which workers waited for others that never came, and nothing else happened.

    As torchrun restarts a job when a worker dies while others close it, which are not replaced.
    """
    by_start: dict[int, list[Board]] = {}
    for board in boards:
        by_start.setdefault(board.get("start"), []).append(board)
    return {
        start
        for start, there in by_start.items()
        if 0 <= start < max(by_start)
        and len(there) < ranks
        and all(board.get("rank") < 0 and board.get("event") < 0 for board in there)
    }


def lost_steps(boards: list[Board], back: int = 0) -> list[str]:
    """Starts that did not go on with the step in flight, or with the one after it; none, if all is well.

    Args:
        boards: of all starts.
        back: this many steps may be run again: those since a checkpoint.
    """
    found: list[str] = []
    for start in sorted({board.get("start") for board in boards}):
        before = [board for board in boards if 0 <= board.get("start") < start]
        committed = max((board.get("committed") for board in before), default=-1)
        begun = 1 + max((board.get("step") for board in before), default=-1)
        resumed = {board.get("resumed") for board in boards if board.get("start") == start} - {-1}
        if len(resumed) > 1 or any(not committed - back <= step <= max(begun, 0) for step in resumed):
            found.append(
                f"start {start} went on from steps {sorted(resumed)}, after {begun} had been begun and "
                f"{committed} committed"
            )
    return found


def _refusals(folder: Path, plan: Plan, boards: list[Board]) -> tuple[dict[int, float], list[str]]:
    """What became of the starts that were to be refused.

    Returns:
        Start -> seconds from the kill before it until the last rank had refused; and what was wrong.
    """
    seconds: dict[int, float] = {}
    problems: list[str] = []
    for start, event in enumerate(plan.events):
        if not isinstance(event, Refused):
            continue
        told = [json.loads(path.read_text()) for path in folder.glob(f"{start}.rank*.json")]
        before, verdict = folder / f"{start}.before.json", folder / f"{start}.verdict.json"
        if not any(board.get("event") == start - 1 for board in boards):
            continue  # the job was over before the kill that would have led here
        if not told:
            states = json.loads(before.read_text())["states"] if before.exists() else []
            if len(states) > plan.setting.ranks - len(event.lost):
                continue  # torchrun stopped some of the victims before they got there: they lost nothing
            committed = [b.get("committed") for b in boards if b.get("start") == start - 1]
            if not states and max(committed, default=-1) >= plan.setting.steps:
                continue  # the last victims fell when the job was closing: the survivors closed it
            live = any(state in LIVE for state in states) and FINISHED not in states
            if not event.unless or (event.unless == "fresh" and live) or not before.exists():
                problems.append(f"start {start} was not refused, though memory of {event.lost} was gone")
            continue
        killed = max((b.get("fell_ns") for b in boards if b.get("event") == start - 1), default=0)
        seconds[start] = (max(one["at_ns"] for one in told) - killed) / 1e9
        problems += [f"start {start}: {text}" for text in _misnamed(event, plan.setting, told)]
        if not verdict.exists():
            problems.append(f"start {start}: no verdict")
            continue
        if changed := json.loads(verdict.read_text())["changed"]:
            problems.append(f"start {start} was refused, and yet it changed {changed}")
    return seconds, problems


def _misnamed(event: Refused, setting: Setting, told: list[dict[str, Any]]) -> list[str]:
    """What is wrong with what the ranks of a refused start said."""
    ranks, n, lost = setting.ranks, setting.n, set(event.lost)
    broken = [
        c
        for c in range(ranks)  # one host: the positions are the ranks
        if sum((c + i) % ranks in lost for i in range(n)) > setting.tolerated
    ]
    wrong: list[str] = []
    if sorted(one["rank"] for one in told) != list(range(ranks)):
        wrong.append(f"only ranks {sorted(one['rank'] for one in told)} refused")
    for one in told:
        says = one["message"]
        named = f"the memory of {listed(event.lost)} is lost" in says and f"stripe classes {broken} " in says
        stale = len(lost) == ranks and "only stale or half-rebuilt arenas are left" in says
        if one["error"] != "TooManyErasures" or not (named or stale):
            wrong.append(f"rank {one['rank']} says {one['error']}: {says}")
        if one["seconds"] > TIMEOUT_S:
            wrong.append(f"rank {one['rank']} took {one['seconds']:.0f} s")
    return wrong


def _reached(board: Board, event: Timed) -> bool:
    if event.step is not None:
        return board.get("step") >= event.step
    return board.get("step") >= 0 or NAMES.index(board.phase) >= NAMES.index(event.phase or NAMES[0])
