"""The folder of a test's arenas. A plugin of pytest, without torch: `make arm` has none."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def arena_dir() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)
