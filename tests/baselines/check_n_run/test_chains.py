"""Checkpoints stand on each other: what comes back is the last whole one, whatever was killed or removed."""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Iterable
from pathlib import Path

import pytest

from baselines.check_n_run import writing
from baselines.check_n_run.manifest import SUFFIX, NotWhole, OtherFormat, manifest_of, newest, text_of
from baselines.check_n_run.policy import POLICIES
from baselines.check_n_run.restoring import Damaged, read, whole
from baselines.check_n_run.retention import kept, leftovers
from baselines.check_n_run.store import Folder, Store, store_at
from baselines.check_n_run.writing import CheckpointFailed
from support.check_n_run.training import ROWS, Life, is_right, state

every_policy = pytest.mark.parametrize("policy", POLICIES)


class Killed(BaseException):
    """Stands for the end of the process."""


class Dying(Store):
    """A store whose user is killed after this many writes and removals.

    Args:
        store: the real one.
        left: this many.
    """

    def __init__(self, store: Store, left: int) -> None:
        self.store, self.left = store, left

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def put(self, path: str, data: bytes | memoryview) -> None:
        self._count()
        self.store.put(path, data)

    def get(self, path: str) -> bytes:
        return self.store.get(path)

    def paths(self) -> list[str]:
        return self.store.paths()

    def remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._count()
            self.store.remove([path])


def somewhere() -> Store:
    """Without a disk, on which each write would take its time."""
    return store_at(f"memory://{secrets.token_hex(8)}")


@every_policy
def test_every_checkpoint_comes_back(policy: str, tmp_path: Path) -> None:
    store = Folder(tmp_path / "store") if policy == "consecutive" else somewhere()
    life = Life(store, tmp_path, policy)
    for step in range(12):
        life.save()
        again = Life(store, tmp_path / "other", policy)
        assert again.next == step and is_right(again)
        if step % 4 == 2:
            life = again  # goes on from there: rows since the baseline are known again
        life.step()
    assert is_right(life)
    held = whole(store)
    assert len(held) == 1 + len(held[0].facts.needs)
    assert len(store.paths()) == len(held) + sum(len(one.chunks) for one in held)


@every_policy
def test_into_another_number_of_ranks(policy: str, tmp_path: Path) -> None:
    store = somewhere()
    for ranks in (2, 3, 1, 4):
        life = Life(store, tmp_path, policy, ranks=ranks)
        assert is_right(life)
        for _ in range(2):
            life.save()
            life.step()
    assert Life(store, tmp_path, policy, ranks=2).next == 4


@every_policy
def test_a_kill_at_any_moment_leaves_the_last_whole_checkpoint(policy: str, tmp_path: Path) -> None:
    """In one thread and one process; real kills are in test_kills.py."""
    store = somewhere()
    life = Life(store, tmp_path, policy, ranks=1, chunk_bytes=400)
    for _ in range(3):
        life.save()
        life.step()
    before, killed = 2, 0
    for moment in range(100):
        dying = Dying(store, moment)
        life = Life(dying, tmp_path, policy, ranks=1, chunk_bytes=400)
        assert life.next in {before, before + 1} and is_right(life)
        before = life.next
        life.step()
        try:
            life.save()
        except Killed:
            killed += 1
        else:
            break
    assert killed > 3
    again = Life(store, tmp_path, policy, ranks=1)
    assert again.next == before + 1 and is_right(again)


