"""A folder of checkpoints: what is there after a kill at any moment, and what is not trusted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import random
import re
import subprocess
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor

from ecemb.checkpoint import Piece, Stored
from ecemb.checkpoint.folder_store import CheckpointFolder
from ecemb.errors import CheckpointFailed, CheckpointInsecure, CheckpointMismatch
from support.killed_child import cut_off
from support.refusals import refused

RANKS, ROWS = 2, 5


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


def test_after_a_kill_at_any_moment_the_newest_is_complete(tmp_path: Path, seed: int) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
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
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "was here"),))

    folder = CheckpointFolder(tmp_path / "checkpoints")
    save(folder, 3)
    inside = folder.path / "step-000000000003"
    (inside / ".metadata").write_bytes(pickle.dumps(Evil()))
    for path in (folder.path, inside, inside / ".metadata", inside / "ecemb.json", inside / "__1_0.distcp"):
        mode = path.stat().st_mode
        for bit in (0o020, 0o002):
            path.chmod(mode | bit)
            with pytest.raises(CheckpointInsecure, match="others can write.*chmod -R go-w"):
                load(folder)
        path.chmod(mode)
        away = path.rename(path.with_name("away"))
        path.symlink_to(away)
        with pytest.raises(CheckpointInsecure, match="symbolic link"):
            load(folder)
        path.unlink()
        away.rename(path)
    real = os.lstat

    def of_another(path: Any, **options: Any) -> os.stat_result:
        fields = list(real(path, **options))
        fields[4] = 4711 if str(path).endswith(".metadata") else fields[4]
        return os.stat_result(fields)

    with mock.patch("os.lstat", of_another), pytest.raises(CheckpointInsecure, match="belongs to user 4711"):
        load(folder)
    assert not (tmp_path / "was here").exists()


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


FILES = ("ecemb.json", "ecemb-index.json", ".metadata", "__0_0.distcp", "__1_0.distcp")


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
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "was here"),))

    save(CheckpointFolder(tmp_path), 3)
    inside = older(tmp_path, 3)
    good = (inside / ".metadata").read_bytes()
    for evil in (Evil(), {"state_dict_metadata": Evil()}, torch.nn.Linear(1, 1), subprocess.Popen):
        (inside / ".metadata").write_bytes(pickle.dumps(evil))
        with refused(CheckpointFailed, "is damaged", "doesn't belong into DCP's index"):
            load(CheckpointFolder(tmp_path))
    assert not (tmp_path / "was here").exists()
    for content in (b"", good[:-5], b"x" + good, pickle.dumps(3)):
        (inside / ".metadata").write_bytes(content)
        with refused(CheckpointFailed, "is damaged", "move this folder away"):
            load(CheckpointFolder(tmp_path))
    (inside / ".metadata").write_bytes(good)
    (inside / "__1_0.distcp").write_bytes((inside / "__1_0.distcp").read_bytes()[:-9])
    with refused(CheckpointFailed, "is damaged", "__1_0.distcp", "rows were written up to byte"):
        load(CheckpointFolder(tmp_path))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 3)
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
