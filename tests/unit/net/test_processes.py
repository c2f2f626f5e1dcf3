"""Kernel services for processes."""

from __future__ import annotations

import subprocess
import sys

DROPS = """
import os, signal
from ecemb.net import processes
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
os.kill(os.getpid(), signal.SIGIO)
assert signal.SIGIO in signal.sigpending()
{drop}
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGIO])
assert signal.getsignal(signal.SIGIO) == signal.SIG_DFL
"""


def test_a_pending_signal_is_dropped_and_would_end_the_process() -> None:
    """As SIGIO of a connection that has just been closed, when a command goes on to start cold."""
    for drop, code in (("", -29), ("processes.drop_pending(signal.SIGIO)", 0)):
        assert subprocess.run([sys.executable, "-c", DROPS.format(drop=drop)], check=False).returncode == code
