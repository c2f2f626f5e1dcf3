"""What the compiled kernels do besides their contract."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ecemb.kernels import cpu


def test_without_a_folder_for_compiled_code_it_compiles_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    njit = cpu.numba.njit

    def no_folder(*, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function 'twice': no locator available")
        return njit(**options)

    def twice(x: int) -> int:
        return 2 * x

    monkeypatch.setattr(cpu.numba, "njit", no_folder)
    with caplog.at_level(logging.WARNING, logger=cpu.__name__):
        compiled = cpu._compiled(twice)
    assert compiled(21) == 42
    assert "compiling twice again in each process" in caplog.text
