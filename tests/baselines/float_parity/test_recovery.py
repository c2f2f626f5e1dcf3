"""Float parity on real ranks: one is killed with its memory, at a harmless moment and at a bad one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ecemb
from baselines.float_parity import FloatParity
from baselines.float_parity.live import LiveParity
from baselines.method import Training
from bench.methods.life import Failure
from support.guarded_training import Training as Script
from support.guarded_training import bags
from support.processes import RankFailed, run_ranks

RANKS, STEPS, CUT = 3, 7, 4
"""Rank 1 dies in step `CUT`."""
MADE = {
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
    "sparse-adam": lambda weights: torch.optim.SparseAdam(weights, lr=0.1),
}

Numbers = dict[str, np.ndarray]


class Life:
    """One life of a rank: a script, and the method that keeps it."""

    def __init__(
        self, folder: Path, n: int = 3, k: int = 2, dtype: str = "float32", name: str = "adagrad"
    ) -> None:
        self.folder, self.rank = folder, dist.get_rank()
        self.script = bags(device="cpu")
        self.script.sparse = MADE[name](self.script.weights)
        self.method = FloatParity(folder / str(self.rank), ecemb.Code(n, k), dtype=dtype)
        script = self.script
        self.first = self.method.prepare(
            Training(script.model, [script.sparse, script.dense], {}, [script.progress])
        )

    def rows(self) -> dict[str, Tensor]:
        return rows(self.script)

    def train(self, stop: int = STEPS) -> None:
        for _ in range(self.first, stop):
            with self.method.step():
                self.script.body()
        self.first = stop

    def note(self, when: str) -> None:
        """Rank 1's rows as they are now, for who rebuilds them."""
        if self.rank == 1:
            torch.save(self.rows(), self.folder / f"{when}.pt")

    def error(self) -> float:
        """Of rank 1's rows, against what was noted before the step or after it: what is nearer."""
        if self.rank != 1:
            return 0.0
        notes = [torch.load(path) for path in self.folder.glob("*.pt")]
        return min(largest(self.rows(), note) for note in notes)

    def die(self, *, with_memory: bool = True) -> None:
        """Rank 1's end."""
        Failure(CUT, (1,), with_memory=with_memory).strike(self.rank, self.method)


