"""torchrun, with workers that are forked from a process that has imported what they need.

    python -m forked MODULE [torchrun's options] SCRIPT [ARGUMENT ...]

Agent, store, restarts and signals are torchrun's own; only the imports, three quarters of a restart's
work, are done but once, by multiprocessing's fork server: it imports MODULE, which leaves no threads behind,
and ends with the agent, and its workers with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import runpy
import signal
import sys
import uuid

from torch.distributed import run as torchrun

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """What the fork server calls: whoever it is forked from is torchrun's agent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def work(script: str, *arguments: str) -> None:
    """What a forked process does: nothing of other processes' signal handlers is left to it."""
    for number in _HANDLED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    module, *given = sys.argv[1:]
    multiprocessing.set_forkserver_preload([module])
    standalone = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]
    options = torchrun.parse_args(["--start-method=forkserver", *standalone, *given])
    config, _, _ = torchrun.config_from_args(options)
    torchrun.elastic_launch(config, work)(options.training_script, *options.training_script_args)


if __name__ == "__main__":
    main()
