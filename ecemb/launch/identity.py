"""Which fork server may stand in for a plain start of the interpreter.

A forked worker sees what was read when the interpreter, the C library and each imported library were loaded:
that has to be what it would have read itself. No list could tell which library reads which variable. So all
that a process is started with is compared, and a difference leads to another server; left out is only what
differs between the workers of one launch, which an import must not read (`preload` sees to that), and what a
terminal or a shell leaves behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys

_WORKER = """
RANK LOCAL_RANK GROUP_RANK ROLE_RANK NODE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE
ROLE_NAME MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES TORCH_NCCL_ASYNC_ERROR_HANDLING
"""
_SHELL = """
_ PWD OLDPWD SHLVL COLUMNS LINES TERM TERM_PROGRAM TERM_PROGRAM_VERSION TERM_SESSION_ID COLORTERM WINDOWID
SSH_CLIENT SSH_CONNECTION SSH_TTY SSH_AUTH_SOCK XDG_SESSION_ID TMUX TMUX_PANE STY INVOCATION_ID JOURNAL_STREAM
"""
_OF_A_WORKER = frozenset(_WORKER.split())
_OF_A_SHELL = frozenset(_SHELL.split())
_LIMITS = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_RIGHTS = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp")

STANDBY = "standby"
"""In place of a job, of a server that was started before there was one."""


def is_of_a_worker(name: str) -> bool:
    """Whether an environment variable of that name may differ between the workers of one launch."""
    return name in _OF_A_WORKER or name.startswith("TORCHELASTIC_")


def server_name(what: object, job: str | None) -> str:
    """The name of the server that may start a worker in place of this process, of 33 or 24 letters.

    Args:
        what: else tells servers apart: what they preload; of JSON's types.
        job: the launch's own name of it; None for a server that waits for one.
    """
    return f"{_digest([_process(), what])}-{STANDBY if job is None else _digest(job)}"


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _process() -> list[object]:
    """All that a new process would begin with, but what a request brings along."""
    status = [line for line in _read("/proc/self/status").splitlines() if line.startswith(_RIGHTS)]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_SHELL and not is_of_a_worker(name)
    }
    return [
        [sys.executable, sys.prefix, sys.base_prefix, sys.version, os.path.dirname(__file__)],
        [list(sys.flags), sys.warnoptions],
        sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)],  # the interpreter's options
        sorted(environment.items()),
        # Where PYTHONPATH begins if it is relative, and what an import may have asked for.
        _folder(),
        status,
        [[name, *resource.getrlimit(getattr(resource, name))] for name in _LIMITS],
        os.getpriority(os.PRIO_PROCESS, 0),
        _read("/proc/self/oom_score_adj"),
        # Workers are charged to the server's control group, and killed with it: it has to be their own.
        _read("/proc/self/cgroup"),
        [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES if _is_there(name)],
        # Libraries count processors when they are loaded, if they aren't told how many threads to start.
        None if "OMP_NUM_THREADS" in os.environ else sorted(os.sched_getaffinity(0)),
    ]


def _is_there(namespace: str) -> bool:
    return os.path.lexists(f"/proc/self/ns/{namespace}")


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
