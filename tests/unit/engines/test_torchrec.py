"""TorchRec's tables on one rank: captured rows are those that change, and all other changes are noticed."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing  # teaches the pickler to share tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from support.torchrec import members
from support.torchrec.models import (
    OPTIMIZERS,
    QUIET,
    KeyedJaggedTensor,
    Watched,
    batch,
    build,
    optimizer_of,
    plans,
)
from support.torchrec.stand_ins import streams_on_cpus

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.distributed.train_pipeline import train_pipelines

from ecemb.engines import torchrec as adapter
from ecemb.errors import UndeclaredWrite, UnsupportedOptimizer, UnsupportedTable, UsageError
from support.refusals import refused

TABLES = {"user": (7, ("u", "v")), "item": (5, ("i",)), "one": (1, ("o",))}
BAGS = "collection.embedding_bags"
Bags = dict[str, list[list[int]]]
pytestmark = [*QUIET, pytest.mark.usefixtures("one_rank")]
every_optimizer = pytest.mark.parametrize("kind", list(OPTIMIZERS))


def train(model: nn.Module, bags: Mapping[str, Sequence[Sequence[int]]], factor: float = 1.0) -> None:
    (model(batch(bags))[0] * factor).backward()


SOME: Bags = {"u": [[1, 2], [2]], "v": [[], [6]], "i": [[0], [0, 0]], "o": [[], []]}
ROWS = {f"{BAGS}.user": {1, 2, 6}, f"{BAGS}.item": {0}}


# --- what is captured ---------------------------------------------------------------------------


def bags_of(size: int, sizes: Mapping[str, int] | None = None) -> st.SearchStrategy[Bags]:
    def of(feature: str, rows: int) -> st.SearchStrategy[list[list[int]]]:
        count = size if sizes is None else sizes[feature]
        bag = st.lists(st.integers(0, rows - 1), max_size=4)
        return st.lists(bag, min_size=count, max_size=count)

    return st.fixed_dictionaries(
        {feature: of(feature, rows) for rows, names in TABLES.values() for feature in names}
    )


@pytest.mark.parametrize("sequence", [False, True], ids=["bags", "sequence"])
@every_optimizer
def test_captured_rows_are_exactly_those_that_change(kind: str, sequence: bool) -> None:
    model = build(TABLES, kind, sequence=sequence)
    watched = Watched(model)

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(int(sequence), 3).flatmap(bags_of), min_size=1, max_size=3))
    def check(parts: list[Bags]) -> None:
        before = watched.rows()
        with watched.step():
            for bags in parts:  # gradients accumulate
                train(model, bags)
        assert watched.captured == watched.changed(before)

    check()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_that_the_table_does_not_have_are_row_0(dtype: torch.dtype) -> None:
    model = build(TABLES)  # FBGEMM's bounds check warns, and looks up row 0
    watched = Watched(model)
    before = watched.rows()
    with watched.step():
        loss, _ = model(batch({"u": [[3, 70]], "v": [[-2]], "i": [[5]], "o": [[9, 0]]}, dtype))
        loss.backward()
    assert watched.captured == watched.changed(before)
    assert watched.captured == {f"{BAGS}.user": {0, 3}, f"{BAGS}.item": {0}, f"{BAGS}.one": {0}}


def test_features_may_have_batches_of_their_own_sizes() -> None:
    model = build(TABLES, "rowwise-adagrad")
    watched = Watched(model)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        names = [name for _, features in TABLES.values() for name in features]
        sizes = {name: data.draw(st.integers(1, 3), label=name) for name in names}
        bags = data.draw(bags_of(0, sizes))
        ids = [i for of_feature in bags.values() for bag in of_feature for i in bag]
        lengths = [len(bag) for of_feature in bags.values() for bag in of_feature]
        features = KeyedJaggedTensor(
            names,
            torch.tensor(ids, dtype=torch.int64),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            stride_per_key_per_rank=[[sizes[name]] for name in names],
            inverse_indices=(
                names,
                torch.stack([torch.arange(3).clamp(max=sizes[name] - 1) for name in names]),
            ),
        )
        before = watched.rows()
        with watched.step():
            model(features)[0].backward()
        assert watched.changed(before) == watched.captured

    check()


def test_a_lookup_that_is_not_trained_captures_nothing() -> None:
    model = build(TABLES)
    watched = Watched(model)
    before = watched.rows()
    with torch.no_grad():
        model(batch(SOME))
    model.eval()
    with torch.no_grad():
        model(batch(SOME))
    model(batch(SOME))  # with a graph, of which nothing comes
    with watched.step(), torch.no_grad():
        model(batch(SOME))
    assert not watched.captured and not watched.changed(before)
    with watched.step():  # eval() alone doesn't keep FBGEMM from training
        train(model, SOME)
    assert watched.captured == watched.changed(before) == ROWS


def test_a_gradient_through_another_batch_is_captured_when_it_comes() -> None:
    model = build(TABLES)
    watched = Watched(model)
    before = watched.rows()
    with watched.step():
        loss, _ = model(batch(SOME))
        assert not watched.captured
        train(model, {"u": [[5]], "v": [[]], "i": [[]], "o": [[]]})
        assert watched.captured == {f"{BAGS}.user": {5}}
        loss.backward(retain_graph=True)
        loss.backward()
    assert watched.captured == watched.changed(before)


# --- what is refused ----------------------------------------------------------------------------


@every_optimizer
def test_backward_outside_of_a_step_raises_before_a_row_changes(kind: str) -> None:
    model = build(TABLES, kind)
    watched = Watched(model)
    before = watched.rows()
    with refused(UndeclaredWrite, "outside of a step", "guard.step()", BAGS):
        train(model, SOME)
    assert not watched.changed(before) and not watched.undeclared


def test_a_lookup_of_an_earlier_step_is_refused_when_it_is_trained() -> None:
    """What it has read is lost at a failure, and the lookup done again reads newer rows."""
    model = build(TABLES)
    watched = Watched(model)
    with watched.step():
        loss, _ = model(batch(SOME))
        train(model, SOME)
    before = watched.rows()
    with refused(UsageError, "an earlier step", "semi-synchronous", BAGS), watched.step():
        loss.backward()
    assert not watched.changed(before)


def test_a_lookup_just_before_the_step_may_be_trained() -> None:
    model = build(TABLES)
    watched = Watched(model)
    for _ in range(2):
        before = watched.rows()
        loss, _ = model(batch(SOME))
        with watched.step():
            loss.backward()
        assert watched.captured == watched.changed(before) == ROWS


def shards(model: nn.Module) -> Iterator[Tensor]:
    for value in model.state_dict().values():
        if hasattr(value, "local_shards"):
            yield from (shard.tensor for shard in value.local_shards())


def module_of(watched: Watched) -> Any:
    return watched.engine._batches[0].module


def write_state_dict(model: Any, _: Watched) -> None:
    next(shards(model)).add_(1)


def write_weights(_: Any, watched: Watched) -> None:
    module_of(watched).split_embedding_weights()[0][2].fill_(1)


def write_states(_: Any, watched: Watched) -> None:
    module_of(watched).split_optimizer_states()[0][0].fill_(1)


def write_parameter(model: Any, _: Watched) -> None:
    with torch.no_grad():
        dict(model.named_parameters())[f"{BAGS}.user.weight"].add_(1)


def write_fused_state(model: Any, _: Watched) -> None:
    state = copy.deepcopy(model.fused_optimizer.state_dict())
    model.fused_optimizer.load_state_dict(state)


def write_buffer(_: Any, watched: Watched) -> None:
    with torch.no_grad():
        module_of(watched).weights_host.zero_()


WRITES = [write_state_dict, write_weights, write_states, write_parameter, write_fused_state, write_buffer]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__.removeprefix("write_"))
def test_an_undeclared_write_is_noticed(write: Any) -> None:
    model = build(TABLES, "rowwise-adagrad")
    watched = Watched(model)
    with watched.step():
        train(model, SOME)
    write(model, watched)
    with refused(UndeclaredWrite, "written in place", "guard.touch", BAGS), watched.step():
        pass
    assert watched.undeclared == 1


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__.removeprefix("write_"))
def test_an_undeclared_write_inside_a_step_is_noticed(write: Any) -> None:
    model = build(TABLES, "rowwise-adagrad")
    watched = Watched(model)
    with refused(UndeclaredWrite, "written in place"), watched.step():
        train(model, SOME)
        write(model, watched)
    assert watched.undeclared == 1


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__.removeprefix("write_"))
def test_a_declared_write_is_taken(write: Any) -> None:
    model = build(TABLES, "rowwise-adagrad")
    watched = Watched(model)
    before = watched.rows()
    with watched.step():
        for name, table in zip(watched.names, watched.engine.tables, strict=True):
            watched.tables.touch(name, torch.arange(table.layout.rows))
        write(model, watched)
    with watched.step():
        train(model, SOME)
    assert set(watched.changed(before)) <= set(watched.names)


def test_writes_show_in_the_arena_and_in_all_views() -> None:
    model = build(TABLES, "adagrad")
    kept = [*shards(model), *(shard for shard in model.parameters() if shard.shape[0] == 7)]
    watched = Watched(model)
    with watched.step():
        train(model, SOME)
    weights = module_of(watched).split_embedding_weights()
    assert len(kept) >= 3
    for view in kept:
        table = next(w for w in weights if w.shape == view.shape)
        assert torch.equal(view.detach(), table) and view.data_ptr() == table.data_ptr()
    for value in model.state_dict().values():
        for shard in getattr(value, "local_shards", list)():
            assert any(torch.equal(shard.tensor, weight) for weight in weights)
    for table, states in zip(watched.stored, module_of(watched).split_optimizer_states(), strict=True):
        assert states[0].numpy().tobytes() == table.columns[1].tobytes()


@every_optimizer
@pytest.mark.parametrize("sequence", [False, True], ids=["bags", "sequence"])
def test_tables_that_lie_apart_have_images(
    kind: str, sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecemb.engines.fbgemm.is_off_arena", lambda _: True)
    model = build(TABLES, kind, sequence=sequence)
    places = [shard.data_ptr() for shard in shards(model)]
    watched = Watched(model)
    assert places == [shard.data_ptr() for shard in shards(model)]

    def fits() -> bool:
        return all(
            column.tobytes() == tensor.numpy().tobytes()
            for i, table in enumerate(watched.stored)
            for column, tensor in zip(table.columns, watched.engine.tensors(i).values(), strict=True)
        )

    assert fits()
    for _ in range(2):
        before = watched.rows()
        with watched.step():
            train(model, SOME)
            assert not fits()
        assert fits()
        assert watched.captured == watched.changed(before)
    for name, table in zip(watched.names, watched.stored, strict=True):  # as an undo does
        for column, old in zip(table.columns, np.split(before[name], [16], axis=1), strict=False):
            column[:] = old
    watched.tables.take_back()
    assert fits()
    with watched.step():
        train(model, SOME)
    assert watched.undeclared == 0


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_of_a_lookup_are_the_same_without_a_look_at_them(
    index: torch.dtype, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Ids that FBGEMM doesn't know are its row 0; ids behind the last bag may be marked all the same."""
    monkeypatch.setattr("ecemb.engines.fbgemm.is_off_arena", lambda _: True)
    (one,) = Watched(build(TABLES, "rowwise-adagrad")).engine._batches
    assert one.is_off_arena
    random = torch.Generator().manual_seed(seed)
    features = len(one.module.feature_table_map)
    for bags in (0, 1, 3):
        lengths = torch.randint(0, 4, (features * bags,), generator=random)
        offsets = torch.cat([torch.zeros(1, dtype=index), lengths.cumsum(0).to(index)])
        ids = torch.randint(-2, 12, (int(offsets[-1]),), generator=random).to(index)
        expected = {
            (table, row) for table, rows in one.looked_up((ids, offsets), {}) for row in rows.tolist()
        }
        marked = one.marked((ids, offsets), {}).numpy()
        if len(ids):
            assert {(t, row) for t, rows in one.named(marked) for row in rows.tolist()} == expected
        behind = one.marked((torch.cat([ids, ids[:1]]), offsets), {}).tolist()
        assert set(marked.tolist()) <= set(behind) and max(behind, default=0) <= one._first[-1]


