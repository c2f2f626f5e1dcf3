"""Followers and the trainings that they follow, killed at random moments: all that is shown is of one commit.

Each follower reads and shows rows until it is killed, while its training saves and is killed, and begins
again from its newest checkpoint. A second thread of the follower reads all rows again and again. The digests
of what both saw are compared with those that the training logs of each commit. `make follower-kills` is the
long form.

A training is only some saves ahead of what its follower has shown, for one that never waits would remove each
checkpoint before a slow machine's follower, which counts lines, has read it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from baselines.check_n_run import chunks, following, restoring
from bench.harness import register
from bench.harness.result import Arguments, Row, document, once, write
from ecemb.checkpoint import Chain, IncrementReader, Link, folder_store, index
from ecemb.checkpoint import follower as follower_module
from support.follower.training import KINDS, Log, Training, digest, digest_of, followed, source_of
from support.fork_server import fork_server
from support.killed_child import Moments

DEADLINE_S = 300
POLL_S = 0.002
NEVER = 1 << 60
READS = (follower_module, follower_module, folder_store, index, following, restoring, chunks)
"""Modules that read checkpoints: their lines are moments to die at."""
BEGAN, APPLYING, DONE = "began", "applying", "done"
AHEAD = (follower_module.ATTEMPTS - 1) // 2
"""Saves of a training's life beyond what was shown: those of two lives are fewer than a follower's tries."""


@dataclass(frozen=True)
class Kill:
    """One follower's life, and its end.

    Attributes:
        kind: how its training saves.
        shown: snapshots that it reported.
        in_applying: it was killed while it read a checkpoint.
        trainings_killed: lives of the training that were killed meanwhile.
        in_saving: those that were killed within a save.
    """

    kind: str
    shown: int
    in_applying: bool
    trainings_killed: int
    in_saving: int


class Watched:
    """An `IncrementReader` that says when rows are read; and may kill its process while it does.

    Args:
        source: what is read.
        says: to the driver.
        fuse: the process dies in the first reads after `lit` is set, before one of as many lines of code as
            this part of the lines of its first read; None: it doesn't.
    """

    def __init__(self, source: IncrementReader, says: Connection, fuse: float | None) -> None:
        self._source, self._says, self._fuse = source, says, fuse
        self._lines = 0
        self.lit = False

    def chain(self) -> Chain | None:
        return self._source.chain()

    def dense_(self, tensors: Mapping[str, Tensor]) -> None:
        self._source.dense_(tensors)

    def apply_(self, link: Link, tables: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor | None]:
        self._says.send((APPLYING, -1))
        if self._fuse is None:
            return self._source.apply_(link, tables)
        if not self._lines:
            counter = Moments(NEVER)
            counter.watch(READS)
            found = self._source.apply_(link, tables)
            sys.settrace(None)
            self._lines = NEVER - counter._left
            return found
        if self.lit:
            self.lit = False
            Moments(1 + int(self._fuse * self._lines)).watch(READS)
        return self._source.apply_(link, tables)


def train(folder: Path, kind: str, says: Connection, shown: Connection) -> None:
    """Trains and saves until it is killed; `shown` tells the steps that its follower shows."""
    torch.set_num_threads(1)
    life = Training(folder, kind)
    last = life.next + AHEAD
    says.send((BEGAN, life.next))
    while True:
        life.step()
        while life.next > last or shown.poll():
            last = max(last, shown.recv() + AHEAD)
        says.send((APPLYING, life.next))
        life.save()
        says.send((DONE, life.next))


def follow(
    folder: Path,
    kind: str,
    number: int,
    fuse: float | None,
    after: int,
    says: Connection,
    _: Connection,
    watched: Callable[[IncrementReader, Connection, float | None], Watched] = Watched,
) -> None:
    """Shows rows until it is killed, or until its fuse, lit after some snapshots, kills it."""
    torch.set_num_threads(1)
    shown, source = Log(folder / "shown.jsonl"), watched(source_of(folder, kind), says, fuse)
    follower = followed(source)
    says.send((BEGAN, -1))
    first = threading.Event()

    def read() -> None:
        first.wait()
        known: set[tuple[str, str]] = set()
        while True:
            snapshot = follower.snapshot
            whole = {
                name: {
                    column: snapshot.rows(name, torch.arange(len(rows)), column)
                    for column, rows in held.items()
                }
                for name, held in snapshot.tables.items()
            }
            seen = snapshot.name, digest(whole, snapshot.dense)
            if seen not in known:
                known.add(seen)
                shown.add(life=number, by="reader", name=seen[0], digest=seen[1])

    threading.Thread(target=read, daemon=True).start()
    for count in itertools.count(1):
        follower.wait(poll_s=POLL_S)
        source.lit = source.lit or count == after
        snapshot = follower.snapshot
        shown.add(life=number, by="follower", name=snapshot.name, digest=digest_of(snapshot))
        first.set()
        says.send((DONE, snapshot.step))


class Life:
    """A process that says what it does, until it is killed.

    Args:
        target: what it calls, with the arguments, a connection to say what it does, and one to hear steps.
        hearer: the life that hears the step of each thing that this one has done.
    """

    def __init__(self, target: Any, *arguments: Any, hearer: Life | None = None) -> None:
        context = fork_server()
        here, there = context.Pipe(duplex=False)
        hears, self._tells = context.Pipe(duplex=False)
        self.hearer = hearer
        self.process: BaseProcess = context.Process(
            target=target, args=(*arguments, there, hears), daemon=True
        )
        self.process.start()
        there.close()
        hears.close()
        self._changed = threading.Condition()
        self._listener = threading.Thread(target=self._listen, args=(here,), daemon=True)
        self.last, self.done, self.took_s = "", 0, [0.02]
        self._listener.start()

    def _listen(self, here: Connection) -> None:
        """Hears all that it says, so that it never waits for the driver."""
        since_s = 0.0
        with here, suppress(EOFError, ConnectionResetError):
            while True:
                said, step = here.recv()
                if said == DONE and self.hearer is not None:
                    self.hearer.tell(step)
                with self._changed:
                    self.last = said
                    if said == APPLYING:
                        since_s = time.monotonic()
                    elif said == DONE:
                        self.done += 1
                        self.took_s.append(time.monotonic() - since_s)
                    self._changed.notify_all()

    def tell(self, step: int) -> None:
        """Tells it a step, if it still lives."""
        with suppress(BrokenPipeError):
            self._tells.send(step)

    def await_done(self, count: int) -> None:
        """Until it has done this many in all."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.done >= count, DEADLINE_S):
                raise TimeoutError(f"{self.process} has done {self.done} of {count} in {DEADLINE_S} s")

    def await_death(self) -> bool:
        """Until it has killed itself; whether it was in the middle of what it does."""
        self.process.join(DEADLINE_S)
        return self._ended()

    def kill(self, after_s: float) -> bool:
        """Kills it; whether it was in the middle of what it does."""
        if wait([self.process.sentinel], after_s):
            raise RuntimeError(f"{self.process} ended by itself")
        self.process.kill()
        self.process.join()
        return self._ended()

    def _ended(self) -> bool:
        if self.process.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"{self.process} was not killed by SIGKILL")
        self._listener.join()
        return self.last == APPLYING