def largest(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Relative error of a table."""
    return max(
        float((found[key] - value).norm() / value.norm()) for key, value in true.items() if value.numel()
    )


def rows(script: Script) -> dict[str, Tensor]:
    found = {f"table {i}": weight.detach().clone() for i, weight in enumerate(script.weights)}
    for i, weight in enumerate(script.weights):
        for name, value in script.sparse.state[weight].items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                found[f"table {i} {name}"] = value.clone()
    return found


def numbers(life: Life) -> Numbers:
    """Its rows, in a form that goes through a pipe after the process has ended."""
    return {key: value.numpy() for key, value in life.rows().items()}


def undisturbed(folder: Path, options: dict[str, Any]) -> tuple[Numbers, dict[str, str]]:
    life = Life(folder, **options)
    assert life.first == 0
    life.train()
    life.method.close()
    return numbers(life), life.script.snapshot()


def killed(folder: Path, options: dict[str, Any], with_memory: bool) -> None:
    life = Life(folder, **options)
    life.train(CUT)
    life.note("before")
    with life.method.step():
        life.script.body()
        life.note("after")
        life.die(with_memory=with_memory)


def started_again(folder: Path, options: dict[str, Any]) -> tuple[float, Numbers, dict[str, str]]:
    life = Life(folder, **options)
    assert life.first == CUT
    error = life.error()
    life.train()
    costs = life.method.costs()
    assert costs.stalled_s > 0 and costs.sent_bytes > 0 and costs.memory_bytes > 0 and not costs.written_bytes
    life.method.close()
    return error, numbers(life), life.script.snapshot()


def dies(function: Callable[..., None], folder: Path, *args: Any) -> None:
    with pytest.raises(RankFailed):
        run_ranks(RANKS, function, folder, *args)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [({"name": "adagrad"}, 1e-5), ({"n": 3, "k": 1, "dtype": "float64", "name": "sparse-adam"}, 1e-12)],
)
def test_lost_rows_come_back_close(options: dict[str, Any], allowed: float, tmp_path: Path) -> None:
    truth = run_ranks(RANKS, undisturbed, tmp_path / "undisturbed", options)
    dies(killed, tmp_path, options, True)
    for (error, found, snapshot), (expected, snapshot_expected) in zip(
        run_ranks(RANKS, started_again, tmp_path, options), truth, strict=True
    ):
        assert error < allowed
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, rtol=1e-4, atol=1e-5)
        for name in ("torch", "numpy", "python"):
            assert snapshot[name] == snapshot_expected[name]
    assert not [path for path in tmp_path.glob("*/*") if path.is_file()]


def started_with_worse_rounding(folder: Path) -> tuple[Numbers, Numbers]:
    rebuild = LiveParity.rebuild

    def rounded(live: LiveParity, lost: list[int]) -> int:
        poisoned = rebuild(live, lost)
        for _, sums in live.rows if dist.get_rank() in lost else []:
            sums -= 10.0
        return poisoned

    LiveParity.rebuild = rounded
    life = Life(folder)
    begun = numbers(life)
    life.train()
    return begun, numbers(life)


def test_rebuilt_sums_of_squares_are_not_negative(tmp_path: Path) -> None:
    dies(killed, tmp_path, {}, True)
    _, (begun, ended), _ = run_ranks(RANKS, started_with_worse_rounding, tmp_path)
    assert begun["table 0 sum"].min() == 0
    assert all(np.isfinite(values).all() for values in ended.values())


def test_without_lost_memory_all_is_bit_identical(tmp_path: Path) -> None:
    truth = run_ranks(RANKS, undisturbed, tmp_path / "undisturbed", {})
    dies(killed, tmp_path, {}, False)
    again = run_ranks(RANKS, started_again, tmp_path, {})
    assert [snapshot for _, _, snapshot in again] == [snapshot for _, snapshot in truth]


def killed_halfway(folder: Path) -> None:
    """Rank 1 tells rank 0 of the step, and dies when that has taken it over, before it tells rank 2."""
    life = Life(folder)
    life.train(CUT)
    life.note("before")
    send = dist.isend

    def isend(tensor: Tensor, **how: Any) -> Any:
        if how["group_dst"] == 2:
            deadline = time.monotonic() + 300
            while step_of(folder / "0") == CUT and time.monotonic() < deadline:
                os.sched_yield()
            life.note("after")
            life.die()
        return send(tensor, **how)

    if life.rank == 1:
        dist.isend = isend
    life.train(CUT + 2)


def step_of(folder: Path) -> int:
    """That comes next, by the head of a rank's file."""
    return int(np.fromfile(folder / "rows-and-parity", np.int64, 2)[1])


def test_there_is_no_transaction(tmp_path: Path) -> None:
    dies(killed_halfway, tmp_path)
    assert (step_of(tmp_path / "0"), step_of(tmp_path / "2")) == (CUT + 1, CUT)
    errors = [error for error, _, _ in run_ranks(RANKS, started_again, tmp_path, {})]
    assert errors[1] > 1e-3  # whole updates of other ranks' rows


def dies_again(folder: Path, with_memory: bool) -> None:
    """Rank 1 dies in its recovery, when all sums have to be made again."""
    encode = LiveParity.encode

    def cut_off(self: LiveParity, keepers: list[int]) -> None:
        if dist.get_rank() == 1:
            assert keepers == [0, 1, 2]
            Failure(CUT, (1,), with_memory=with_memory).strike(1, FloatParity(folder / "1", ecemb.Code(3, 2)))
        encode(self, keepers)

    LiveParity.encode = cut_off
    Life(folder)


def test_sums_that_are_being_made_anew_rebuild_nothing(tmp_path: Path) -> None:
    dies(killed_halfway, tmp_path)
    dies(dies_again, tmp_path, False)
    dies(killed_now, tmp_path)  # what it had rebuilt was kept, and all sums are right again
    errors = [error for error, _, _ in run_ranks(RANKS, started_again, tmp_path, {})]
    assert errors[1] < 1e-5
    dies(killed_halfway, tmp_path / "once more")
    dies(dies_again, tmp_path / "once more", True)
    with pytest.raises(RankFailed, match=r"ParityLost.*ranks \[1\] are lost, and parity of ranks \[0, 2\]"):
        run_ranks(RANKS, started_again, tmp_path / "once more", {})


def killed_now(folder: Path) -> None:
    """Rank 1 is lost when it has just begun to train again."""
    life = Life(folder)
    assert life.first == CUT
    if life.rank == 1:
        for note in folder.glob("*.pt"):
            note.unlink()
    life.note("now")
    dist.barrier()
    life.die()


def test_nothing_trained_is_a_start_from_nothing(tmp_path: Path) -> None:
    truth = run_ranks(RANKS, undisturbed, tmp_path / "undisturbed", {})
    dies(killed_at_first, tmp_path)
    assert [snapshot for _, snapshot in run_ranks(RANKS, undisturbed, tmp_path, {})] == [
        snapshot for _, snapshot in truth
    ]


def killed_at_first(folder: Path) -> None:
    """Rank 1 is lost before the first step's end."""
    life = Life(folder)
    with life.method.step():
        life.script.body()
        life.die()


def test_too_many_lost_ranks_are_refused(tmp_path: Path) -> None:
    dies(killed, tmp_path, {}, True)
    for path in (tmp_path / "2").iterdir():
        path.unlink()
    for _ in range(2):  # and are not forgotten
        with pytest.raises(RankFailed, match="ParityLost"):
            run_ranks(RANKS, started_again, tmp_path, {})


def mended(folder: Path) -> None:
    """One number of rank 0 is NaN for a step; then rank 1 dies."""
    life = Life(folder)
    users = life.script.model.table["users"]
    good = users.weight.detach().clone()
    bad = good.clone()
    if life.rank == 0:
        bad[0, 1] = torch.nan
    for weight in (bad, good):
        with life.method.step():
            users.load_state_dict({"weight": weight})
    life.first = 2
    life.train(CUT)
    assert all(value.isfinite().all() for value in life.rows().values())
    with life.method.step():
        life.script.body()
        life.die()


def test_one_nan_long_gone_makes_a_loss_final(tmp_path: Path) -> None:
    dies(mended, tmp_path)
    with pytest.raises(RankFailed, match="ParityPoisoned.* 1 rows of ranks \\[1\\]"):
        run_ranks(RANKS, started_again, tmp_path, {})


def test_only_floats_of_two_kinds_are_sums(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float16"):
        FloatParity(tmp_path, ecemb.Code(3, 2), dtype="float16")
