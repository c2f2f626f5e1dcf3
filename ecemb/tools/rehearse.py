"""`ecemb rehearse`: runs a script undisturbed and with failures, and compares its steps.

Owns the runs, their comparison, and the likely cause of a difference. Needs no knowledge of the script:
`rehearsal` runs in each rank, and records digests of model, optimizers, generators, `state=` objects, other
objects with a state_dict(), and of the values that the script differentiates.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .. import requirements
from ..errors import ConfigurationError, EcembError
from ..launch.preload import imported_by
from ..net.wording import counted

SHOWS = """
The script runs six times on this machine, for some steps: twice undisturbed, twice with killed processes,
twice with processes killed whose memory is lost; one of each two with window=4. Each rank stands for a host.
Runs begin at step 0; memory and checkpoints of the job itself aren't touched; guard.save() writes nothing.
Whatever else the script writes, it writes. The exit code is 0 if all runs leave the same bits in each step.
"""
_AGENT = "torch.distributed.run"
_WINDOW = 4
_RESTARTS = 8
_LEAST_STEPS = 6
_SILENT_S = 600.0  # without a step: the run hangs
_POLL_S = 0.1
_SHOWN = 6  # names of a difference, and warnings

BEGIN, END = "begin", "end"
"""When a digest was taken: after `guard.step()` was entered, and after it was left; END of step -1 is where
`protect` returned at a fresh start."""

Place = tuple[int, str]
"""(step, `BEGIN` or `END`)."""
Record = list[tuple[Place, dict[str, str]]]
"""Places, in the order in which a rank's processes came there, with digests by name."""


@dataclasses.dataclass(frozen=True)
class Death:
    """Where a rank dies: once, in the first process that comes there.

    Attributes:
        step: Number of the step.
        when: `BEGIN` of its body, or `END`, before it commits.
        rank: The rank.
        memory: Whether its memory is lost as well.
    """

    step: int
    when: str
    rank: int
    memory: bool


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the script to find: the one that changes a value between two steps.

    Attributes:
        step: Number of the step before which it changes.
        name: The value's name.
        rank: The rank on which to look.
    """

    step: int
    name: str
    rank: int


@dataclasses.dataclass(frozen=True)
class Run:
    """What the ranks of one run do.

    Attributes:
        name: Ends the job's name.
        steps: Number of steps after which the run ends.
        window: Replaces the script's; None to leave it.
        deaths: The ends of processes.
        line: A line to find; None for none.
    """

    name: str
    steps: int
    window: int | None = None
    deaths: tuple[Death, ...] = ()
    line: Line | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Run:
        """Returns a run from its fields."""
        deaths = tuple(Death(**one) for one in fields["deaths"])
        line = None if fields["line"] is None else Line(**fields["line"])
        return cls(fields["name"], fields["steps"], fields["window"], deaths, line)


@dataclasses.dataclass
class Outcome:
    """The result of a run.

    Attributes:
        error: Why it ended early; empty if it didn't.
        records: Rank -> its record.
        deaths: Number of processes that were killed.
        warnings: What ecemb warned of.
        line: The line that was found; empty for none.
        seconds: Its duration.
    """

    error: str
    records: dict[int, Record]
    deaths: int = 0
    warnings: tuple[str, ...] = ()
    line: str = ""
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """The steps that all ranks ended."""
        ended = [[step for (step, when), _ in record if when == END] for record in self.records.values()]
        return min((max(steps, default=-1) + 1 for steps in ended), default=0)

    def between(self, step: int) -> dict[str, int]:
        """Values that changed between a step and the step before it, or `protect` -> a rank on which."""
        found: dict[str, int] = {}
        for rank, record in self.records.items():
            states = dict(record)
            left, begun = states.get((step - 1, END), {}), states.get((step, BEGIN), {})
            for name in left.keys() & begun.keys():
                if left[name] != begun[name]:
                    found.setdefault(name, rank)
        return found


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a run left other bits than the undisturbed one.

    Attributes:
        place: The first place.
        names: Name of what differs -> the ranks on which it does.
    """

    place: Place
    names: dict[str, list[int]]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.set_defaults(run=run)
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="of the job (4)")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="of each run (50)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and digests there: a new folder")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="what torchrun would start")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own")


