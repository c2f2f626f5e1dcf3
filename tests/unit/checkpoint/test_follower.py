"""A follower of a store whose answers are known: what readers see when, and what an error leaves."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ecemb.checkpoint import Chain, Follower, Link, Piece, Stored, StoredTable
from ecemb.checkpoint.folder_store import CheckpointFolder
from ecemb.checkpoint.follower import ATTEMPTS
from ecemb.errors import CheckpointFailed, CheckpointInsecure, CheckpointMismatch, ConfigurationError
from support.refusals import refused

ROWS = {"items": 4, "users": 6}
DEADLINE_S = 300.0
Rows = dict[str, tuple[list[int] | None, float]]
"""Table -> rows (None: all), and the value that they have."""


@dataclass
class Known:
    """An `IncrementReader` of checkpoints in a dictionary.

    Attributes:
        checkpoints: name -> its rows.
        names: the newest chain; none: there is no checkpoint.
        applied: names of those that were read.
        during: called before the rows of a table are overwritten.
        step: of the newest chain.
        training: likewise.
        rows: of the tables.
    """

    checkpoints: dict[str, Rows] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    applied: list[str] = field(default_factory=list)
    during: Callable[[str, str], None] = lambda name, table: None
    step: int = 0
    training: str = "one"
    rows: Mapping[str, int] = field(default_factory=lambda: ROWS)

    def __str__(self) -> str:
        return "s3://bucket/job"

    def chain(self) -> Chain | None:
        if not self.names:
            return None
        links = tuple(Link(name, frozenset(self.checkpoints[name])) for name in self.names)
        columns = {"weight": ("float32", (2,)), "sum": ("float32", (1,))}
        tables = {name: StoredTable(rows, columns) for name, rows in self.rows.items()}
        return Chain(links, self.step, self.training, "ctr", tables)

    def apply_(self, link: Link, tables: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor | None]:
        self.applied.append(link.name)
        found: dict[str, Tensor | None] = {}
        for table, columns in tables.items():
            self.during(link.name, table)
            rows, value = self.checkpoints[link.name][table]
            for tensor in columns.values():
                tensor[slice(None) if rows is None else rows] = value
            found[table] = None if rows is None else torch.tensor(rows, dtype=torch.int64)
        return found

    def dense_(self, tensors: Mapping[str, Tensor]) -> None:
        for tensor in tensors.values():
            tensor.fill_(self.step)

    def put(self, name: str, rows: Rows, *before: str) -> None:
        """A new checkpoint is complete."""
        self.checkpoints[name], self.names, self.step = rows, (*before, name), self.step + 1


def full(value: float) -> Rows:
    return dict.fromkeys(ROWS, (None, value))


def shown(follower: Follower) -> dict[str, list[float]]:
    """The first number of each row."""
    return {name: columns["weight"][:, 0].tolist() for name, columns in follower.snapshot.tables.items()}


def test_consecutive_increments_are_applied_once_each() -> None:
    store = Known()
    follower = Follower(store)
    assert not follower.refresh() and follower.step == -1
    store.put("a", full(1))
    assert follower.refresh() and shown(follower) == {"items": [1] * 4, "users": [1] * 6}
    store.put("b", {"users": ([0, 5], 2)}, "a")
    store.put("c", {"items": ([3], 3), "users": ([5], 3)}, "a", "b")
    first = follower.snapshot
    assert follower.refresh() and not follower.refresh()
    assert shown(follower) == {"items": [1, 1, 1, 3], "users": [2, 1, 1, 1, 1, 3]}
    assert store.applied == ["a", "b", "c"]
    assert first.step == 1 and first.rows("users", [5]).tolist() == [[1, 1]]
    store.put("d", {"users": ([1], 4)}, "a", "b", "c")
    items = follower.snapshot.tables["items"]["weight"]
    assert follower.refresh() and store.applied[3:] == ["d"]
    assert follower.snapshot.tables["items"]["weight"] is items  # what doesn't change is not copied


def test_dense_tensors_are_of_the_same_checkpoint() -> None:
    store = Known()
    like = {"top.weight": torch.zeros(3), "top.steps": torch.zeros((), dtype=torch.int64)}
    follower = Follower(store, dense=like)
    store.put("a", full(1))
    follower.refresh()
    first = follower.snapshot
    store.put("b", {"users": ([0], 2)}, "a")
    follower.refresh()
    shown_ = [{name: one.tolist() for name, one in each.dense.items()} for each in (first, follower.snapshot)]
    assert shown_ == [{"top.weight": [step] * 3, "top.steps": step} for step in (1, 2)]
    assert not any(one.any() for one in like.values())


def test_an_increment_in_place_of_the_last_one() -> None:
    store = Known()
    follower = Follower(store)
    store.put("a", full(1))
    store.put("b", {"users": ([2], 2)}, "a")
    assert follower.refresh()
    store.put("c", {"users": ([2, 3], 3)}, "a")
    assert follower.refresh() and store.applied == ["a", "b", "c"]
    assert shown(follower)["users"] == [1, 1, 3, 3, 1, 1]
    store.put("d", {"users": ([3], 4), "items": ([0], 4)}, "a")  # row 2 is as it was in "a"
    assert follower.refresh() and store.applied[3:] == ["d", "a", "d"]
    assert shown(follower) == {"items": [4, 1, 1, 1], "users": [1, 1, 1, 4, 1, 1]}
    store.put("e", {"items": ([0], 5)}, "a")  # no row of users differs any more
    assert follower.refresh() and shown(follower) == {"items": [5, 1, 1, 1], "users": [1] * 6}


def test_a_shorter_chain_on_the_same_full_checkpoint_is_built_from_it() -> None:
    store = Known()
    follower = Follower(store)
    store.put("a", full(1))
    store.put("b", {"users": ([2], 2)}, "a")
    store.put("c", {"users": ([3], 3)}, "a", "b")
    assert follower.refresh()
    store.names = ("a", "b")  # "c" was taken away
    assert follower.refresh() and shown(follower)["users"] == [1, 1, 2, 1, 1, 1]
    store.names = ("a",)
    assert follower.refresh() and shown(follower)["users"] == [1] * 6


def test_readers_see_the_last_snapshot_until_the_next_is_complete() -> None:
    store = Known()
    follower = Follower(store)
    store.put("a", full(1))
    follower.refresh()
    seen: list[tuple[str, int, dict[str, list[float]]]] = []
    store.during = lambda name, table: seen.append((table, follower.step, shown(follower)))
    store.put("b", {"items": ([0], 2), "users": ([0], 2)}, "a")
    store.put("c", {"items": ([0], 3), "users": ([0], 3)}, "a", "b")
    assert follower.refresh()
    before = {"items": [1.0] * 4, "users": [1.0] * 6}
    assert seen == [(table, 1, before) for table in ("items", "users") * 2]
    assert (follower.step, shown(follower)["items"]) == (3, [3, 1, 1, 1])


@pytest.mark.parametrize("fails", [("b", "items"), ("b", "users"), ("c", "users")])
def test_an_increment_that_fails_leaves_nothing(fails: tuple[str, str]) -> None:
    store = Known()
    follower = Follower(store)
    store.put("a", full(1))
    follower.refresh()
    before = follower.snapshot

    def fail(*here: str) -> None:
        if here == fails:
            raise CheckpointFailed(f"{here[0]} is truncated")

    store.during = fail
    store.put("b", {"items": ([0], 2), "users": ([0], 2)}, "a")
    store.put("c", {"items": ([1], 3), "users": ([1], 3)}, "a", "b")
    for _ in range(2):
        with refused(CheckpointFailed, f"{fails[0]} is truncated"):
            follower.refresh()
        assert follower.snapshot is before and shown(follower)["items"] == [1] * 4
    assert follower.behind == 0
    store.during = lambda name, table: None
    assert follower.refresh() and shown(follower)["users"] == [2, 3, 1, 1, 1, 1]


def test_a_chain_that_is_removed_under_the_follower(caplog: pytest.LogCaptureFixture) -> None:
    store = Known()
    follower = Follower(store)
    store.put("a", full(1))
    follower.refresh()
    store.put("b", {"items": ([0], 2), "users": ([0], 2)}, "a")

    def remove(name: str, table: str) -> None:
        if (name, table) == ("b", "users"):
            store.put("c", full(3))
            raise CheckpointFailed("b is missing")

    store.during = remove
    with caplog.at_level(logging.WARNING, "ecemb"):
        assert follower.refresh()
    assert shown(follower) == {"items": [3] * 4, "users": [3] * 6}
    assert follower.behind == 1
    assert "s3://bucket/job: fell behind: b was removed while it was read" in caplog.text


def test_a_writer_that_is_always_faster() -> None:
    store = Known()
    follower = Follower(store)
    store.put("0", full(1))
    follower.refresh()

    def remove(name: str, table: str) -> None:
        store.put(str(int(name) + 1), full(3))
        raise CheckpointFailed(f"{name} is missing")

    store.during = remove
    store.put("1", full(2))
    with refused(CheckpointFailed, f"{ATTEMPTS} checkpoints", "keep more of them", "keep="):
        follower.refresh()
    assert follower.behind == ATTEMPTS and shown(follower)["items"] == [1] * 4


def test_a_look_that_fails_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the checkpoint that was listed is removed before it is read."""
    store = Known()
    follower = Follower(store)
    store.put("a", full(1))
    real, calls = store.chain, [0]

    def chain() -> Chain | None:
        calls[0] += 1
        if calls[0] < ATTEMPTS:
            raise CheckpointFailed("it is gone")
        return real()

    monkeypatch.setattr(store, "chain", chain)
    assert follower.refresh()
    calls[0] = -ATTEMPTS
    with refused(CheckpointFailed, "it is gone"):
        follower.refresh()


