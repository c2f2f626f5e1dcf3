"""What a run trains and who is killed when: plain values, the same for driver and workers.

A run is a sequence of *events*. Event g hits the job's start number g, so it is followed by exactly
one restart of all workers: event 0 hits the fresh start or the training after it, event 1 the
recovery from event 0 or the training after that, and so on. An event that takes away more than the code
survives is followed by a `Refused` one.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

ABORT_EVERY = 8  # of so many steps the last one is aborted
TIMED_STEPS = 8  # within so many all deaths that come from outside have come


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained. Runs that differ in `workers` to `fabric` and `background` alone end with equal bits.

    Attributes:
        ranks: number of ranks.
        n: blocks of a stripe.
        k: data blocks of a stripe.
        optimizer: of the tables, a key of the worker's `OPTIMIZERS`.
        steps: in all.
        device: of the whole model; tables on another one than the CPU lie apart from the arena.
        workers: processes that load data, on each rank.
        window: steps of a transaction.
        overlap: whether it is decided beside the next one's first step.
        apart: whether tables lie apart from the arena, which holds images of them, as of tables on a GPU.
        fabric: whether deltas go through a device's memory, over a group of their own.
        background: training goes on while lost memory is rebuilt. Rows then come when they are looked up, and
            the rest after this number of steps at most; 0: training waits.
    """

    ranks: int
    n: int
    k: int
    optimizer: str
    steps: int = 40
    device: str = "cpu"
    workers: int = 0
    window: int = 1
    overlap: bool = False
    apart: bool = False
    fabric: bool = False
    background: int = 0

    @property
    def plain(self) -> Setting:
        """What runs with equal ends have in common."""
        return dataclasses.replace(
            self,
            workers=0,
            window=1,
            overlap=False,
            apart=self.device != "cpu",
            fabric=False,
            background=0,
        )

    @property
    def tolerated(self) -> int:
        """Ranks whose memory may be gone at once: r = n - k."""
        return self.n - self.k

    @property
    def code(self) -> str:
        """The code in words, and the options that are not as usual."""
        options = f", window {self.window}" if self.window > 1 else ""
        options += ", overlap" if self.overlap else ""
        options += ", images" if self.apart else ""
        options += ", fabric" if self.fabric else ""
        options += ", background" if self.background else ""
        return f"code ({self.n}, {self.k}){options}" + (f", {self.device}" if self.device != "cpu" else "")


@dataclasses.dataclass(frozen=True)
class Victim:
    """Who dies, and whether its memory goes with it."""

    rank: int
    lost: bool


@dataclasses.dataclass(frozen=True)
class Exact:
    """The first victim kills the others and itself at a line of code, or inside a kernel.

    It waits there for those that have not begun yet; in "starting", the others wait for it as well.

    Attributes:
        victims: the first one is the one that finds the line.
        phase: where; a name in `board.PHASES`.
        step: in which step; None for what is not in a step.
        line: the how manieth line of code that the phase runs, in this step or start; from 1.
        torn: count the kernels' calls instead, and die when the call is half done.
        raises: an exception at that line, instead of a kill.
        away: memory that is lost is put aside, so that it may come back.
    """

    victims: tuple[Victim, ...]
    phase: str
    step: int | None
    line: int
    torn: bool = False
    raises: bool = False
    away: bool = False

    @property
    def ranks(self) -> list[int]:
        """Who dies."""
        return [victim.rank for victim in self.victims]


@dataclasses.dataclass(frozen=True)
class Timed:
    """Another process kills the victims, some time after one of them was seen somewhere.

    Attributes:
        victims: who.
        phase: in this phase, or in a later one of `board.PHASES`; None for any.
        step: in this step, or in a later one; None for a phase before the first.
        pause_s: the time that then passes.
        agent: torchrun itself is killed, all workers end with it, and it is launched again.
        away: memory that is lost is put aside, so that it may come back.
    """

    victims: tuple[Victim, ...]
    phase: str | None
    step: int | None
    pause_s: float
    agent: bool = False
    away: bool = False


@dataclasses.dataclass(frozen=True)
class Refused:
    """No worker is killed: more memory is gone than the code survives, and every rank must say so.

    When all have, the survivors' bytes are compared with those before, and the memory that was put
    aside is brought back: the start after this one goes on.

    Attributes:
        lost: the ranks whose memory is gone.
        unless: "fresh": with no arena LIVE, the job may begin again instead; "finished": it may be over.
    """

    lost: tuple[int, ...]
    unless: Literal["", "fresh", "finished"] = ""


Event = Exact | Timed | Refused
Sabotage = Literal[
    "undo", "redo", "generators", "replicated", "rebuild", "agreement", "journal", "inbox", "waiting"
]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        setting: what is trained.
        events: who is killed when.
        sabotage: a part of recovery, or a rule, that is left out on purpose, to see that it is noticed.
        forked: workers are forked from torchrun's agent (`forked_torchrun.py`), and not started as commands.
        warm: workers are commands of stock torchrun, started by `ecemb-run`, whatever `forked` is.
        stays: the training is called by `ecemb.run`; goes with `warm`.
        soak: nothing is planned: `soak.py` kills from outside, until it says at which step to end.
        saves: after this many steps each, a checkpoint is saved, from which a start resumes that could not
            recover; 0: never.
    """

    setting: Setting
    events: tuple[Event, ...] = ()
    sabotage: Sabotage | None = None
    forked: bool = False
    warm: bool = False
    stays: bool = False
    soak: bool = False
    saves: int = 0

    def write(self, path: Path) -> None:
        events = [{"kind": type(e).__name__, **dataclasses.asdict(e)} for e in self.events]
        path.write_text(json.dumps({**dataclasses.asdict(self), "events": events}, indent=1))

    @classmethod
    def read(cls, path: Path) -> Plan:
        fields = json.loads(path.read_text())
        events = tuple(_event(event) for event in fields["events"])
        rest = {name: fields[name] for name in ("sabotage", "forked", "warm", "stays", "soak", "saves")}
        return cls(Setting(**fields["setting"]), events, **rest)


def _event(fields: dict[str, Any]) -> Event:
    kind = {"Exact": Exact, "Timed": Timed, "Refused": Refused}[fields.pop("kind")]
    if kind is Refused:
        return Refused(tuple(fields["lost"]), fields["unless"])
    return kind(**{**fields, "victims": tuple(Victim(**victim) for victim in fields["victims"])})
