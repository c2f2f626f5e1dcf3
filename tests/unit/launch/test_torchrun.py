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


def train(here: Home, job: str, killed: str, command: list[str]) -> list[list[str]]:
    """By rank: a digest of where it ended, its last parent, its threads, and phases of its start."""
    script = ["train.py", str(here.folder), str(here.arena_dir), job, killed, "8"]
    code, _, err = here.torchrun("--nproc-per-node=2", "--max-restarts=2", *command, *script)
    assert code == 0, err
    return [(here.folder / f"{job}-{rank}").read_text().split() for rank in range(2)]


def test_a_warm_training_ends_with_the_same_bits_whatever_is_killed(here: Home) -> None:
    here.write("train.py", TRAINS)
    cold = train(here, "cold", "nobody", [sys.executable])
    warm = train(here, "warm", "1", here.command(options=()))
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
