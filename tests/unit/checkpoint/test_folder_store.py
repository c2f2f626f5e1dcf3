"""A folder of checkpoints: what is there after a kill at any moment, and what is not trusted."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import pickle
import random
import re
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor

from ecemb.checkpoint import Piece, Stored
from ecemb.checkpoint.folder_store import CheckpointFolder, one_tells
from ecemb.errors import CheckpointFailed, CheckpointInsecure, CheckpointMismatch, ConfigurationError
from support.killed_child import cut_off
from support.refusals import refused

RANKS, ROWS = 2, 5
FILES = ("ecemb.json", "ecemb-index.json", ".metadata", "__0_0.distcp", "__1_0.distcp")


def facts(step: int, lineage: str = "one") -> dict[str, Any]:
    return {"step": step, "lineage": lineage, "job": "job"}


def rows(step: int) -> Tensor:
    return torch.arange(ROWS * 3, dtype=torch.float32).reshape(ROWS, 3) * step


def save(folder: CheckpointFolder, step: int, keep: int = 2) -> None:
    """As all ranks of a job do it; rank 0 has the first two rows, rank 1 the others."""
    token = folder.prepare(step, facts(step))
    parts = (Piece("t", (ROWS, 3), 0, rows(step)[:2]), Piece("t", (ROWS, 3), 2, rows(step)[2:].clone()))
    receipts = [folder.write(token, rank, RANKS, [part]) for rank, part in enumerate(parts)]
    folder.commit(token, facts(step), receipts)
    folder.retain(keep)


def load(folder: CheckpointFolder) -> tuple[int, Tensor]:
    stored = folder.newest()
    assert stored is not None
    found = torch.full((ROWS, 3), -1.0)
    folder.read(stored, [Piece("t", (ROWS, 3), 0, found[:3]), Piece("t", (ROWS, 3), 3, found[3:])])
    return stored.step, found


def test_after_a_kill_at_any_moment_the_newest_is_complete(arena_dir: Path, seed: int) -> None:
    folder = CheckpointFolder(arena_dir / "checkpoints")  # in memory: a disk takes longer for its promises
    save(folder, 1, keep=1)
    step, end, kept = 1, 0, random.Random(seed)
    while True:
        end += 1
        killed = cut_off(end, lambda: save(folder, step + 1, keep=1))  # noqa: B023
        newest, found = load(folder)
        assert newest in (step, step + 1)
        assert torch.equal(found, rows(newest))
        if not killed:
            break
        if newest > step or kept.random() < 0.3:  # the next save removes what the kill left behind
            step = newest + 1
            save(folder, step, keep=1)
            assert sorted(os.listdir(folder.path)) == [f"step-{step:012d}"]
    assert end > 15


def test_what_others_can_write_is_not_loaded(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    save(folder, 3)
    inside = folder.path / "step-000000000003"
    for path in (folder.path, inside, *(inside / name for name in FILES)):
        mode = path.stat().st_mode
        for bit in (0o020, 0o002):
            path.chmod(mode | bit)
            with pytest.raises(CheckpointInsecure, match="others can write.*chmod -R go-w"):
                load(CheckpointFolder(folder.path))
        path.chmod(mode)
        away = path.rename(path.with_name("away"))
        path.symlink_to(away)
        with pytest.raises(CheckpointInsecure, match="symbolic link"):
            load(CheckpointFolder(folder.path))
        path.unlink()
        away.rename(path)
    with of_another(".metadata"), pytest.raises(CheckpointInsecure, match="belongs to user 4711"):
        load(CheckpointFolder(folder.path))
    assert torch.equal(load(folder)[1], rows(3))


@contextlib.contextmanager
def of_another(end: str) -> Iterator[None]:
    """Lets a file or folder, by the end of its path, belong to another user."""
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        fields = list(real(fd))
        fields[4] = 4711 if os.readlink(f"/proc/self/fd/{fd}").endswith(end) else fields[4]
        return os.stat_result(fields)

    with mock.patch("os.fstat", fstat):
        yield


def every_call(folder: CheckpointFolder) -> list[Callable[[], object]]:
    """All calls of a store, on any rank."""
    stored = Stored("step-000000000003", 3, facts(3))
    return [
        lambda: folder.finished("job"),
        folder.newest,
        lambda: folder.read(stored, []),
        lambda: folder.prepare(4, facts(4)),
        lambda: folder.write(".step-000000000004.0123456789abcdef", 1, 2, []),
        lambda: folder.commit(".step-000000000004.0123456789abcdef", facts(4), []),
        lambda: folder.discard(".step-000000000004.0123456789abcdef"),
        lambda: folder.retain(1),
        lambda: folder.finish("job", 4),
    ]


def test_a_folder_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    """It is enough that they can write to any level above it, or own one."""
    team = tmp_path / "team"
    folder = CheckpointFolder(team / "jobs" / "checkpoints")
    save(folder, 3)
    os.chown(team, -1, 4711)
    for mode in (0o777, 0o775, 0o757, 0o2775):
        team.chmod(mode)
        for call in every_call(folder):
            with refused(
                CheckpointInsecure, f"{team} has mode {mode:04o}", f"chmod go-w {team}", str(folder)
            ):
                call()
    team.chmod(0o755)
    for path in (team, team / "jobs"):
        with of_another(path.name):
            for call in every_call(folder):
                with refused(CheckpointInsecure, f"{path} belongs to user 4711", "replace"):
                    call()
    for mode in (0o1777, 0o755, 0o711, 0o500):
        team.chmod(mode)
        assert torch.equal(load(folder)[1], rows(3))
    os.chown(team, -1, os.getegid())  # as under umask 002, or in a project's folder
    for mode in (0o775, 0o2770):
        team.chmod(mode)
        assert torch.equal(load(folder)[1], rows(3))
    team.chmod(0o700)


def test_no_level_that_a_save_makes_can_be_written_by_others(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        folder = CheckpointFolder(tmp_path / "a" / "b" / "checkpoints")
        save(folder, 3)
        folder.finish("job", 3)
    finally:
        os.umask(umask)
    made = [path for path in (tmp_path / "a").rglob("*") if not path.is_symlink()]
    assert len(made) == 3 + len(FILES) + 1
    assert not [path for path in (tmp_path / "a", *made) if path.stat().st_mode & 0o022]
    assert torch.equal(load(folder)[1], rows(3))


def test_links_above_the_folder_are_followed_if_only_this_user_can_change_them(tmp_path: Path) -> None:
    save(CheckpointFolder(tmp_path / "real" / "jobs" / "checkpoints"), 3)
    (tmp_path / "relative").symlink_to("real/jobs")
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "up").symlink_to("../absolute/../relative")
    (tmp_path / "loop").symlink_to("loop")
    for path in ("relative/checkpoints", "absolute/jobs/checkpoints", "real/up/checkpoints"):
        assert torch.equal(load(CheckpointFolder(tmp_path / path))[1], rows(3))
    with refused(CheckpointFailed, "Too many levels of symbolic links"):
        CheckpointFolder(tmp_path / "loop" / "checkpoints").newest()
    with of_another("absolute"), refused(CheckpointInsecure, "absolute is a symbolic link of user 4711"):
        CheckpointFolder(tmp_path / "absolute" / "jobs" / "checkpoints").newest()
    (tmp_path / "real").chmod(0o777)
    with refused(CheckpointInsecure, f"{tmp_path / 'real'} has mode 0777"):
        CheckpointFolder(tmp_path / "relative" / "checkpoints").newest()
    (tmp_path / "real").chmod(0o755)


class Evil:
    """A pickle that writes to a file in the folder where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