def test_a_checkpoint_needs_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = somewhere()
    life = Life(store, tmp_path, "consecutive")
    life.save()
    life.step()
    jobs = life.jobs()
    monkeypatch.setattr(writing, "_POLL_S", (0.0, 0.001))
    impatient = writing.replace(jobs[0], patience_s=0.01)
    with pytest.raises(CheckpointFailed, match=r"rank 1 has written nothing.*more time"):
        writing.write(impatient, store)
    monkeypatch.setattr(writing, "_written", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        writing.write(jobs[1], store)
    monkeypatch.undo()
    with pytest.raises(CheckpointFailed, match=r"failed on rank 1: ZeroDivisionError"):
        writing.write(jobs[0], store)
    assert Life(store, tmp_path, "consecutive").next == 0


def test_damage_is_found(tmp_path: Path) -> None:
    store = somewhere()
    life = Life(store, tmp_path, "one_shot")
    for _ in range(3):
        life.save()
        life.step()
    last = whole(store)[0]
    base = read(store, last.facts.needs[0])
    assert base is not None
    back = f"to go back to {base.name}, move {last.name}{SUFFIX} away"
    for chunk, told in ((last.chunks[-1], back), (base.chunks[-1], "no older one is whole: put it back")):
        good = store.get(chunk.path)
        for bad in (good[:-1], good[:-1] + bytes([good[-1] ^ 1])):
            store.put(chunk.path, bad)
            with pytest.raises(Damaged, match=rf"{chunk.path} is not what was written.*{told}"):
                Life(store, tmp_path, "one_shot")
        store.remove([chunk.path])
        with pytest.raises(Damaged, match=f"missing.*{told}"):
            Life(store, tmp_path, "one_shot")
        store.put(chunk.path, good)
    assert is_right(Life(store, tmp_path, "one_shot"))


def of_three(folder: Path) -> Store:
    """A store of three checkpoints, each of which stands on those before it."""
    store = somewhere()
    life = Life(store, folder, "consecutive", keep=3)
    for _ in range(3):
        life.save()
        life.step()
    return store


def test_an_older_checkpoint_is_not_taken_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = of_three(tmp_path)
    last, between, _ = newest(store.paths())
    store.remove([f"{between}{SUFFIX}"])
    again = Life(store, tmp_path, "consecutive")
    assert again.next == 0 and is_right(again)
    assert f"{last} doesn't count as a checkpoint: it stands on {between}" in caplog.text
    store.remove([f"{newest(store.paths())[-1]}{SUFFIX}"])
    with pytest.raises(Damaged, match=f"{last} stands on .*, {between}, not all of which is there"):
        Life(store, tmp_path, "consecutive")


def test_a_torn_manifest_is_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = of_three(tmp_path)
    path = f"{newest(store.paths())[0]}{SUFFIX}"
    good = store.get(path)
    assert text_of(manifest_of(good)) == good
    for bad in (b"", good[:-1], good.replace(b'"step": 2', b'"step": 3'), b"\xff\n\n", b"x\n[]\n"):
        with pytest.raises(NotWhole):
            manifest_of(bad)
        store.put(path, bad)
        again = Life(store, tmp_path, "consecutive")
        assert again.next == 1 and is_right(again)
    assert f"{path} doesn't count as a checkpoint" in caplog.text
    again.step()
    again.save()  # removes nothing that it needs, and nothing of what it doesn't know
    assert is_right(Life(store, tmp_path, "consecutive"))


@pytest.mark.parametrize("change", [('"policy"', '"strategy"'), ('"format": 1', '"format": 2')])
def test_another_versions_manifest_is_not_skipped(change: tuple[str, str], tmp_path: Path) -> None:
    """The training would begin again, and remove it in time."""
    store = somewhere()
    life = Life(store, tmp_path, "full")
    life.save()
    path = f"{newest(store.paths())[0]}{SUFFIX}"
    body = store.get(path).decode().splitlines()[1].replace(*change)
    store.put(path, f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n".encode())
    with pytest.raises(OtherFormat, match=rf"{path}: its checksum holds, .* another folder"):
        Life(store, tmp_path, "full")


@every_policy
@pytest.mark.parametrize("keep", [1, 2, 5])
def test_what_is_kept_can_be_restored(policy: str, keep: int, tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    store = somewhere()
    life = Life(store, tmp_path, policy, keep=keep)
    for _ in range(9):
        life.save()
        for _ in range(generator.randint(1, 3)):
            life.step()
        held = {one.name: one.facts.needs for one in whole(store)}
        assert kept(held, keep) == set(held)
        assert len(held) >= min(keep, 1)
    names = sorted(held)
    for name in reversed(names):  # as if each had been the newest
        again = Life(store, tmp_path, policy)
        assert is_right(again)
        store.remove([f"{name}{SUFFIX}"])


def test_what_may_be_in_the_making_stays() -> None:
    with pytest.raises(ValueError, match=r"keep=.*at least 1; got 0"):
        kept({}, 0)
    life_paths = ["000000000009-aa/rank-0-000000.chunk", "else", "000000000001-bb/rank-0-000000.chunk"]
    facts = writing.Facts(5, "cc", 0, 1, "full")
    assert leftovers(life_paths, [writing.Manifest(facts, ())], 1) == [life_paths[2]]


def test_the_training_for_these_tests_changes_rows() -> None:
    before, after = state(3)["sum"], state(4)["sum"]
    assert 0 < int((before != after).sum()) < ROWS
