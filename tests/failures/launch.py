"""torchrun, with workers that are forked from a process that has imported what they need.

Agent, store, restarts and signals are torchrun's own; only the imports, three quarters of a restart's
work, are done but once, by multiprocessing's fork server, which has no threads. It ends with the agent,
and its workers with it. Takes torchrun's options, and no script.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys

from torch.distributed import run as torchrun

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def work() -> None:
    """What a forked process does: nothing of other processes' signal handlers is left to it."""
    from failures import worker  # the agent itself has no use for it

    for number in _HANDLED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    worker.main()


def main() -> None:
    multiprocessing.set_forkserver_preload(["failures.preload"])
    options = torchrun.parse_args([*sys.argv[1:], "--start-method=forkserver", "no script"])
    config, _, _ = torchrun.config_from_args(options)
    torchrun.elastic_launch(config, work)()


if __name__ == "__main__":
    main()
