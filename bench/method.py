"""The seam between trainings and what keeps them alive: the `Method`, and one life of a rank under it.

ecemb is a method (`bench.methods`), and so is every rival in `baselines/`. In the order of the calls, on
every rank:

1. The process group: by `ecemb.init_process_group`, whatever the method, so that deaths are noticed and ranks
   are restarted alike. Then the script builds its model.
2. `prepare`: a fresh start, or all that has to be done after a failure. It says which step comes next.
3. `step`: around every step's body; saves and sends are made here.
4. `close`, when the training is done.

A failure is the death of processes, by SIGKILL; a rank that fails "with its memory" stands for a lost
machine, and takes with it what `memory` names. All ranks are started anew then, as torchrun does. So that
nothing which a method counts dies with a process, `live` notes it in a `Ledger`; `account` reads that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn


class Stateful(Protocol):
    """What else belongs to a training: its position, say."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> object: ...


@dataclass(frozen=True)
class Training:
    """What a method is to keep alive, on one rank. Random generators of torch, numpy and python belong to it.

    Attributes:
        model: What is not a sharded table of it is the same on all ranks.
        optimizers: All of them.
        tables: Further tables, sharded by hand, by key.
        state: What differs by rank; plain values and tensors.
        samples: That all ranks together take in a step.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    tables: Mapping[str, nn.Module] = field(default_factory=dict)
    state: Sequence[Stateful] = ()
    samples: int = 0


@dataclass(frozen=True)
class Promise:
    """What holds after a failure that the method is made for.

    Attributes:
        bit_identical: The training ends with the bytes of one that never failed.
        steps_again: At most so many steps are run again, beside the one that was cut off; None: any number.
        samples_lost: Updates may be forgotten, which `Costs.samples_lost` then counts.
        survives: So many ranks may be lost at once with their memory, whichever they are; None: all.
    """

    bit_identical: bool
    steps_again: int | None
    samples_lost: bool = False
    survives: int | None = None


@dataclass(frozen=True)
class Costs:
    """What a method has cost this rank in this life of its process.

    Attributes:
        stalled_s: Seconds that training waited for it, waits for slower ranks included.
        written_bytes: To files that outlive the machine.
        sent_bytes: To other ranks.
        stored_bytes: This rank's part of such files now.
        memory_bytes: Of this rank's machine, beside the training's own; the most at any time.
        samples_lost: Samples, of all ranks, whose updates this rank's rows have forgotten.
    """

    stalled_s: float = 0.0
    written_bytes: int = 0
    sent_bytes: int = 0
    stored_bytes: int = 0
    memory_bytes: int = 0
    samples_lost: float = 0.0


class Method(Protocol):
    """One way to survive failures; an object on every rank, new in each life of its process."""

    @property
    def promise(self) -> Promise:
        """What holds after a failure."""
        ...

    @property
    def interval_steps(self) -> int | None:
        """Steps between what one can go back to, by now; None: not known yet, or there is nothing."""
        ...

    def prepare(self, training: Training) -> int:
        """Starts, or brings the training back to where it goes on from. All ranks, before the first step.

        Returns:
            The step to run next, the same on all ranks: 0 at a fresh start.
        """
        ...

    def step(self) -> AbstractContextManager[object]:
        """Around the body of each step, which changes all that changes. All ranks."""
        ...

    def memory(self) -> Sequence[Path]:
        """Files of this rank that are in its machine's memory, and are lost with it."""
        ...

    def costs(self) -> Costs:
        """Of this life until now; between steps."""
        ...

    def close(self) -> None:
        """The training is done. All ranks."""
        ...


@dataclass(frozen=True)
class Failure:
    """Processes that die, in the first life that comes to it.

    Attributes:
        step: In which.
        ranks: That die, each by itself.
        moment: "body": when the optimizers have changed the rows, before the step ends. "after": when it
            has ended. "clock": whatever they are doing, `after_s` after the life's first step begins, in
            whatever step.
        with_memory: Their machines' memory is lost, too.
        after_s: Of the clock.
    """

    step: int
    ranks: tuple[int, ...]
    moment: str = "body"
    with_memory: bool = True
    after_s: float = 0.0

    def strike(self, rank: int, method: Method) -> None:
        """The end of this process, if it is one of those that die."""
        if rank not in self.ranks:
            return
        if self.with_memory:
            for path in method.memory():
                path.unlink(missing_ok=True)  # by the clock, it may just have gone
        os.kill(os.getpid(), signal.SIGKILL)


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


def total(lives: Iterable[Costs]) -> Costs:
    """Of several lives of a rank, in their order."""
    sum_ = Costs()
    for one in lives:
        both = {
            name: getattr(sum_, name) + getattr(one, name)
            for name in ("stalled_s", "written_bytes", "sent_bytes", "samples_lost")
        }
        most = max(sum_.memory_bytes, one.memory_bytes)
        sum_ = Costs(**both, stored_bytes=one.stored_bytes, memory_bytes=most)
    return sum_


def live(
    method: Method,
    training: Training,
    body: Callable[[int], object],
    steps: int,
    *,
    rank: int,
    folder: Path,
    failures: Sequence[Failure] = (),
) -> None:
    """One life of one rank, from `prepare` to the end of the training or its own. All ranks.

    Args:
        method: Keeps it alive.
        training: What `body` changes.
        body: Called with each step's number.
        steps: Of the whole training.
        rank: This one.
        folder: Of the ledgers; outlives the processes. Empty at the first start.
        failures: That strike in this life.
    """
    ledger = Ledger(folder, rank)
    cpu_began = _cpu_s()

    def note(**what: Any) -> None:
        ledger.note(**what, cpu_s=_cpu_s() - cpu_began, costs=dataclasses.asdict(method.costs()))

    def struck(one: Failure) -> None:
        ledger.note(struck_at_s=time.monotonic())
        one.strike(rank, method)

    def strike(number: int, moment: str) -> None:
        for one in failures:
            if (one.step, one.moment) == (number, moment) and rank in one.ranks:
                struck(one)

    by_clock = [one for one in failures if one.moment == "clock" and rank in one.ranks]
    clocks = [threading.Timer(one.after_s, struck, [one]) for one in by_clock]

    try:
        began = time.perf_counter()
        first = method.prepare(training)
        note(started=first, seconds=time.perf_counter() - began)
        for clock in clocks:
            clock.daemon = True
            clock.start()
        for number in range(first, steps):
            ledger.note(begun=number)
            with method.step():
                body(number)
                strike(number, "body")
            note(done=number, at_s=time.monotonic())
            strike(number, "after")
        method.close()
        note()
    finally:
        for clock in clocks:
            clock.cancel()
        ledger.close()


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
