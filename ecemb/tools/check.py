"""`ecemb check`: runs a script up to its `protect`, and writes down what that call would protect.

Owns the processes of the run, if no launcher has started them, and the text of a survey. Imports
torch.distributed, and modules that import it, only when the command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from .. import requirements
from ..errors import ConfigurationError, EcembError, NotInitialized, PeerFailure
from ..net.wording import byte_size, counted

if TYPE_CHECKING:
    from ..session import Session
    from ..start.survey import Survey

_POLL_S = 0.05
_GRACE_S = 20.0  # for the other ranks to end, when one has failed
_SHOWN = 12  # names in a line of many
SHOWS = """
The script runs as a job of its own and ends where it calls ecemb.protect(); no memory of any job is touched.
Shown are the protected tables, what is the same on all ranks, what is kept for each rank, objects with state
that come back with nothing, memory, and what may be lost. The exit code is 1 where protect would refuse.
On several machines, launch it as the training is launched: torchrun ... -m ecemb check SCRIPT.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(run=run)
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="to stand for, on this machine (1)")
    parser.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="needed unless torchrun has started this process"
    )
    parser.add_argument("--as-host", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="what torchrun would start")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own")


def run(options: argparse.Namespace) -> int:
    """Checks a script: in this process if a launcher started it as a rank, else in new processes.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: No launcher started this process, and the number of ranks is not given; or torch
            is missing, or another version than ecemb takes.
    """
    if "RANK" not in os.environ:
        if options.hosts < 1 or (options.ranks_per_host or 0) < 1:
            raise ConfigurationError(
                "`check` takes the job's ranks: give --ranks-per-host N (and --hosts N), from 1 on, or "
                "launch it as the training is: torchrun --nproc-per-node N -m ecemb check SCRIPT"
            )
        requirements.check()
        return _launch(options)
    rank = os.environ["RANK"]
    try:
        found = survey(options.script, options.arguments, options.as_host)
    except EcembError as error:
        if rank == "0" or not isinstance(error, PeerFailure):
            print(f"ecemb: refused on rank {rank}: {error}", file=sys.stderr)
        return 1
    if rank == "0":
        print(json.dumps(dataclasses.asdict(found), indent=2) if options.json else text(found), flush=True)
    return 0


def _launch(options: argparse.Namespace) -> int:
    """Runs the check on this machine, in one process for each rank of the hosts that it stands for.

    Returns:
        The exit code: 0, or a failed rank's.
    """
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    each, ranks = options.ranks_per_host, options.hosts * options.ranks_per_host
    processes: list[subprocess.Popen[bytes]] = []
    for rank in range(ranks):
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank % each,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": each,
            "GROUP_RANK": rank // each,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RUN_ID": "check",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1),
        }
        stands_for = ["--as-host", f"host{rank // each}"] if options.hosts > 1 else []
        shown = ["--json"] if options.json else []
        check = [sys.executable, "-m", "ecemb", "check", *stands_for, *shown]
        command = [*check, str(options.script), *options.arguments]
        changed = {name: str(value) for name, value in environment.items()}
        processes.append(subprocess.Popen(command, env={**os.environ, **changed}))
    deadline = float("inf")
    try:
        while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
            if any(codes):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            time.sleep(_POLL_S)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return next((abs(code) for code in codes if code), 0)


def survey(script: Path, arguments: Sequence[str], host: str | None) -> Survey:
    """Runs a script in this process, up to its `protect`. All ranks.

    Args:
        script: Path of the script.
        arguments: Arguments of the script.
        host: Replaces the hostname; None for the real one.

    Returns:
        The survey, the same on all ranks.

    Raises:
        ConfigurationError: The script is missing, or it doesn't call `protect`.
        EcembError: The error that `protect` would raise.
    """
    from .. import session as sessions
    from ..start.survey import Surveyed

    if not script.is_file():
        raise ConfigurationError(f"{script} is not a file: name the script that calls ecemb.protect()")
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    sessions.check_only(sessions.Check(host))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Surveyed as end:
        return end.survey
    finally:
        with contextlib.suppress(NotInitialized):
            _tidy(sessions.current())
        sessions.check_only(None)
    raise ConfigurationError(
        f"{script} ended without a call of ecemb.protect(), so there is nothing to check: call it before the "
        f"first step, with the arguments that the training has"
    )


def _tidy(session: Session) -> None:
    """Ends the failure detector of the check, and removes its folder."""
    if session.watch is not None:
        session.watch.say_goodbye()
    for folder in (session.directory.path, session.directory.path.parent):
        with contextlib.suppress(OSError):  # another rank's, or gone
            folder.rmdir()


def text(found: Survey) -> str:
    """Returns a survey for reading."""
    hosts = len(set(found.hosts))
    ranks = f"{counted(len(found.hosts), 'rank')} on {counted(hosts, 'host')}"
    lines = [
        f"job {found.job!r}: {ranks}, Code(n={found.code[0]}, k={found.code[1]})",
        "",
        "protected tables",
    ]
    for name, (rows, columns) in found.tables.items():
        each = f"{min(rows):,}" if min(rows) == max(rows) else f"{min(rows):,} to {max(rows):,}"
        lines.append(f"  {name}: {sum(rows):,} rows of {columns}; {each} on {counted(len(rows), 'rank')}")
    lines += ["", "replicated, the same on all ranks"]
    lines += _wrapped("parameters and buffers", [f"{k} {v}" for k, v in found.replicated.items()])
    lines += _wrapped("optimizers of these", found.optimizers)
    lines += ["", "kept for each rank"]
    lines += _wrapped("generators", found.generators) + _wrapped("state= objects", found.state)
    lines += [
        f"  {name} ({kind}): its state_dict() is empty by default; ecemb itself keeps "
        + (", ".join(f"{name}.{state}" for state in states) or "the number of its updates")
        for name, (kind, states) in found.metrics.items()
    ]
    lines += ["", "UNKNOWN: comes back with nothing" if found.unknown else "unknown: nothing that was found"]
    lines += [f"  {one.name} ({one.kind}): {one.lost}" for one in found.unknown]
    lines.append(
        "  not looked at: plain numbers in attributes, and what is made after ecemb.protect(), such as"
    )
    lines.append("  the positions of guard.batches(loader); ecemb rehearse runs the script to find out")
    lines += ["", "memory of a rank"]
    for part, title in (
        ("tables", "tables"),
        ("parity", "parity"),
        ("dense", "dense state, in two slots"),
        ("rank_state", "rank state"),
    ):
        twice = 2 if part == "dense" else 1
        sizes = [twice * one[part] for one in found.bytes]
        most = "" if min(sizes) == max(sizes) else f"{byte_size(min(sizes))} to "
        lines.append(f"  {title}: {most}{byte_size(max(sizes))}")
    lines.append("  journals and inbox: by the rows that a step changes (ecemb plan)")
    return "\n".join([*lines, "", f"survives: {found.survives}"])


def _wrapped(title: str, names: Sequence[str]) -> list[str]:
    shown = list(names[:_SHOWN])
    if len(names) > _SHOWN:
        shown.append(f"and {len(names) - _SHOWN} more")
    return [f"  {title}: {', '.join(shown) or 'none'}"]
