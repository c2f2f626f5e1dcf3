"""`python -m ecemb rehearse`: runs a script undisturbed and with failures, and compares its steps.

Owns the runs, their comparison, and what a difference is likely to come from. Needs no knowledge of the
script: `rehearsal` runs in each rank, and writes down digests of model, optimizers, generators, `state=`
objects, other objects with a state_dict(), and of the values that the script differentiates.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, EcembError
from ..net.wording import counted

HELP = "run a script undisturbed and with failures, and show the first step at which the runs differ"
SHOWS = """
The script runs six times on this machine, for some steps: twice undisturbed, twice with killed processes,
twice with processes killed whose memory is lost; one of each two with window=4. Each rank stands for a host.
Memory of the job itself isn't touched, and guard.save() writes nothing; whatever else the script writes, it
writes. The exit code is 0 if all runs leave the same bits after each step.
"""
_WINDOW = 4
_RESTARTS = 8
_LEAST_STEPS = 6
_SILENT_S = 600.0  # without a step: the run hangs
_POLL_S = 0.1
_SHOWN = 6  # names of a difference

BEGIN, END = "begin", "end"
"""When a digest was taken: after `guard.step()` was entered, and after it was left."""


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
class Run:
    """What the ranks of one run do.

    Attributes:
        name: Ends the job's name.
        steps: After so many the run ends.
        window: Replaces the script's; None to leave it.
        deaths: See `Death`.
    """

    name: str
    steps: int
    window: int | None
    deaths: tuple[Death, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Run:
        """Returns a run from its fields."""
        deaths = tuple(Death(**one) for one in fields["deaths"])
        return cls(fields["name"], fields["steps"], fields["window"], deaths)


Record = dict[tuple[int, str], dict[str, str]]
"""(step, "begin" or "end") -> digests by name."""


@dataclasses.dataclass
class Outcome:
    """What a run has left.

    Attributes:
        error: Why it ended early; empty if it didn't.
        records: Rank -> one record of each process that it had.
        deaths: Number of processes that were killed.
    """

    error: str
    records: dict[int, list[Record]]
    deaths: int

    @property
    def steps(self) -> int:
        """The steps that all ranks ended."""
        ended = [
            [step for life in lives for step, when in life if when == "end"]
            for lives in self.records.values()
        ]
        return min((max(steps, default=-1) + 1 for steps in ended), default=0)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a run left other bits than the undisturbed one.

    Attributes:
        step: Its number.
        when: "begin" or "end".
        names: Name of what differs -> the ranks on which it does.
        cause: What it is likely to come from, and the way out.
    """

    step: int
    when: str
    names: dict[str, list[int]]
    cause: str


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.set_defaults(run=run)
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="of the job (4)")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="of each run (50)")
    parser.add_argument(
        "--launcher",
        choices=("ecemb-run", "torchrun"),
        default="ecemb-run",
        help="what starts the ranks: torchrun alone, or with ecemb-run, which is faster (ecemb-run)",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and digests there: a new folder")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="what torchrun would start")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own")


def run(options: argparse.Namespace) -> int:
    """Rehearses a script.

    Returns:
        The exit code: 1 if a run with failures left other bits, or failed.

    Raises:
        ConfigurationError: An option breaks a rule, or the script is missing.
    """
    if not options.script.is_file():
        raise ConfigurationError(f"{options.script} is not a file: name the script that trains")
    if options.ranks < 1 or options.steps < _LEAST_STEPS:
        raise ConfigurationError(
            f"rehearse takes at least 1 rank and {_LEAST_STEPS} steps, not --ranks {options.ranks} "
            f"--steps {options.steps}"
        )
    if options.keep is not None:
        try:
            options.keep.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError(
                f"--keep {options.keep} can't be made as a new folder: {error}"
            ) from None
        return _rehearse(options, options.keep)
    with tempfile.TemporaryDirectory(prefix="ecemb-rehearsal-") as folder:
        return _rehearse(options, Path(folder))