def test_loading_belongs_into_a_step() -> None:
    model, other = build(TABLES, "rowwise-adagrad"), build(TABLES, "rowwise-adagrad")
    watched = Watched(model)
    with torch.no_grad():
        for shard in shards(other):
            shard.add_(1)
    before = watched.rows()
    with refused(UndeclaredWrite, "load_state_dict()", "guard.step()"):
        model.load_state_dict(other.state_dict())
    assert not watched.changed(before)
    with watched.step():
        model.load_state_dict(other.state_dict())
    assert watched.captured == watched.changed(before)
    assert {name: len(rows) for name, rows in watched.captured.items()} == {
        f"{BAGS}.user": 7,
        f"{BAGS}.item": 5,
        f"{BAGS}.one": 1,
    }
    with watched.step():
        train(model, SOME)


def test_whole_tables_are_captured_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecemb.engines.contract._CHUNK_BYTES", 50)  # two rows
    model = build(TABLES, "rowwise-adagrad")
    watched = Watched(model)
    every = {f"{BAGS}.user": set(range(7)), f"{BAGS}.item": set(range(5)), f"{BAGS}.one": {0}}
    with watched.step():
        for name in watched.names:
            watched.tables.touch(name)
        write_state_dict(model, watched)
    assert watched.captured == every and watched.sizes == [2, 2, 2, 1, 2, 2, 1, 1]
    with watched.step():
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert watched.captured == every and max(watched.sizes) == 2


