"""torchrun's agents, forked from a process that has imported torch and what their workers need.

An agent started as a command imports torch for a second and a half, and its fork server the modules of its
workers once more. Here one process a module list, the zygote, imports them once for all agents of this test
process; each agent is a fork of it, and its fork server is a fork of the agent. Agents, workers, restarts and
signals are otherwise those of `support.forked_torchrun`, which runs in the agent.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from support.fork_server import fork_server
from support.forked_torchrun import end_with_parent, launch

ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.01


class Agent:
    """A running agent, used like a `subprocess.Popen`. It leads a session, with its forked workers."""

    def __init__(self, zygote: _Zygote, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._zygote.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired("torchrun's agent", timeout)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(
                self.pid, number
            )  # the zygote waits for it in `poll` alone, so the number is still its own

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def start(
    modules: str,
    arguments: Sequence[str],
    log: Path,
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    errors: Path | None = None,
) -> Agent:
    """Starts an agent.

    Args:
        modules: the module that imports what workers need.
        arguments: torchrun's options, the script, and the script's arguments.
        log: gets the output, at its end.
        variables: of the environment, besides this process's and those by which it finds the tests.
        cwd: folder that it runs in.
        errors: gets what is written to stderr, instead of `log`.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(variables or {})}
    zygote = _zygote(modules)
    files = [str(log), str(errors or log)]
    pid = zygote.ask("start", list(arguments), environment, files, str(cwd or Path.cwd()))
    return Agent(zygote, pid)


class _Zygote:
    """The process that agents are forked from; it ends with this one, and its agents don't."""

    def __init__(self, modules: str) -> None:
        self._here, there = fork_server().Pipe()
        self._lock = threading.Lock()
        fork_server().Process(target=_serve, args=(there, modules)).start()
        there.close()
        atexit.register(self._here.close)  # before multiprocessing waits for the zygote's end

    def ask(self, *request: Any) -> Any:
        with self._lock:
            self._here.send(request)
            return self._here.recv()


@functools.cache
def _zygote(modules: str) -> _Zygote:
    return _Zygote(modules)


def _serve(requests: Connection, modules: str) -> None:
    warnings.simplefilter("ignore")
    importlib.import_module(modules)
    torch.set_num_threads(1)  # as OMP_NUM_THREADS would, if torch were imported later
    while True:
        try:
            what, *words = requests.recv()
        except EOFError:
            return
        if what == "start":
            arguments, environment, files, cwd = words
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            streams = [os.open(file, flags, 0o600) for file in files]  # there when `start` returns
            pid = os.fork()
            if pid == 0:
                requests.close()
                _become_agent(arguments, environment, streams, cwd)
            for stream in streams:
                os.close(stream)
            requests.send(pid)
        else:
            pid, status = os.waitpid(words[0], os.WNOHANG)
            requests.send(os.waitstatus_to_exitcode(status) if pid else None)


def _become_agent(
    arguments: list[str], environment: dict[str, str], streams: list[int], cwd: str
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        _fork_own_server()
        launch(arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as at the end of any process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_own_server() -> None:
    """Gives this process the fork server that it would otherwise start as a command."""
    address = connection.arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, keeps = os.pipe()
        agent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(keeps)
            end_with_parent(agent)
            forkserver.main(listener.fileno(), alive, [])
            os._exit(0)
        os.close(alive)
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, keeps, pid
