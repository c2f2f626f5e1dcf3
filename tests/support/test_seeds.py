"""One seed for all random choices of a run, and many seeds for each test of drawn cases."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

from support.inner_pytest import run

DRAWN = """
import numpy
import pytest
import random
from hypothesis import given, strategies as st

drawn = []

def test_plain(): ...

def test_seed(seed): print("drew", seed)

@given(st.integers(0, 10**9))
def test_given(value): drawn.append(value)

class TestInside:
    def test_given(self):
        @given(st.integers(0, 10**9))
        def check(value): drawn.append(value)
        check()

def test_said(): print("drew", sum(drawn))

def test_of_the_process():
    print("drew", random.getrandbits(60))
    print("drew", numpy.random.randint(2**60))
"""


def drew(folder: Path, *options: str) -> list[str]:
    status, said = run(folder, DRAWN, "-s", *options)
    assert status == 0, said
    return re.findall(r"drew (\d+)", said)


def test_runs_draw_the_same_unless_another_seed_is_given(tmp_path: Path) -> None:
    """By the fixture, by hypothesis, by hypothesis inside of a test, and by the process's generators."""
    first = drew(tmp_path)
    assert len(first) == 4 and first == drew(tmp_path)
    other = drew(tmp_path, "--seed", "3")
    assert all(one != another for one, another in zip(first, other, strict=True))
    assert other == drew(tmp_path, "--seed", "3")


FAILS = """
import pytest

@pytest.fixture(scope="module")
def shared(run_seed):
    return run_seed

@pytest.fixture
def own(seed):
    yield seed
    print("ended", seed)

seen = []

@pytest.mark.parametrize("name", ["a b"])
def test_fails(name, seed, request):
    assert request.config.option.seed != 102

def test_plain(): raise AssertionError

@pytest.mark.processes
def test_few(seed): seen.append(seed)

def test_apart(own, shared, request, tmp_path):
    assert shared == request.config.option.seed
    seen.append(own)
    print("rounds", len(set(seen)), shared)
"""


def test_many_seeds_are_tried_and_a_failure_says_how_to_repeat_it(tmp_path: Path) -> None:
    status, said = run(tmp_path, FAILS, "-s", "--seeds", "40", "--seed", "100")
    assert status == 1
    assert "1 failed, 44 passed, 1 deselected" in said  # two of test_fails, two of test_few
    assert said.count("ended ") == 40 and "rounds 42 139" in said
    (command,) = re.findall(r"^\.venv/bin/pytest (.*)$", said.partition("= repeat with =")[2], re.MULTILINE)
    words = shlex.split(command)
    assert words == ["--seed", "102", "test_it.py::test_fails[a b]"]
    _, said = run(tmp_path, FAILS, "--seeds", "40", "--seed", "100")
    assert said.count("seed of this test: ") == 1, "those of earlier rounds aren't shown"
    status, said = run(tmp_path, FAILS, *words)
    assert status == 1 and "1 failed in" in said
    assert run(tmp_path, FAILS, "--seed", "103", words[-1])[0] == 0


def test_every_generator_of_a_test_has_a_seed() -> None:
    found: list[str] = []
    for path in sorted(Path(__file__).parents[1].rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and not node.args and not node.keywords:
                if re.search(r"(^|\.)(Random|default_rng)$", ast.unparse(node.func)):
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
