"""A running worker is lost by nothing that a client, the log, the kernel or a batch system does."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecemb.launch import wire
from support.warm_starts import LIGHT, SLEEPS, Home, alive, eventually, home, worker_and_server

FAULTS = """
import os, socket, time
HERE = os.path.dirname(__file__)
def failing(name, call):
    def wrapped(*arguments, **options):
        for path in (os.path.join(HERE, name), os.path.join(HERE, name + "-once")):
            if os.path.exists(path):
                number = int(open(path).read())
                with open(os.path.join(HERE, name + ".calls"), "a") as file:
                    file.write(f"{time.monotonic()}\\n")
                if path.endswith("-once"):
                    os.unlink(path)
                raise OSError(number, os.strerror(number))
        return call(*arguments, **options)
    return wrapped
socket.socket.accept = failing("accept", socket.socket.accept)
socket.recv_fds = failing("read", socket.recv_fds)
os.fork = failing("fork", os.fork)
"""
"""Imported ahead by the server: its calls of the kernel fail while a file with an error's number is there."""

WAITS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
print(os.getpid(), os.getppid(), flush=True)
signal.sigwait([signal.SIGUSR2])
print("heard")
"""
OPTIONS = (*LIGHT, "--preload", "faults")


class Faults:
    """The calls of the server that fail."""

    def __init__(self, here: Home) -> None:
        here.write("beside/faults.py", FAULTS)
        self._folder = here.folder / "beside"
        here.environment["PYTHONPATH"] = os.pathsep.join(
            [str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        )

    def begin(self, call: str, number: int) -> None:
        new = self._folder / "new"
        new.write_text(str(number))
        new.rename(self._folder / call)

    def end(self, call: str) -> None:
        (self._folder / call).unlink()

    def calls(self, call: str) -> list[float]:
        """The moments, in seconds, of the calls that have failed."""
        with contextlib.suppress(FileNotFoundError):
            return [float(line) for line in (self._folder / f"{call}.calls").read_text().split("\n")[:-1]]
        return []


@pytest.fixture
def here() -> Iterator[Home]:
    with home() as made:
        yield made


@pytest.fixture
def faults(here: Home) -> Faults:
    return Faults(here)


def limited(name: str, most: int, command: list[str]) -> list[str]:
    """A command with a lower limit, which the server inherits."""
    code = f"import os, resource, sys; resource.setrlimit(resource.{name}, ({most}, {most}))"
    return [sys.executable, "-c", f"{code}; os.execv(sys.executable, {command!r})"]


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(path))
    return connection


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM], ids=os.strerror)
def test_a_connection_that_cant_be_accepted(here: Home, faults: Faults, number: int) -> None:
    name = here.write("sleeps.py", SLEEPS)
    stub = here.start(name, options=OPTIONS)
    worker, server = worker_and_server(stub)
    faults.begin("accept", number)
    other = here.start(name, options=OPTIONS)
    eventually(lambda: len(faults.calls("accept")) > 4 or not alive(worker))
    assert alive(worker) and stub.poll() is None
    moments = faults.calls("accept")
    # The spare descriptor makes a second attempt at once.
    assert all(third - first > 0.9 for first, third in zip(moments, moments[2:], strict=False)), moments
    faults.end("accept")
    assert worker_and_server(other)[1] == server


def test_a_server_without_a_descriptor_turns_the_newest_away(here: Home, faults: Faults) -> None:
    name = here.write("sleeps.py", SLEEPS)
    stub = here.start(name, options=OPTIONS)
    worker, server = worker_and_server(stub)
    faults.begin("accept-once", errno.EMFILE)
    other = here.start(name, options=OPTIONS)
    assert worker_and_server(other)[0] == other.pid
    other.kill()
    reason = "sleeps.py starts cold: the fork server can't accept its connection: Too many open files"
    assert other.communicate()[1] == f"ecemb-run: {reason}\n"
    assert alive(worker) and worker_and_server(here.start(name, options=OPTIONS))[1] == server


def test_connections_that_ask_for_nothing_take_no_place(here: Home) -> None:
    name = here.write("sleeps.py", SLEEPS)
    command = limited("RLIMIT_NOFILE", 64, here.command(name))
    stub = here.spawn(command)
    worker, server = worker_and_server(stub)
    [path] = here.sockets()
    with contextlib.ExitStack() as open_ones:
        for _ in range(100):
            open_ones.enter_context(connected(path))
        other = here.spawn(command)
        assert worker_and_server(other)[1] == server
    assert alive(worker) and stub.poll() is None


def test_a_process_that_cant_be_forked_starts_cold(here: Home, faults: Faults) -> None:
    name = here.write("sleeps.py", SLEEPS)
    stub = here.start(name, options=OPTIONS)
    worker, server = worker_and_server(stub)
    faults.begin("fork", errno.EAGAIN)
    other = here.start(name, options=OPTIONS)
    assert worker_and_server(other)[0] == other.pid
    other.kill()
    reason = "the fork server can't fork it: [Errno 11] Resource temporarily unavailable"
    assert other.communicate()[1] == f"ecemb-run: sleeps.py starts cold: {reason}\n"
    faults.end("fork")
    again = here.start(name, options=OPTIONS)
    assert worker_and_server(again)[1] == server
    os.kill(worker, signal.SIGKILL)  # the server still notices it
    stub.communicate()
    assert stub.returncode == -signal.SIGKILL


def test_a_connection_that_cant_be_read_for_a_while(here: Home, faults: Faults) -> None:
    """The signal arrives later, and the worker isn't taken for one whose stub has ended."""
    stub = here.start(here.write("waits.py", WAITS), options=OPTIONS)
    worker, _ = worker_and_server(stub)
    faults.begin("read", errno.ENOMEM)
    stub.send_signal(signal.SIGUSR2)
    eventually(lambda: len(faults.calls("read")) > 1 or not alive(worker))
    assert alive(worker)
    faults.end("read")
    assert stub.communicate() == ("heard\n", "") and stub.returncode == 0


