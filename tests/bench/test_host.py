"""The host's work at a window's end, in small; and that other bytes would be noticed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench import ROOT
from bench.harness.result import Arguments, BadFile, WrongResult
from bench.questions.host import question as host
from bench.questions.host.question import BASE, PHASES, QUICK, THIS
from ecemb.coding.code import Code

SCALE = dataclasses.replace(QUICK, rows=2000, changed=400, put_rows=2000, allocated_rows=2000, windows=1)


def test_a_clone_is_measured_beside_this_commit_and_has_the_same_bytes() -> None:
    rows = host.windows(SCALE, {THIS: ROOT, BASE: ROOT}, Code(4, 2), seed=1)
    spent = [row for row in rows if row.metric == "core_s_per_gb"]
    assert {row.labels["commit"] for row in spent} == {THIS, BASE}
    assert {row.labels["phase"] for row in spent} == {"take", *PHASES, "all"}
    assert {row.labels["threads"] for row in spent} == {1, 2}
    assert all(row.value > 0 for row in rows)
    assert len([row for row in rows if row.metric == "two_threads_over_one"]) == 2


def test_tables_come_back_and_two_ranks_allocate() -> None:
    rows = host.put_back(SCALE, ROOT, THIS, seed=1)
    assert {row.labels["what"] for row in rows if row.metric == "put_gb_per_s"} == {"put-back", "plain copy"}
    rows = host.allocation(SCALE, ROOT, THIS, seed=1)
    assert [row.labels["ranks"] for row in rows if row.metric == "allocate_gb_per_s"] == [1, 2]


def test_bytes_that_depend_on_threads_or_on_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: dict[str, Any] = dict.fromkeys(("take", *PHASES), (1.0, 1.0))

    def pretend(*_: Any, threads: int, **__: Any) -> dict[str, Any]:
        return {"changed_bytes": 1, "windows": [phases], "digest": "ab" if threads == 1 else "cd"}

    monkeypatch.setattr(host, "asked", pretend)
    with pytest.raises(WrongResult, match=r"\(4, 3\): rows or parity differ"):
        host.windows(SCALE, {THIS: ROOT}, Code(4, 3), seed=1)


def test_a_folder_that_is_no_clone(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="has no ecemb/: give the folder of a clone"):
        host.run(Arguments(quick=True, base=tmp_path))
