"""A rank's saved rows: whatever is killed at any moment, each row is as one save has seen it."""

from __future__ import annotations

import itertools
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from baselines import pace
from baselines.cpr import saved
from baselines.cpr.saved import ROWS, Mark, SavedRank, SavesLost
from support.killed_child import cut_off
from support.processes import DEADLINE_S

NUMBERS = torch.arange(6).reshape(6, 1).expand(6, 3)


def of(step: int) -> dict[str, Tensor]:
    """Rows of a step: each names both, the step and itself."""
    table = 100.0 * step + NUMBERS
    return {"table": table, "sum": table[:, 0], "small": torch.tensor([step])}


def some(step: int, rows: list[int]) -> dict[str, Tensor]:
    numbers, all_ = torch.tensor(rows, dtype=torch.int64), of(step)
    found = {key: all_[key][numbers] for key in ("table", "sum")}
    return {**found, **{f"{ROWS}{key}": numbers for key in found}, "small": all_["small"]}


def rest(step: int) -> dict[str, Tensor]:
    return {"lr": torch.tensor(0.1 * step), "plain": torch.zeros(step + 1, dtype=torch.uint8)}


def steps(rank: SavedRank) -> list[int]:
    """Of each row of the table."""
    rows, _ = rank.load()
    numbers = rows["table"] - NUMBERS
    assert (numbers == numbers[:, :1]).all() and torch.equal(rows["sum"], rows["table"][:, 0])
    return [int(step) // 100 for step in numbers[:, 0]]


def test_rows_come_back_as_they_were_saved_last(tmp_path: Path) -> None:
    rank, other = SavedRank(tmp_path / "files", 0), SavedRank(tmp_path / "files", 1)
    assert (rank.mark(), rank.keys(), rank.stored_bytes) == (None, set(), 0)
    rank.save(of(0), rest(0), Mark(0, 0))
    rank.save_rows(some(1, [0, 4]), rest(1), Mark(1, 0))
    rank.save_rows(some(2, [4, 5]), rest(2), Mark(2, 0))
    rank.save_rows(some(3, []), rest(3), Mark(3, 0))
    assert steps(SavedRank(tmp_path / "files", 0)) == [1, 0, 0, 0, 2, 2]
    rows, found = SavedRank(tmp_path / "files", 0).load()
    assert rows.keys() == rank.keys() == of(0).keys() and rows["small"].tolist() == [3]
    assert found.keys() == rest(3).keys() and torch.equal(found["lr"], rest(3)["lr"])
    assert rank.mark() == Mark(3, 0) and other.mark() is None
    before = rank.written_bytes
    rank.save(of(4), rest(4), Mark(4, 4))
    assert steps(rank) == [4] * 6 and rank.mark() == Mark(4, 4)
    assert rank.stored_bytes == rank.written_bytes - before
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "files").iterdir()} == {0o600}


def test_storage_may_be_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append))
    rank = SavedRank(tmp_path, 0, bytes_per_s=100.0)
    rank.save(of(0), rest(0), Mark(0, 0))
    rank.save_rows(some(1, [0, 4]), rest(1), Mark(1, 0))
    assert sum(slept) == pytest.approx(rank.written_bytes / 100)
    slept.clear()
    rank.load()
    assert slept == [pytest.approx(rank.stored_bytes / 100)]


@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_kill_at_any_moment_leaves_whole_rows(*, whole: bool, tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        rank = SavedRank(folder, 0)
        if whole:
            rank.save(of(1), rest(1), Mark(1, 1))
        else:
            rank.save_rows(some(1, [1, 2]), rest(1), Mark(1, 0))
        rank.close()

    new = [1] * 6 if whole else [0, 1, 1, 0, 0, 0]
    for end in itertools.count(1):
        folder = tmp_path / str(end)
        SavedRank(folder, 0).save(of(0), rest(0), Mark(0, 0))
        killed = cut_off(end, lambda: work(folder), saved)  # noqa: B023
        mark = SavedRank(folder, 0).mark()
        found = steps(SavedRank(folder, 0))
        assert mark is not None and found in ([0] * 6, new)
        assert found == new or mark.step == 0  # rows may be newer than the mark, never older
        _, kept = SavedRank(folder, 0).load()
        assert torch.equal(kept["lr"], rest(mark.step)["lr"])
        SavedRank(folder, 0).save_rows(some(2, [5]), rest(2), Mark(2, 0))
        assert steps(SavedRank(folder, 0)) == [*found[:5], 2]
        assert sorted(path.name for path in folder.iterdir() if path.suffix != ".partial") == [
            "rank-0.rest",
            "rank-0.rows",
        ]
        if not killed:
            assert mark.step == 1 and end > 25
            break


def test_a_kill_while_the_image_changes_leaves_what_was_to_be_changed(tmp_path: Path) -> None:
    for end in itertools.count(1):
        folder = tmp_path / str(end)
        rank = SavedRank(folder, 0)
        rank.save(of(0), rest(0), Mark(0, 0))
        rank._write(rank._record, some(1, [1, 2]))
        killed = cut_off(end, SavedRank(folder, 0).close, saved)
        assert killed or not rank._record.exists()
        assert steps(SavedRank(folder, 0)) == [0, 1, 1, 0, 0, 0]
        if not killed:
            assert end > 10
            break


def test_a_save_goes_on_beside_the_training_and_the_next_one_raises_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = SavedRank(tmp_path, 0)
    rank.save(of(0), rest(0), Mark(0, 0))
    changing, go_on = Event(), Event()

    def wait(*both: Any) -> None:
        changing.set()
        assert go_on.wait(DEADLINE_S)
        raise OSError("the storage is full")

    with monkeypatch.context() as patched:
        patched.setattr(saved, "put_on", wait)
        rank.save_rows(some(1, [1, 2]), rest(1), Mark(1, 0))
        assert changing.wait(DEADLINE_S) and rank.mark() == Mark(1, 0)  # and the image is as it was
        go_on.set()
        with pytest.raises(OSError, match="the storage is full"):
            rank.save_rows(some(2, [1]), rest(2), Mark(2, 0))
    assert steps(rank) == [0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("kind", ["rows", "rest"])
def test_damaged_files_are_refused(kind: str, tmp_path: Path) -> None:
    SavedRank(tmp_path, 0).save(of(0), rest(0), Mark(0, 0))
    path = tmp_path / f"rank-0.{kind}"
    whole = path.read_bytes()
    for damaged in (b"", whole[:10], whole[:-70], b"x" + whole[1:], whole[:30] + b"x" + whole[31:]):
        path.write_bytes(damaged)
        with pytest.raises(SavesLost, match=rf"{path.name} can't be read.*put it back"):
            SavedRank(tmp_path, 0).load()
    path.write_bytes(whole)
    assert steps(SavedRank(tmp_path, 0)) == [0] * 6


def test_half_of_a_record_is_written_again(tmp_path: Path) -> None:
    rank = SavedRank(tmp_path, 0)
    rank.save(of(0), rest(0), Mark(0, 0))
    rank._write(rank._record, some(1, [1, 2]))
    torn = saved.packing.unpack(saved.mapped(rank._image))
    torn["table"][1, :2] = some(1, [1])["table"][0, :2]  # killed within a row
    assert steps(SavedRank(tmp_path, 0)) == [0, 1, 1, 0, 0, 0]
    assert not rank._record.exists()
