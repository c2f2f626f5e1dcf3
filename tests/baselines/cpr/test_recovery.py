"""Partial recovery: what survives, what comes back as it was saved, and what is counted as lost.

Costs and promises of all variants, on real ranks, are in tests/contracts/test_methods.py.
"""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecemb
from baselines import slots
from baselines.cpr import living, recovery, saved, saving
from baselines.cpr.priority import PRIORITIES
from baselines.cpr.recovery import PartialRecovery
from baselines.cpr.saved import Mark, SavedRank
from baselines.method import Training
from bench.methods.ledger import account
from bench.methods.life import Failure, live
from support.guarded_training import bags
from support.killed_child import cut_off
from support.one_rank_training import QUIET, OnBags, OnTorchRec, equal, lose
from support.processes import RankFailed, launch
from support.torchrec.models import one_rank

pytestmark = QUIET
VARIANTS = (None, *PRIORITIES)
every_variant = pytest.mark.parametrize("priority", VARIANTS)
on_both = pytest.mark.parametrize("make", [OnBags, OnTorchRec])


@pytest.fixture
def _alone() -> Iterator[None]:
    with one_rank():
        yield


def trained(
    folder: Path, script: Any, until: int, priority: str | None = None, *, every: int = 4
) -> tuple[PartialRecovery, int]:
    """One life."""
    method = PartialRecovery(folder / "files", folder / "memory", every=every, priority=priority)
    begin = method.prepare(script.training)
    for _ in range(begin, until):
        with method.step():
            script.step()
    return method, begin


@pytest.mark.usefixtures("_alone")
@every_variant
@on_both
def test_a_survivor_goes_on_bit_by_bit(make: Any, priority: str | None, tmp_path: Path) -> None:
    script, twin = make(), make()
    torch.manual_seed(5)
    for _ in range(9):
        twin.step()
    torch.manual_seed(5)
    trained(tmp_path, script, 6, priority)
    again = make()
    again.step()  # all of it is overwritten
    method, begin = trained(tmp_path, again, 9, priority)
    assert begin == 6 and equal(again.end(), twin.end())
    assert method.steps_lost == method.costs().samples_lost == 0
    method.close()
    assert not [path for path in (tmp_path / "memory").rglob("*") if path.is_file()]


