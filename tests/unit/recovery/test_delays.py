"""The waits of the thread that trains, as the kernel counts them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ecemb.recovery.delays import UNKNOWN_NS, Delays


def test_it_is_what_the_kernel_says_of_the_first_thread() -> None:
    delays = Delays()
    before, now = int(Path("/proc/self/schedstat").read_text().split()[1]), delays.so_far_ns()
    assert before <= now <= delays.so_far_ns()
    delays.close()
    delays.close()


def test_without_the_kernels_count_training_always_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", missing)
    delays = Delays()
    first = delays.so_far_ns()
    assert delays.so_far_ns() - first == UNKNOWN_NS
    delays.close()
