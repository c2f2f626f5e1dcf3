"""Whether a process is gone, as /proc tells it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ecemb.errors import ArenaBusy
from ecemb.memory import private_files
from support.arena_holders import DEADLINE_S, wait_until


def test_a_process_is_told_by_its_start() -> None:
    with subprocess.Popen(["sleep", "3000"]) as process:
        start = private_files.start_of_process(process.pid)
        assert start is not None
        assert start >= (private_files.start_of_process(os.getpid()) or 0)
        process.kill()
        wait_until(
            lambda: private_files.start_of_process(process.pid) is None
        )  # a zombie: nobody has waited yet
        assert Path(f"/proc/{process.pid}/stat").exists()
    assert private_files.start_of_process(process.pid) is None


def test_a_zombie_with_living_threads_is_not_gone() -> None:
    program = (
        "import ctypes, threading, sys;"
        "threading.Thread(target=sys.stdin.read).start(); print('up', flush=True);"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: b") Z " in stat.read_bytes())
        assert private_files.start_of_process(process.pid) is not None
        process.kill()
        wait_until(lambda: private_files.start_of_process(process.pid) is None)


def test_names_do_not_confuse_it(tmp_path: Path) -> None:
    odd = tmp_path / "a) Z 1 ("
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "3000"]) as process:
        wait_until(lambda: b"a) Z" in Path(f"/proc/{process.pid}/stat").read_bytes())
        assert private_files.start_of_process(process.pid) is not None
        process.kill()


def test_files_that_nobody_holds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    assert private_files.holder_of(fd, 0, 0) is None
    assert (
        private_files.holder_of(fd, os.getpid(), private_files.start_of_process(os.getpid()) or 0) is None
    )  # not another
    private_files.lock(fd, path, time.monotonic())
    assert private_files.locked_here(os.stat(path)) == fd
    private_files.unlock(fd)
    assert private_files.locked_here(os.stat(path)) is None


def test_the_process_that_had_it_last_is_awaited(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    with subprocess.Popen(["sleep", "3000"]) as process:
        start = private_files.start_of_process(process.pid) or 0
        assert private_files.holder_of(fd, process.pid, start) == process.pid
        assert private_files.holder_of(fd, process.pid, start + 1) is None
        with pytest.raises(ArenaBusy, match=f"{path} .* process {process.pid}"):
            private_files.await_gone(fd, process.pid, start, path, time.monotonic())
        process.send_signal(signal.SIGKILL)
        private_files.await_gone(fd, process.pid, start, path, time.monotonic() + DEADLINE_S)
    os.close(fd)


def test_a_holder_that_cannot_be_seen(tmp_path: Path) -> None:
    assert "another pid namespace" in str(private_files.busy(tmp_path, 0))
    assert "this process" in str(private_files.busy(tmp_path, os.getpid()))
