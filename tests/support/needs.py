"""Needs of tests beyond .venv: whether this machine has them, and which package of Debian does.

`PYTHONPATH=tests python3 -m support.needs` installs the packages that it can, as root where apt-get is, and
prints the names of needs that are missing then, for ECEMB_MAY_SKIP (see skips.py). It runs with any python3,
before .venv is made.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster import box
from failures.namespaces import Namespaces, NotPossible
from support import browser

APT_S = 900.0
"""The longest that a call of apt-get may take."""


@dataclass(frozen=True)
class Need:
    """Something that a machine has or lacks.

    Attributes:
        skipped: a pattern in the reasons of tests that skip without it.
        is_there: whether this machine has it.
        package: of Debian, which has it; None: no package can give it.
    """

    skipped: str
    is_there: Callable[[], bool]
    package: str | None = None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _makes_namespaces() -> bool:
    try:
        with Namespaces(2):
            return True
    except (NotPossible, OSError, subprocess.SubprocessError):
        return False


def _succeeds(*command: str) -> bool:
    try:
        done = subprocess.run(command, check=False, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _mounts() -> bool:
    with tempfile.TemporaryDirectory() as path:
        if not _succeeds("mount", "-t", "tmpfs", "-o", "size=4m", "none", path):
            return False
        return _succeeds("umount", path)


def _limits_memory() -> bool:
    for top, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = Path(top) / f"ecemb-test-{os.getpid()}"
        if not (Path(top) / "cgroup.procs").exists():
            continue
        try:
            group.mkdir()
            try:
                (group / limit).write_text(str(1 << 26))
            finally:
                group.rmdir()
            return True
        except OSError:
            pass
    return False


def _has_history() -> bool:
    command = ["git", "rev-parse", "--is-shallow-repository"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == "false"


def _has_holes() -> bool:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(1 << 20)
        return os.stat(file.name).st_blocks * 512 < 1 << 20


NEEDS = {
    "chromium": Need("no browser is here", lambda: browser.found() is not None, "chromium"),
    "libisal2": Need(r"libisal\.so\.2 can't be loaded", lambda: _loads("libisal.so.2"), "libisal2"),
    "iproute2": Need("the program ip, of iproute2", lambda: shutil.which("ip") is not None, "iproute2"),
    "slurm-wlm": Need("a Slurm cluster takes", lambda: not box.missing(), "slurm-wlm"),
    "git": Need("git has no history here", lambda: shutil.which("git") is not None, "git"),
    "history": Need("git has no history here|this clone is shallow", _has_history),
    "root": Need("for root|only root|take root", lambda: os.geteuid() == 0),
    "mounts": Need("mounting is for root", _mounts),
    "namespaces": Need("^ip ", _makes_namespaces),
    "cgroup": Need("no memory cgroup can be made here", _limits_memory),
    "holes": Need("files have no holes here", _has_holes),
    "x86-64": Need("this LLVM compiles for", lambda: platform.machine() == "x86_64"),
}


def missing() -> list[str]:
    return [name for name, need in NEEDS.items() if not need.is_there()]


def install() -> None:
    """Installs packages of what is missing, where that is possible; says on stderr what was done."""
    packages = [package for name in missing() if (package := NEEDS[name].package)]
    if importlib.util.find_spec("ensurepip") is None:
        packages.append("python3-venv")  # for `make setup`
    if not packages:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"not installed, which takes root and apt-get: {' '.join(packages)}", file=sys.stderr)
        return
    _apt("update")
    if not _apt("install", *packages):
        for package in packages:
            _apt("install", package)


def _apt(verb: str, *packages: str) -> bool:
    options = ["-y", "--no-install-recommends"] if packages else []
    try:
        done = subprocess.run(
            ["apt-get", "-qq", verb, *options, *packages],
            check=False,
            stdout=sys.stderr,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            timeout=APT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"apt-get {verb}: {error}", file=sys.stderr)
        return False
    return done.returncode == 0


def main() -> None:
    install()
    left = missing()
    for name in left:
        print(f"{name} is missing: tests that need it are skipped", file=sys.stderr)
    print(*left)


if __name__ == "__main__":
    main()