@pytest.mark.usefixtures("_alone")
@on_both
def test_tables_on_a_device_go_on_from_their_images(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of the CPU stand for those of a device."""
    for module in (living, recovery):
        monkeypatch.setattr(module, "is_on_device", lambda tensor: True)
    script, twin = make(), make()
    torch.manual_seed(5)
    for _ in range(9):
        twin.step()
    torch.manual_seed(5)
    method, _ = trained(tmp_path, script, 6)
    assert method.costs().memory_bytes > sum(path.stat().st_size for path in method.memory()) / 2
    again = make()
    again.step()
    method, begin = trained(tmp_path, again, 9)
    assert begin == 6 and equal(again.end(), twin.end())
    method.close()
    assert not [path for path in (tmp_path / "memory").rglob("*") if path.is_file()]


@pytest.mark.usefixtures("_alone")
def test_dense_state_is_not_copied_in_a_step(tmp_path: Path) -> None:
    script = OnBags()
    wide = nn.Linear(1000, 50)
    script.model.add_module("wide", wide)
    method, _ = trained(tmp_path, script, 2)
    assert method.costs().memory_bytes < wide.weight.nbytes / 2
    with method.step(), torch.no_grad():
        wide.weight.fill_(7)
        script.model.head[1].running_mean = torch.full((2,), 5.0)  # another tensor: it is moved as well
    script.model.head[1].running_mean.add_(1)
    again = OnBags()
    again.model.add_module("wide", nn.Linear(1000, 50))
    assert trained(tmp_path, again, 0)[1] == 3
    assert torch.equal(again.model.wide.weight, wide.weight) and bool((wide.weight == 7).all())
    assert again.model.head[1].running_mean.tolist() == [6, 6]
    files = (tmp_path / "memory").rglob("*.rows")
    next(path for path in files if path.stat().st_size == wide.weight.nbytes).unlink()
    last = OnBags()
    last.model.add_module("wide", nn.Linear(1000, 50))
    assert trained(tmp_path, last, 0)[1] == 0  # its memory isn't whole, and it has failed


@pytest.mark.usefixtures("_alone")
@on_both
def test_with_nobody_left_all_is_as_saved_last(make: Any, tmp_path: Path) -> None:
    script = make()
    method, _ = trained(tmp_path, script, 4)
    saved = script.end()
    with method.step():
        script.step()
    lose(method)
    again = make()
    method, begin = trained(tmp_path, again, 0)
    assert begin == 4 and equal(again.end(), saved)
    with method.step():
        again.step()


@pytest.mark.usefixtures("_alone")
@every_variant
def test_rows_are_as_saved_before_their_optimizer_made_state(priority: str | None, tmp_path: Path) -> None:
    script = OnBags()
    first = [one.detach().clone() for one in (script.by_hand.weight, script.model.user.weight)]
    method, _ = trained(tmp_path, script, 3, priority, every=100)  # SparseAdam's state is not saved yet
    lose(method)
    again = OnBags()
    _, begin = trained(tmp_path, again, 0, priority, every=100)
    assert begin == 0 and not again.late.state[again.by_hand.weight]
    assert torch.equal(again.by_hand.weight, first[0]) and torch.equal(again.model.user.weight, first[1])
    method, _ = trained(tmp_path, again, 20, priority, every=8)
    lose(method)
    last = OnBags()
    assert trained(tmp_path, last, 0, priority, every=8)[1] in (16, 20)
    assert last.late.state[last.by_hand.weight]["exp_avg"].any()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("priority", ["mfu", "scar"])
def test_priorities_outlive_the_process(priority: str, tmp_path: Path) -> None:
    def saved() -> Tensor:
        return SavedRank(tmp_path / "files", 0).load()[0]["table/user/weight"].clone()

    trained(tmp_path, OnBags(), 15, priority, every=64)  # which saves each 8 steps, first all of it
    before = saved()
    again = OnBags()
    method, begin = trained(tmp_path, again, 15, priority, every=64)
    assert begin == 15
    user = again.model.user.weight.detach().clone()
    moved = [int(row) for row in (user != before).any(1).nonzero().reshape(-1)]
    with method.step():
        pass  # a step that changes nothing
    after = saved()
    changed = [int(row) for row in (after != before).any(1).nonzero().reshape(-1)]
    assert len(changed) == 1 and changed[0] in moved  # r N, as if it had never been restarted
    assert torch.equal(after[changed], user[changed])


def taken(script: OnBags) -> tuple[list[Tensor], list[Any]]:
    """Copies of its rows, and of some of the rest."""
    rows = [
        script.model.user.weight,
        script.by_hand.weight,
        script.adagrad.state[script.model.user.weight]["sum"],
    ]
    rest = [script.count.steps, torch.get_rng_state(), *script.model.head.state_dict().values()]
    return [one.detach().clone() for one in rows], copy.deepcopy(rest)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("priority", [pytest.param(None, marks=pytest.mark.long), "scar"])
def test_a_kill_at_any_moment_of_a_steps_end(priority: str | None, tmp_path: Path, seed: int) -> None:
    every = 4 if priority is None else 8  # a save after the fourth step
    draw, most = random.Random(seed), 300
    for trial in range(4):
        folder, script = tmp_path / str(trial), OnBags()
        method, _ = trained(folder, script, 3, priority, every=every)
        before = taken(script)
        ending = method.step()
        ending.__enter__()
        script.step()
        after = taken(script)
        end = draw.randrange(1, most)
        if not cut_off(end, lambda: ending.__exit__(None, None, None), recovery, saved, saving, slots):  # noqa: B023
            most = end
        again = OnBags()
        method, begin = trained(folder, again, 0, priority, every=every)
        rows, rest = taken(again)
        assert equal(rows, after[0]) and equal(rest[:2], (before if begin == 3 else after)[1][:2])
        assert equal(rest[2:], after[1][2:])  # dense state is where it was trained, as rows are
        lose(method)
        again = OnBags()
        _, begin = trained(folder, again, 0, priority, every=every)
        rows, rest = taken(again)
        assert begin in ((0, 4) if priority is None else (3, 4)) and rest[0] == begin
        assert priority is not None or begin == 0 or equal(rows, after[0])
        shutil.rmtree(folder)


@pytest.mark.usefixtures("_alone")
def test_who_has_never_saved_saves_at_once(tmp_path: Path) -> None:
    trained(tmp_path, OnBags(), 3, every=100)
    SavedRank(tmp_path / "files", 0)._rest.unlink()  # killed at its first start, before it had saved
    _, begin = trained(tmp_path, OnBags(), 3, every=100)
    assert begin == 3 and SavedRank(tmp_path / "files", 0).mark() == Mark(3, 3)


@pytest.mark.usefixtures("_alone")
def test_it_starts_in_the_middle_of_a_training(tmp_path: Path) -> None:
    trained(tmp_path, OnBags(), 3)  # is left over
    script = OnBags()
    for _ in range(5):
        script.step()
    method = PartialRecovery(tmp_path / "files", tmp_path / "memory", every=100, priority="mfu")
    method.start(script.training, 5)
    assert SavedRank(tmp_path / "files", 0).mark() == Mark(5, 5)
    for _ in range(5, 13):
        with method.step():
            script.step()
    assert SavedRank(tmp_path / "files", 0).mark() == Mark(12, 5)
    end = script.end()
    again = OnBags()
    assert trained(tmp_path, again, 0, "mfu", every=100)[1] == 13 and equal(again.end(), end)
    method.discard()
    assert not method.memory()


@pytest.mark.usefixtures("_alone")
def test_another_folder_or_training_is_refused(tmp_path: Path) -> None:
    method, _ = trained(tmp_path, OnBags(), 5)
    with pytest.raises(ValueError, match="another training"):
        trained(tmp_path, OnTorchRec(), 6)
    lose(method)
    with pytest.raises(ValueError, match="another training"):
        trained(tmp_path, OnTorchRec(), 6)
    shutil.rmtree(tmp_path / "files")
    assert trained(tmp_path, OnBags(), 1)[1] == 0  # as if nothing had been
    method = PartialRecovery(tmp_path, tmp_path, every=1)
    with pytest.raises(RuntimeError, match=r"prepare\(\) comes first"), method.step():
        pass


# --- real ranks -------------------------------------------------------------------------------------

RANKS, STEPS, EVERY = 3, 9, 4
FAILURE = Failure(step=6, ranks=(1,))


def copied(script: Any) -> dict[str, Any]:
    """In numpy's arrays: tensors are not available from a process that has ended."""
    found = {f"rows {i}": weight.detach().clone() for i, weight in enumerate(script.weights)}
    found |= {f"head {name}": value.detach().clone() for name, value in script.model.head.named_parameters()}
    found["torch"] = torch.get_rng_state()
    arrays = {name: value.numpy() for name, value in found.items()}
    return {**arrays, "losses": np.array(script.progress.losses[-4:])}


def one_life(
    folder: Path, meet: Barrier, priority: str | None, failures: list[Failure]
) -> tuple[int, list[dict[str, Any]]]:
    """The rank, and all that its steps began with."""
    for part in ("arenas", "ledgers"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    ecemb.init_process_group("gloo", job="cpr", arena_dir=folder / "arenas", timeout=timedelta(seconds=300))
    script = bags(device="cpu")
    began: list[dict[str, Any]] = []

    def body(_: int) -> None:
        began.append(copied(script))
        script.body()

    live(
        PartialRecovery(folder / "files", folder / "memory", every=EVERY, priority=priority),
        Training(script.model, [script.sparse, script.dense], script.tables, [script.progress], samples=12),
        body,
        STEPS,
        rank=dist.get_rank(),
        folder=folder / "ledgers",
        failures=failures,
    )
    return dist.get_rank(), began


def same(first: dict[str, Any], second: dict[str, Any], *prefixes: str) -> bool:
    keys = [key for key in first if key.startswith(prefixes)]
    return bool(keys) and all(np.array_equal(first[key], second[key]) for key in keys)


@pytest.mark.parametrize("priority", [None, "scar"])
def test_only_the_failed_rank_goes_back(priority: str | None, tmp_path: Path) -> None:
    whole = dict(launch(RANKS, one_life, tmp_path / "undisturbed", priority, []))
    folder = tmp_path / "killed"
    with pytest.raises(RankFailed):
        launch(RANKS, one_life, folder, priority, [FAILURE])
    began = dict(launch(RANKS, one_life, folder, priority, []))
    accounts = [account(folder / "ledgers", rank) for rank in range(RANKS)]
    begin = accounts[0].started[1]
    assert begin in (6, 7) and [one.started for one in accounts] == [(0, begin)] * RANKS
    for rank in (0, 2):
        assert same(began[rank][0], whole[rank][begin], "losses", "torch")
    # What has taken the step that was cut off keeps it, and all go on with one survivor's.
    assert any(same(began[0][0], whole[0][step], "head") for step in (begin, begin + 1))
    assert all(same(began[rank][0], began[0][0], "head") for rank in (1, 2))
    failed, then = began[1][0], whole[1]
    saved_at = 4 if priority is None else 6  # SCAR saves each step, r N rows of large tables
    assert same(failed, then[saved_at], "losses", "torch")
    if priority is None:
        assert same(failed, then[4], "rows")
    else:
        for now, *at in zip(failed["rows 0"], *(one["rows 0"] for one in then[:7]), strict=True):
            assert any(np.array_equal(now, row) for row in at)
    assert [one.costs.samples_lost for one in accounts] == [0.0, (begin - 4) * 12.0, 0.0]
    assert all(one.costs.sent_bytes > 0 for one in accounts[:1])
