"""The simulation beside closed formulas, in the limits where these hold.

Must not know: what methods cost.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from baselines.cpr.job import CprJob
from baselines.cpr.overhead import Costs, Policy, expected_overhead
from baselines.cpr.pls import expected_pls
from baselines.young import young
from bench.harness.result import Row, WrongResult, once
from bench.questions.simulate.faults import Fault, drawn, episodes, sets_by_size
from bench.questions.simulate.training import Method, Outcome, train
from ecemb.coding.code import Code
from ecemb.tools.cost import MONTH_H, Odds, losses_per_month, placed
from ecemb.tools.job import Job

CLOSE = 0.02
"""How far simulation and formula may be apart."""
SERVERS = 8


def checks(faults: int, seed: int, close: float = CLOSE) -> list[Row]:
    """The rows `simulated_over_formula`.

    Args:
        faults: Of each training, which is as long as they take.
        seed: Of the faults.
        close: How far simulation and formula may be apart.

    Raises:
        WrongResult: They are further apart.
    """
    rare_h, often_h, save_h, down_h = 1000.0, 2.0, 0.01, 0.05
    interval_h = young(save_h, rare_h)
    job = CprJob(MONTH_H, rare_h, SERVERS)
    costs = Costs(save_h, down_h)
    full = _train(Method("full", "all", 0.0, down_h, down_h, interval_h, save_h), rare_h, faults, seed)
    found = [
        (
            "overhead at Young's interval (Young 1974; Maeng et al. 2021, full)",
            full.overhead,
            expected_overhead(costs, job, Policy("full", interval_h)),
        ),
        (
            "E[ETTR] (Kokolis et al. 2025)",
            1 - full.ettr,
            1 - (1 - (down_h + interval_h / 2) / rare_h) / (1 + save_h / interval_h),
        ),
    ]
    method = Method("full", "all", 0.0, 0.3, 0.3, 1.0, 0.1)
    ratio = 1 / _train(method, often_h, faults, seed).ettr
    found.append(("time at MTBF of 2 h (Daly 2006, complete)", ratio, daly(method, often_h)))

    partial = Method("partial", "failed", 0.0, down_h, down_h, 100.0, save_h)
    outcome = _train(partial, rare_h, faults, seed)
    policy = Policy("partial", 100.0)
    found += [
        ("overhead (Maeng et al. 2021, partial)", outcome.overhead, expected_overhead(costs, job, policy)),
        ("PLS of a month (Maeng et al. 2021)", outcome.pls, expected_pls(job, 100.0)),
    ]
    for kind, several, recovery_h in (("one by one", 0.0, 4.0), ("several at once", 0.5, 0.02)):
        for code in (Code(4, 3), Code(6, 4)):
            job = replace(TROUBLE, burst_share=several)
            simulated, expected = _losses(job, code, recovery_h, faults, seed)
            found.append((f"losses of data, ({code.n}, {code.k}), hosts {kind}", simulated, expected))
    rows = [
        once("simulated_over_formula", "ratio", simulated / expected, formula=name, expected=expected)
        for name, simulated, expected in found
    ]
    for row in rows:
        if abs(row.value - 1) > close:
            raise WrongResult(f"{row.labels['formula']}: the simulation is {row.value:.3f} times the formula")
    return rows


def daly(method: Method, mtbf_h: float) -> float:
    """Expected time over training, exact for exponential faults, which also strike saves and recoveries.

    M e^(R/M) (e^((tau + delta)/M) - 1) / tau: J. T. Daly, FGCS 2006 (recalled), with the mean M
    between faults, the recovery R, the interval tau and the save delta.
    """
    cycle_h = method.interval_h + method.save_h
    return mtbf_h * math.exp(method.host_h / mtbf_h) * math.expm1(cycle_h / mtbf_h) / method.interval_h


def _train(method: Method, mtbf_h: float, faults: int, seed: int) -> Outcome:
    """One host of `SERVERS` is lost at each fault, exponentially."""
    rng = np.random.default_rng(seed)
    hours = np.cumsum(rng.exponential(mtbf_h, faults)).tolist()
    lost = rng.integers(SERVERS, size=faults).tolist()
    events = [Fault(hour, (host,)) for hour, host in zip(hours, lost, strict=True)]
    return train(method, events, hours[-1], hosts=SERVERS, ranks=SERVERS)


def _losses(job: Job, code: Code, recovery_h: float, faults: int, seed: int) -> tuple[float, float]:
    """Losses of data in a month: counted, and by `ecemb.tools.cost.losses_per_month`."""
    placement, hosts = placed(job, code, "host")
    odds = Odds(placement, hosts, job.rack_hosts)
    hours = 10 * faults / job.host_faults_per_h
    struck = drawn(job, hours, np.random.default_rng(seed))
    groups = episodes([(fault.hour, fault.hosts) for fault in struck], recovery_h)
    sets = sets_by_size((host for _, lost in group for host in lost) for group in groups)
    broken = sum(int(odds.broken(lost).sum()) for lost in sets.values())
    first = len(groups) / len(struck)  # the formula takes all for the first of an episode: most are, in life
    return broken / hours * MONTH_H, first * sum(losses_per_month(job, odds, recovery_h))


TROUBLE = Job(
    hosts=12,
    ranks_per_host=1,
    table_bytes=1e12,
    batch=1e4,
    features=1,
    skew=0.0,
    row_bytes=512,
    step_s=0.2,
    network_bytes_per_s=1e10,
    mtbf_h=10.0,
    host_share=1.0,
)
"""Few hosts that fail often: losses can be counted."""
