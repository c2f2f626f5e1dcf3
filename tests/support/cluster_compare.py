"""`make cluster-compare`: the comparison of methods on the Slurm cluster of this machine, as root.

    python tests/support/cluster_compare.py [--rate 1gbit] [--delay 100us] [OPTION ...]

A submission of four nodes runs `python -m bench compare --launcher srun --hosts 4 --ranks-per-host 2` on
the first of them, and srun starts the ranks on all. Further options, as --json FILE, are passed on to it, and
take the place of those in `OPTIONS`. Links have a rate, and a delay in each direction if the kernel has
netem.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.box import Box, end_on_signals
from cluster.job import ENDED, _environment
from failures.driver import ROOT
from failures.namespaces import NotPossible

HOSTS, RANKS = 4, 2
METHODS = (
    *("ecemb (4, 3)", "ecemb (4, 3) window auto", "snapshots x2", "full files", "cpr vanilla"),
    "check-n-run intermittent",
)
OPTIONS = (
    *("--methods", ",".join(METHODS), "--launches", "3", "--kills", "2", "--steps", "80"),
    *(
        "--set",
        "tables=8",
        "--set",
        "rows=40000",
        "--set",
        "dim=32",
        "--set",
        "batch=128",
        "--set",
        "dense=small",
    ),
)
LONGEST_S = 45 * 60.0
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=compare --nodes={hosts} --ntasks-per-node=1 --output=compare.out
cd {root}
exec {command}
"""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rate", default="1gbit", help="of each node's link (default: 1gbit)")
    parser.add_argument("--delay", default="100us", help="in each direction (default: 100us)")
    given, others = parser.parse_known_args(words)
    try:
        with Box(HOSTS) as box:
            queue = box.limit_links(given.rate, given.delay)
            delay = f"{given.delay} each way" if queue == "netem" else "no delay"
            return compared(box, f"{given.rate} a host, {delay}", others)
    except NotPossible as error:
        print(f"skipped: {error}", flush=True)
        return 0


def compared(box: Box, network: str, options: Sequence[str]) -> int:
    """Submits the comparison, prints what it prints, and waits for its end.

    Args:
        box: Where.
        network: What rows say of it.
        options: Further ones, for `python -m bench compare`.

    Returns:
        0 if all was measured.
    """
    shared = box.folder / "shared"
    shared.mkdir()
    (box.folder / "compare.sh").write_text(script(network, shared, options))
    submit = ["sbatch", "--parsable", f"--chdir={box.folder}", "compare.sh"]
    job = int(box.slurm(*submit, folder=box.folder, environment=_environment()))
    log, shown, deadline = box.folder / "compare.out", 0, time.monotonic() + LONGEST_S
    while (state := box.job_state(job)) not in ENDED and time.monotonic() < deadline:
        shown = _pass_on(log, shown)
        box.rest(1.0)
    _pass_on(log, shown)
    if state != "COMPLETED":
        print(f"the comparison is {state} for Slurm", flush=True)
    return int(state != "COMPLETED")


def script(network: str, shared: Path, options: Sequence[str]) -> str:
    """What is submitted."""
    command = [
        *(sys.executable, "-m", "bench", "compare", "--launcher", "srun"),
        *(
            "--hosts",
            str(HOSTS),
            "--ranks-per-host",
            str(RANKS),
            "--shared",
            str(shared),
            "--network",
            network,
        ),
        *OPTIONS,
        *options,
    ]
    return SCRIPT.format(hosts=HOSTS, root=shlex.quote(str(ROOT)), command=shlex.join(command))


def _pass_on(log: Path, shown: int) -> int:
    """Prints what a log has beyond some bytes; returns how many it has."""
    content = log.read_bytes() if log.exists() else b""
    if len(content) > shown:
        sys.stdout.write(content[shown:].decode(errors="replace"))
        sys.stdout.flush()
    return len(content)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main(sys.argv[1:]))
