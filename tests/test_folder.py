"""Folders that nobody else can have made: links, owners and modes at every level."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from ecemb import folder
from ecemb.directory import Directory, arenas
from ecemb.errors import ArenaInsecure, ConfigurationError
from ecemb.folder import Folder

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
    refused(tmp_path, f"{path} is a symbolic link or no folder")
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


@pytest.mark.parametrize(("call", "match"), [("mkdir", "can't be made"), ("open", "can't be read")])
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
    assert Directory(".", "ctr", "a").path == folder.home(tmp_path) / "ctr" / "a"


@pytest.mark.parametrize("name", ["a", "A9", "0", "web-1.rack_2", "x" * 64])
def test_names(tmp_path: Path, name: str) -> None:
    assert Directory(tmp_path, name, name).path == folder.home(tmp_path) / name / name


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
    located = folder.locate(place.path / "0.arena")
    assert (located.arena_dir, located.job, located.host) == (tmp_path, "ctr", "a")


def test_making_and_removing_at_once(tmp_path: Path) -> None:
    """Whoever removes the last file takes the folders with it; the other makes them again."""
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
    assert os.listdir(folder.home(tmp_path)) == []
