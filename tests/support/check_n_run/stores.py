"""What every place for Check-N-Run's objects does, whatever is behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baselines.check_n_run.store import Store


def check_objects(store: Store, another: Callable[[], Store]) -> None:
    """Puts, overwrites, lists, reads and removes.

    Args:
        store: nothing is in it.
        another: a process that sees the same place, and has not looked at it before.
    """
    assert store.paths() == []
    with pytest.raises(FileNotFoundError):
        store.get("a/b")
    store.put("a/b", b"one")
    store.put("c", memoryview(b"two"))
    store.put("a/d", b"")
    store.put("a/b", b"three")
    assert store.paths() == ["a/b", "a/d", "c"]
    assert [store.get(path) for path in ("a/b", "c", "a/d")] == [b"three", b"two", b""]
    assert another().paths() == ["a/b", "a/d", "c"]
    store.remove(["c", "a/d", "no/such"])
    assert store.paths() == ["a/b"]
