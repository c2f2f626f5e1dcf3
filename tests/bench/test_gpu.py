"""The question of GPUs: it is answered on the CPU where Triton interprets, and refused where nothing does."""

from __future__ import annotations

import pytest
import torch

from bench import gpu
from bench.result import Arguments, Unavailable


def test_all_of_it_runs_interpreted() -> None:
    rows = list(gpu.measure(gpu.INTERPRETED, torch.device("cpu"), seed=1))
    assert {row.metric for row in rows} == {
        *("copy_gb_per_s", "multiply_add_gb_per_s", "multiply_add_over_copy"),
        *("fetch_ms", "fetch_over_copy", "put_gb_per_s", "put_over_copy"),
    }
    assert all(row.value > 0 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nothing_is_measured_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(Unavailable, match="torch sees no CUDA device: ask on a machine with one"):
        gpu.run(Arguments())
