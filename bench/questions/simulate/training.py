"""One training with its faults, event by event, under one way of surviving them.

Owns: what a fault costs. Between two faults nothing happens but steps and saves, so time passes from fault
to fault, however many saves lie between them.

- Saves come every `interval_h` hours of training and stop it for `save_h`; one that a fault cuts off is begun
  again. It counts `lag_h` later, when all of it is written.
- A fault while recovering adds to what is lost, and the recovery starts over.
- Where memory is what survives, hosts that parity can't give back (`Odds.broken`) send all ranks back to the
  durable tier below, which is written every `durable_interval_h` beside the training.

`baselines.cpr.emulation` counts the same for CPR's two recoveries alone; a test finds no difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.questions.simulate.faults import Fault

Back = Literal["none", "failed", "all"]


class Lost(Protocol):
    """What memory can't give back, as `ecemb.tools.cost.Odds` has it."""

    def broken(self, lost: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of some sets of hosts, int64 [sets, hosts], is more than memory gives back."""
        ...


@dataclass(frozen=True)
class Method:
    """What a way of surviving costs.

    Attributes:
        name: For the tables.
        back: Who goes back to the last save after a fault: "none", since what is lost is rebuilt as it was;
            "failed", since the others go on; "all".
        overhead: Of a step's time, without saves.
        process_h: Hours from the death of a process until training goes on.
        host_h: The same for a host.
        interval_h: Hours of training between saves.
        save_h: Hours that a save stops the training.
        lag_h: Hours after that until it counts.
        odds: Of losing what is in memory; None where saves are on storage.
        durable_interval_h: Hours of training between saves of the tier below.
        durable_h: Hours until training goes on from there.
    """

    name: str
    back: Back
    overhead: float = 0.0
    process_h: float = 0.0
    host_h: float = 0.0
    interval_h: float = math.inf
    save_h: float = 0.0
    lag_h: float = 0.0
    odds: Lost | None = None
    durable_interval_h: float = math.inf
    durable_h: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of one training.

    Attributes:
        hours: That it ran.
        trained_h: Hours of training that its state holds in the end.
        again_h: Hours of training that were run again.
        pls: Portion of lost samples: what failed servers forgot, as `baselines.cpr.pls` counts it.
        faults: How many there were.
        unrecoverable: Of those, how many took more than memory could give back.
    """

    hours: float
    trained_h: float
    again_h: float
    pls: float
    faults: int
    unrecoverable: int

    @property
    def ettr(self) -> float:
        """Effective training-time ratio (Kokolis et al. 2025): what was trained, over the time it took."""
        return self.trained_h / self.hours

    @property
    def overhead(self) -> float:
        """Time beyond training, as a fraction of the training (as Maeng et al. 2021 have it)."""
        return self.hours / self.trained_h - 1


class _Training:
    """On its way: `trained` hours, `since` the last save; saves that count now, and may count soon."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self.trained = self._since = 0.0
        self._last = self._before = (0.0, 0.0)  # (hour at which it counts, trained)

    def pass_(self, begin: float, end: float) -> None:
        """Trains and saves from one hour to another."""
        method = self._method
        slow = 1 + method.overhead
        left = end - begin
        to_save = (method.interval_h - self._since) * slow
        if left < to_save + method.save_h:
            self.trained += min(left, to_save) / slow
            self._since += min(left, to_save) / slow
            return
        left -= to_save + method.save_h
        cycle = method.interval_h * slow + method.save_h
        cycles = math.floor(left / cycle)
        left -= cycles * cycle
        saved = self.trained + method.interval_h - self._since
        hour = end - left + method.lag_h
        self._before = self._last
        if cycles:
            self._before = (hour - cycle, saved + (cycles - 1) * method.interval_h)
        self._last = (hour, saved + cycles * method.interval_h)
        self._since = min(left / slow, method.interval_h)
        self.trained = self._last[1] + self._since

    def saved(self, hour: float) -> float:
        """Hours of training in the newest save that counts."""
        return self._last[1] if self._last[0] <= hour else self._before[1]

    def back(self, trained: float) -> float:
        """Goes back; returns the hours that are lost."""
        lost = self.trained - trained
        self.trained, self._since = trained, 0.0
        self._last = self._before = (0.0, trained)
        return lost

    def durable(self) -> float:
        """Hours of training in the tier below."""
        interval_h = self._method.durable_interval_h
        return math.floor(self.trained / interval_h) * interval_h if interval_h < math.inf else 0.0


def train(method: Method, faults: Iterable[Fault], hours: float, *, hosts: int, ranks: int) -> Outcome:
    """Runs one training.

    Args:
        method: How it survives.
        faults: Ascending.
        hours: How long it runs.
        hosts: Machines; a lost host's part of the samples is 1 / hosts.
        ranks: Processes; a dead process's part is 1 / ranks.
    """
    training = _Training(method)
    goes_on = again_h = lost_samples = 0.0
    count = unrecoverable = 0
    lost: set[int] = set()
    broken = False
    for fault in faults:
        if fault.hour >= hours:
            break
        count += 1
        if fault.hour >= goes_on:
            training.pass_(goes_on, fault.hour)
            lost, broken = set(), False
        lost.update(fault.hosts)
        if method.back == "all":
            again_h += training.back(training.saved(fault.hour))
        elif method.back == "failed":
            share = len(fault.hosts) / hosts if fault.hosts else 1 / ranks
            lost_samples += share * (training.trained - training.saved(fault.hour))
        if method.odds is not None and lost and not broken:
            broken = bool(method.odds.broken(np.array([sorted(lost)], np.int64))[0])
            if broken:
                unrecoverable += 1
                again_h += training.back(training.durable())
        down = method.durable_h if broken else method.host_h if lost else method.process_h
        goes_on = fault.hour + down
    if goes_on < hours:
        training.pass_(goes_on, hours)
    pls = lost_samples / training.trained if training.trained else 0.0
    return Outcome(hours, training.trained, again_h, pls, count, unrecoverable)
