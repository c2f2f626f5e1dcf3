"""In CI no test is skipped but for what its machine can't have. A plugin of pytest.

With CI=true in the environment, a run fails if a test was skipped for another reason than that there is no
device. ECEMB_MAY_SKIP adds names of `NEEDS` in needs.py: what the machine lacks, which `.ci/run` finds out.
"""

from __future__ import annotations

import os
import re

import pytest

from support.needs import NEEDS

DEVICE = "CUDA device"
MAY_SKIP = "ECEMB_MAY_SKIP"


def pytest_configure() -> None:
    unknown = {*os.environ.get(MAY_SKIP, "").split()} - {*NEEDS}
    if unknown:
        raise pytest.UsageError(f"{MAY_SKIP} names {sorted(unknown)}, which isn't in {sorted(NEEDS)}")


def may_skip(reason: str) -> bool:
    allowed = [NEEDS[name].skipped for name in os.environ.get(MAY_SKIP, "").split()]
    return any(re.search(pattern, reason) for pattern in (DEVICE, *allowed))


def wrongly_skipped(config: pytest.Config) -> list[str]:
    """The tests and modules, with their reasons; none outside of CI, and none in xdist's workers."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None:
        return []
    found: list[str] = []
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not may_skip(reason):
            found.append(f"{report.nodeid}: {reason}")
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and session.exitstatus == pytest.ExitCode.OK and wrongly_skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = wrongly_skipped(config)
    if found:
        terminalreporter.section("skipped, and CI skips nothing but tests of a device", red=True)
        for line in found:
            terminalreporter.write_line(line)
        terminalreporter.write_line(
            f"install what they need, or name what this machine can't have in {MAY_SKIP}: {', '.join(NEEDS)}"
        )
