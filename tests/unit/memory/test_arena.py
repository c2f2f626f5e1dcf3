"""Attach, words, regions, growth: with real processes that are really killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ecemb.errors import (
    ArenaBusy,
    ArenaDamaged,
    ArenaError,
    ArenaIncompatible,
    ArenaInsecure,
    ConfigurationError,
    NotEnoughSpace,
    UsageError,
)
from ecemb.memory import capacity, private_files
from ecemb.memory.arena import Arena
from ecemb.memory.header import (
    CONSTANTS_OFFSET,
    FORMAT,
    NONE,
    WORDS,
    WORDS_OFFSET,
    Header,
    State,
    new_arena_id,
)
from ecemb.memory.scan import Directory, remove
from support.arena_holders import (
    DEADLINE_S,
    ROWS_BYTES,
    constants,
    create,
    die_in_creation,
    die_in_growth,
    hold,
    hold_with_child,
    holding,
    lose_lock,
    reserve,
    touch_in_child,
    try_to_attach,
    wait_until,
)

MIB = 1 << 20


@pytest.fixture
def directory(arena_dir: Path) -> Directory:
    return Directory(arena_dir, "ctr", "a")


@pytest.fixture
def left(directory: Directory) -> Path:
    """An arena that was closed."""
    arena = create(directory)
    arena.set("state", State.LIVE)
    arena.close()
    return arena.path


def head(path: Path, size_bytes: int) -> bytes:
    """The first bytes of a file that is far too long to be read whole."""
    with path.open("rb") as file:
        return file.read(size_bytes)


def patch(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


class TestCreate:
    def test_a_new_arena_says_none_and_holds_zeros(self, directory: Directory) -> None:
        arena = create(directory, rank=2)
        assert arena.header() == Header(arena.constants, State.INIT)
        for word in WORDS:
            expected = {"state": State.INIT, "pid": os.getpid()}
            if word != "pid_start":
                counts = word.endswith(("_bytes", "_ns", "_us")) or word.startswith("recovery_")
                default = 0 if counts or word in ("undeclared", "window_room", "verified") else NONE
                assert arena.get(word) == expected.get(word, default), word
        assert arena.path == directory.path / f"{arena.constants.arena_id}.arena"
        assert arena.path.stat().st_mode & 0o777 == 0o600
        assert all(path.stat().st_mode & 0o777 == 0o700 for path in list(arena.path.parents)[:3])
        assert not arena.region("rows").any()

    def test_capacity_costs_nothing_until_it_is_reserved(self, directory: Directory) -> None:
        arena = create(directory)
        assert len(arena.region("journal")) == 1 << 33
        assert arena.path.stat().st_blocks * 512 < 64 * 1024
        sizes = {name: arena.reserved(name) for name, _ in arena.constants.regions}
        assert sizes == {"generator": 12, "rows": ROWS_BYTES, "journal": 0, "none": 0}

    def test_regions_are_apart_and_page_aligned(self, directory: Directory) -> None:
        arena = create(directory)
        arena.region("generator")[:] = 1
        arena.region("rows")[:] = 2
        assert arena.region("generator").tolist() == [1] * 12
        assert (arena.region("rows") == 2).all()
        for name in ("generator", "rows", "journal"):
            assert arena.region(name).ctypes.data % 4096 == 0
        assert arena.header().constants == arena.constants

    def test_a_newcomer_is_rebuilding(self, directory: Directory) -> None:
        arena = Arena.create(directory, constants(), {}, state=State.REBUILDING)
        assert arena.header().state is State.REBUILDING

    def test_a_tight_umask_does_no_harm(self, arena_dir: Path) -> None:
        before = os.umask(0o777)
        try:
            arena = create(Directory(arena_dir, "ctr", "b"))
        finally:
            os.umask(before)
        assert arena.path.stat().st_mode & 0o777 == 0o600

    def test_an_id_is_used_once(self, directory: Directory, left: Path) -> None:
        before = head(left, 1 << 16)
        with pytest.raises(ConfigurationError, match="new_arena_id"):
            create(directory, arena_id=left.stem)
        assert head(left, 1 << 16) == before

    def test_more_than_the_capacity_is_refused(self, directory: Directory) -> None:
        with pytest.raises(NotEnoughSpace, match=f"a capacity of {ROWS_BYTES} bytes"):
            Arena.create(directory, constants(), {"rows": ROWS_BYTES + 1})
        assert directory.scan(0) == []

    @pytest.mark.parametrize(
        "where", ["ftruncate", "check", "posix_fallocate", "map_shared", "write", "after write"]
    )
    def test_a_creation_cut_short_is_torn(self, arena_dir: Path, directory: Directory, where: str) -> None:
        with holding(die_in_creation, arena_dir, where, constants()) as holder:
            assert holder.ended() == -signal.SIGKILL
        (found,) = directory.scan(10)
        assert found.torn
        assert (found.header, found.holder) == (None, None)
        assert "cut short" in (found.damage or "")
        with pytest.raises(ArenaDamaged, match="cut short"):
            Arena.attach(found)
        assert remove(found)
        assert directory.scan(0) == []

    def test_the_state_is_the_last_store(self, arena_dir: Path, directory: Directory) -> None:
        with holding(die_in_creation, arena_dir, "after claim", constants()) as holder:
            assert holder.ended() == -signal.SIGKILL
        (found,) = directory.scan(10)
        assert found.torn
        patch(found.path, WORDS_OFFSET, int(State.INIT).to_bytes(8, "little"))
        (found,) = directory.scan(10)
        assert found.header is not None  # all the rest was there

    def test_a_failed_creation_leaves_nothing(
        self, directory: Directory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Arena, "_claim", fail)
        with pytest.raises(KeyboardInterrupt):
            create(directory)
        assert directory.scan(0) == []
        assert not list(directory.path.iterdir())

    def test_it_comes_back_when_its_folder_is_removed(self, directory: Directory) -> None:
        shutil.rmtree(directory.path.parent)
        assert create(directory).path.exists()


class TestAttach:
    def test_everything_is_there_again(self, directory: Directory, seed: int) -> None:
        rows = np.random.default_rng(seed).integers(0, 256, ROWS_BYTES, np.uint8)
        arena = create(directory)
        arena.region("rows")[:] = rows
        for value, word in enumerate(WORDS[1:]):
            if not word.startswith("pid"):
                arena.set(word, (1 << 62) + value)
        arena.set("state", State.LIVE)
        before = arena.header()
        arena.close()
        (found,) = directory.scan(0)
        assert found.header == before
        again = Arena.attach(found)
        assert again.header() == before
        assert again.region("rows").tobytes() == rows.tobytes()
        assert again.get("slot1_bytes") == (1 << 62) + WORDS[1:].index("slot1_bytes")

    def test_a_living_holder_is_named(self, directory: Directory, left: Path) -> None:
        with holding(hold, left) as holder:
            assert holder.told() == "attached"
            with pytest.raises(ArenaBusy, match=rf"{left.name}.*process {holder.pid}\b"):
                Arena.attach(left, timeout_s=0.05)
            (found,) = directory.scan(0.05)
            assert (found.holder, found.pid) == (holder.pid, holder.pid)
            assert found.header is not None
            assert holder.ask("close") == "closed"
            Arena.attach(left).close()  # the process lives, but it gave the arena back
            (found,) = directory.scan(0.05)
            assert (found.holder, found.pid) == (None, 0)

    def test_after_sigkill_it_is_free_at_once(self, directory: Directory, left: Path) -> None:
        with holding(hold, left) as holder:
            holder.told()
            holder.kill()
            (found,) = directory.scan(0)
            assert (found.holder, found.pid) == (None, holder.pid)
            arena = Arena.attach(left, timeout_s=0)
        assert arena.get("pid") == os.getpid()
        assert arena.get("pid_start") == private_files.start_of_process(os.getpid())

    def test_it_waits_for_the_holder_to_end(self, directory: Directory, left: Path) -> None:
        with holding(hold, left) as holder:
            holder.told()
            os.kill(holder.pid, signal.SIGKILL)  # not awaited
            Arena.attach(directory.scan(DEADLINE_S)[0], timeout_s=DEADLINE_S)

    def test_a_forked_child_does_not_keep_the_lock(self, left: Path) -> None:
        with holding(hold_with_child, left) as holder:
            child = holder.told()
            try:
                holder.kill()
                arena = Arena.attach(left, timeout_s=0)
                assert private_files.start_of_process(child) is not None
                assert arena.get("pid") == os.getpid()
            finally:
                os.kill(child, signal.SIGKILL)

    def test_a_child_that_ends_does_not_drop_its_parents_lock(self, left: Path) -> None:
        with holding(hold_with_child, left) as holder:
            child = holder.told()
            os.kill(child, signal.SIGKILL)
            wait_until(lambda: private_files.start_of_process(child) is None)
            with pytest.raises(ArenaBusy, match=str(holder.pid)):
                Arena.attach(left, timeout_s=0)

    def test_a_forked_child_has_no_mapping(self, left: Path) -> None:
        with holding(touch_in_child, left) as holder:
            assert holder.told() == [-signal.SIGSEGV, 7, 7]
            with pytest.raises(ArenaBusy):
                Arena.attach(left, timeout_s=0)

    def test_a_process_that_lost_its_lock_still_counts(self, directory: Directory, left: Path) -> None:
        with holding(lose_lock, left) as holder:
            assert holder.told() == "lost"
            with pytest.raises(ArenaBusy, match=str(holder.pid)):
                Arena.attach(left, timeout_s=0.05)
            assert directory.scan(0.05)[0].holder == holder.pid
            holder.kill()
            Arena.attach(left, timeout_s=0)

    def test_a_reused_pid_does_not_count(self, left: Path) -> None:
        arena = Arena.attach(left)
        arena.set("pid", os.getppid())
        arena.set("pid_start", (private_files.start_of_process(os.getppid()) or 0) + 1)
        words = [arena.get("pid"), arena.get("pid_start")]
        arena.close()
        patch(left, WORDS_OFFSET + 8 * WORDS.index("pid"), np.array(words, "<i8").tobytes())
        Arena.attach(left, timeout_s=0)

    def test_a_process_attaches_once(self, directory: Directory, left: Path) -> None:
        arena = Arena.attach(left)
        with pytest.raises(ArenaBusy, match=f"this process .{os.getpid()}"):
            Arena.attach(left)
        assert directory.scan(10)[0].holder == os.getpid()  # at once, without a wait
        with pytest.raises(ArenaBusy):
            remove(left)
        with holding(try_to_attach, left) as holder:  # nothing of this dropped the lock
            assert holder.ask() == os.getpid()
            arena.close()
            assert holder.ask() is None

    def test_an_old_view_does_not_drop_a_new_lock(self, left: Path) -> None:
        arena = Arena.attach(left)
        view = arena.region("rows")[5:9]
        arena.close()
        again = Arena.attach(left)
        view[:] = 3
        del view, arena
        assert again.region("rows")[5:9].tolist() == [3] * 4
        with holding(try_to_attach, left) as holder:
            assert holder.ask() == os.getpid()

    def test_a_file_that_was_replaced_is_refused(self, directory: Directory, left: Path) -> None:
        (found,) = directory.scan(0)
        with left.open("rb"):  # as long as it is open, no other file has its inode
            remove(found)
            with pytest.raises(ArenaError, match="gone"):
                Arena.attach(found)
            create(directory, arena_id=left.stem).close()
        with pytest.raises(ArenaError, match="another file"):
            Arena.attach(found)
        assert not remove(found)
        Arena.attach(left)

    def test_paths_that_are_no_arenas_are_refused(self, arena_dir: Path, left: Path) -> None:
        for path in (
            arena_dir,
            arena_dir / "x.arena",
            left.parent,
            "/",
            left.parent / "sub/x.arena",
        ):
            with pytest.raises(ConfigurationError, match="ecemb-"):
                Arena.attach(path)
        with pytest.raises(ArenaError, match="gone"):
            Arena.attach(left.with_name("0123456789.arena"))


class TestDamage:
    def test_any_flipped_bit_of_the_constants(self, directory: Directory, left: Path, seed: int) -> None:
        arena = Arena.attach(left)
        length = len(arena.constants.encode())
        arena.close()
        good = head(left, CONSTANTS_OFFSET + length)
        rng = np.random.default_rng(seed)
        for offset in [*range(8, 40), *(CONSTANTS_OFFSET + rng.integers(0, length, 40))]:
            patch(left, int(offset), bytes([good[offset] ^ (1 << int(rng.integers(8)))]))
            with pytest.raises((ArenaDamaged, ArenaIncompatible), match=left.name):
                Arena.attach(left)
            (found,) = directory.scan(0)
            assert found.header is None
            assert not found.torn
            assert found.damage
            patch(left, int(offset), good[offset : offset + 1])
        Arena.attach(left)

    def test_words_may_say_anything(self, left: Path, seed: int) -> None:
        arena = Arena.attach(left)
        rng = np.random.default_rng(seed)
        free = [word for word in WORDS if word not in ("state", "pid", "pid_start")]
        values = {word: int(rng.integers(-(2**63), 2**63 - 1)) for word in free}
        for word, value in values.items():
            arena.set(word, value)
        arena.close()
        again = Arena.attach(left)
        assert {word: again.get(word) for word in free} == values

    @pytest.mark.parametrize(
        ("offset", "content", "match"),
        [
            (0, b"NotArena", "not an arena"),
            (8, (1 << 40).to_bytes(8, "little"), "checksum"),
            (16, (1 << 60).to_bytes(8, "little"), "checksum"),
            (WORDS_OFFSET, (9).to_bytes(8, "little"), "state is 9"),
            (WORDS_OFFSET + 8 * 65, (1 << 50).to_bytes(8, "little"), "'rows' claims"),
            (WORDS_OFFSET + 8 * 65, (-1).to_bytes(8, "little", signed=True), "'rows' claims"),
        ],
    )
    def test_each_kind_is_told(self, left: Path, offset: int, content: bytes, match: str) -> None:
        patch(left, offset, content)
        with pytest.raises(ArenaDamaged, match=match):
            Arena.attach(left)
        with pytest.raises(ArenaDamaged, match=match):  # and the claim was given back
            Arena.attach(left)

    def test_another_format_is_no_damage(self, directory: Directory, left: Path) -> None:
        for version in (FORMAT - 1, FORMAT + 1):
            patch(left, 8, version.to_bytes(8, "little"))
            with pytest.raises(ArenaIncompatible, match=f"format {version} .* format {FORMAT}"):
                Arena.attach(left)
            (found,) = directory.scan(0)
            assert found.incompatible and found.header is None and not found.torn

    def test_a_file_that_was_cut(self, directory: Directory, left: Path) -> None:
        os.truncate(left, left.stat().st_size - 4096)
        with pytest.raises(ArenaDamaged, match="should have"):
            Arena.attach(left)
        os.truncate(left, 100)
        assert directory.scan(0)[0].torn

    @pytest.mark.parametrize("name", ["0123456789abcdef.arena", "copy.arena"])
    def test_a_copy_is_no_arena(self, directory: Directory, left: Path, name: str) -> None:
        copy = left.with_name(name)
        copy.touch(0o600)
        patch(copy, 0, head(left, 1 << 16))
        with pytest.raises(ArenaDamaged, match=f"holds arena {left.stem}"):
            Arena.attach(copy)
        assert [found.header is not None for found in directory.scan(0)].count(True) == 1


class TestWords:
    def test_extremes(self, directory: Directory) -> None:
        arena = create(directory)
        for value in (-(2**63), -1, 0, 2**63 - 1):
            arena.set("joined", value)
            assert arena.get("joined") == value
        with pytest.raises(OverflowError):
            arena.set("joined", 2**63)
        assert arena.get("joined") == 2**63 - 1

    def test_each_word_is_a_place_of_its_own(self, left: Path) -> None:
        arena = Arena.attach(left)
        for value, word in enumerate(WORDS):
            arena.set(word, value + 100)
        assert [arena.get(word) for word in WORDS] == list(range(100, 100 + len(WORDS)))

    def test_unknown_regions(self, directory: Directory) -> None:
        arena = create(directory)
        for call in (arena.region, arena.reserved, lambda name: arena.reserve(name, 1)):
            with pytest.raises(ConfigurationError, match="no region 'row'; its regions are generator, rows"):
                call("row")

    def test_join_stores_two_words_as_if_they_were_one(
        self, directory: Directory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arena = create(directory)
        arena.join(5, 50)
        stores: list[tuple[int, int]] = []
        real = Arena.set

        def store(self: Arena, name: str, value: int) -> None:
            real(self, name, value)
            stores.append((self.get("joined"), self.get("generation_id")))

        monkeypatch.setattr(Arena, "set", store)
        arena.join(6, 60)
        assert set(stores) == {(5, NONE), (6, NONE), (6, 60)}

    def test_a_closed_arena_says_so(self, directory: Directory) -> None:
        arena = create(directory)
        arena.close()
        arena.close()
        for call in (
            arena.header,
            lambda: arena.get("state"),
            lambda: arena.set("state", 1),
            lambda: arena.region("rows"),
            lambda: arena.reserved("rows"),
            lambda: arena.reserve("rows", 1),
            lambda: arena.join(1, 1),
        ):
            with pytest.raises(UsageError, match="closed"):
                call()
        arena.remove()
        assert not arena.path.exists()

    def test_remove_leaves_another_file_of_that_name(self, directory: Directory) -> None:
        arena = create(directory)
        arena.path.rename(arena.path.with_suffix(".old"))
        other = create(directory, arena_id=arena.path.stem)
        arena.remove()
        assert other.path.exists()

    def test_remove_empties_the_folders(self, arena_dir: Path, directory: Directory) -> None:
        first, second = create(directory), create(directory)
        first.remove()
        assert second.path.exists()
        second.remove()
        second.close()
        assert os.listdir(arena_dir) == [f"ecemb-{os.geteuid()}"]
        assert os.listdir(directory.path.parents[1]) == []


class TestReserve:
    def test_it_grows_by_steps_and_keeps_what_is_there(self, directory: Directory) -> None:
        arena = create(directory)
        sizes = [arena.reserve("journal", 1)]
        arena.region("journal")[: sizes[0]] = 7
        while sizes[-1] < 12 * MIB:
            sizes.append(arena.reserve("journal", sizes[-1] + 1))
        assert arena.reserve("journal", 5) == sizes[-1]
        steps = np.diff([0, *sizes])
        assert (steps >= np.maximum(MIB, np.array([0, *sizes[:-1]]) // 4)).all()
        assert (arena.region("journal")[: sizes[0]] == 7).all()
        assert not arena.region("journal")[sizes[0] : sizes[-1]].any()
        assert arena.path.stat().st_blocks * 512 >= sizes[-1]

    def test_up_to_the_capacity(self, directory: Directory) -> None:
        regions = (("rows", 1), ("journal", 3 * MIB + 5))
        arena = Arena.create(directory, constants(regions=regions), {"journal": 0})
        assert arena.reserve("journal", 3 * MIB - 9) == 3 * MIB
        assert arena.reserve("journal", 3 * MIB + 1) == 3 * MIB + 5
        arena.region("journal")[:] = 1
        assert arena.reserve("rows", 1) == 1
        with pytest.raises(NotEnoughSpace, match=f"'journal' .* a capacity of {3 * MIB + 5} .*{3 * MIB + 6}"):
            arena.reserve("journal", 3 * MIB + 6)

    @pytest.mark.parametrize("where", ["posix_fallocate", "after posix_fallocate", "set_reserved"])
    def test_a_crash_while_growing(self, left: Path, where: str) -> None:
        with holding(die_in_growth, left, {"journal": 2 * MIB}, where) as holder:
            assert holder.ended() == -signal.SIGKILL
        arena = Arena.attach(left, timeout_s=0)
        assert arena.reserved("journal") == 2 * MIB
        assert (arena.region("journal")[: 2 * MIB] == 0xA5).all()
        assert arena.reserve("journal", 2 * MIB + 1) == 3 * MIB
        assert (arena.region("journal")[: 2 * MIB] == 0xA5).all()
        assert not arena.region("journal")[2 * MIB : 3 * MIB].any()

    def test_an_arena_that_was_removed_still_grows(self, directory: Directory) -> None:
        arena = create(directory)
        shutil.rmtree(directory.path.parents[1])
        assert arena.reserve("journal", MIB) == MIB

    def test_growth_before_a_crash_is_known_after_it(self, left: Path) -> None:
        with holding(die_in_growth, left, {"journal": 2 * MIB}, "after set_reserved") as holder:
            assert holder.ended() == -signal.SIGKILL
        assert Arena.attach(left, timeout_s=0).reserved("journal") == 3 * MIB


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with 4 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=1777", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting is for root")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


class TestSpace:
    def test_creation_is_refused_and_leaves_nothing(self, small_mount: Path) -> None:
        directory = Directory(small_mount, "ctr", "a")
        with pytest.raises(NotEnoughSpace, match=rf"{small_mount}.*leaves .*arena_dir") as caught:
            Arena.create(directory, constants(), {"journal": 5 * MIB})
        header_bytes = CONSTANTS_OFFSET + 4096
        assert f"needs {5 * MIB + header_bytes} bytes" in str(caught.value)
        assert directory.scan(0) == []

    def test_growth_takes_less_before_it_is_refused(self, small_mount: Path) -> None:
        arena = create(Directory(small_mount, "ctr", "a"))
        before = arena.reserve("journal", 2 * MIB)
        wanted = before + MIB + 512 * 1024
        arena.region("journal")[:before] = 7
        assert arena.reserve("journal", wanted) == wanted
        assert arena.reserve("journal", wanted + 4096) == wanted + 4096
        with pytest.raises(NotEnoughSpace, match=str(small_mount)):
            arena.reserve("journal", wanted + MIB)
        assert arena.reserved("journal") == wanted + 4096
        arena.region("journal")[: wanted + 4096] = 8  # no SIGBUS

    def test_growth_beyond_the_need_leaves_the_reserve(
        self, directory: Directory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arena = create(directory)
        limit = capacity.Limit("the sky", 2 * MIB, "Wait.", MIB)
        monkeypatch.setattr(capacity, "limits", lambda *_: [limit])
        before = arena.reserved("journal")
        wanted = before + MIB + 4096
        assert arena.reserve("journal", wanted, spare_bytes=2 * MIB) == wanted

    def test_the_kernel_has_the_last_word(self, small_mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ecemb.memory.capacity.check", lambda *_, **__: None)
        arena = create(Directory(small_mount, "ctr", "a"))
        with pytest.raises(NotEnoughSpace, match="No space left on device"):
            arena.reserve("journal", 5 * MIB)
        assert arena.reserve("journal", 2 * MIB) == 2 * MIB  # what was half taken is there again
        with pytest.raises(NotEnoughSpace):
            Arena.create(Directory(small_mount, "ctr", "b"), constants(), {"journal": 3 * MIB})
        assert os.listdir(small_mount / f"ecemb-{os.geteuid()}" / "ctr") == ["a"]

    def test_ranks_are_not_promised_the_same_bytes(self, small_mount: Path) -> None:
        directory = Directory(small_mount, "ctr", "a")
        arenas = [create(directory, rank=rank) for rank in range(4)]
        for arena in arenas:
            arena.close()
        size_bytes = 3 * MIB // 2
        with (
            holding(reserve, arenas[0].path, size_bytes) as a,
            holding(reserve, arenas[1].path, size_bytes) as b,
            holding(reserve, arenas[2].path, size_bytes) as c,
            holding(reserve, arenas[3].path, size_bytes) as d,
        ):
            holders = (a, b, c, d)
            for holder in holders:
                assert holder.told() == "attached"
            for holder in holders:
                holder.pipe.send("now")
            got = [holder.told() for holder in holders]
        assert sorted(size or 0 for size in got) == [0, 0, size_bytes, size_bytes]


class TestInsecure:
    def test_a_file_that_others_can_read(self, directory: Directory, left: Path) -> None:
        left.chmod(0o640)
        for call in (lambda: Arena.attach(left), lambda: directory.scan(0), lambda: remove(left)):
            with pytest.raises(ArenaInsecure, match=rf"{left.name} has mode 0640.*chmod 0600"):
                call()

    def test_a_file_of_another_user(self, directory: Directory, left: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("giving files away is for root")
        os.chown(left, 65534, -1)
        for call in (lambda: Arena.attach(left), lambda: directory.scan(0), lambda: remove(left)):
            with pytest.raises(ArenaInsecure, match=rf"{left.name} belongs to user 65534"):
                call()
        assert left.exists()

    def test_a_link_in_place_of_a_file(self, arena_dir: Path, directory: Directory, left: Path) -> None:
        target = arena_dir / "target"
        left.rename(target)
        left.symlink_to(target)
        for call in (lambda: Arena.attach(left), lambda: directory.scan(0), lambda: remove(left)):
            with pytest.raises(ArenaInsecure, match="symbolic link"):
                call()
        assert target.exists()

    def test_a_link_in_place_of_a_new_file(self, tmp_path: Path, directory: Directory) -> None:
        arena_id = new_arena_id()
        (directory.path / f"{arena_id}.arena").symlink_to(tmp_path / "target")
        with pytest.raises(ConfigurationError, match="exists"):
            create(directory, arena_id=arena_id)
        assert not (tmp_path / "target").exists()
