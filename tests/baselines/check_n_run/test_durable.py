"""Check-N-Run below parity: what `guard.save` stores comes back after a full loss, in any number of ranks.

TorchRec's tables, under torchrun, are in tests/scenarios/test_torchrec_checkpoint.py.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from baselines.check_n_run import durable
from baselines.check_n_run.buffer import Buffer
from baselines.check_n_run.durable import DurableTier
from baselines.check_n_run.manifest import Manifest
from baselines.check_n_run.policy import POLICIES
from baselines.check_n_run.quantize_scheme import Scheme
from baselines.check_n_run.restoring import chain, last_chain
from baselines.check_n_run.store import Folder, store_at
from ecemb.checkpoint import CheckpointReader, DifferentialWriter, Piece
from ecemb.errors import CheckpointFailed, CheckpointMismatch, ConfigurationError
from support.check_n_run.job import Job
from support.check_n_run.training import DIM, ROWS, Life
from support.guarded_training import bags, initialise, whole_tables
from support.killed_child import cut_off
from support.processes import launch
from support.refusals import refused


def somewhere() -> str:
    """Without a disk, on which each write would take its time."""
    return f"memory://{secrets.token_hex(8)}"


def newest(target: str | Path) -> Manifest:
    found = last_chain(store_at(target))
    assert found is not None
    return found[-1]


# --- what comes back ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_every_checkpoint_comes_back_in_any_number_of_ranks(policy: str, tmp_path: Path) -> None:
    target = somewhere()
    job = Job(target, tmp_path / "memory", policy=policy)
    tier = job.tiers[0]
    assert isinstance(tier, DifferentialWriter) and isinstance(tier, CheckpointReader)
    assert str(tier) == target
    needs: list[int] = []
    job.step()  # the first one changes all rows
    for step in range(1, 10):
        assert job.save() and not job.save()
        needs.append(len(newest(target).facts.needs))
        ranks = 1 + step % 3
        again = Job(target, tmp_path / f"memory-{ranks}", ranks, policy=policy)
        assert again.next == step and again.is_right()
        if step % 4 == 2:
            job = again  # goes on from there: rows since the baseline are known again
        job.step()
    assert job.is_right()
    if policy == "full":
        assert not any(needs)
    elif policy == "consecutive":
        assert needs == list(range(9))
    else:
        assert needs[:3] == [0, 1, 1] and (0 in needs[1:]) == (policy == "intermittent")
    if policy in ("one_shot", "consecutive"):
        found = chain(store_at(target), newest(target).name) or []
        taken = [sum(one.rows for one in manifest.chunks) for manifest in found]
        assert taken[-1] < ROWS <= taken[0]
    copies = tmp_path / "memory-1"
    assert list(copies.rglob("*.copy"))
    for tier in job.tiers:
        tier.release()
    assert not list(copies.rglob("*.copy"))


def test_what_happened_unseen_makes_the_next_checkpoint_full(tmp_path: Path) -> None:
    """Memory survived a restart, or a save failed, or what it would stand on is gone."""
    target = somewhere()
    job = Job(target, tmp_path, policy="one_shot")
    job.save()
    job.step()
    job.save()
    assert newest(target).facts.needs
    before, job = job, Job(target, tmp_path, policy="one_shot", resumes=False)
    job.tensors, job.next = before.tensors, before.next
    job.step()
    job.save()
    assert not newest(target).facts.needs and Job(target, tmp_path / "other").is_right()
    job.step()
    taken = job.tiers[1].take
    job.tiers[1].take = lambda *_: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        job.save()
    job.tiers[1].take = taken  # type: ignore[method-assign]
    assert newest(target).facts.step == 2
    assert len(store_at(target).paths()) == 1 + len(newest(target).chunks)
    job.step()
    job.save()
    assert not newest(target).facts.needs and Job(target, tmp_path / "other").is_right()
    store_at(target).remove([f"{newest(target).name}.manifest"])
    job.step()
    job.save()
    assert not newest(target).facts.needs and Job(target, tmp_path / "other").is_right()
    other = Job(target, tmp_path / "other", policy="consecutive")  # it knows of other rows
    other.step()
    other.save()
    assert not newest(target).facts.needs and Job(target, tmp_path).is_right()


def test_quantized_rows_come_back_as_near_as_their_scheme_says(tmp_path: Path) -> None:
    target, options = somewhere(), {"policy": "consecutive", "weights": Scheme("asymmetric", 8)}
    job = Job(target, tmp_path, **options)
    for tensors in job.tensors:
        tensors["weight"] = torch.randn(len(tensors["weight"]), DIM)
    wanted = [tensors["weight"].clone() for tensors in job.tensors]
    job.save()
    again = Job(target, tmp_path / "other", weights=1, policy="consecutive")
    for tensors, then in zip(again.tensors, wanted, strict=True):
        steps = (then.max(dim=1).values - then.min(dim=1).values) / 255
        assert ((tensors["weight"] - then).abs() <= 1.01 * steps[:, None]).all()
        assert not torch.equal(tensors["weight"], then)
    again.step()
    again.save()
    last = newest(target).facts
    assert last.needs and last.restores == 1 and last.schemes["weight"]["bits"] == 2
    Job(target, tmp_path / "third", weights=1, policy="consecutive")


def test_after_a_kill_at_any_moment_the_newest_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "store"
    job = Job(target, tmp_path / "memory", 1, policy="consecutive", chunk_bytes=400)
    job.save()
    job.step()
    job.save()
    end, found = 0, 1
    while True:
        end += 7
        job = Job(target, tmp_path / "memory", 1, policy="consecutive", chunk_bytes=400)
        assert job.next in (found, found + 1) and job.is_right()
        found = job.next
        job.step()
        if not cut_off(end, lambda: job.save()):  # noqa: B023
            break
    assert end > 15
    assert Job(target, tmp_path / "memory", 1).next == found + 1


# --- what is refused ----------------------------------------------------------------------------


def test_a_target_is_of_one_training(tmp_path: Path) -> None:
    target = somewhere()
    job = Job(target, tmp_path)
    job.step()
    job.save()
    early = Job(target, tmp_path / "early", resumes=False)
    with pytest.raises(CheckpointMismatch, match="stands at step 0"):
        early.save()
    with pytest.raises(CheckpointMismatch, match="another training"):
        Job(target, tmp_path / "other", resumes=False, lineage="two").save()
    stored, tier = job.tiers[0].newest(), DurableTier(target, tmp_path)
    assert stored is not None
    for piece, told in (
        (Piece("nothing", (), 0, torch.tensor(0.0)), "no tensor 'nothing'"),
        (Piece("head", (), 0, torch.tensor(0)), r"'head' .* is torch.float32 of shape \(\).*torch.int64"),
        (Piece("table.sum", (9, 1), 0, torch.zeros(9, 1), "table"), "another training's: of table 'table'"),
    ):
        with pytest.raises(CheckpointMismatch, match=told):
            tier.read(stored, [piece])
    assert tier.finished("job") is None
    tier.finish("job", 1)
    assert tier.finished("job") == f"{target}/finished-job" and tier.finished("other") is None
    assert tier.newest() == stored
    chunk = newest(target).chunks[0].path
    store_at(target).remove([chunk])
    with pytest.raises(CheckpointFailed, match=f"{chunk} is missing.*no older one is whole: put it back"):
        Job(target, tmp_path / "other")
    store_at(target).remove([f"{stored.name}.manifest"])
    with pytest.raises(CheckpointFailed, match=f"no whole checkpoint {stored.name} any more"):
        DurableTier(target, tmp_path).read(stored, [])


def test_what_others_have_written_is_not_overlooked(tmp_path: Path) -> None:
    """Training would begin again."""
    (tmp_path / "dcp" / "step-000000000002").mkdir(parents=True)
    (tmp_path / "dcp" / "step-000000000002" / ".metadata").touch()
    for ask in (lambda tier: tier.newest(), lambda tier: tier.prepare(0, {})):
        with pytest.raises(CheckpointMismatch, match=r"holds 'step-0.*resume=path"):
            ask(DurableTier(tmp_path / "dcp", tmp_path))
    target = somewhere()
    Life(store_at(target), tmp_path / "memory", "full").save()
    with pytest.raises(CheckpointMismatch, match="another user of Check-N-Run"):
        DurableTier(target, tmp_path).newest()
    job = Job(somewhere(), tmp_path / "memory")
    job.save()
    store = store_at(str(job.tiers[0]))
    (path,) = (path for path in store.paths() if path.endswith(".manifest"))
    store.put(path, b"torn")
    assert job.tiers[0].newest() is None


def test_a_checkpoint_whose_base_is_gone_is_not_overlooked(tmp_path: Path) -> None:
    """Training would begin again, and its first save would remove it."""
    target = somewhere()
    job = Job(target, tmp_path, policy="one_shot")
    for _ in range(2):
        job.step()
        job.save()
    last, store = newest(target), store_at(target)
    path = f"{last.facts.needs[0]}.manifest"
    whole, before = store.get(path), store.paths()
    told = f"{target}: {last.name} stands on {last.facts.needs[0]}, .*put it back, or name another target"
    for bad in (None, b"torn"):
        store.remove([path]) if bad is None else store.put(path, bad)
        with pytest.raises(CheckpointFailed, match=told):
            DurableTier(target, tmp_path / "other").newest()
        with pytest.raises(CheckpointFailed, match=told):
            job.tiers[0].prepare(3, job.facts())
    store.put(path, whole)
    assert store.paths() == before and Job(target, tmp_path / "other", policy="one_shot").is_right()
    store.remove([path])
    store.put(f"{last.name}.manifest", b"torn")  # nothing is left that says what there was
    assert DurableTier(target, tmp_path / "other").newest() is None


def test_all_ranks_must_see_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_SIGHT_S", 0.01)
    job = Job(somewhere(), tmp_path)
    job.tiers[1]._store = store_at(somewhere())
    with pytest.raises(CheckpointFailed, match="rank 1 has written nothing.*must see the same store"):
        job.save()
    assert job.tiers[0].newest() is None and store_at(str(job.tiers[0])).paths() == []


def test_a_copy_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(CheckpointFailed, match=r"rank-0.*has no room.*No space left.*memory="):
        Job(somewhere(), tmp_path).save()


def test_copies_of_the_dead_do_not_wait_for_a_save(tmp_path: Path) -> None:
    """They are as large as tables, and the next life needs the memory."""
    memory = tmp_path / "memory"
    job = Job(somewhere(), memory)
    job.save()
    alive = sorted(memory.rglob("*.copy"))
    assert len(alive) == 2

    def left_by(pid: int, start: int) -> None:
        (memory / "rank-1" / f"{pid}-{start}-0123456789abcdef.copy").write_bytes(b"rows")

    for look in (lambda: DurableTier(somewhere(), str(memory)), job.tiers[0].newest):
        left_by(1 << 30, 7)  # above Linux's highest number
        left_by(os.getpid(), 7)  # a number that was given again
        assert len(list(memory.rglob("*.copy"))) == 4
        look()
        assert sorted(memory.rglob("*.copy")) == alive
    Buffer(memory / "rank-1")  # whoever they were of: this rank has a new life
    assert sorted(memory.rglob("*.copy")) == alive[:1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"chunk_bytes": 0}, r"chunk_bytes="),
        ({"bytes_per_s": 0.0}, r"bytes_per_s="),
        ({"policy": "daily"}, r"policy=.*'daily'"),
        ({"weights": -1.0}, r"restores.*-1"),
        ({"weights": "int8"}, r"weights= takes a Scheme.*'int8'"),
        ({"states": 4}, r"states= takes a Scheme.*4"),
        ({"target": "nosuch://x"}, r"nosuch://x: .*s3://bucket/folder"),
    ],
)
def test_what_makes_no_sense(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    make: Callable[..., DurableTier] = DurableTier
    with pytest.raises(ValueError, match=told):
        make(**{"target": tmp_path, "memory": tmp_path, **options})


# --- on real ranks ------------------------------------------------------------------------------

SAMPLES, BATCH = 11, 2


def life(folder: Path, _: Barrier, saves: Sequence[int], end: int) -> dict[str, Any]:
    """One launch of a job; what it finds, draws and leaves. It is not closed: the job has more to do."""
    folder.mkdir(exist_ok=True)
    initialise(folder)
    ranks = dist.get_world_size()
    script = bags()
    tier = DurableTier(folder / "store", folder / "memory", policy="one_shot")
    guard = script.protect(ranks, ranks - 1, resume=tier, failure_domain="rank")
    samples: Any = list(range(SAMPLES))
    batches = guard.batches(DataLoader(samples, batch_size=BATCH, shuffle=True))
    told: dict[str, Any] = {"kind": guard.recovery.kind, "begin": guard.next_step, "samples": []}
    told["begins"] = whole_tables(script)
    for _ in range(guard.next_step, end):
        with guard.step():
            told["samples"].append(next(batches).tolist())
            script.body()
        if guard.next_step in saves:
            guard.save(tier, asynchronous=guard.next_step % 2 == 1)
            told["saved"] = whole_tables(script)
    guard._saver.drain()
    with refused(ConfigurationError, "another DurableTier", "make one"):
        guard.save(DurableTier(folder / "store", folder / "memory"))
    guard._saver.mark_all_dirty()  # as after a repair
    assert {key: one.count() for key, one in tier._touched.items()} == {
        key: len(held) for key, held in tier._shards.items()
    }
    return told | {"ends": script.snapshot()}


def test_a_full_loss_resumes_bit_by_bit(tmp_path: Path) -> None:
    """The whole job dies, and all memory with it: no step, sample or random number is lost or repeated."""
    undisturbed = launch(2, life, tmp_path / "undisturbed", (), 6)
    folder = tmp_path / "disturbed"
    first = launch(2, life, folder, (2, 3), 5)
    kept = last_chain(Folder(folder / "store"))
    assert kept is not None and [one.facts.step for one in kept] == [2, 3]
    full, differential = (sum(chunk.rows for chunk in one.chunks) for one in kept)
    assert differential < full == 10
    lose_memory(folder)
    second = launch(2, life, folder, (5,), 6)
    for one, then, now in zip(undisturbed, first, second, strict=True):
        assert (then["kind"], then["begin"]) == ("fresh", 0)
        assert (now["kind"], now["begin"]) == ("checkpoint", 3)
        assert now["begins"] == then["saved"]
        assert then["samples"][:3] + now["samples"] == one["samples"]
        assert now["ends"] == one["ends"]
    assert [one.facts.step for one in last_chain(Folder(folder / "store")) or ()] == [2, 5]
    lose_memory(folder)
    for one in launch(3, life, folder, (), 5):
        assert (one["kind"], one["begin"]) == ("checkpoint", 5)
        assert one["begins"] == second[0]["saved"]


def lose_memory(folder: Path) -> None:
    paths = list(folder.rglob("*.arena"))
    assert paths
    for path in paths:
        path.unlink()
