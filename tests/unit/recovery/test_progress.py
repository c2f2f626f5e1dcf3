"""Progress: a line on a terminal, after a while; nothing elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from ecemb.recovery import relay
from ecemb.recovery.relay import Progress


class Screen(io.StringIO):
    """What is written to it, with or without a person in front."""

    def __init__(self, watched: bool) -> None:
        super().__init__()
        self._watched = watched

    def isatty(self) -> bool:
        return self._watched


@pytest.mark.parametrize(
    ("watched", "shown", "step_s", "expected"),
    [
        (True, True, 1.0, True),
        (True, True, 0.2, False),  # over before anyone wonders
        (True, False, 1.0, False),
        (False, True, 1.0, False),
    ],
)
def test_who_sees_it(
    watched: bool, shown: bool, step_s: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, now = Screen(watched), [0.0]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(relay.time, "monotonic", lambda: now[0])
    with Progress("rebuilding", 10 * 10**9, shown=shown) as line:
        for _ in range(10):
            now[0] += step_s
            line.advance(10**9)
    said = screen.getvalue()
    assert bool(said) is expected
    if expected:
        assert "\recemb: rebuilding:  30% of 10.00 GB, 3 s, about 7 s left" in said
        assert "100% of 10.00 GB, 10 s, about 0 s left" in said
        assert said.split("\r")[-2].strip() == said.split("\r")[-1] == ""


def test_nothing_to_do() -> None:
    with Progress("rebuilding", 0, shown=True) as line:
        line.advance(0)
