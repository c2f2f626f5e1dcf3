"""The advice about torchrun's settings: what is missing is named, and nothing is said of the rest."""

from __future__ import annotations

import pytest

from ecemb.launch.stub import advice_on_torchrun

JOB = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_MAX_RESTARTS": "3"}
APART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
FAST = ["/bin/python", "/bin/torchrun", "--monitor-interval=0.01"]
KEPT = "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=5"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, ["torchrun"]),
        (JOB, FAST),
        (JOB, ["python", "-m", "torch.distributed.run", "--monitor_interval", "0.05", "--nnodes", "1:1"]),
        (JOB | {"PET_MONITOR_INTERVAL": "0.02"}, ["torchrun"]),
        (JOB, ["python", "launcher_of_my_own.py"]),
        (JOB, []),
        (JOB | APART, [*FAST, "--nnodes=4", KEPT]),
        (JOB | APART, [*FAST, "--nnodes", "2:4", f"{KEPT},last_call_timeout=1"]),
    ],
)
def test_nothing_is_said_where_nothing_is_missing(environment: dict[str, str], words: list[str]) -> None:
    assert advice_on_torchrun(environment, words) is None


@pytest.mark.parametrize(
    ("environment", "words", "missing"),
    [
        (JOB | {"TORCHELASTIC_MAX_RESTARTS": "0"}, FAST, ["--max-restarts 100 (it is 0"]),
        (JOB, ["torchrun", "--standalone"], ["--monitor-interval 0.01 (it is 0.1)"]),
        (JOB, ["torchrun", "--monitor-interval", "5"], ["--monitor-interval 0.01 (it is 5)"]),
        (JOB, [*FAST, "--nnodes=4", KEPT], ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]),
        (JOB | APART, [*FAST, "--nnodes=4"], ["keep_alive_interval=1,keep_alive_max_attempt=5"]),
        (JOB | APART, [*FAST, "--nnodes=2:4", KEPT], ["--rdzv-conf last_call_timeout=1"]),
    ],
)
def test_what_is_missing_is_named_in_one_line(
    environment: dict[str, str], words: list[str], missing: list[str]
) -> None:
    line = advice_on_torchrun(environment, words)
    assert line is not None and "\n" not in line
    assert all(one in line for one in missing)
    assert line.count(" and ") == len(missing) - 1
