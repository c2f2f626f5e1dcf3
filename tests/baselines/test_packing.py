"""Named tensors in one run of bytes."""

from __future__ import annotations

import numpy as np
import torch

from baselines import packing


def test_tensors_come_back_from_one_run_of_bytes() -> None:
    tensors = {
        "a": torch.randn(5, 3),
        "b/½": torch.randn(3).to(torch.bfloat16),
        "scalar": torch.tensor(7.0, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6).reshape(2, 3).t(),
        "flag": torch.tensor([True, False]),
    }
    out = np.zeros(packing.size(tensors), np.uint8)
    packing.pack(tensors, out)
    found = packing.unpack(out)
    assert list(found) == list(tensors)
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
    out[:] = 0
    assert not found["a"].any()  # no copies
    packing.pack({}, np.zeros(packing.size({}) + 8, np.uint8))
