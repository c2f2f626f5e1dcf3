"""The fork server: imports once, and forks a worker for each request.

    python -c "..." CONFIG       the command of `stub`; its listening socket is descriptor 3, the folder 4

One thread, one loop. The server has no state of the job: the request describes the worker, and the worker's
exit status is sent to the stub that requested it. A worker is killed when the connection of its stub ends.
The server is its parent and alone waits for it, so a process id never names another process. If the server
ends, the kernel ends its workers.

A worker begins once its stub has been sent "accepted": until then it waits at a pipe, its gate. So every
earlier failure is answered with "refused", and the script starts plainly.

Invariants: while a request is accepted, this process has a single thread, no child but workers and no open
device (`preload.residue`). While a worker runs, no error of a client, of the log or of the kernel leaves the
loop, and no signal but SIGKILL ends it; a descriptor that the kernel can't serve isn't polled for a while.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Generator, Mapping
from typing import Any

from ..net import processes, replacement
from . import preload, wire
from .servers import FOLDER, LISTENER, Cold, locked
from .worker import Work, become

_GRACE_S = 3.0
"""Seconds from the successful end of a job's last worker to the server's end: another may start late."""
_RELAUNCH = 1 / 15
"""Part of the idle time that a server waits for another launch of its job."""
_LEAVE_S = 1.0
"""Most seconds to wait for the lock under which the socket's name is removed."""
_REST_S = 1.0
"""Seconds for which a descriptor isn't polled after an error of the kernel."""
_MOST_POLL_S = 3600.0
_MOST_IDLE = 64
"""Most connections without a request; one more replaces the oldest."""
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals by which the server ends, as soon as no worker runs: batch systems send them to every process."""
_LEFT_ALONE = frozenset(
    {
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGVTALRM,
        signal.SIGPROF,
        signal.SIGIO,
        signal.SIGPWR,
        signal.SIGXCPU,
        *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
    }
)
"""Signals that the server ignores: they would end it, and are meant for the script."""
_BEFORE = frozenset(sys.builtin_module_names) | {
    "site", "os", "io", "abc", "codecs", "encodings", "stat", "posixpath", "genericpath", "zipimport"
}  # fmt: skip


class _Client:
    """A connection, and the worker that was forked for it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.inbox = wire.Inbox(connection)
        self.request: Mapping[str, Any] | None = None  # until a worker is forked for it
        self.worker: int | None = None
        self.page: mmap.mmap | None = None  # of `replacement`, shared with the worker

    @property
    def is_idle(self) -> bool:
        """Whether the connection has no request and no worker."""
        return self.request is None and self.worker is None

    def close(self) -> None:
        self.connection.close()
        _close(*self.inbox.descriptors)
        self.inbox.descriptors.clear()
        if self.page is not None:
            self.page.close()
            self.page = None