def test_no_checkpoint_is_left() -> None:
    store = Known()
    follower = Follower(store)
    store.put("a", full(1))
    follower.refresh()
    store.names = ()
    with refused(CheckpointFailed, "no complete checkpoint any more", "rows of step 1 stay"):
        follower.refresh()
    assert shown(follower)["items"] == [1] * 4


def test_another_training_or_model_is_not_shown() -> None:
    store = Known()
    follower = Follower(store)
    store.put("a", full(1))
    follower.refresh()
    store.training = "two"
    store.put("b", full(2))
    with refused(CheckpointMismatch, "another training", "job 'ctr', step 2", "whose rows stay"):
        follower.refresh()
    store.training, store.rows = "one", {"items": 4, "users": 7}
    with refused(CheckpointMismatch, "another training", "make another Follower"):
        follower.refresh()
    store.rows = {"items": 4}
    store.checkpoints["b"].pop("users")
    with refused(CheckpointMismatch, "another training"):
        follower.refresh()
    assert store.applied == ["a"] and shown(follower)["items"] == [1] * 4


def test_some_tables_and_columns() -> None:
    store = Known()
    store.put("a", full(1))
    follower = Follower(store, tables=["users"], columns=["sum"])
    follower.refresh()
    assert follower.rows("users", torch.tensor([5, 0, 5]), "sum").tolist() == [[1], [1], [1]]
    assert follower.rows("users", [], "sum").shape == (0, 1)
    for table, column in (("items", "sum"), ("users", "weight"), ("no", "sum")):
        with refused(ConfigurationError, repr(column), repr(table), "users.sum", "tables= and columns="):
            follower.rows(table, [0], column)
    for ids in ([6], [-1, 0]):
        with refused(ConfigurationError, "rows 0 to 5", "whole table"):
            follower.rows("users", ids, "sum")
    with refused(CheckpointMismatch, "no table 'words'", "['items', 'users']", "tables="):
        Follower(store, tables=["words", "users"]).refresh()
    with refused(CheckpointMismatch, "'items'", "none of columns=['exp_avg']", "['sum', 'weight']"):
        Follower(store, columns=["exp_avg"]).refresh()


