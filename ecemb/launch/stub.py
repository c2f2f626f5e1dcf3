"""`ecemb-run`: the command that a launcher starts in place of `python`.

It asks the fork server of this job on this host for a worker, and starts that server if there is none; passes
signals on to the worker; replaces the worker if a signal or a peer's death has ended it (`Replacements`), and
ends with the last one's status. It imports only a few modules of the standard library. If a worker can't be
forked, it becomes the plain start `python SCRIPT` instead, and logs the reason in one line.

Invariant: until the server has accepted the request (`_accepted`), every failure leads to a plain start,
except a wrong command line. After that, only the end of the last worker, or of the server, ends this
process (`_follow`).

Owns the line of advice about torchrun's settings: those that decide how soon it restarts workers, and whether
it does. They are read from this process's environment and from torchrun's command line.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple, NoReturn

from ..errors import ConfigurationError, EcembError
from ..net import processes
from ..net.replacement import End
from . import wire
from .command import USAGE, Command, parse
from .servers import (
    Cold,
    Gone,
    connected,
    interpreter_options,
    is_there,
    locked,
    place_of,
    preloads,
    start,
    started,
)

_HEARD = frozenset(
    {
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGQUIT,
        signal.SIGCONT,
        signal.SIGIO,
    }
)
"""Signals that are blocked, and waited for, while a server is asked and a worker runs.

Those that this process ignores are among them: the script may handle them.
"""
_PLAIN = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores, and that a started program must have at their default."""
_TOLD_TO_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals by which a launcher or a user ends the job: no worker is replaced that got one of them."""
MOST_WITHOUT_PROGRESS, MOST_A_MINUTE = 3, 20
"""Replacements in a row in which no step ended, and in a minute."""
_LOOK_S = 1.0
_START_S = 900.0
_ATTEMPTS = 5
_DEBUGGERS = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "PYDEVD_", "DEBUGPY_")


def main(words: Sequence[str] | None = None) -> NoReturn:
    """The console script. Doesn't return: it ends like its worker, or becomes it.

    Args:
        words: the command line; None for the process's own, after the program's name.
    """
    try:
        command = parse(sys.argv[1:] if words is None else words)
    except ConfigurationError as error:
        _fail(str(error))
    if command.action == "help":
        print(USAGE, end="")
        sys.exit(0)
    if command.target is not None and not command.is_module:
        try:
            os.stat(command.target)
        except (FileNotFoundError, NotADirectoryError) as error:
            _fail(f"can't open file {command.target!r}: {error.strerror}")
        except OSError:
            pass  # if the script can't be opened, the interpreter will say so
    if command.action != "run":
        try:
            sys.exit(_stop(command) if command.action == "stop" else _stand_by(command))
        except (Cold, EcembError, OSError) as error:
            _fail(wire.line(error))
    _advise()
    try:
        given = _prepared(command)
        worker = _accepted(command, given)
    except (Cold, EcembError, OSError) as error:
        reason = wire.line(error)
        if isinstance(error, OSError):
            reason = f"no fork server can be found or started below {command.arena_dir}: {reason}"
    else:
        _end(_followed(command, given, worker))
    if not command.cold:
        _say(f"{command.target} starts cold: {reason}")
    _become_plain(command)


def _fail(line: str) -> NoReturn:
    _print(line)
    sys.exit(2)


def _say(line: str) -> None:
    """Prints once per host, not once per worker."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _print(line)


def _print(line: str) -> None:
    """Prints to stderr, if it is open and takes the line: a full disk is no reason to end."""
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]
        with contextlib.suppress(OSError):
            print(f"ecemb-run: {line}", file=sys.stderr, flush=True)


def _advise() -> None:
    """Says once for a launch which settings torchrun lacks."""
    if os.environ.get("GROUP_RANK", "0") != "0" or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    try:
        with open(f"/proc/{os.getppid()}/cmdline") as file:
            line = advice_on_torchrun(os.environ, file.read().split("\0"))
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
    os.execv(sys.executable, _plain(command))


