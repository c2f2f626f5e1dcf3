"""Space: the mount, the machine, and cgroups as version 1 and 2 describe them."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import ecemb
from ecemb.errors import ArenaBusy, NotEnoughSpace
from ecemb.memory import capacity
from ecemb.memory.arena import Arena
from ecemb.memory.capacity import Claim
from ecemb.memory.scan import Directory
from support.arena_holders import constants
from support.fork_server import fork_server
from support.killed_child import cut_off

MIB = 1 << 20
PATIENCE_S = 300.0
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


def arena_of(arena_dir: Path, job: str, region: str, size_bytes: int, reserved_bytes: int) -> Arena:
    made = constants(job=job, regions=((region, size_bytes),))
    return Arena.create(Directory(arena_dir, job, "a"), made, {region: reserved_bytes})


def take_slowly(arena_dir: Path, ready: Event, begun: Event, grown: Event) -> None:
    """A job that allocates in 200 slices; in the first one it waits for what the other job does."""
    capacity.SLICE_BYTES = MIB
    allocate, calls = os.posix_fallocate, []

    def slow(fd: int, offset: int, length: int) -> None:
        if not calls:
            begun.set()
            until(grown.is_set)
        calls.append(length)
        if sum(calls) - length < 200 * MIB <= sum(calls):
            with (arena_dir / "order").open("a") as file:
                file.write("last ")
        allocate(fd, offset, min(length, 4096))

    until(ready.is_set)
    os.posix_fallocate = slow
    arena_of(arena_dir, "big", "rows", 200 * MIB, 200 * MIB).close()


def grow(arena_dir: Path, ready: Event, begun: Event, grown: Event) -> None:
    """A job whose journal grows in the middle of a step."""
    arena = arena_of(arena_dir, "small", "journal", 8 * MIB, MIB)
    ready.set()
    until(begun.is_set)
    arena.reserve("journal", 3 * MIB)
    with (arena_dir / "order").open("a") as file:
        file.write("grown ")
    grown.set()
    arena.close()


def until(has_come: Callable[[], bool]) -> None:
    """Waits for the other job."""
    deadline = time.monotonic() + PATIENCE_S
    while not has_come():
        if time.monotonic() > deadline:
            raise TimeoutError("the other job does not come")
        time.sleep(0.001)


def left(root: Path) -> list[int]:
    return [limit.free_bytes for limit in capacity.cgroup_limits(root)]


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
        limit = capacity.cgroup_limits(root)[0]
        assert "pod/job/rank/memory.max (700 bytes, 200 in use)" in limit.where
        assert (limit.reserve_bytes, limit.spare_bytes) == (700 // 32, 500 - 700 // 32)

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
        assert all(limit.free_bytes >= 0 for limit in capacity.cgroup_limits())


class TestLimits:
    def test_the_mount(self, tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
        stats = SimpleNamespace(f_blocks=100, f_bavail=10, f_frsize=4096)
        monkeypatch.setattr(os, "fstatvfs", lambda _: stats)
        limit = capacity.mount_limit(fd, tmp_path / "file")
        assert limit is not None
        assert limit.free_bytes == 40960
        capacity.check(40960, fd, tmp_path / "file")
        with pytest.raises(
            NotEnoughSpace,
            match=rf"needs 40961 bytes .*file system of {tmp_path} leaves 40960 .*shm-size.*arenas ls",
        ):
            capacity.check(40961, fd, tmp_path / "file")

    def test_a_mount_without_a_size(self, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
        stats = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
        monkeypatch.setattr(os, "fstatvfs", lambda _: stats)
        assert capacity.mount_limit(fd, Path("file")) is None

    def test_memory_and_swap(self, tmp_path: Path) -> None:
        (tmp_path / "proc").mkdir()
        meminfo = tmp_path / "proc/meminfo"
        meminfo.write_text("MemTotal: 10 kB\nMemAvailable:   3 kB\nHugePages_Total: 0\nSwapFree: 4 kB\n")
        limit = capacity.machine_limit(tmp_path)
        assert limit is not None
        assert limit.free_bytes == 7 * 1024
        assert (limit.reserve_bytes, limit.spare_bytes) == (320, 7 * 1024 - 320)
        assert capacity.reserve_of(64e9) == 2e9
        assert capacity.reserve_of(4e12) == 32 << 30, "the most"
        meminfo.write_text("MemTotal: 10 kB\n")
        assert capacity.machine_limit(tmp_path) is None

    @pytest.mark.parametrize(("kind", "counts"), [("tmpfs", True), ("ramfs", True), ("ext4", False)])
    def test_memory_counts_where_files_live_in_it(
        self, tmp_path: Path, fd: int, kind: str, counts: bool
    ) -> None:
        device = os.fstat(fd).st_dev
        mount = f"40 1 {os.major(device)}:{os.minor(device)} / /shm rw - {kind} none rw"
        files = {"a/memory.max": "1000", "a/memory.current": "400"}
        root = machine(tmp_path, "0::/a\n", [V2, mount], files)
        (root / "proc/meminfo").write_text("MemAvailable: 1 kB\n")
        free = [limit.free_bytes for limit in capacity.limits(fd, tmp_path / "file", root)[1:]]
        assert free == ([1024, 600] if counts else [])

    def test_shared_memory_of_this_machine(self) -> None:
        fd, path = os.open("/dev/shm", os.O_RDONLY), Path("/dev/shm/file")
        try:
            where = [limit.where for limit in capacity.limits(fd, path)]
            assert where[:2] == ["the file system of /dev/shm", "the memory of this machine"]
            with pytest.raises(NotEnoughSpace, match="/dev/shm/file needs"):
                capacity.check(1 << 60, fd, path)
            capacity.check(0, fd, path)
        finally:
            os.close(fd)


class TestAllocate:
    def test_the_sum_is_asked_for(
        self, tmp_path: Path, fd: int, turn: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []
        monkeypatch.setattr(capacity, "check", lambda size, *_, **__: asked.append(size))
        path = tmp_path / "job" / "host" / "file"
        capacity.allocate(fd, [(0, 4096), (MIB, 0), (MIB, 8192)], path, turn)
        assert asked == [12288]
        assert os.fstat(fd).st_blocks * 512 >= 12288
        assert os.fstat(fd).st_size == MIB + 8192

    def test_the_turn_is_awaited_to_the_deadline(
        self, tmp_path: Path, fd: int, turn: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "job" / "host" / "file"
        other = os.open(tmp_path, os.O_RDONLY)
        monkeypatch.setattr(capacity, "_WAIT_S", 0)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(ArenaBusy, match=f"fuser {tmp_path}"):
                capacity.allocate(fd, [], path, turn)
            fcntl.flock(other, fcntl.LOCK_UN)
            capacity.allocate(fd, [], path, turn)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was given back
        finally:
            os.close(other)
        assert os.listdir(tmp_path) == ["file"]

    def test_the_wait_grows_with_the_bytes(
        self, tmp_path: Path, fd: int, turn: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A clock that runs by itself: 200 GB wait for hours, and a page for minutes."""
        other = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_EX)
        waited: dict[int, float] = {}
        for size_bytes in (4096, 200 << 30):
            now = iter(range(0, 10**6, 10))
            last: list[int] = []

            def clock(now: Iterator[int] = now, last: list[int] = last) -> int:
                last.append(next(now))
                return last[-1]

            monkeypatch.setattr(capacity, "time", SimpleNamespace(monotonic=clock, sleep=lambda _: None))
            with pytest.raises(ArenaBusy):
                capacity.allocate(fd, [(0, size_bytes)], tmp_path / "job" / "host" / "file", turn)
            waited[size_bytes] = last[-1]
        os.close(other)
        assert waited[4096] < 200 and waited[200 << 30] > 10000

    @pytest.mark.parametrize("backing", ["allocate", "back"])
    def test_an_interval_timer_that_is_shorter_than_a_slice(
        self, tmp_path: Path, fd: int, turn: int, monkeypatch: pytest.MonkeyPatch, backing: str
    ) -> None:
        """On a kernel that gives a piece up when a signal is pending; one comes in each piece."""
        heard, given_up, slices = list[int](), list[int](), list[int]()
        allocate = os.posix_fallocate

        def older(fd: int, offset: int, length: int) -> None:
            signal.raise_signal(signal.SIGALRM)  # its handler has run when this returns, unless it is kept
            if len(heard) > len(slices):
                given_up.append(offset)
                raise InterruptedError(errno.EINTR, "python would begin the piece again, for ever")
            slices.append(length)
            allocate(fd, offset, length)

        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        previous = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
        monkeypatch.setattr(capacity, "SLICE_BYTES", MIB)
        monkeypatch.setattr(os, "posix_fallocate", older)
        try:
            path = tmp_path / "job" / "host" / "file"
            if backing == "allocate":
                capacity.allocate(fd, [(0, 3 * MIB)], path, turn)
            else:
                capacity.back(fd, [(0, 3 * MIB)], path)
        finally:
            signal.signal(signal.SIGALRM, previous)
        assert slices == [MIB] * 3 and not given_up
        assert len(heard) == 3, "each is delivered between two slices"
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before

    def test_memory_is_taken_by_one_function(self) -> None:
        """The rule about signals is kept there."""
        package = Path(ecemb.__file__).parent
        naming = [path for path in package.rglob("*.py") if "os.posix_fallocate" in path.read_text()]
        assert naming == [Path(capacity.__file__)]
        assert naming[0].read_text().count("os.posix_fallocate") == 1

    def test_the_reserve_is_for_what_cannot_be_done_without(
        self, tmp_path: Path, fd: int, turn: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "job" / "host" / "file"
        limit = capacity.Limit("the sky", 5 * MIB, "Wait.", 2 * MIB)
        monkeypatch.setattr(capacity, "limits", lambda *_: [limit])
        said = r"the sky leaves 5242880 \(5.0 MiB\), of which 2.0 MiB are a reserve for the host\. Wait"
        capacity.allocate(fd, [(0, 3 * MIB)], path, turn, leaves_reserve=True)
        with pytest.raises(NotEnoughSpace, match=said):
            capacity.allocate(fd, [(0, 3 * MIB + 1)], path, turn, leaves_reserve=True)
        capacity.allocate(fd, [(0, 5 * MIB)], path, turn)
        with pytest.raises(NotEnoughSpace, match=said):
            capacity.allocate(fd, [(0, 5 * MIB + 1)], path, turn)

    def test_slices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All of what is asked for, in order, in slices that are full but for the last."""
        monkeypatch.setattr(capacity, "SLICE_BYTES", 10)
        assert list(capacity._slices([])) == [(0, [])]
        assert list(capacity._slices([(5, 3), (20, 0), (30, 7)])) == [(10, [(5, 3), (30, 7)])]
        assert list(capacity._slices([(0, 25)])) == [(10, [(0, 10)]), (10, [(10, 10)]), (5, [(20, 5)])]
        assert list(capacity._slices([(0, 8), (50, 4)])) == [(10, [(0, 8), (50, 2)]), (2, [(52, 2)])]

    def test_what_is_promised_to_one_is_not_promised_to_another(
        self, tmp_path: Path, fd: int, turn: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While the first takes its first slice, the second learns what is left, and takes it."""
        path = tmp_path / "job" / "host" / "file"
        free = [100]
        monkeypatch.setattr(capacity, "SLICE_BYTES", 10)
        limit = lambda *_: [capacity.Limit("the sky", free[0], "Wait.")]  # noqa: E731
        monkeypatch.setattr(capacity, "limits", limit)
        second = os.open(tmp_path, os.O_RDONLY)
        told: list[str] = []

        def taken(fd: int, offset: int, length: int) -> None:
            free[0] -= length
            if length == 10 and offset == 0:
                with pytest.raises(NotEnoughSpace) as error:
                    capacity.allocate(fd, [(1000, 41)], path, second)
                told.append(str(error.value))
                capacity.allocate(fd, [(1000, 30)], path, second)

        monkeypatch.setattr(os, "posix_fallocate", taken)
        (tmp_path / ".claim-left").write_bytes(capacity._CLAIMED.pack(10**6, True))
        capacity.allocate(fd, [(0, 60)], path, turn)
        os.close(second)
        assert free == [10]
        assert "leaves 90 (0.0 MiB), of which other processes are about to take 50" in told[0]
        assert os.listdir(tmp_path) == ["file"]

    def test_bytes_that_may_count_twice_are_waited_for(
        self, tmp_path: Path, fd: int, turn: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """90 are free, 60 promised, and the slice of 10 that is being taken may be among both."""
        free, waits = [100], list[int]()
        monkeypatch.setattr(capacity, "SLICE_BYTES", 10)
        limit = lambda *_: [capacity.Limit("the sky", free[0], "Wait.")]  # noqa: E731
        monkeypatch.setattr(capacity, "limits", limit)
        path, second = tmp_path / "job" / "host" / "file", os.open(tmp_path, os.O_RDONLY)
        first = Claim(turn, path)
        first.store(60, is_taking=True)
        free[0] -= 10

        def sleep(_: float) -> None:
            waits.append(1)
            first.store(50, is_taking=len(waits) < 2)  # the slice has ended; the last wait is for no slice

        monkeypatch.setattr(capacity, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, length: None)
        capacity.allocate(fd, [(1000, 4), (2000, 5)], path, second)
        assert not waits
        capacity.allocate(fd, [(1000, 40)], path, second)
        assert len(waits) == 1, "all is known as soon as the slice has ended"
        first.drop()
        os.close(second)
        assert os.listdir(tmp_path) == ["file"]

    def test_slices_that_end_while_memory_is_counted_are_no_lack_of_it(
        self, tmp_path: Path, fd: int, turn: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After the other claim is read, two of its slices end and half of a third is taken: 40 are left."""
        monkeypatch.setattr(capacity, "SLICE_BYTES", 10)
        path, second = tmp_path / "job" / "host" / "file", os.open(tmp_path, os.O_RDONLY)
        first, free, waits = Claim(turn, path), [100], list[int]()
        first.store(60, is_taking=True)

        def limits(*_: object) -> list[capacity.Limit]:
            if free[0] == 100:
                free[0] = 75
                first.store(40, is_taking=True)
            return [capacity.Limit("the sky", free[0], "Wait.")]

        def sleep(_: float) -> None:
            waits.append(1)
            if len(waits) > 1:
                free[0] = 70
                first.store(30, is_taking=False)

        monkeypatch.setattr(capacity, "limits", limits)
        monkeypatch.setattr(capacity, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, length: None)
        capacity.allocate(fd, [(1000, 40)], path, second)
        assert len(waits) == 2, "once as the claim changed, once as the third slice may count twice"
        with pytest.raises(NotEnoughSpace):
            capacity.allocate(fd, [(1000, 41)], path, second)
        first.drop()
        os.close(second)

    def test_a_process_that_is_killed_leaves_no_claim(self, tmp_path: Path, fd: int, turn: int) -> None:
        """Before any line of its allocation: the next one that looks for claims removes what is left."""
        end, found = 1, set[int]()
        while cut_off(end, lambda: Claim(turn, tmp_path / "file").store(5), capacity):
            found.add(len(os.listdir(tmp_path)))
            assert capacity.promised_elsewhere(turn) == 0
            assert os.listdir(tmp_path) == ["file"]
            end += 1
        assert found == {1, 2}

    def test_a_claim_that_was_taken_for_left_is_made_again(
        self, tmp_path: Path, fd: int, turn: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another process looks for claims in the moment in which the file is there, and not locked."""
        lock, looked = fcntl.flock, list[int]()

        def flock(at: int, operation: int) -> None:
            if operation == fcntl.LOCK_EX and len(looked) < 2:
                looked.append(capacity.promised_elsewhere(turn))
            lock(at, operation)

        monkeypatch.setattr(fcntl, "flock", flock)
        claim = Claim(turn, tmp_path / "file")
        claim.store(5)
        assert looked == [0, 0] and capacity.promised_elsewhere(turn) == 5
        claim.drop()
        assert capacity.promised_elsewhere(turn) == 0 and os.listdir(tmp_path) == ["file"]

    def test_a_growth_comes_between_the_slices_of_another_jobs_allocation(self, tmp_path: Path) -> None:
        """By order, not by seconds: the growth of the second comes within the first slice of the first."""
        context = fork_server()
        signs = context.Event(), context.Event(), context.Event()
        big = context.Process(target=take_slowly, args=(tmp_path, *signs))
        small = context.Process(target=grow, args=(tmp_path, *signs))
        for process in (big, small):
            process.start()
        for process in (small, big):
            process.join(PATIENCE_S)
        codes = [big.exitcode, small.exitcode]
        for process in (big, small):
            process.kill()
            process.join()
        assert codes == [0, 0]
        assert (tmp_path / "order").read_text().split() == ["grown", "last"]

    def test_a_claim_that_does_not_fit_leaves_nothing(self, tmp_path: Path) -> None:
        turn = os.open(tmp_path, os.O_RDONLY)
        claim = capacity.Claim(turn, tmp_path / "job" / "host" / "one.arena")
        full = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch.object(os, "pwrite", side_effect=full), pytest.raises(NotEnoughSpace):
            claim.store(1 << 20)
        claim.drop()
        assert not os.listdir(tmp_path)
        os.close(turn)

    def test_other_errors_stay_what_they_are(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="Bad file"), capacity.refusals(tmp_path, 1):
            os.ftruncate(-1, 0)