class _Log(io.RawIOBase):
    """A standard stream of the server. A line for which the disk has no room is lost without an error.

    Unbuffered, so that no worker begins with the server's lines in a buffer.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self.name = name
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            os.write(self._descriptor, data)
        return len(data)


class Server:
    """The loop, and its state.

    Args:
        config: as `servers.start` writes it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._name: str = config["name"]
        self._idle_s: float | None = config["idle_s"]
        self._said: list[str] = config["said"]  # part of `config`, for `_start_without`
        self._changed: dict[str, str | None] = {}
        self._script: str | None = config["script"]
        if config["module"] is not None:
            self._script = preload.script_of(config["module"], config["folder"])
        self._names: list[str] = []
        self._torch_seed: int | None = None
        self._script_changed: int | None = None
        self._files: dict[str, int] = {}
        self._installed: list[object] = []
        self._clients: dict[int, _Client] = {}
        self._launchers: dict[int, int] = {}  # process id -> descriptor, of those that run
        self._abandoned = False  # all launchers have ended
        self._dying: set[int] = set()  # killed, because their connections have ended
        self._round_is_fine = True
        self._used = False
        self._widths: set[tuple[int, ...]] = set()  # of records of the workers' tables; see `_compile`
        self._compiled: set[tuple[int, ...]] = set()  # those of them for which loops were compiled
        self._retired = False
        self._asked_to_end = False  # by a signal
        self._since = time.monotonic()
        self._resting: dict[int, float] = {}  # descriptor -> when it is polled again, after an error
        self._complaint = ""  # the last logged error; see `_complain`
        self._listener = socket.socket(fileno=LISTENER)
        self._listener.setblocking(False)
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for descriptor in (LISTENER, FOLDER):
            os.set_inheritable(descriptor, False)

    # --- imports ------------------------------------------------------------------------------------

    def preload(self) -> None:
        """Imports the job's modules; starts this process again without one that can't be imported ahead."""
        before = dict(os.environ)
        children = preload.child_count()
        preload.watch_environment(True)
        self._names = self._wanted()
        for name in self._names:
            preload.Watched.read.clear()
            try:
                preload.load(name)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - an import may raise any error
                self._say(f"{name} can't be imported ahead: {type(error).__name__}: {wire.line(error)}")
            if self._torch_seed is None and "torch" in sys.modules:
                self._torch_seed = sys.modules["torch"].initial_seed()
            reason = preload.residue(children)
            if reason is None and preload.Watched.read:
                read = ", ".join(sorted(preload.Watched.read))
                reason = f"reads {read} when it is imported, which differs by worker"
            if reason is not None:
                self._start_without(name, reason, before)
        preload.watch_environment(False)
        for name in before.keys() | os.environ.keys():
            if before.get(name) != os.environ.get(name):
                self._changed[name] = os.environ.get(name)
        self._installed = _installed()
        self._script_changed = _changed(self._script)
        self._files = {path: changed for path in _own_files() if (changed := _changed(path))}
        gc.collect()
        gc.freeze()

    def _wanted(self) -> list[str]:
        return preload.names(self._script, self._config["preload"], self._config["without"])

    def _start_without(self, name: str, reason: str, environment: dict[str, str]) -> None:
        self._say(f"{name} is not imported ahead: it {reason}; --no-preload {name} spares the attempt")
        config: dict[str, Any] = {**self._config, "without": [*self._config["without"], name]}
        for descriptor in (LISTENER, FOLDER):
            os.set_inheritable(descriptor, True)
        os.chdir(config["folder"])
        os.execve(sys.executable, [*config["interpreter"], json.dumps(config)], environment)

    def _say(self, line: str) -> None:
        self._said.append(line)
        print(line, flush=True)

    # --- the loop -----------------------------------------------------------------------------------

    def serve(self) -> Work | None:
        """Serves requests until the server has to end. Returns in a worker its work, in the server None."""
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _ENDING:
            signal.signal(number, self._note_signal)
        for number in _LEFT_ALONE:
            signal.signal(number, signal.SIG_IGN)
        self._since = time.monotonic()
        while True:
            try:
                left_s = self._left_s()
                if left_s is not None and left_s <= 0 and self._end():
                    return None
                work = self._turn(left_s)
            except Exception as error:
                if not self._running():
                    raise
                self._complain(f"an error of the server, which goes on: {error!r}")
                time.sleep(_REST_S)  # it may recur at once, for as long as a worker runs
                continue
            if work is not None:
                return work

    def _turn(self, left_s: float | None) -> Work | None:
        """Waits for events, and handles them. Returns in a new worker its work, else None."""
        now = time.monotonic()
        self._resting = {one: until for one, until in self._resting.items() if until > now}
        poll = select.poll()
        for descriptor in {*self._own(), *self._clients} - self._resting.keys():
            poll.register(descriptor, select.POLLIN)
        waits = [until - now for until in self._resting.values()]
        wait_s = min(_MOST_POLL_S, *waits, _MOST_POLL_S if left_s is None else left_s)
        ready = poll.poll(max(0.0, wait_s) * 1000 + 1)
        self._reap()
        for descriptor, _ in ready:
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._launchers.values():
                self._leave(descriptor)
            elif descriptor in self._clients:
                self._hear(self._clients[descriptor])
        if self._asked_to_end:
            self._retire()
            while self._evict():
                pass
        for client in list(self._clients.values()):
            if client.request is not None and not self._dying:
                work = self._start(client, client.request)
                if work is not None:
                    return work
        self._compile()
        return None

    def _note_widths(self, client: _Client) -> None:
        if client.page is not None:
            self._widths |= replacement.read_widths(client.page)

    def _compile(self) -> None:
        """Compiles loops that workers compile after the fork, so that their successors have them."""
        for client in self._clients.values():
            self._note_widths(client)
        if not (new := self._widths - self._compiled):
            return
        self._compiled |= new
        try:
            preload.prepare(new)
        except Exception as error:  # noqa: BLE001 - workers compile them, as without this
            self._complain(f"loops can't be compiled ahead: {error!r}")

    def _note_signal(self, *_: object) -> None:
        self._asked_to_end = True

    def _rest(self, descriptor: int) -> None:
        """Excludes a descriptor from polling for a while: it stays ready, and the loop would spin."""
        self._resting[descriptor] = time.monotonic() + _REST_S

    def _complain(self, line: str) -> None:
        """Logs an error, unless it is the last one that was logged."""
        if line != self._complaint:
            self._complaint = line
            print(line, flush=True)

    def _own(self) -> list[int]:
        """The descriptors that the loop watches, beside connections."""
        return [self._listener.fileno(), self._wake, *self._launchers.values()]

    def _attend(self, launcher: int | None) -> None:
        """Watches a worker's launcher: if all launchers have ended, only another launch needs the server."""
        if launcher is None or launcher in self._launchers:
            return
        with contextlib.suppress(OSError):
            self._launchers[launcher] = os.pidfd_open(launcher)
            self._abandoned = False

    def _leave(self, descriptor: int) -> None:
        """Closes the descriptor of a launcher that has ended."""
        os.close(descriptor)
        self._launchers = {pid: other for pid, other in self._launchers.items() if other != descriptor}
        self._abandoned, self._since = not self._launchers, time.monotonic()

    def _left_s(self) -> float | None:
        """Seconds until the server has to end; None while it must stay."""
        if self._dying or self._clients:
            return None
        if self._retired:
            return 0.0
        wait_s = self._idle_s
        if self._used and self._round_is_fine:
            wait_s = _GRACE_S
        elif wait_s is not None and self._abandoned:
            wait_s *= _RELAUNCH
        return None if wait_s is None else self._since + wait_s - time.monotonic()

    def _end(self) -> bool:
        """Removes the socket; False if a connection came in the last moment."""
        self._retire()
        self._accept()
        return not self._clients

    def _accept(self) -> None:
        """Accepts one connection; if descriptors are short, drops the oldest idle one, or refuses it."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._complain(f"a connection can't be accepted: {error}")
            if error.errno in _NO_DESCRIPTOR and (self._evict() or self._turn_away(error)):
                return
            self._rest(self._listener.fileno())
            return
        try:
            connection.setblocking(False)
            wire.check_peer(connection)
        except (wire.Foreign, OSError) as error:
            print(f"a connection was refused: {error}", flush=True)
            connection.close()
            return
        self._clients[connection.fileno()] = _Client(connection)
        if sum(client.is_idle for client in self._clients.values()) > _most_idle():
            self._evict()

    def _evict(self) -> bool:
        """Drops the oldest idle connection; False if there is none."""
        idle = next((client for client in self._clients.values() if client.is_idle), None)
        if idle is None:
            return False
        self._drop(idle)  # a stub that was slow will call again
        return True

    def _turn_away(self, error: OSError) -> bool:
        """Refuses a connection for lack of descriptors; False if even the spare one is gone."""
        try:
            with self._without_spare(), self._listener.accept()[0] as connection:
                connection.setblocking(False)
                reason = f"the fork server can't accept its connection: {error.strerror}"
                with contextlib.suppress(OSError):
                    wire.send(connection, {"what": "refused", "reason": reason})
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def _without_spare(self) -> Generator[None, None, None]:
        """Within the block the spare descriptor is free for a call that needs one."""
        if self._spare is not None:
            _close(self._spare)
            self._spare = None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _hear(self, client: _Client) -> None:
        try:
            alive = client.inbox.read()
        except BlockingIOError:
            return
        except OSError as error:  # the kernel lacks memory: the connection is unchanged
            self._complain(f"a connection can't be read: {error}")
            self._rest(client.connection.fileno())
            return
        try:
            while (message := client.inbox.take()) is not None:
                self._act(client, message)
        except Exception as error:  # noqa: BLE001 - other clients' workers run
            print(f"a message could not be obeyed: {error!r}", flush=True)
            alive = False
        if not alive:
            self._drop(client)

    def _act(self, client: _Client, message: Mapping[str, Any]) -> None:
        what = message["what"]
        if what == "run" and client.worker is None:
            client.request = message
        elif what == "signal" and client.worker is not None:
            _kill(client.worker, message["signal"], group=message["group"])
        elif what == "stop":
            running = self._running()
            self._retire()
            wire.send(client.connection, {"what": "stopping", "running": running, "pid": os.getpid()})

    def _start(self, client: _Client, message: Mapping[str, Any]) -> Work | None:
        """Forks a worker for a request, or refuses. Returns its work in the new process, None here."""
        client.request = None
        try:
            if self._is_stale():
                self._retire()
                self._drop(client)  # the stub will start another server
                return None
            reason = self._refusal(client, message)
            if reason is None:
                return self._fork(client, message)
        except Exception as error:  # noqa: BLE001 - the script can start plainly
            reason = f"the fork server can't fork it: {wire.line(error) or type(error).__name__}"
            print(f"a request failed: {error!r}", flush=True)
        with contextlib.suppress(OSError):
            wire.send(client.connection, {"what": "refused", "reason": reason})
        self._drop(client)
        return None

    def _fork(self, client: _Client, message: Mapping[str, Any]) -> Work | None:
        # Only values that the server keeps are checked: other wrong values harm the worker alone.
        name, idle_s, launcher = str(message["name"]), message["idle_s"], message["launcher"]
        idle_s = None if idle_s is None else float(idle_s)
        launcher = None if launcher is None else int(launcher)
        work = Work(message["target"], message["arguments"], message["is_module"])
        client.page = replacement.new_page() if message["replaces"] else None
        gate, opener = os.pipe2(os.O_CLOEXEC)
        sent, client.inbox.descriptors = client.inbox.descriptors, []
        server = os.getpid()
        try:
            pid = _forked()
        except OSError:
            _close(gate, opener, *sent)
            raise
        if pid == 0:
            page, client.page = client.page, None
            self._become(message, sent, server, gate, opener, page)
            return work
        self._round_is_fine = self._round_is_fine or not self._running()
        client.worker = pid
        _close(gate, *sent)
        try:
            said = [] if self._used else self._said
            wire.send(client.connection, {"what": "accepted", "server": server, "pid": pid, "said": said})
            with contextlib.suppress(BrokenPipeError):  # it was killed; `_reap` will find it
                os.write(opener, b"1")
        finally:
            _close(opener)
        self._name, self._idle_s = name, idle_s
        self._attend(launcher)
        return None

    def _become(
        self,
        message: Mapping[str, Any],
        sent: list[int],
        server: int,
        gate: int,
        opener: int,
        page: mmap.mmap | None,
    ) -> None:
        """In the new process: closes the server's descriptors, and sets the worker up once it may run."""
        try:
            for client in self._clients.values():
                client.close()
            self._listener.close()
            _close(opener, FOLDER, self._wake, self._woken, *self._launchers.values())
            if self._spare is not None:
                _close(self._spare)
            if not os.read(gate, 1):
                os._exit(1)  # the stub doesn't know of this worker, or the server has ended
            _close(gate)
            become(message, sent, server, self._changed, self._torch_seed, page)
        except BaseException as error:  # noqa: BLE001 - no code of the server may run in this process
            with contextlib.suppress(OSError):
                os.write(2, f"ecemb-run: the worker could not be set up: {error!r}\n".encode())
            os._exit(1)

    def _refusal(self, client: _Client, message: Mapping[str, Any]) -> str | None:
        """The reason why a forked process would differ from a plain start; None if it would not."""
        path = preload.shadowed(message["script_folder"], _BEFORE)
        if path is not None:
            return f"{path} has the name of a module that is imported ahead, and would be hidden by it"
        numbers, sent = message["descriptors"], client.inbox.descriptors
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(sent) <= len(numbers) or max(2, *numbers, *sent) + len(numbers) >= most > 0:
            return (
                f"the fork server may have {most} descriptors, which leaves no room for its {len(numbers)}; "
                "raise the limit (`ulimit -n`)"
            )
        used = {int(number) for number in os.listdir("/proc/self/fd")}
        ours = {FOLDER, self._woken, self._spare, *self._own(), *self._clients}
        ours.update(number for client in self._clients.values() for number in client.inbox.descriptors)
        taken = {number for number in numbers if number > 2} & used - ours
        for number in taken:
            with contextlib.suppress(OSError):
                return f"descriptor {number} is taken by {os.readlink(f'/proc/self/fd/{number}')}"
        return None

    def _is_stale(self) -> bool:
        """Whether imported files, or the installed packages, have changed since `preload`."""
        changed = _changed(self._script)
        if changed != self._script_changed:
            self._script_changed = changed
            if self._names != self._wanted():
                return True
        return self._installed != _installed() or any(
            _changed(path) != since for path, since in self._files.items()
        )

    def _retire(self) -> None:
        """From here on no stub finds this server; it ends when its last worker has ended."""
        if self._retired:
            return
        self._retired = True
        # A failure leaves the socket's name without a server, which does no harm.
        with contextlib.suppress(Cold, OSError, ValueError), self._without_spare(), locked(FOLDER, _LEAVE_S):
            inode = os.stat(f"{self._name}.sock", dir_fd=FOLDER, follow_symlinks=False).st_ino
            if inode == self._config["inode"]:  # else the name is another server's by now
                os.unlink(f"{self._name}.sock", dir_fd=FOLDER)
                os.unlink(f"{self._name}.log", dir_fd=FOLDER)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._dying.discard(pid)
            for client in list(self._clients.values()):
                if client.worker == pid:
                    client.worker = None
                    self._note_end(fine=status == 0)
                    self._note_widths(client)
                    page = client.page
                    end, went_on = (0, False) if page is None else replacement.read_page(page)
                    message = {"what": "ended", "status": status, "end": int(end), "progress": went_on}
                    with contextlib.suppress(OSError):
                        wire.send(client.connection, message)
                    self._drop(client)

    def _note_end(self, *, fine: bool) -> None:
        self._round_is_fine = self._round_is_fine and fine
        self._used, self._since = True, time.monotonic()

    def _running(self) -> int:
        return sum(client.worker is not None for client in self._clients.values())

    def _drop(self, client: _Client) -> None:
        """Forgets a connection; its worker, if it runs, is killed with its process group."""
        self._clients.pop(client.connection.fileno(), None)
        self._resting.pop(client.connection.fileno(), None)
        client.close()
        if client.worker is not None:
            if _kill(client.worker, signal.SIGKILL, group=True):
                self._dying.add(client.worker)
            client.worker = None
            self._note_end(fine=False)


