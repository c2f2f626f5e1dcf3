"""Ways to survive failures of servers in one process: each a `Kept` of a model.

- ecemb: coded.py.
- Rollback: all ranks go back to the last save of everything, and train the steps since then again. Rows
  were saved as they were, or by a scheme of Check-N-Run: weights in a few bits, optimizer state exactly, as
  its defaults have it. Its policies differ in what they write, not in what comes back.
- CPR: `baselines.cpr.servers`.

The dense part belongs to trainers, which don't fail; who goes back takes it along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from baselines.check_n_run.choose_bits import scheme_for
from baselines.check_n_run.codec import loaded, stored
from baselines.check_n_run.quantize_scheme import EXACT, Scheme
from baselines.cpr.servers import Servers
from bench.questions.quality.coded import Coded
from bench.workloads.click_training import Kept, Model
from ecemb.coding.code import Code

UNDISTURBED = "undisturbed"
CODE = Code(6, 4)


class Nothing:
    """No failure comes."""

    def touch(self, table: str, rows: Tensor) -> None: ...

    def end(self, step: int) -> None: ...

    def fail(self, step: int, servers: Sequence[int]) -> None:
        raise RuntimeError(f"servers {list(servers)} fail after step {step}, and nothing is kept of them")


class Rollback:
    """All go back to the last save.

    Args:
        model: New.
        every: Steps between saves.
        scheme: How the weights of rows are stored.
    """

    def __init__(self, model: Model, every: int, scheme: Scheme = EXACT) -> None:
        self._model, self._every, self._scheme = model, every, scheme
        self._save(0)

    def touch(self, table: str, rows: Tensor) -> None: ...

    def end(self, step: int) -> None:
        if step % self._every == 0:
            self._save(step)

    def fail(self, step: int, servers: Sequence[int]) -> int:
        weight = self._saved["weight"]
        back = loaded(stored(weight, self._scheme), self._scheme, weight)
        self._model.put({**self._saved, "weight": back})
        return self._step

    def _save(self, step: int) -> None:
        self._step = step
        self._saved = {name: tensor.clone() for name, tensor in self._model.state().items()}


@dataclass(frozen=True)
class Setup:
    """What a method is made for.

    Attributes:
        servers: That hold the tables.
        steps: Of the training.
        every: Steps between saves (T_save), of those that save.
    """

    servers: int
    steps: int
    every: int


Make = Callable[[Model, Setup], Kept]


def checked_n_run(scheme: Scheme) -> Make:
    return lambda model, job: Rollback(model, job.every, scheme)


def partial(priority: str | None) -> Make:
    def make(model: Model, job: Setup) -> Servers:
        return Servers(model.tables(), job.servers, job.steps, every=job.every, priority=priority)

    return make


def methods(restores: float) -> Mapping[str, Make]:
    """Name -> what makes it, for a job that expects this many restores."""
    chosen = scheme_for(restores)
    few, many = scheme_for(0), scheme_for(float("inf"))
    return {
        f"ecemb ({CODE.n}, {CODE.k})": lambda model, job: Coded(model.tables(), job.servers, CODE),
        "full, steps run again": lambda model, job: Rollback(model, job.every),
        **{f"check-n-run, {one.bits} bits": checked_n_run(one) for one in (many, chosen, few)},
        "cpr vanilla": partial(None),
        "cpr mfu": partial("mfu"),
        "cpr ssu": partial("ssu"),
    }


IDENTICAL = ("ecemb", "full")
"""How the names of those begin that end with the bytes of the undisturbed training, or there is no answer."""