def run(options: argparse.Namespace) -> int:
    """Rehearses a script.

    Returns:
        The exit code: 1 if a run with failures left other bits, or failed.

    Raises:
        ConfigurationError: An option breaks a rule, the script is missing, or torch is, or another version
            than ecemb takes.
    """
    if not options.script.is_file():
        raise ConfigurationError(f"{options.script} is not a file: name the script that trains")
    if options.ranks < 1 or options.steps < _LEAST_STEPS:
        raise ConfigurationError(
            f"rehearse takes at least 1 rank and {_LEAST_STEPS} steps, not --ranks {options.ranks} "
            f"--steps {options.steps}"
        )
    requirements.check()
    if options.keep is not None:
        try:
            options.keep.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError(
                f"--keep {options.keep} can't be made as a new folder: {error}; name another"
            ) from None
        with _ended_by_sigterm():
            return Rehearsal(options, options.keep).play()
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="ecemb-rehearsal-") as folder:
        return Rehearsal(options, Path(folder)).play()


@contextlib.contextmanager
def _ended_by_sigterm() -> Generator[None]:
    """SIGTERM, which `timeout` sends, ends a run's processes and removes its memory, as Ctrl-C does."""

    def end(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Rehearsal:
    """All runs of a script, and their comparison with the undisturbed one.

    Args:
        options: Of the command.
        folder: For logs and records; empty.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._id = f"rehearsal-{secrets.token_hex(4)}"  # of all runs: one fork server has their ranks
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload([_AGENT])  # imported once, for the agents of all runs
        self._runs = 0
        self._plain = Outcome("", {})
        self._varying: set[str] = set()  # names of values that differ in undisturbed runs
        self._lines: dict[str, str] = {}  # name of a value -> the line that changes it, as text

    def play(self) -> int:
        """Runs the script as often as needed; returns the command's exit code."""
        began, ranks = time.monotonic(), self._options.ranks
        windows = self._play_undisturbed()
        left = [(memory, window) for memory in (False, True)[: min(ranks, 2)] for window in windows]
        if not left:
            return 1
        most_s = 3 * len(left) * self._plain.seconds
        print(f"{counted(len(left), 'run')} with failures left, {most_s:.0f} s or less")
        survived = [self._is_survived(deaths_for(self._plain, ranks, memory=one), two) for one, two in left]
        failed = survived.count(False)
        said = (
            f"FAILED: {failed} of {len(left)} runs with failures" if failed else "all end with the same bits"
        )
        steps, seconds = counted(self._plain.steps, "step"), time.monotonic() - began
        print(f"{counted(self._runs, 'run')} of {steps} in {seconds:.0f} s: {said}")
        if ranks == 1:
            print("lost memory was not rehearsed: one rank has no parity (--ranks 2 or more)")
        return int(failed > 0)

    def _play_undisturbed(self) -> tuple[int | None, ...]:
        """Runs the script twice; returns the windows to rehearse it with, none if it can't be rehearsed."""
        self._plain = plain = self._launch("undisturbed")
        if plain.error:
            print(f"  the script fails without any failure of a machine: {plain.error}")
            return ()
        for text in plain.warnings[:_SHOWN]:
            print(f"  ecemb warns: {text}")
        if plain.steps < _LEAST_STEPS:
            print(f"  it ended after {counted(plain.steps, 'step')} of a guard; {_LEAST_STEPS} are needed")
            return ()
        windowed = self._launch(f"undisturbed, window={_WINDOW}", _WINDOW)
        if windowed.error:
            print(f"  not rehearsed with window={_WINDOW}, as the script fails with it: {windowed.error}")
            return (None,)
        varying = {name for _, name, _ in differences(plain, windowed)}
        if any(kind_of(name) != "object" for name in varying):
            self._show(compare(plain, windowed))
            print("  no failure can be judged, as undisturbed runs differ: seed what the script draws from")
            return ()
        self._varying = varying  # such as a clock in an object
        return None, _WINDOW

    def _is_survived(self, deaths: Sequence[Death], window: int | None) -> bool:
        """Whether a run with failures ends like the undisturbed one; prints how."""
        title = " and ".join(f"rank {one.rank} killed in step {one.step}" for one in deaths)
        title += ", with their memory" if deaths[0].memory else ""
        title += f", window={window}" if window else ""
        outcome = self._launch(title, window, deaths)
        difference = compare(self._plain, outcome, self._varying)
        if difference is not None:
            self._show(difference)
        elif outcome.error:
            print(f"  FAILED: {outcome.error}")
        elif outcome.deaths < len(deaths):
            print(f"  FAILED: {outcome.deaths} of {len(deaths)} processes were killed")
        else:
            print("  the same bits after each step")
            return True
        return False

    def _show(self, difference: Difference | None) -> None:
        if difference is None:
            return
        (step, when), names = difference.place, list(difference.names.items())
        firsts = {tuple(name.split(".")[:2]): name for name, _ in reversed(names)}.values()  # of each object
        place = f"step {step} {'begins' if when == BEGIN else 'ends'}" if step >= 0 else "protect() returns"
        print(f"  DIFFERENT when {place}:")
        names.sort(key=lambda one: one[0] not in firsts)
        for name, ranks in names[:_SHOWN]:
            print(f"    {name} (rank {', '.join(map(str, sorted(set(ranks))))})")
        if len(names) > _SHOWN:
            print(f"    and {len(names) - _SHOWN} more")
        text, line = cause(self._plain, difference)
        if line is not None and line.name not in self._lines:
            found = self._launch(f"looking for the line that changes {line.name}", line=line).line
            self._lines[line.name] = f" at {found}" if found else ""
        print(f"    likely cause: {text.replace(_HERE, '' if line is None else self._lines[line.name])}")

    def _launch(
        self,
        title: str,
        window: int | None = None,
        deaths: Sequence[Death] = (),
        line: Line | None = None,
    ) -> Outcome:
        """Runs the script once, and prints how long it took."""
        print(f"{title} ...", end="", flush=True)
        began = time.monotonic()
        self._runs += 1
        folder = self._folder / str(self._runs)
        folder.mkdir()
        name = f"rehearsal-{secrets.token_hex(4)}"
        plan = Run(name, self._options.steps, window, tuple(deaths), line)
        (folder / "run.json").write_text(json.dumps(dataclasses.asdict(plan)))
        words = self._words(folder, _RESTARTS if deaths else 0)
        process = self._processes.Process(target=_agent, args=(words, str(folder / "log")))
        process.start()
        try:
            code = _wait(process, folder)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()  # it may lead no session yet
            process.join()
            _remove_arenas(folder)
        outcome = _outcome(folder, code)
        outcome.seconds = time.monotonic() - began
        print(f" {counted(outcome.steps, 'step')}, {outcome.seconds:.0f} s", flush=True)
        return outcome

    def _words(self, folder: Path, restarts: int) -> list[str]:
        """The command line of torchrun."""
        options, script = self._options, str(self._options.script)
        agent = ["--monitor-interval", "0.1"]
        agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", self._id]
        agent += ["--nproc-per-node", str(options.ranks), "--max-restarts", str(restarts)]
        worker = ["--no-python", sys.executable, "-m", "ecemb", "run"]
        if imported := imported_by(script):
            worker += ["--preload", ",".join(imported)]
        return [*agent, *worker, "-m", "ecemb.tools.rehearsal", str(folder), script, *options.arguments]


def _agent(words: list[str], log: str) -> None:
    """Becomes torchrun's agent, in a session of its own."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for output in (1, 2):
        os.dup2(descriptor, output)
    importlib.import_module(_AGENT).main(words)


def _wait(process: BaseProcess, folder: Path) -> int | None:
    """Waits for the end of a run; returns its exit code, or None if no rank made a step for long."""
    size, last = -1, time.monotonic()
    while (code := process.exitcode) is None:
        now = sum(path.stat().st_size for path in folder.glob("rank-*.jsonl"))
        if now != size:
            size, last = now, time.monotonic()
        elif time.monotonic() - last > _SILENT_S:
            return None
        time.sleep(_POLL_S)
    return code


def _remove_arenas(folder: Path) -> None:
    from ..memory.scan import arenas, remove

    with contextlib.suppress(OSError, ValueError):
        where = json.loads((folder / "job.json").read_text())
        for found in list(arenas(where["arena_dir"])):
            if found.job == where["job"]:
                with contextlib.suppress(EcembError):
                    remove(found, force=True)


def _outcome(folder: Path, code: int | None) -> Outcome:
    """Reads what the ranks of a run have written."""

    def text(name: str) -> str:
        path = folder / name
        return path.read_text() if path.exists() else ""

    error = ""
    if code is None:
        error = f"no rank ended a step within {_SILENT_S:.0f} s"
    elif code:
        error = _error(folder)
    return Outcome(
        error,
        {
            int(path.stem.removeprefix("rank-")): record_of(path.read_text())
            for path in sorted(folder.glob("rank-*.jsonl"))
        },
        len(list(folder.glob("death-*"))),
        tuple(dict.fromkeys(text("warnings").splitlines())),
        text("line"),
    )


def _error(folder: Path) -> str:
    """Why a run failed: the first error of a script that no other rank's end explains."""
    paths = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime)
    notes = [json.loads(path.read_text()) for path in paths]
    notes.sort(key=lambda note: note["error"] in ("PeerFailure", "StepFailed"))
    if notes:
        return notes[0]["text"]
    lines = (folder / "log").read_text(errors="replace").splitlines()
    errors = (line for line in lines if re.search(r"\w(Error|Failed|Lost)\b", line))
    return next(errors, "see its log (--keep DIR)")


