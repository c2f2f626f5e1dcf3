"""`ecemb rehearse`: digests and records of ranks, and what it finds in them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ecemb.errors import ConfigurationError
from ecemb.tools import rehearsal, rehearse
from ecemb.tools.rehearsal import digests
from ecemb.tools.rehearse import Death, Line, Outcome, Place, Record, Run, cause, compare, deaths_for

STEPS = 6
PLACES: list[Place] = [(-1, "end"), *((step, when) for step in range(STEPS) for when in ("begin", "end"))]


def run_of(record: Record, **more: Any) -> Outcome:
    return Outcome("", {0: record}, **more)


def states(since: Place | None = None, name: str = "", value: str = "x") -> Record:
    """A record in which nothing changes but one value, from a place on."""
    record: Record = [
        (place, {"model.w": "a", "object.sched": "b", "generators.torch": "g", "loss": "c"})
        for place in PLACES
    ]
    for place, state in record:
        if since is not None and place >= since:
            state[name] = value
    return record


def test_the_first_place_of_a_difference_is_named_with_its_ranks() -> None:
    plain = run_of(states())
    assert compare(plain, run_of(states())) is None
    wrong = states((4, "begin"), "model.w")
    found = compare(plain, run_of([*states()[:9], *wrong[8:]]))  # its process died in step 3, and began again
    assert found is not None and (found.place, found.names) == ((4, "begin"), {"model.w": [0]})
    text, line = cause(plain, found)
    assert "guard.touch" in text and line is None


def test_what_undisturbed_runs_leave_differently_is_not_compared() -> None:
    other = run_of(states((3, "begin"), "object.sched"))
    assert compare(run_of(states()), other, {"object.sched"}) is None


@pytest.mark.parametrize(
    ("step", "when", "since"),
    [
        (3, "steps 2 and 3", (4, "begin")),
        (0, "ecemb.protect() and step 0", (4, "begin")),
        (3, "steps 2 and 3", (-1, "end")),  # a window that had changed it is undone
    ],
)
def test_a_change_between_steps_is_named_as_the_cause(step: int, when: str, since: Place) -> None:
    plain = run_of(states((step, "begin"), "generators.torch", "b"))
    found = compare(plain, run_of(states(since, "generators.torch")))
    assert found is not None
    text, line = cause(plain, found)
    assert f"changes generators.torch between {when}" in text and "generator=torch.Generator()" in text
    assert line == Line(step, "generators.torch", 0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("object.sched", "state="),
        ("loss", "guard.batches"),
        ("generators.numpy", "draws"),
        ("state.s", "all"),
    ],
)
def test_each_kind_of_difference_has_its_way_out(name: str, says: str) -> None:
    plain = run_of(states())
    found = compare(plain, run_of(states((4, "begin"), name)))
    assert found is not None and says in cause(plain, found)[0]


def test_ranks_die_where_most_has_changed() -> None:
    usual = deaths_for(run_of(states()), 3, memory=False)
    assert usual == (Death(2, "end", 1, False), Death(4, "begin", 0, False))
    rare = deaths_for(run_of(states((5, "begin"), "model.w")), 1, memory=True)
    assert rare == (Death(2, "end", 0, True), Death(5, "begin", 0, True))


def test_a_line_that_a_killed_process_has_not_finished_is_left_out() -> None:
    lines = [json.dumps([*place, {"a": "b"}]) for place in PLACES]
    read = rehearse.record_of("\n".join([*lines, '[1, "en']))
    assert read == [(place, {"a": "b"}) for place in PLACES]
    assert run_of(read).steps == STEPS and Outcome("", {}).steps == 0


def test_a_run_is_read_as_it_was_written() -> None:
    run = Run("a", 6, None, (Death(1, "end", 0, True),), Line(3, "model.w", 1))
    assert Run.from_json(json.loads(json.dumps(dataclasses.asdict(run)))) == run
    assert Run.from_json(json.loads(json.dumps(dataclasses.asdict(Run("a", 6))))) == Run("a", 6)


class Counting(torch.optim.SGD):
    calls = 0


class Mean(torch.nn.Module):
    """Has what a metric of torchmetrics has."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults = {"total": torch.zeros(())}
        self.total, self._computed = torch.zeros(()), torch.zeros(())

    def update(self) -> None: ...

    def compute(self) -> None: ...

    def reset(self) -> None: ...


