"""One launch of ranks on all hosts by a launcher, from its order to its end.

On each host the launcher starts torchrun's agent, which starts the host's ranks by `ecemb-run`. Agents meet
at a store in this process, so that no host has to be known before, and none is special.

Must not know: what ranks do, and what methods are.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from bench import ROOT
from bench.harness.torchrun import LaunchFailed
from bench.questions.compare_cluster import launchers

RANK = "bench.questions.compare_cluster.rank"
_POLL_S = 0.02
_GRACE_S = 45.0
"""For agents, which give their workers half a minute."""
_CLEAN_S = 120.0
_TAIL_LINES = 60
_IDLE_S = 120
"""Of the fork servers of a launch, which end an eighth of a minute after it."""


@dataclass(frozen=True)
class Place:
    """Where a launch runs.

    Attributes:
        launcher: See `launchers`.
        hosts: How many.
        ranks_per_host: On each of them.
        preload: Modules that fork servers import, beside those that they import by themselves.
    """

    launcher: str
    hosts: int
    ranks_per_host: int
    preload: Sequence[str]

    @property
    def ranks(self) -> int:
        """Of a launch."""
        return self.hosts * self.ranks_per_host


def launch(place: Place, name: str, order: Path, restarts: int, timeout_s: float) -> None:
    """Runs ranks until all have ended. Nothing of the launch runs afterwards.

    Args:
        place: Where.
        name: For messages.
        order: File in a folder that all hosts see; the log goes beside it.
        restarts: Of the workers of an agent, at most.
        timeout_s: Of the launch.

    Raises:
        LaunchFailed: It failed, or did not end in time; has the last lines of its log.
    """
    here = place.hosts == 1
    store = dist.TCPStore(
        "127.0.0.1" if here else socket.gethostname(),
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    agent = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={place.hosts}"),
        *(
            f"--nproc-per-node={place.ranks_per_host}",
            f"--max-restarts={restarts}",
            "--monitor-interval=0.01",
        ),
        *("--rdzv-backend=c10d", f"--rdzv-id={order.parent.name}", "--rdzv-conf=is_host=0"),
        f"--rdzv-endpoint={store.host}:{store.port}",
        *(["--local-addr=127.0.0.1"] if here else []),
        *("--no-python", sys.executable, "-m", "ecemb", "run", "--no-replace", f"--idle={_IDLE_S}"),
        *(word for module in place.preload for word in ("--preload", module)),
        *("-m", RANK, str(order)),
    ]
    _run(place, agent, name, order.parent / "log", timeout_s)
    del store


def clear(place: Place, memory: str, folder: Path) -> None:
    """Removes a folder in the memory of each host after a launch that failed, as far as it can be."""
    remove = [
        sys.executable,
        "-c",
        "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)",
        memory,
    ]
    with suppress(LaunchFailed):
        _run(place, remove, "remove what is left", folder / "removed", _CLEAN_S)


def _run(place: Place, command: Sequence[str], name: str, log: Path, timeout_s: float) -> None:
    environment = _environment()
    given = ["env", *(f"{key}={value}" for key, value in environment.items()), *command]
    words = launchers.words(place.launcher, given, place.hosts, place.ranks_per_host)
    if shutil.which(words[0]) is None:
        raise LaunchFailed(
            f"--launcher {place.launcher!r}: there is no program {words[0]!r} on this machine: install it, "
            "or give another launcher"
        )
    deadline = time.monotonic() + timeout_s
    with log.open("wb") as out:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=log.parent,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise LaunchFailed(f"{name} did not end in {timeout_s:.0f} s:\n{_tail(log)}")
            time.sleep(_POLL_S)
    finally:
        _end(process)
    if process.returncode:
        raise LaunchFailed(f"{name} ended with {process.returncode}:\n{_tail(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher, if it runs, and all that it has started here."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)  # agents end their workers
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> Mapping[str, str]:
    """That a launcher may not pass on."""
    paths = [str(ROOT), *(path for path in sys.path if path)]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])