def record_of(text: str) -> Record:
    """Reads a rank's record; a line that a killed process has not finished is left out."""
    record: Record = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            step, when, state = json.loads(line)
            record.append(((step, when), state))
    return record


def deaths_for(plain: Outcome, ranks: int, *, memory: bool) -> tuple[Death, ...]:
    """Where ranks die: at the end of a step, and at the begin of one before which most has changed."""
    early, late = plain.steps // 3, 2 * plain.steps // 3
    last = max(range(early + 1, plain.steps), key=lambda step: (len(plain.between(step)), -abs(step - late)))
    return Death(early, END, 1 % ranks, memory), Death(last, BEGIN, 0, memory)


def differences(plain: Outcome, other: Outcome) -> Iterator[tuple[Place, str, int]]:
    """Place, name and rank of each difference from the undisturbed run."""
    for rank, record in other.records.items():
        expected = dict(plain.records[rank])
        for place, state in record:
            right = expected.get(place, {})
            for name in {*right, *state}:
                if right.get(name) != state.get(name):
                    yield place, name, rank


def compare(plain: Outcome, other: Outcome, without: Collection[str] = ()) -> Difference | None:
    """The first place at which a run left other bits than the undisturbed one; None if there is none."""
    found: dict[Place, dict[str, list[int]]] = {}
    for place, name, rank in differences(plain, other):
        if name not in without:
            found.setdefault(place, {}).setdefault(name, []).append(rank)
    return Difference(min(found), dict(sorted(found[min(found)].items()))) if found else None