def test_waiting() -> None:
    store = Known()
    follower = Follower(store)
    assert not follower.wait(0)
    with refused(CheckpointFailed, "no checkpoint of s3://bucket/job was read yet", "refresh() or wait()"):
        follower.rows("items", [0])
    waiting = threading.Event()

    def look(real: Callable[[], Chain | None] = store.chain) -> Chain | None:
        waiting.set()
        return real()

    store.chain = look
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(follower.wait(DEADLINE_S, poll_s=0.001)))
    thread.start()
    assert waiting.wait(DEADLINE_S)
    store.put("a", full(1))
    thread.join(DEADLINE_S)
    assert found == [True] and follower.step == 1
    assert not follower.wait(0)


def test_a_snapshot_of_another_thread_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Known()
    follower = Follower(store)
    store.put("a", full(1))
    real = follower.refresh

    def after_another() -> bool:
        return real() and real()  # there is nothing new any more

    monkeypatch.setattr(follower, "refresh", after_another)
    assert follower.wait(DEADLINE_S) and store.applied == ["a"]


@pytest.mark.parametrize("source", ["s3://bucket/job", "memory://job"])
def test_a_url_takes_a_reader(source: str) -> None:
    with refused(ConfigurationError, f"{source!r} is a URL", "an object that writes and reads another store"):
        Follower(source)


