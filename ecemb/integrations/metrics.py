"""The numbers of `guard.stats()` and `guard.recovery`, for TensorBoard, Prometheus and experiment trackers.

    from ecemb.integrations import metrics
    board = metrics.TensorBoard(guard, "runs/ctr")
    server = metrics.Prometheus(guard, port=9400 + local_rank)
    tracker = metrics.Tracker(guard, mlflow.log_metrics)

Each rank reports its own numbers. `pip install 'ecemb[metrics]'` installs the packages of `TensorBoard` and
`Prometheus`, which are imported when an object is made; `Tracker` imports nothing. Counts are of this
process: they begin at 0 after a restart.

Must not know: how the guard gets its numbers.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..guard import Guard

__all__ = ["Prometheus", "TensorBoard", "Tracker", "values"]


@dataclasses.dataclass(frozen=True)
class _Family:
    """One metric.

    Attributes:
        name: without prefix.
        about: its description.
        grows: whether it is a count, which only grows.
        label: the name of the label that distinguishes its values; empty for a single value.
        values: by the label's value.
    """

    name: str
    about: str
    grows: bool
    label: str
    values: Mapping[str, float]


_COUNTS = {
    "steps": "Steps that ended in this process.",
    "aborted_steps": "Steps that step.abort() undid on all ranks.",
    "rejoined": "Deaths of other ranks after which this process stayed.",
    "captured_rows": "Rows saved before they changed, each once in a transaction.",
    "sent_bytes": "Bytes sent over the network for protection.",
    "scrubbed_words": "8-byte words of every block that scrubs compared.",
    "verified_words": "8-byte words of every block that were compared beside training.",
    "wrong_words": "Words that scrubs, or comparisons beside training, found wrong.",
    "repaired_words": "Wrong words that scrubs repaired.",
}
_RECOVERY = {
    "recovery_step": "The step that this start continued from.",
    "recovery_seconds": "Wall time of ecemb.protect() at this start.",
    "recovery_rebuilt_bytes": "Bytes that this rank received for the rebuild.",
    "recovery_lost_ranks": "Ranks whose memory was rebuilt at this start.",
}


_REBUILD = {  # of stats()["rebuild"]: name, description, whether it grows
    "bytes_left": ("rebuild_bytes_left", "Bytes of lost rows and parity that this rank lacks.", False),
    "bytes_per_s": ("rebuild_bytes_per_second", "Bytes of them that arrive in a second.", False),
    "waited_s": ("rebuild_waited_seconds", "Wall time that lookups waited for rows.", True),
}
_REPLACED = "Processes that ecemb-run replaced before this one, since torchrun last started the rank."
_AGE = "Time since the stripe was compared with its rows that was compared longest ago; all of them fitted."
_NOT_NAMED = re.compile(r"[^\w\-. :/]", re.ASCII)
_START = "Wall time of this process's start by phase: before ecemb.protect(), and in it."


def values(guard: Guard) -> dict[str, float]:
    """All numbers of this rank by name, such as "steps", "phase_seconds/exchange" and "memory_bytes/parity".

    This rank, at any time, from any thread.

    Args:
        guard: open or closed.
    """
    return {
        "/".join(filter(None, (family.name, at))): value
        for family in _families(guard)
        for at, value in family.values.items()
    }


class TensorBoard:
    """Writes a guard's numbers to TensorBoard, as `ecemb/` and their names in `values`.

    The recovery is written as a text beside them. Steps that are run again after a failure replace their
    earlier values.

    Args:
        guard: source of the numbers.
        target: a folder, in which each rank writes to rank{r}; or a SummaryWriter of torch.utils.tensorboard,
            which stays open when this is closed.

    Raises:
        ConfigurationError: tensorboard is not installed.
    """

    def __init__(self, guard: Guard, target: str | os.PathLike[str] | Any) -> None:
        self._guard = guard
        self._owned = isinstance(target, (str, os.PathLike))
        self._writer: Any = target
        if self._owned:
            try:
                from torch.utils.tensorboard.writer import SummaryWriter
            except ImportError as error:
                raise _missing("TensorBoard", "tensorboard") from error
            folder = Path(target) / f"rank{guard.stats()['rank']}"
            self._writer = SummaryWriter(str(folder), purge_step=guard.next_step)
        self._writer.add_text("ecemb/recovery", str(guard.recovery), guard.next_step)

    def write(self) -> None:
        """Writes all current numbers at step `guard.next_step`. This rank, between steps."""
        step = self._guard.next_step
        for name, value in values(self._guard).items():
            self._writer.add_scalar(f"ecemb/{name}", value, step)

    def close(self) -> None:
        """Writes out what is buffered, and ends the writer if the folder was given. May be called twice."""
        self._writer.flush()
        if self._owned:
            self._writer.close()


class Tracker:
    """Passes a guard's numbers to a function, such as that of MLflow, or of Weights & Biases.

    Args:
        guard: source of the numbers.
        log: takes the numbers of a step by name, and the step, as `mlflow.log_metrics` does. What it raises,
            `write` raises.
        prefix: of all names. Ranks that share a run of the tracker need one each.

    Raises:
        ConfigurationError: `log` can't be called.
    """

    def __init__(
        self, guard: Guard, log: Callable[[dict[str, float], int], object], *, prefix: str = "ecemb/"
    ) -> None:
        if not callable(log):
            raise ConfigurationError(
                f"ecemb.integrations.metrics.Tracker takes a function log(values, step), and was given a "
                f"{type(log).__name__}: pass a method of it, such as mlflow.log_metrics"
            )
        self._guard, self._log, self._prefix = guard, log, prefix

    def write(self) -> None:
        """Passes on all current numbers, and `guard.next_step` as the step. This rank, between steps.

        Names are the prefix and those of `values`. MLflow's rule for names holds: a character of a table's
        name that is no ASCII letter or digit and none of `_-. :/` becomes `_`.
        """
        found = values(self._guard)
        named = {_NOT_NAMED.sub("_", self._prefix + name): value for name, value in found.items()}
        self._log(named, self._guard.next_step)


class Prometheus:
    """Serves a guard's numbers over HTTP, as `ecemb_` and their names, with labels `job` and `rank`.

    A thread of this process answers; it reads, and never waits for a step.

    Args:
        guard: source of the numbers.
        port: port to listen on; 0 for any free port. The ranks of a host need one port each.
        addr: the interface to listen on; "0.0.0.0" for all. There is no password.

    Attributes:
        port: the port that it listens on.

    Raises:
        ConfigurationError: prometheus-client is not installed, or the port is not available.
    """

    def __init__(self, guard: Guard, port: int, *, addr: str = "127.0.0.1") -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise _missing("Prometheus", "prometheus-client") from error
        registry = prometheus_client.CollectorRegistry()
        registry.register(_Collector(guard))  # pyright: ignore[reportArgumentType]
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, addr, registry)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigurationError(
                f"ecemb.integrations.metrics.Prometheus can't listen on port {port} of {addr} ({reason}): "
                f"give each rank of a host its own port, such as 9400 + local rank, or port=0 for any"
            ) from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Ends the server. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    """A collector of prometheus_client, which calls `collect` at each scrape."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def collect(self) -> Iterator[Any]:
        """All metrics with their present values."""
        from prometheus_client import core

        stats = self._guard.stats()
        owner = [stats["job"], str(stats["rank"])]
        for family in _families(self._guard):
            kind = core.CounterMetricFamily if family.grows else core.GaugeMetricFamily
            names = ["job", "rank", *filter(None, [family.label])]
            metric = kind(f"ecemb_{family.name}", family.about, labels=names)
            for at, value in family.values.items():
                metric.add_metric([*owner, *filter(None, [at])], value)
            yield metric


