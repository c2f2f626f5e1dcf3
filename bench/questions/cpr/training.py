"""A training while emulated servers save and fail by themselves, as CPR has it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from baselines.cpr.servers import Servers
from bench.workloads import click_training
from bench.workloads.click_training import Failure, Model
from bench.workloads.clicks import Data


@dataclass(frozen=True)
class Trained:
    """What became of a training.

    Attributes:
        log_loss: Of what was held out.
        auc: Of the same.
        pls: Counted.
        priority_bytes: What priorities took, on all servers.
        bookkeeping_s: What following rows and saving took.
        seconds: What all took.
        cpu_s: Of processor time.
    """

    log_loss: float
    auc: float
    pls: float
    priority_bytes: int
    bookkeeping_s: float
    seconds: float
    cpu_s: float


def train(
    data: Data,
    seed: int,
    *,
    servers: int,
    every: int,
    failures: Sequence[Failure] = (),
    priority: str | None = None,
) -> Trained:
    """Trains a model from its start to its end.

    Args:
        data: What it is trained on.
        seed: Of what the model starts with.
        servers: That hold the tables.
        every: Steps in which the volume of everything is saved once (T_save).
        failures: Each strikes when its number of steps is done.
        priority: See `baselines.cpr.saving`.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    model = Model.of(data, seed)
    emulated = Servers(model.tables(), servers, data.steps, every=every, priority=priority)
    click_training.train(model, data, emulated, failures)
    judged = model.judged(data.held_out)
    return Trained(
        log_loss=judged.log_loss,
        auc=judged.auc,
        pls=emulated.pls,
        priority_bytes=emulated.priority_bytes,
        bookkeeping_s=emulated.touched_s + emulated.saving_s,
        seconds=time.perf_counter() - began,
        cpu_s=time.process_time() - cpu_began,
    )