def _run_here(command: Command) -> NoReturn:
    """Runs the script in this interpreter, because debuggers and coverage watch only this one."""
    from .worker import Work

    script_folder = _script_folder(command)
    if script_folder is not None:
        sys.path[0:1] = [script_folder]
    Work(str(command.target), command.arguments, command.is_module)()
    sys.exit(0)


# --- warm ---------------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """What every worker of this process is started with.

    Attributes:
        numbers: the descriptors that it gets.
        parent: the launcher, this process's parent when it began.
        ignored: signals that this process was started to ignore.
        blocked: signals that were blocked.
    """

    numbers: list[int]
    parent: int
    ignored: list[int]
    blocked: Set[int]


class _Worker(NamedTuple):
    """A worker that the server has forked: no plain start may replace it any more.

    Attributes:
        connection: to the server; once it is closed, the worker is killed.
        inbox: further messages of the server.
        info: a signal that came before the acceptance was read, if any, to be passed on to the worker.
        log: path of the server's log.
    """

    connection: socket.socket
    inbox: wire.Inbox
    info: signal.struct_siginfo | None
    log: str


class _Ended(NamedTuple):
    """A worker's end.

    Attributes:
        status: as `os.wait` returns it.
        end: what the worker has written of its end.
        progress: whether a step was committed in it.
        passed: signals that were passed on to it.
    """

    status: int
    end: End
    progress: bool
    passed: Set[int]


def _prepared(command: Command) -> _Given:
    """What workers are started with.

    Raises:
        Cold: the script can't run in a worker.
        EcembError, OSError: likewise.
    """
    reason = _why_cold(command)
    if reason is not None:
        raise Cold(reason)
    numbers = _descriptors()
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
    return _Given(numbers, parent, ignored, signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def _accepted(command: Command, given: _Given, replaced: int = 0) -> _Worker:
    """Requests a worker that runs the script, and waits until the server has forked it.

    Args:
        command: this process's.
        given: what the worker is started with.
        replaced: number of workers before it.

    Raises:
        Cold: the script can't run in a worker; no part of it has run.
        EcembError, OSError: likewise.
    """
    try:  # includes the call that blocks signals: it runs handlers, which may raise
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(Gone):
                return _ask(command, given, replaced)
        raise Cold("the fork server ended at every request; its log may say why")
    except BaseException:
        processes.drop_pending(signal.SIGIO)  # of a connection that is closed now
        signal.pthread_sigmask(signal.SIG_SETMASK, given.blocked)
        raise


def _ask(command: Command, given: _Given, replaced: int) -> _Worker:
    with place_of(command.arena_dir) as place:
        name = wire.server_name(preloads(command), os.environ.get("TORCHELASTIC_RUN_ID", ""))
        log = os.path.join(os.readlink(f"/proc/self/fd/{place}"), f"{name}.log")
        connection = connected(place, name)
        if connection is None:
            connection = started(place, name, command, given.numbers, given.blocked)
    try:
        wire.check_peer(connection)
        fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
        connection.settimeout(_START_S)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a refusal may be there
            _send_request(connection, command, name, given, replaced)
        connection.setblocking(False)
        inbox = wire.Inbox(connection)
        return _Worker(connection, inbox, _await_acceptance(connection, inbox), log)
    except wire.Foreign as error:
        connection.close()
        raise Cold(f"the fork server isn't this user's: {error}") from error
    except BaseException:
        connection.close()
        raise


def _send_request(
    connection: socket.socket, command: Command, name: str, given: _Given, replaced: int
) -> None:
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    umask = os.umask(0)
    os.umask(umask)
    try:
        request = {
            "what": "run",
            "name": name,
            "idle_s": command.idle_s,
            "launcher": given.parent if "TORCHELASTIC_RUN_ID" in os.environ else None,
            "is_module": command.is_module,
            "target": command.target,
            "arguments": command.arguments,
            "script_folder": _script_folder(command),
            "command_line": _plain(command),
            "environment": dict(os.environ),
            "unbuffered": bool(getattr(sys.stdout, "write_through", False)),  # python -u
            "umask": umask,
            "processors": sorted(os.sched_getaffinity(0)),
            "ignored": given.ignored,
            "blocked": sorted(map(int, given.blocked)),
            "descriptors": given.numbers,
            "replaces": command.replaces,
            "replaced": replaced,
        }
        wire.send(connection, request, [here, *given.numbers])
    finally:
        os.close(here)


def _await_acceptance(connection: socket.socket, inbox: wire.Inbox) -> signal.struct_siginfo | None:
    """Waits until a worker is forked. Returns the signal that came before the acceptance was read, if any.

    Raises:
        Gone: the server has ended, or gave way to another server, before it accepted the request.
        Cold: the server refused.
    """
    deadline, is_late, info = time.monotonic() + _START_S, False, None
    while True:
        alive = _read(inbox)
        while (message := inbox.take()) is not None:
            if message.get("what") == "accepted":
                for line in message["said"]:  # pyright: ignore
                    _say(line)
                return info
            if message.get("what") == "refused":
                _heed(info)
                raise Cold(str(message["reason"]))
        _heed(info)
        if not alive and is_late:
            raise Cold(f"the fork server didn't answer for {_START_S:.0f} s")
        if not alive:
            raise Gone
        if time.monotonic() > deadline:
            connection.shutdown(socket.SHUT_RDWR)  # what it has sent before can still be read
            is_late, info = True, None
            continue
        info = signal.sigtimedwait(_HEARD, _LOOK_S)  # handled after messages that came before it


def _followed(command: Command, given: _Given, worker: _Worker) -> int:
    """Follows the worker, and those that replace it.

    Returns:
        The status of the last one, as `os.wait` returns it.
    """
    budget = Replacements()
    while True:
        ended = _follow(worker, given.parent)
        worker.connection.close()
        if not _is_replaced(ended) or not budget.spend(time.monotonic(), progress=ended.progress):
            return ended.status
        # It is the predecessor's error file: should the job fail later, torchrun would take it for the cause.
        with contextlib.suppress(OSError):
            os.unlink(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        try:
            worker = _accepted(command, given, budget.count)
        except (Cold, EcembError, OSError) as error:
            _print(f"the worker is not replaced, torchrun restarts the job: {wire.line(error)}")
            return ended.status


class Replacements:
    """How many workers may be replaced before torchrun restarts the job.

    Without a limit a worker that dies at every start would be replaced without end.

    Attributes:
        count: number of workers that were replaced.
    """

    def __init__(self) -> None:
        self.count = 0
        self._times: list[float] = []
        self._without_progress = 0

    def spend(self, now: float, *, progress: bool) -> bool:
        """Counts a replacement; False if there may be none.

        Args:
            now: on time.monotonic().
            progress: whether a step was committed in the worker that is to be replaced.
        """
        self._without_progress = 0 if progress else self._without_progress + 1
        self._times = [one for one in self._times if one > now - 60]
        if self._without_progress > MOST_WITHOUT_PROGRESS or len(self._times) >= MOST_A_MINUTE:
            return False
        self._times.append(now)
        self.count += 1
        return True


def _is_replaced(ended: _Ended) -> bool:
    """Whether a worker's end is one that this process mends: docs/protocol.md, 3.5."""
    ended_by = os.WTERMSIG(ended.status) if os.WIFSIGNALED(ended.status) else None
    if ended.passed & _TOLD_TO_END or ended_by in _TOLD_TO_END:
        return False
    is_killed = ended_by is not None and ended_by not in ended.passed
    return ended.end is End.PEER_DIED or (ended.end is End.IF_KILLED and is_killed)


