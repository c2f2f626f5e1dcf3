"""`ecemb-run`: the command that a launcher starts in place of `python`.

It asks the fork server of this job on this host for a worker, and starts that server if there is none; passes
signals on; ends like the worker. It imports only a few modules of the standard library. Where a worker can't
be forked it becomes the plain start instead, and logs the reason in one line.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence, Set
from typing import NoReturn

from ..errors import EcembError
from . import agent, identity, processes, wire
from .command import USAGE, Command, parse
from .servers import (
    Cold,
    Gone,
    connected,
    interpreter_options,
    is_there,
    is_unbuffered,
    locked,
    place_of,
    preloads,
    start,
    started,
)

_FORWARDED = frozenset(
    {
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGQUIT,
        signal.SIGCONT,
    }
)
_PLAIN = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores, and that a started program must have at their default."""
_LOOK_S = 1.0
_START_S = 900.0
_ATTEMPTS = 5
_DEBUGGERS = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "PYDEVD_", "DEBUGPY_")


def main(words: Sequence[str] | None = None) -> NoReturn:
    """The console script. Doesn't return: it ends like its worker, or becomes it.

    Args:
        words: the command line; None for the process's own, after the program's name.
    """
    numbers = _descriptors()
    try:
        command = parse(sys.argv[1:] if words is None else words)
        if command.action == "help":
            print(USAGE, end="")
            sys.exit(0)
        if command.target is not None and not command.is_module and not os.path.exists(command.target):
            _fail(f"can't open file {os.path.abspath(command.target)!r}: No such file or directory")
        if command.action == "stop":
            sys.exit(_stop(command))
        if command.action == "standby":
            sys.exit(_stand_by(command))
        _advise()
        try:
            _end(_run(command, numbers))
        except Cold as reason:
            if not command.cold:
                _say(f"{command.target} starts cold: {reason}")
            _become_plain(command)
    except EcembError as error:
        _fail(str(error))


def _fail(line: str) -> NoReturn:
    print(f"ecemb-run: {line}", file=sys.stderr)
    sys.exit(2)


