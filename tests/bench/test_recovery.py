"""Restarts under torchrun are timed by phase; and a recovery that gives something else would be noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness.devices import APART
from bench.harness.result import Arguments, Incomplete, Row, WrongResult, document, once
from bench.harness.torchrun import LaunchFailed
from bench.questions.gpu import recovery as gpu_recovery
from bench.questions.recovery import question as recovery
from bench.questions.recovery import wire as recovery_wire
from bench.questions.recovery.question import (
    BEFORE_BACK,
    COLD,
    MIB,
    PHASES,
    QUICK,
    REPLACED,
    STAYS,
    WARM,
    Case,
    Launch,
    Life,
    Scale,
)
from bench.questions.recovery.rank import BACK, BACKGROUND, PROTECTED
from bench.report import restarts, summary
from bench.report.headlines import Unknown
from ecemb.coding.code import Code
from ecemb.coding.placement import Placement
from ecemb.memory.header import Constants, Header, State

CASE = Case("memory", Code(4, 3), 2 * MIB, alone=True, kills=1)
SCALE = dataclasses.replace(QUICK, cases=(CASE,), device=APART)


def by_start(rows: Iterable[Row]) -> dict[Any, dict[Any, float]]:
    """Start -> phase -> seconds, of rows that have both labels."""
    seconds: dict[Any, dict[Any, float]] = {COLD: {}, WARM: {}, REPLACED: {}, STAYS: {}}
    for row in rows:
        if row.metric == "recovery_phase_s":
            seconds[row.labels["start"]][row.labels["phase"]] = row.value
    return seconds


@pytest.mark.long  # `make bench-quick`, before the tests in CI, asks the same question
@pytest.mark.timeout(1800)
def test_a_killed_rank_is_rebuilt_and_every_phase_is_told() -> None:
    rows = recovery.measure(SCALE, CASE, seed=3)
    for row in rows:
        assert (row.labels["kind"], row.labels["code"], row.labels["killed"]) == ("memory", "(4, 3)", 1)
        assert (row.labels["engine"], row.labels["table_bytes"]) == ("sparse", 2 * MIB)
    phases = by_start(rows)
    for start, seconds in phases.items():
        left_out = ("noticed", "stopped", *BEFORE_BACK) if start == STAYS else (BACK,)
        assert [*seconds] == [one for one in PHASES if one not in (*left_out, "import torchrec")]
        [total] = [r.value for r in rows if r.metric == "kill_to_step_s" and r.labels["start"] == start]
        assert sum(seconds.values()) == pytest.approx(total)
    assert {row.metric for row in rows} == {
        "kill_to_step_s",
        "over_warm",
        "stayed",
        "recovery_phase_s",
        "first_start_s",
        "first_start_cpu_s",
        "added_recovery_s",
        "rebuild_gb_per_s",
        "rebuild_over_wire",
    }
    assert all(row.value > 0 for row in rows if row.metric.startswith(("rebuild", "first")))
    assert [row.value for row in rows if row.metric == "stayed"] == [1]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_next_kill_waits_for_a_rebuild_beside_training() -> None:
    case = dataclasses.replace(CASE, alone=False, kills=2, starts=(STAYS,), rebuild=BACKGROUND)
    rows = recovery.measure(SCALE, case, seed=3)
    assert {row.labels["rebuild"] for row in rows} == {BACKGROUND}
    assert not [row for row in rows if row.metric.startswith(("rebuild_", "over_warm"))]


@pytest.mark.long
@pytest.mark.torchrec
@pytest.mark.timeout(1800)
def test_torchrecs_example_is_measured_as_well() -> None:
    pytest.importorskip("torchrec", reason="needs torchrec (CONTRIBUTING.md)")
    [case] = [case for case in QUICK.cases if case.engine == recovery.TORCHREC]
    phases = by_start(recovery.measure(QUICK, dataclasses.replace(case, kind="memory"), seed=3))
    del phases[STAYS]  # which phases there are depends on what TorchRec keeps of its groups
    for seconds in phases.values():
        assert [*seconds] == [phase for phase in PHASES if phase != BACK]


def test_without_torchrec_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(scale: Scale, case: Case, seed: int) -> list[Row]:
        return [once("kill_to_step_s", "s", 1.0, engine=case.engine)]

    monkeypatch.setattr(recovery, "measure", measure)
    monkeypatch.setattr(recovery, "_has_torchrec", lambda: False)
    with pytest.raises(Incomplete, match="torchrec is not installed") as raised:
        recovery.run(Arguments())
    assert {row.labels["engine"] for row in raised.value.rows} == {"sparse"}
    assert len(recovery.run(Arguments(setting="sparse"))) == len(raised.value.rows)
    monkeypatch.setattr(recovery, "_has_torchrec", lambda: True)
    assert {row.labels["engine"] for row in recovery.run(Arguments())} == {"sparse", "torchrec"}


def test_a_script_that_fails_is_no_result() -> None:
    larger = dataclasses.replace(CASE, code=Code(6, 4))
    with pytest.raises(LaunchFailed, match="ended with 1"):
        recovery.launch(SCALE, larger, PROTECTED, 0, seed=3)


MARKS = {"process": 12.0, "interpreter": 12.5, "first step": 14.0}
LIFE = Life(
    killed_at=10.0,
    gone_at=[11.5, 11.0],
    told=[{"marks": MARKS}, {"marks": {"process": 11.25, "interpreter": 13.0, "first step": 13.5}}],
)


def test_phases_follow_the_last_rank_and_add_up() -> None:
    assert LIFE.phases() == {
        "noticed": 1.0,
        "stopped": 0.5,
        "process": 0.5,
        "interpreter": 1.0,
        "first step": 1.0,
    }


def test_where_processes_stay_phases_begin_when_the_last_one_is_back() -> None:
    stayed = {"back": 10.5, "process group": 11.0, "first step": 12.0}
    replacement = {"process": 10.25, "interpreter": 10.75, "process group": 11.5, "first step": 12.0}
    life = Life(10.0, [], [{"marks": stayed}, {"marks": replacement}])
    assert life.phases() == {"back": 0.5, "process group": 1.0, "first step": 0.5}


def test_a_start_is_compared_with_warm_ones() -> None:
    row = recovery.over_warm(CASE, STAYS, {STAYS: [1.0, 2.0, 3.0], WARM: [4.0]})
    assert (row.value, row.low, row.high) == (0.5, 0.25, 0.75)
    assert row.labels["start"] == STAYS


def kill_to_step(start: str, kind: str, value: float, **labels: Any) -> Row:
    labels = {"engine": "sparse", "killed": 1, "table_bytes": 256 << 20} | labels
    return once("kill_to_step_s", "s", value, kind=kind, start=start, **labels)


def test_the_seconds_of_each_start_are_shown() -> None:
    rows = [
        kill_to_step(WARM, "process", 0.52, table_bytes=64 << 20),
        kill_to_step(STAYS, "process", 0.231, table_bytes=64 << 20),
        kill_to_step(WARM, "memory", 1.3),
        kill_to_step(STAYS, "memory", 0.4, rebuild=BACKGROUND),
        kill_to_step(WARM, "memory", 9.0, killed=2),
    ]
    shown = restarts.table([document("recovery", Arguments(), rows)])
    stays, warm = restarts.STARTS[STAYS], restarts.STARTS[WARM]
    assert f"| lost | {stays} | {warm} |" in shown
    assert "| a process | 0.23 s | 0.52 s |" in shown
    assert "| 256 MiB of memory, rebuilt first |  | 1.3 s |" in shown
    assert "| 256 MiB of memory, rebuilt beside training | 0.4 s |  |" in shown
    assert "TorchRec" not in shown and "9" not in shown.partition("Medians")[0]
    assert restarts.sentence([document("recovery", Arguments(), rows)]).startswith(
        "**From the kill of a process to the next step of all ranks**, with tables of `ecemb.nn` and memory "
        "that is still there: 0.23 s where the other processes stay and 0.52 s where torchrun restarts all "
        "by `ecemb-run` ("
    )
    rows += [kill_to_step(WARM, "process", 2.31, engine="torchrec")]
    rows += [kill_to_step(STAYS, "process", 1.8, engine="torchrec")]
    said = restarts.sentence([document("recovery", Arguments(), rows)])
    assert said.endswith(" With TorchRec's tables it takes 1.8 to 2.3 s.")
    said = summary.of_recovery([document("recovery", Arguments(), rows)])
    assert said == (
        "from a kill to the next step: processes stay 0.23 s, restarted warm 0.52 s; "
        "with 256 MiB of lost memory to rebuild: restarted warm 1.3 s"
    )
    with pytest.raises(Unknown):
        restarts.table([])
    with pytest.raises(Unknown):
        restarts.sentence([])


def test_a_recovery_is_told_over_the_copy_of_its_slowest_rank() -> None:
    began: dict[str, Any] = {"killed_at": 10.0, "gone_at": [10.5]}
    marks = {"model": 11.0, "rebuild": 13.0, "restore": 14.0, "rest of protect": 14.5, "first step": 15.0}
    lives = [
        Life(**began, told=[{"marks": marks, "copy_s": copy}, {"marks": marks, "copy_s": 0.5}])
        for copy in (1.0, 2.0)
    ]
    copied, *ratios = gpu_recovery.over_copy(CASE, lives)
    assert (copied.metric, copied.low, copied.high) == ("copy_s", 1.0, 2.0)
    found = {row.labels["phase"]: (row.low, row.high) for row in ratios}
    assert found == {"restore": (0.5, 1.0), "rebuild": (1.0, 2.0), "protect": (1.75, 3.5)}


def test_what_was_measured_before_time_is_up_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training whose process is lost would be the third one, and is not begun."""
    kills: list[int] = []
    kept: list[Row] = []
    left = iter([100.0, 60.0, 20.0])

    def launch(scale: Scale, case: Case, method: str, number: int, seed: int) -> Launch:
        kills.append(number)
        return Launch(1.0, 1.0, [], ["a"])

    monkeypatch.setattr(gpu_recovery, "launch", launch)
    monkeypatch.setattr(recovery, "rows_of", lambda case, starts: [once("x", "s", 1.0, kind=case.kind)])
    monkeypatch.setattr(gpu_recovery, "over_copy", lambda case, restarts: [])
    monkeypatch.setattr(gpu_recovery, "time", SimpleNamespace(monotonic=lambda: 1000 - next(left)))
    with pytest.raises(Incomplete, match="the loss of a process was not tried, with 20 s left"):
        kept.extend(gpu_recovery.run(Arguments(), APART, 1000.0))
    assert [row.labels["kind"] for row in kept] == ["memory"]
    assert kills == [0, 1]


