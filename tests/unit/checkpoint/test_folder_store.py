"""A folder of checkpoints: what is there after a kill at any moment, and what is not trusted."""

from __future__ import annotations

import os
import pickle
import random
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor

from ecemb.checkpoint import Piece
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


@pytest.mark.parametrize("gone", ["ecemb.json", ".metadata", "__0_0.distcp"])
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
