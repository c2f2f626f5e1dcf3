"""In CI no test is skipped but for what its machine can't have."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from support import needs, skips
from support.inner_pytest import run
from support.needs import NEEDS, Need

SKIPS = """
import pytest

def test_passes(): ...

@pytest.mark.skipif(True, reason="there is no CUDA device")
def test_device(): ...

def test_skips(): pytest.skip({reason!r})
"""
NO_BROWSER = "no browser is here: apt-get install chromium"
MODULE = "import pytest\npytest.importorskip('no_such_module', reason='no module')\n"


@pytest.mark.parametrize(
    ("reason", "allowed", "may"),
    [
        ("needs a CUDA device", "", True),
        (NO_BROWSER, "", False),
        (NO_BROWSER, "git", False),
        (NO_BROWSER, "git chromium", True),
    ],
)
def test_reasons_to_skip(reason: str, allowed: str, may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(skips.MAY_SKIP, allowed)
    assert skips.may_skip(reason) == may


@pytest.mark.parametrize(
    ("environment", "options"), [({}, []), ({"CI": "true"}, []), ({"CI": "true"}, ["--numprocesses=1"])]
)
def test_in_ci_only_a_device_may_be_missing(
    environment: dict[str, str], options: list[str], tmp_path: Path
) -> None:
    status, said = run(tmp_path, SKIPS.format(reason=NO_BROWSER), *options, **environment)
    assert "1 passed, 2 skipped" in said
    assert status == len(environment), said
    assert (f"test_it.py::test_skips: {NO_BROWSER}\n" in said) == bool(environment)


def test_a_module_that_is_skipped_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_passes(): ...\n")
    status, said = run(tmp_path, MODULE, CI="true")
    assert (status, "test_it.py: no module" in said) == (1, True), said


def test_unknown_needs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(skips.MAY_SKIP, "chromiun")
    with pytest.raises(pytest.UsageError, match=r"names \['chromiun'\], which isn't in \['cgroup'"):
        skips.pytest_configure()


def test_every_reason_is_one_that_a_test_gives() -> None:
    here = Path(__file__).parents[1]
    paths = [*here.rglob("*.py"), *(here.parent / "bench").rglob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in paths if path.name != "needs.py")
    for need in NEEDS.values():
        for pattern in need.skipped.replace("\\", "").removeprefix("^").split("|"):
            assert pattern.replace("libisal.so.2", "{LIBRARY}") in source, pattern


class Machine:
    """A stand-in for apt-get; installs what it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, has: set[str], is_root: bool = True) -> None:
        self.has, self.installed, self.calls = has, set[str](), list[str]()
        stand_ins = {
            "a": Need("a", lambda: "a-package" in self.installed, "a-package"),
            "b": Need("b", lambda: "b-package" in self.installed, "b-package"),
            "c": Need("c", lambda: False),
        }
        monkeypatch.setattr(needs, "NEEDS", stand_ins)
        monkeypatch.setattr(needs.os, "geteuid", lambda: 0 if is_root else 1000)
        monkeypatch.setattr(needs.shutil, "which", lambda _: "/usr/bin/apt-get")
        monkeypatch.setattr(needs.importlib.util, "find_spec", lambda _: "there")
        monkeypatch.setattr(needs.subprocess, "run", self._run)

    def _run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls.append(" ".join(command))
        packages = {word for word in command if word.endswith("-package")}
        if packages <= self.has:
            self.installed |= packages
        return subprocess.CompletedProcess(command, 0 if packages <= self.has else 100)


@pytest.mark.parametrize(
    ("has", "is_root", "left", "calls"),
    [
        ({"a-package", "b-package"}, True, "c", 2),
        ({"b-package"}, True, "a c", 4),
        ({"a-package", "b-package"}, False, "a b c", 0),
    ],
)
def test_needs_are_installed_or_named(
    has: set[str],
    is_root: bool,
    left: str,
    calls: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = Machine(monkeypatch, has, is_root)
    needs.main()
    said = capsys.readouterr()
    assert said.out == f"{left}\n"
    assert len(machine.calls) == calls
    named = re.findall(r"^(\w) is missing: tests that need it are skipped$", said.err, re.MULTILINE)
    assert named == left.split()
    assert ("which takes root and apt-get: a-package b-package" in said.err) == (not is_root)


def test_this_machine_can_be_asked() -> None:
    assert set(needs.missing()) <= {*NEEDS}
