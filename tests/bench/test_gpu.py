"""The question of GPUs: its parts run on the CPU, in tables taken for those of a device, and end in time."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.harness import devices
from bench.harness.devices import APART, CUDA
from bench.harness.ranks import RankFailed
from bench.harness.result import Arguments, Incomplete, Row, Unavailable, WrongResult, once
from bench.questions.gpu import fused as gpu_fused
from bench.questions.gpu import kernels as gpu_kernels
from bench.questions.gpu import question as gpu
from bench.questions.gpu import step as gpu_step
from bench.questions.gpu import windows as gpu_windows
from bench.questions.gpu.question import Part
from bench.questions.overhead.question import Scale
from bench.workloads import training_rank
from bench.workloads.training_rank import BARE, PROTECTED
from ecemb.coding.code import Code


def test_kernels_run_interpreted() -> None:
    rows = list(gpu_kernels.run(Arguments(seed=1), APART, until=math.inf))
    assert {row.metric for row in rows} == {
        *("copy_gb_per_s", "multiply_add_gb_per_s", "multiply_add_over_copy"),
        *("take_ms", "bring_ms", "bring_over_copy", "put_gb_per_s", "put_over_copy"),
    }
    assert all(row.value > 0 for row in rows)


@pytest.mark.parametrize(("group", "overlap"), list(zip(gpu_step.SMALL_GROUPS, (True, False), strict=True)))
def test_a_step_is_compared_with_that_of_its_bare_twin(group: gpu_step.Group, overlap: bool) -> None:
    """Four ranks, and one, whose guard keeps no parity."""
    rows = list(gpu_step.measure(gpu_step.SMALL, group, 64, overlap=overlap, seed=3))
    found = {(row.metric, row.labels.get("method") or row.labels.get("phase")): row for row in rows}
    assert {("overhead_wall_pct", PROTECTED), ("step_wall_ms", BARE), ("step_phase_ms", "image")} <= {*found}
    image = found["image_over_step", None]
    assert image.value > 0
    assert (image.labels["ranks"], image.labels["backend"]) == (group.ranks, "gloo")
    assert (image.labels["device"], image.labels["optimizer"]) == (APART, "SGD")
    assert image.labels["rows_asked"] == 1000
    assert image.labels["overlap"] == ("next step" if overlap else "none")
    sent = found["bytes_sent_per_step", PROTECTED]
    assert (sent.value > 0) == (group.ranks > 1)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(one, marks=[] if one.engine == "torchrec" else pytest.mark.long, id=one.engine)
        for one in gpu_windows.SMALL
    ],
)
def test_windows_are_compared_with_bare_twins(setting: gpu_windows.Setting) -> None:
    """Which checks that all models end with the same bytes, and that parity fits them."""
    if setting.engine == "torchrec":
        pytest.importorskip("torchrec")
    rows = list(gpu_windows.measure(setting, APART, 3, 300.0))
    found = {(row.metric, row.labels.get("method") or row.labels.get("phase")): row.value for row in rows}
    assert found["window_steps", None] == setting.window == 4
    assert found["window_rows_per_step", None] > 0
    assert {("window_overhead_wall_pct", PROTECTED), ("window_phase_ms", "image")} <= {*found}
    assert ("window_phase_ms", "store") in found


@pytest.mark.long  # test_torchrec_kills.py has fused tables that come back
def test_fused_tables_come_back_bit_for_bit_cold_and_warm() -> None:
    pytest.importorskip("torchrec")
    rows = list(gpu_fused.run(Arguments(seed=4), APART, time.monotonic() + 1200))
    identical = {row.labels["start"]: row.value for row in rows if row.metric == "fused_identical"}
    assert identical == {"torchrun": 1, "ecemb-run": 1}
    assert sum(row.metric == "fused_kill_to_step_s" for row in rows) == 4


def test_what_fails_or_is_missing_does_not_stop_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def measure(
        scale: Scale, group: gpu_step.Group, samples: int, *, overlap: bool, seed: int
    ) -> Iterator[Row]:
        asked.append((group.backend, overlap))
        if not overlap:
            raise RankFailed("rank 1 of 4 raised")
        yield once("x", "s", scale.timeout_s)

    monkeypatch.setattr(gpu_step, "measure", measure)
    monkeypatch.setattr(gpu_step.dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(gpu_step, "time", SimpleNamespace(monotonic=lambda: 100.0))
    with pytest.raises(Incomplete, match="^4 ranks over gloo, overlap False: rank 1 of 4 raised$") as raised:
        gpu.kept(gpu_step.ask(gpu_step.FULL, gpu_step.GROUPS, 8192, 0, until=190.0))
    left_out, kept = raised.value.rows
    assert kept.value == 90.0
    assert (left_out.metric, left_out.labels["why"]) == ("left_out", "torch was built without NCCL")
    assert asked == [("gloo", True), ("gloo", False)]
    with pytest.raises(Incomplete, match="not begun, with 10 s left"):
        gpu.kept(gpu_step.ask(gpu_step.FULL, gpu_step.GROUPS, 8192, 0, until=110.0))


@pytest.fixture
def signals() -> Iterator[None]:
    """Puts back what a part does when it is ended."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("signals")
