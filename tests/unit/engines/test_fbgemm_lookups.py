"""Rows of lookups that are on a device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch

from ecemb.engines.fbgemm import Features


def test_batch_sizes_of_features_go_to_the_device_without_a_wait() -> None:
    """A copy that blocks waits for all work on the device; from pageable memory it is read at once anyway."""
    features = Features("a batch", np.array([3, 4], np.int64), np.array([0, 3], np.int64))
    ids, offsets = torch.tensor([2, 1, 3]), torch.tensor([0, 1, 1, 3])
    sizes = [[1, 1], [1, 0]]
    features.there(ids, offsets, sizes)  # brings what stays there
    moves: list[dict[str, Any]] = []
    to = torch.Tensor.to

    def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if any(isinstance(one, torch.device) for one in (*args, *options.values())):
            moves.append(options)
        return to(tensor, *args, **options)

    with mock.patch.object(torch.Tensor, "to", noted):
        found = features.there(ids, offsets, sizes)
    assert found.tolist() == [2, 4, 6]
    assert moves == [{"non_blocking": True}]
