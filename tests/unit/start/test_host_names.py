"""Equal host names: ranks that see one folder pass, ranks that don't are named, and doubt refuses nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from ecemb.errors import RendezvousError
from ecemb.memory.private_files import Folder
from ecemb.start.agree import HostFolder, check_hosts


def seen(hosts: str, places: list[Path]) -> list[bool | None]:
    """What the ranks see. Rank -> name of its host, one letter; rank -> its arena_dir."""
    with ExitStack() as block:
        ranks = [
            block.enter_context(HostFolder(Folder(place, "job", name), tuple(hosts), rank))
            for rank, (name, place) in enumerate(zip(hosts, places, strict=True))
        ]
        for rank in ranks:
            with rank._folder.opened(create=True):  # as the rendezvous has made it
                rank.lock()
        for rank in ranks:
            rank.look()
    return [rank.sees for rank in ranks]


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    places = tmp_path / "one", tmp_path / "other"
    for place in places:
        place.mkdir()
    return places


def test_ranks_of_one_name_in_one_folder_pass(two: tuple[Path, Path]) -> None:
    one, other = two
    sees = seen("abab", [one, other, one, other])
    assert sees == [True] * 4
    check_hosts("abab", sees)
    check_hosts("aabb", seen("aabb", [one] * 4))


def test_a_rank_alone_on_its_host_looks_for_nothing(two: tuple[Path, Path]) -> None:
    sees = seen("ab", list(two))
    assert sees == [None, None]
    check_hosts("ab", sees)


def test_ranks_of_one_name_in_two_folders_are_named(two: tuple[Path, Path]) -> None:
    one, other = two
    hosts = "baaaa"
    sees = seen(hosts, [one, one, other, one, other])
    assert sees == [None, True, False, True, False]
    with pytest.raises(RendezvousError) as caught:
        check_hosts(hosts, sees)
    text = str(caught.value)
    assert "ranks 1, 2, 3 and 4 have the host name 'a'" in text
    assert "ranks 2 and 4 can't see the folder of rank 1" in text
    assert "init_process_group(host=)" in text and "arena_dir" in text


def test_nothing_stays(two: tuple[Path, Path]) -> None:
    one, _ = two
    for _ in range(2):  # the lock has ended, though a forked child may have the descriptor
        with HostFolder(Folder(one, "job", "a"), "aa", 0) as folder:
            folder.lock()
            assert folder.sees and folder._fd is not None
            child = os.dup(folder._fd)
            with HostFolder(Folder(one, "job", "a"), "aa", 1) as second:
                second.look()
                assert second.sees
        second.look()
        assert second.sees is False
        os.close(child)
    assert not [path for path in one.rglob("*") if not path.is_dir()]


def test_jobs_do_not_see_each_other(two: tuple[Path, Path]) -> None:
    one, other = two
    first, that = (HostFolder(Folder(one, job, "a"), "aa", 0) for job in ("this", "that"))
    second = HostFolder(Folder(other, "this", "a"), "aa", 1)
    with first, that, second._folder.opened(create=True):
        first.lock()
        that.lock()
        second.look()
        assert (first.sees, that.sees, second.sees) == (True, True, False)


def test_doubt_refuses_nothing(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder goes between the two looks, or is another launch's, or the file system has no such locks."""
    one, _ = two
    first, second = (HostFolder(Folder(one, "job", "a"), "aa", rank) for rank in range(2))
    with first:
        first.lock()
        shutil.rmtree(one / f"ecemb-{os.geteuid()}")
        second.look()
        assert second.sees is None
        with second._folder.opened(create=True):
            second.look()
        with pytest.raises(RendezvousError):
            check_hosts("aa", [first.sees, second.sees])
        first.look()
        assert (first.sees, second.sees) == (None, False)
        check_hosts("aa", [first.sees, second.sees])
    with HostFolder(Folder(one, "job", "a"), "aa", 0) as launch, first:
        launch.lock()
        first.lock()
        assert (launch.sees, first.sees) == (True, None)

    def no_locks(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        sees = seen("aa", [one] * 2)
    assert sees == [None, None]
    check_hosts("aa", sees)
