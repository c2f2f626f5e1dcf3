"""The simulator: whole jobs in one process, each from a seed (CONTRIBUTING.md, "The simulator").

    python tests/simulator [--seeds 1000] [--first 0] [--seed N] [--minutes M]
    python tests/simulator defects [--seeds 2000] [--only PATTERN] [--json FILE]

With `--seed`, one run is shown line by line. Ends with code 1 if a run differs from its twin, and prints the
command that repeats it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set of strings is a part of a run
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, *sys.argv])

sys.path[:0] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

from bench.harness import register  # noqa: E402 - the path comes first
from simulator import defects, job  # noqa: E402

_EVERY = 500


def main(words: Sequence[str]) -> int:
    """Runs seeds; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/simulator", description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this seed alone, and show it")
    parser.add_argument("--minutes", type=float, help="begin no run after this time")
    given = parser.parse_args(words)
    if given.seed is not None:
        return 0 if _succeeds(given.seed, shows=True) else 1
    began, done, failed = time.monotonic(), 0, list[int]()
    lives = moments = 0
    for seed in range(given.first, given.first + given.seeds):
        if given.minutes is not None and time.monotonic() - began > 60 * given.minutes:
            break
        try:
            one = job.run(seed)
        except Exception as error:  # noqa: BLE001 - reported, and the next seed runs
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}\n    {repeat(seed)}", flush=True)
        else:
            lives, moments = lives + one.lives, moments + one.baton.moments
        done += 1
        if done % _EVERY == 0:
            print(
                f"{done} seeds, {len(failed)} failed, {time.process_time():.0f} s of a processor", flush=True
            )
    print(
        f"{done} seeds from {given.first} on: {lives} lives, {moments} moments, {len(failed)} differences "
        f"({time.process_time():.0f} s of a processor)"
    )
    return 1 if failed else 0


def repeat(seed: int) -> str:
    """The command that repeats a run."""
    return f"python tests/simulator --seed {seed}"


def _succeeds(seed: int, *, shows: bool) -> bool:
    try:
        one = job.run(seed, print if shows else lambda line: None)
    except Exception:  # noqa: BLE001 - shown
        traceback.print_exc(file=sys.stdout)
        return False
    print(f"seed {seed}: {one.lives} lives, {one.baton.moments} moments, trace {one.baton.trace:08x}")
    return True


if __name__ == "__main__":
    if sys.argv[1:2] == ["defects"]:
        sys.exit(register.script("defects", defects.main, "tests/simulator defects", sys.argv[2:]))
    sys.exit(main(sys.argv[1:]))
