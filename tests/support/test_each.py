"""Cases within one test: all of them run, and a failure names its own."""

from __future__ import annotations

import inspect

import pytest

from support.each import each


def test_all_cases_run_with_the_fixtures_of_the_test(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, str, str]] = []

    @each("number", [1, 2])
    @each(("letter", "sign"), [("a", "+"), ("b", "-")])
    def test(start: int, number: int, letter: str, sign: str) -> None:
        seen.append((start + number, letter, sign))
        assert (number, letter) != (2, "b")

    assert list(inspect.signature(test).parameters) == ["start"]
    with pytest.raises(AssertionError):
        test(start=10)
    assert seen == [(11, "a", "+"), (11, "b", "-"), (12, "a", "+"), (12, "b", "-")]
    assert capsys.readouterr().out.endswith("case: {'letter': 'b', 'sign': '-'}\n")
