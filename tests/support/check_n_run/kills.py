"""Processes that write checkpoints, killed at random moments: each restore is the last whole one, exactly.

`make kills` is the long form; a short one is among the tests.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tqdm import tqdm

from baselines.check_n_run.policy import POLICIES
from baselines.check_n_run.store import Folder
from bench.harness import register
from bench.harness.result import Arguments, Row, document, once, write
from support.check_n_run.training import Life, is_right
from support.fork_server import fork_server

DEADLINE_S = 300
CHUNK_BYTES = 200


@dataclass(frozen=True)
class Kill:
    """What was found after one.

    Attributes:
        policy: of the checkpoints.
        last: the step of the last checkpoint that was reported complete.
        found: the step of what was restored.
        exact: all restored rows are those of that step.
        in_writing: the writer was killed within a save.
    """

    policy: str
    last: int
    found: int
    exact: bool
    in_writing: bool

    @property
    def holds(self) -> bool:
        """The last whole checkpoint came back, or one that became whole before that could be reported."""
        return self.exact and self.found in (self.last, self.last + 1)


def train(folder: Path, policy: str, told: Connection) -> None:
    """Trains and saves until it is killed; tells when a save begins (-1), and the step of each whole one."""
    life = Life(Folder(folder / "store"), folder / "memory", policy, chunk_bytes=CHUNK_BYTES)
    told.send(life.next)
    while True:
        life.step()
        told.send(-1)
        life.save()
        told.send(life.next)


def kills(folder: Path, count: int, seed: int) -> Iterator[Kill]:
    """This many, shared by all policies; each policy's checkpoints go on in one folder."""
    generator = random.Random(seed)
    context = fork_server()
    names = list(POLICIES)
    took_s = [0.05]
    last = dict.fromkeys(names, -1)
    for number in range(count):
        policy = names[number % len(names)]
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=train, args=(folder / policy, policy, there))
        process.start()
        there.close()
        saves = generator.randint(1, 3)
        began = 0.0
        writing = False
        while saves:
            if not here.poll(DEADLINE_S):
                raise TimeoutError(f"no save of {policy} in {DEADLINE_S} s")
            writing = (step := here.recv()) < 0
            if writing:
                began, saves = time.monotonic(), saves - 1
            else:
                last[policy] = step
                if began:
                    took_s.append(time.monotonic() - began)
        wait([process.sentinel], generator.random() * 1.2 * statistics.median(took_s[-20:]))
        process.kill()
        process.join()
        while here.poll():
            try:
                step = here.recv()
            except EOFError:
                break
            writing = step < 0
            last[policy] = last[policy] if writing else step
        here.close()
        life = Life(Folder(folder / policy / "store"), folder / policy / "memory", policy)
        found = Kill(policy, last[policy], life.next, is_right(life), writing)
        last[policy] = life.next
        yield found


def rows(found: Sequence[Kill]) -> Iterator[Row]:
    """What is written: of each policy, the kills, those within a save, and the restores that were exact."""
    for policy in POLICIES:
        of_it = [one for one in found if one.policy == policy]
        yield once("kills", "kills", len(of_it), policy=policy)
        yield once("kills_in_writing", "kills", sum(one.in_writing for one in of_it), policy=policy)
        yield once("exact_restores", "restores", sum(one.holds for one in of_it), policy=policy)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the raw results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = list(tqdm(kills(Path(folder), options.kills, options.seed), total=options.kills))
    wrong = [one for one in found if not one.holds]
    inside = sum(one.in_writing for one in found)
    print(
        f"{len(found) - len(wrong)} of {len(found)} restores yield the last whole checkpoint, exactly; "
        f"{inside} writers were killed within a save"
    )
    for one in wrong:
        print(one)
    if options.json:
        write(options.json, document("kills", Arguments(seed=options.seed), list(rows(found))))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(register.script("kills", main, "tests/support/check_n_run/kills.py", sys.argv[1:]))