@pytest.mark.parametrize("level", ["checkpoints", "checkpoints/step-000000000003", "."])
def test_a_folder_that_is_swapped_at_any_moment_is_not_read(level: str, tmp_path: Path) -> None:
    """The moments are before the calls that look at a path, open it, or list it."""
    mark, top = tmp_path / "was here", tmp_path / "top"
    swapped, other = top / level, tmp_path / "elsewhere" / level
    for place, factor in ((top, 1), (tmp_path / "elsewhere", 2)):
        with mock.patch.dict(globals(), rows=lambda step, of=rows, factor=factor: of(step) * factor):
            save(CheckpointFolder(place / "checkpoints"), 3)
    for path in (other, *other.rglob("*")):
        path.chmod(0o777)  # as if it were another user's: both are refused
    [index] = other.rglob(".metadata")
    index.write_bytes(pickle.dumps(Evil(mark)))
    for end in range(1, 1000):
        moments = Moments(end, lambda: swap(swapped, other))
        with watched(moments), contextlib.suppress(CheckpointInsecure, CheckpointFailed):
            assert torch.equal(load(CheckpointFolder(top / "checkpoints"))[1], rows(3))
        assert not mark.exists(), f"a pickle ran: swapped before call {end}"
        if not moments.over:
            break
        swap(swapped, other)
    assert end > 10


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


