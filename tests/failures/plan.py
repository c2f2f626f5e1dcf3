"""What a run trains and who is killed when: plain values, the same for driver and workers.

A run is a sequence of *events*. Event g hits the job's start number g, so it is followed by exactly
one restart of all workers: event 0 hits the fresh start or the training after it, event 1 the
recovery from event 0 or the training after that, and so on.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained. Runs of equal settings must end with equal bits, whatever `workers` is.

    Attributes:
        ranks: number of ranks.
        n: blocks of a stripe.
        k: data blocks of a stripe.
        optimizer: of the tables, a key of the worker's `OPTIMIZERS`.
        steps: in all.
        workers: processes that load data, on each rank.
    """

    ranks: int
    n: int
    k: int
    optimizer: str
    steps: int = 40
    workers: int = 0

    @property
    def tolerated(self) -> int:
        """Ranks whose memory may be gone at once: r = n - k."""
        return self.n - self.k


@dataclasses.dataclass(frozen=True)
class Victim:
    """Who dies, and whether its memory goes with it."""

    rank: int
    lost: bool


@dataclasses.dataclass(frozen=True)
class Exact:
    """The first victim kills the others and itself at a line of code, or inside a kernel.

    Attributes:
        victims: the first one is the one that finds the line.
        phase: where; a name in `board.PHASES`.
        step: in which step; None for what is not in a step.
        line: the how manieth line of code that the phase runs, in this step or start; from 1.
        torn: count the kernels' calls instead, and die when the call is half done.
        raises: an exception at that line, instead of a kill.
    """

    victims: tuple[Victim, ...]
    phase: str
    step: int | None
    line: int
    torn: bool = False
    raises: bool = False


@dataclasses.dataclass(frozen=True)
class Timed:
    """Somebody else kills the victims, some time after one of them was seen somewhere.

    Attributes:
        victims: who.
        phase: in this phase, or in a later one of `board.PHASES`; None for any.
        step: in this step, or in a later one; None for a phase before the first.
        pause_s: the time that then passes.
        agent: torchrun itself is killed, all workers end with it, and it is launched again.
    """

    victims: tuple[Victim, ...]
    phase: str | None
    step: int | None
    pause_s: float
    agent: bool = False


Event = Exact | Timed
Sabotage = Literal["undo", "redo", "generators", "replicated", "rebuild"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        setting: what is trained.
        events: who is killed when.
        sabotage: a part of recovery that is left out on purpose, to see that it is noticed.
    """

    setting: Setting
    events: tuple[Event, ...] = ()
    sabotage: Sabotage | None = None

    def write(self, path: Path) -> None:
        events = [{"kind": type(e).__name__, **dataclasses.asdict(e)} for e in self.events]
        path.write_text(json.dumps({**dataclasses.asdict(self), "events": events}, indent=1))

    @classmethod
    def read(cls, path: Path) -> Plan:
        fields = json.loads(path.read_text())
        events = tuple(_event(event) for event in fields["events"])
        return cls(Setting(**fields["setting"]), events, fields["sabotage"])


def _event(fields: dict[str, Any]) -> Event:
    kind = {"Exact": Exact, "Timed": Timed}[fields.pop("kind")]
    return kind(**{**fields, "victims": tuple(Victim(**victim) for victim in fields["victims"])})
