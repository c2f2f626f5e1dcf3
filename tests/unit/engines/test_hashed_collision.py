"""TorchRec's MPZCH on one rank, by a stand-in for FBGEMM's operator: slots that a batch takes come back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ecemb.engines import collisions
from ecemb.engines import torchrec as adapter
from ecemb.engines.collisions import slots_of
from ecemb.errors import UndeclaredWrite, UnsupportedTable
from support.refusals import refused
from support.torchrec.models import HASHED, QUIET, Watched, batch, build_managed
from support.torchrec.stand_ins import (
    HashZchManagedCollisionModule,
    hash_mc_evictions,
    hash_on_cpus,
)

ROWS, STEPS = 9, 8
HashZchEvictionConfig = hash_mc_evictions.HashZchEvictionConfig
HashZchEvictionPolicyName = hash_mc_evictions.HashZchEvictionPolicyName
BUFFERS = collisions._PARTS
MODULE = "collection.module._managed_collision_collection._managed_collision_modules.user"
WEIGHT = "collection.module._embedding_module.embedding_bags.user"
POLICIES = [None, *(one.name for one in HashZchEvictionPolicyName)]
every_policy = pytest.mark.parametrize("policy", POLICIES)
pytestmark = [
    *QUIET,
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
]
Clock = Callable[[int], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(
        HashZchManagedCollisionModule,
        "_zero_collision_hash",
        HashZchManagedCollisionModule._zero_collision_hash,
    )
    monkeypatch.setattr(hash_mc_evictions, "time", hash_mc_evictions.time)
    return hash_on_cpus()


def build(policy: str | None, kind: str = "sgd", **options: Any) -> Any:
    name = None if policy is None else HashZchEvictionPolicyName[policy]
    config = None if name is None else HashZchEvictionConfig(["u"], single_ttl=2, per_feature_ttl=[2])
    remapping = HashZchManagedCollisionModule(
        ROWS,
        torch.device("cpu"),
        total_num_buckets=1,
        max_probe=3,
        input_hash_size=HASHED,
        eviction_policy_name=name,
        eviction_config=config,
        **{"track_id_freq": True} | options,
    )
    return build_managed("", kind, rows=ROWS, remapping=remapping)


def drawn(step: int) -> Any:
    draw = torch.Generator().manual_seed(step)
    ids = (torch.rand(5, generator=draw) ** 2 * 40).long().tolist()
    return batch({"u": [ids[:2], ids[2:]]})


def train(model: nn.Module, step: int, clock: Clock) -> None:
    clock(step)
    model(drawn(step))[0].backward()


def map_of(model: Any) -> Any:
    return model.module.collection.module._managed_collision_collection._managed_collision_modules["user"]


def assert_same(one: Any, other: Any) -> None:
    for name in BUFFERS:
        left, right = getattr(map_of(one), name), getattr(map_of(other), name)
        assert left is right is None or torch.equal(left, right)


@every_policy
def test_what_changes_is_captured(policy: str | None, clock: Clock) -> None:
    model = build(policy)
    watched = Watched(model)
    reused = 0
    for step in range(STEPS):
        before = watched.rows()
        with watched.step():
            train(model, step, clock)
        assert not watched.unsaved(before)
        (at,) = (number for number, name in enumerate(watched.names) if name == f"{MODULE}.map")
        for tensor, column in zip(
            watched.tables.tensors(at).values(), watched.stored[at].columns, strict=True
        ):
            assert tensor.numpy().tobytes() == column.tobytes()
        now = watched.rows()[f"{MODULE}.map"][:, :8].view(np.int64)
        then = before[f"{MODULE}.map"][:, :8].view(np.int64)
        reused += int(((now != then) & (then != -1)).sum())
    assert (reused > 0) is (policy is not None)
    assert watched.undeclared == 0


@every_policy
def test_what_was_stored_continues_the_same(policy: str | None, clock: Clock) -> None:
    one, other = build(policy, "adagrad"), build(policy, "adagrad")
    left, right = Watched(one), Watched(other)
    for step in range(5):
        with left.step():
            train(one, step, clock)
    drawn_by = torch.get_rng_state()
    right.memory[:] = left.memory
    right.tables.put()
    right.tables.set_state(left.tables.state())
    assert_same(one, other)
    for model, watched in ((one, left), (other, right)):
        torch.set_rng_state(drawn_by)
        for step in range(5, 5 + STEPS):
            with watched.step():
                train(model, step, clock)
    assert left.memory.tobytes() == right.memory.tobytes()
    assert_same(one, other)


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_is_left_out_would_be_noticed(
    name: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart continues with another map: the test before this one fails."""
    monkeypatch.setattr(collisions, "_PARTS", tuple(one for one in BUFFERS if one != name))
    monkeypatch.setattr(collisions, "check_inside", lambda *_: None)
    monkeypatch.setattr("ecemb.engines.collisions.check_inside", lambda *_: None)
    with pytest.raises(AssertionError):
        test_what_was_stored_continues_the_same("LRU_EVICTION", clock)


