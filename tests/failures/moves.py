"""A second failure in each stage of a move to another number of ranks: real processes, real SIGKILLs.

    python tests/failures/moves.py [--seed N] [PATTERN...]

Four ranks on a host each train, and a host is lost with its memory. Three ranks go on from memory; in a stage
of that move, one of them is killed: its process, with or without its memory, RANK 0's, or torchrun with all
workers and its store. The start after that must go on, and all tables, dense parameters and optimizer state
must have the bits that a save and a resume on three ranks give, at its begin and after some more steps.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import torch

from failures.move_worker import KINDS, STAGES
from support.torchrec.checkpoint_runs import ROOT

MOST_LINES = 400
DEADLINE_S = 600.0
FIRST, SECOND = ("first", "a,b,c,d", "3", "d"), ("second", "a,b,c", "5")
"""Name, hosts, the step after which a launch ends, and the host that is lost in it."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Cell:
    """A failure in a move.

    Attributes:
        stage: in which.
        kind: whose.
    """

    stage: str
    kind: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.kind}"


CELLS = [Cell(stage, kind) for stage in STAGES for kind in KINDS]


@contextmanager
def prepared() -> Iterator[Path]:
    """A folder with the memory that the three ranks go on from, and with what they have to come to."""
    with tempfile.TemporaryDirectory(prefix="ecemb-moves-", dir="/dev/shm") as folder:
        root = Path(folder, "origin")
        root.mkdir()
        finish(launch(root, "durable", *FIRST[:3], ""))
        finish(launch(root, "durable", *SECOND))
        finish(launch(root, "elastic", *FIRST), fails=True)
        yield root


def launch(root: Path, *arguments: str, death: str = "", restarts: int = 0) -> subprocess.Popen[bytes]:
    """One torchrun."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
        "ECEMB_MOVE_DEATH": death,
    }
    command = [sys.executable, "-W", "ignore", "-m", "support.forked_torchrun", "support.moving_imports"]
    command += ["--nproc-per-node", str(len(arguments[2].split(","))), "--max-restarts", str(restarts)]
    command += [str(ROOT / "tests/failures/move_worker.py"), str(root), *arguments]
    with (root / "log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def finish(process: subprocess.Popen[bytes], *, fails: bool = False) -> None:
    """Waits for the end of a launch.

    Raises:
        AssertionError: it failed, or did not end.
    """
    try:
        code = process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert bool(code) == fails, f"torchrun ended with {code}"


def play(origin: Path, cell: Cell, choice: random.Random) -> str:
    """Plays one cell; returns the line at which the process was killed.

    Raises:
        AssertionError: a start failed, or bits differ; the log of the launch is in the message.
    """
    root = origin.with_name("cell")
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run(["cp", "-r", "--sparse=always", str(origin), str(root)], check=True)
    (root / "log").unlink()
    victim = 0 if cell.kind == "leader" else choice.randrange(1, 3)
    line = int(MOST_LINES ** choice.random())
    death = f"{cell.stage},{line},{victim},{cell.kind}"
    try:
        process = launch(root, "elastic", *SECOND, death=death, restarts=1)
        if cell.kind == "torchrun":
            deadline = time.monotonic() + DEADLINE_S
            while not (root / "died").exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            process.kill()
            process.wait()
            process = launch(root, "elastic", *SECOND)
        finish(process)
        assert (root / "died").exists(), "no process was killed"
        for name in ("begins", "ends"):
            one, other = (torch.load(root / f"{way}-second.{name}") for way in ("elastic", "durable"))
            wrong = [key for key in one.keys() | other.keys() if not torch.equal(one[key], other[key])]
            assert not wrong, f"{name}: other bits in {wrong}"
        assert not list(root.glob("*/elastic/[abc]/*.arena")), "arenas are left"
    except AssertionError as error:
        log = (root / "log").read_text(errors="replace")[-6000:]
        raise AssertionError(f"{cell} (line {line} of rank {victim}): {error}\n{log}") from error
    return (root / "died").read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("patterns", nargs="*", help="of cells, such as 'carrying rows: *'")
    options = parser.parse_args()
    choice, failed = random.Random(options.seed), 0
    print(f"seed {options.seed}", flush=True)
    wanted = [
        cell for cell in CELLS if any(fnmatch.fnmatch(str(cell), one) for one in options.patterns or ("*",))
    ]
    with prepared() as origin:
        for cell in wanted:
            try:
                print(f"{cell!s:45} holds, killed at {play(origin, cell, choice)}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"{cell!s:45} FAILS\n{error}", flush=True)
    print(f"{len(wanted) - failed} of {len(wanted)} cells hold")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
