"""What a save takes, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.cpr.priority import PRIORITIES
from baselines.cpr.saved import ROWS
from baselines.cpr.saving import Saving
from baselines.state import row_key
from ecemb.errors import ConfigurationError

Hook = Callable[[Tensor], None]


class Table:
    """As `ecemb.tables` gives them."""

    def __init__(self, name: str, rows: int, *, is_trained: bool = True) -> None:
        self.name, self.rows, self.is_trained = name, rows, is_trained
        self.tensors = {"weight": torch.zeros(rows, 4), "sum": torch.zeros(rows)}
        self.hooks: list[Hook] = []

    def on_touch(self, hook: Hook) -> Callable[[], None]:
        if not self.is_trained:
            raise ConfigurationError("nobody would tell")
        self.hooks.append(hook)
        return lambda: self.hooks.remove(hook)

    def train(self, *rows: int) -> None:
        for hook in self.hooks:
            hook(torch.tensor(rows))
        for tensor in self.tensors.values():
            tensor[torch.tensor(rows)] += 1


def tables() -> list[Table]:
    return [Table("small", 5), Table("large", 800), Table("frozen", 800, is_trained=False), Table("none", 0)]


def sizes(of: list[Table]) -> dict[str, int]:
    return {one.name: 20 * (one.rows or 700) for one in of}  # other ranks have rows of the last one


def test_vanilla_saves_everything_each_interval() -> None:
    saving, here = Saving(4), tables()
    saving.watch(here, sizes(here))
    assert saving.some(here) is None and saving.memory_bytes == 0 and not saving.lasting()
    assert [step for step in range(1, 13) if saving.is_due(step)] == [4, 8, 12]
    assert saving.since(8) == 8 and not here[1].hooks


def test_priorities_save_as_much_in_the_same_time() -> None:
    saving = Saving(16, "mfu")
    assert [step for step in range(1, 17) if saving.is_due(step)] == list(range(2, 17, 2))
    assert [saving.since(step) for step in (2, 14, 16, 18)] == [0, 0, 16, 16]
    assert Saving(3, "mfu").interval == 1 and Saving(100, "ssu", share=0.5).interval == 50


@pytest.mark.parametrize("priority", PRIORITIES)
def test_rows_of_large_tables_only(priority: str) -> None:
    saving, here = Saving(16, priority), tables()
    small, large, frozen, none = here
    saving.watch(here, sizes(here))
    assert not small.hooks and not none.hooks
    assert saving.memory_bytes > 0 and saving.touching.seconds == 0
    assert len(saving.lasting()) == (0 if priority == "ssu" else 2)
    for _ in range(2):  # the second batch is the one that SSU looks at
        large.train(7, 300)
        small.train(1)
    assert saving.touching.seconds > 0
    found: dict[str, Any] = saving.some(here) or {}
    assert found.keys() == {
        *(row_key("small", name) for name in small.tensors),
        *(
            prefix + row_key(one, name)
            for one in ("large", "frozen")
            for name in large.tensors
            for prefix in ("", ROWS)
        ),
    }
    for name, tensor in large.tensors.items():
        assert found[ROWS + row_key("large", name)].tolist() == [7, 300]
        assert torch.equal(found[row_key("large", name)], tensor[[7, 300]])
        assert found[ROWS + row_key("frozen", name)].tolist() == []
        assert torch.equal(found[row_key("small", name)], small.tensors[name])
    saving.saved(here, found)
    assert (saving.some(here) or {})[ROWS + row_key("large", "weight")].tolist() == []
    large.train(5)
    large.train(6)
    saving.saved(here, None)
    assert (saving.some(here) or {})[ROWS + row_key("large", "weight")].tolist() == []
    saving.unwatch()
    assert not large.hooks and not frozen.hooks


def test_what_makes_no_sense_is_refused() -> None:
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((0,), "every"),
        ((1, "lru"), "priority"),
        ((1, "mfu", 0.0), "share"),
        ((1, "mfu", 2.0), "share"),
    ]
    for arguments, name in refused:
        with pytest.raises(ValueError, match=f"{name}="):
            Saving(*arguments)