def test_what_is_no_source() -> None:
    nothing: Any = 7
    with refused(ConfigurationError, "no IncrementReader, takes a path or a CheckpointReader", "7"):
        Follower(nothing)


# --- folders that guard.save(path) writes -----------------------------------------------------------

COLUMNS = [["weight", "float32", 3]]


def facts(step: int, lineage: str = "one", rows: int = 5) -> dict[str, Any]:
    tables = [[["t", rows, None, COLUMNS], ["own", None, rank, COLUMNS]] for rank in range(2)]
    return {"step": step, "lineage": lineage, "job": "job", "tables": tables}


def save(folder: CheckpointFolder, step: int, lineage: str = "one", rows: int = 5) -> None:
    whole = torch.full((rows, 3), float(step))
    token = folder.prepare(step, facts(step, lineage, rows))
    own = torch.full((1, 3), -float(step))
    parts = (
        [Piece("t.weight", (rows, 3), 0, whole[:2], "t"), Piece("own/rank0.weight", (0, 3), 0, own[:0])],
        [Piece("t.weight", (rows, 3), 2, whole[2:], "t"), Piece("own/rank1.weight", (1, 3), 0, own)],
    )
    parts[0].append(Piece("head", (2,), 0, torch.full((2,), float(step))))
    receipts = [folder.write(token, rank, 2, pieces) for rank, pieces in enumerate(parts)]
    folder.commit(token, facts(step, lineage, rows), receipts)
    folder.retain(1)


def test_full_saves(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    follower = Follower(folder.path, dense={"head": torch.empty(2)})
    assert not follower.refresh()
    for step in (3, 6):
        save(folder, step)
        assert follower.refresh() and follower.step == step
        assert follower.rows("t", range(5)).tolist() == [[step] * 3] * 5
        assert follower.rows("own/rank1", [0]).tolist() == [[-step] * 3]
        assert follower.snapshot.name == f"step-{step:012d}"
        assert follower.snapshot.dense["head"].tolist() == [step, step]
    assert Follower(folder).refresh()  # any CheckpointReader
    with refused(CheckpointMismatch, "no tensor 'tail'"):
        Follower(folder, dense={"tail": torch.empty(2)}).refresh()


def test_a_step_that_is_saved_again_is_shown(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    follower = Follower(folder.path)
    for _ in range(2):
        save(folder, 3)
        assert follower.refresh() and not follower.refresh()
        (folder.path / "step-000000000003").rename(tmp_path / "away")
        shutil.rmtree(tmp_path / "away")


def test_bad_folders_of_full_saves(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    save(folder, 3)
    follower = Follower(folder.path, tables=["t"])
    follower.refresh()
    save(folder, 6)
    part = folder.path / "step-000000000006" / "__1_0.distcp"
    content = part.read_bytes()
    part.write_bytes(content[:100])
    with refused(CheckpointFailed, str(part.parent)):
        follower.refresh()
    part.write_bytes(content)
    part.chmod(0o666)
    with refused(CheckpointInsecure, "others can write"):
        follower.refresh()
    assert follower.step == 3 and follower.rows("t", [0]).tolist() == [[3] * 3]
    part.chmod(0o600)
    assert follower.refresh() and follower.step == 6
    other = CheckpointFolder(tmp_path / "other")
    save(other, 9, "two", rows=7)
    folder.path.rename(tmp_path / "away")
    other.path.rename(folder.path)
    with refused(CheckpointMismatch, "another training", "step 9"):
        follower.refresh()
    assert follower.step == 6
    with refused(CheckpointMismatch, "no table 'words'"):
        Follower(folder.path, tables=["words"]).refresh()
    with refused(CheckpointMismatch, "is itself a checkpoint"):
        Follower(folder.path / "step-000000000009").refresh()


def test_stores_that_say_less(tmp_path: Path) -> None:
    """A CheckpointReader of one's own may leave out what `Stored` doesn't ask for."""

    class Own:
        def finished(self, job: str) -> None:
            return None

        def newest(self) -> Stored:
            return Stored("x", 4, {"tables": [[["t", 2, None, COLUMNS]]]})

        def read(self, stored: Stored, pieces: Any) -> None:
            for piece in pieces:
                piece.tensor.fill_(8.0)

    follower = Follower(Own())
    assert follower.refresh() and follower.rows("t", [1]).tolist() == [[8.0] * 3]
