"""The process that those which tests start are forked from: starting Python and torch takes each seconds."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest import mock


def fork_server() -> ForkServerContext:
    """The context to start processes with.

    The process that uses multiprocessing's fork server first says what it imports, for all: so all come here.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.fork_server_imports"])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # before 3.13 it has its own path
        forkserver.ensure_running()
    return context
