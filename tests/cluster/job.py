"""A training submitted to a box by the Slurm guide's script, and what its workers leave in its folder."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

from cluster import training
from cluster.box import Box
from failures.driver import ROOT, Digests, differences
from failures.hosts import Unexpected
from failures.plan import Plan, Setting
from failures.trace import Trace

GUIDE = ROOT / "docs" / "guides" / "slurm.md"
REACH_S = 400.0
HELD = 30
TIMEOUT_S = 60.0
TRAINING = Setting(8, 4, 3, "Adagrad", steps=60)
HOSTS = 4
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


class GuideChanged(Exception):
    """The guide's script lacks what a scenario changes in it; says what."""


def guide_script(guide: Path = GUIDE) -> str:
    """The script of the Slurm guide, word for word: its first block of bash."""
    found = re.search(r"^```bash\n(.*?)^```$", guide.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if found is None:
        raise GuideChanged(f"{guide} has no block of bash")
    return found[1]


def changed_script(changes: Mapping[str, str], script: str | None = None) -> str:
    """The guide's script with some words replaced; each must be there once."""
    text = guide_script() if script is None else script
    for words, others in changes.items():
        if text.count(words) != 1:
            raise GuideChanged(f"{words!r} is {text.count(words)} times in the guide's script, and not once")
        text = text.replace(words, others)
    return text


SMALL = {"--nproc-per-node 8": "--nproc-per-node 2"}
"""Eight ranks instead of 32, for 2 processors."""


class Job:
    """One training in a box, by one submission or several.

    Args:
        box: where it runs.
        setting: what is trained.
        name: of its memory.
        script: that is submitted; the guide's with few ranks by default.
        saves: after this many steps each, a checkpoint is saved, from which starts may resume; 0 for none.
        timeout_s: the silence after which a worker counts as dead.

    Attributes:
        ids: of its submissions, the latest last.
        failed_ns: when it was last disturbed.
    """

    def __init__(
        self,
        box: Box,
        setting: Setting = TRAINING,
        *,
        name: str = "ctr",
        script: str | None = None,
        saves: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.box = box
        self.setting = setting
        self.ids: list[int] = []
        self.failed_ns = 0
        self.folder = box.folder / name
        self._saves = saves
        self._traces: dict[Path, Trace] = {}
        self._before: set[Path] = set()
        training.prepare(self.folder, Plan(setting, saves=saves), job=name, timeout_s=timeout_s)
        (self.folder / "script.sh").write_text(changed_script(SMALL) if script is None else script)

    # --- what happens to it ------------------------------------------------------------------

    def submit(self, *options: str) -> int:
        """Submit the script; returns the number that Slurm gives it."""
        self.ids.append(self._submit("script.sh", *options))
        return self.ids[-1]

    def _submit(self, script: str, *options: str) -> int:
        words = ["sbatch", "--parsable", f"--chdir={self.folder}", *options, script]
        said = self.box.slurm(*words, folder=self.folder, environment=_environment())
        return int(said.strip())

    def submit_agent(self, node: str) -> int:
        """Submit an agent on one more node, which joins the rendezvous of the latest submission."""
        script = changed_script(
            {
                'endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)': "endpoint=n1",
                '--rdzv-id "$SLURM_JOB_ID"': f"--rdzv-id {self.ids[-1]}",
            },
            (self.folder / "script.sh").read_text(),
        )
        (self.folder / "agent.sh").write_text(script)
        return self._submit("agent.sh", "--nodes=1", f"--nodelist={node}")

    def disturbed(self) -> None:
        """Count the time of recovery from now, and the workers of now as earlier ones."""
        self._before |= set(self._look())
        self.failed_ns = time.monotonic_ns()

    def hold(self, step: int) -> None:
        """Let no rank go on past the beginning of `step`, until `release`."""
        (self.folder / "hold.new").write_text(str(step))
        (self.folder / "hold.new").rename(self.folder / "hold")

    def release(self) -> None:
        """Let all go on to the end."""
        (self.folder / "hold").unlink(missing_ok=True)

    # --- what is seen ------------------------------------------------------------------------

    def reach(self, step: int = 0) -> dict[int, Trace]:
        """Wait until all ranks are in `step` or past it, since the last disturbance; returns their traces."""

        def there() -> bool:
            crew = self.crew()
            return len(crew) == self.setting.ranks and all(trace.step >= step for trace in crew.values())

        self._wait(there, f"no training in step {step}")
        return self.crew()

    def crew(self) -> dict[int, Trace]:
        """Rank -> the latest worker that trains it, since the last disturbance."""
        traces = [
            trace for path, trace in self._look().items() if path not in self._before and trace.first_ns
        ]
        return {trace.opened.rank: trace for trace in sorted(traces, key=lambda trace: trace.first_ns)}

    def recovery_s(self, crew: Mapping[int, Trace]) -> float:
        """From the disturbance until all of these workers have begun a step."""
        return (max(trace.first_ns for trace in crew.values()) - self.failed_ns) / 1e9

    def state(self) -> str:
        """Slurm's, of the latest submission."""
        return self.box.job_state(self.ids[-1])

    def finish(self) -> str:
        """Let all go on, and wait for all results and the submission's end; returns Slurm's state of it."""
        self.release()
        self._wait(lambda: len(training.results(self.folder)) == self.setting.ranks, "results of all ranks")
        self._wait(lambda: self.state() in ENDED, "the submission did not end")
        return self.state()

    def differences(self) -> list[str]:
        """What is not bit-identical to an undisturbed run; and each rank that two workers trained at once.

        After a resume, parity is compared with rows alone, by the training: rank states have another place in
        new arenas.
        """
        reference, ends = undisturbed(self.setting), training.results(self.folder)
        if self._saves:
            reference, ends = _without_parity(reference), _without_parity(ends)
        return [*differences(reference, ends), *self._overlaps()]

    def log(self) -> str:
        """What all submissions have printed."""
        paths = sorted(self.folder.glob("slurm-*.out"))
        return "".join(path.read_text(errors="replace") for path in paths)

    def _overlaps(self) -> list[str]:
        found: list[str] = []
        for rank in range(self.setting.ranks):
            lives = sorted(
                (trace for trace in self._look().values() if trace.opened.rank == rank),
                key=lambda trace: trace.first_ns,
            )
            for earlier, later in pairwise(lives):
                if earlier.last_ns >= later.first_ns:
                    found.append(f"rank {rank}: {earlier.opened} trained beside {later.opened}")
        return found

    def _look(self) -> dict[Path, Trace]:
        for path in (self.folder / "traces").glob("*/*.trace"):
            if path not in self._traces:
                self._traces[path] = Trace(path)
        return self._traces

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        try:
            self.box.wait(done, REACH_S, what)
        except TimeoutError as error:
            raise Unexpected(
                f"{error}; it is {self.state()}, and its log ends with\n{self.log()[-4000:]}"
            ) from error


@functools.cache
def undisturbed(setting: Setting) -> Digests:
    """What a run without Slurm, failures and several hosts ends with."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        hosts = [f"n{number + 1}" for number in range(min(HOSTS, setting.ranks))]
        training.prepare(Path(folder), Plan(setting), arena_dir=memory, hosts=hosts)
        command = ["torchrun", "--standalone", "--nproc-per-node", str(setting.ranks)]
        command += ["--no-python", "ecemb-run", "train.py"]
        ended = subprocess.run(
            command,
            check=False,
            cwd=folder,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=REACH_S,
        )
        if ended.returncode:
            raise Unexpected(
                f"the undisturbed run ended with code {ended.returncode}: {ended.stderr[-4000:]}"
            )
        return training.results(Path(folder))


def _without_parity(ends: Digests) -> Digests:
    return {rank: {**digests, "parity": ""} for rank, digests in ends.items()}


def _environment() -> dict[str, str]:
    """Of a shell that has this interpreter's commands and this checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "ECEMB"))}
    return {
        **kept,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
