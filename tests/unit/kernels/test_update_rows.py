"""Rows that change with a journal: the process is killed anywhere, and what it leaves can be finished."""

from __future__ import annotations

import mmap
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ecemb.kernels import contract
from ecemb.kernels.reference import product

TESTS = Path(__file__).resolve().parents[2]
ROWS, WIDTH, WEIGHT = 3000, 33, 7
LABEL, COMMITTED, MARK, WORDS = range(4)
SIZE = 8 * (WORDS + 2 * WIDTH + ROWS * WIDTH)


def parts(memory: mmap.mmap) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The words, the places for old rows, and the rows, in memory that outlives a process."""
    words = np.frombuffer(memory, np.uint64)
    saved = words[WORDS : WORDS + 2 * WIDTH].reshape(2, WIDTH)
    return words[:WORDS].view(np.int64), saved, words[WORDS + 2 * WIDTH :]


def deltas(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    offsets = WIDTH * rng.permutation(ROWS)
    return offsets, np.frombuffer(rng.bytes(8 * ROWS * WIDTH), np.uint64).reshape(ROWS, WIDTH)


def change(path: str, seed: int) -> None:
    """Changes all rows, again and again, as `RankMemory.apply` does."""
    with open(path, "r+b") as file:
        words, saved, rows = parts(mmap.mmap(file.fileno(), SIZE))
    offsets, src = deltas(seed)
    kernels = contract.get_kernels("cpu")
    sys.stdout.write("changes\n")
    sys.stdout.flush()
    while True:
        words[MARK] = -1
        words[LABEL] += 1
        kernels.update_rows_(rows, offsets, src, WEIGHT, saved, words[MARK : MARK + 1])
        words[COMMITTED] = words[LABEL]


@pytest.mark.skipif(sys.platform != "linux", reason="kills with SIGKILL")
def test_what_a_killed_process_leaves_can_be_finished(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "memory"
    offsets, src = deltas(seed)
    weighted = product(WEIGHT, src)
    cut_off = 0
    while cut_off < 4:
        path.write_bytes(bytes(SIZE))
        code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); "
        code += f"from unit.kernels.test_update_rows import change; change({str(path)!r}, {seed})"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stdout.readline() == "changes\n"
            time.sleep(rng.uniform(0, 0.05))
            child.kill()
        with path.open("r+b") as file:
            words, saved, flat = parts(mmap.mmap(file.fileno(), SIZE))
        label, committed, mark = words.tolist()
        rows = flat.reshape(ROWS, WIDTH)[offsets // WIDTH]
        before, after = (weighted * np.uint64(turn % 2) for turn in (label - 1, label))
        if committed == label:
            assert np.array_equal(rows, after)
            continue
        assert committed == label - 1
        cut_off += 1
        if mark >= 0:
            assert np.array_equal(saved[mark % 2], before[mark])
        assert np.array_equal(rows[: max(0, mark)], after[: max(0, mark)])
        assert np.array_equal(rows[mark + 1 :], before[mark + 1 :])
