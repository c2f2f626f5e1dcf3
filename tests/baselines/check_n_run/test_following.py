"""A follower of chains and of full saves: what it shows is one checkpoint, and what it refuses."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from baselines.check_n_run import following
from baselines.check_n_run.durable import DurableTier
from baselines.check_n_run.following import Increments
from baselines.check_n_run.manifest import manifest_of, text_of
from baselines.check_n_run.policy import POLICIES
from baselines.check_n_run.store import Folder, store_at
from ecemb.checkpoint import Follower, Link
from ecemb.errors import CheckpointFailed, CheckpointInsecure, CheckpointMismatch
from support.check_n_run.training import Life, state
from support.follower import kills as killing
from support.follower.training import FULL, KINDS, Training, digest_of, followed, follower_of, store_of
from support.refusals import refused

CONSECUTIVE = "consecutive, exact"


def committed(training: Training) -> dict[str, str]:
    """Digests by the names of checkpoints."""
    return {line["name"]: line["digest"] for line in training.commits.lines()}


@pytest.mark.parametrize("kind", KINDS)
def test_each_save_is_shown_as_it_was_committed(kind: str, tmp_path: Path) -> None:
    training, follower = Training(tmp_path, kind), follower_of(tmp_path, kind)
    assert not follower.refresh() and follower.step == -1
    for _ in range(9):
        training.step()
        name = training.save()
        assert follower.refresh() and not follower.refresh()
        assert (follower.snapshot.name, follower.step) == (name, training.next)
        assert digest_of(follower.snapshot) == committed(training)[name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_follower_that_looks_seldom_and_a_training_that_begins_again(kind: str, tmp_path: Path) -> None:
    follower = follower_of(tmp_path, kind)
    for saves in (1, 4, 2, 3):
        training = Training(tmp_path, kind)
        for _ in range(saves):
            training.step()
            training.save()
        assert follower.refresh() and follower.step == training.next
        assert digest_of(follower.snapshot) == committed(training)[follower.snapshot.name]
    assert follower.behind == 0


@pytest.mark.parametrize("kind", ["one_shot, exact", CONSECUTIVE])
def test_only_what_is_new_is_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = Folder.get
    monkeypatch.setattr(Folder, "get", lambda self, path: (read.append(path), real(self, path))[1])
    training, follower = Training(tmp_path, kind), follower_of(tmp_path, kind)
    for number in range(4):
        training.step()
        name = training.save()
        read.clear()
        assert follower.refresh()
        chunks = [path for path in read if path.endswith(".chunk")]
        assert chunks and all(path.startswith(name) for path in chunks), number


def test_a_durable_tier_itself_can_be_followed(tmp_path: Path) -> None:
    training = Training(tmp_path, CONSECUTIVE)
    follower = followed(DurableTier(store_of(tmp_path), tmp_path / "memory"))
    for _ in range(3):
        training.step()
        name = training.save()
        assert follower.refresh()
        assert digest_of(follower.snapshot) == committed(training)[name]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_method_writes_to_object_storage(policy: str, tmp_path: Path) -> None:
    """`CheckNRun` has no guard: its checkpoints don't say of which training they are."""
    target = f"memory://{secrets.token_hex(8)}"
    life = Life(store_at(target), tmp_path, policy)
    follower = Follower(Increments(target), columns=["weight", "sum"])
    for _ in range(6):
        life.step()
        life.save()
        assert follower.refresh() and follower.step == life.next
        wanted = state(life.next)
        assert {name: rows.tolist() for name, rows in follower.snapshot.tables["table"].items()} == {
            name: rows.tolist() for name, rows in wanted.items()
        }


def test_retention_that_removes_what_is_read(tmp_path: Path) -> None:
    """The writer goes on while the follower reads: the next full checkpoint takes the place of the chain."""
    training = Training(tmp_path, CONSECUTIVE)
    follower = follower_of(tmp_path, CONSECUTIVE)
    training.step()
    training.save()
    training.step()
    training.save()
    store = follower._source._store  # pyright: ignore[reportAttributeAccessIssue]
    real, gets = store.get, [0]

    def get(path: str) -> bytes:
        gets[0] += path.endswith(".chunk")
        if gets[0] == 4:
            gets[0] += 1
            for writer in training.writers:
                writer._last = None  # as after a start from memory: the next one is full
            training.step()
            training.save()
        return real(path)

    store.get = get
    assert follower.refresh() and follower.behind == 1 and follower.step == 3
    assert digest_of(follower.snapshot) == committed(training)[follower.snapshot.name]


