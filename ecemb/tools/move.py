"""`ecemb move`: asks a running job to save and leave, and then starts it by another command."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time

from ..memory import scan
from ..memory.private_files import Folder
from .arenas import add_arena_dir, arenas_of

SHOWS = """
The job has to ask, `if guard.asked_to_leave(): guard.leave(path)`: then it commits, saves and removes its
memory. This command waits until no memory of the job is left on this machine, and then becomes COMMAND, if
one is given: a torchrun here with another number of ranks, or one that a scheduler starts elsewhere. Run it
on any of the job's hosts. The request is gone when this command ends, also by Ctrl-C.
"""
_POLL_S = 0.2
_PATIENCE_S = 120.0  # torchrun restarts a job within it


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(run=run)
    add_arena_dir(parser)
    parser.add_argument("--job", required=True, help="the job's name, as in init_process_group(job=)")
    parser.add_argument("--timeout", type=float, metavar="S", help="wait at most this long, in seconds")
    parser.add_argument("start", nargs="*", metavar="COMMAND", help="after --: what starts the job again")


def run(options: argparse.Namespace) -> int:
    """Asks, waits, and starts.

    Returns:
        The exit code: 1 if no such job runs here, if it did not leave, or if there is no such command. Does
        not return if there is a command to start.
    """
    if options.start and shutil.which(options.start[0]) is None:
        print(
            f"ecemb: {options.start[0]!r}, the command that is to start job {options.job!r} again, can't be "
            f"found or executed: the job is not asked to leave",
            file=sys.stderr,
        )
        return 1
    found = arenas_of(options)
    if not any(one.holder for one in found):
        what = "its memory is here, and no process holds it" if found else "no memory of it is here"
        print(
            f"ecemb: job {options.job!r} doesn't run on this machine ({what}, in {options.arena_dir}): see "
            f"`ecemb arenas ls`; a job that has ended is launched again to be saved",
            file=sys.stderr,
        )
        return 1
    places = [
        Folder(options.arena_dir.absolute(), options.job, host)
        for host in sorted({one.host for one in found if one.holder and one.host})
    ]
    with contextlib.ExitStack() as requests:
        for place in places:
            requests.enter_context(scan.asking_to_leave(place))
        print(f"job {options.job} is asked to leave; waiting for guard.asked_to_leave() in its script")
        has_left = _wait(options)
    if not has_left:
        return 1
    print(f"job {options.job} has left this machine", flush=True)
    if options.start:
        os.execvp(options.start[0], options.start)
    return 0


def _wait(options: argparse.Namespace) -> bool:
    """Whether the job left before the deadline."""
    began = held = time.monotonic()
    while found := [one for one in arenas_of(options) if one.header is not None or one.damage]:
        now = time.monotonic()
        if any(one.holder for one in found):
            held = now
        if now - held > _PATIENCE_S:
            print(
                f"ecemb: no process of job {options.job!r} holds its memory any more: it has ended without "
                f"leaving. Launch it again: it goes on from memory",
                file=sys.stderr,
            )
            return False
        if options.timeout is not None and now - began > options.timeout:
            print(
                f"ecemb: job {options.job!r} has not left within {options.timeout:g} s: does its script call "
                f"guard.asked_to_leave() between steps? It goes on; the request is taken back",
                file=sys.stderr,
            )
            return False
        time.sleep(_POLL_S)
    return True