def test_a_part_that_is_ended_keeps_what_it_has_measured() -> None:
    def measured() -> Iterator[Row]:
        yield once("x", "s", 1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        yield once("x", "s", 2.0)

    with pytest.raises(Incomplete, match="ended from outside") as raised:
        gpu.kept(measured())
    assert [row.value for row in raised.value.rows] == [1.0]


@pytest.mark.usefixtures("signals")
def test_a_part_that_fails_keeps_what_it_has_measured(capfd: pytest.CaptureFixture[str]) -> None:
    def measured() -> Iterator[Row]:
        yield once("x", "s", 1.0)
        raise WrongResult("the product is wrong")

    with pytest.raises(Incomplete, match="^WrongResult: the product is wrong$") as raised:
        gpu.kept(measured())
    assert [row.value for row in raised.value.rows] == [1.0]
    assert "in measured" in capfd.readouterr().err  # where, for the log


def test_rows_are_halved_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = {"/dev/shm": 5 << 30, "/disk": 40 << 30}
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free_bytes[folder]))
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/disk")
    monkeypatch.setattr("ecemb.memory.capacity.machine_limit", lambda: None)
    full = dataclasses.replace(gpu_step.FULL, device=APART)
    tables_bytes = 26 * 1_000_000 * 128 * 4 * 4 / 3
    assert tables_bytes / 4 > 0.8 * (5 << 30) > tables_bytes / 8
    scale = gpu_step.fitting(full, gpu_step.SHARED)  # in memory, though the disk would have all
    assert (scale.rows, scale.arena_dir) == (125_000, "/dev/shm")
    monkeypatch.setattr("ecemb.memory.capacity.machine_limit", lambda: SimpleNamespace(free_bytes=2 << 30))
    assert gpu_step.fitting(full, gpu_step.SHARED).rows == 62_500
    free_bytes["/dev/shm"] = 64 << 20
    scale = gpu_step.fitting(full, gpu_step.SHARED)
    assert (scale.rows, scale.arena_dir) == (1_000_000, "/disk")
    assert gpu_step.Group("nccl", 1, Code(2, 1)).arena_share == 1


def test_rows_with_other_bits_fold_to_something_else() -> None:
    table = torch.rand(50, 3)
    folded = training_rank.folded(table)
    assert folded.shape == (50,) and len(set(folded.tolist())) == 50
    other = table.clone()
    other[7, 1] = -other[7, 1]
    other[9] = other[9, [1, 0, 2]]
    changed = folded != training_rank.folded(other)
    assert changed.nonzero().flatten().tolist() == [7, 9]


# --- all of it -----------------------------------------------------------------------------------


def words(code: str) -> Any:
    def of(arguments: Arguments, device: str, file: Path) -> Sequence[str]:
        return ("-c", code, str(file))

    return of


