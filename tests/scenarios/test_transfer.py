"""A new training begins with tables of another one: those that are asked for, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecemb
from ecemb.checkpoint import Transfer
from ecemb.errors import CheckpointFailed, CheckpointInsecure, CheckpointMismatch, EcembError
from support.guarded_training import initialise
from support.moves import store_of, whole_tables
from support.processes import launch

SIZES = {"users": (20, 4), "goods": (12, 4), "tags": (5, 2)}
SOURCE_RANKS = 3


class Training:
    """Tables of ecemb.nn, each in a dense layer's way."""

    def __init__(self, sizes: Mapping[str, tuple[int, int]], optimizer: str, device: str | None, seed: int):
        torch.manual_seed(seed)
        self.tables = {
            name: ecemb.nn.ShardedEmbeddingBag(*size, device=device) for name, size in sizes.items()
        }
        self.head = nn.Linear(2, 1)
        self.model = nn.ModuleDict({**self.tables, "head": self.head})
        weights = [table.weight for table in self.tables.values()]
        make: Any = {"adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}[optimizer]
        self.sparse = make(weights, lr=0.1)
        self.dense = torch.optim.Adam(self.head.parameters())

    def protect(self, **options: Any) -> ecemb.Guard:
        ranks = dist.get_world_size()
        optimizers = [self.sparse, self.dense]
        return ecemb.protect(self.model, optimizers=optimizers, code=ecemb.Code(ranks, ranks - 1), **options)

    def step(self, guard: ecemb.Guard) -> None:
        with guard.step():
            self.sparse.zero_grad()
            self.dense.zero_grad()
            loss = self.head(torch.ones(1, 2)).sum()
            for table in self.tables.values():
                loss = loss + table(torch.randint(table.num_embeddings, (8, 2))).square().sum()
            loss.backward()
            for parameter in self.head.parameters():
                dist.all_reduce(parameter.grad)
            self.sparse.step()
            self.dense.step()


def arrays(tables: Mapping[str, Tensor]) -> dict[str, Any]:
    """For the way to another process."""
    return {name: tensor.numpy() for name, tensor in tables.items()}


def tensors(tables: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in tables.items()}


def trained(folder: Path, meet: Barrier, kind: str) -> dict[str, Any]:
    """The other training, which is finished: its tables at the end."""
    initialise(folder)
    training = Training(SIZES, "adagrad", "meta", seed=1)
    store = store_of(kind, folder)
    guard = training.protect()
    for _ in range(2):
        training.step(guard)
        guard.save(store)
    ends = arrays(whole_tables(training.model))
    guard.close()
    return ends


def begun(
    folder: Path,
    meet: Barrier,
    kind: str,
    sizes: Mapping[str, tuple[int, int]],
    optimizer: str,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """A new training: what it begins with, what it would begin with by itself, and what became of it."""
    arenas = folder / f"new-{kind}"
    arenas.mkdir(exist_ok=True)
    initialise(arenas)
    fresh = arrays(whole_tables(Training(sizes, optimizer, None, seed=2).model))
    training = Training(sizes, optimizer, "meta", seed=2)
    source = store_of(kind, folder)
    try:
        guard = training.protect(transfer=Transfer(source, **options), failure_domain="rank")
    except EcembError as error:
        meet.wait()
        return {"error": type(error), "text": str(error), "arenas": len(list(arenas.rglob("*.arena")))}
    found = {
        "begins": arrays(whole_tables(training.model)),
        "fresh": fresh,
        "kind": guard.recovery.kind,
        "step": guard.next_step,
        "wrong": guard.scrub().wrong_words,
    }
    training.step(guard)
    try:
        guard.save(source)
    except CheckpointMismatch as error:
        found["refused"] = str(error)
    guard.save(arenas / f"own-{options.get('states')}")
    guard.close()
    return found


@pytest.mark.parametrize("kind", ["folder", "durable"])
def test_the_listed_tables_are_taken_and_the_rest_is_fresh(kind: str, tmp_path: Path) -> None:
    then = tensors(launch(SOURCE_RANKS, trained, tmp_path, kind)[0])
    sizes = {"people": (25, 4), "goods": (12, 4), "tags": (7, 2), "more": (9, 3)}
    ids = torch.tensor([*range(19, 9, -1), -1, 3, 3, -1])
    options = {
        "tables": {"people": "users", "goods": "goods"},
        "rows": {"people": ids},
    }
    for found in launch(2, begun, tmp_path, kind, sizes, "sgd", options):
        assert (found["kind"], found["step"], found["wrong"]) == ("fresh", 0, 0)
        begins, fresh = tensors(found["begins"]), tensors(found["fresh"])
        assert begins.keys() == fresh.keys() == {f"{name}.weight" for name in sizes}
        people = fresh["people.weight"].clone()
        taken = ids >= 0
        people[: len(ids)][taken] = then["users.weight"][ids[taken]]
        assert torch.equal(begins["people.weight"], people)
        assert torch.equal(begins["goods.weight"], then["goods.weight"])
        for name in ("tags.weight", "more.weight"):
            assert torch.equal(begins[name], fresh[name])
        assert "another training" in found["refused"]


def test_the_state_of_the_optimizer_is_taken_if_asked_for(tmp_path: Path) -> None:
    then = tensors(launch(SOURCE_RANKS, trained, tmp_path, "folder")[0])
    for states in (True, False):
        options = {"tables": ["users", "goods"], "rows": {"goods": range(12)}, "states": states}
        for found in launch(2, begun, tmp_path, "folder", SIZES, "adagrad", options):
            begins, fresh = tensors(found["begins"]), tensors(found["fresh"])
            for name in ("users", "goods"):
                assert torch.equal(begins[f"{name}.weight"], then[f"{name}.weight"])
                state = then[f"{name}.sum"] if states else torch.zeros_like(then[f"{name}.sum"])
                assert torch.equal(begins[f"{name}.sum"], state)
            assert not begins["tags.sum"].any()
            assert torch.equal(begins["tags.weight"], fresh["tags.weight"])


def test_everything_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    launch(SOURCE_RANKS, trained, tmp_path, "folder")
    sizes = {"users": (25, 4), "goods": (12, 4), "tags": (7, 3), "more": (5, 2)}
    options = {
        "tables": {"users": "users", "goods": "absent", "tags": "tags", "more": "tags", "ghost": "users"},
        "rows": {"users": [0, 99], "other": [1]},
        "states": True,
    }
    for found in launch(2, begun, tmp_path, "folder", sizes, "sgd", options):
        assert (found["error"], found["arenas"]) == (CheckpointMismatch, 0)
        for text in (
            "table 'ghost': this model has no such table",
            "rows= has 'other', which is not taken",
            "rows['users']: ids are in [0, 99], and the stored table has the rows 0 to 19",
            "table 'goods': it isn't there, as 'absent'",
            "table 'tags': 7 rows now, and 5 there",
            "table 'tags': rows of 3 values now, and of 2 there",
            "table 'more': tags.sum is there, and this optimizer keeps no such state",
            "Nothing was taken",
        ):
            assert text in found["text"], (text, found["text"])


@pytest.mark.parametrize("kind", ["folder", "durable"])
def test_a_damaged_checkpoint_leaves_nothing(kind: str, tmp_path: Path) -> None:
    launch(SOURCE_RANKS, trained, tmp_path, kind)
    pattern = "step-*/__1_0.distcp" if kind == "folder" else "*/*"
    files = sorted((tmp_path / ("saved" if kind == "folder" else "durable")).glob(pattern))
    assert files
    for file in files:
        if file.is_file():
            file.write_bytes(file.read_bytes()[:20])
    for found in launch(2, begun, tmp_path, kind, SIZES, "adagrad", {"tables": ["users", "goods", "tags"]}):
        assert (found["error"], found["arenas"]) == (CheckpointFailed, 0), found


def test_the_folder_of_another_user_or_of_no_training_is_refused(tmp_path: Path) -> None:
    (found, *_) = launch(2, begun, tmp_path, "folder", SIZES, "adagrad", {})
    assert (found["error"], found["arenas"]) == (CheckpointFailed, 0)
    assert "no complete checkpoint" in found["text"]
    launch(SOURCE_RANKS, trained, tmp_path, "folder")
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    os.chown(tmp_path / "saved", 12345, -1)
    for found in launch(2, begun, tmp_path, "folder", SIZES, "adagrad", {}):
        assert (found["error"], found["arenas"]) == (CheckpointInsecure, 0)
        assert "user 12345" in found["text"]
