"""How a real job ends by an exception: torchrun names the first error, and stops restarting.

Workers are started cold or warm: a fork server imports the exception hook before it forks them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from failures.driver import ROOT
from support.warm_starts import Home, home

WORKER = Path(__file__).with_name("ending_worker.py")


@pytest.fixture(scope="module")
def here() -> Iterator[Home]:
    with home() as made:
        made.environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        yield made


def launch(
    here: Home, folder: Path, how: str, *more: str, warm: bool, restarts: int, ranks: int, code: int = 1
) -> str:
    """What a launch that ends with a code has written; its workers are started by python, or warm."""
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=0.05"]
    start = here.command(options=()) if warm else [sys.executable]
    ended, out, err = here.torchrun(*options, *start, str(WORKER), str(folder), how, *more)
    assert ended == code, err
    return out + err


def test_an_error_that_comes_again_is_said_once_and_waited_after(here: Home, tmp_path: Path) -> None:
    log = launch(here, tmp_path, "misfit", warm=True, restarts=3, ranks=2)
    assert len(list(tmp_path.glob("start.*.0"))) == 4
    again = re.findall(r"ERROR (start \d in a row that ends by PlacementError, next in \d s): .+", log)
    assert again == [
        f"start {n} in a row that ends by PlacementError, next in {2 ** (n - 1)} s" for n in (2, 3)
    ]
    starts = re.split(r"ERROR start \d in a row", log)
    assert len(starts) == 3 and not re.search(r"Traceback|errors.PlacementError: ", starts[1], re.MULTILINE)
    assert re.search(r"^\[rank0\]: ecemb.errors.PlacementError: ", starts[0], re.MULTILINE)
    last = starts[2].partition("Root Cause")
    assert re.search(
        r"^\[rank0\]: ecemb.errors.PlacementError: ", last[0], re.MULTILINE
    )  # nobody starts again
    assert "PlacementError: " in last[2]
    assert all(len(line) < 200 for line in log.splitlines() if line.startswith("ERROR start"))


@pytest.mark.parametrize(("warm", "words"), [(False, ()), (True, ("record",))], ids=["cold", "warm"])
def test_the_first_error_is_the_root_cause_whoever_ends_first(
    here: Home, warm: bool, words: tuple[str, ...], tmp_path: Path
) -> None:
    log = launch(here, tmp_path, "raise", *words, warm=warm, restarts=0, ranks=2 + warm)
    root = log.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"^  rank      : 1 ", root, re.MULTILINE), log
    assert "ValueError: the first error of all" in root
    assert "line " in root and "ending_worker.py" in root


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_rank_whose_threads_never_end_ends_after_its_error(here: Home, warm: bool, tmp_path: Path) -> None:
    log = launch(here, tmp_path, "stuck", warm=warm, restarts=1, ranks=1, code=0)  # no other rank ends it
    assert sorted(path.name for path in tmp_path.glob("start.*")) == ["start.0.0", "start.1.0"]
    assert "ValueError: of the script" in log
    [line] = [one for one in log.splitlines() if "can't end by itself" in one]
    assert re.search(
        r"^ERROR this process has failed.*ThreadPoolExecutor-\d_0 is in produce \(.*with code 1", line
    )
