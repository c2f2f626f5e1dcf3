"""TorchRec's tables whose rows are on their way: every lookup waits for those that it reads."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.torchrec.models import (
    OPTIMIZERS,
    QUIET,
    KeyedJaggedTensor,
    Watched,
    batch,
    build,
    build_managed,
    optimizer_of,
)
from support.torchrec.stand_ins import collection_on_cpus, streams_on_cpus

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.distributed.train_pipeline import train_pipelines

from ecemb.engines.fbgemm import Batch

TABLES = {"user": (40, ("u", "v")), "item": (30, ("i",)), "none": (1, ("o",))}
USER, ITEM = range(2)
STEPS = 4
pytestmark = [*QUIET, pytest.mark.usefixtures("one_rank")]


def drawn(step: int) -> Any:
    """Ids below 20, some of them twice."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(20, (8,), generator=draw).tolist()
    return batch({"u": [ids[:2], ids[2:3]], "v": [[], ids[3:5]], "i": [ids[5:7], ids[7:]], "o": [[], []]})


class Twins:
    """Two equal models: one has all its rows, those of the other come when they are waited for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.model, self.plain = make(), make()
        self.watched, self.beside = Watched(self.model, arriving=True), Watched(self.plain)
        assert self.watched.arriving is not None
        self.arriving = self.watched.arriving

    def step(self, features: Any, after: Callable[[Any], object] = lambda _: None) -> None:
        """Trains a batch with both; the results have to be equal."""
        found: list[Tensor] = []
        state = torch.get_rng_state()
        for model, watched in ((self.model, self.watched), (self.plain, self.beside)):
            torch.set_rng_state(state)
            with watched.step():
                loss, values = model(features)
                loss.backward()
                after(model)
            found.append(values)
        assert torch.equal(*found)

    def finish(self) -> None:
        """The rows that have not come are brought; all bytes have to be equal."""
        for index in range(len(self.watched.tables.tables)):
            self.watched.tables.wait_for_table(index)
        assert self.arriving.is_whole
        assert self.watched.memory.tobytes() == self.beside.memory.tobytes()


@pytest.mark.parametrize(
    ("kind", "sequence"),
    [
        *(pytest.param(kind, False, id=f"{kind}-bags") for kind in (*OPTIMIZERS, "averaging")),
        *(pytest.param(kind, True, id=f"{kind}-sequence") for kind in OPTIMIZERS),
    ],  # TorchRec's sequences have no optimizer that averages
)
def test_training_gets_the_bits_of_an_undisturbed_run(kind: str, sequence: bool) -> None:
    twins = Twins(lambda: build(TABLES, kind, sequence=sequence))
    assert not twins.watched.tables.unannounced
    for step in range(STEPS):
        twins.step(drawn(step))
        if kind == "averaging":
            assert twins.arriving.is_whole is (step > 0)  # each second lookup writes all rows
        else:
            assert not twins.arriving.there[USER][20:].any() and not twins.arriving.there[ITEM][20:].any()
    twins.finish()


@pytest.mark.parametrize("between", [True, False], ids=["between steps", "in a step"])
def test_lookups_without_a_gradient_wait(between: bool) -> None:
    twins = Twins(lambda: build(TABLES))
    for model in (twins.model, twins.plain):
        model.eval()
    for step in range(STEPS):
        features = drawn(step)
        twins.watched.is_open = not between
        with torch.no_grad():
            assert torch.equal(twins.model(features)[1], twins.plain(features)[1])
        assert torch.equal(twins.model(features)[1], twins.plain(features)[1])
    assert not twins.arriving.is_whole
    twins.finish()


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_a_lookup_that_does_not_wait_would_be_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "wait_for_rows", lambda *_: None)
    twins = Twins(lambda: build(TABLES, kind))
    with twins.watched.step(), pytest.raises(AssertionError, match="captured before they are there"):
        twins.model(drawn(0))[0].backward()
    assert torch.isnan(twins.model(drawn(0))[1]).any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_that_the_table_does_not_have_wait_for_row_0(dtype: torch.dtype) -> None:
    twins = Twins(lambda: build(TABLES))
    twins.step(batch({"u": [[3, 70]], "v": [[-2]], "i": [[50]], "o": [[9, 0]]}, dtype))
    assert [np.flatnonzero(there).tolist() for there in twins.arriving.there] == [[0, 3], [0], [0]]
    twins.finish()


def test_features_may_have_batches_of_their_own_sizes() -> None:
    names, sizes = ["u", "v", "i", "o"], [1, 3, 2, 1]
    lengths = torch.tensor([2, 0, 1, 1, 1, 2, 0], dtype=torch.int32)
    twins = Twins(lambda: build(TABLES, "rowwise-adagrad"))
    for step in range(STEPS):
        ids = torch.randint(20, (7,), generator=torch.Generator().manual_seed(step))
        features = KeyedJaggedTensor(
            names,
            ids,
            lengths=lengths,
            stride_per_key_per_rank=[[size] for size in sizes],
            inverse_indices=(
                names,
                torch.stack([torch.arange(3).clamp(max=size - 1) for size in sizes]),
            ),
        )
        twins.step(features)
    assert not twins.arriving.is_whole
    twins.finish()


@pytest.fixture
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    streams_on_cpus(monkeypatch)


@pytest.mark.usefixtures("_streams")
@pytest.mark.parametrize("evaluates", [False, True], ids=["train", "evaluate"])
@pytest.mark.parametrize(
    "kind", ["TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineFusedSparseDist"]
)
def test_pipelines_wait_for_the_rows_of_the_batches_that_they_look_up(kind: str, evaluates: bool) -> None:
    twins = Twins(lambda: build(TABLES))
    make = getattr(train_pipelines, kind)
    options = {} if kind == "TrainPipelineBase" else {"execute_all_batches": True}
    pipes = [
        make(one, optimizer_of(one), torch.device("cpu"), **options) for one in (twins.model, twins.plain)
    ]
    if evaluates:
        twins.model.eval(), twins.plain.eval()
    sources = [iter([drawn(step) for step in range(STEPS)]) for _ in pipes]
    for _ in range(STEPS):
        found: list[Any] = []
        for pipe, watched, source in zip(pipes, (twins.watched, twins.beside), sources, strict=True):
            with watched.step():
                found.append(pipe.progress(source))
        assert torch.equal(*found)
    assert not twins.arriving.is_whole
    twins.finish()


# --- rows that something else than a lookup's gradient changes ------------------------------------


@pytest.mark.parametrize(
    ("policy", "sequence"),
    [
        ("LFU", False),
        pytest.param("LFU", True, marks=pytest.mark.long),
        pytest.param("LRU", False, marks=pytest.mark.long),
        ("LRU", True),
        ("DistanceLFU", False),
        pytest.param("DistanceLFU", True, marks=pytest.mark.long),
    ],
)
def test_evicted_rows_are_there_before_they_are_drawn_again(policy: str, sequence: bool) -> None:
    twins = Twins(lambda: build_managed(policy, "adagrad", sequence=sequence, rows=15))
    tables = twins.watched.tables
    apart = [table.name for table in tables.tables if not table.announces_lookups]
    assert [tables.tables[index].name for index in tables.unannounced] == apart == twins.watched.names[1:]
    for step in range(2 * STEPS):
        draw = torch.Generator().manual_seed(step)
        ids = (torch.rand(5, generator=draw) ** 2 * 40).long().tolist()
        twins.step(batch({"u": [ids[:2], ids[2:]]}))
    twins.finish()


def test_an_average_over_groups_waits_for_all_rows() -> None:
    def make() -> Any:
        groups = {"world_size": 1, "sharding_group_size": 1, "global_pg": dist.group.WORLD}
        return build(
            TABLES, "adagrad", parallel=lambda *given, **more: collection_on_cpus(*given, **more, **groups)
        )

    twins = Twins(make)
    for step in range(2):
        twins.step(drawn(step))
        assert not twins.arriving.is_whole
    twins.step(drawn(2), lambda model: model.sync())
    assert twins.arriving.is_whole
    twins.finish()


def test_rows_declared_by_hand_are_there() -> None:
    twins = Twins(lambda: build(TABLES))
    with twins.watched.step(), torch.no_grad():
        twins.watched.tables.touch("collection.embedding_bags.item", torch.tensor([4, 2]))
        weight = twins.watched.tables.tensors(ITEM)["weight"]
        assert not torch.isnan(weight[[2, 4]]).any()
        assert [int(there.sum()) for there in twins.arriving.there] == [0, 2, 0]


def test_loading_in_a_step_waits_for_all_rows() -> None:
    twins = Twins(lambda: build(TABLES))
    state = copy.deepcopy(twins.plain.state_dict())
    with twins.watched.step():
        twins.model.load_state_dict(state)
    assert twins.arriving.is_whole


# --- reads of whole tables ----------------------------------------------------------------------


def whole_state(model: Any) -> Sequence[object]:
    return [model.state_dict()]


def of_collection(model: Any) -> Sequence[object]:
    return [model.module.collection.state_dict()]


def of_optimizer(model: Any) -> Sequence[object]:
    return [model.fused_optimizer.state_dict()]


@pytest.mark.parametrize("sequence", [False, True], ids=["bags", "sequence"])
@pytest.mark.parametrize("read", [whole_state, of_collection, of_optimizer])
def test_what_shows_whole_tables_waits_for_all_rows(read: Callable[[Any], Any], sequence: bool) -> None:
    twins = Twins(lambda: build(TABLES, "adagrad", sequence=sequence))
    twins.step(drawn(0))
    read(twins.model)
    assert twins.arriving.is_whole
    twins.finish()


def test_nothing_is_called_when_all_rows_are_there_or_nobody_watches() -> None:
    twins = Twins(lambda: build(TABLES))
    twins.step(drawn(0))
    twins.finish()
    twins.watched.tables.all_are_there()
    calls = twins.arriving.calls
    twins.step(drawn(1))
    twins.model.state_dict()
    assert twins.arriving.calls == calls
    unwatched = Twins(lambda: build(TABLES))
    unwatched.watched.tables.unwatch()
    unwatched.model(drawn(0)), whole_state(unwatched.model), of_optimizer(unwatched.model)
    assert not unwatched.arriving.calls


def test_a_copy_of_the_module_waits_for_nothing() -> None:
    twins = Twins(lambda: build(TABLES))
    module: nn.Module = copy.deepcopy(twins.watched.engine._batches[0].module)
    module(indices=torch.tensor([1]), offsets=torch.tensor([0, 1, 1, 1, 1]))
    assert not twins.arriving.calls
