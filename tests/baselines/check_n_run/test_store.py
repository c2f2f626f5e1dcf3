"""Objects are there whole or not at all, in a folder and over fsspec."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from baselines.check_n_run.store import Folder, Remote, Store, store_at
from support.check_n_run.stores import check_objects

TARGETS: dict[str, Callable[[Path], str]] = {
    "path": str,
    "file": lambda folder: f"file://{folder}",
    "memory": lambda _: f"memory://{secrets.token_hex(8)}",
    "fsspec's local": lambda folder: f"local://{folder}",
}
every_target = pytest.mark.parametrize("kind", TARGETS)


@every_target
def test_objects(kind: str, tmp_path: Path) -> None:
    target = TARGETS[kind](tmp_path / "store")
    check_objects(store_at(target), lambda: store_at(target))
    store = store_at(target)
    store.remove(["a/b"])
    assert store.paths() == []
    assert store_at(TARGETS[kind](tmp_path / "store")).paths() == []


def test_which_store_it_is(tmp_path: Path) -> None:
    kinds: list[tuple[str | Path, type[Store]]] = [
        (tmp_path, Folder),
        (f"file://{tmp_path}", Folder),
        ("memory://x", Remote),
    ]
    assert [type(store_at(target)) for target, _ in kinds] == [kind for _, kind in kinds]
    with pytest.raises(ValueError, match="nosuch"):
        store_at("nosuch://bucket")


def test_a_folder_that_can_not_be_listed_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's own walk would find nothing, and a job would begin again."""
    store = store_at(f"local://{secrets.token_hex(8)}")
    assert store.paths() == []  # it isn't there

    def out(*_: Any, **__: Any) -> Any:
        raise PermissionError("no right to list")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.ls", out)
    with pytest.raises(PermissionError, match="no right to list"):
        store.paths()


def test_an_object_that_arrives_in_half_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store, sent = store_at(f"memory://{secrets.token_hex(8)}"), [0]
    real = MemoryFileSystem.pipe_file

    def cut(self: Any, path: str, value: bytes, **options: Any) -> None:
        sent[0] += 1
        real(self, path, value[: -1 if sent[0] != 2 else None], **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", cut)
    store.put("a", b"whole")
    assert store.get("a") == b"whole" and sent == [2]
    with pytest.raises(OSError, match="/a was sent 2 times with 5 bytes, and has 4 in the store"):
        store.put("a", b"whole")


def test_a_write_that_is_cut_off_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Folder(tmp_path)
    store.put("a", b"one")

    def full(_: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        store.put("a", b"two")
    assert store.get("a") == b"one" and store.paths() == ["a", "a.partial"]