def test_a_log_without_room(here: Home) -> None:
    """Here because of a limit on files' sizes; a full disk gives the same errors."""
    name = here.write("sleeps.py", SLEEPS)
    options = (*LIGHT, "--preload", "nothing_of_this_name")
    stub = here.spawn(limited("RLIMIT_FSIZE", 0, here.command(name, options=options)))
    worker, server = worker_and_server(stub)
    assert worker != stub.pid
    [path] = here.sockets()
    for _ in range(3):
        with connected(path) as stranger:
            stranger.sendall(b"\0\0\0\2no")
            assert stranger.recv(1) == b""
    again = here.spawn(limited("RLIMIT_FSIZE", 0, here.command(name, options=options)))
    assert worker_and_server(again)[1] == server and alive(worker)


REQUEST = {
    "what": "run", "name": "x", "idle_s": 1, "launcher": None, "is_module": False, "target": "x",
    "arguments": [], "script_folder": None, "command_line": [], "environment": {}, "unbuffered": False,
    "umask": 0, "processors": [], "ignored": [], "blocked": [], "descriptors": [],
}  # fmt: skip
STRANGE: dict[str, bytes | dict[str, object]] = {
    "nothing": b"",
    "no JSON": b"\0\0\0\2no",
    "no object": b"\0\0\0\2[]",
    "no keys": b'\0\0\0\x0e{"what":"run"}',
    "too long": b"\xff" * 4,
    "too deep": b"\0\1\0\0" + b"[" * (1 << 16),
    "no descriptors": REQUEST,
    "no idle time": {**REQUEST, "idle_s": "soon"},
    "no launcher": {**REQUEST, "launcher": [1]},
    "no numbers": {**REQUEST, "descriptors": ["x"]},
    "large numbers": {**REQUEST, "descriptors": [1 << 70]},
}


@pytest.mark.parametrize("what", STRANGE)
def test_strange_messages_do_no_harm(here: Home, what: str) -> None:
    stub = here.start(here.write("sleeps.py", SLEEPS))
    worker, server = worker_and_server(stub)
    [path] = here.sockets()
    message = STRANGE[what]
    with connected(path) as stranger:
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the server may hang up at any moment
            if isinstance(message, bytes):
                stranger.sendall(message)
                stranger.shutdown(socket.SHUT_WR)
            else:
                folder = os.open("/", os.O_PATH)
                try:
                    wire.send(stranger, message, [folder] if what != "no descriptors" else [])
                finally:
                    os.close(folder)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    assert worker_and_server(here.start("sleeps.py"))[1] == server
    assert alive(worker) and stub.poll() is None


def test_any_idle_time_can_be_waited_for(here: Home) -> None:
    name = here.write("failing.py", "import os, sys; print(os.getppid()); sys.exit(1)")
    options = (*LIGHT, "--idle", "1e300")
    code, server, _ = here.warm(name, options=options)
    assert code == 1 and here.warm(name, options=options)[1] == server


def test_signals_to_all_processes_leave_it_until_its_workers_have_ended(here: Home) -> None:
    """Batch systems send a warning, or the end, to every process of a job, and give the script time."""
    name = here.write("sleeps.py", SLEEPS)
    stub, other = here.start(name), here.start(name)
    worker, server = worker_and_server(stub)
    assert worker_and_server(other)[1] == server
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU, signal.SIGRTMIN):
        os.kill(server, number)
    third = here.start(name)
    assert worker_and_server(third)[1] == server
    third.kill()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        os.kill(server, number)
    eventually(lambda: not here.sockets())
    assert alive(worker) and stub.poll() is None
    os.kill(worker, signal.SIGUSR1)  # the default action, not the server's
    stub.communicate()
    assert stub.returncode == -signal.SIGUSR1 and alive(server)
    other.kill()
    other.communicate()
    eventually(lambda: not alive(server))


def test_a_signal_ends_a_server_without_a_worker(here: Home) -> None:
    name = here.write("failing.py", "import os, sys; print(os.getppid()); sys.exit(1)")
    server = int(here.warm(name, options=(*LIGHT, "--idle", "1000"))[1])
    with connected(here.sockets()[0]):
        os.kill(server, signal.SIGTERM)
        eventually(lambda: not alive(server))
    assert not here.sockets()


DIES = """
import os, signal
from ecemb.kernels.contract import get_kernels
from ecemb.net import replacement
before = replacement.predecessors
print(before, get_kernels("cpu").has_loops((48, 8)), flush=True)
replacement.join()
replacement.made_progress()
if before == 0:
    replacement.write_widths([(48, 8)])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_successor_has_the_loops_that_its_predecessor_compiled(here: Home) -> None:
    stub = here.start(here.write("dies.py", DIES), options=())
    out, err = stub.communicate()
    assert (out, err, stub.returncode) == ("0 False\n1 True\n", "", 0)
