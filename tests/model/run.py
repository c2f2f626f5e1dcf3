"""What `make model` searches and prints."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from .background_table import BACKGROUND, BACKGROUND_FULL, BACKGROUND_QUICK
from .lanes_table import LANES, LANES_FULL, LANES_QUICK
from .moves import Moves
from .rounds_table import ROUNDS, ROUNDS_FULL, ROUNDS_QUICK
from .rules import Config
from .search import Result, Searched, search
from .starts import Starts
from .table import ENTRIES, Entry, table

ALONE = ((1, 0, 0), (2, 2, 1))
HALVED = ((2, 2, 1), (4, 4, 2))
TWICE = ((3, 3, 1), (4, 4, 2))
"""Codes of moves between one rank and two, two and four, and with r = 2 between three and four."""

QUICK = (
    Config(steps=1, crashes=1, losses=1, fails=1),
    Config(n=2, k=1, size=2, steps=1, crashes=2, losses=1, aborts=1, fails=2),
    Config(n=2, k=1, size=2, steps=1, crashes=2, losses=1, relaunches=1, fails=1, close=True, fresh=True),
    Config(crashes=1, overlap=True),
    Config(n=2, k=1, size=2, crashes=1, losses=1, fails=1, overlap=True, apart=True),
    Config(n=2, k=1, size=2, steps=1, crashes=1, losses=1, aborts=1, fails=1, overlap=True, apart=True),
    Starts(crashes=1, cuts=2, resumes=1, tombstones=1),
    Starts(crashes=1, losses=1, cuts=1, formats=1),
    Starts(steps=1, crashes=1, losses=1, relaunches=1, tombstones=1, close=True, fresh=True),
    Moves(size=2, crashes=1, losses=1),
    Moves(crashes=1, losses=1),
    Moves(size=2, codes=ALONE, losses=1),
    Moves(size=4, codes=TWICE, steps=1, crashes=1, losses=2),
)
"""For `make test`."""

FULL = (
    *QUICK,
    Config(n=2, k=1, steps=1, crashes=1, losses=1, cuts=1),
    Config(crashes=2, losses=2, fresh=True),
    Config(crashes=3, losses=2, fresh=True),
    Config(n=4, k=2, size=4, crashes=1, losses=2, fresh=True),
    Config(n=2, k=1, size=4, steps=1, crashes=1, losses=1),
    Config(n=2, k=1, size=2, steps=1, crashes=2, losses=2, cuts=1),
    Config(n=2, k=1, size=2, steps=1, crashes=2, losses=1, cuts=1, skew=True),
    Config(steps=1, crashes=2, losses=1, relaunches=1, close=True, fresh=True),
    Config(crashes=1, losses=1, aborts=1),
    Config(n=2, k=1, size=2, crashes=2, losses=1, aborts=1, fails=1, overlap=True),
    Config(n=2, k=1, size=2, steps=3, crashes=2, losses=1, fails=1, overlap=True),
    Config(crashes=1, losses=1, aborts=1, overlap=True),
    Config(n=2, k=1, size=4, crashes=1, overlap=True),
    Config(crashes=2, losses=1, overlap=True),
    Config(n=2, k=1, size=2, crashes=2, losses=1, overlap=True, apart=True),
    Config(n=2, k=1, size=2, steps=3, crashes=1, losses=1, fails=1, overlap=True, apart=True),
    Config(n=2, k=1, size=2, crashes=1, losses=1, aborts=2, fails=1, overlap=True, apart=True),
    Config(steps=1, crashes=1, losses=1, fails=1, overlap=True, apart=True),
    Config(crashes=1, fails=1, overlap=True, apart=True),
    Starts(cuts=2, resumes=1, tombstones=1),
    Starts(losses=1, cuts=1, relaunches=1, resumes=1, tombstones=1),
    Starts(losses=1, cuts=1, formats=1, resumes=1),
    Starts(losses=1, cuts=2, resumes=1),
    Starts(steps=1, losses=1, cuts=1, relaunches=1, tombstones=1, close=True, fresh=True),
    Starts(n=3, k=2, size=3, steps=1, cuts=2, resumes=1),
    Starts(n=3, k=1, size=3, steps=1, losses=2, fresh=True),
    Moves(size=1, codes=ALONE),
    Moves(size=3, codes=TWICE, steps=1, crashes=1, losses=2),
    Moves(size=4, codes=HALVED, steps=1, crashes=1, losses=2),
    Moves(size=2, crashes=3),
    Moves(losses=1),
    Moves(losses=2),
    Moves(size=2, cuts=1),
    Moves(cuts=1),
    Moves(size=2, crashes=1, cuts=2),
    Moves(size=2, losses=1, relaunches=1),
    Moves(losses=1, cuts=1),
)
"""For `make model`."""


TABLES = ENTRIES, ROUNDS, BACKGROUND, LANES
"""Of docs/protocol.md, in its order."""
ALL_ENTRIES = tuple(entry for entries in TABLES for entry in entries)
ALL_QUICK = *QUICK, *ROUNDS_QUICK, *BACKGROUND_QUICK, *LANES_QUICK
ALL_FULL = *FULL, *ROUNDS_FULL, *BACKGROUND_FULL, *LANES_FULL


def report(config: Searched, result: Result) -> str:
    """One line of the verdicts."""
    verdict = result.broken or ("fine" if result.complete else "not all seen")
    return f"{config}: {result.states:,} states, {result.seconds:.0f} s: {verdict}"


COUNTED = {
    "crashes": ("crash", "crashes"),
    "losses": ("loss", "losses"),
    "cuts": ("host cut off", "hosts cut off"),
    "aborts": ("abort", "aborts"),
    "relaunches": ("new store", "new stores"),
    "fails": ("exception", "exceptions"),
    "shortages": ("journal full", "journals full"),
    "choices": ("smaller window", "smaller windows"),
    "resumes": ("resume", "resumes"),
    "tombstones": ("tombstone", "tombstones"),
    "formats": ("other format", "other formats"),
}


def searched(config: Searched, states: int) -> str:
    """The line of a search that found nothing wrong, in the tables of docs/protocol.md."""
    text = re.sub(
        r"^moves between (.*), (.*): from N=(\d+), \d steps", r"moves between \1 and \2; from \3", str(config)
    )
    job: list[str] = []
    bounds: list[str] = []
    for part in text.split(", "):
        number, _, what = part.partition(" ")
        if what in COUNTED:
            bounds.append(f"{number} {COUNTED[what][number != '1']}")
        elif part == "clocks apart":
            bounds.append(part)
        elif part == "saves":
            job.append("a `save` after step 1")
        elif part in ("fresh", "fresh start"):
            job.append("from the fresh start")
        elif part != "close":
            job.append(re.sub("^1 (step|request)s", r"1 \1", part).replace("; from", ", from"))
    if "close" in text.split(", "):
        job[-1] += " to the close"
    return f"| {', '.join(job)} | {', '.join(bounds)} | {states:,} | fine |"


def explain(entry: Entry) -> bool:
    """Prints the counterexample of a rule; whether it is as expected."""
    result = entry.search()
    print(f"\n{entry.rule}: {entry.says}\nwithout it: {entry.without}\n({report(entry.config, result)})")
    for line in result.trace:
        print(f"    {line}")
    return result.broken.partition(":")[0] == entry.kind


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(prog="python tests/model", description=__doc__)
    parser.add_argument(
        "--rule",
        choices=sorted({e.rule for e in ALL_ENTRIES}),
        help="print this rule's counterexample only",
    )
    parser.add_argument(
        "--table", action="store_true", help="print the tables of rules in docs/protocol.md only"
    )
    parser.add_argument(
        "--searched", action="store_true", help="print the tables of searches in docs/protocol.md only"
    )
    parser.add_argument("--quick", action="store_true", help="search only what `make test` searches")
    args = parser.parse_args(arguments)
    if args.table:
        for entries in TABLES:
            for line in table(entries):
                print(line, flush=True)
        return 0
    if args.searched:
        for config in ALL_QUICK if args.quick else ALL_FULL:
            print(searched(config, search(config).states), flush=True)
        return 0
    fine = True
    if args.rule is None:
        for config in ALL_QUICK if args.quick else ALL_FULL:
            result = search(config)
            print(report(config, result), flush=True)
            for line in result.trace:
                print(f"    {line}")
            fine = fine and result.complete
    for entry in ALL_ENTRIES:
        if args.rule in (None, entry.rule):
            fine = explain(entry) and fine
    return 0 if fine else 1