class Moments:
    """Counts calls, and does something before the `end`th.

    Attributes:
        over: it has done it.
    """

    def __init__(self, end: int, act: Callable[[], None]) -> None:
        self._left, self._act = end, act
        self.over = False

    def pass_by(self) -> None:
        self._left -= 1
        if not self._left:
            self.over = True
            self._act()


@contextlib.contextmanager
def watched(moments: Moments) -> Iterator[None]:
    """Calls that look at paths, or open them, are moments."""
    counting = True

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal counting
            if counting:
                counting = False
                moments.pass_by()
                counting = True
            return real(*arguments, **options)

        return call

    with contextlib.ExitStack() as patches:
        for name in ("os.open", "os.stat", "os.lstat", "os.fstat", "os.listdir", "builtins.open", "io.open"):
            module = importlib.import_module(name.partition(".")[0])
            real = getattr(module, name.partition(".")[2])
            patches.enter_context(mock.patch(name, counted(real)))
        yield


def test_what_is_no_folder_of_checkpoints_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """Training would begin again, and save beside what is there."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    save(folder, 3)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "000000000001-0a1b2c3d.manifest").touch()
    itself = ("is itself a checkpoint", "pass the folder above it")
    another = ("0a1b2c3d.manifest", "another store's", "pass the object", "DurableTier", "another folder")
    for path, words in (
        (folder.path / "step-000000000003", (*itself, str(folder))),
        (tmp_path / "dcp", itself),
        (tmp_path / "tier", another),
    ):
        one = CheckpointFolder(path)
        with refused(CheckpointMismatch, str(path), *words):
            one.newest()
        with refused(CheckpointMismatch, str(path), *words):
            one.prepare(4, facts(4))


def test_another_jobs_save_in_flight_is_left_alone(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    save(folder, 3)
    token = folder.prepare(4, facts(4))
    with refused(CheckpointMismatch, "another training"):
        folder.prepare(5, facts(5, "two"))
    assert (folder.path / token).is_dir()


def test_a_folder_is_of_one_training(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.newest() is None and folder.finished("job") is None
    save(folder, 3)
    assert folder.prepare(3, facts(3)) == ""
    with pytest.raises(CheckpointMismatch, match="another training"):
        folder.prepare(4, facts(4, "two"))
    with pytest.raises(CheckpointMismatch, match="stands at step 2"):
        folder.prepare(2, facts(2))
    folder.finish("job", 3)
    assert folder.finished("job") and folder.finished("other") is None
    (folder.path / "step-000000000003").rename(folder.path / "step-000000000007")
    with pytest.raises(CheckpointFailed, match="that of step 3.*move this folder away"):
        folder.newest()
    (folder.path / "step-000000000007" / "ecemb.json").write_text("{")
    with pytest.raises(CheckpointFailed, match="is damaged.*move this folder away"):
        folder.newest()


@pytest.mark.parametrize("gone", ["ecemb.json", "ecemb-index.json", ".metadata", "__0_0.distcp"])
def test_a_checkpoint_that_lacks_a_file_is_named_with_the_file(gone: str, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    save(folder, 1)
    save(folder, 2)
    whole = tmp_path / "checkpoints" / "step-000000000002"
    missing = next(one for one in whole.iterdir() if one.name == gone or one.name.endswith(gone))
    missing.unlink()
    with pytest.raises(
        CheckpointFailed, match=rf"{whole.name} is damaged \({re.escape(missing.name)} is missing"
    ):
        load(folder)
    whole.rename(tmp_path / "away")
    assert load(folder)[0] == 1


def test_a_step_that_is_saved_again_is_another_checkpoint(tmp_path: Path) -> None:
    saves: set[str] = set()
    for number in range(2):
        folder = CheckpointFolder(tmp_path / f"{number}")
        save(folder, 1)
        stored = folder.newest()
        assert stored is not None
        saves.add(stored.facts["save"])
    assert len(saves) == 2


def newest_or_none(path: Path) -> Stored | None:
    """The newest checkpoint; None if it is damaged."""
    with contextlib.suppress(CheckpointFailed):
        return CheckpointFolder(path).newest()
    return None


@pytest.mark.parametrize("name", FILES)
def test_no_changed_bit_is_read(name: str, tmp_path: Path, seed: int) -> None:
    """Any bit of any file; of facts, whose text may vary, the values are the same, or they are refused."""
    save(CheckpointFolder(tmp_path), 3)
    inside = tmp_path / "step-000000000003"
    good, stored = (inside / name).read_bytes(), CheckpointFolder(tmp_path).newest()
    assert stored is not None and {path.name for path in inside.iterdir()} == set(FILES)
    draw = random.Random(seed)
    for bit in draw.sample(range(8 * len(good)), 200):
        content = bytearray(good)
        content[bit // 8] ^= 1 << bit % 8
        (inside / name).write_bytes(content)
        if name == "ecemb.json" and newest_or_none(tmp_path) == stored:
            continue
        with refused(CheckpointFailed, str(inside), "is damaged", name, "move this folder away"):
            load(CheckpointFolder(tmp_path))
    (inside / name).write_bytes(good)
    assert torch.equal(load(CheckpointFolder(tmp_path))[1], rows(3))


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_size_is_not_read(name: str, tmp_path: Path) -> None:
    save(CheckpointFolder(tmp_path), 3)
    path = tmp_path / "step-000000000003" / name
    good = path.read_bytes()
    for content in (good[:-1], good[: len(good) // 2], b"", good + b"x"):
        path.write_bytes(content)
        with refused(CheckpointFailed, "is damaged", name, "move this folder away"):
            load(CheckpointFolder(tmp_path))


@contextlib.contextmanager
def opened() -> Iterator[list[str]]:
    """The names of the files and folders that are opened, in order."""
    names: list[str] = []
    real = os.open

    def open_(path: str, *arguments: Any, **options: Any) -> int:
        names.append(os.path.basename(path))
        return real(path, *arguments, **options)

    with mock.patch("os.open", open_):
        yield names


def test_each_rank_opens_the_files_that_it_reads_and_rank_0_all_once(tmp_path: Path) -> None:
    """Else all ranks open the files of all ranks: their square."""
    save(CheckpointFolder(tmp_path), 3)
    for rank, mine in ((0, ["__0_0.distcp"]), (1, ["__1_0.distcp"])):
        folder, found = CheckpointFolder(tmp_path), torch.full((ROWS, 3), -1.0)
        one_tells(folder, rank)
        stored = folder.newest()
        assert stored is not None
        run = slice(0, 2) if rank == 0 else slice(2, ROWS)
        for call in range(3):
            with opened() as names:
                folder.read(stored, [Piece("t", (ROWS, 3), run.start, found[run])])
            inside = [name for name in names if name in FILES]
            if call:
                assert inside == mine
            else:
                assert inside.count("ecemb-index.json") == 1
                assert inside.count(".metadata") == (rank == 0)
                assert {name for name in inside if name.endswith("distcp")} == (
                    {*mine, "__1_0.distcp"} if rank == 0 else set(mine)
                )
        assert torch.equal(found[run], rows(3)[run])


@pytest.mark.parametrize("name", FILES)
def test_a_rank_that_does_not_tell_refuses_what_it_reads(name: str, tmp_path: Path) -> None:
    """Rank 0 refuses the others for it."""
    save(CheckpointFolder(tmp_path), 3)
    path = tmp_path / "step-000000000003" / name
    path.write_bytes(path.read_bytes() + b"x")
    folder, found = CheckpointFolder(tmp_path), torch.full((ROWS, 3), -1.0)
    one_tells(folder, 1)
    read = name not in (".metadata", "__0_0.distcp")
    with refused(CheckpointFailed, "is damaged", name) if read else contextlib.nullcontext():
        stored = folder.newest()
        assert stored is not None
        folder.read(stored, [Piece("t", (ROWS, 3), 2, found[2:])])
        assert torch.equal(found[2:], rows(3)[2:])
    with refused(CheckpointFailed, "is damaged", name):
        load(CheckpointFolder(tmp_path))


def test_a_relative_path_without_a_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with refused(ConfigurationError, "'checkpoints' is a relative path", "pass an absolute path"):
        CheckpointFolder("checkpoints")
    assert CheckpointFolder(tmp_path / "checkpoints").newest() is None


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("s3://bucket/job", "is a URL"),
        (Path("s3://bucket/job"), "is a URL"),
        ("file:///tmp/job", "is a URL"),
        ("~/job", "expanduser"),
        ("", "is no path"),
        ("a\0b", "is no path"),
    ],
)
def test_a_path_that_names_another_folder_than_it_looks_like_is_refused(
    path: str | Path, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(ConfigurationError, found, "pass"):
        CheckpointFolder(path)
    assert CheckpointFolder("./~").path == tmp_path / "~" and CheckpointFolder("a:b").path == tmp_path / "a:b"


def test_a_damage_after_the_first_read_is_found(tmp_path: Path) -> None:
    """A rank reads piece by piece: each is verified when it is read, and nothing of a bad one is used."""
    folder = CheckpointFolder(tmp_path)
    save(folder, 3)
    load(folder)
    path = tmp_path / "step-000000000003" / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(rows(3)[4].numpy().tobytes())] ^= 1
    path.write_bytes(content)
    stored = folder.newest()
    assert stored is not None
    found = torch.full((ROWS, 3), -1.0)
    expected = stored.facts["files"]["__1_0.distcp"][1]
    with refused(CheckpointFailed, "__1_0.distcp", "checksum (crc32)", f"{expected} was written"):
        folder.read(stored, [Piece("t", (ROWS, 3), 2, found[2:])])
    assert (found == -1).all()
    folder.read(stored, [Piece("t", (ROWS, 3), 0, found[:2])])
    assert torch.equal(found[:2], rows(3)[:2])


def test_checksums_are_those_that_other_programs_compute(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 3)
    stored = folder.newest()
    assert stored is not None
    inside = tmp_path / stored.name
    contents = {path.name: path.read_bytes() for path in inside.iterdir() if path.name != "ecemb.json"}
    assert stored.facts["files"] == {
        name: [len(content), zlib.crc32(content)] for name, content in contents.items()
    }


def older(folder: Path, step: int) -> Path:
    """Makes a checkpoint one of an ecemb that wrote neither an index nor checksums."""
    inside = folder / f"step-{step:012d}"
    (inside / "ecemb-index.json").unlink()
    (inside / "ecemb.json").write_text(json.dumps(facts(step) | {"save": "0123456789abcdef"}))
    return inside


def test_a_checkpoint_without_checksums_is_read_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(CheckpointFolder(tmp_path), 3)
    older(tmp_path, 3)
    folder = CheckpointFolder(tmp_path)
    for _ in range(2):
        step, found = load(folder)
        assert step == 3 and torch.equal(found, rows(3))
    [record] = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "step-000000000003 has no checksums" in record.getMessage()
    caplog.clear()
    other = CheckpointFolder(tmp_path)
    other.tells = False
    load(other)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    save(folder, 4)
    assert torch.equal(load(folder)[1], rows(4))


def test_a_checkpoint_without_checksums_runs_nothing(tmp_path: Path) -> None:
    save(CheckpointFolder(tmp_path), 3)
    inside = older(tmp_path, 3)
    good = (inside / ".metadata").read_bytes()
    mark = tmp_path / "was here"
    for evil in (Evil(mark), {"state_dict_metadata": Evil(mark)}, torch.nn.Linear(1, 1), subprocess.Popen):
        (inside / ".metadata").write_bytes(pickle.dumps(evil))
        with refused(CheckpointFailed, "is damaged", "index"):
            load(CheckpointFolder(tmp_path))
    assert not mark.exists()
    for content in (b"", good[:-5], b"x" + good, pickle.dumps(3)):
        (inside / ".metadata").write_bytes(content)
        with refused(CheckpointFailed, "is damaged", "move this folder away"):
            load(CheckpointFolder(tmp_path))
    (inside / ".metadata").write_bytes(good)
    (inside / "__1_0.distcp").write_bytes((inside / "__1_0.distcp").read_bytes()[:-9])
    with refused(CheckpointFailed, "is damaged", "__1_0.distcp", "rows were written up to byte"):
        load(CheckpointFolder(tmp_path))


@pytest.mark.parametrize("is_older", [False, True])
def test_nothing_is_unpickled(tmp_path: Path, is_older: bool) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 3)
    if is_older:
        older(tmp_path, 3)
    with (
        mock.patch("pickle.Unpickler", None),
        mock.patch("pickle.load", None),
        mock.patch("torch.load", None),
    ):
        assert torch.equal(load(folder)[1], rows(3))


def test_plain_dcp_reads_a_checkpoint(tmp_path: Path) -> None:
    save(CheckpointFolder(tmp_path), 3)
    found = {"t": torch.zeros(ROWS, 3)}
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(found, checkpoint_id=tmp_path / "step-000000000003", no_dist=True)
    assert torch.equal(found["t"], rows(3))
