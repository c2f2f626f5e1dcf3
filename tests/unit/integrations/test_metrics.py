"""Metrics, as TensorBoard's own reader and a real scrape see them, of a real guard."""

from __future__ import annotations

import re
import sys
import urllib.request
from importlib.util import find_spec
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ecemb.errors import ConfigurationError
from ecemb.integrations import metrics
from ecemb.recovery.execute import RecoveryReport
from support.guarded_training import bags, initialise
from support.processes import launch
from support.refusals import refused


def told(folder: Path, meet: Barrier) -> dict[str, Any]:
    """Trains three steps, and tells of them by all that is installed."""
    initialise(folder)
    training = bags()
    guard = training.protect(4, 3)
    found: dict[str, Any] = {}
    board = metrics.TensorBoard(guard, folder / "runs") if find_spec("tensorboard") else None
    server = metrics.Prometheus(guard, 0) if find_spec("prometheus_client") else None
    for _ in range(3):
        with guard.step():
            training.body()
            if server is not None:  # in the middle of a step, from another thread
                address = f"http://127.0.0.1:{server.port}/metrics"
                with urllib.request.urlopen(address, timeout=300) as answer:
                    found["scrape"] = answer.read().decode()
        if board is not None:
            board.write()
    if server is not None:
        with refused(ConfigurationError, "can't listen on port", str(server.port), "its own port"):
            metrics.Prometheus(guard, server.port)
        server.close()
        server.close()
    if board is not None:
        board.close()
        board.close()
        found["events"] = events(folder / "runs" / "rank0")
        mine = Writer()
        metrics.TensorBoard(guard, mine).write()
        assert mine.scalars["ecemb/steps"] == (3, 3) and "fresh start" in mine.texts["ecemb/recovery"]
    found["values"] = metrics.values(guard)
    guard.close()
    found["closed"] = metrics.values(guard)
    return found


def events(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard's own reader finds: tag -> step -> value."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    [path] = folder.iterdir()
    read: dict[str, dict[int, float]] = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.tensor.float_val:
                read.setdefault(value.tag, {})[event.step] = value.tensor.float_val[0]
    return read


class Writer:
    """A SummaryWriter of the user's own."""

    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int]] = {}
        self.texts: dict[str, str] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag] = value, step

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts[tag] = text

    def flush(self) -> None: ...


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [one] = launch(1, told, tmp_path_factory.mktemp("metrics"))
    return one


def test_values(found: dict[str, Any]) -> None:
    values = found["values"]
    assert {"next_step", "captured_rows", "phase_seconds/exchange", "memory_bytes/parity"} <= set(values)
    assert (values["next_step"], values["steps"], values["recovery_step/fresh"]) == (3, 3, 0)
    assert all(isinstance(value, (int, float)) for value in values.values())
    assert found["closed"] == values


@pytest.mark.skipif(find_spec("prometheus_client") is None, reason="pip install 'ecemb[metrics]'")
def test_a_scrape(found: dict[str, Any]) -> None:
    lines = re.findall(r"^(ecemb_\w+)\{(.*)\} (\S+)$", found["scrape"], re.MULTILINE)
    by_name = {(name, labels): float(value) for name, labels, value in lines}
    assert by_name["ecemb_steps_total", 'job="guard",rank="0"'] == 2  # the third one was open
    assert by_name["ecemb_next_step", 'job="guard",rank="0"'] == 2
    phases = {labels for name, labels in by_name if name == "ecemb_phase_seconds_total"}
    assert 'job="guard",phase="capture",rank="0"' in {",".join(sorted(one.split(","))) for one in phases}
    assert "# TYPE ecemb_captured_rows_total counter" in found["scrape"]
    assert "# HELP ecemb_memory_bytes Memory by purpose." in found["scrape"]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="pip install 'ecemb[metrics]'")
def test_tensorboards_own_reader(found: dict[str, Any]) -> None:
    read = found["events"]
    assert read["ecemb/steps"] == {1: 1.0, 2: 2.0, 3: 3.0}
    assert {tag.removeprefix("ecemb/") for tag in read} == set(found["values"])
    last = found["values"]["memory_bytes/tables"]
    assert read["ecemb/memory_bytes/tables"][3] == pytest.approx(last)


