"""Trainings under stock torchrun, started cold and warm: the same bits, also when a warm one is killed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import pytest

from support.warm_starts import TRAINS, Home, home


@pytest.fixture(scope="module")
def here() -> Iterator[Home]:
    with home() as made:
        made.environment["OMP_NUM_THREADS"] = "1"
        yield made


PATIENT = """
from ecemb.net import rendezvous, worker_exit
rendezvous._STUCK_S = rendezvous._PATIENCE_S = worker_exit.NEWS_S = 600.0
"""
"""However slow the machine is, a worker waits for news of a death, and a replacement for the others."""


def train(
    here: Home, job: str, killed: str, command: list[str], restarts: int = 1
) -> tuple[list[list[str]], str]:
    """What each rank left, and what torchrun printed.

    By rank: a digest of where it ended, its last parent, its threads, phases of its start, torchrun's
    restarts, and how many workers were replaced before it.
    """
    script = ["train.py", str(here.folder), str(here.arena_dir), job, killed, "8"]
    code, _, err = here.torchrun("--nproc-per-node=2", f"--max-restarts={restarts}", *command, *script)
    assert code == 0, err
    return [(here.folder / f"{job}-{rank}").read_text().split() for rank in range(2)], err


@pytest.fixture(scope="module")
def cold(here: Home) -> list[list[str]]:
    """What an undisturbed training, started by python, ends with."""
    here.write("train.py", PATIENT + TRAINS)
    return train(here, "cold", "nobody", [sys.executable])[0]


@pytest.mark.parametrize("killed", ["1", "0", "0,1"])
def test_workers_that_died_are_replaced_and_torchrun_notices_nothing(
    here: Home, cold: list[list[str]], killed: str
) -> None:
    """Without a restart by torchrun, which may make none here."""
    warm, err = train(here, f"replaced-{killed[::2]}", killed, here.command(options=()), restarts=0)
    assert [one[0] for one in warm] == [one[0] for one in cold]
    assert [one[4:] for one in warm] == [["0", "1"]] * 2, err
    assert "exitcode" not in err, err


@pytest.mark.parametrize(("killed", "option"), [("1", "--no-replace"), ("raises 1", "")])
def test_other_ends_are_left_to_torchrun(here: Home, cold: list[list[str]], killed: str, option: str) -> None:
    """A death, if the command says so, and an error of the script, which torchrun's summary names."""
    command = here.command(options=[option] if option else ())
    warm, err = train(here, f"left{option}", killed, command)
    assert [one[0] for one in warm] == [one[0] for one in cold]
    assert [one[4:] for one in warm] == [["1", "0"]] * 2
    assert "exitcode" in err


def test_a_warm_training_is_that_of_a_plain_start(here: Home, cold: list[list[str]]) -> None:
    warm, _ = train(here, "warm", "nobody", here.command(options=()))
    assert [one[0] for one in warm] == [one[0] for one in cold]
    assert [one[2] for one in warm] == [one[2] for one in cold] == ["1", "1"]
    assert {one[3] for one in cold} == {"script,rendezvous"}
    assert {one[3] for one in warm} == {"fork,script,rendezvous"}
    assert warm[0][1] == warm[1][1] and int(warm[0][1]) != os.getpid()
    assert not [line for line in here.processes().values() if "train.py" in line and "server" not in line]


SPEAKS = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    print("out", os.environ["RANK"], flush=True)
    print("err", os.environ["RANK"], file=sys.stderr)
    raise ValueError("on purpose")

main()
"""


def test_torchruns_files_and_its_summary_are_written_as_in_a_plain_start(here: Home) -> None:
    here.write("speaks.py", SPEAKS)
    options = ["--nproc-per-node=1", "--max-restarts=1", "--redirects=3", "--tee=1"]
    for name, command in {"plain": [sys.executable], "warm": here.command(options=())}.items():
        logs = here.folder / name
        code, out, err = here.torchrun(*options, f"--log-dir={logs}", *command, "speaks.py")
        files = {"/".join(path.parts[-3:]): path.read_text() for path in logs.glob("*/*/*/*")}
        assert code == 1
        for attempt in range(2):
            place = f"attempt_{attempt}/0"
            assert files[f"{place}/stdout.log"] == "out 0\n"
            assert files[f"{place}/stderr.log"].startswith("err 0\n")
            error = json.loads(files[f"{place}/error.json"])
            assert error["message"]["message"] == "ValueError: on purpose"
            assert "speaks.py" in error["message"]["extraInfo"]["py_callstack"]
        assert "[default0]:out 0\n" in out
        assert "Root Cause" in err and "ValueError: on purpose" in err
