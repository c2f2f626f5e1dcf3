"""Rivals whose tables stay on a device: tensors of devices and of the CPU are not mixed.

There is no device here: torch's fake tensors stand for those of one, and refuse what a device would refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from baselines import packing, state
from baselines.check_n_run import restoring
from baselines.check_n_run.buffer import Buffer, Rows


@pytest.fixture
def on_device() -> Iterator[Tensor]:
    """A table on a device, float32 [8, 4]."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield torch.empty(8, 4, device="cuda:0")


def test_what_stands_for_a_device_refuses_what_a_device_refuses(on_device: Tensor) -> None:
    with pytest.raises(RuntimeError, match="device"):
        on_device.index_select(0, torch.tensor([1, 2]))


def test_rows_are_copied_from_a_device_by_check_n_run(on_device: Tensor, tmp_path: Path) -> None:
    buffer = Buffer(tmp_path)
    for numbers, count in ((None, 8), (torch.tensor([1, 6]), 2)):
        copied = buffer.fill([Rows("t", 0, {"weight": on_device}, numbers)], {})
        assert copied.tables[0].rows == count and copied.tables[0].tensors["weight"].shape == (count, 4)


def test_rows_are_put_back_on_a_device_by_check_n_run(on_device: Tensor) -> None:
    restoring.put_rows(on_device, torch.tensor([3, 5]), torch.ones(2, 4))


def test_tensors_of_a_device_are_packed(on_device: Tensor) -> None:
    tensors = {"rows": on_device, "own": torch.ones(3)}
    packing.pack(tensors, np.zeros(packing.size(tensors), np.uint8))


def test_optimizers_state_is_made_beside_its_parameter_but_for_single_numbers(on_device: Tensor) -> None:
    sums, steps = torch.ones(8, 4), torch.tensor(3.0)
    assert state._state_of(on_device, sums).device == on_device.device
    assert state._state_of(on_device, steps).device.type == "cpu"
    assert state._state_of(torch.empty(8, 4), sums) is not sums
