"""The main job, whole: train, kill workers and their memory in mid-training, compare byte by byte.

    pip install .
    python examples/demo.py [--code 4,3] [--ranks 4] [--cold]

Trains examples/word2vec.py under stock torchrun twice, with workers that `ecemb-run` starts (with `--cold`:
python): once undisturbed, and once while this driver, from outside, (a) SIGKILLs workers, and (b) SIGKILLs
workers and deletes their arenas, as when their host is gone; as many at once as the code survives, each time
at a random moment inside a step. `ecemb-run` replaces the processes that were killed, and the others stay:
the driver prints which did, and the seconds until the next step. The last line says whether the two runs
ended with the same bytes: tables, optimizer state, dense parameters, random generators.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ecemb.memory.header import Found, State, words_of
from ecemb.memory.scan import arenas

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--code", default="4,3", help="n,k: n-k ranks are killed at once")
parser.add_argument("--ranks", type=int, default=4)
parser.add_argument("--steps", type=int, default=200, help="of the whole training")
parser.add_argument("--arena-dir", default="/dev/shm", help="folder of the job's memory")
parser.add_argument(
    "--seed", type=int, default=None, help="of the moments and the victims; random if not given"
)
parser.add_argument("--timeout", type=float, default=600, help="seconds that one run may take")
parser.add_argument("--cold", action="store_true", help="start workers as python does, not by ecemb-run")
args = parser.parse_args()

EXAMPLE = Path(__file__).with_name("word2vec.py")
NOISE = re.compile(r"^\s*$|^[WE]\d{4} |^\[rank\d+\]:|Gloo|Warning: |^\s+(return|warnings)\b")
started = time.monotonic()


def say(text: str) -> None:
    print(f"[demo {time.monotonic() - started:6.1f} s] {text}", flush=True)


@dataclass
class Run:
    """One torchrun of the example; its output is passed on as it comes, torchrun's own noise left out."""

    job: str
    save: Path
    lines: list[str] = field(default_factory=list)

    def __enter__(self) -> Run:
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {args.ranks} --max-restarts 3"
        torchrun += " --monitor-interval 0.01"
        warm = ["--no-python", sys.executable, "-m", "ecemb", "run", f"--arena-dir={args.arena_dir}"]
        script = [*([] if args.cold else warm), str(EXAMPLE)]
        options = f"--job {self.job} --code {args.code} --steps {args.steps}"
        paths = [f"--arena-dir={args.arena_dir}", f"--save={self.save}"]
        self.process = subprocess.Popen(
            [sys.executable, *torchrun.split(), *script, *options.split(), *paths],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.reader = threading.Thread(target=self._pass_on, daemon=True)
        self.reader.start()
        return self

    def _pass_on(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line)
            if not NOISE.search(line):
                print("    " + line.rstrip()[:240], flush=True)

    def __exit__(self, *_: object) -> None:
        """Ends what still runs: torchrun stops its workers on SIGTERM."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.reader.join(5)

    def wait(self) -> int:
        try:
            code = self.process.wait(args.timeout)
        except subprocess.TimeoutExpired:
            say(f"the run took more than {args.timeout:.0f} s and is ended")
            return -1
        self.reader.join(5)
        return code

    def arenas(self) -> dict[int, Found]:
        """This job's live arenas by rank."""
        found = [one for one in arenas(args.arena_dir) if one.job == self.job and one.header]
        return {
            one.header.constants.rank: one for one in found if one.header and one.header.state is State.LIVE
        }

    def committed(self) -> int:
        """The last step that all ranks have committed; -1 while a rank is missing."""
        now = self.arenas()
        if len(now) < args.ranks:
            return -1
        return min(one.header.committed for one in now.values() if one.header)

    def until(self, step: int) -> bool:
        """Waits until all ranks have committed `step`; False if the run ended before."""
        deadline = time.monotonic() + args.timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            if self.committed() >= step:
                return True
            time.sleep(0.002)
        return False


def inside_a_step(victim: Found) -> bool:
    """Whether the victim's journal is armed for a transaction that it has not committed yet."""
    try:
        with victim.path.open("rb") as file:
            words = words_of(file.read(8192))
    except FileNotFoundError:
        return False
    return words["rows_label"] > words["committed"]


def kill(run: Run, count: int, with_memory: bool, luck: random.Random) -> float | None:
    """Kills `count` workers inside a step; the seconds until a new step was committed by all."""
    before = {one.pid for one in run.arenas().values()}
    victims = [run.arenas().get(rank) for rank in sorted(luck.sample(range(args.ranks), count))]
    time.sleep(luck.random() * 0.1)
    give_up = time.monotonic() + 5
    while not all(one and inside_a_step(one) for one in victims) and time.monotonic() < give_up:
        pass
    began = time.monotonic()
    at = run.committed()
    for one in victims:
        if one is None:
            return None
        os.kill(one.pid, signal.SIGKILL)
    for one in victims:
        if with_memory and one:
            one.path.unlink()
    ranks = [one.header.constants.rank for one in victims if one and one.header]
    what = "and deleted their arenas, as when their hosts are gone" if with_memory else "their memory stays"
    say(f"SIGKILLed ranks {ranks} inside step {at}: {what}")
    if not run.until(at + 1):
        return None
    seconds = time.monotonic() - began
    after = {rank: one.pid for rank, one in sorted(run.arenas().items())}
    stayed = [rank for rank, pid in after.items() if pid in before]
    made = [rank for rank, pid in after.items() if pid not in before]
    by = "torchrun" if args.cold else "ecemb-run"
    say(f"{seconds:.2f} s from the kill to the next step committed by all ranks")
    say(f"processes of ranks {stayed} stayed; ranks {made} have new ones, by {by}")
    return seconds


def differences(left: Path, right: Path) -> list[str]:
    """Names of what is not the same, byte for byte, in the two runs' final states."""
    found: list[str] = []
    for rank in range(args.ranks):
        name = f"rank{rank}.pt"
        if not ((left / name).exists() and (right / name).exists()):
            found.append(f"rank {rank}: not saved by both runs")
            continue
        one, other = (torch.load(folder / name, weights_only=True) for folder in (left, right))
        for key in sorted(set(one) | set(other)):
            if key not in one or key not in other or raw(one[key]) != raw(other[key]):
                found.append(f"rank {rank}: {key}")
    return found


def raw(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def main() -> int:
    n, k = map(int, args.code.split(","))
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10**6)
    luck = random.Random(seed)
    start = "cold" if args.cold else "warm"
    what = f"word2vec on {args.ranks} ranks with code ({n}, {k}), {args.steps} steps, {start} starts"
    say(f"{what}; --seed {seed}")
    lost_s: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="ecemb-demo-") as folder:
        calm, disturbed = Path(folder, "undisturbed"), Path(folder, "disturbed")
        say("first run: undisturbed")
        with Run(f"demo-{os.getpid()}-undisturbed", calm) as run:
            if (code := run.wait()) != 0:
                say(f"the undisturbed run ended with exit code {code}")
                print("bit-identical: no")
                return 1
        say("second run: with kills")
        with Run(f"demo-{os.getpid()}-disturbed", disturbed) as run:
            for with_memory, part in ((False, 0.25), (True, 0.6)):
                if run.until(int(args.steps * part) + luck.randrange(args.steps // 10)):
                    seconds = kill(run, n - k, with_memory, luck)
                    lost_s["process and memory" if with_memory else "process"] = seconds
            code = run.wait()
        reports = [line for line in run.lines if "rank 0: recovered, " in line]
        say(f"the disturbed run ended with exit code {code}; recovery reports of rank 0:")
        for line in reports:
            print("    " + line.strip())
        wrong = differences(calm, disturbed)
    for name, seconds in lost_s.items():
        say(f"lost with {name}: {'never recovered' if seconds is None else f'{seconds:.2f} s'}")
    for one in wrong[:20]:
        say(f"differs: {one}")
    complete = code == 0 and len(lost_s) == 2 and None not in lost_s.values() and len(reports) == 2
    if not complete:
        say("not both kills were survived by the run that they hit")
    same = complete and not wrong
    print(f"bit-identical: {'yes' if same else 'no'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
