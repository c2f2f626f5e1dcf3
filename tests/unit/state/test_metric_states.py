"""Metrics of torchmetrics come back bit for bit, though their state_dict() is empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ecemb.errors import LayoutMismatch, StepFailed
from ecemb.start import opening
from ecemb.state.metric_states import MetricStates, is_metric
from ecemb.state.rank_state import RankState, _taken_apart

torchmetrics = pytest.importorskip("torchmetrics")
pytestmark = [
    pytest.mark.usefixtures("kept_generators"),
    pytest.mark.filterwarnings("ignore:The ``compute`` method of metric"),
]


def rank(model: nn.Module | None = None, **objects: Any) -> RankState:
    return RankState(objects, dict, lambda _: None, model)


def packed_metrics(state: RankState) -> list[dict[str, Any]]:
    return _taken_apart(state.pack())[1]["metrics"]


def bits(module: nn.Module) -> dict[str, Any]:
    """All states of all metrics in a module, and the numbers of their updates."""
    found: dict[str, Any] = {}
    for path, metric in module.named_modules():
        if isinstance(metric, torchmetrics.MetricCollection):
            metric.values(copy_state=False)  # all of a group take the states of its first
        if is_metric(metric):
            found[path] = vars(metric)["_update_count"]
            for name in vars(metric)["_defaults"]:
                value = getattr(metric, name)
                tensors = value if isinstance(value, list) else [value]
                found[f"{path}.{name}"] = (
                    type(value),
                    [(t.dtype, t.shape, t.numpy().tobytes()) for t in tensors],
                )
    return found


def pairs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.rand(16, generator=dice), torch.randint(2, (16,), generator=dice)


def mean() -> nn.Module:
    return torchmetrics.MeanMetric()


def scores() -> nn.Module:
    classification = torchmetrics.classification
    metrics = {
        "precision": classification.BinaryPrecision(),
        "recall": classification.BinaryRecall(),
        "auroc": classification.BinaryAUROC(),
    }
    return torchmetrics.MetricCollection(metrics)


def area() -> nn.Module:
    return torchmetrics.classification.BinaryAUROC()


def named() -> nn.Module:
    return nn.ModuleDict({"first": mean(), "others": nn.ModuleDict({"second": mean()})})


def extremes() -> nn.Module:
    return torchmetrics.wrappers.MinMaxMetric(torchmetrics.classification.BinaryAccuracy())


def running() -> nn.Module:
    return torchmetrics.wrappers.Running(torchmetrics.SumMetric(), window=3)


def update(one: Any, seed: int) -> None:
    predicted, wanted = pairs(seed)
    if isinstance(one, nn.ModuleDict) and not isinstance(one, torchmetrics.MetricCollection):
        one["first"].update(predicted)
        one["others"]["second"].update(wanted)
    elif isinstance(one, (torchmetrics.MeanMetric, torchmetrics.wrappers.Running)):
        one.update(predicted)
    else:
        one.update(predicted, wanted)


def result(one: Any) -> Any:
    if isinstance(one, nn.ModuleDict) and not isinstance(one, torchmetrics.MetricCollection):
        return str([one["first"].compute(), one["others"]["second"].compute()])
    return str(one.compute())


@pytest.mark.parametrize(
    ("make", "in_model"),
    [
        *((make, False) for make in (mean, area, named, scores, extremes, running)),
        *((make, True) for make in (mean, named, extremes, running)),
    ],
)
def test_metrics_go_on_where_they_were(make: Any, in_model: bool) -> None:
    """In an object of `state=`, or anywhere in the model; results of later updates are the same too."""

    def training() -> tuple[Any, RankState]:
        metric = make()
        model = nn.Sequential(nn.ModuleDict({"metric": metric}), nn.Linear(1, 1))
        return metric, rank(model) if in_model else rank(metric=metric)

    metric, state = training()
    for seed in range(4):
        update(metric, seed)
        if make is not scores:  # whose cached results of torchmetrics 1.0.3 don't follow later updates
            result(metric)
    data, then = state.pack(), bits(metric)
    assert state.pack() == data
    after, expected = [], []
    for seed in range(4, 7):
        update(metric, seed)
        expected += [bits(metric), result(metric)]
    fresh, state = training()
    assert bits(fresh) != then
    state.unpack(data)
    assert bits(fresh) == then
    assert state.pack() == data
    for seed in range(4, 7):
        update(fresh, seed)
        after += [bits(fresh), result(fresh)]
    assert after == expected
    for one in (metric, fresh):
        assert not one.state_dict()


@pytest.mark.parametrize("make", [mean, area, named, scores, extremes, running])
def test_an_abort_takes_updates_back(make: Any) -> None:
    metric = make()
    state = rank(metric=metric)
    for count in range(2):
        expected = bits(metric), result(metric) if count else None
        data = state.pack()
        update(metric, 8)
        result(metric)
        state.unpack(data, positions=False)
        assert (bits(metric), result(metric) if count else None) == expected
        assert state.pack() == data
        update(metric, count)


def test_metrics_of_a_group_that_is_behind_come_back_as_they_are_asked() -> None:
    """A collection updates one metric of a group; the others take its states when they are asked."""
    metric, fresh = scores(), scores()
    state = rank(metric=metric)
    for seed in range(3):
        metric.update(*pairs(seed))
    data = state.pack()
    rank(metric=fresh).unpack(data)
    assert vars(fresh)["_groups"] == vars(metric)["_groups"] and len(vars(fresh)["_groups"]) == 2
    assert str(fresh.compute()) == str(metric.compute())
    assert bits(fresh) == bits(metric)


def test_a_persistent_metric_stays_persistent_and_comes_back() -> None:
    metric, fresh = area(), area()
    for one in (metric, fresh):
        one.persistent(True)
    update(metric, 1)
    rank(metric=fresh).unpack(rank(metric=metric).pack())
    assert bits(fresh) == bits(metric)
    assert all(vars(fresh)["_persistent"].values())


def test_a_metric_in_state_and_in_the_model_is_kept_once() -> None:
    metric = mean()
    state = rank(nn.ModuleDict({"loss": metric}), metric=metric)
    assert [list(one) for one in packed_metrics(state)] == [[""], []]


def test_other_metrics_than_were_packed_are_an_error() -> None:
    data = rank(nn.ModuleDict({"loss": mean()})).pack()
    kept = mean()
    with pytest.raises(
        LayoutMismatch, match=r"metric model\.other: there is one with states .*there was none"
    ):
        rank(nn.ModuleDict({"loss": mean(), "other": kept})).unpack(data)
    with pytest.raises(LayoutMismatch, match=r"metric model\.loss: there is none, and there was one"):
        rank().unpack(data)


def test_a_metric_that_is_added_later_is_an_error() -> None:
    tracker = torchmetrics.wrappers.MetricTracker(torchmetrics.SumMetric())
    state = rank(tracker=tracker)
    state.pack()
    tracker.increment()
    with pytest.raises(LayoutMismatch, match=r"metric state\['tracker'\].* was added under protection"):
        state.pack()


def test_a_new_rank_takes_metrics_that_all_others_had_alike() -> None:
    states: list[bytes] = []
    for number in range(2):
        model = nn.ModuleDict({"same": mean(), "own": mean()})
        update(model["same"], 1)
        update(model["own"], number)
        states.append(rank(model).pack())
    fresh = nn.ModuleDict({"same": mean(), "own": mean()})
    rank(fresh).unpack_common(states)
    assert bits(fresh["same"]) == bits(model["same"])
    assert bits(fresh["own"]) == bits(mean())


def test_a_metric_that_outgrows_its_room_is_named() -> None:
    metric = area()
    state = rank(area=metric)
    state.room_bytes = len(state.pack()) + 200
    for seed in range(30):
        update(metric, seed)
    with pytest.raises(StepFailed, match=r"largest part is state= object 'area' .* metrics that list all"):
        state.pack()


def test_a_metric_of_the_model_that_lists_all_samples_is_left_out_and_said() -> None:
    """It would end the training by outgrowing its room."""
    metric = area()
    model = nn.ModuleDict({"area": metric, "loss": mean()})
    state = rank(model)
    assert list(state.growing) == ["model.area"]
    assert list(packed_metrics(state)[-1]) == ["loss"]
    given = rank(model, area=metric)
    assert not given.growing and list(packed_metrics(given)[0]) == [""]


def test_metrics_are_known_by_what_they_can() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._defaults: dict[str, Any] = {}

    assert is_metric(mean()) and not is_metric(scores())
    assert not is_metric(Alike()) and not is_metric(nn.Linear(1, 1)) and not is_metric({"_defaults": {}})
    assert not MetricStates(object(), "state[0]") and MetricStates(object(), "state[0]").state() == {}


class Nothing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_the_start_warns_of_what_does_not_come_back(caplog: pytest.LogCaptureFixture) -> None:
    opening._warn_of_lost(rank(mean()))
    assert not caplog.records
    opening._warn_of_lost(rank(nn.ModuleDict({"area": area()}), seen=Nothing()))
    assert len(caplog.records) == 2
    assert "'seen' (Nothing): state_dict() is empty, so nothing" in caplog.text
    assert "model.area (BinaryAUROC): a metric of the model that lists all samples" in caplog.text


def test_objects_with_nothing_in_their_state_dict_are_known() -> None:
    """But metrics, whose states are kept, and what says itself that it has none."""
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert rank(scores=scores(), off=off, head=nn.Linear(1, 1)).empty == []
    assert rank(seen=Nothing(), scores=scores(), off=off).empty == ["state= object 'seen' (Nothing)"]
