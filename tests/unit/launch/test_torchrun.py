"""Trainings under stock torchrun, started cold and warm: the same bits, also when a warm one is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.warm_starts import DEADLINE_S, TRAINS, Home, home


@pytest.fixture(scope="module")
def here() -> Iterator[Home]:
    with home() as made:
        made.environment["OMP_NUM_THREADS"] = "1"
        yield made


def train(here: Home, job: str, killed: str, command: list[str]) -> list[list[str]]:
    """By rank: a digest of where it ended, its last parent, its threads, and phases of its start."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=2",
    ]
    script = ["train.py", str(here.folder), str(here.arena_dir), job, killed, "8"]
    done = subprocess.run(
        [*launch, "--no-python", *command, *script],
        cwd=here.folder,
        env=here.environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
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
    if sys.argv[1:]:
        raise ValueError(*sys.argv[1:])

main()
"""


def speak(here: Home, ranks: int, command: list[str], *words: str) -> tuple[int, str, dict[str, str]]:
    """torchrun's exit code, its own output, and the files that it has kept of its workers."""
    logs = here.folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launch += ["--monitor-interval=0.01", "--max-restarts=1", f"--log-dir={logs}", "--redirects=3", "--tee=1"]
    code, out, err = here.run([*launch, "--no-python", *command, "speaks.py", *words])
    found = {"/".join(path.parts[-3:]): path.read_text() for path in sorted(logs.glob("*/*/*/*"))}
    return code, out + err, found


def test_torchruns_files_are_written_as_in_a_plain_start(here: Home) -> None:
    here.write("speaks.py", SPEAKS)
    plain, warm = [sys.executable], here.command()
    for command in (plain, warm):
        code, shown, files = speak(here, 2, command)
        assert code == 0
        assert {name: text for name, text in files.items() if text} == {
            f"attempt_0/{rank}/{stream}.log": f"{stream[3:]} {rank}\n"
            for rank in range(2)
            for stream in ("stdout", "stderr")
        }
        assert "[default0]:out 0\n" in shown and "[default1]:out 1\n" in shown


def test_an_error_reaches_torchruns_error_file_and_its_summary(here: Home) -> None:
    here.write("speaks.py", SPEAKS)
    for command in ([sys.executable], here.command()):
        code, shown, files = speak(here, 1, command, "on purpose")
        assert code == 1
        for attempt in range(2):
            error = json.loads(files[f"attempt_{attempt}/0/error.json"])
            assert error["message"]["message"] == "ValueError: on purpose"
            assert "speaks.py" in error["message"]["extraInfo"]["py_callstack"]
        assert "Root Cause" in shown and "ValueError: on purpose" in shown
