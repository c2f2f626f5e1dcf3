"""Commits on the host and on the device: equal bytes, or nothing is timed; and memory for both."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from bench import gpu_commit, gpu_memory
from bench.gpu_commit import DEVICE, HOST, INTERPRETED, Commits
from bench.gpu_commit_ways import Held, OnDevice, OnHost, Work
from bench.gpu_memory import Unregistered
from bench.result import Incomplete, WrongResult
from ecemb.kernels import cuda

CPU = torch.device("cpu")
PHASES = ("capture", "fetch", "delta", "parity")


@pytest.fixture
def work(seed: int) -> Work:
    return Work(Held(rows=60, dim=7, most=20, device=CPU, seed=seed), 13)


def ways(work: Work) -> dict[str, Commits]:
    return {HOST: Commits(work, OnHost(work)), DEVICE: Commits(work, OnDevice(work))}


def spare(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(work.held.memory.copy()), torch.from_numpy(work.held.memory.copy())


def test_commits_are_measured_in_both_ways(seed: int) -> None:
    rows = list(gpu_commit.measure(INTERPRETED, CPU, seed, math.inf))
    found = {
        (row.metric, row.labels.get("where"), row.labels.get("phase"), row.labels["rows"]) for row in rows
    }
    assert found == {
        *(("commit_ms", where, None, rows) for where in (HOST, DEVICE) for rows in INTERPRETED.touched),
        *(
            ("commit_phase_ms", where, phase, rows)
            for where in (HOST, DEVICE)
            for phase in PHASES
            for rows in INTERPRETED.touched
        ),
        *(("device_over_host", None, None, rows) for rows in INTERPRETED.touched),
    }
    assert all(row.value > 0 and row.labels["row_bytes"] == 512 for row in rows)


def test_both_ways_leave_the_same_behind(work: Work) -> None:
    held = work.held
    assert set(work.ids) != set(work.offsets // held.words)
    left: dict[str, bytes] = {}
    for where, commit in ways(work).items():
        begun = held.memory.copy()
        commit()
        left[where] = held.memory.tobytes()
        assert held.now == 1
        weights = held.tables[1][0].numpy()
        assert np.array_equal(held.table.columns[0][work.ids], weights[work.ids].view(np.uint8))
        others = np.setdiff1d(np.arange(60), work.ids)
        assert np.array_equal(held.table.columns[0][others], begun[: 60 * 28].reshape(60, 28)[others])
        assert set(commit.seconds) == set(PHASES)
        commit()
        work.forget()
        assert np.array_equal(held.memory, begun)
    assert left[HOST] == left[DEVICE]


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


@pytest.mark.parametrize("name", ["copy_rows_", "differ_rows_", "multiply_add_"])
def test_a_device_that_computes_something_else_is_not_timed(
    work: Work, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(cuda, name, nothing)
    with pytest.raises(WrongResult, match="^a commit of 13 rows on the device leaves other bytes behind$"):
        gpu_commit.check(work, ways(work), spare(work))


@pytest.mark.parametrize(
    ("phase", "wrong"),
    [("capture", "the journal"), ("fetch", "the image"), ("delta", "the delta"), ("parity", "parity")],
)
def test_a_host_that_computes_something_else_is_not_timed(work: Work, phase: str, wrong: str) -> None:
    host = OnHost(work)
    phases: dict[str, Callable[[], None]] = {**host.phases, phase: nothing}
    host.phases = phases
    with pytest.raises(WrongResult, match=f"^after a commit of 13 rows, {wrong} isn't what it should be$"):
        gpu_commit.check(work, {HOST: Commits(work, host)}, spare(work))


def test_a_commit_that_is_not_taken_back_is_not_timed(work: Work) -> None:
    commit = Commits(work, OnHost(work))

    def once() -> None:
        if work.held.now == 0:
            commit()

    with pytest.raises(WrongResult, match="^two commits of 13 rows on the host don't cancel each other$"):
        gpu_commit.check(work, {HOST: cast("Commits", once)}, spare(work))


def test_without_registered_memory_the_device_is_left_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def refused(*_: Any) -> Generator[None]:
        raise Unregistered("cudaHostRegister: out of memory")
        yield

    monkeypatch.setattr(gpu_commit, "registered", refused)
    left_out, *rows = gpu_commit.measure(INTERPRETED, CPU, seed, math.inf)
    assert left_out.metric == "left_out"
    assert left_out.labels == {"what": "commits on the device", "why": "cudaHostRegister: out of memory"}
    assert {row.metric for row in rows} == {"commit_ms", "commit_phase_ms"}
    assert {row.labels["where"] for row in rows} == {HOST}


def test_commits_that_there_is_no_time_for_are_not_begun(seed: int) -> None:
    scale = dataclasses.replace(INTERPRETED, touched=(20,))
    with pytest.raises(Incomplete, match="^commits of 20 rows: not begun, with 1 s left$"):
        list(gpu_commit.measure(scale, CPU, seed, time.monotonic() + 1.4))


# --- registering -----------------------------------------------------------------------------------


class Runtime:
    """Stands in for CUDA's runtime."""

    def __init__(self, register: int = 0, unregister: int = 0) -> None:
        self.cudaError = SimpleNamespace(success=0)
        self.codes = {"cudaHostRegister": register, "cudaHostUnregister": unregister}
        self.called: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Callable[..., int]:
        code = self.codes[name]

        def call(*arguments: int) -> int:
            self.called.append((name, *arguments))
            self.threads.add(threading.get_ident())
            return code

        return call

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return f"error {code}"


@pytest.fixture
def memory() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return gpu_memory.mapped(8192)


def run_on(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, *, pinned: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", nothing)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: pinned)


def test_memory_is_registered_while_it_is_needed(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    run_on(runtime, monkeypatch)
    with gpu_memory.registered(memory, torch.device("cuda")):
        assert runtime.called == [("cudaHostRegister", memory.ctypes.data, 8192, 0)]
    assert runtime.called[1:] == [("cudaHostUnregister", memory.ctypes.data)]
    assert threading.get_ident() not in runtime.threads  # where CUDA would keep an error for torch to find


def test_memory_that_is_refused_is_not_taken_for_registered(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for runtime, pinned, why in (
        (Runtime(register=2), True, r"^cudaHostRegister: error 2 \(2\)$"),
        (Runtime(), False, "^CUDA has registered memory that torch doesn't take for pinned$"),
        (Runtime(unregister=7), True, r"^cudaHostUnregister: error 7 \(7\)$"),
    ):
        run_on(runtime, monkeypatch, pinned=pinned)
        with pytest.raises(Unregistered, match=why), gpu_memory.registered(memory, torch.device("cuda")):
            assert runtime.codes["cudaHostUnregister"]
        assert len(runtime.called) == (1 if runtime.codes["cudaHostRegister"] else 2)


def test_other_devices_need_no_registering(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", None)
    with gpu_memory.registered(memory, CPU):
        memory[:] = 1
    assert memory.sum() == 8192