@pytest.mark.skipif(find_spec("prometheus_client") is None, reason="pip install 'ecemb[metrics]'")
def test_what_is_no_port_is_refused() -> None:
    with refused(ConfigurationError, "can't listen on port 70000", "0-65535", "port=0 for any"):
        metrics.Prometheus(cast("Any", None), 70000)


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (lambda: metrics.TensorBoard(cast("Any", None), "runs"), "torch.utils.tensorboard.writer"),
        (lambda: metrics.Prometheus(cast("Any", None), 0), "prometheus_client"),
    ],
    ids=["tensorboard", "prometheus"],
)
def test_what_is_missing_is_named(make: Any, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if module.startswith("torch."):
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with refused(ConfigurationError, "which is not installed", "pip install 'ecemb[metrics]'"):
        make()


def rebuilding(next_step: int = 3, table: str = "user") -> Any:
    """A guard's numbers while a table's rows are rebuilt beside training."""
    rebuild = {"rows_left": {table: 7}, "bytes_left": 56, "bytes_per_s": 8.0, "waited_s": 0.5}
    rebuild["waited_by_table_s"] = {table: 0.25}
    stats = {
        **dict.fromkeys(metrics._COUNTS, 0),
        "next_step": next_step,
        "replaced": 2,
        "verified_age_s": 2.5,
        "seconds": {},
        "bytes": {},
        "rebuild": rebuild,
    }
    report = RecoveryReport("memory", 3, (1,), 0, False, 0, {})
    return SimpleNamespace(stats=lambda: stats, recovery=report, next_step=next_step)


def test_a_rebuild_beside_training_is_measured() -> None:
    values = metrics.values(rebuilding())
    assert (values["verified_age_seconds"], values["replaced_workers"]) == (2.5, 2)
    found = {name: value for name, value in values.items() if name.startswith("rebuild")}
    assert found == {
        "rebuild_bytes_left": 56,
        "rebuild_bytes_per_second": 8.0,
        "rebuild_waited_seconds": 0.5,
        "rebuild_rows_left/user": 7,
        "rebuild_table_waited_seconds/user": 0.25,
    }


# --- trackers of experiments ---------------------------------------------------------------------


class Mlflow:
    """As `mlflow.log_metrics` of MLflow 3.17: names are checked, and a step may come again."""

    def __init__(self) -> None:
        self.history: dict[str, list[tuple[int | None, float]]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            if not re.fullmatch(r"[/\w.\- :]*", name):
                raise ValueError(f"names may only contain alphanumerics and _-. :/, not {name}")
            self.history.setdefault(name, []).append((step, float(value)))


class Run:
    """As a run of wandb 0.31: what is logged without a step is at the next one; earlier steps are ignored."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: list[dict[str, Any]] = []
        self.axes: dict[str, str] = {}

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        if step is not None and step < self.step:
            return
        self.step = self.step + 1 if step is None else step
        self.rows.append(data)


AGAIN = (1, 2, 3, 2, 3, 4)
"""The next steps after which numbers are written, with a failure that takes two steps back."""


def test_mlflow_has_all_numbers_of_all_ranks() -> None:
    run = Mlflow()
    for rank in range(2):
        for step in AGAIN:
            tracker = metrics.Tracker(rebuilding(step), run.log_metrics, prefix=f"ecemb/rank{rank}/")
            tracker.write()
    assert run.history["ecemb/rank1/next_step"] == [(step, float(step)) for step in AGAIN]
    assert len(run.history) == 2 * len(metrics.values(rebuilding()))


def test_weights_and_biases_has_steps_that_ran_again() -> None:
    run = Run()
    run.define_metric("ecemb/*", step_metric="ecemb/next_step")
    for step in AGAIN:
        run.log({"loss": 1.0})  # by the script, at the run's own step
        metrics.Tracker(rebuilding(step), lambda values, step: run.log(values)).write()
    shown = [row for row in run.rows if "loss" not in row]
    assert [row[run.axes["ecemb/*"]] for row in shown] == list(AGAIN)
    assert set(shown[0]) == {f"ecemb/{name}" for name in metrics.values(rebuilding())}


def test_names_are_those_that_trackers_take() -> None:
    run = Mlflow()
    metrics.Tracker(rebuilding(table="tables[0](a)"), run.log_metrics).write()
    assert run.history["ecemb/rebuild_rows_left/tables_0__a_"] == [(3, 7.0)]


def test_a_tracker_that_fails_is_not_hidden() -> None:
    def fails(values: dict[str, float], step: int) -> None:
        raise ConnectionError(f"no server at step {step}")

    with pytest.raises(ConnectionError, match="at step 3"):
        metrics.Tracker(rebuilding(), fails).write()


def test_a_run_in_place_of_its_function_is_refused() -> None:
    with refused(ConfigurationError, "takes a function log(values, step)", "given a Run", "log_metrics"):
        metrics.Tracker(rebuilding(), cast("Any", Run()))
