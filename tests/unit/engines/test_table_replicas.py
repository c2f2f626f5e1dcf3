"""2D parallelism on one rank, by a stand-in for its device: what `sync()` writes is captured before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ecemb.engines import torchrec as adapter
from ecemb.errors import UndeclaredWrite, UnsupportedTable
from support.refusals import refused
from support.torchrec.models import QUIET, Watched, batch, build
from support.torchrec.stand_ins import collection_on_cpus

TABLES = {"user": (7, ("u",)), "item": (5, ("i",))}
EVERY = {"collection.embedding_bags.user": set(range(7)), "collection.embedding_bags.item": set(range(5))}
pytestmark = [*QUIET, pytest.mark.usefixtures("one_rank")]


def halve(*given: Any) -> None:
    """In place of an average, which would change nothing on one rank; TorchRec 1.9 passes the group first."""
    for tensor in given[-1]:
        tensor.mul_(0.5)


def averaged(kind: str = "rowwise-adagrad") -> Any:
    def make(*given: Any, **options: Any) -> Any:
        groups = {"world_size": 1, "sharding_group_size": 1, "global_pg": dist.group.WORLD}
        return collection_on_cpus(*given, **options, **groups)

    model = build(TABLES, kind, parallel=make)
    model.set_all_reduce_hook(halve)
    return model


def train(model: Any) -> None:
    model(batch({"u": [[1, 2], [2]], "i": [[0], []]}))[0].backward()


@pytest.mark.parametrize("kind", ["sgd", "rowwise-adagrad", "adagrad"])
def test_all_rows_are_captured_before_they_are_averaged(kind: str) -> None:
    model = averaged(kind)
    watched = Watched(model)
    for _ in range(2):
        before = watched.rows()
        with watched.step():
            train(model)
        assert watched.captured == watched.changed(before) != EVERY
        before = watched.rows()
        with watched.step():
            train(model)
            model.sync()
        assert watched.captured == watched.changed(before) == EVERY
        assert not watched.unsaved(before) and watched.undeclared == 0


def test_an_average_without_a_capture_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.FusedTables, "_before_sync", lambda *_, **__: None)
    model = averaged()
    watched = Watched(model)
    with refused(UndeclaredWrite, "written in place"), watched.step():
        model.sync(include_optimizer_state=False)


def test_an_average_belongs_into_a_step() -> None:
    model = averaged()
    watched = Watched(model)
    before = watched.rows()
    with refused(UndeclaredWrite, "sync()", "the model", "outside of a step"):
        model.sync()
    assert not watched.changed(before)
    watched.tables.unwatch()
    model.sync()
    assert watched.changed(before) == EVERY


def test_tables_in_groups_are_of_their_rank() -> None:
    """In a checkpoint: another group has other rows until the next average."""
    assert [table.whole(4) for table in Watched(averaged()).tables.tables] == [None, None]
    assert [table.whole(4) for table in Watched(build(TABLES)).tables.tables] == [(0, 7), (0, 5)]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("sharding_strategy", SimpleNamespace(name="FULLY_SHARDED"), "FULLY_SHARDED"),
        ("hash_zch_modules", [("module", "user")], "managed collision"),
    ],
)
def test_what_is_untried_is_refused(name: str, value: Any, words: str) -> None:
    model = averaged()
    setattr(model._default_ctx, name, value)
    with refused(UnsupportedTable, "the model", words, "docs/torchrec.md"):
        adapter.find(model)


def test_a_view_that_would_not_be_moved_is_an_error() -> None:
    model = averaged()
    model._default_ctx.weights_by_dtype = {torch.float32: [torch.zeros(7, 4)]}
    with refused(UnsupportedTable, "a view of the model", "the arena"):
        Watched(model)
