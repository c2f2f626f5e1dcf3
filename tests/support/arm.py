"""Runs the tests of kernels and of arenas on aarch64, emulated by qemu: `make arm`.

Debian's Python for arm64 and wheels for aarch64 are unpacked into build/arm; nothing is installed. torch
isn't among them, as its build for aarch64 needs CUDA's libraries, and the tests below don't import it. An
emulator on x86-64 shows instructions, and not the memory order of an aarch64 processor.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "arm"
QEMU = "qemu-aarch64-static"
PYTHON = "3.11"
NEEDS = f"""make arm needs, on Debian 12 as root:
    apt-get install qemu-user-static
    dpkg --add-architecture arm64 && apt-get update
(nothing of arm64 is installed; {QEMU} runs Debian's Python {PYTHON} from build/arm)"""

DEBS = [
    "python3.11",
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libc6",
    "libgcc-s1",
    "libstdc++6",
    "zlib1g",
    "libexpat1",
    "libffi8",
    "libssl3",
    "libbz2-1.0",
    "liblzma5",
    "libsqlite3-0",
    "libuuid1",
    "libncursesw6",
    "libtinfo6",
    "libreadline8",
    "libnsl2",
    "libtirpc3",
    "libdb5.3",
    "libcrypt1",
    "libgomp1",
]
WHEELS = [
    "numpy",
    "llvmlite",
    "numba",
    "galois",
    "hypothesis",
    "sortedcontainers",
    "attrs",
    "pytest",
    "pytest-timeout",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
    "typing_extensions",
    "psutil",
]
PLATFORMS = [
    "manylinux2014_aarch64",
    "manylinux_2_17_aarch64",
    "manylinux_2_27_aarch64",
    "manylinux_2_28_aarch64",
]
SITE = """import sys

sys.executable = {python!r}  # so that fork servers are started by the emulator, without binfmt_misc
"""
MEMORY = ("arena", "capacity", "classify", "header", "private_files", "record_lock", "scan", "shared_mapping")
TESTS = ["tests/contracts/test_kernels.py", *(f"tests/unit/memory/test_{name}.py" for name in MEMORY)]
"""Those of test_backing are left out: qemu 7.2 answers 0 to MADV_POPULATE_WRITE, and backs nothing."""
FAIL = {
    "a_forked_child_has_no_mapping": "qemu answers 0 to MADV_DONTFORK, and the child has the mapping",
    "a_process_that_lost_its_lock_still_counts": "fails under qemu, probably by its own /proc/self/stat",
}
"""Tests that the emulator fails -> why."""


def unpack() -> None:
    """Makes build/arm: root, a system with Python, and site, its packages."""
    if (BUILD / "ready").exists():
        return
    shutil.rmtree(BUILD, ignore_errors=True)
    for folder in ("debs", "wheels", "root", "site"):
        (BUILD / folder).mkdir(parents=True)
    subprocess.run(
        ["apt-get", "download", *(f"{name}:arm64" for name in DEBS)], cwd=BUILD / "debs", check=True
    )
    for deb in (BUILD / "debs").iterdir():
        subprocess.run(["dpkg-deb", "-x", deb, BUILD / "root"], check=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    pip += ["--python-version", PYTHON, *(f"--platform={name}" for name in PLATFORMS)]
    subprocess.run([*pip, "-d", BUILD / "wheels", *WHEELS], check=True)
    for wheel in (BUILD / "wheels").iterdir():
        with zipfile.ZipFile(wheel) as file:
            file.extractall(BUILD / "site")
    (BUILD / "ready").touch()


def python() -> Path:
    """A command for the emulated Python, which its processes start others by as well."""
    path = BUILD / "python"
    command = [QEMU, "-L", BUILD / "root", BUILD / "root" / "usr/bin" / f"python{PYTHON}"]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command))} "$@"\n')
    path.chmod(0o755)
    (BUILD / "site" / "sitecustomize.py").write_text(SITE.format(python=str(path)))
    return path


def main(words: Sequence[str]) -> int:
    """Runs the tests; returns the exit code."""
    if not shutil.which(QEMU) or not shutil.which("apt-get"):
        print(NEEDS, file=sys.stderr)
        return 1
    try:
        unpack()
    except subprocess.CalledProcessError as error:
        print(f"{NEEDS}\n{error}", file=sys.stderr)
        return 1
    plugins = [
        word
        for name in ("support.seeds", "support.arena_folder", "no:cacheprovider")
        for word in ("-p", name)
    ]
    tests = () if any(not word.startswith("-") for word in words) else TESTS
    left_out = " and ".join(f"not {name}" for name in FAIL)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", BUILD / "site")))
    return subprocess.run(
        [python(), "-m", "pytest", "--noconftest", *plugins, "-k", left_out, *words, *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