def kills(
    folder: Path,
    count: int,
    seed: int,
    kinds: Sequence[str] = tuple(KINDS),
    follows: Callable[..., None] = follow,
) -> Iterator[Kill]:
    """This many followers, shared by all kinds; each kind's training goes on in one folder.

    One half of them die at any moment, the other half within the code that reads a checkpoint.
    """
    random_ = random.Random(seed)

    def moment(life: Life) -> float:
        return random_.random() * 1.5 * statistics.median(life.took_s[-20:])

    for number in range(count):
        kind = kinds[number % len(kinds)]
        here = folder_of(folder, kind)
        here.mkdir(exist_ok=True)
        fuse = random_.random() if random_.random() < 0.5 else None
        shown, more = random_.randint(1, 3), random_.randint(0, 2)
        training = Life(train, here, kind)
        follower = Life(follows, here, kind, number, fuse, shown + more, hearer=training)
        lives, in_saving = 1, 0
        try:
            follower.await_done(shown)
            if more:  # the follower lives on, and sees the next life's commits
                in_saving += training.kill(moment(training))
                follower.hearer = training = Life(train, here, kind)
                lives += 1
                follower.await_done(shown + more)
            if fuse is not None:
                in_applying = follower.await_death()
                in_saving += training.kill(moment(training))
            elif random_.random() < 0.5:
                in_saving += training.kill(moment(training))
                in_applying = follower.kill(moment(follower))
            else:
                in_applying = follower.kill(moment(follower))
                in_saving += training.kill(moment(training))
        finally:
            for life in (training, follower):
                life.process.kill()
                life.process.join()
        yield Kill(kind, follower.done, in_applying, lives, in_saving)


