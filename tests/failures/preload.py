"""What the fork server of `launch.py` imports; it ends with torchrun's agent, its parent."""

from __future__ import annotations

import ctypes
import signal

import preloaded  # noqa: F401
from failures import worker  # noqa: F401

_PR_SET_PDEATHSIG = 1

ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
