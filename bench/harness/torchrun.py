"""Stock torchrun, as users start it, around a module of bench/ as the training script.

Must not know: what the script does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import ROOT

_POLL_S = 0.01
_GRACE_S = 40.0
_TAIL_LINES = 80


class LaunchFailed(Exception):
    """torchrun ended otherwise than it should, or not in time; the message has its last words."""


class Torchrun:
    """One torchrun, which is ended with all its workers if it still runs after the `with` block.

    Args:
        ranks: Workers, all on this machine.
        restarts: After a worker's death, at most.
        module: Of the script.
        words: The script's arguments.
        folder: Where the log goes, and where it runs.
        name: What messages call it by.
        timeout_s: Of the whole launch.
        warm: Whether workers are started by `ecemb-run`.
        replaces: Whether `ecemb-run` replaces dead workers, so that torchrun doesn't restart them.
        preload: Modules that it imports once, beside those that it imports by itself.
    """

    def __init__(
        self,
        ranks: int,
        restarts: int,
        module: str,
        *words: str,
        folder: Path,
        name: str,
        timeout_s: float,
        warm: bool = False,
        replaces: bool = False,
        preload: Sequence[str] = (),
    ) -> None:
        options = f"--standalone --nproc-per-node {ranks} --max-restarts {restarts}".split()
        run = ["--no-python", sys.executable, "-m", "ecemb", "run"] if warm else []
        run += ["--no-replace"] if warm and not replaces else []
        run += [word for module_ in preload for word in ("--preload", module_)] if warm else []
        self._words = ["-m", "torch.distributed.run", *options, *run, "-m", module, *words]
        self._folder, self._name = folder, name
        self._deadline = time.monotonic() + timeout_s

    def __enter__(self) -> Torchrun:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as where installed
        self.began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._words], stdout=log, stderr=log, env=environment, cwd=self._folder
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # it ends its workers
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def check(self, awaited: str) -> None:
        """Called while something is awaited.

        Raises:
            LaunchFailed: torchrun has failed, or it is too late.
        """
        if self._process.poll():
            raise self._failed(f"ended with {self._process.returncode}")
        if time.monotonic() > self._deadline:
            raise self._failed(f"did not come to {awaited}")

    def wait(self) -> None:
        """Waits until the training is done.

        Raises:
            LaunchFailed: It isn't, and won't be.
        """
        while self._process.poll() is None:
            self.check("the end")
            time.sleep(_POLL_S)
        if self._process.returncode:
            raise self._failed(f"ended with {self._process.returncode}")

    def cpu_s(self) -> float:
        """Processor time that torchrun, and all that it has started and that still runs, have taken."""
        used_s: dict[int, float] = {}
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            pid = int(path.parts[2])
            parents[pid] = int(fields[1])
            used_s[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        family = {self._process.pid}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        return sum(used_s.get(pid, 0.0) for pid in family)

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _failed(self, what: str) -> LaunchFailed:
        log = self._log.read_text(encoding="utf-8", errors="replace")
        tail = "\n".join(log.splitlines()[-_TAIL_LINES:])
        return LaunchFailed(f"torchrun ({self._name}) {what}:\n{tail}")
