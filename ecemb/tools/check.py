"""`python -m ecemb check`: its options, and the choice between launching ranks and being one.

Imports `check_job` only when the command runs, because that module takes torch.distributed along.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from ..errors import ConfigurationError, EcembError, PeerFailure

HELP = "run a script up to its ecemb.protect(), and show what that would protect, and what not"
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
        ConfigurationError: No launcher started this process, and the number of ranks is not given.
    """
    from . import check_job

    if "RANK" not in os.environ:
        if options.hosts < 1 or (options.ranks_per_host or 0) < 1:
            raise ConfigurationError(
                "`check` takes the job's ranks: give --ranks-per-host N (and --hosts N), from 1 on, or "
                "launch it as the training is: torchrun --nproc-per-node N -m ecemb check SCRIPT"
            )
        flags = ["--json"] if options.json else []
        return check_job.launch(
            options.hosts, options.ranks_per_host, flags, options.script, options.arguments
        )
    rank = os.environ["RANK"]
    try:
        survey = check_job.survey(options.script, options.arguments, options.as_host)
    except EcembError as error:
        if rank == "0" or not isinstance(error, PeerFailure):
            print(f"ecemb: refused on rank {rank}: {error}", file=sys.stderr)
        return 1
    if rank == "0":
        shown = json.dumps(dataclasses.asdict(survey), indent=2) if options.json else check_job.text(survey)
        print(shown, flush=True)
    return 0