def _say(line: str) -> None:
    """Prints once per host, not once per worker."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"ecemb-run: {line}", file=sys.stderr, flush=True)


def _advise() -> None:
    """Says once for a launch which settings torchrun lacks."""
    if os.environ.get("GROUP_RANK", "0") != "0" or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    try:
        with open(f"/proc/{os.getppid()}/cmdline") as file:
            line = agent.advice(os.environ, file.read().split("\0"))
    except (OSError, ValueError):
        return
    if line is not None:
        _say(line)


# --- cold ---------------------------------------------------------------------------------------------


def _why_cold(command: Command) -> str | None:
    if command.cold:
        return "as requested"
    if not sys.platform.startswith("linux"):
        return f"on {sys.platform} there is no fork server"
    if sys.gettrace() is not None or sys.getprofile() is not None or "pydevd" in sys.modules:
        return "a debugger, a profiler or coverage watches this interpreter"
    if sys.flags.inspect or sys.flags.interactive:
        return "python -i wants the interpreter that it has started"
    for name in os.environ:
        if name.startswith(_DEBUGGERS):
            return f"{name} is set: a debugger or coverage wants to see the interpreter start"
    return None


def _plain(command: Command) -> list[str]:
    """The command line of a plain start."""
    target = [str(command.target)] if not command.is_module else ["-m", str(command.target)]
    return [sys.executable, *interpreter_options(), *target, *command.arguments]


def _become_plain(command: Command) -> NoReturn:
    if sys.gettrace() is not None or sys.getprofile() is not None or "pydevd" in sys.modules:
        _run_here(command)
    for number in _PLAIN:
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, _plain(command))


def _run_here(command: Command) -> NoReturn:
    """Runs the script in this interpreter, because debuggers and coverage watch only this one."""
    from .worker import Work

    script_folder = _script_folder(command)
    if script_folder is not None:
        sys.path[0:1] = [script_folder]
    Work(str(command.target), command.arguments, is_module=command.is_module)()
    sys.exit(0)


# --- warm ---------------------------------------------------------------------------------------------


def _run(command: Command, numbers: list[int]) -> int:
    """Runs the script in a forked worker.

    Returns:
        The worker's status, as `os.wait` returns it.

    Raises:
        Cold: the script can't run in a worker; no part of it has run.
    """
    reason = _why_cold(command)
    if reason is not None:
        raise Cold(reason)
    if len(numbers) >= wire.MOST_DESCRIPTORS:
        raise Cold(f"{len(numbers)} descriptors are open, more than a message takes")
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if not (processes.die_with_parent(parent) and processes.is_launcher(parent)):
            sys.exit(1)
    ignored = [
        int(number)
        for number in signal.valid_signals()
        if number not in _PLAIN and signal.getsignal(number) == signal.SIG_IGN
    ]
    heard = _FORWARDED | {signal.SIGIO}  # also signals that are ignored here: the script may handle them
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    try:
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(Gone):
                return _ask(command, numbers, parent, ignored, blocked, heard)
        raise Cold("the fork server ended at every request; its log may say why")
    except Cold:
        processes.drop_pending(signal.SIGIO)  # of a connection that is closed now
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        raise


def _ask(
    command: Command,
    numbers: list[int],
    parent: int,
    ignored: list[int],
    blocked: Set[int],
    heard: Set[int],
) -> int:
    with place_of(command.arena_dir) as place:
        name = identity.server_name(preloads(command), _job())
        connection = connected(place, name) or started(place, name, command, numbers, blocked)
        with connection:
            try:
                wire.check_peer(connection)
                launcher = parent if "TORCHELASTIC_RUN_ID" in os.environ else None
                _send_request(connection, command, name, launcher, numbers, ignored, blocked)
                return _follow(connection, parent, heard, place, name)
            except wire.Foreign as error:
                raise Cold(f"the fork server isn't this user's: {error}") from error
            except (BrokenPipeError, ConnectionResetError) as error:
                raise Gone from error


def _job() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _send_request(
    connection: socket.socket,
    command: Command,
    name: str,
    launcher: int | None,
    numbers: list[int],
    ignored: list[int],
    blocked: Set[int],
) -> None:
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    umask = os.umask(0)
    os.umask(umask)
    try:
        request = {
            "what": "run",
            "name": name,
            "idle_s": command.idle_s,
            "launcher": launcher,
            "is_module": command.is_module,
            "target": command.target,
            "arguments": command.arguments,
            "script_folder": _script_folder(command),
            "command_line": _plain(command),
            "environment": dict(os.environ),
            "unbuffered": is_unbuffered(),
            "umask": umask,
            "processors": sorted(os.sched_getaffinity(0)),
            "ignored": ignored,
            "blocked": sorted(map(int, blocked)),
            "descriptors": numbers,
        }
        wire.send(connection, request, [here, *numbers])
    finally:
        os.close(here)


def _follow(connection: socket.socket, parent: int, heard: Set[int], place: int, name: str) -> int:
    """Passes signals on until the worker has ended.

    Returns:
        The worker's status, as `os.wait` returns it.

    Raises:
        Gone: the server has ended, or gave way to another server, before it accepted the request.
        Cold: the server refused.
    """
    inbox = wire.Inbox(connection)
    connection.setblocking(False)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    accepted, refused, deadline, info = False, None, time.monotonic() + _START_S, None
    while True:
        alive = True
        with contextlib.suppress(BlockingIOError):
            alive = inbox.read()
        while (message := inbox.take()) is not None:
            if message["what"] == "accepted":
                accepted = True
                for line in message["said"]:  # pyright: ignore
                    _say(line)
            elif message["what"] == "refused":
                refused = str(message["reason"])
            elif message["what"] == "ended":
                return int(message["status"])  # pyright: ignore
        if not alive and accepted:
            _lost(place, name)
        if not accepted:
            _heed(info)
            if refused is not None:
                raise Cold(refused)
            if not alive:
                raise Gone
            if time.monotonic() > deadline:
                raise Cold(f"the fork server didn't answer for {_START_S:.0f} s")
        elif info is not None and info.si_signo != signal.SIGIO:
            # A launcher signals the process group of its child; the worker is in another group.
            group = info.si_pid == parent and "TORCHELASTIC_RUN_ID" in os.environ
            with contextlib.suppress(OSError):
                wire.send(connection, {"what": "signal", "signal": info.si_signo, "group": group})
        info = signal.sigtimedwait(heard, _LOOK_S)  # looked at after what the server has said before it


def _heed(info: signal.struct_siginfo | None) -> None:
    """Ends by a signal that has come while no worker could take it, unless it is ignored."""
    if info is None or info.si_signo == signal.SIGIO:
        return
    if signal.getsignal(info.si_signo) != signal.SIG_IGN:
        _die_by(info.si_signo)


def _lost(place: int, name: str) -> NoReturn:
    where = os.readlink(f"/proc/self/fd/{place}")
    print(
        f"ecemb-run: the fork server has ended, and its workers with it; {where}/{name}.log may say why",
        file=sys.stderr,
    )
    sys.stderr.flush()
    os._exit(1)


def _end(status: int) -> NoReturn:
    """Ends like the worker."""
    if os.WIFSIGNALED(status):
        _die_by(os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _die_by(number: int) -> NoReturn:
    processes.leave_no_core()
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os._exit(128 + number)  # a container's first process survives any signal


# --- servers, by hand -------------------------------------------------------------------------------


def _stand_by(command: Command) -> int:
    """Starts a server that waits for a job."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does for its workers
    reason = _why_cold(command)
    if reason is not None:
        _fail(f"there will be no fork server: {reason}")
    with place_of(command.arena_dir) as place, locked(place):
        name = identity.server_name(preloads(command), None)
        if is_there(place, name):
            print("ecemb-run: a fork server already waits")
            return 0
        try:
            start(place, name, command, _descriptors(), signal.pthread_sigmask(signal.SIG_BLOCK, []))
        except Cold as reason:
            _fail(str(reason))
    print(f"ecemb-run: a fork server waits for {command.target or 'a script'}")
    return 0


