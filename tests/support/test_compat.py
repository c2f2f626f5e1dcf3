"""Sets of versions, and what is written and shown of their runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.harness.result import Arguments, document
from bench.report import figures, versions
from ecemb import requirements
from support import compat

ROOT = Path(__file__).resolve().parents[2]
REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><error/></testcase>
<testcase name="d"><skipped/></testcase><testcase name="e"><system-out/></testcase>
</testsuite></testsuites>"""


def test_the_sets_are_those_that_are_accepted() -> None:
    tried = [tuple(map(int, version.split("."))) for version in compat.SETS]
    assert tried[0] == requirements.TESTED_TORCH and tried[-1] == requirements.NEWEST_TORCH
    assert compat.SETS[".".join(map(str, requirements.TESTED_TORCH))] == {}
    for version, others in compat.SETS.items():
        assert not others or others["torch"].startswith(f"{version}.")


@pytest.mark.parametrize("version", compat.SETS)
def test_a_set_pins_each_package_once(version: str) -> None:
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    lines = compat.pins(version).splitlines()
    assert len(lines) == len(pinned)
    for name, number in compat.SETS[version].items():
        assert [line for line in lines if re.split("[ =]", line)[0] == name] == [f"{name}=={number}"]
    page = (ROOT / "docs" / "torchrec.md").read_text()
    assert all(
        f"{name}=={number}" in page for name, number in compat.SETS[version].items() if name != "triton"
    )


def test_paths_of_all_parts_are_there() -> None:
    assert all((ROOT / path).exists() for paths in compat.PARTS.values() for path in paths)
    assert list(versions.PARTS) == [*compat.PARTS, compat.DEMO]


def test_outcomes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert compat.counted(tmp_path / "report.xml") == {"passed": 2, "failed": 2, "skipped": 1}


def test_the_table_has_what_ran_and_what_did_not() -> None:
    found = {"contracts": {"passed": 1234, "failed": 1, "skipped": 0}}
    one = document(versions.QUESTION, Arguments(), list(compat.rows(found)))
    one["versions"] = {"torch": "2.14.1", "python": "3.11.7"}
    page = "<!-- versions: compat -->\n<!-- end -->\n"
    shown = figures.fill(page, [one])
    assert "1,234 passed, 1 failed" in shown and "not run" in shown and "2.14.1" in shown
    assert "Not measured yet: `make compat`." in figures.fill(page, [])