def main() -> Work:
    """Runs the server that the last argument describes. Returns in workers alone, with their work."""
    config = json.loads(sys.argv[-1])
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        like = getattr(sys, name)
        raw: Any = _Log(descriptor, f"<{name}>")
        stream = io.TextIOWrapper(raw, encoding=like.encoding, errors=like.errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    processes.show_command(["ecemb-run", "server", config["shown"]])
    server = Server(config)
    server.preload()
    os.chdir("/")
    work = server.serve()
    if work is None:
        os._exit(0)  # exit handlers of imported modules belong to the workers
    return work


def _forked() -> int:
    """Forks. Returns 0 in the new process, where all signals are blocked.

    Raises:
        OSError: there is no memory, or no process, left.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:  # includes the call that blocks signals: it runs handlers, which may raise
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    if pid != 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _most_idle() -> int:
    """Most idle connections to keep, so that descriptors are left for workers."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_IDLE if most <= 0 else min(_MOST_IDLE, most // 4)


def _close(*descriptors: int) -> None:
    """Closes descriptors; ignores errors, since the kernel has closed a descriptor in spite of them."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _kill(worker: int, number: int, *, group: bool) -> bool:
    """Sends a signal to a worker that hasn't been waited for, or to all of its group.

    Returns:
        False if this process may not: the worker has become another user's.
    """
    try:
        if group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker, number)
                return True
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)
    except PermissionError:
        return False
    return True


def _changed(path: str | None) -> int | None:
    try:
        return os.stat(path).st_mtime_ns if path else None
    except OSError:
        return None


def _own_files() -> list[str]:
    """Imported files that a developer may change: neither Python's own nor installed files."""
    skipped = (os.path.dirname(os.__file__) + os.sep, sys.base_prefix + os.sep)
    found: list[str] = []
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and not path.startswith(skipped) and "-packages" + os.sep not in path:
            found.append(path)
    return found


def _installed() -> list[object]:
    """The installed packages, by the names of their metadata."""
    found: list[object] = []
    for folder in sys.path:
        if folder.endswith("-packages"):
            with contextlib.suppress(OSError):
                found.append(
                    sorted(name for name in os.listdir(folder) if name.endswith((".dist-info", ".pth")))
                )
    return found