def test_shards_are_halved_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def roomiest(device: str, sizes: Iterable[tuple[int, int, int]]) -> tuple[int, str] | None:
        asked.extend(sizes)
        return next((size, "/there") for size, _, in_arenas in asked if in_arenas < 3 << 30)

    monkeypatch.setattr(gpu_recovery, "roomiest", roomiest)
    scale = gpu_recovery.fitting(dataclasses.replace(gpu_recovery.FULL, device=APART))
    assert {case.table_bytes for case in scale.cases} == {512 * MIB}
    assert [case.kind for case in scale.cases] == ["memory", "process"]
    assert scale.arena_dir == "/there"
    assert asked[1] == (512 * MIB, 2 << 30, (2 << 30) * 4 // 3)


def told(**change: Any) -> Life:
    rank = {"marks": MARKS, "kind": "memory", "lost": [1], "step": SCALE.steps - 1}
    return dataclasses.replace(LIFE, told=[rank, rank | change])


@pytest.mark.parametrize(
    "change", [{"lost": []}, {"lost": [2]}, {"step": SCALE.steps}, {"step": 0}, {"kind": "process"}]
)
def test_a_recovery_of_something_else(change: dict[str, Any]) -> None:
    recovery.check(CASE, SCALE, [told()], ["a", "b"], ["a", "b"])
    with pytest.raises(WrongResult, match="rank 1: a recovery of"):
        recovery.check(CASE, SCALE, [told(**change)], ["a", "b"], ["a", "b"])


def test_a_recovery_that_ends_elsewhere() -> None:
    with pytest.raises(WrongResult, match=r"ranks \[1\] ended with other bytes"):
        recovery.check(CASE, SCALE, [told()], ["a", "c"], ["a", "b"])


def header(rank: int) -> Header:
    constants = Constants(
        job="job",
        arena_id=f"{rank:032x}",
        rank=rank,
        world_size=4,
        n=4,
        k=3,
        positions=(0, 1, 2, 3),
        domains=("a", "b", "c", "d"),
        layout_hash="",
        layout="{}",
        block_words=((10, 11, 12),) * 4,
        regions=(),
        fill=1,
    )
    return Header(constants, State.LIVE, joined=1, generation_id=1, opened=1, committed=5, prepared=5)


def test_what_plain_sends_carry_is_what_a_rebuild_does() -> None:
    traffic = recovery_wire.links([header(rank) for rank in range(4)], [2])
    placement = Placement(4, 3, (0, 1, 2, 3))
    lost = 8 * (10 + 11 + 12 + 12)
    assert len(placement.kept(2)) == 1
    assert sum(traffic[recovery_wire.DIRECT].values()) == lost
    assert sum(traffic[recovery_wire.SAME].values()) == 3 * lost
    assert all(receiver == 2 for _, receiver in traffic[recovery_wire.DIRECT])
    assert all(sender != 2 for sender, _ in traffic[recovery_wire.SAME])