def _follow(worker: _Worker, launcher: int) -> _Ended:
    """Passes signals on until the worker has ended. Ends this process if the server has ended before."""
    info, passed = worker.info, set[int]()
    while True:
        alive = _read(worker.inbox)
        while (message := worker.inbox.take()) is not None:
            if message.get("what") == "ended":
                end, progress = End(message["end"]), bool(message["progress"])
                return _Ended(int(message["status"]), end, progress, passed)  # pyright: ignore
        if not alive:
            _print(f"the fork server has ended, and its workers with it; {worker.log} may say why")
            os._exit(1)
        if info is not None and info.si_signo != signal.SIGIO:
            # A launcher signals the process group of its child; the worker is in another group.
            group = info.si_pid == launcher and "TORCHELASTIC_RUN_ID" in os.environ
            passed.add(info.si_signo)
            with contextlib.suppress(OSError):
                wire.send(worker.connection, {"what": "signal", "signal": info.si_signo, "group": group})
        info = signal.sigtimedwait(_HEARD, _LOOK_S)


def _read(inbox: wire.Inbox) -> bool:
    """Reads the bytes that have come; False once the server is gone, and only then."""
    with contextlib.suppress(
        OSError
    ):  # nothing has come, or the kernel lacks memory: the next call tries again
        return inbox.read()
    return True