def folder_of(folder: Path, kind: str) -> Path:
    """Of a kind's training."""
    return folder / kind.replace(" ", "-").replace(",", "")


def wrong(folder: Path, kind: str) -> list[str]:
    """What was shown and no commit had, of a kind; and commits that were logged with two digests."""
    here = folder_of(folder, kind)
    last = Training(here, kind)  # a life that was killed before it could log a commit has left it to this one
    commits: dict[str, set[str]] = {}
    for line in last.commits.lines():
        commits.setdefault(line["name"], set()).add(line["digest"])
    shown = {(line["name"], line["digest"]) for line in Log(here / "shown.jsonl").lines()}
    found = [
        f"{kind}: {name} was committed with {len(said)} digests"
        for name, said in commits.items()
        if len(said) > 1
    ]
    unknown = [
        f"{kind}: {name} was shown as {said}" for name, said in shown if said not in commits.get(name, ())
    ]
    return found + sorted(unknown)


def rows(found: Sequence[Kill], wrongs: Mapping[str, Sequence[str]]) -> Iterator[Row]:
    """What is written, by kind."""
    for kind in wrongs:
        of_it = [one for one in found if one.kind == kind]
        yield once("follower_kills", "kills", len(of_it), kind=kind)
        yield once("follower_kills_in_reading", "kills", sum(one.in_applying for one in of_it), kind=kind)
        yield once("training_kills", "kills", sum(one.trainings_killed for one in of_it), kind=kind)
        yield once("training_kills_in_saving", "kills", sum(one.in_saving for one in of_it), kind=kind)
        yield once("snapshots_shown", "snapshots", sum(one.shown for one in of_it), kind=kind)
        yield once("snapshots_wrong", "snapshots", len(wrongs[kind]), kind=kind)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the raw results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = list(tqdm(kills(Path(folder), options.kills, options.seed), total=options.kills))
        kinds = list(dict.fromkeys(one.kind for one in found))
        wrongs = {kind: wrong(Path(folder), kind) for kind in kinds}
    print(
        f"{len(found)} followers killed, {sum(one.in_applying for one in found)} while they read a "
        f"checkpoint; {sum(one.trainings_killed for one in found)} trainings, "
        f"{sum(one.in_saving for one in found)} within a save; {sum(one.shown for one in found)} snapshots "
        f"shown, {sum(map(len, wrongs.values()))} of them wrong"
    )
    for line in (line for lines in wrongs.values() for line in lines):
        print(line)
    if options.json:
        write(
            options.json, document("follower_kills", Arguments(seed=options.seed), list(rows(found, wrongs)))
        )
    return 1 if any(wrongs.values()) else 0


if __name__ == "__main__":
    sys.exit(register.script("follower_kills", main, "tests/support/follower/kills.py", sys.argv[1:]))