@pytest.mark.parametrize("sequence", [False, True], ids=["bags", "sequence"])
def test_a_lookup_that_averages_captures_all_rows(sequence: bool) -> None:
    model = build(TABLES, "averaging", sequence=sequence)
    watched = Watched(model)
    every = {f"{BAGS}.user": set(range(7)), f"{BAGS}.item": set(range(5)), f"{BAGS}.one": {0}}
    if sequence:
        every = {name.replace("embedding_bags", "embeddings"): rows for name, rows in every.items()}
    for step in range(1, 6):
        before = watched.rows()
        with watched.step():
            train(model, SOME)
        assert watched.captured == watched.changed(before)
        assert (watched.captured == every) is (step % 2 == 0)


def test_a_lookup_that_averages_belongs_into_a_step() -> None:
    model = build(TABLES, "averaging")
    watched = Watched(model)
    before = watched.rows()
    for _ in range(2):  # the second would average
        with refused(UndeclaredWrite, "outside of a step", "averages all rows", BAGS), torch.no_grad():
            model(batch(SOME))
    assert not watched.changed(before)
    module_of(watched).eval()
    with watched.step(), torch.no_grad():
        model(batch(SOME))
        model(batch(SOME))
    assert not watched.captured and not watched.changed(before)


def test_averages_come_back_at_the_same_lookups() -> None:
    one, other = Watched(first := build(TABLES, "averaging")), Watched(second := build(TABLES, "averaging"))
    with one.step():
        train(first, SOME)
    other.memory[:] = one.memory
    other.tables.set_state(one.tables.state())
    for model, watched in ((first, one), (second, other)):
        with watched.step():
            train(model, SOME)
    assert one.memory.tobytes() == other.memory.tobytes()
    assert len(other.captured[f"{BAGS}.user"]) == 7