def cause(plain: Outcome, difference: Difference) -> tuple[str, Line | None]:
    """What a difference is likely to come from, and the way out, by what the undisturbed run shows.

    Returns:
        A text, with `_HERE` where the script's line belongs; and the line to look for, if one may be found.
    """
    at = difference.place[0]
    for step in (*range(min(at, plain.steps - 1), -1, -1), *range(at + 1, plain.steps)):  # a window is undone
        changed = plain.between(step)
        for name in difference.names:
            if name in changed:
                before = f"steps {step - 1} and {step}" if step else "ecemb.protect() and step 0"
                text = f"the script changes {name} between {before}{_HERE}, where no step records it"
                return f"{text}: {_OUTSIDE[kind_of(name)]}", Line(step, name, changed[name])
    kinds = {kind_of(name) for name in difference.names}
    return _INSIDE[next(kind for kind in _INSIDE if kind in kinds)], None


KINDS = ("model", "optimizers", "state", "generators", "object", "loss")


def kind_of(name: str) -> str:
    """The kind of a value, by its name."""
    return name.partition(".")[0]


_HERE = "<line>"
_OUTSIDE = {
    "model": "write it in a step, and declare rows of a table before, with guard.touch(table, rows)",
    "optimizers": "change it in a step",
    "generators": (
        "an evaluation draws from them, or iter(DataLoader) does: evaluate in `with guard.evaluation():`, or "
        "give the loader a generator of its own (generator=torch.Generator())"
    ),
    "state": "change it in a step",
    "loss": "compute it in a step",
    "object": "change it in a step, and give it to protect() in state=",
}
_INSIDE = {
    "object": "it begins again when a process does: give it to protect(), in state= or optimizers=",
    "generators": "another number of draws was made after the restart than in the undisturbed run",
    "state": "its state_dict() does not hold all that it needs to go on",
    "loss": (
        "the batches are others: take them from guard.batches(loader), or choose them by the step's number; "
        "a dataset must give the same sample for the same index"
    ),
    "optimizers": "its updates go past what ecemb knows, or use numbers or gradients that a restart lost",
    "model": (
        "it is written past torch (through .data, numpy or a pointer), or is updated from something that a "
        "restart lost, such as gradients that were kept over a step: declare rows with guard.touch(table, "
        "rows), and let gradients begin and end in one step"
    ),
}
