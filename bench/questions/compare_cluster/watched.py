"""A method that is watched in the first life of a rank: what its steps and its saves take.

Marks are taken between steps, when all ranks have come there and devices have done what was begun. Before and
after the plain steps, nothing may go on beside them: what a method does behind is waited for, and a window of
ecemb's that is not full is committed.

Must not know: what is trained.
"""

from __future__ import annotations

import dataclasses
import resource
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from baselines.cpr.recovery import PartialRecovery
from baselines.method import Costs, Method, Promise, Training
from baselines.rollback import Rollback
from bench.harness.devices import settle
from bench.methods.ledger import Ledger
from bench.methods.registry import Ecemb
from bench.questions.compare.beside_twins import NEVER, until_whole
from bench.questions.compare_cluster.steps import AFTER, EVERY, WARM, Steps

PLAIN, PLAIN_END = "plain", "plain end"
SAVE, STALLED, FOLLOWED, WRITTEN = "save", "stalled", "followed", "written"
_INTERFACES = Path("/sys/class/net")


class Watched:
    """See the module.

    Args:
        method: Which; made with saves every `NEVER` steps in the first life, and `EVERY` in others.
        steps: When what is measured.
        notes: Where marks go.
        device: One of `bench.harness.devices`.
        first: Whether this is the first life.
        host: Whether this rank takes the marks of its host.
        at: Called with the number of each step before it.
    """

    def __init__(
        self,
        method: Method,
        steps: Steps,
        notes: Ledger,
        device: str,
        *,
        first: bool,
        host: bool,
        at: Callable[[int], None],
    ) -> None:
        self._method, self._steps, self._notes, self._device = method, steps, notes, device
        self._first, self._host, self._at = first, host, at
        self._next = 0
        self._quiet: Costs | None = None

    @property
    def promise(self) -> Promise:
        """See `Method.promise`."""
        return self._method.promise

    @property
    def interval_steps(self) -> int | None:
        """See `Method.interval_steps`."""
        return self._method.interval_steps

    def prepare(self, training: Training) -> int:
        """See `Method.prepare`."""
        self._next = self._method.prepare(training)
        return self._next

    @contextmanager
    def step(self) -> Generator[None]:
        """See `Method.step`."""
        self._at(self._next)
        if self._first:
            self._before(self._next)
        with self._method.step():
            yield
        self._next += 1

    def memory(self) -> Sequence[Path]:
        """See `Method.memory`."""
        return self._method.memory()

    def costs(self) -> Costs:
        """See `Method.costs`; in plain steps, those before them: to ask some methods takes time."""
        return self._method.costs() if self._quiet is None else self._quiet

    def close(self) -> None:
        """See `Method.close`."""
        self._method.close()

    def _before(self, number: int) -> None:
        """Takes the marks that are due before a step."""
        steps = self._steps
        if number == WARM:
            self._settle()
            self._mark(PLAIN)
            self._quiet = self._method.costs()
        elif number == steps.plain_end:
            self._settle()
            self._quiet = None
            self._mark(PLAIN_END)
        if not self._saves:
            return
        for count, first in enumerate(steps.saves):
            if number == first:
                self._mark(f"{SAVE} {count}")
                save_every(self._method, 1)
            elif number == first + 1:
                save_every(self._method, NEVER)
                self._mark(f"{STALLED} {count}")
            if number == first + AFTER:
                self._mark(f"{FOLLOWED} {count}")
                self._settle()
                self._mark(f"{WRITTEN} {count}")
        if number == steps.saves[-1] + AFTER:
            save_every(self._method, EVERY)

    @property
    def _saves(self) -> bool:
        return isinstance(self._method, Rollback | PartialRecovery)

    def _settle(self) -> None:
        """Waits until nothing of the method goes on. All ranks."""
        if isinstance(self._method, Ecemb):
            guard = self._method._made()
            guard._drain()
            self._notes.note(window=guard.stats()["window"])
        else:
            until_whole(self._method)

    def _mark(self, name: str) -> None:
        """Notes when all ranks are here, and what was spent until then. All ranks."""
        settle(self._device)
        dist.all_reduce(torch.zeros(1))
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        self._notes.note(
            mark=name,
            wall_s=time.perf_counter(),
            cpu_s=sum(one.ru_utime + one.ru_stime for one in used),
            costs=dataclasses.asdict(self._method.costs()),
            links=links("statistics/tx_bytes") if self._host else {},
        )


def save_every(method: Method, steps: int) -> None:
    """From here on, a method saves every this many steps."""
    if isinstance(method, PartialRecovery):
        method._saving.interval = steps
    elif isinstance(method, Rollback):
        method.interval.steps = steps


def links(what: str) -> dict[str, int]:
    """A number of each interface of this host but the loopback, where the kernel knows it."""
    found: dict[str, int] = {}
    for path in sorted(_INTERFACES.glob("*")):
        if path.name == "lo":
            continue
        try:
            found[path.name] = int((path / what).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it is down, or virtual
            continue
    return found


def host() -> dict[str, object]:
    """What the rows say of this host: its name, and the speed of its interfaces in Mbit/s."""
    return {
        "host": socket.gethostname(),
        "mbit_s": {name: speed for name, speed in links("speed").items() if speed > 0},
    }
