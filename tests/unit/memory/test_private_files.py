"""Folders that only this user can have made: links, owners and modes at every level."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ecemb.errors import ArenaError, ArenaInsecure, ConfigurationError, NotEnoughSpace
from ecemb.memory import private_files
from ecemb.memory.arena import Arena
from ecemb.memory.private_files import Folder
from ecemb.memory.scan import Directory, arenas
from support.arena_holders import create, holding

LEVELS = ["user", "job", "host"]


@pytest.fixture
def levels(tmp_path: Path) -> dict[str, Path]:
    """The three levels that are ours, made by us."""
    path = Directory(tmp_path, "ctr", "a").path
    return {"host": path, "job": path.parent, "user": path.parents[1]}


def refused(tmp_path: Path, match: str) -> None:
    """That every way in is closed."""
    place = Folder(tmp_path, "ctr", "a")
    for call in (
        lambda: Directory(tmp_path, "ctr", "a"),
        lambda: place.make("0.arena"),
        lambda: place.status("0.arena"),
        lambda: place.open("0.arena", os.O_RDONLY),
        lambda: place.unlink("0.arena", 1),
    ):
        with pytest.raises(ArenaInsecure, match=match):
            call()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", [0o701, 0o710, 0o770, 0o707, 0o755, 0o777])
def test_open_to_others(tmp_path: Path, levels: dict[str, Path], level: str, mode: int) -> None:
    levels[level].chmod(mode)
    refused(tmp_path, f"{levels[level]} has mode {mode:04o}.*chmod 0700")


@pytest.mark.parametrize("level", LEVELS)
def test_another_owner(tmp_path: Path, levels: dict[str, Path], level: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving folders away is for root")
    os.chown(levels[level], 65534, -1)
    refused(tmp_path, f"{levels[level]} belongs to user 65534")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "fifo"])
def test_not_a_folder(tmp_path: Path, levels: dict[str, Path], level: str, kind: str) -> None:
    path, away = levels[level], tmp_path / "away"
    if kind == "link":
        shutil.move(path, away)
    else:
        shutil.rmtree(path)
    if kind == "file":
        path.touch(0o600)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    else:
        path.symlink_to(away)
    refused(tmp_path, f"{path} is a symbolic link or not a folder")
    assert away.exists() == (kind == "link")


@pytest.mark.parametrize("level", LEVELS)
def test_a_folder_that_cannot_be_trusted_hides_no_other(
    tmp_path: Path, levels: dict[str, Path], level: str
) -> None:
    levels[level].chmod(0o755)
    (found,) = arenas(tmp_path)
    assert found.path == levels[level]
    assert found.header is None
    assert "0755" in (found.damage or "")
    assert (found.job, found.host) == {
        "user": (None, None),
        "job": ("ctr", None),
        "host": ("ctr", "a"),
    }[level]


def test_arena_dir_that_others_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ArenaInsecure, match=f"{tmp_path} has mode 0777.*chmod [+]t"):
        Directory(tmp_path, "ctr", "a")
    assert not list(tmp_path.iterdir())
    tmp_path.chmod(0o1777)  # as /dev/shm
    Directory(tmp_path, "ctr", "a")


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_arena_dir_of_another_user(tmp_path: Path, mode: int) -> None:
    """Who owns a folder may rename what is in it, whatever its sticky bit says."""
    if os.geteuid() != 0:
        pytest.skip("giving folders away is for root")
    tmp_path.chmod(mode)
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ArenaInsecure, match=f"{tmp_path} belongs to user 12345.*root or .* user, 0. Pass"):
        Directory(tmp_path, "ctr", "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("uid_map", "user", "is_refused"),
    [
        ("0 1000 1\n", 65534, False),
        ("0 1000 1\n1 100000 65536\n", 65534, False),  # there is a user of this number, too
        ("0 1000 1\n1 100000 65536\n", 500, True),
        ("0 0 4294967295\n", 65534, True),
    ],
)
def test_arena_dir_of_a_user_without_a_number_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid_map: str, user: int, is_refused: bool
) -> None:
    """As the host's root in a container without root: the kernel doesn't say who it is."""
    texts = {"uid_map": uid_map, "overflowuid": "65534\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[path.name])
    status = os.stat_result((0o41777, 1, 1, 1, user, 0, 0, 0, 0, 0))
    if is_refused:
        with pytest.raises(ArenaInsecure, match=f"user {user}"):
            private_files._check_above(status, tmp_path, ArenaInsecure)
    else:
        private_files._check_above(status, tmp_path, ArenaInsecure)


def test_arena_dir_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    directory = Directory(tmp_path / "link", "ctr", "a")
    assert (tmp_path / "real" / directory.path.relative_to(tmp_path / "link")).is_dir()


def test_arena_dir_must_exist(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(ConfigurationError, match=f"{tmp_path / name} is not an existing folder"):
            Directory(tmp_path / name, "ctr", "a")


@pytest.mark.parametrize(("call", "match"), [("mkdir", "can't be created"), ("open", "can't be opened")])
@pytest.mark.parametrize("reason", [errno.EACCES, errno.EPERM])
def test_arena_dir_must_be_ours_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, match: str, reason: int
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(reason, os.strerror(reason))  # root is never refused

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(ConfigurationError, match=f"{tmp_path}.*{match} by user {os.geteuid()}"):
        Directory(tmp_path, "ctr", "a")


def test_a_relative_arena_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Directory(".", "ctr", "a").path == private_files.home(tmp_path) / "ctr" / "a"


@pytest.mark.parametrize("name", ["a", "A9", "0", "web-1.rack_2", "x" * 64])
def test_names(tmp_path: Path, name: str) -> None:
    assert Directory(tmp_path, name, name).path == private_files.home(tmp_path) / name / name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", "_a", ".a", "a/b", "a b", "a\n", "ä", "x" * 65, "a\0", "../../x"]
)
def test_no_names(tmp_path: Path, name: str) -> None:
    for job, host, what in ((name, "a", "job"), ("ctr", name, "host")):
        with pytest.raises(ConfigurationError, match=f"^{what} .* can't name a folder"):
            Directory(tmp_path, job, host)
    assert not list(tmp_path.iterdir())


def test_locate_is_the_inverse(tmp_path: Path) -> None:
    place = Directory(tmp_path, "ctr", "a")
    located = private_files.locate(place.path / "0.arena")
    assert (located.arena_dir, located.job, located.host) == (tmp_path, "ctr", "a")


def test_making_and_removing_at_once(tmp_path: Path) -> None:
    """The process that removes the last file takes the folders with it; the other makes them again."""
    place = Folder(tmp_path, "ctr", "a")
    failures: list[BaseException] = []

    def run(name: str) -> None:
        try:
            for _ in range(100):
                fd = place.make(name)
                inode = os.fstat(fd).st_ino
                os.close(fd)
                assert place.names(name, inode)
                assert place.unlink(name, inode)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(f"{name}.arena",)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert os.listdir(private_files.home(tmp_path)) == []


# --- what the kernel refuses --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x" * 300, "\0", "loop"])
def test_arena_dir_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigurationError, match="arena_dir .*pass another"):
        private_files.Folder(tmp_path / name, "ctr", "a").make("0.arena")


@pytest.mark.parametrize("arena_dir", ["/proc", "/sys"])
def test_arena_dir_where_nothing_can_be_made(arena_dir: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"{arena_dir}/ecemb-.* can't be created.*Pass an arena_dir"
    ):
        Directory(arena_dir, "ctr", "a")


@pytest.mark.parametrize("name", [None, 5, b"ctr"])
def test_names_are_text(tmp_path: Path, name: object) -> None:
    with pytest.raises(ConfigurationError, match="^job .* can't name a folder"):
        Directory(tmp_path, name, "a")  # pyright: ignore[reportArgumentType]


@contextmanager
def mounted(path: Path, *options: str) -> Iterator[None]:
    command = ["mount", *options, str(path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting is for root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_file_system_that_became_read_only(tmp_path: Path, levels: dict[str, Path]) -> None:
    place = Directory(tmp_path, "ctr", "a")
    os.close(place.make("0.arena"))
    with mounted(tmp_path, "--bind", str(tmp_path)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(tmp_path)], check=True)
        for act in (
            lambda: place.make("1.arena"),
            lambda: place.open("0.arena", os.O_RDWR),
            lambda: Directory(tmp_path, "other", "a"),
        ):
            with pytest.raises(ConfigurationError, match="Read-only file system.*may write to"):
                act()
        fd = place.open("0.arena", os.O_RDONLY)
        assert fd is not None
        os.close(fd)


def test_a_file_system_without_inodes(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "nr_inodes=4,mode=1777", "none"):
        place = Directory(tmp_path, "ctr", "a")  # three, and the root
        with pytest.raises(NotEnoughSpace, match=r"0.arena can't be created: No space.*df -i"):
            place.make("0.arena")
        with pytest.raises(NotEnoughSpace, match=r"other can't be created"):
            Directory(tmp_path, "other", "a")


def without_descriptors(pipe: Connection, tmp_path: Path) -> None:
    place = Directory(tmp_path, "ctr", "a")
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
    try:
        taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(used)]
    except OSError:
        taken = []
    try:
        os.close(place.make("0.arena"))
        pipe.send(f"made, beside {len(taken)}")
    except ArenaError as error:
        pipe.send(str(error))


def test_no_descriptor_left(tmp_path: Path) -> None:
    with holding(without_descriptors, tmp_path) as holder:
        said = holder.told()
    assert "Too many open files" in said
    assert "ulimit -n" in said


def test_a_file_system_that_cannot_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr("ecemb.memory.arena.map_shared", refuse)
    with pytest.raises(ConfigurationError, match="can't reserve space for a file or map it.*/dev/shm"):
        create(Directory(tmp_path, "ctr", "a"))


def test_a_file_system_without_fallocate(tmp_path: Path) -> None:
    """ramfs has none: the C library writes a byte to each block instead."""
    with mounted(tmp_path, "-t", "ramfs", "-o", "mode=1777", "none"):
        arena = create(Directory(tmp_path, "ctr", "a"))
        assert arena.reserve("journal", 1 << 20) == 1 << 20
        arena.region("journal")[: 1 << 20] = 1


def test_a_copy_with_holes_gets_its_memory_back(tmp_path: Path) -> None:
    """cp leaves out what is all zeros: touching that on a full mount would be SIGBUS."""
    arena = create(Directory(tmp_path, "ctr", "a"))
    arena.reserve("journal", 1 << 20)
    reserved = sum(arena.reserved(name) for name, _ in arena.constants.regions)
    arena.close()
    sparse = arena.path.with_name("copy")
    subprocess.run(["cp", "-p", "--sparse=always", str(arena.path), str(sparse)], check=True)
    if sparse.stat().st_blocks * 512 >= reserved:
        pytest.skip("files have no holes here")
    sparse.rename(arena.path)
    again = Arena.attach(arena.path)
    assert arena.path.stat().st_blocks * 512 >= reserved
    again.close()