def _stop(command: Command) -> int:
    """Ends all servers of this user."""
    found = 0
    with place_of(command.arena_dir) as place:
        for entry in sorted(os.listdir(place)):
            name, _, suffix = entry.rpartition(".")
            connection = connected(place, name) if suffix == "sock" else None
            if connection is None:
                continue
            with connection:
                connection.settimeout(_START_S)
                inbox, answer = wire.Inbox(connection), None
                with contextlib.suppress(OSError):
                    wire.send(connection, {"what": "stop"})
                    while answer is None and inbox.read():
                        answer = inbox.take()
            if answer is not None:
                found += 1
                running = answer["running"]
                left = "1 running process has" if running == 1 else f"{running} running processes have"
                when = f", once its {left} ended"
                print(f"ecemb-run: fork server {answer['pid']} ends{when if running else ''}")
    if not found:
        print("ecemb-run: no fork server of this user runs here", file=sys.stderr)
    return 0 if found else 1


def _script_folder(command: Command) -> str | None:
    """The folder that the interpreter puts first into sys.path; None if there is none."""
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated:
        return None
    if command.is_module:
        return os.getcwd()
    target = str(command.target)
    path = os.path.abspath(target)
    if os.path.isdir(path) or _is_archive(path):
        return path
    with contextlib.suppress(OSError):
        link = os.readlink(path)
        path = os.path.join(os.path.dirname(path), link)
    return os.path.realpath(os.path.dirname(path))


def _is_archive(path: str) -> bool:
    from .worker import is_importable

    return not path.endswith(".py") and is_importable(path)


def _descriptors() -> list[int]:
    """The descriptors that this process was started with and passes on, in order."""
    found: list[int] = []
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return [0, 1, 2]
    for number in sorted(map(int, numbers)):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
            if os.get_inheritable(number):
                found.append(number)
    return found
