"""Platforms, versions of torch and extras that are missing: one sentence each, with the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import ecemb
from ecemb import requirements
from ecemb.__main__ import main
from ecemb.errors import ConfigurationError
from ecemb.tools import top

ROOT = Path(__file__).resolve().parents[2]


class Machine:
    """What `os.uname` returns, as far as it is read."""

    def __init__(self, machine: str) -> None:
        self.machine = machine


@pytest.mark.parametrize(
    ("platform", "machine"),
    [("darwin", "arm64"), ("linux", "armv7l"), ("win32", "AMD64"), ("linux", "i686")],
)
def test_another_platform_is_refused(
    platform: str, machine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    if platform == "win32":
        monkeypatch.delattr(os, "uname")
        monkeypatch.setenv("PROCESSOR_ARCHITECTURE", machine)
    else:
        monkeypatch.setattr(os, "uname", lambda: Machine(machine))
    said = f"ecemb runs on Linux on x86-64 or aarch64, and this is {platform} on {machine}: train on such a"
    for use in (requirements.check, lambda: ecemb.__getattr__("protect")):
        with pytest.raises(ConfigurationError, match=said):
            use()
    assert main(["plan", "--hosts", "4"]) == 1
    assert capsys.readouterr().err.startswith(f"ecemb: {said}")
    assert main([]) == 2


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_linux_on_either_processor_is_accepted(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: Machine(machine))
    requirements.check()


def test_without_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delenv("RANK", raising=False)
    said = "ecemb needs torch, which is not installed: pip install 'torch==2.13"
    for use in (requirements.check, lambda: ecemb.__getattr__("protect")):
        with pytest.raises(ConfigurationError, match=said):
            use()
    script = tmp_path / "train.py"
    script.touch()
    for command in (["check", "--ranks-per-host", "1"], ["rehearse"]):
        assert main([*command, str(script)]) == 1
        assert capsys.readouterr().err.startswith(f"ecemb: {said}")


def test_import_and_help_need_no_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
import ecemb
from ecemb.__main__ import main
main([])
try:
    from ecemb import protect
except ecemb.errors.ConfigurationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ecemb needs torch, which is not installed: ")


@pytest.mark.parametrize("version", ["1.13.1", "2.10.0+cpu", "2.15.0a0+git0", "2.15.0", "3.0"])
def test_another_torch_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(
        ConfigurationError, match=r"takes torch 2\.11 to 2\.14.* this is torch .*: pip install"
    ):
        requirements.check()


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.12.1+cu130", "2.13.0+cpu", "2.13.0a0", "2.14.1", "of one's own"]
)
def test_torch_within_the_bounds_is_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    requirements.check()


def test_pyproject_and_the_pages_have_the_same_bounds() -> None:
    line = next(
        one for one in (ROOT / "pyproject.toml").read_text().splitlines() if "dependencies = [" in one
    )
    bounds = Requirement(line.split('"')[1])
    (low, old), (high, new) = requirements.OLDEST_TORCH, requirements.NEWEST_TORCH
    assert bounds.name == "torch" and str(bounds.specifier) == f"<{high}.{new + 1},>={low}.{old}"
    for name in ("README.md", "docs/index.md"):
        assert f"torch {low}.{old} to {high}.{new}" in " ".join((ROOT / name).read_text().split())
    pinned = (ROOT / "constraints.txt").read_text()
    assert "\ntorch=={}.{}.".format(*requirements.TESTED_TORCH) in pinned


def test_a_live_view_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    with pytest.raises(
        ConfigurationError, match=r"needs rich, which is not installed: pip install 'ecemb\[top\]'"
    ):
        top.watch(list, "", 1.0)
