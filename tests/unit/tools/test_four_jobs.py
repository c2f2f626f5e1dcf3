"""Four jobs on GPUs by `ecemb plan`, beside arithmetic by hand: the tables of docs/guides/planning.md.

The arithmetic by hand is older than the model: 3.0 core-seconds for a GB of changed rows with r = 1, and
records without padding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from ecemb.__main__ import main
from ecemb.tools.window_cost import MEMORY, STAGED

SKEWS = ("1.05", "1.2")


@dataclass(frozen=True)
class Reckoned:
    """A job, and what was reckoned by hand.

    Attributes:
        words: the command's options.
        code: the code; two hosts are too few for (4, 3).
        windows_s: window in seconds -> GB of a rank that it changes, and processors of a rank that its
            commits keep busy, each for both skews.
        tables_gb: tables of a rank.
        memory_gb: images and parity of a host.
    """

    words: str
    code: str
    windows_s: Mapping[int, tuple[tuple[float, float], tuple[float, float]]]
    tables_gb: float
    memory_gb: float


JOBS = {
    "64 GPUs": Reckoned(
        "--hosts 8 --table-gb 4480 --row-bytes 260 --step-ms 100 --features 300 --ids 10 --batch 2048",
        "4,3",
        {10: ((16.8, 5.5), (5.0, 1.7)), 60: ((45.8, 18.2), (2.3, 0.9))},
        70,
        747,
    ),
    "MLPerf's DLRM": Reckoned(
        "--hosts 1 --table-gb 104 --row-bytes 516 --step-ms 8 --features 26 --ids 8.23 --batch 8192",
        "4,3",
        {10: ((13.1, 10.3), (3.9, 3.1))},
        13,
        140,
    ),
    "1,024 GPUs": Reckoned(
        "--hosts 128 --table-gb 71680 --row-bytes 260 --step-ms 120 --features 800 --ids 20 --batch 1024",
        "4,3",
        {10: ((25.3, 7.4), (7.6, 2.2))},
        70,
        747,
    ),
    "16 GPUs": Reckoned(
        "--hosts 2 --table-gb 640 --row-bytes 132 --step-ms 50 --features 100 --ids 2 --batch 2048",
        "2,1",
        {30: ((4.7, 1.5), (0.47, 0.15))},
        40,
        640,
    ),
}


def asked(job: Reckoned, skew: str, *more: str) -> list[str]:
    return ["plan", *job.words.split(), "--device", "cuda", "--code", job.code, "--skew", skew, *more]


def planned(capsys: pytest.CaptureFixture[str], job: Reckoned, skew: str, *more: str) -> Any:
    assert main(asked(job, skew, *more, "--json")) == 0
    (found,) = json.loads(capsys.readouterr().out)["estimates"]
    return found


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_windows_are_as_reckoned(job: Reckoned, capsys: pytest.CaptureFixture[str]) -> None:
    """Records are padded to words of 8 bytes, which is up to 3 % more."""
    for seconds, (changed_gb, cores) in job.windows_s.items():
        for skew, gb, busy in zip(SKEWS, changed_gb, cores, strict=True):
            window = planned(capsys, job, skew, "--window", f"{seconds} s")["window"]
            assert window["changed_bytes"] / 1e9 == pytest.approx(gb, rel=0.05)
            assert sum(window["work_s"].values()) / window["window_s"] == pytest.approx(busy, rel=0.07)


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_plan_answers(job: Reckoned, skew: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Cost, replays, memory, both recoveries, what is used up first, and settings that change it."""
    found = planned(capsys, job, skew)
    window, memory = found["window"], found["window"]["memory_bytes"]
    assert 8 * (memory["images"] + memory["parity"]) / 1e9 == pytest.approx(job.memory_gb, rel=0.035)
    assert window["host_bytes"] == 8 * sum(memory.values()) == pytest.approx(8 * found["memory_bytes"])
    assert window["used"][MEMORY] <= 1 and window["reserve_bytes"] == 32 << 30
    assert next(iter(window["used"])) == STAGED
    assert 0.5 <= window["replayed_steps"] / window["steps"] <= 1.5
    assert found["process_recovery_s"] > 30 + job.tables_gb / 4.6
    assert main(asked(job, skew)) == 0
    shown = capsys.readouterr().out
    for said in (
        "training waits: ",
        "a failure takes back ",
        "to the next step after the death of a process: ",
        "after the death of a host: ",
        "host memory of a rank: images ",
        "; 34.4 GB stay free",
        "less with",
        'window="auto", overlap=True',
    ):
        assert said in shown


def test_a_long_window_of_the_large_job_costs_less(capsys: pytest.CaptureFixture[str]) -> None:
    """Short ones cost more than a step by hand as well, and replay 1.5 windows where commits are late."""
    large = JOBS["64 GPUs"]
    short, long = (planned(capsys, large, "1.05", "--window", f"{length} s")["window"] for length in (10, 60))
    assert short["overhead"] > 1 > long["overhead"]
    assert short["replayed_steps"] / short["steps"] == pytest.approx(1.5, abs=0.01)
    few = planned(capsys, large, "1.2", "--no-overlap")["window"]
    assert few["replayed_steps"] / few["steps"] == pytest.approx(0.5, abs=0.01)
