"""A rank's file: it outlives the process, and belongs to one user."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from baselines.float_parity.memory import Memory

COLUMNS = {"a": torch.zeros(3, 2), "b": torch.zeros(3, dtype=torch.float64), "none": torch.zeros(0, 4)}
FLOAT32, FLOAT64 = np.dtype("float32"), np.dtype("float64")


def test_what_is_written_is_there_in_the_next_life(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    memory = Memory(path, COLUMNS, [5, 0], FLOAT32)
    assert memory.step is None and path.stat().st_mode & 0o777 == 0o600
    memory.columns["a"][:] = 7
    assert Memory(path, COLUMNS, [5, 0], FLOAT32).columns["a"].sum() == 0  # it was never whole
    memory = Memory(path, COLUMNS, [5, 0], FLOAT32)
    memory.begin()
    memory.columns["a"][1] = 2
    memory.columns["b"][2] = 0.1
    memory.parity[0][4] = 3
    memory.end(6)
    again = Memory(path, COLUMNS, [5, 0], FLOAT32)
    assert again.step == 6 and not again.is_torn
    assert again.columns["a"].tolist() == [[0, 0], [2, 2], [0, 0]]
    assert again.columns["b"].tolist() == [0, 0, 0.1]
    assert again.columns["none"].shape == (0, 4)
    assert [row.tolist() for row in again.parity] == [[0, 0, 0, 0, 3], []]
    again.begin()  # and is killed
    assert Memory(path, COLUMNS, [5, 0], FLOAT32).is_torn
    again.end(7)
    again.unmake(7)  # and is killed
    last = Memory(path, COLUMNS, [5, 0], FLOAT32)
    assert (last.step, last.is_torn, last.is_unmade) == (7, False, True)
    last.end(7)
    assert not Memory(path, COLUMNS, [5, 0], FLOAT32).is_unmade


@pytest.mark.parametrize(
    ("columns", "lengths", "dtype"),
    [({"a": torch.zeros(3, 2)}, [5, 0], FLOAT32), (COLUMNS, [5, 1], FLOAT32), (COLUMNS, [5, 0], FLOAT64)],
)
def test_another_jobs_file_is_refused(
    columns: dict[str, torch.Tensor], lengths: list[int], dtype: np.dtype, tmp_path: Path
) -> None:
    Memory(tmp_path / "file", COLUMNS, [5, 0], FLOAT32).end(1)
    with pytest.raises(ValueError, match="a folder of its own"):
        Memory(tmp_path / "file", columns, lengths, dtype)
    with pytest.raises(ValueError, match="other ranks"):
        Memory(tmp_path / "file", COLUMNS, [5, 0], FLOAT32, "rank 1 of 4, (3, 2)")
