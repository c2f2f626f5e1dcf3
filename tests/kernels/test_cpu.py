"""What the compiled kernels do besides their contract."""

from __future__ import annotations

import logging

import pytest
from numba.core import caching

from ecemb.kernels import cpu


def test_without_a_folder_for_compiled_code_it_compiles_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def twice(x: int) -> int:
        return 2 * x

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger=cpu.__name__):
        patch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
        compiled = cpu._compiled(twice)
    assert compiled(21) == 42
    assert "compiling twice again in each process: cannot cache function" in caplog.text