def _heed(info: signal.struct_siginfo | None) -> None:
    """Ends this process by a signal that came while there was no worker, unless the signal is ignored."""
    if info is None or info.si_signo == signal.SIGIO:
        return
    if signal.getsignal(info.si_signo) != signal.SIG_IGN:
        _die_by(info.si_signo)


def _end(status: int) -> NoReturn:
    """Ends this process with the worker's exit code, or by the same signal."""
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
        name = wire.server_name(preloads(command), None)
        if is_there(place, name):
            print("ecemb-run: a fork server already waits")
            return 0
        start(place, name, command, _descriptors(), signal.pthread_sigmask(signal.SIG_BLOCK, []))
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
                with contextlib.suppress(OSError, ValueError):
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
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
            if os.get_inheritable(number):
                found.append(number)
    return found


_MONITOR_S = 0.1
"""torchrun's own default of the time between two looks at its workers."""
_MOST_MONITOR_S = 0.05
_KEEP_ALIVE = ("keep_alive_interval", "keep_alive_max_attempt")
_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def advice_on_torchrun(environment: Mapping[str, str], command_line: Sequence[str]) -> str | None:
    """Names the settings that torchrun lacks for fast restarts; None if it has them, or isn't torchrun.

    Args:
        environment: of a command that torchrun has started.
        command_line: torchrun's.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    wanted: list[str] = []
    if environment.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        wanted.append("--max-restarts 100 (it is 0: the first failure ends the training)")
    if any(
        word.endswith(("torchrun", "torch.distributed.run", "distributed/run.py")) for word in command_line
    ):
        interval = _option(command_line, "monitor-interval", environment.get("PET_MONITOR_INTERVAL"))
        if _number(interval, _MONITOR_S) > _MOST_MONITOR_S:
            wanted.append(f"--monitor-interval 0.01 (it is {interval or _MONITOR_S})")
        nodes = _option(command_line, "nnodes", environment.get("PET_NNODES")) or "1"
        if nodes not in ("1", "1:1"):
            given = _option(command_line, "rdzv-conf", environment.get("PET_RDZV_CONF")) or ""
            names = [*_KEEP_ALIVE, *(["last_call_timeout"] if len({*nodes.split(":")}) > 1 else [])]
            values = {"keep_alive_max_attempt": 5}
            if missing := [f"{name}={values.get(name, 1)}" for name in names if f"{name}=" not in given]:
                wanted.append(f"--rdzv-conf {','.join(missing)}")
            if environment.get(_SHARED_STORE) != "1":
                wanted.append(f"{_SHARED_STORE}=1 in its environment")
    return f"for fast restarts, launch torchrun with {' and '.join(wanted)}" if wanted else None


def _option(words: Sequence[str], name: str, otherwise: str | None) -> str | None:
    """The value of an option of torchrun, which may be written with - or _, and with = or a space."""
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.startswith("--") and option[2:].replace("_", "-") == name:
            return value if equals else next(iter(words[index + 1 : index + 2]), None)
    return otherwise


def _number(text: str | None, otherwise: float) -> float:
    try:
        return otherwise if text is None else float(text)
    except ValueError:
        return otherwise
