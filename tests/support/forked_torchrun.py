"""torchrun, with workers that are forked from a process that has imported what they need.

    python -m support.forked_torchrun MODULE [torchrun's options] SCRIPT [ARGUMENT ...]

Agent, store, restarts and signals are torchrun's own; only the imports, three quarters of a restart's
work, are done but once, by multiprocessing's fork server: it imports MODULE, which leaves no threads behind,
and ends with the agent, and its workers with it.
With torchrun's `--no-python`, workers are commands.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed import run as torchrun

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """End as soon as the process that started this process ends: of the fork server, torchrun's agent.

    Args:
        parent: its pid; by default the process that is the parent now. If that is another one, it has ended.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _remember() -> None:
    global _forker
    _forker = os.getpid()


_forker = 0  # in a forked process: who forked it
os.register_at_fork(before=_remember)


def work(script: str, *arguments: str) -> None:
    """What a forked process does: nothing of other processes' signal handlers is left to it."""
    from support import forked_torchrun  # by its name: here it is __main__, and in the fork server it isn't

    end_with_parent(forked_torchrun._forker)
    for number in _HANDLED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def launch(given: Sequence[str]) -> None:
    """Runs torchrun with these options, script and arguments."""
    standalone = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]
    options = torchrun.parse_args(["--start-method=forkserver", *standalone, *given])
    config, command, arguments = torchrun.config_from_args(options)
    if options.no_python:
        torchrun.elastic_launch(config, command)(*arguments)
    else:
        torchrun.elastic_launch(config, work)(options.training_script, *options.training_script_args)


def main() -> None:
    module, *given = sys.argv[1:]
    multiprocessing.set_forkserver_preload([module])
    launch(given)


if __name__ == "__main__":
    main()
