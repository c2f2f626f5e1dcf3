"""Memory that outlives the process, and is always whole."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from baselines import slots as slots_
from baselines.slots import Slots, Stamp
from support.killed_child import cut_off


def keep(slots: Slots, name: str, stamp: Stamp, content: list[int]) -> None:
    slots.begin(name, len(content))[:] = content
    slots.seal(stamp)


def test_one_version_is_whole_whenever_it_ends(tmp_path: Path) -> None:
    slots = Slots(tmp_path)
    first, second, third = Stamp(0, 5), Stamp(4, 9), Stamp(8, 1)
    keep(slots, "a", first, [1, 2])
    slots.begin("a", 3)[:2] = 7  # and is killed
    slots = Slots(tmp_path)
    assert slots.kept() == [("a", first)] and slots.read("a", first).tolist() == [1, 2]
    keep(slots, "a", second, [3, 4, 5])
    keep(slots, "b", first, [])
    assert sorted(slots.kept()) == [("a", first), ("a", second), ("b", first)]
    keep(slots, "a", third, [6] * 5000)  # in the place of the oldest, which is too short
    assert sorted(slots.kept()) == [("a", second), ("a", third), ("b", first)]
    again = Slots(tmp_path)
    assert again.read("a", second).tolist() == [3, 4, 5] and again.read("a", third).tolist() == [6] * 5000
    assert again.kept_bytes >= 5003 and len(again.paths) == 3
    with pytest.raises(KeyError, match="a of"):
        again.read("a", first)
    again.forget(second)
    assert again.kept() == [("a", second)]
    keep(again, "a", third, [1])
    assert sorted(again.kept()) == [("a", second), ("a", third)]
    (tmp_path / "a.0.slot").write_bytes(b"")  # killed before the space was reserved
    (tmp_path / "c.0.slot").write_bytes(b"")
    assert len(Slots(tmp_path).kept()) == 1
    keep(Slots(tmp_path), "c", first, [1])
    again.remove()
    assert not Slots(tmp_path).paths


def test_what_is_kept_again_takes_the_place_of_what_was(tmp_path: Path) -> None:
    slots, first, second = Slots(tmp_path), Stamp(4, 0), Stamp(8, 0)
    for content in ([1], [2], [3, 4]):
        keep(slots, "a", first, content)
        assert slots.read("a", first).tolist() == content and slots.kept() == [("a", first)]
    keep(slots, "a", second, [5])
    assert Slots(tmp_path).read("a", first).tolist() == [3, 4]


def test_a_kill_at_any_moment_leaves_what_was_whole(tmp_path: Path) -> None:
    first, second, third = Stamp(4, 9), Stamp(8, 1), Stamp(12, 3)
    for end in itertools.count(1):
        folder = tmp_path / str(end)
        keep(Slots(folder), "a", Stamp(0, 5), [1])
        keep(Slots(folder), "a", first, [2, 3])
        killed = cut_off(end, lambda: keep(Slots(folder), "a", second, [4] * 5000), slots_)  # noqa: B023
        slots = Slots(folder)
        assert slots.read("a", first).tolist() == [2, 3]
        if ("a", second) in slots.kept():
            assert slots.read("a", second).tolist() == [4] * 5000
        keep(Slots(folder), "a", third, [5])
        assert Slots(folder).read("a", third).tolist() == [5]
        if not killed:
            assert end > 30
            break
