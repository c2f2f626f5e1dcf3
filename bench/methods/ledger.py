"""A rank's notes of all its lives, in a file: what a method counts has to outlive the process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baselines.method import Costs, total


class Ledger:
    """One rank's notes of all its lives, in a file: what is noted outlives the process at once.

    Args:
        folder: Of the ranks' files.
        rank: This one.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._fd = os.open(folder / f"{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, **what: Any) -> None:
        """Adds a line."""
        os.write(self._fd, f"{json.dumps(what)}\n".encode())

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class Done:
    """What a rank's ledger says at the end of a step, of the life that it is in.

    Attributes:
        step: Its number.
        at_s: When, on time.monotonic().
        cpu_s: Of processor time, of the whole process and its children, from `prepare` on.
        costs: Of this life until then.
    """

    step: int
    at_s: float
    cpu_s: float
    costs: Costs


@dataclass(frozen=True)
class Life:
    """What a rank's ledger says of one life.

    Attributes:
        started: The step that it began with.
        started_s: What `prepare` took.
        start_costs: Of `prepare`.
        begun: Steps.
        done: Of them, those that came to their end.
        struck_at_s: When this rank was killed, on time.monotonic(); None if it wasn't.
        cpu_s: See `Done`, until the last note.
        costs: Of the whole life, but for what came after the last note.
    """

    started: int
    started_s: float
    start_costs: Costs
    begun: tuple[int, ...]
    done: tuple[Done, ...]
    struck_at_s: float | None
    cpu_s: float
    costs: Costs


@dataclass(frozen=True)
class Account:
    """What a rank's ledger says of all its lives.

    Attributes:
        lives: In their order.
    """

    lives: tuple[Life, ...]

    @property
    def started(self) -> tuple[int, ...]:
        """The step that each life began with."""
        return tuple(life.started for life in self.lives)

    @property
    def steps_again(self) -> int:
        """How often a step was begun that had been begun before."""
        begun = [step for life in self.lives for step in life.begun]
        return len(begun) - len(set(begun))

    @property
    def costs(self) -> Costs:
        """Of all lives together: sums, the most memory, and what is stored at the end."""
        return total([life.costs for life in self.lives])


def lives(folder: Path, rank: int) -> int:
    """How many lives of a rank have begun to train."""
    path = folder / f"{rank}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return sum("started" in json.loads(line) for line in lines)


def account(folder: Path, rank: int) -> Account:
    """Reads a rank's ledger."""
    lives: list[list[dict[str, Any]]] = []
    for line in (folder / f"{rank}.jsonl").read_text(encoding="utf-8").splitlines():
        what = json.loads(line)
        if "started" in what:
            lives.append([])
        lives[-1].append(what)
    return Account(tuple(map(_life, lives)))


def _life(notes: Sequence[Mapping[str, Any]]) -> Life:
    start = Costs(**notes[0]["costs"])
    done = [
        Done(one["done"], one["at_s"], one["cpu_s"], Costs(**one["costs"])) for one in notes if "done" in one
    ]
    last = next((one for one in reversed(notes) if "cpu_s" in one), notes[0])
    return Life(
        started=notes[0]["started"],
        started_s=notes[0]["seconds"],
        start_costs=start,
        begun=tuple(one["begun"] for one in notes if "begun" in one),
        done=tuple(done),
        struck_at_s=next((one["struck_at_s"] for one in notes if "struck_at_s" in one), None),
        cpu_s=last["cpu_s"],
        costs=Costs(**last["costs"]),
    )