def test_replaced_modules_and_storages_are_noticed() -> None:
    def replace_module(watched: Watched) -> None:
        batch = watched.engine._batches[0]
        batch.kernel._emb_module = copy.copy(batch.module)

    def replace_storage(watched: Watched) -> None:
        module = module_of(watched)
        module.weights_host.data = module.weights_host.detach().clone()

    def replace_state(watched: Watched) -> None:
        module = module_of(watched)
        module.momentum1_host = nn.Parameter(module.momentum1_host.detach().clone(), requires_grad=False)

    def shard_anew(watched: Watched) -> None:
        collection = watched.engine._collections[0].module
        collection._lookups[0] = copy.copy(collection._lookups[0])
        collection._lookups[0]._emb_modules = nn.ModuleList()

    def replace_shown(watched: Watched) -> None:
        parameter = watched.engine.parameters[1]
        parameter.data = parameter.detach().clone()

    for change in (replace_module, replace_storage, replace_state, shard_anew, replace_shown):
        watched = Watched(build(TABLES, "rowwise-adagrad"))
        change(watched)
        with refused(UndeclaredWrite, "before ecemb.protect()"), watched.step():
            pass


def test_a_shown_parameter_that_was_replaced_is_noticed_when_a_step_ends() -> None:
    """Or between steps, as before a checkpoint. No lookup reads it, so that is early enough."""
    watched = Watched(build(TABLES))
    (parameter, *_), reached = watched.engine.parameters, False
    with watched.step():
        pass
    kept, parameter.data = parameter.data, parameter.detach().clone()
    words = ("parameter user.weight", "replaced", "before ecemb.protect()")
    with refused(UndeclaredWrite, *words):
        watched.tables.check()
    with refused(UndeclaredWrite, *words), watched.step():
        reached = True
    assert reached
    parameter.data = kept
    watched.tables.check()
    with refused(UndeclaredWrite, *words), watched.step():
        parameter.data = kept.clone()


