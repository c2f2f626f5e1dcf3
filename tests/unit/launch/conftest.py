"""What all tests of warm starts begin with."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def signals_count() -> Iterator[None]:
    """No signal is ignored: processes inherit that from nohup (SIGHUP), or a background shell (SIGINT)."""
    actions = {
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, action) for number, action in actions.items()}
    yield
    for number, action in before.items():
        signal.signal(number, action)
