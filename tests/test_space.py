"""Space: the mount, the machine, and cgroups as version 1 and 2 describe them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ecemb import space
from ecemb.errors import ArenaBusy, NotEnoughSpace

MIB = 1 << 20
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
CPU = "32 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
NOISE = "33 24 0:29 / /mnt/with\\040space rw - ext4 /dev/sda rw"


def machine(root: Path, cgroup: str, mounts: list[str], files: dict[str, str]) -> Path:
    """A root folder with what the kernel would say."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text("\n".join([NOISE, *mounts]) + "\n")
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file on an ordinary file system."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.fixture
def turn(tmp_path: Path) -> Iterator[int]:
    """What processes take turns by."""
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def left(root: Path) -> list[int]:
    return [limit.free_bytes for limit in space.cgroup_limits(root)]


class TestCgroups:
    def test_v2_takes_every_level(self, tmp_path: Path) -> None:
        files = {
            "memory.max": "max",
            "memory.current": "1",
            "pod/memory.max": "1000",
            "pod/memory.current": "400",
            "pod/job/memory.max": "max",
            "pod/job/memory.current": "300",
            "pod/job/rank/memory.max": "700",
            "pod/job/rank/memory.current": "200",
        }
        root = machine(tmp_path, "0::/pod/job/rank\n", [V2], files)
        assert left(root) == [500, 600]
        limit = space.cgroup_limits(root)[0]
        assert "pod/job/rank/memory.max (700 bytes, 200 in use)" in limit.where

    def test_page_cache_can_be_dropped(self, tmp_path: Path) -> None:
        files = {
            "a/memory.max": "1000",
            "a/memory.current": "900",
            "a/memory.stat": "anon 300\nfile 600\nactive_file 100\ninactive_file 250\nshmem 250",
        }
        assert left(machine(tmp_path, "0::/a\n", [V2], files)) == [450]

    def test_the_root_of_a_container(self, tmp_path: Path) -> None:
        files = {"memory.max": "1000", "memory.current": "100"}
        assert left(machine(tmp_path, "0::/\n", [V2], files)) == [900]

    def test_a_container_that_sees_the_hosts_path(self, tmp_path: Path) -> None:
        mount = V1.replace(" / ", " /docker/4a ")
        files = {"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "100"}
        assert left(machine(tmp_path, "4:memory:/docker/4a\n", [mount], files)) == [900]

    def test_a_path_outside_of_the_mount(self, tmp_path: Path) -> None:
        mount = V1.replace(" / ", " /docker/4a ")
        files = {"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "100"}
        assert left(machine(tmp_path, "4:memory:/other\n", [mount], files)) == [900]

    def test_v1_beside_v2(self, tmp_path: Path) -> None:
        files = {
            "memory/a/memory.limit_in_bytes": "1000",
            "memory/a/memory.usage_in_bytes": "700",
            "memory/a/memory.stat": "cache 500\ninactive_file 9\ntotal_inactive_file 40\ntotal_active_file 2",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "5000",
        }
        cgroup = "9:name=systemd:/x\n4:cpu,memory:/a\n1:cpu:/\n0::/\n"
        mounts = [CPU, V1, V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")]
        assert left(machine(tmp_path, cgroup, mounts, files)) == [342]

    def test_a_limit_below_the_use(self, tmp_path: Path) -> None:
        files = {"a/memory.max": "100", "a/memory.current": "900"}
        assert left(machine(tmp_path, "0::/a\n", [V2], files)) == [0]

    @pytest.mark.parametrize("cgroup", ["", "0::/gone\n", "1:cpu:/a\n", "4:memory:/a\n"])
    def test_nothing_to_be_seen(self, tmp_path: Path, cgroup: str) -> None:
        assert left(machine(tmp_path, cgroup, [V2], {})) == []
        assert left(tmp_path / "nowhere") == []

    def test_this_machine(self) -> None:
        assert all(limit.free_bytes >= 0 for limit in space.cgroup_limits())


class TestLimits:
    def test_the_mount(self, tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
        stats = SimpleNamespace(f_blocks=100, f_bavail=10, f_frsize=4096)
        monkeypatch.setattr(os, "fstatvfs", lambda _: stats)
        limit = space.mount_limit(fd, tmp_path / "file")
        assert limit is not None
        assert limit.free_bytes == 40960
        space.check(40960, fd, tmp_path / "file")
        with pytest.raises(
            NotEnoughSpace,
            match=rf"needs 40961 bytes .*file system of {tmp_path} leaves 40960 .*shm-size.*arenas ls",
        ):
            space.check(40961, fd, tmp_path / "file")

    def test_a_mount_without_a_size(self, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
        stats = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
        monkeypatch.setattr(os, "fstatvfs", lambda _: stats)
        assert space.mount_limit(fd, Path("file")) is None

    def test_memory_and_swap(self, tmp_path: Path) -> None:
        (tmp_path / "proc").mkdir()
        meminfo = tmp_path / "proc/meminfo"
        meminfo.write_text("MemTotal: 10 kB\nMemAvailable:   3 kB\nHugePages_Total: 0\nSwapFree: 4 kB\n")
        limit = space.machine_limit(tmp_path)
        assert limit is not None
        assert limit.free_bytes == 7 * 1024
        meminfo.write_text("MemTotal: 10 kB\n")
        assert space.machine_limit(tmp_path) is None

    @pytest.mark.parametrize(("kind", "counts"), [("tmpfs", True), ("ramfs", True), ("ext4", False)])
    def test_memory_counts_where_files_live_in_it(
        self, tmp_path: Path, fd: int, kind: str, counts: bool
    ) -> None:
        device = os.fstat(fd).st_dev
        mount = f"40 1 {os.major(device)}:{os.minor(device)} / /shm rw - {kind} none rw"
        files = {"a/memory.max": "1000", "a/memory.current": "400"}
        root = machine(tmp_path, "0::/a\n", [V2, mount], files)
        (root / "proc/meminfo").write_text("MemAvailable: 1 kB\n")
        free = [limit.free_bytes for limit in space.limits(fd, tmp_path / "file", root)[1:]]
        assert free == ([1024, 600] if counts else [])

    def test_shared_memory_of_this_machine(self) -> None:
        fd, path = os.open("/dev/shm", os.O_RDONLY), Path("/dev/shm/file")
        try:
            where = [limit.where for limit in space.limits(fd, path)]
            assert where[:2] == ["the file system of /dev/shm", "the memory of this machine"]
            with pytest.raises(NotEnoughSpace, match="/dev/shm/file needs"):
                space.check(1 << 60, fd, path)
            space.check(0, fd, path)
        finally:
            os.close(fd)


class TestAllocate:
    def test_the_sum_is_asked_for(
        self, tmp_path: Path, fd: int, turn: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []
        monkeypatch.setattr(space, "check", lambda size, fd, path: asked.append(size))
        path = tmp_path / "job" / "host" / "file"
        space.allocate(fd, [(0, 4096), (MIB, 0), (MIB, 8192)], path, turn, deadline=0)
        assert asked == [12288]
        assert os.fstat(fd).st_blocks * 512 >= 12288
        assert os.fstat(fd).st_size == MIB + 8192

    def test_the_turn_is_awaited_to_the_deadline(self, tmp_path: Path, fd: int, turn: int) -> None:
        path = tmp_path / "job" / "host" / "file"
        other = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(ArenaBusy, match=f"fuser {tmp_path}"):
                space.allocate(fd, [], path, turn, deadline=0)
            fcntl.flock(other, fcntl.LOCK_UN)
            space.allocate(fd, [], path, turn, deadline=0)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was given back
        finally:
            os.close(other)

    def test_other_errors_stay_what_they_are(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="Bad file"), space.refusals(tmp_path, 1):
            os.ftruncate(-1, 0)