def test_slots_that_are_left_out_would_be_noticed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("LRU_EVICTION")
    monkeypatch.setattr(collisions, "slots_of", lambda *found: slots_of(*found)[1:])
    watched = Watched(model)
    for step in range(STEPS):
        with watched.step():
            train(model, step, clock)
    (at,) = (number for number, name in enumerate(watched.names) if name == f"{MODULE}.map")
    tensor = watched.tables.tensors(at)["hash_zch_identities"]
    assert tensor.numpy().tobytes() != watched.stored[at].columns[0].tobytes()


def test_a_step_is_taken_back(clock: Clock) -> None:
    model = build("LRU_EVICTION")
    watched = Watched(model)
    with watched.step():
        train(model, 0, clock)
    held = {name: tensor.clone() for name, tensor in watched.tables.tensors(1).items()}
    before = watched.rows()
    with watched.step():
        train(model, 1, clock)
    changed = watched.changed(before)[f"{MODULE}.map"]
    stored, at = watched.stored[1], 0
    for column in stored.columns:  # as an undo does
        column[:] = before[f"{MODULE}.map"][:, at : at + column.shape[1]]
        at += column.shape[1]
    watched.tables.take_back()
    assert changed
    for name, tensor in watched.tables.tensors(1).items():
        assert torch.equal(tensor, held[name])


def test_slots_are_those_that_the_operator_names() -> None:
    assert slots_of(torch.tensor([3, -1, 5, 3]), torch.tensor([7, 5])).tolist() == [3, 5, 7]
    assert slots_of(torch.tensor([-1, -1]), None).tolist() == []
    assert slots_of(torch.tensor([], dtype=torch.int32), torch.tensor([])).dtype == np.int64


def test_a_batch_in_training_belongs_into_a_step(clock: Clock) -> None:
    model = build("LRU_EVICTION")
    watched = Watched(model)
    held = map_of(model)._hash_zch_identities.clone()
    with refused(UndeclaredWrite, "outside of a step", MODULE, "model.eval()"), torch.no_grad():
        model(drawn(0))
    assert torch.equal(held, map_of(model)._hash_zch_identities)
    model.eval()
    with torch.no_grad():
        model(drawn(0))
    assert torch.equal(held, map_of(model)._hash_zch_identities)
    model.train()
    watched.tables.unwatch()
    train(model, 1, clock)
    assert not {"remap", "_zero_collision_hash"} & set(vars(map_of(model)))


def test_other_writes_are_noticed(clock: Clock) -> None:
    model = build("LRU_EVICTION")
    watched = Watched(model)
    with watched.step():
        train(model, 0, clock)
    map_of(model)._hash_zch_metadata.add_(1)
    with refused(UndeclaredWrite, MODULE, "written in place", "guard.touch"), watched.step():
        pass
    watched.tables.mark_clean()
    with watched.step():
        watched.tables.touch(f"{MODULE}.map")
        map_of(model)._hash_zch_metadata.add_(1)
    state = copy.deepcopy(model.state_dict())
    with refused(UndeclaredWrite, "load_state_dict()", "before ecemb.protect()"), watched.step():
        model.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("_scalar_logger", nn.Module(), "tb_logging_frequency=0"),
        ("_is_inference", True, "is_inference"),
        ("_hash_zch_metadata", torch.zeros(ROWS, 1, dtype=torch.int16), "torch.int16"),
    ],
)
def test_what_would_be_lost_is_refused(name: str, value: Any, words: str, clock: Clock) -> None:
    model = build("LRU_EVICTION")
    setattr(map_of(model), name, value)
    with refused(UnsupportedTable, MODULE, words):
        adapter.find_maps(model)
