from __future__ import annotations

import pytest

from baselines import pace
from baselines.pace import Pace


class Clock:
    """Goes on only by sleeping.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 5.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_bandwidth_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    kept = Pace(100)
    for size, now in ((50, 5.5), (0, 5.5), (250, 8.0)):
        kept.wait(size)
        assert clock.now == pytest.approx(now)
    clock.now = 20.0  # what was slow by itself doesn't wait
    kept.wait(100)
    assert clock.now == 20.0
    Pace(None).wait(1 << 60)
    assert clock.now == 20.0
    with pytest.raises(ValueError, match="bytes_per_s= is above 0, or None; got 0"):
        Pace(0)
