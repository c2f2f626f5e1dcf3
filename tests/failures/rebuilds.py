"""A second failure while a rank is rebuilt beside training: real processes, real SIGKILLs.

    python tests/failures/rebuilds.py [--seed N] [PATTERN...]

A rank is lost with its memory, or two are. With rebuild="background" training goes on while they are rebuilt,
and in a phase of that a process is killed: a replacement rank's, or that of a rank which holds what it lacks,
with or without its memory, or torchrun with all workers. The start after that must go on, and in the end all
must have the bits of an undisturbed training.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import random
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from failures.board import PHASES, REBUILD
from failures.campaign import References, verdict
from failures.draws import Lengths
from failures.driver import Outcome, run
from failures.plan import Exact, Plan, Setting, Timed, Victim

SETTINGS = (
    Setting(4, 4, 2, "Adagrad", steps=20, background=5),
    Setting(4, 4, 2, "Adagrad", steps=20, background=5, overlap=True),
    Setting(4, 4, 3, "SparseAdam", steps=20, background=5),
    Setting(4, 4, 2, "SparseAdam", steps=20, background=6, window=4),
)
FIRST_STEP = 11
"""In it the first memory is lost. The next start goes on from it, or from step 10 with a window, and all is
rebuilt before step 15, or before step 12."""
REPLACED, HOLDER = "replacement rank", "holder"
STEPS = ("in the body", "capture", "exchange", "prepare", "agreement", "apply", "commit")
"""Phases of a step that a rank is rebuilt in."""
OF_HOLDERS = ("answering", "ending the rebuild")
ATTEMPTS, MOST_LINES = 6, 200
TORCHRUN = "torchrun"


@dataclass(frozen=True)
class Cell:
    """A failure in a rebuild.

    Attributes:
        phase: in which; "torchrun" for one from outside.
        who: dies.
        memory: whether its memory goes as well.
    """

    phase: str
    who: str
    memory: bool

    def __str__(self) -> str:
        return f"{self.phase}: {self.who}, {'with memory' if self.memory else 'process'}"


def cells(*patterns: str) -> list[Cell]:
    """All cells whose name matches."""
    phases = [phase for phase, group in PHASES.items() if group == REBUILD]
    found = [
        Cell(phase, who, memory)
        for phase in (*phases, *STEPS, TORCHRUN)
        for who in (REPLACED, HOLDER)
        if phase in (*STEPS, TORCHRUN) or phase in OF_HOLDERS or who == REPLACED
        if phase != "answering" or who == HOLDER
        for memory in (False, True)
    ]
    return [cell for cell in found if any(fnmatch.fnmatch(str(cell), one) for one in patterns or ("*",))]


def plan(cell: Cell, choice: random.Random, attempt: int = 0) -> Plan:
    """Draws a run that meets a cell, if its phase has as many lines."""
    is_more = cell.memory and cell.who == HOLDER
    setting = choice.choice([one for one in SETTINGS if one.tolerated > is_more])
    overlaps = cell.phase in STEPS and setting.overlap
    setting = dataclasses.replace(setting, overlap=False) if overlaps else setting
    count = choice.randint(1, setting.tolerated - is_more)
    ranks = choice.sample(range(setting.ranks), setting.ranks)
    lost, holders = ranks[:count], ranks[count:]
    first = Exact(tuple(Victim(rank, True) for rank in lost), "in the body", FIRST_STEP, choice.randint(1, 9))
    victim = (Victim((lost if cell.who == REPLACED else holders)[0], cell.memory),)
    if cell.phase == TORCHRUN:
        second: Exact | Timed = Timed(victim, None, FIRST_STEP - 2, choice.random() / 10, agent=True)
    else:
        line = int(MOST_LINES ** choice.random()) >> (2 * attempt)
        step = None if PHASES[cell.phase] == REBUILD else FIRST_STEP - 1
        second = Exact(victim, cell.phase, step, max(1, line))
    return Plan(setting, (first, second), forked=True)


def is_met(cell: Cell, planned: Plan, outcome: Outcome) -> bool:
    """Whether the process died where it was to die, and its rebuild was not over."""
    [victim] = planned.events[1].victims  # pyright: ignore[reportAttributeAccessIssue]
    found = [death for death in outcome.deaths if death.event == 1 and death.rank == victim.rank]
    if cell.phase == TORCHRUN:
        return bool(found)
    what, period = "memory" if cell.memory else "process", planned.setting.background
    is_over = any(death.step >= (FIRST_STEP // period + 1) * period for death in found)
    is_in_time = cell.phase == "ending the rebuild" or not is_over
    return [(death.phase, death.what) for death in found] == [(cell.phase, what)] and is_in_time


def play(
    cell: Cell, choice: random.Random, references: References, stop: threading.Event | None = None
) -> str:
    """Plays one cell; returns where the process was killed.

    Raises:
        AssertionError: the training ended with other bits, or could not be brought to the cell.
    """
    for attempt in range(ATTEMPTS):
        planned = plan(cell, choice, attempt)
        reference = references.of(planned.setting)
        outcome = run(planned, stop)
        if wrong := verdict(reference, outcome):
            raise AssertionError(
                f"{cell}: {wrong}; see {outcome.folder}, repeat with --plan of its plan.json"
            )
        met = is_met(cell, planned, outcome)
        where = [death.where for death in outcome.deaths if death.event == 1]
        outcome.discard()
        if met:
            return f"{planned.setting.code}: {where[0]}"
    raise AssertionError(f"{cell}: not met in {ATTEMPTS} runs, though each ended bit-identical")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    parser.add_argument("patterns", nargs="*", help="of cells, such as 'answering: *'")
    options = parser.parse_args(words)
    wanted, stop = cells(*options.patterns), threading.Event()
    references = References(Lengths(), stop)
    print(f"seed {options.seed}", flush=True)

    def hold(cell: Cell) -> bool:
        try:
            where = play(cell, random.Random(f"{options.seed} {cell}"), references, stop)
        except AssertionError as error:
            print(f"{cell!s:50} FAILS\n{error}", flush=True)
            return False
        print(f"{cell!s:50} holds, {where}", flush=True)
        return True

    with ThreadPoolExecutor(options.jobs) as threads:
        try:
            held = sum(threads.map(hold, wanted))
        finally:
            stop.set()
    print(f"{held} of {len(wanted)} cells hold")
    return int(held < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