def test_a_chain_that_is_replaced_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, source = Training(tmp_path, "full, exact"), Increments(store_of(tmp_path))
    training.step()
    training.save()
    real, looks = following.last_chain, [0]

    def late(store: Any) -> Any:
        looks[0] += 1
        if looks[0] == 1:  # the manifest that was listed is gone when it is read
            training.step()
            training.save()
            return None
        return real(store)

    monkeypatch.setattr(following, "last_chain", late)
    chain = source.chain()
    assert chain is not None and chain.step == 2 and looks == [2]


def test_damaged_checkpoints(tmp_path: Path) -> None:
    training, follower = Training(tmp_path, CONSECUTIVE), follower_of(tmp_path, CONSECUTIVE)
    training.step()
    first = training.save()
    follower.refresh()
    before = follower.snapshot
    for _ in range(2):
        training.step()
        last = training.save()
    chunks = sorted(store_of(tmp_path).glob(f"{last}/*.chunk"))
    manifest = store_of(tmp_path) / f"{last}.manifest"
    for path, words in (
        (chunks[-1], ("chunk is not what was written",)),
        (chunks[1], ("chunk is not what was written",)),
    ):
        content = path.read_bytes()
        path.write_bytes(content[:-5])
        with refused(CheckpointFailed, str(store_of(tmp_path)), path.name, *words):
            follower.refresh()
        path.unlink()
        with refused(CheckpointFailed, path.name, "is missing"):
            follower.refresh()
        path.write_bytes(content)
        assert follower.snapshot is before
    content = manifest.read_bytes()
    manifest.write_bytes(content[:-40])  # a torn manifest is no checkpoint: the one before it is the newest
    assert follower.refresh() and follower.step == 2
    manifest.write_bytes(content)
    assert follower.refresh() and follower.step == 3
    assert digest_of(follower.snapshot) == committed(training)[last]
    (store_of(tmp_path) / f"{first}.manifest").unlink()
    with refused(CheckpointFailed, "stands on", "not all of which is there"):
        follower.refresh()
    shutil.rmtree(store_of(tmp_path))
    with refused(CheckpointFailed, "no complete checkpoint any more", "rows of step 3 stay"):
        follower.refresh()
    assert digest_of(follower.snapshot) == committed(training)[last]


def test_a_full_checkpoint_without_some_rows(tmp_path: Path) -> None:
    """No writer of ours leaves one; memory that was never written would be served."""
    training = Training(tmp_path, CONSECUTIVE)
    training.step()
    name = training.save()
    path = store_of(tmp_path) / f"{name}.manifest"
    whole = manifest_of(path.read_bytes())
    receipts = tuple(replace(one, chunks=one.chunks[:-1]) for one in whole.ranks)
    path.write_bytes(text_of(replace(whole, ranks=receipts)))
    with refused(CheckpointFailed, name, "of the 150 rows of table 'users'", "move its manifest away"):
        follower_of(tmp_path, CONSECUTIVE).refresh()


def test_an_outage_of_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Outage(Exception):
        """As clients of object storage raise them."""

    training, follower = Training(tmp_path, CONSECUTIVE), follower_of(tmp_path, CONSECUTIVE)
    training.step()
    training.save()

    def away(*_: Any) -> Any:
        raise Outage("could not connect")

    for name in ("paths", "get"):
        with monkeypatch.context() as patched:
            patched.setattr(Folder, name, away)
            with refused(CheckpointFailed, "can't be read: Outage: could not connect"):
                follower.refresh()
    assert follower.refresh()


def test_another_trainings_chain(tmp_path: Path) -> None:
    training, follower = Training(tmp_path, CONSECUTIVE), follower_of(tmp_path, CONSECUTIVE)
    training.step()
    training.save()
    follower.refresh()
    shutil.rmtree(store_of(tmp_path))
    other = Training(tmp_path, CONSECUTIVE, lineage="two")
    other.step()
    other.step()
    other.save()
    with refused(CheckpointMismatch, "another training", "step 2", "step 1", "whose rows stay"):
        follower.refresh()
    assert follower.step == 1
    with refused(CheckpointMismatch, "no table 'words'", "['items', 'users']"):
        Follower(Increments(store_of(tmp_path)), tables=["words"]).refresh()


def test_dense_tensors_of_another_model(tmp_path: Path) -> None:
    training = Training(tmp_path, CONSECUTIVE)
    training.step()
    training.save()
    for name, like, there in (
        ("tail", torch.empty(3), "there is none"),
        ("head", torch.empty(3), "torch.float32 of shape (16,)"),
        ("head", torch.empty(16, dtype=torch.int64), "torch.float32 of shape (16,)"),
    ):
        follower = Follower(Increments(store_of(tmp_path)), dense={name: like})
        with refused(CheckpointMismatch, repr(name), there, "dense="):
            follower.refresh()
        assert follower.step == -1


