"""FBGEMM's optimizers that run on CUDA only, by stand-ins on one rank; and counters, which run on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from support.torchrec.models import QUIET, DataType, Watched, batch, build

from fbgemm_gpu.split_embedding_configs import EmbOptimType  # isort: skip
from fbgemm_gpu.tbe.config import optimizer_config as config  # isort: skip

from ecemb.errors import UndeclaredWrite
from ecemb.state.rank_state import RankState
from support.refusals import refused
from support.torchrec.stand_ins import optimizers_on_cpus, rounding_on_cpus

TABLES = {"user": (7, ("u", "v")), "item": (5, ("i",))}
USER = "collection.embedding_bags.user"
COUNTED = "EXACT_ROWWISE_ADAGRAD"
OPTIONS: dict[str, dict[str, Any]] = {
    "ADAM": {},
    "ADAM, a count for each row": {
        "extra_optimizer_config": config.UserEnabledConfigDefinition(use_rowwise_bias_correction=True)
    },
    "PARTIAL_ROWWISE_ADAM": {},
    "LAMB": {},
    "PARTIAL_ROWWISE_LAMB": {},
    "ENSEMBLE_ROWWISE_ADAGRAD": {
        "ensemble_mode": config.EnsembleModeDefinition(step_ema=2, step_swap=3, step_start=0)
    },
    f"{COUNTED}, with counters": {
        "weight_decay_mode": config.WeightDecayMode.COUNTER,
        "weight_decay": 0.01,
        "counter_based_regularization": config.CounterBasedRegularizationDefinition(
            counter_weight_decay_mode=config.CounterWeightDecayMode.DECOUPLE,
            counter_halflife=3,
            max_counter_update_freq=2,
            learning_rate_mode=config.LearningRateMode.TAIL_ID_LR_DECREASE,
        ),
    },
}
STEPS = 6
pytestmark = [*QUIET, pytest.mark.usefixtures("one_rank")]
every_optimizer = pytest.mark.parametrize("name", OPTIONS)


@pytest.fixture(autouse=True)
def _on_cpus(request: pytest.FixtureRequest) -> Iterator[None]:
    name = request.node.callspec.params.get("name", COUNTED)
    with nullcontext() if name.startswith(COUNTED) else optimizers_on_cpus():
        yield


def model_of(name: str) -> Any:
    kind = EmbOptimType[name.split(",")[0]]
    return build(TABLES, fused_params={"optimizer": kind, "learning_rate": 0.1, **OPTIONS[name]})


def train(model: Any, step: int) -> None:
    ids = [[step % 7, 2], [2]], [[], [(3 * step) % 7]], [[0], [0, step % 5]]
    model(batch(dict(zip("uvi", ids, strict=True))))[0].backward()


@every_optimizer
@pytest.mark.parametrize("apart", [False, True], ids=["in the arena", "apart"])
def test_what_changes_is_captured(name: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecemb.engines.fbgemm.is_off_arena", lambda _: apart)
    model = model_of(name)
    watched = Watched(model)
    states = watched.engine._batches[0].rule.states
    for step in range(STEPS):
        before = watched.rows()
        with watched.step():
            train(model, step)
        assert watched.changed(before) and not watched.unsaved(before)
    for at, stored in enumerate(watched.stored):
        tensors = watched.engine.tensors(at)
        assert list(tensors) == ["weight", *states]
        for tensor, column in zip(tensors.values(), stored.columns, strict=True):
            assert tensor.numpy().tobytes() == column.tobytes() and tensor.any()


def continued(name: str, *, forget: tuple[str, ...] = ()) -> bool:
    """Whether a training that takes another one's rows and state over goes on with the same bits."""
    one, other = model_of(name), model_of(name)
    left, right = Watched(one), Watched(other)
    for step in range(5):
        with left.step():
            train(one, step)
    right.memory[:] = left.memory
    state = left.tables.state()
    for of_batch in state["torchrec"].values():
        of_batch.update({key: type(of_batch[key])(1) for key in forget if key in of_batch})
    right.tables.set_state(state)
    for model, watched in ((one, left), (other, right)):
        for step in range(5, 5 + STEPS):
            with watched.step():
                train(model, step)
    return left.memory.tobytes() == right.memory.tobytes()


@every_optimizer
def test_what_was_stored_continues_the_same(name: str) -> None:
    assert continued(name)


@pytest.mark.parametrize("name", [one for one in OPTIONS if "each row" not in one])
def test_counters_that_are_left_out_would_be_noticed(name: str) -> None:
    assert not continued(name, forget=("iter", "iter_cpu"))


@pytest.mark.parametrize("name", [one for one in OPTIONS if "counters" in one])
def test_the_greatest_counter_of_all_rows_comes_back(name: str) -> None:
    """On a device; on CPUs FBGEMM has it at 1."""
    watched, other = Watched(model_of(name)), Watched(model_of(name))
    watched.engine._batches[0].module.max_counter.fill_(7)
    other.tables.set_state(watched.tables.state())
    assert float(other.engine._batches[0].module.max_counter) == 7


@every_optimizer
def test_lookups_that_count_belong_into_a_step(name: str) -> None:
    model = model_of(name)
    watched = Watched(model)
    before = watched.rows()
    with refused(UndeclaredWrite, "outside of a step", "FBGEMM counts lookups", "'user'"), torch.no_grad():
        model(batch({"u": [[1], []], "v": [[], []], "i": [[1], []]}))
    assert not watched.changed(before)


@pytest.mark.parametrize("kind", ["EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"])
def test_an_evaluation_between_steps_leaves_the_state_as_it_is(kind: str) -> None:
    """Where no update depends on the number of lookups; so nothing is said of it, and no bit differs."""
    model = build(TABLES, fused_params={"optimizer": EmbOptimType[kind], "learning_rate": 0.1})
    watched = Watched(model)
    with watched.step():
        train(model, 1)
    before = watched.tables.state()
    with torch.no_grad():
        model(batch({"u": [[1], []], "v": [[], []], "i": [[1], []]}))
    assert watched.tables.state() == before


@pytest.mark.parametrize("name", ["ENSEMBLE_ROWWISE_ADAGRAD"])
def test_lookups_that_overwrite_all_rows_capture_them(name: str) -> None:
    model = model_of(name)
    watched = Watched(model)
    whole: list[int] = []
    for step in range(1, 7):
        with watched.step():
            train(model, step)
        if len(watched.captured[USER]) == TABLES["user"][0]:
            whole.append(step)
    assert whole == [2, 3, 4, 6]


@pytest.mark.parametrize("forget", [False, True], ids=["kept", "left out"])
def test_stochastic_rounding_draws_the_same_again(forget: bool) -> None:
    """From the generator of the device, which is rank state; without it the bits would be others."""
    generator = torch.Generator().manual_seed(1)
    with rounding_on_cpus(generator):
        one, other = (build(TABLES, "sgd", dtype=DataType.FP16, lr=0.001) for _ in range(2))
        left, right = Watched(one), Watched(other)
        kept = RankState([], dict, lambda _: None)
        for step in range(3):
            with left.step():
                train(one, step)
        right.memory[:] = left.memory
        packed = kept.pack()
        for model, watched in ((one, left), (other, right)):
            if not forget:
                kept.unpack(packed)
            for step in range(3, 3 + STEPS):
                before = watched.rows()
                with watched.step():
                    train(model, step)
                assert not watched.unsaved(before)
        assert (left.memory.tobytes() == right.memory.tobytes()) is not forget