MOVES: dict[str, Callable[[Watched, nn.Module], object]] = {
    "share_memory": lambda _, model: model.share_memory(),
    "shown": lambda watched, _: watched.engine.parameters[0].share_memory_(),
    "weights": lambda watched, _: ForkingPickler.dumps(module_of(watched).weights_host),
    "states": lambda watched, _: ForkingPickler.dumps(module_of(watched).momentum1_host),
    "state_dict": lambda _, model: ForkingPickler.dumps(list(model.state_dict().values())),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_tables_that_move_to_shared_memory_are_noticed(move: str, inside: bool) -> None:
    model = build(TABLES, "rowwise-adagrad")
    watched = Watched(model)
    with watched.step():
        train(model, SOME)
    before = watched.rows()
    if not inside:
        MOVES[move](watched, model)
    words = (f"{BAGS} ('user', 'item', 'one')", "to other shared memory", "DataLoader")
    with refused(UndeclaredWrite, *words), watched.step():
        if inside:
            MOVES[move](watched, model)
        train(model, SOME)
    if not inside:
        assert not watched.changed(before)


# --- beside others ------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_trackers_of_lookups_go_on(first: bool) -> None:
    model = build(TABLES)
    seen: list[Any] = []

    def register() -> None:
        model.module.collection.register_post_lookup_tracker_fn(lambda *given: seen.append(given))

    if first:
        register()
    watched = Watched(model)
    if not first:
        register()
    before = watched.rows()
    with watched.step():
        train(model, SOME)
    assert len(seen) == 1
    assert watched.captured == watched.changed(before) == ROWS
    watched.tables.unwatch()
    train(model, SOME)
    assert len(seen) == 2


def test_unwatched_tables_tell_nothing() -> None:
    model = build(TABLES)
    watched = Watched(model)
    watched.tables.unwatch()
    train(model, SOME)
    assert not watched.captured


@pytest.fixture
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    streams_on_cpus(monkeypatch)


PIPELINES: dict[str, Any] = {
    "base": (train_pipelines.TrainPipelineBase, {}),
    "sparse-dist": (train_pipelines.TrainPipelineSparseDist, {}),
    "sparse-dist, freed early": (
        train_pipelines.TrainPipelineSparseDist,
        {"free_features_storage_early": True, "clear_data_dist_inputs": True},
    ),
    "fused-sparse-dist": (train_pipelines.TrainPipelineFusedSparseDist, {}),
    "lite": (train_pipelines.TrainPipelineSparseDistLite, {}),
}


def batches(count: int) -> Iterator[Any]:
    for i in range(count):
        yield batch({"u": [[i % 7]], "v": [[(3 * i) % 7, i % 5]], "i": [[(2 * i) % 5]], "o": [[0]]})


@pytest.mark.usefixtures("_streams")
@pytest.mark.parametrize("name", list(PIPELINES))
def test_pipelines_capture_rows_in_the_step_that_changes_them(name: str) -> None:
    """Though they look further batches up meanwhile."""
    kind, options = PIPELINES[name]
    if name not in ("base", "lite"):
        options = options | {"execute_all_batches": True}
    model, plain = build(TABLES), build(TABLES)
    watched = Watched(model)
    pipe, other = (kind(one, optimizer_of(one), torch.device("cpu"), **options) for one in (model, plain))
    left, right = batches(6), batches(6)
    for _ in range(6):
        before = watched.rows()
        with watched.step():
            pipe.progress(left)
        other.progress(right)
        assert watched.captured == watched.changed(before) != {}
    for one, two in zip(shards(model), shards(plain), strict=True):
        assert torch.equal(one, two)


def test_each_protected_pipeline_was_tried() -> None:
    protected = {name for name, one in members.PIPELINES.items() if isinstance(one, members.Protected)}
    assert {kind.__name__ for kind, _ in PIPELINES.values()} == protected


@pytest.mark.usefixtures("_streams")
@pytest.mark.parametrize("start_batch", [0, 99])
def test_semi_synchronous_pipelines_are_refused(start_batch: int) -> None:
    model = build(TABLES)
    watched = Watched(model)
    pipe = train_pipelines.TrainPipelineSemiSync(
        model, optimizer_of(model), torch.device("cpu"), start_batch=start_batch
    )
    source = batches(6)
    with watched.step():
        pipe.progress(source)
    before = watched.rows()
    with refused(UsageError, "an earlier step", "semi-synchronous"), watched.step():
        pipe.progress(source)
    assert not watched.changed(before)


# --- counters and learning rates ----------------------------------------------------------------


@every_optimizer
def test_state_that_is_not_per_row_comes_back(kind: str) -> None:
    first, second = build(TABLES, kind), build(TABLES, kind)
    one, other = Watched(first), Watched(second)
    optimizer = optimizer_of(first)
    for step in range(3):
        for group in first.fused_optimizer.param_groups:
            group["lr"] = 0.25 / (step + 1)
        with one.step():
            optimizer.zero_grad()
            train(first, SOME)
            optimizer.step()
    other.memory[:] = one.memory
    other.tables.set_state(one.tables.state())
    for model, watched in ((first, one), (second, other)):
        optimizer = optimizer_of(model)
        with watched.step():
            train(model, SOME)
            optimizer.step()
            train(model, SOME)
    assert one.memory.tobytes() == other.memory.tobytes()
    left, right = one.tables.state(), other.tables.state()
    assert repr(left) == repr(right)
    assert float(module_of(other).learning_rate_tensor) == pytest.approx(0.25 / 3)


def test_tables_take_their_state_along_to_another_batch(caplog: pytest.LogCaptureFixture) -> None:
    """As with another number of ranks, or another plan."""
    state = Watched(build(TABLES)).tables.state()
    fewer = {name: TABLES[name] for name in ("item", "one")}
    other = Watched(build({"new": (3, ("n",)), **fewer}, lr=0.25))
    other.tables.set_state(state)
    assert float(module_of(other).learning_rate_tensor) == 0.5 and not caplog.messages
    slower = Watched(build({"new": (3, ("n",))}, lr=0.125)).tables.state()
    other.tables.set_state({"torchrec": {**slower["torchrec"], **state["torchrec"]}})
    assert float(module_of(other).learning_rate_tensor) == 0.125
    assert f"table {BAGS}.item had another learning rate" in caplog.text
    other.tables.set_state({"torchrec": {f"{BAGS}.one[:, 2:4]": next(iter(state["torchrec"].values()))}})
    assert float(module_of(other).learning_rate_tensor) == 0.5


def test_batches_without_state_stay_as_they_are() -> None:
    one, other = Watched(build(TABLES)), Watched(build(TABLES, lr=0.25))
    state = one.tables.state()
    other.tables.set_state({"torchrec": {}})
    assert float(module_of(other).learning_rate_tensor) == 0.25
    other.tables.set_state(state)
    assert float(module_of(other).learning_rate_tensor) == 0.5


# --- what can't be protected --------------------------------------------------------------------


def test_a_frozen_heap_is_a_clear_error() -> None:
    model = build(TABLES)

    def freeze() -> None:
        gc.collect()
        gc.freeze()

    try:
        with refused(UnsupportedTable, "gc.unfreeze()"):
            Watched(model, freeze)
    finally:
        gc.unfreeze()


def test_dense_tables_are_refused() -> None:
    def dense(*given: Any, **more: Any) -> Any:
        sharding = plans.table_wise(rank=0)(*given, **more)
        sharding.compute_kernel = "dense"
        return sharding

    model = build(TABLES, sharding=dict.fromkeys(TABLES, dense), fused=False)
    with refused(UnsupportedTable, "compute kernel 'fused'", "user"):
        adapter.find(model)


def test_data_parallel_tables_are_not_the_engines() -> None:
    model = build(TABLES, sharding={"user": plans.data_parallel()})
    watched = Watched(model)
    assert watched.names == [f"{BAGS}.item", f"{BAGS}.one"]
    with watched.step():
        train(model, SOME)
    assert watched.captured == {f"{BAGS}.item": {0}}


def test_a_mode_that_may_change_other_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = "_used_rowwise_adagrad_with_global_weight_decay"
    model = build(TABLES, "rowwise-adagrad")
    module = Watched(model).engine._batches[0].module
    monkeypatch.setattr(module, mode, True, raising=False)
    with refused(UnsupportedOptimizer, mode, "EXACT_SGD", BAGS):
        adapter.find(model)


def test_other_optimizers_and_dtypes_and_devices_are_refused() -> None:
    def changed(name: str, value: Any) -> nn.Module:
        model = build(TABLES, "rowwise-adagrad")
        module = Watched(model).engine._batches[0].module
        if name in module._buffers:
            del module._buffers[name]
        setattr(module, name, value)
        return model

    with refused(UnsupportedOptimizer, "MADGRAD", "EXACT_ROWWISE_ADAGRAD", "docs/torchrec.md"):
        adapter.find(changed("optimizer", type("Kind", (), {"name": "MADGRAD"})))
    with refused(UnsupportedTable, "'host' memory beside 'dev'", "EmbeddingComputeKernel.FUSED"):
        adapter.find(changed("weights_dev", nn.Parameter(torch.ones(3))))
    with refused(UnsupportedTable, "'uvm' memory beside 'host'", "a row's last value may be in either"):
        adapter.find(changed("weights_uvm", torch.ones(3)))
    eighths = nn.Parameter(torch.zeros(8, dtype=torch.int8), requires_grad=False)
    with refused(UnsupportedTable, "torch.int8", "float16"):
        adapter.find(changed("weights_host", eighths))


def test_other_sharded_modules_are_refused() -> None:
    model = build(TABLES)
    collection = model.module.collection
    kind = type(collection)
    try:
        collection.__class__ = type("ShardedITEPEmbeddingBagCollection", (kind,), {})
        with refused(UnsupportedTable, "ShardedITEP", "pruning", "docs/torchrec.md"):
            adapter.find(model)
    finally:
        collection.__class__ = kind


def test_data_parallel_tables_of_a_fused_collection_are_refused() -> None:
    """TorchRec can't build them on CPUs."""
    model = build(TABLES, sharding={"user": plans.data_parallel()})
    collection = model.module.collection
    kind = type(collection)
    try:
        collection.__class__ = type("ShardedFusedEmbeddingBagCollection", (kind,), {})
        with refused(UnsupportedOptimizer, "data-parallel", "user", "EmbeddingBagCollection"):
            adapter.find(model)
    finally:
        collection.__class__ = kind


PRIVATE = [
    "weights_host",
    "momentum1_host",
    "weights_dev",
    "weights_physical_offsets",
    "feature_table_map",
    "learning_rate_tensor",
    "iter",
    "iter_cpu",
    "optimizer_args",
    "optimizer",
]
PRIVATE_OF_TORCHREC = ["_lookups", "embedding_bags", "module_sharding_plan"]


def test_a_missing_private_name_is_an_error_with_the_version() -> None:
    model = build(TABLES, "rowwise-adagrad")
    module: Any = Watched(model).engine._batches[0].module
    collection = model.module.collection
    owners = dict.fromkeys(PRIVATE, module) | dict.fromkeys(PRIVATE_OF_TORCHREC, collection)
    for name, owner in owners.items():
        value = getattr(owner, name)
        delattr(owner, name)
        shown = ["SplitTableBatched"] if owner is module else []
        with refused(UnsupportedTable, name, "torchrec 1.", "tested with", *shown):
            adapter.find(model)
        setattr(owner, name, value)
    assert adapter.find(model)