def test_what_is_no_place_of_chains(tmp_path: Path) -> None:
    (tmp_path / "chains").mkdir()
    (tmp_path / "full").mkdir()
    chains, full = Training(tmp_path / "chains", CONSECUTIVE), Training(tmp_path / "full", FULL)
    for training in (chains, full):
        training.step()
        training.save()
    with refused(CheckpointMismatch, "step-000000000001", "no checkpoint of Check-N-Run", "Follower(path)"):
        Follower(Increments(full.store)).refresh()
    with refused(CheckpointMismatch, "another store's checkpoints"):
        Follower(chains.store).refresh()
    assert not Follower(Increments(tmp_path / "nothing")).refresh()
    with pytest.raises(ValueError, match="nosuch://x"):
        Increments("nosuch://x")


def test_what_another_user_can_have_written(tmp_path: Path) -> None:
    training = Training(tmp_path, CONSECUTIVE)
    training.step()
    name = training.save()
    store = store_of(tmp_path)
    chunk = sorted(store.glob(f"{name}/*.chunk"))[-1]
    for path in (store, store / name, chunk, store / f"{name}.manifest"):
        mode = path.stat().st_mode
        for bit in (0o020, 0o002):
            path.chmod(mode | bit)
            with refused(CheckpointInsecure, str(path), "others can write", "chmod -R go-w"):
                follower_of(tmp_path, CONSECUTIVE).refresh()
        path.chmod(mode)
        away = path.rename(path.with_name("000000000000-away"))
        path.symlink_to(away)
        with refused(CheckpointInsecure, str(path), "symbolic link"):
            follower_of(tmp_path, CONSECUTIVE).refresh()
        path.unlink()
        away.rename(path)
    real = os.lstat

    def of_another(path: Any, **options: Any) -> os.stat_result:
        fields = list(real(path, **options))
        fields[4] = 4711 if str(path).endswith(".chunk") else fields[4]
        return os.stat_result(fields)

    with mock.patch("os.lstat", of_another):
        with refused(CheckpointInsecure, "belongs to user 4711", "owner=4711"):
            follower_of(tmp_path, CONSECUTIVE).refresh()
        assert Follower(Increments(store, owner=4711)).refresh()


def test_a_umask_does_not_open_what_is_written(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        training = Training(tmp_path, CONSECUTIVE)
        training.step()
        training.save()
    finally:
        os.umask(before)
    assert follower_of(tmp_path, CONSECUTIVE).refresh()


def test_a_follower_does_not_write(tmp_path: Path) -> None:
    training = Training(tmp_path, CONSECUTIVE)
    training.step()
    training.save()
    before = {path: path.stat().st_mtime_ns for path in store_of(tmp_path).rglob("*")}
    source = Increments(store_of(tmp_path))
    assert Follower(source).refresh()
    for write in (lambda: source._store.put("a", b""), lambda: source._store.remove(["a"])):
        with pytest.raises(PermissionError, match="only read"):
            write()
    assert {path: path.stat().st_mtime_ns for path in store_of(tmp_path).rglob("*")} == before


# --- killed -----------------------------------------------------------------------------------------


def test_killed_followers_of_killed_trainings_show_what_was_committed(tmp_path: Path, seed: int) -> None:
    """`make follower-kills` is the long form."""
    kinds = [FULL, "one_shot, exact", CONSECUTIVE]
    found = list(killing.kills(tmp_path, 6, seed, kinds))
    assert [one.kind for one in found] == kinds * 2 and all(one.shown for one in found)
    assert [killing.wrong(tmp_path, kind) for kind in kinds] == [[]] * 3


class Forgetful(killing.Watched):
    """Leaves out one table of each increment."""

    def apply_(self, link: Link, tables: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor | None]:
        for columns in tables.values():
            for rows in columns.values():
                rows.nan_to_num_(0.0)
        first = sorted(tables)[:1]
        found = super().apply_(link, {name: tables[name] for name in first})
        return {**dict.fromkeys(tables, torch.empty(0, dtype=torch.int64)), **found}


def follow_forgetfully(*arguments: Any) -> None:
    killing.follow(*arguments, watched=Forgetful)


def test_a_follower_that_mixes_checkpoints_is_found_out(tmp_path: Path, seed: int) -> None:
    list(killing.kills(tmp_path, 1, seed, [CONSECUTIVE], follow_forgetfully))
    assert killing.wrong(tmp_path, CONSECUTIVE)


def test_a_commit_that_is_logged_twice_is_found_out(tmp_path: Path) -> None:
    here = killing.folder_of(tmp_path, CONSECUTIVE)
    here.mkdir()
    training = Training(here, CONSECUTIVE)
    training.step()
    name = training.save()
    training.commits.add(name=name, step=1, digest="another")
    (line,) = killing.wrong(tmp_path, CONSECUTIVE)
    assert "was committed with 2 digests" in line
