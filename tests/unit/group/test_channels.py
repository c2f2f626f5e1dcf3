"""Channels: how long a wait lasts. What they carry is tested with lines and streams."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ecemb.group import channels
from ecemb.group.channels import Channels, Lost
from ecemb.group.links import drop, pair

TIMEOUT_S = 10.0


@pytest.mark.parametrize("parts", [1, 5])
def test_a_wait_lasts_from_the_last_byte_on_whatever_signals_come(parts: int) -> None:
    """Each ends a turn of the loop; 0.6 of the deadline pass in each, and bytes come in the first ones."""
    ends = pair()
    one = Channels({0: ends[0]}, TIMEOUT_S)
    one.expect(0, np.zeros(100, np.uint8))
    turns = itertools.count()

    def interrupted(*_: Any) -> int:
        if next(turns) < parts:
            one._plan[0, channels._IN_LEFT] -= 1
        return channels._AGAIN

    clock = itertools.count(0.0, 0.6 * TIMEOUT_S)
    with (
        mock.patch.object(channels, "loop", return_value=interrupted),
        mock.patch.object(channels.time, "monotonic", side_effect=clock),
        pytest.raises(Lost, match="nothing came within 10 s"),
    ):
        one.run()
    assert next(turns) - parts in (1, 2)
    for end in ends:
        drop(end)
