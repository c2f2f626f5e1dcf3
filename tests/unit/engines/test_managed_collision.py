"""TorchRec's managed collision on one rank: what it changes is captured before, and comes back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ecemb.checkpoint.contents import FORMAT, Shard, check
from ecemb.checkpoint.interface import Stored
from ecemb.engines import collisions
from ecemb.engines import torchrec as adapter
from ecemb.errors import CheckpointMismatch, UndeclaredWrite, UnsupportedTable
from support.refusals import refused
from support.torchrec.models import QUIET, Watched, batch, build_managed

pytestmark = [*QUIET, pytest.mark.usefixtures("one_rank")]
MODULE = "collection.module._managed_collision_collection._managed_collision_modules.user"
STEPS = 8


def drawn(step: int) -> Any:
    """Five ids of 40, for nine rows: some more often than others."""
    draw = torch.Generator().manual_seed(step)
    ids = (torch.rand(5, generator=draw) ** 2 * 40).long().tolist()
    return batch({"u": [ids[:2], ids[2:]]})


def train(model: nn.Module, step: int) -> None:
    model(drawn(step))[0].backward()


def map_of(model: Any) -> Any:
    return model.module.collection.module._managed_collision_collection._managed_collision_modules["user"]


def weight_of(watched: Watched) -> str:
    return watched.names[0]


@pytest.mark.parametrize(
    ("policy", "kind", "sequence"),
    [
        ("LFU", "sgd", False),
        ("LFU", "adagrad", True),
        ("LRU", "sgd", True),
        ("LRU", "adagrad", False),
        ("DistanceLFU", "sgd", False),
        ("DistanceLFU", "adagrad", True),
    ],
)
def test_what_changes_is_captured(policy: str, kind: str, sequence: bool) -> None:
    model = build_managed(policy, kind, sequence=sequence)
    watched = Watched(model)
    evictions = 0
    for step in range(STEPS):
        before = watched.rows()
        with watched.step():
            train(model, step)
        changed = watched.changed(before)
        assert not watched.unsaved(before)
        evictions += f"{MODULE}.map" in changed
        assert (f"{MODULE}.map" in watched.captured) is (step % 2 == 0)  # the first batch was before
        assert len(watched.captured[f"{MODULE}.history"]) <= 5
    assert evictions == STEPS // 2


@pytest.mark.parametrize(
    ("policy", "sequence", "begun"),
    [
        ("LFU", False, 5),
        ("LFU", True, 6),
        ("LRU", True, 5),
        ("LRU", False, 6),
        ("DistanceLFU", False, 5),
        ("DistanceLFU", True, 6),
    ],
)
def test_what_was_stored_continues_the_same(policy: str, sequence: bool, begun: int) -> None:
    """Begun just after an eviction, or with a history."""
    one, other = (build_managed(policy, "adagrad", sequence=sequence) for _ in range(2))
    left, right = Watched(one), Watched(other)
    for step in range(begun):
        with left.step():
            train(one, step)
    drawn_by = torch.get_rng_state()
    right.memory[:] = left.memory
    right.tables.set_state(left.tables.state())
    right.tables.mark_clean()
    for model, watched in ((one, left), (other, right)):
        torch.set_rng_state(drawn_by)
        for step in range(begun, begun + STEPS):
            with watched.step():
                train(model, step)
    assert left.memory.tobytes() == right.memory.tobytes()
    assert repr(left.tables.state()) == repr(right.tables.state())


LEFT_OUT = ["_mch_counts", "_mch_last_access_iter", "_history_accumulator", "_history_last_access_iter"]


def leave_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a defect: the maps' engine protects all buffers but one."""
    every = collisions.parts_of

    def some(module: Any) -> dict[str, list[str]]:
        parts = {part: [one for one in names if one != name] for part, names in every(module).items()}
        return {part: names or ["_mch_sorted_raw_ids"] for part, names in parts.items()}

    monkeypatch.setattr(collisions, "parts_of", some)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_buffer_that_is_left_out_would_be_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart continues with another map: the test before this one fails."""
    leave_out(name, monkeypatch)
    monkeypatch.setattr(collisions, "check_inside", lambda *_: None)  # which would stop the start
    with pytest.raises(AssertionError):
        test_what_was_stored_continues_the_same("DistanceLFU", False, 6)


@pytest.mark.parametrize("name", [one for one in LEFT_OUT if one != "_history_accumulator"])
def test_a_policys_buffer_that_is_left_out_stops_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(name, monkeypatch)
    with refused(UnsupportedTable, MODULE, "could not be moved into the arena"):
        Watched(build_managed("DistanceLFU"))


def test_a_capture_after_the_eviction_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves all rows that change, and not as they were: undo and parity would be of the new ones."""
    model = build_managed("LFU")
    module = model.module.collection.module
    evict, capture = type(module)._evict, adapter.FusedTables._before_eviction
    monkeypatch.setattr(adapter.FusedTables, "_before_eviction", lambda *_: None)

    def late(self: Any, evictions: Any) -> None:
        evict(self, evictions)
        capture(watched.engine, self._embedding_module, evictions)

    monkeypatch.setattr(type(module), "_evict", late)
    watched = Watched(model)
    wrong: list[tuple[str, int]] = []
    for step in range(STEPS):
        before = watched.rows()
        with watched.step():
            watched.tables.touch(weight_of(watched), torch.tensor([8]))  # else the write itself is noticed
            train(model, step)
        wrong += watched.unsaved(before)
        for name, rows in watched.changed(before).items():
            assert rows <= watched.captured[name]
    assert {name for name, _ in wrong} == {weight_of(watched)}