@pytest.mark.usefixtures("kept_generators")
def test_digests_hold_all_that_a_step_may_change() -> None:
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 1), "norm": torch.nn.BatchNorm1d(2)})
    model.register_buffer("empty", torch.ones(2, device="meta"))
    model["library"] = type("Module", (torch.nn.Module,), {"__module__": "torchrec.modules"})()
    optimizer = Counting(model.parameters(), lr=0.1)
    schedule, loose = (torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2))
    metric = Mean()
    arguments = {"model": model, "optimizers": optimizer, "state": {"schedule": schedule, "mean": metric}}
    before = digests(arguments, [("loose", loose)])
    assert digests(arguments, [("loose", loose), ("twin", schedule), ("model", model)]) == before

    def changed() -> set[str]:
        now = digests(arguments, [("loose", loose)])
        names = {name for name in {*now, *before} if now.get(name) != before.get(name)}
        of_one_kind = [name for kind in rehearse.KINDS for name in digests(arguments, [], kind)]
        assert of_one_kind == list(digests(arguments, []))
        return {name.partition("[")[0].partition(", ")[0] for name in names}

    metric._computed += 1  # is computed again
    model["library"].register_buffer("order", torch.ones(2), persistent=False)  # as in a first forward
    assert changed() == set()
    for act, name in (
        (lambda: model["norm"](torch.ones(3, 2)), "model.norm."),
        (lambda: torch.rand(1), "generators.torch"),
        (lambda: vars(loose).update(last_epoch=7), "object.loose.state_dict().last_epoch"),
        (lambda: vars(schedule).update(last_epoch=7), "state.schedule.state_dict().last_epoch"),
        (lambda: metric.total.add_(1), "state.mean.total"),
        (lambda: vars(optimizer).update(calls=1), "optimizers.0.calls"),
        (lambda: optimizer.param_groups[0].update(lr=0.5), "optimizers.0.state_dict().param_groups"),
    ):
        act()
        assert all(one.startswith(name) for one in changed()) and changed(), name
        before = digests(arguments, [("loose", loose)])


def test_what_protect_differentiates_is_no_loss_of_the_script(tmp_path: Path) -> None:
    rank = rehearsal._Rank(tmp_path, Run("a", 6))
    backward, before = rank._backward(torch.autograd.backward), rank._losses.hexdigest()

    def protect(model: torch.nn.Module, code: None = None) -> Any:
        backward(model(torch.ones(2)).sum())
        return SimpleNamespace(stats=lambda: {"next_step": 3})

    rank._protecting(protect)(torch.nn.Linear(2, 1))
    assert rank._losses.hexdigest() == before


@pytest.mark.usefixtures("kept_generators")
def test_a_module_is_recorded_once_with_its_submodules() -> None:
    average = torch.nn.Sequential(torch.nn.Linear(1, 1))
    arguments = {"model": torch.nn.Linear(1, 1)}
    names = digests(arguments, [("average", average), ("average.0", average[0])], "object")
    assert list(names) == [f"object.average.state_dict().0.{name}" for name in ("weight", "bias")]


def test_each_object_that_differs_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {f"object.{owner}.{i}": [0] for owner in ("average", "metric", "schedule") for i in range(9)}
    shown = rehearse.Rehearsal(argparse.Namespace(), tmp_path)
    shown._show(rehearse.Difference((4, "begin"), names))
    said = capsys.readouterr().out
    assert [f"object.{owner}.0 (" in said for owner in ("average", "metric", "schedule")] == [True] * 3
    assert "and 21 more" in said


def test_a_step_that_ends_with_the_data_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal.dist, "get_rank", lambda: 0)
    rank = rehearsal._Rank(tmp_path, Run("a", 6))
    rank._arguments = {"model": torch.nn.Linear(1, 1)}
    run, guard = rank._stepping(lambda *_: nullcontext()), SimpleNamespace(stats=lambda: {"next_step": 3})
    with pytest.raises(StopIteration), run(guard, None):  # type: ignore[arg-type]
        raise StopIteration
    with run(guard, None):  # type: ignore[arg-type]
        pass
    assert rank._records is not None
    rank._records.close()
    record = rehearse.record_of((tmp_path / "rank-0.jsonl").read_text())
    assert [place for place, _ in record] == [(3, "begin"), (3, "end")]


@pytest.fixture
def own_trace() -> Iterator[None]:
    """Leaves the tracing function as it was."""
    kept = sys.gettrace()
    yield
    sys.settrace(kept)


@pytest.mark.usefixtures("own_trace")
def test_the_line_that_changes_a_value_is_found(tmp_path: Path) -> None:
    values = [0]
    rehearsal._Lines(tmp_path / "line", lambda: str(values[0]), "0").begin()
    values.append(1)
    values[0] = 7
    values.append(2)
    sys.settrace(None)
    begin = test_the_line_that_changes_a_value_is_found.__code__.co_firstlineno
    assert (tmp_path / "line").read_text() == f"{__file__}, line {begin + 5}"


def test_warnings_of_a_run_are_kept(tmp_path: Path) -> None:
    log = logging.Logger("rehearsed")
    log.addHandler(rehearsal._Warnings(tmp_path))
    log.warning("no recovery restores %s", "x")
    log.error("an error is shown otherwise")
    assert (tmp_path / "warnings").read_text() == "no recovery restores x\n"


@pytest.mark.parametrize(
    ("ranks", "steps", "script", "says"),
    [(4, 50, "missing.py", "is not a file"), (0, 50, "", "--ranks 0"), (2, 5, "", "at least 1 rank and 6")],
)
def test_options_that_make_no_sense_are_refused(
    ranks: int, steps: int, script: str, says: str, tmp_path: Path
) -> None:
    given = ["--ranks", str(ranks), "--steps", str(steps), script or __file__]
    parser = argparse.ArgumentParser()
    rehearse.add(parser)
    with pytest.raises(ConfigurationError, match=says):
        rehearse.run(parser.parse_args(given))
    with pytest.raises(ConfigurationError, match="can't be made as a new folder"):
        rehearse.run(parser.parse_args(["--keep", str(tmp_path), __file__]))
