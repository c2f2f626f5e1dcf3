"""The seed that all random choices of a run follow from, and runs that try many seeds. A plugin of pytest.

Every run has the same seed, so that a commit passes or fails wherever it is tested. `--seeds COUNT` repeats
each test of drawn cases with fresh seeds, in one process: it draws in the fixture `seed`, or by hypothesis.
After a failure the command that repeats it is printed.
"""

from __future__ import annotations

import copy
import operator
import random
import shlex
import sys
from collections.abc import Generator

import hypothesis.core
import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

FIXED = 57
FEWER = 20
"""A test that takes seconds is repeated with one seed where others are with this many."""
LONG = ("processes", "torchrec", "slow", "long")
"""Markers of such tests."""
SECTION = "repeat with"

settings.register_profile(
    "one seed", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("one seed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=None,
        help=f"seed of every random choice in the tests (default: {FIXED}; with --seeds a fresh one)",
    )
    parser.addoption(
        "--seeds",
        type=int,
        default=0,
        metavar="COUNT",
        help="run the tests of drawn cases alone, each with COUNT seeds, from --seed on; "
        f"those that are {', '.join(LONG)} with one in {FEWER} of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(2**31) if config.option.seeds else FIXED


def pytest_report_header(config: pytest.Config) -> str:
    if config.option.seeds:
        return f"seeds: {config.option.seeds}, from {config.option.seed} on"
    return f"seed: {config.option.seed}"


def is_drawn(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and ("seed" in item.fixturenames or is_hypothesis_test(item.obj))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.seeds:
        others = [item for item in items if not is_drawn(item)]
        items[:] = [item for item in items if is_drawn(item)]
        config.hook.pytest_deselected(items=others)


_repeated = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Repeats a test with other seeds, until one fails; what its module's tests share stays where it can."""
    config, session = item.config, item.session
    if not config.option.seeds or item.stash.get(_repeated, False):
        return None
    item.stash[_repeated] = True
    # Torn down between two rounds is what the test doesn't share with the next: one that is like it, or none.
    assert isinstance(item, pytest.Function)
    between = session if "run_seed" in item.fixturenames else copy.copy(item)
    first, failed = config.option.seed, session.testsfailed
    is_long = any(item.get_closest_marker(marker) for marker in LONG)
    count = max(1, config.option.seeds // FEWER) if is_long else config.option.seeds
    try:
        for config.option.seed in range(first, first + count):
            item._report_sections.clear()  # the output of earlier rounds
            item.ihook.pytest_runtest_protocol(item=item, nextitem=between)
            if session.testsfailed > failed or session.shouldstop:
                break
    finally:
        config.option.seed = first
        session._setupstate.teardown_exact(nextitem)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The process's generators start again, and hypothesis as with its own option --hypothesis-seed."""
    value = seed_of(item.config, item.nodeid)
    hypothesis.core.global_force_seed = value
    random.seed(value)
    for name, seeded in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            operator.attrgetter(seeded)(sys.modules[name])(value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        command = f".venv/bin/pytest --seed {item.config.option.seed} {shlex.quote(item.nodeid)}"
        report.sections.append((SECTION, command))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    commands = [text for report in reports for name, text in report.sections if name == SECTION]
    if commands:
        terminalreporter.section(SECTION)
        for command in dict.fromkeys(commands):
            terminalreporter.write_line(command)


def seed_of(config: pytest.Config, nodeid: str) -> int:
    """From the run's seed and a name, whatever ran before."""
    return random.Random(f"{config.option.seed}:{nodeid}").randrange(2**31)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's own seed."""
    value = seed_of(request.config, request.node.nodeid)
    print(f"seed of this test: {value}")
    return value


@pytest.fixture(scope="module")
def run_seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, for what the tests of a module share."""
    return request.config.option.seed