def _families(guard: Guard) -> Iterator[_Family]:
    stats, report = guard.stats(), guard.recovery
    yield _Family("next_step", "The step to run next.", False, "", {"": stats["next_step"]})
    yield _Family("replaced_workers", _REPLACED, False, "", {"": stats["replaced"]})
    for name, about in _COUNTS.items():
        yield _Family(name, about, True, "", {"": stats[name]})
    if (age_s := stats["verified_age_s"]) is not None:
        yield _Family("verified_age_seconds", _AGE, False, "", {"": age_s})
    yield _Family("phase_seconds", "Wall time of protection by phase.", True, "phase", stats["seconds"])
    yield _Family("memory_bytes", "Memory by purpose.", False, "region", stats["bytes"])
    values = (report.step, report.total_s, report.rebuilt_bytes, len(report.lost))
    for (name, about), value in zip(_RECOVERY.items(), values, strict=True):
        yield _Family(name, about, False, "kind", {report.kind: value})
    if rebuild := stats["rebuild"]:
        for key, (name, about, grows) in _REBUILD.items():
            yield _Family(name, about, grows, "", {"": rebuild[key]})
        about = "Rows that this rank lacks."
        yield _Family("rebuild_rows_left", about, False, "table", rebuild["rows_left"])
        about = "Wall time that lookups waited for rows, by table."
        waited = rebuild["waited_by_table_s"]
        yield _Family("rebuild_table_waited_seconds", about, True, "table", waited)
    yield _Family("start_seconds", _START, False, "phase", {**report.before_s, **report.seconds})


def _missing(name: str, package: str) -> ConfigurationError:
    return ConfigurationError(
        f"ecemb.integrations.metrics.{name} needs {package}, which is not installed: "
        "pip install 'ecemb[metrics]'"
    )
