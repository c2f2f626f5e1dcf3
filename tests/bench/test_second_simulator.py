"""Cells of the map by a second simulator, which shares nothing with the first but inputs and faults.

It goes through time in small ticks, where the first one goes from fault to fault, and asks the placement
which losses are too many, where the first one looks at distances on the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.questions.simulate.faults import Fault, drawn
from bench.questions.simulate.inputs import inputs
from bench.questions.simulate.methods import methods
from bench.questions.simulate.profiles import PROFILES
from bench.questions.simulate.training import Method, train
from ecemb.coding.code import Code
from ecemb.tools.cost import placed
from ecemb.tools.job import Job

TICK_H = 1 / 3600
FAULTS = 60
CLOSE = 0.003


def ticked(method: Method, code: Code | None, job: Job, faults: Sequence[Fault], hours: float) -> float:
    """ETTR of one training.

    Args:
        method: What surviving costs.
        code: Of what is in memory; None for methods whose saves are on storage.
        job: Whose ranks are lost with their hosts.
        faults: Ascending.
        hours: How long it runs.
    """
    placement, host_of = placed(job, code, "host") if code is not None else (None, [])
    trained = since = saving = 0.0
    saves = [(0.0, 0.0)]
    down_until, lost, is_broken = 0.0, set[int](), False
    waiting = list(faults)
    for tick in range(round(hours / TICK_H)):
        now = tick * TICK_H
        while waiting and waiting[0].hour < now + TICK_H:
            fault = waiting.pop(0)
            if fault.hour >= down_until:
                lost, is_broken = set(), False
            lost |= set(fault.hosts)
            if method.back == "all":
                trained = max(at for counts, at in saves if counts <= fault.hour)
                saves, since, saving = [(0.0, trained)], 0.0, 0.0
            if placement is not None and lost and not is_broken:
                is_broken = not placement.tolerates(
                    [rank for rank, host in enumerate(host_of) if host in lost]
                )
                if is_broken:
                    trained -= trained % method.durable_interval_h
                    saves = [(0.0, trained)]
            down = method.durable_h if is_broken else method.host_h if lost else method.process_h
            down_until = fault.hour + down
        if now < down_until:
            continue
        if saving > 0:
            saving -= TICK_H
            if saving <= 0:
                saves = [*saves[-1:], (now + TICK_H + saving + method.lag_h, trained)]
                trained -= saving / (1 + method.overhead)
                since -= saving / (1 + method.overhead)
            continue
        trained += TICK_H / (1 + method.overhead)
        since += TICK_H / (1 + method.overhead)
        if since >= method.interval_h:
            since, saving = 0.0, method.save_h
    return trained / hours


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "mtbf_h", "table_tb"),
    [
        ("ecemb (4, 3), window auto", Code(4, 3), 1.0, 10.0),
        ("snapshots x2", Code(2, 1), 3.0, 3.0),
        ("full, async", None, 10.0, 1.0),
    ],
)
def test_cells_are_the_same_by_another_simulator(
    name: str, code: Code | None, mtbf_h: float, table_tb: float
) -> None:
    profile = PROFILES[0]
    job = replace(profile.job, hosts=16, mtbf_h=mtbf_h, table_bytes=table_tb * 1e12)
    (method,) = (one for one in methods(job, inputs(profile, Path("no results"))) if one.name == name)
    hours = FAULTS * mtbf_h
    faults = drawn(job, hours, np.random.default_rng(5))
    first = train(method, faults, hours, hosts=job.hosts, ranks=job.ranks).ettr
    assert ticked(method, code, job, faults, hours) == pytest.approx(first, abs=CLOSE)
    assert first < 1 - 2 * CLOSE, "the agreement has to be closer than what a fault costs"
