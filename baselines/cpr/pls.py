"""PLS, the portion of lost samples: how much of the training failed servers have forgotten.

Follows Maeng et al. (MLSys 2021), where the loss of quality is close to linear in PLS (recalled). When one of
N servers fails after S_now of S_total samples and takes up its rows as last saved, after S_last samples,
PLS grows by (S_now - S_last) / (S_total N); the expected value over a job is T_save / (2 T_fail N)
(both recalled).

- Several servers that fail at once count one by one (derived): `servers_lost` times as much is expected.
- The expected value takes saves to be many. `expected_pls_of_job` doesn't (derived): rows that were never
  saved are the initial ones, and after the last save less than an interval is left. With the paper's 44.8 h
  in 56 h it gives 0.085, where the formula gives 0.1.
- A server that fails twice after the same save counts all samples since that save twice, as the formula does.

Must not know: what time anything takes, what rows are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .job import CprJob, above_zero


def expected_pls(job: CprJob, interval_h: float) -> float:
    """T_save f / (2 T_fail N) for f servers lost at once: recalled for f = 1.

    Args:
        job: the job.
        interval_h: hours of training between saves (T_save).

    Raises:
        ValueError: an interval that is not above 0.
    """
    above_zero("interval_h", interval_h)
    return 0.5 * interval_h * job.servers_lost / (job.mtbf_h * job.servers)


def interval_for_pls(job: CprJob, pls: float) -> float:
    """Hours between saves for which `expected_pls` is `pls`: 2 PLS N T_fail / f, recalled for f = 1.

    Raises:
        ValueError: a PLS that is not above 0.
    """
    above_zero("pls", pls)
    return 2 * pls * job.servers * job.mtbf_h / job.servers_lost


def expected_pls_of_job(job: CprJob, interval_h: float) -> float:
    """PLS with failures that are evenly likely over a job of given length (derived).

    Raises:
        ValueError: an interval that is not above 0.
    """
    lost_h = job.mean_since_save_h(interval_h) * job.servers_lost
    return lost_h / (job.mtbf_h * job.servers)


class PlsAccount:
    """What was lost so far: fed by the training, at each save and each failure.

    Samples are counted from the start of the training, on the whole job; anything in proportion to them
    does as well (steps, hours). A server that has not saved falls back to the start.

    Args:
        samples_total: of the whole training (S_total).
        servers: that hold the tables (N), numbered from 0.

    Attributes:
        failures: what each call of `failed` has added.

    Raises:
        ValueError: nothing to train, or no servers.
    """

    def __init__(self, samples_total: float, servers: int) -> None:
        above_zero("samples_total", samples_total)
        above_zero("servers", servers)
        self._samples_total = samples_total
        self._saved: list[float] = [0.0] * servers
        self.failures: list[float] = []

    @property
    def pls(self) -> float:
        """The portion of lost samples so far."""
        return math.fsum(self.failures)

    def saved(self, samples: float, servers: Iterable[int] | None = None) -> None:
        """These servers' rows, or all servers', are saved as they are after `samples` samples.

        Raises:
            ValueError: no such server, or fewer samples than at its last save.
        """
        named = range(len(self._saved)) if servers is None else list(servers)
        self._check(samples, named)
        for server in named:
            self._saved[server] = samples

    def failed(self, samples: float, servers: Iterable[int]) -> float:
        """These servers failed together after `samples` samples, and took up their rows as last saved.

        Returns:
            What this adds to the PLS.

        Raises:
            ValueError: no such server, one named twice, or fewer samples than at its last save.
        """
        named = list(servers)
        self._check(samples, named)
        since = math.fsum(samples - self._saved[server] for server in named)
        self.failures.append(since / (self._samples_total * len(self._saved)))
        return self.failures[-1]

    def state_dict(self) -> dict[str, Any]:
        """All of it, to be kept with the training's own state."""
        return {
            "samples_total": self._samples_total,
            "saved": list(self._saved),
            "failures": list(self.failures),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned.

        Raises:
            ValueError: it is of another training.
        """
        now = (self._samples_total, len(self._saved))
        then = (state["samples_total"], len(state["saved"]))
        if then != now:
            raise ValueError(
                f"this account is of (samples_total, servers) = {now}, the state given of {then}: "
                "make the account with those"
            )
        self._saved = list(state["saved"])
        self.failures = list(state["failures"])

    def _check(self, samples: float, servers: Sequence[int]) -> None:
        if len(set(servers)) != len(servers) or not set(servers) <= set(range(len(self._saved))):
            raise ValueError(
                f"servers are different numbers from 0 to {len(self._saved) - 1}; they are {list(servers)}"
            )
        for server in servers:
            if samples < self._saved[server]:
                raise ValueError(
                    f"server {server} was saved after {self._saved[server]} samples, and samples is "
                    f"{samples}: count them from the start of the training"
                )
