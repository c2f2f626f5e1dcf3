"""A shard's saves go to files and to memory alike, and are taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.cpr.priority import PRIORITIES
from baselines.cpr.saved import SavedRank
from baselines.cpr.saver import Saver, take_up
from baselines.cpr.saving import Saving
from baselines.cpr.servers import SavedServer, Shard
from baselines.state import rows_of

EVERY, STEPS = 16, 37


def tables() -> list[Shard]:
    torch.manual_seed(3)
    return [
        Shard(name, {"weight": torch.rand(rows, 4), "sum": torch.zeros(rows)})
        for name, rows in (("small", 5), ("large", 800), ("none", 0))
    ]


def trained(store: Any, priority: str | None) -> tuple[list[Shard], list[int]]:
    """What a training ends with, and since when samples would be lost, by step."""
    here, saving = tables(), Saving(EVERY, priority)
    saving.watch(here, {one.name: 20 * (one.rows or 1) for one in here})
    saver = Saver(store, saving)
    saver.save(here, {}, 0, whole=True)
    since: list[int] = []
    random = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        for one in here[:2]:
            rows = torch.randint(one.rows, (40,), generator=random).unique()
            one.touch(rows)
            one.tensors["weight"][rows] += step
            one.tensors["sum"][rows] += 1
        if saving.is_due(step):
            saver.save(here, {}, step)
        since.append(saver.since)
    return here, since


@pytest.mark.parametrize("priority", [None, *PRIORITIES])
def test_files_and_memory_hold_the_same(priority: str | None, tmp_path: Path) -> None:
    files, memory = SavedRank(tmp_path, 0), SavedServer()
    (ended, since), (again, _) = trained(files, priority), trained(memory, priority)
    assert since == [step - step % EVERY for step in range(1, STEPS + 1)]
    on_disk, _ = files.load()
    assert on_disk.keys() == memory.keys() == rows_of(ended).keys()
    for key, tensor in on_disk.items():
        assert torch.equal(tensor, memory.rows[key]), key
    assert not torch.equal(memory.rows["table/large/weight"], ended[1].tensors["weight"])
    take_up(again, memory.rows)
    for key, tensor in rows_of(again).items():
        assert torch.equal(tensor, memory.rows[key]), key


def test_rows_of_another_training_are_not_taken_up() -> None:
    with pytest.raises(ValueError, match=r"another training's: they differ in \['table/large/sum'"):
        take_up(tables(), {})


def test_what_an_optimizer_has_made_since_is_saved_whole() -> None:
    here, store = tables(), SavedServer()
    saving = Saving(EVERY, "mfu")
    saving.watch(here, {one.name: 20 * (one.rows or 1) for one in here})
    saver = Saver(store, saving)
    saver.save(here, {}, 0, whole=True)
    here[1].tensors["momentum"] = torch.ones(800)
    saver.save(here, {}, 2)
    assert saver.since == 2 and torch.equal(store.rows["table/large/momentum"], torch.ones(800))
