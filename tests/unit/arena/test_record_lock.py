"""Whether a process is gone, as /proc tells it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ecemb.arena import record_lock
from ecemb.errors import ArenaBusy
from support.arena_holders import DEADLINE_S, wait_until


def test_a_process_is_told_by_its_start() -> None:
    with subprocess.Popen(["sleep", "3000"]) as process:
        start = record_lock.start_of(process.pid)
        assert start is not None
        assert start >= (record_lock.start_of(os.getpid()) or 0)
        process.kill()
        wait_until(lambda: record_lock.start_of(process.pid) is None)  # a zombie: nobody has waited yet
        assert Path(f"/proc/{process.pid}/stat").exists()
    assert record_lock.start_of(process.pid) is None


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
        assert record_lock.start_of(process.pid) is not None
        process.kill()
        wait_until(lambda: record_lock.start_of(process.pid) is None)


def test_names_do_not_confuse_it(tmp_path: Path) -> None:
    odd = tmp_path / "a) Z 1 ("
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "3000"]) as process:
        wait_until(lambda: b"a) Z" in Path(f"/proc/{process.pid}/stat").read_bytes())
        assert record_lock.start_of(process.pid) is not None
        process.kill()


def test_files_that_nobody_holds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    assert record_lock.holder(fd, 0, 0) is None
    assert record_lock.holder(fd, os.getpid(), record_lock.start_of(os.getpid()) or 0) is None  # not another
    record_lock.acquire(fd, path, time.monotonic())
    assert record_lock.mine(os.stat(path)) == fd
    record_lock.release(fd)
    assert record_lock.mine(os.stat(path)) is None


def test_the_process_that_had_it_last_is_awaited(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    with subprocess.Popen(["sleep", "3000"]) as process:
        start = record_lock.start_of(process.pid) or 0
        assert record_lock.holder(fd, process.pid, start) == process.pid
        assert record_lock.holder(fd, process.pid, start + 1) is None
        with pytest.raises(ArenaBusy, match=f"{path} .* process {process.pid}"):
            record_lock.await_gone(fd, process.pid, start, path, time.monotonic())
        process.send_signal(signal.SIGKILL)
        record_lock.await_gone(fd, process.pid, start, path, time.monotonic() + DEADLINE_S)
    os.close(fd)


def test_a_holder_that_cannot_be_seen(tmp_path: Path) -> None:
    assert "another pid namespace" in str(record_lock.busy(tmp_path, 0))
    assert "this process" in str(record_lock.busy(tmp_path, os.getpid()))