def _rehearse(options: argparse.Namespace, folder: Path) -> int:
    began = time.monotonic()
    plain = _launch(options, folder / "1", "undisturbed", None, ())
    if plain.error or plain.steps < _LEAST_STEPS:
        why = plain.error or f"it ended after {counted(plain.steps, 'step')}; {_LEAST_STEPS} are needed"
        print(f"  the script fails without any failure of a machine: {why}")
        return 1
    windowed = _launch(options, folder / "2", f"undisturbed, window={_WINDOW}", _WINDOW, ())
    varying = {name for _, name, _ in _differences(plain, windowed)}
    if windowed.error:
        print(f"  not rehearsed with window={_WINDOW}, as the script fails with it: {windowed.error}")
    elif any(_kind(name) != "object" for name in varying):  # not such as a clock in an object
        _show(compare(plain, windowed))
        print("  two undisturbed runs differ, so no failure can be judged: seed what the script draws from")
        return 1
    runs, failed = 2, 0
    for memory in (False, True)[: min(options.ranks, 2)]:
        for window in (None, _WINDOW)[: 1 if windowed.error else 2]:
            runs += 1
            deaths = (
                Death(plain.steps // 3, END, 1 % options.ranks, memory),
                Death(2 * plain.steps // 3, BEGIN, 0, memory),
            )
            title = " and ".join(f"rank {one.rank} killed in step {one.step}" for one in deaths)
            title += ", with their memory" if memory else ""
            title += f", window={_WINDOW}" if window else ""
            outcome = _launch(options, folder / str(runs), title, window, deaths)
            failed += not _is_survived(plain, outcome, len(deaths), varying)
    seconds = time.monotonic() - began
    print(f"{counted(runs, 'run')} of {counted(plain.steps, 'step')} in {seconds:.0f} s: ", end="")
    print(f"FAILED: {failed} of {runs - 2} runs with failures" if failed else "each ended with the same bits")
    if options.ranks == 1:
        print("lost memory was not rehearsed: one rank has no parity (--ranks 2 or more)")
    return int(failed > 0)


def _is_survived(plain: Outcome, outcome: Outcome, deaths: int, varying: Collection[str]) -> bool:
    """Whether a run with failures ended like the undisturbed one; prints how."""
    difference = compare(plain, outcome, varying)
    if outcome.error:
        print(f"  FAILED: {outcome.error}")
    elif outcome.deaths < deaths:
        print(f"  FAILED: {outcome.deaths} of {deaths} processes were killed")
    elif difference is not None:
        _show(difference)
    else:
        print("  the same bits after each step")
        return True
    return False


def _launch(
    options: argparse.Namespace,
    folder: Path,
    title: str,
    window: int | None,
    deaths: Sequence[Death],
) -> Outcome:
    """Runs the script once."""
    print(f"{title} ...", flush=True)
    folder.mkdir()
    name = f"rehearsal-{secrets.token_hex(4)}"
    plan = Run(name, options.steps, window, tuple(deaths))
    (folder / "run.json").write_text(json.dumps(dataclasses.asdict(plan)))
    worker = ["-m", "ecemb.tools.rehearsal", str(folder), str(options.script), *options.arguments]
    if options.launcher == "ecemb-run":
        worker = ["--no-python", sys.executable, "-m", "ecemb", "run", *worker]
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
    agent += ["--nproc-per-node", str(options.ranks), "--max-restarts", str(_RESTARTS), *worker]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(agent, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code, is_late = _wait(process, folder)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _remove_arenas(folder)
    error = ""
    if is_late:
        error = f"no rank ended a step within {_SILENT_S:.0f} s"
    elif code:
        error = _error(folder)
    records = {
        int(path.stem.removeprefix("rank-")): list(lives_of(path))
        for path in sorted(folder.glob("rank-*.jsonl"))
    }
    done = len(list(folder.glob("death-*")))
    return Outcome(error, records, done)


def _wait(process: subprocess.Popen[bytes], folder: Path) -> tuple[int, bool]:
    """Waits for the end of a run; its exit code, and whether it made no step for long."""
    size, last = -1, time.monotonic()
    while (code := process.poll()) is None:
        now = sum(path.stat().st_size for path in folder.glob("rank-*.jsonl"))
        if now != size:
            size, last = now, time.monotonic()
        elif time.monotonic() - last > _SILENT_S:
            return 1, True
        time.sleep(_POLL_S)
    return code, False


def _remove_arenas(folder: Path) -> None:
    from ..memory.scan import arenas, remove

    with contextlib.suppress(OSError, ValueError):
        where = json.loads((folder / "job.json").read_text())
        for found in list(arenas(where["arena_dir"])):
            if found.job == where["job"]:
                with contextlib.suppress(EcembError):
                    remove(found, force=True)


def _error(folder: Path) -> str:
    """Why a run failed: the first error of a script that no other rank's end explains."""
    notes = [
        json.loads(path.read_text())
        for path in sorted(folder.glob("error-*"), key=lambda p: p.stat().st_mtime)
    ]
    own = [note["text"] for note in notes if note["error"] not in ("PeerFailure", "StepFailed")]
    if own or notes:
        return [*own, *(note["text"] for note in notes)][0]
    lines = (folder / "log").read_text(errors="replace").splitlines()
    return next(
        (line for line in lines if re.search(r"\w(Error|Failed|Lost)\b", line)), "see its log (--keep DIR)"
    )


def lives_of(path: Path) -> Iterator[Record]:
    """The records of a rank's processes: one begins where a step is not the one that follows."""
    record, last = Record(), (-1, "end")
    for line in path.read_text().splitlines():
        try:
            step, when, state = json.loads(line)
        except ValueError:  # its process was killed while it wrote
            continue
        if (step, when) <= last:
            yield record
            record = {}
        record[step, when], last = state, (step, when)
    yield record


def _differences(plain: Outcome, other: Outcome) -> Iterator[tuple[tuple[int, str], str, int]]:
    """Place, name and rank of each."""
    for rank, lives in other.records.items():
        expected = plain.records[rank][0]
        for place, state in ((place, state) for life in lives for place, state in life.items()):
            right = expected.get(place, {})
            for name in {*right, *state}:
                if right.get(name) != state.get(name):
                    yield place, name, rank


def compare(plain: Outcome, other: Outcome, without: Collection[str] = ()) -> Difference | None:
    """The first place at which a run left other bits than the undisturbed one; None if there is none."""
    found: dict[tuple[int, str], dict[str, list[int]]] = {}
    for place, name, rank in _differences(plain, other):
        if name not in without:
            found.setdefault(place, {}).setdefault(name, []).append(rank)
    if not found:
        return None
    step, when = min(found)
    names = dict(sorted(found[step, when].items()))
    return Difference(step, when, names, _cause(plain, names, step, when))


def _cause(plain: Outcome, names: dict[str, list[int]], step: int, when: str) -> str:
    """What a difference is likely to come from, by what the undisturbed run shows."""
    for name, ranks in names.items():
        record = plain.records[ranks[0]][0]
        for before in range(min(step, plain.steps - 1), 0, -1):
            left, found = record.get((before - 1, "end"), {}), record.get((before, "begin"), {})
            if name in left and name in found and left[name] != found[name]:
                where = f"between steps {before - 1} and {before}, where no step records it"
                return f"the script changes {name} {where}: {_OUTSIDE[_kind(name)]}"
    kinds = {_kind(name) for name in names}
    return _INSIDE[next(kind for kind in _INSIDE if kind in kinds)]


def _kind(name: str) -> str:
    kind = name.split(".")[0].split("[")[0]
    return kind if kind in ("model", "optimizers", "generators", "state", "loss") else "object"


_OUTSIDE = {
    "model": "write it in a step, and declare rows of a table before, with guard.touch(table, rows)",
    "optimizers": "change it in a step",
    "generators": (
        "an evaluation draws from them, or iter(DataLoader) does: give it a generator of its own "
        "(generator=torch.Generator()), or evaluate in a step"
    ),
    "state": "change it in a step",
    "loss": "compute it in a step",
    "object": "change it in a step, and give it to protect() in state=",
}
_INSIDE = {
    "object": "it begins again when a process does: give it to protect(), in state= or optimizers=",
    "generators": "another number of draws was made after the restart than in the undisturbed run",
    "state": "its state_dict() does not hold all that it needs to go on",
    "optimizers": "its updates go past what ecemb knows, or use gradients that a restart lost",
    "model": (
        "it is written past torch (through .data, numpy or a pointer), or is updated from something that a "
        "restart lost, such as gradients that were kept over a step: declare rows with guard.touch(table, "
        "rows), and let gradients begin and end in one step"
    ),
    "loss": (
        "the batches are others: take them from guard.batches(loader), or choose them by the step's number; "
        "a dataset must give the same sample for the same index"
    ),
}


def _show(difference: Difference | None) -> None:
    if difference is None:
        return
    names = list(difference.names.items())
    place = "when it begins" if difference.when == "begin" else "when it ends"
    print(f"  DIFFERENT in step {difference.step}, {place}:")
    for name, ranks in names[:_SHOWN]:
        print(f"    {name} (rank {', '.join(map(str, sorted(set(ranks))))})")
    if len(names) > _SHOWN:
        print(f"    and {len(names) - _SHOWN} more")
    print(f"    likely cause: {difference.cause}")