def test_a_batch_in_training_belongs_into_a_step() -> None:
    model = build_managed("LRU")
    watched = Watched(model)
    before = watched.rows()
    with refused(UndeclaredWrite, "outside of a step", MODULE, "model.eval()"), torch.no_grad():
        model(drawn(0))
    assert not watched.changed(before)
    model.eval()
    with torch.no_grad():
        model(drawn(0))
    assert not watched.changed(before)
    model.train()
    with watched.step():
        train(model, 0)
    watched.tables.unwatch()
    train(model, 1)
    assert "profile" not in vars(map_of(model))


def test_a_batch_without_ids_changes_nothing() -> None:
    model = build_managed("LFU")
    watched = Watched(model)
    with watched.step():
        train(model, 0)
    before = watched.rows()
    with watched.step():
        model(batch({"u": [[], []]}))[0].backward()
    assert not watched.changed(before) and watched.undeclared == 0
    with watched.step():
        train(model, 1)


def test_a_history_that_is_full_takes_no_more() -> None:
    model = build_managed("DistanceLFU", first=batch({"u": [[7], []]}))  # two entries
    watched = Watched(model)
    for step in range(4):
        before = watched.rows()
        with watched.step():
            train(model, step)
        assert watched.changed(before).get(f"{MODULE}.history", set()) <= {0, 1}


def test_other_writes_are_noticed() -> None:
    model = build_managed("LFU")
    watched = Watched(model)
    with watched.step():
        train(model, 0)
    map_of(model)._mch_counts.add_(1)
    with refused(UndeclaredWrite, MODULE, "written in place", "guard.touch"), watched.step():
        pass
    assert watched.undeclared == 1
    watched.tables.mark_clean()
    with watched.step():
        watched.tables.touch(f"{MODULE}.map")
        map_of(model)._mch_counts.add_(1)
    map_of(model)._mch_counts.data = map_of(model)._mch_counts.clone()
    with refused(UndeclaredWrite, "_mch_counts", "before ecemb.protect()"), watched.step():
        pass


def test_loading_belongs_before_protection() -> None:
    model = build_managed("LFU")
    state = copy.deepcopy(model.state_dict())
    watched = Watched(model)
    with refused(UndeclaredWrite, "load_state_dict()", "before ecemb.protect()"), watched.step():
        model.load_state_dict(state)


def test_copies_of_the_modules_have_no_hooks() -> None:
    model = build_managed("LFU")
    watched = Watched(model)
    module = map_of(model)
    made = copy.deepcopy(module)
    history = made._history_accumulator.clone()
    made.profile({"user": drawn(0)["u"]})
    assert made._current_iter == module._current_iter + 1
    assert not torch.equal(history, made._history_accumulator)
    with watched.step():
        train(model, 0)


def test_views_show_the_arena() -> None:
    model = build_managed("LFU")
    sharded = dict(model.state_dict())[f"{MODULE}._mch_counts"]
    watched = Watched(model)
    with watched.step():
        train(model, 0)
        train(model, 1)
    (shard,) = sharded.local_shards()
    index = watched.names.index(f"{MODULE}.map")
    counts = watched.tables.tensors(index)["mch_counts"]
    assert shard.tensor.data_ptr() == counts.data_ptr() and int(counts[:3].sum()) > 0


# --- refused ------------------------------------------------------------------------------------


def test_a_checkpoint_of_maps_is_for_as_many_ranks() -> None:
    tables = Watched(build_managed("LFU")).tables.tables
    shards = [Shard(table.layout, *(table.whole(4) or ())) for table in tables]
    of_rank = [shard.describe() for shard in shards]
    stored = Stored("step-8", 8, {"format": FORMAT, "job": "job", "world_size": 4, "tables": [of_rank] * 4})
    names = [table.name for table in tables]
    with refused(CheckpointMismatch, "saved by 4 ranks", f"{MODULE}.map", "maps of ids", "Start 4 ranks"):
        check(stored, shards, 0, 2, names, {})
    assert check(stored, shards, 0, 4, names, {})


def test_a_map_without_a_history_is_refused() -> None:
    model = build_managed("LFU")
    map_of(model)._input_history_buffer_size = -1
    with refused(UnsupportedTable, MODULE, "call the model once", "before ecemb.protect()"):
        adapter.find_maps(model)


def test_other_maps_and_policies_are_refused() -> None:
    model = build_managed("LFU")
    module = map_of(model)
    policy, kind = module._eviction_policy, type(module)
    module._eviction_policy = type("Mine", (type(policy),), {})()
    with refused(UnsupportedTable, MODULE, "Mine", "LFU_EvictionPolicy"):
        adapter.find_maps(model)
    module._eviction_policy = policy
    module.__class__ = type("Mine", (kind,), {})
    with refused(UnsupportedTable, MODULE, "Mine", "MCHManagedCollisionModule", "HashZch"):
        adapter.find_maps(model)


@pytest.mark.parametrize("name", ["_history_accumulator", "_last_eviction_iter", "_evicted", "_mch_metadata"])
def test_a_missing_private_name_is_an_error_with_the_version(name: str) -> None:
    model = build_managed("LFU")
    delattr(map_of(model), name)
    with refused(UnsupportedTable, name, "torchrec 1.", "tested with"):
        adapter.find_maps(model)


def test_a_model_without_maps_has_no_engine() -> None:
    assert adapter.find_maps(nn.Linear(2, 2)) is None
