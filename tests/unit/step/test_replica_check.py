"""What differs between the ranks' replicated states is named."""

from __future__ import annotations

import numpy as np
import torch

from ecemb.state.flatten import Outline, checksums, separated
from ecemb.step.agreement import difference_of_replicas


def saved(value: object) -> np.ndarray:
    outlined, tensors, numbers = separated(value)
    outline = Outline(outlined, tensors, numbers)
    memory = np.empty(outline.size_bytes(), np.uint8)
    outline.lay_out(memory, tensors).save(tensors, numbers)
    return memory


def state(*, bias: float = 0.0, lr: float = 0.1, momentum: float = 0.0) -> dict[str, object]:
    return {
        "model": {"weight": torch.ones(2, 3), "bias": torch.full((2,), bias, dtype=torch.bfloat16)},
        "optimizers": [{"options": [{"lr": lr}], "state": {0: {"step": torch.tensor(momentum)}}}],
    }


def names(one: dict[str, object], other: dict[str, object]) -> set[str]:
    first, second = checksums(saved(one)), checksums(saved(other))
    assert list(first) == list(second)
    return {name for name in first if first[name] != second[name]}


def test_each_part_has_a_checksum_of_its_own() -> None:
    assert names(state(), state()) == set()
    assert names(state(), state(bias=-0.0)) == {"bias"}  # bits count
    assert names(state(), state(lr=0.2)) == {"optimizers.0.options.0.lr"}
    assert names(state(), state(momentum=1.0)) == {"optimizers.0.state.0.step"}


def test_the_first_name_and_the_ranks_that_are_unlike_most_are_said() -> None:
    told = [{"a": 1, "b": 2, "c": 3} for _ in range(5)]
    told[3]["b"] = told[1]["b"] = 7
    told[3]["c"] = 8
    assert difference_of_replicas(told) == (
        "b is the first that differs, on ranks [1, 3] from most others, and 1 more after it"
    )
    assert difference_of_replicas([{"a": 1}, {"a": 1}, {"a": 1, "b": 1}]) == (
        "b is the first that differs, on rank [2] from most others"
    )
    assert difference_of_replicas([{"a": 1, "b": 2}, {"b": 2, "a": 1}]) == "the order of its parts differs"


def test_a_message_names_a_few_ranks_of_many() -> None:
    told = [{"a": rank if rank % 3 else -1} for rank in range(64)]
    assert "on ranks [1, 2, 4, 5, 7, 8, 10, 11] and 34 more from" in difference_of_replicas(told)
