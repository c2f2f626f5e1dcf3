"""What all tests of warm starts begin with."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """SIGHUP is not ignored, as it is under nohup and in some CI: processes inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