WRITES = (
    "import json, sys; rows = [dict(metric='m', value=1, unit='s', low=1, high=1, repeats=1, of='x')]; "
    "json.dump({'rows': rows}, open(sys.argv[1], 'w'))"
)


def test_a_part_that_fails_or_hangs_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        "hangs": Part(0.1, (), words("import signal; signal.pause()")),
        "fails": Part(600, (), words(f"{WRITES}; sys.exit(3)")),
        "lacks": Part(600, ("no_such_module",), words("")),
        "is done": Part(600, ("pytest",), words(WRITES)),
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    with pytest.raises(Incomplete) as raised:
        gpu.ask_all(Arguments(), APART)
    assert str(raised.value) == "hangs: ended after its share of 0 s\nfails: ended with 3"
    told = {row.labels["part"]: row.labels["outcome"] for row in raised.value.rows if row.metric == "part_s"}
    assert told["lacks"] == "left out: no no_such_module here (make gpu-packages)"
    assert told["is done"] == gpu.DONE
    measured = [row for row in raised.value.rows if row.metric == "m"]
    assert [row.labels for row in measured] == [{"of": "x"}, {"of": "x"}]


def test_parts_are_asked_for_by_commands_and_take_less_than_8_minutes(tmp_path: Path) -> None:
    assert sum(part.share_s for part in gpu.PARTS.values()) < 8 * 60 - 20  # seconds
    found = {name: part.words(Arguments(seed=5), CUDA, tmp_path) for name, part in gpu.PARTS.items()}
    assert set(gpu.MEASURED) == {name for name in found if "--setting" in found[name]}
    assert all((gpu.ROOT / path).exists() for path in (*gpu.TESTED, found["kills"][0]))
    assert set(gpu.KILLS) <= {*found["kills"]} and "cuda" in found["kills"]
    small = gpu.PARTS["kills"].words(Arguments(quick=True), APART, tmp_path)
    assert set(gpu.KILLS) & {*small} == {gpu.KILLS[0]} and "cuda" not in small


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nothing_is_measured_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(Unavailable, match="torch sees no CUDA device: ask on a machine with one"):
        gpu.run(Arguments())


def test_more_devices_give_each_rank_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_step.groups_on(1) == gpu_step.groups_on(3) == gpu_step.GROUPS
    several = gpu_step.groups_on(4)[len(gpu_step.GROUPS) :]
    assert [(group.backend, group.ranks, group.parity) for group in several] == [
        ("nccl", 4, "tcp"),
        ("nccl", 4, "nccl"),
    ]
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert [devices.begin(CUDA, rank) for rank in range(5)] == [CUDA] * 5
    assert taken == [0, 1, 2, 0, 1]
    assert devices.count(APART) == 1


def test_the_fullest_device_has_to_hold_its_ranks_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[int] = []
    monkeypatch.setattr(gpu_step, "roomiest", lambda device, sizes: wanted.append(sizes[0][1]))
    for devices_here in (1, 3, 4, 8):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices_here=devices_here: devices_here)
        gpu_step.fitting(gpu_step.FULL, gpu_step.SHARED)
    whole = wanted[0]
    assert wanted == [whole, whole // 2, whole // 4, whole // 4]  # four ranks on three devices: two on one


def test_deltas_over_nccl_are_not_measured_with_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def measure(
        scale: Scale, group: gpu_step.Group, samples: int, *, overlap: bool, seed: int
    ) -> Iterator[Row]:
        asked.append((group.parity, overlap))
        yield once("x", "s", 1.0)

    monkeypatch.setattr(gpu_step, "measure", measure)
    monkeypatch.setattr(gpu_step.dist, "is_nccl_available", lambda: True)
    gpu.kept(gpu_step.ask(gpu_step.FULL, gpu_step.APIECE, 8192, 0, until=float("inf")))
    assert asked == [("tcp", True), ("tcp", False), ("nccl", False)]
