"""Where no worker is available, the script starts plainly, once, and one line says why."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Iterator

import pytest

from support.warm_starts import LIGHT, Home, home

FAULTS = """
import fcntl, os, socket
from ecemb.launch import stub

fired = os.environ["FIRED"]
left, number = int(os.environ["CALL"]), int(os.environ["ERROR"])

def failing(call):
    def wrapped(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.mknod(fired)
            raise OSError(number, os.strerror(number))
        return call(*arguments, **options)
    return wrapped

class Socket(socket.socket):
    pass

for name in ("bind", "connect", "listen", "getsockopt", "sendall", "setblocking", "settimeout"):
    setattr(Socket, name, failing(getattr(socket.socket, name)))
socket.socket = Socket
for module, names in {
    fcntl: ["fcntl", "flock"],
    os: "chmod fstat getcwd listdir lstat mkdir open posix_spawn readlink stat unlink".split(),
    socket: ["recv_fds", "send_fds", "socket"],
}.items():
    for name in names:
        setattr(module, name, failing(getattr(module, name)))
stub.main()
"""
"""`ecemb-run`, in which one call of the kernel fails: the first, the second, ..."""


@pytest.fixture
def here() -> Iterator[Home]:
    with home() as made:
        yield made


def check_cold(done: tuple[int, str, str], reason: str) -> None:
    code, out, err = done
    assert (code, out) == (0, "fine\n"), done
    assert err.startswith("ecemb-run: ") and "fine.py starts cold: " in err and reason in err, err
    assert err.count("\n") == 1, err


@pytest.mark.parametrize("number", [errno.EMFILE, pytest.param(errno.ENOSPC, marks=pytest.mark.long)])
def test_whichever_call_fails_the_script_runs_once(here: Home, number: int) -> None:
    """A call may also fail after the worker has begun: then no second process runs the script."""
    name, fired = here.write("fine.py", "print('fine')"), here.folder / "fired"
    faults, cold = here.write("faults.py", FAULTS), 0
    for count in itertools.count(1):
        arena_dir = here.arena_dir / f"{number}-{count}"
        arena_dir.mkdir()
        options = [*LIGHT, "--arena-dir", str(arena_dir), "--idle", "0"]
        changed = {"CALL": f"{count}", "ERROR": f"{number}", "FIRED": str(fired)}
        code, out, err = here.run([sys.executable, faults, *options, name], changed=changed)
        assert (code, out) == (0, "fine\n"), (count, code, out, err)
        if err:
            cold += 1
            check_cold((code, out, err), "")
        if not fired.exists():
            break
        fired.unlink()
    assert cold > 10 and not err


def test_no_folder(here: Home) -> None:
    name = here.write("fine.py", "print('fine')")
    done = here.warm(name, options=(*LIGHT, "--arena-dir", "/no/where"))
    check_cold(done, "arena_dir /no/where is not an existing folder; create it, or pass another")


def test_an_insecure_folder(here: Home) -> None:
    name = here.write("fine.py", "print('fine')")
    here.arena_dir.chmod(0o777)
    check_cold(
        here.warm(name), f"arena_dir {here.arena_dir} has mode 0777, so that others can replace what is in it"
    )
    assert not list(here.arena_dir.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else(here: Home) -> None:
    name = here.write("fine.py", "print('fine')")
    theirs = here.arena_dir / f"ecemb-{os.geteuid()}"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    check_cold(here.warm(name), f"{theirs} belongs to user 12345")
    assert not list(theirs.iterdir())


@pytest.mark.parametrize("most", [8, 10, 12, 14, 16, 20])
def test_few_descriptors(here: Home, most: int) -> None:
    """With some of these numbers a server can be started, with some it can't."""
    name = here.write("fine.py", "print('fine')")
    limit = f"import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))"
    command = here.command(name, options=(*LIGHT, "--idle", "0"))
    done = here.run([sys.executable, "-c", f"{limit}; os.execv({command[0]!r}, {command!r})"])
    if done != (0, "fine\n", ""):
        check_cold(done, "")


@pytest.mark.parametrize("options", [("--arena-dir", "/no/where"), ("--preload", "nothing_of_this_name")])
@pytest.mark.parametrize("stderr", ["> /dev/full", ">&-"])
def test_a_line_that_nobody_can_read_is_no_matter(here: Home, options: tuple[str, str], stderr: str) -> None:
    command = here.command(here.write("fine.py", "print('fine')"), options=(*LIGHT, *options))
    assert here.run(["sh", "-c", f'exec "$@" 2{stderr}', "sh", *command]) == (0, "fine\n", "")


def test_a_folder_that_was_removed(here: Home) -> None:
    name = here.write("fine.py", "print('fine')")
    command = here.command(str(here.folder / name))
    leave = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    check_cold(here.run(["sh", "-c", leave, "sh", *command]), "No such file or directory")
