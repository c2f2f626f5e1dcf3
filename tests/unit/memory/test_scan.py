"""Scanning and removing: what is reported, and what is left alone."""

from __future__ import annotations

import itertools
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from ecemb.errors import ArenaBusy, ArenaInsecure, ConfigurationError
from ecemb.memory import scan as directories
from ecemb.memory.header import WORDS_OFFSET, State
from ecemb.memory.scan import Directory, arenas, remove
from support.arena_holders import DEADLINE_S, create, hold, holding


@pytest.fixture
def directory(arena_dir: Path) -> Directory:
    return Directory(arena_dir, "ctr", "a")


def leave(directory: Directory, **changes: object) -> Path:
    arena = create(directory, **changes)
    arena.set("state", State.LIVE)
    arena.close()
    return arena.path


class TestScan:
    def test_an_empty_folder(self, directory: Directory) -> None:
        assert directory.scan(10) == []

    def test_all_arenas_by_name_and_nothing_else(self, directory: Directory) -> None:
        paths = sorted(leave(directory, rank=rank) for rank in range(4))
        (directory.path / "notes.txt").touch()
        (directory.path / "sub").mkdir()
        found = directory.scan(10)
        assert [one.path for one in found] == paths
        assert {one.header.constants.rank for one in found if one.header} == {0, 1, 2, 3}
        assert {(one.job, one.host, one.holder, one.pid) for one in found} == {("ctr", "a", None, 0)}
        assert [one.inode for one in found] == [path.stat().st_ino for path in paths]
        assert [one.size_bytes for one in found] == [path.stat().st_blocks * 512 for path in paths]

    def test_other_hosts_and_jobs_are_not_seen(self, arena_dir: Path, directory: Directory) -> None:
        mine = leave(directory)
        leave(Directory(arena_dir, "ctr", "b"))
        leave(Directory(arena_dir, "other", "a"), job="other")
        assert [one.path for one in directory.scan(0)] == [mine]
        assert len(list(arenas(arena_dir))) == 3

    def test_it_changes_nothing(self, directory: Directory) -> None:
        path = leave(directory)
        before = path.stat()
        directory.scan(0)
        after = path.stat()
        assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)

    def test_what_this_process_holds_is_read_through_its_own_descriptor(self, directory: Directory) -> None:
        arena = create(directory)
        arena.set("prepared", 5)
        (found,) = directory.scan(10)
        assert found.header == arena.header()
        assert (found.holder, found.pid) == (os.getpid(), os.getpid())

    def test_it_waits_for_a_holder_that_ends(self, directory: Directory) -> None:
        path = leave(directory)
        with holding(hold, path) as holder:
            holder.told()
            holder.pipe.send("close")
            assert directory.scan(DEADLINE_S)[0].holder is None

    @pytest.mark.parametrize("state", [State.FINISHED, State.LIVE])
    def test_a_tombstone_is_reported_though_it_goes_while_it_is_awaited(
        self, directory: Directory, monkeypatch: pytest.MonkeyPatch, state: State
    ) -> None:
        """A waiting process would take the job for one that never was. Memory that is removed is lost."""
        path = leave(directory)
        with holding(hold, path) as holder:
            holder.told()

            def meanwhile(_: float) -> None:
                with path.open("r+b") as file:
                    file.seek(WORDS_OFFSET)
                    file.write(struct.pack("<q", state))
                path.unlink()

            monkeypatch.setattr(directories.time, "sleep", meanwhile)
            found = directory.scan(DEADLINE_S)
            monkeypatch.undo()
            holder.ask("close")
        reported = [(one.path, one.header.state, one.holder) for one in found if one.header]
        assert reported == ([(path, State.FINISHED, None)] if state is State.FINISHED else [])

    def test_a_long_wait_is_said_once(
        self, directory: Directory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = leave(directory)
        with holding(hold, path) as holder:
            holder.told()
            clock = SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda _: None)
            monkeypatch.setattr(directories, "time", clock)  # a second passes from one look to the next
            assert directory.scan(20)[0].holder == holder.pid
            holder.ask("close")
        (said,) = caplog.messages
        assert f"{path} is held by process {holder.pid}; waiting" in said

    def test_a_damaged_file_does_not_hide_another(self, directory: Directory) -> None:
        good = leave(directory)
        (directory.path / "0.arena").touch(0o600)
        (directory.path / "1.arena").write_bytes(b"x" * 20000)
        (directory.path / "1.arena").chmod(0o600)
        found = {one.path.name: one for one in directory.scan(0)}
        assert [found[name].torn for name in ("0.arena", "1.arena", good.name)] == [True, False, False]
        assert "not an arena" in (found["1.arena"].damage or "")
        assert found[good.name].header is not None

    @pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
    def test_what_is_no_plain_file_is_refused(self, directory: Directory, kind: str) -> None:
        path = directory.path / "0.arena"
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path, 0o600)
        else:
            path.symlink_to("/etc/passwd")
        with pytest.raises(ArenaInsecure, match=r"0\.arena is a symbolic link or not a plain file"):
            directory.scan(0)
        (found,) = arenas(directory.arena_dir)
        assert found.header is None
        assert found.damage


class TestArenas:
    def test_none_yet(self, arena_dir: Path) -> None:
        assert list(arenas(arena_dir)) == []
        assert not list(arena_dir.iterdir())

    def test_no_such_folder(self, arena_dir: Path) -> None:
        with pytest.raises(ConfigurationError, match="not an existing folder"):
            list(arenas(arena_dir / "missing"))

    def test_sorted_by_path(self, arena_dir: Path) -> None:
        paths = [leave(Directory(arena_dir, job, host), job=job) for job in ("b", "a") for host in ("2", "1")]
        assert [one.path for one in arenas(arena_dir)] == sorted(paths)


class TestRemove:
    def test_a_living_holder_is_left_alone(self, directory: Directory) -> None:
        path = leave(directory)
        with holding(hold, path) as holder:
            holder.told()
            with pytest.raises(ArenaBusy, match=str(holder.pid)):
                remove(path)
            assert path.exists()
            assert remove(path, force=True)
            assert not path.exists()
            assert holder.ask("close") == "closed"

    def test_gone_already(self, directory: Directory) -> None:
        path = leave(directory)
        (found,) = directory.scan(0)
        assert remove(found)
        assert not remove(found)
        assert not remove(path)
        assert not remove(path, force=True)
        assert not directory.path.parent.exists()

    def test_what_is_no_arena(self, directory: Directory, tmp_path: Path) -> None:
        other = directory.path / "notes.txt"
        other.touch()
        for path in (other, tmp_path / "x.arena", "/etc/passwd"):
            with pytest.raises(ConfigurationError, match="is not a"):
                remove(path, force=True)
        assert other.exists()
