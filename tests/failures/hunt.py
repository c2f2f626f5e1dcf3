"""Random kills of everything that a warm start has: torchrun, stubs, the fork server, workers.

    python tests/failures hunt [--kills 200] [--seed N]

Trainings under stock torchrun and `ecemb-run`; at random moments some of their processes are killed, of one
kind or of all at once. A torchrun that was killed is launched again under the same id. In every other
training the processes stay when another one dies (`ecemb.run`). Ends with code 1 if a process outlives its
starter, if a start does not come through, if a socket or a file is left at the end, or if a training ends
with other bits than an undisturbed one that started cold.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from support.warm_starts import STAYS, TRAINS, Home, home

KINDS = ("torchrun", "stub", "server", "worker")
KILLS_OF_A_RUN = 10  # then it may end
STEPS = 200
AWAITED = (*KINDS, "worker", "worker")  # a moment begins when a process of one of these kinds is there
LONGEST_S = 2.0  # from then to the kill
START_S = 900.0  # at most: of every wait


class Broken(Exception):
    """Something did not hold; the message says what."""


class Training:
    """One job, launched as often as torchrun is killed.

    Args:
        here: where it runs.
        job: its name, and torchrun's id.
        warm: whether `ecemb-run` starts its workers.
        script: that they run.
    """

    def __init__(self, here: Home, job: str, *, warm: bool, script: str = "train.py") -> None:
        self._here, self._job, self._warm, self._script = here, job, warm, script
        self.launch()

    def launch(self) -> None:
        """Starts torchrun; the job goes on where it was."""
        options = ["--nproc-per-node=2", "--max-restarts=1000", "--monitor-interval=0.02", "--no-python"]
        options += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={self._job}"]
        command = self._here.command(options=()) if self._warm else [sys.executable]
        script = [
            self._script,
            str(self._here.folder),
            str(self._here.arena_dir),
            self._job,
            "nobody",
            str(STEPS),
        ]
        with (self._here.folder / f"{self._job}.log").open("ab") as log:
            self.torchrun = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, *command, *script],
                cwd=self._here.folder,
                env=self._here.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        """Whether torchrun has."""
        return self.torchrun.poll() is not None

    def processes(self) -> dict[int, str]:
        """Kind of each of its processes that runs."""
        return {pid: kind_of(line) for pid, line in self._here.processes().items() if line}

    def kill(self, kinds: Sequence[str], one_of_each: bool) -> Counter[str]:
        """Kills its processes of these kinds, or one of each; how many of each kind died."""
        died = Counter[str]()
        for pid, kind in self.processes().items():
            if kind in kinds and not (one_of_each and died[kind]):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    died[kind] += 1
        return died

    def await_kind(self, kind: str) -> None:
        """Waits until a process of a kind is there, or torchrun has ended.

        Raises:
            Broken: neither comes.
        """
        until(lambda: self.ended or kind in self.processes().values(), f"no {kind} begins", self)

    def abandoned(self) -> None:
        """Waits until torchrun, which was killed, and all that it had started are gone, except servers.

        Raises:
            Broken: a process outlives it.
        """
        self.torchrun.wait()
        until(lambda: set(self.processes().values()) <= {"server"}, "a process outlives torchrun", self)

    def end(self) -> list[str]:
        """Waits until it has ended; a digest of each rank.

        Raises:
            Broken: it failed, or does not end.
        """
        try:
            code = self.torchrun.wait(START_S)
        except subprocess.TimeoutExpired:
            raise Broken(f"{self._job} does not end: {self.tail()}") from None
        if code:
            raise Broken(f"{self._job} ended with code {code}: {self.tail()}")
        return [(self._here.folder / f"{self._job}-{rank}").read_text().split()[0] for rank in range(2)]

    def tail(self) -> str:
        """The last lines of its log, and what still runs."""
        lines = (self._here.folder / f"{self._job}.log").read_text(errors="replace").splitlines()
        return "\n".join([*lines[-30:], str(self._here.processes())])


def kind_of(command_line: str) -> str:
    """What a process is, by its command line."""
    if command_line.startswith("ecemb-run server"):
        return "server"
    if "torch.distributed.run" in command_line:
        return "torchrun"
    return "stub" if "-m ecemb run" in command_line else "worker"


def until(holds: Callable[[], bool], otherwise: str, training: Training) -> None:
    """Waits until it is so.

    Raises:
        Broken: it never is.
    """
    deadline = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > deadline:
            raise Broken(f"{otherwise}: {training.tail()}")
        time.sleep(0.02)


def disturbed(
    here: Home, job: str, kills: int, choice: random.Random, script: str
) -> tuple[list[str], list[Counter[str]]]:
    """A training with this many moments of kills, or fewer: its digests, and what died in each."""
    training = Training(here, job, warm=True, script=script)
    moments: list[Counter[str]] = []
    while len(moments) < kills:
        training.await_kind(choice.choice(AWAITED))
        time.sleep(LONGEST_S * choice.random() ** 3)
        if training.ended:
            break
        kinds = KINDS if choice.random() < 0.2 else choice.sample(KINDS, choice.randint(1, 2))
        moments.append(training.kill(kinds, one_of_each=choice.random() < 0.5))
        if "torchrun" in kinds:
            training.abandoned()
            training.launch()
    digests = training.end()
    until(lambda: not training.processes(), "a process is left at the end", training)
    if here.sockets():
        raise Broken(f"sockets are left at the end: {here.sockets()}")
    return digests, moments


def hunt(kills: int, seed: int) -> Counter[str]:
    """Kills until there were that many moments of kills; how many processes of each kind have died.

    Raises:
        Broken: something did not hold.
    """
    choice, died, moments, number = random.Random(seed), Counter[str](), 0, 0
    with home() as here:
        here.environment["OMP_NUM_THREADS"] = "1"
        here.write("train.py", TRAINS)
        here.write("stays.py", STAYS)
        calm = Training(here, "calm", warm=False).end()
        while moments < kills:
            now = min(KILLS_OF_A_RUN, kills - moments)
            script = "stays.py" if number % 2 == 0 else "train.py"
            digests, of_run = disturbed(here, f"run-{number}", now, choice, script)
            if digests != calm:
                raise Broken(f"run {number} of seed {seed} ended with other bits than an undisturbed one")
            died += sum(of_run, Counter())
            moments, number = moments + sum(map(bool, of_run)), number + 1
            print(f"run {number}: identical; {moments} moments, killed so far: {dict(died)}", flush=True)
    return died


def main(arguments: list[str] | None = None) -> int:
    """Runs the hunt; returns the exit code."""
    parser = argparse.ArgumentParser(prog="hunt", description="random kills of all that a warm start has")
    parser.add_argument("--kills", type=int, default=200, help="moments at which processes are killed (200)")
    parser.add_argument("--seed", type=int, default=None, help="of all choices; printed")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed: {seed} (repeat with --seed {seed})", flush=True)
    try:
        died = hunt(args.kills, seed)
    except Broken as error:
        print(f"FAILED: {error}")
        return 1
    print(f"every run was bit-identical, and left nothing; killed: {dict(died)}")
    return 0
