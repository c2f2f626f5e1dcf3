"""Fork servers come and go: what is killed, what is left, and what a bad call says."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from support.warm_starts import LIGHT, SLEEPS, Home, alive, eventually, home, line_of, worker_and_server


@pytest.fixture
def here() -> Iterator[Home]:
    with home() as made:
        yield made


def launched(here: Home, command: list[str]) -> subprocess.Popen[str]:
    """Starts a launcher, as torchrun is one, of a command."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, time; subprocess.Popen({command!r}); time.sleep(1000)"],
        cwd=here.folder,
        env={**here.environment, "TORCHELASTIC_RUN_ID": "x"},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_stub_takes_its_worker_along(here: Home) -> None:
    name = here.write("sleeps.py", SLEEPS)
    stub, other = here.start(name), here.start(name)
    worker, server = worker_and_server(stub)
    sibling, same = worker_and_server(other)
    assert server == same
    stub.kill()
    stub.communicate()
    eventually(lambda: not alive(worker))
    assert alive(sibling) and alive(server)
    other.kill()
    other.communicate()
    eventually(lambda: not alive(sibling))


def test_a_killed_worker_ends_its_stub_alike(here: Home) -> None:
    stub = here.start(here.write("sleeps.py", SLEEPS))
    worker, _ = worker_and_server(stub)
    os.kill(worker, signal.SIGKILL)
    stub.communicate()
    assert stub.returncode == -signal.SIGKILL


def test_a_killed_server_takes_its_workers_along_and_is_replaced(here: Home) -> None:
    name = here.write("sleeps.py", SLEEPS)
    stub = here.start(name)
    worker, server = worker_and_server(stub)
    os.kill(server, signal.SIGKILL)
    _, err = stub.communicate()
    assert stub.returncode == 1
    assert err.startswith("ecemb-run: the fork server has ended, and its workers with it;")
    eventually(lambda: not alive(worker))
    again = here.start(name)
    _, other = worker_and_server(again)
    assert other != server
    again.kill()
    again.communicate()


def test_a_stub_dies_with_its_launcher(here: Home) -> None:
    command = here.command(here.write("sleeps.py", SLEEPS))
    launcher = launched(here, command)
    worker, server = worker_and_server(launcher)
    launcher.kill()
    launcher.communicate()
    eventually(lambda: not alive(worker))
    eventually(lambda: set(here.processes()) <= {server})


@pytest.mark.parametrize("leads", [True, False], ids=["of torchrun's", "of a command of torchrun's"])
def test_a_stub_whose_launcher_has_ended_already_runs_nothing(here: Home, leads: bool) -> None:
    """Killed right after it had started the stub: by its first line, the stub has another parent."""
    command = here.command(here.write("prints.py", "print('it ran')"))
    code = (
        "import os, sys, time\n"
        "before = os.getpid()\n"
        "if os.fork(): os._exit(0)\n"
        f"if {leads}: os.setsid()\n"
        "while os.getppid() == before: time.sleep(0.01)\n"
        f"os.execv(sys.executable, {command!r})"
    )
    done = here.run([sys.executable, "-c", code], changed={"TORCHELASTIC_RUN_ID": "x"})
    assert done == (0, "", "") and not here.sockets()


def test_kills_at_random_leave_nothing_behind(here: Home, seed: int) -> None:
    name = here.write("sleeps.py", SLEEPS)
    choice = random.Random(seed)
    for _ in range(8):
        stubs = [here.start(name) for _ in range(3)]
        said = [worker_and_server(stub) for stub in stubs[: choice.randrange(3)]]
        for stub in choice.sample(stubs, choice.randrange(4)):
            stub.kill()
        known = [pid for pair in said for pid in pair] or here.servers()
        for pid in choice.sample(known, choice.randrange(len(known) + 1)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for stub in stubs:
            stub.kill()
            stub.communicate()
        eventually(lambda: set(here.processes()) <= set(here.servers()))
    done = here.warm(here.write("fine.py", "print('fine')"))
    assert done == (0, "fine\n", "")


def test_it_ends_when_its_job_has_and_leaves_no_socket(here: Home) -> None:
    name = here.write("quick.py", "import os; print(os.getppid())")
    server = int(here.warm(name)[1])
    eventually(lambda: not alive(server))
    assert not here.sockets()
    failing = here.write("failing.py", "import os, sys; print(os.getppid()); sys.exit(1)")
    server = int(here.warm(failing, options=(*LIGHT, "--idle", "0"))[1])
    eventually(lambda: not alive(server))
    assert int(here.warm(failing)[1]) == int(here.warm(failing)[1])


def test_a_server_whose_launcher_has_ended_does_not_wait_for_long(here: Home) -> None:
    """Not for its idle time, which is longer than this test waits."""
    idle = ("--idle", "300")
    command = here.command(here.write("sleeps.py", SLEEPS), options=(*LIGHT, *idle))
    launcher = launched(here, command)
    _, server = worker_and_server(launcher)
    launcher.kill()
    launcher.communicate()
    eventually(lambda: not alive(server), deadline_s=280)
    assert not here.sockets()


def test_old_logs_of_killed_servers_are_removed(here: Home) -> None:
    quick = here.write("quick.py", "")
    assert here.warm(quick, options=(*LIGHT, "--idle", "300"))[0] == 0
    [place] = here.arena_dir.glob("*/.warm")
    for name in ("old", "young"):
        (place / f"{name}.log").write_text("Killed")
    os.utime(place / "old.log", (1, 1))
    assert here.warm(here.write("failing.py", "1 / 0"))[0] == 1
    assert (place / "young.log").exists() and not (place / "old.log").exists()


def test_a_server_that_waits_is_taken_over(here: Home) -> None:
    text = "import os, sys, time; print(os.getppid(), flush=True); time.sleep(float(sys.argv[1]))"
    name = here.write("standby.py", text)
    here.environment["OMP_NUM_THREADS"] = "1"
    for text in ("waits for standby.py", "already waits"):
        code, out, _ = here.run(here.command(name, options=(*LIGHT, "--standby")))
        assert code == 0 and text in out
    eventually(here.servers)  # it names itself once its interpreter runs
    [server] = here.servers()
    jobs = [{"TORCHELASTIC_RUN_ID": "a job", "RANK": number, "LOCAL_RANK": number} for number in "01"]
    stays = here.start(name, "1000", changed=jobs[0])  # a server without a process may end
    assert line_of(stays) == str(server)
    assert here.run(here.command(name, "0"), changed=jobs[1]) == (0, f"{server}\n", "")
    assert {path.stem for path in here.sockets()} == {path.stem for path in here.arena_dir.rglob("*.log")}
    assert here.run(here.command(name, "0"), changed={"TORCHELASTIC_RUN_ID": "another"})[1] != f"{server}\n"
    stays.kill()
    stays.communicate()


def test_stop(here: Home) -> None:
    name = here.write("sleeps.py", SLEEPS)
    stop = here.command("--stop", options=())
    assert here.run(stop) == (1, "", "ecemb-run: no fork server of this user runs here\n")
    stub = here.start(name)
    worker, server = worker_and_server(stub)
    said = f"ecemb-run: fork server {server} ends, once its 1 running process has ended\n"
    assert here.run(stop) == (0, said, "")
    assert alive(worker) and not here.sockets()
    stub.kill()
    stub.communicate()
    eventually(lambda: not here.processes())


def test_changed_files_are_noticed(here: Home) -> None:
    here.write("beside/mine.py", "VALUE = 1")
    text = "import mine, os, sys, time; print(mine.VALUE, os.getppid(), flush=True)"
    text += "; time.sleep(float(sys.argv[1]))"
    name = here.write("uses.py", text)
    here.environment["PYTHONPATH"] = str(here.folder / "beside")
    options = (*LIGHT, "--preload", "mine")
    stays = here.start(name, "1000", options=options)  # a server without a process may end
    first = line_of(stays).split()
    assert here.warm(name, "0", options=options)[1].split() == first
    here.write("beside/mine.py", "VALUE = 2 + 0")
    value, server = here.warm(name, "0", options=options)[1].split()
    assert value == "2" and server != first[1]
    stays.kill()
    stays.communicate()


BAD = {
    "no such script": (["nothing.py"], "can't open file"),
    "no script": ([], "there is no script to run"),
    "no module": (["-m"], "option -m needs the name of a module"),
    "no such option": (["--warm", "x.py"], "option '--warm' is not known"),
    "no value": (["--idle"], "option --idle needs a value"),
    "no number": (["--idle", "soon", "x.py"], "--idle takes a number of seconds, 0 or more; it is 'soon'"),
    "no name": (["--preload", "a-b", "x.py"], "--preload takes the name of a module; it is 'a-b'"),
    "no folder": (["--stop", "--arena-dir", "/no/where"], "arena_dir /no/where is not an existing folder"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_use_is_one_line(here: Home, what: str) -> None:
    here.write("x.py", "print('fine')")
    words, text = BAD[what]
    code, out, err = here.run(here.command(*words))
    assert (code, out) == (2, "")
    assert err.startswith(f"ecemb-run: {text}") and err.count("\n") == 1


def test_a_long_folder_is_no_matter(here: Home) -> None:
    name = here.write("fine.py", "print('fine')")
    deep = here.arena_dir / "/".join(["d" * 60] * 4)
    deep.mkdir(parents=True)
    assert here.warm(name, options=(*LIGHT, "--arena-dir", str(deep))) == (0, "fine\n", "")
    [socket_path] = deep.glob("*/.warm/*.sock")
    assert len(str(socket_path)) > 200
    assert socket_path.stat().st_mode & 0o777 == 0o600
    assert socket_path.parent.stat().st_mode & 0o777 == 0o700


def test_cold_starts_say_why(here: Home) -> None:
    name = here.write("fine.py", "import os; print(os.getpid())")
    asked = here.start(name, options=("--cold",))
    assert asked.communicate() == (f"{asked.pid}\n", "")
    watched = here.start(name, changed={"COVERAGE_PROCESS_START": "x"})
    out, err = watched.communicate()
    assert out == f"{watched.pid}\n"
    assert "ecemb-run: fine.py starts cold: COVERAGE_PROCESS_START is set" in err
    shadow = here.write("shadow/json.py", "raise SystemExit('mine')")
    inside = here.write("shadow/fine.py", "import json")
    assert shadow
    code, _, err = here.warm(inside)
    assert code == 1 and err.endswith("mine\n") and "starts cold: " in err and "json.py" in err
    traced = (
        "import sys; from ecemb.launch import stub; sys.settrace(lambda *_: None); stub.main(['fine.py'])"
    )
    code, out, err = here.run([sys.executable, "-c", traced])
    assert code == 0 and out.strip().isdigit() and "a debugger" in err


def test_the_stub_imports_neither_torch_nor_numpy(here: Home) -> None:
    heavy = "{'torch', 'numpy', 'argparse', 'asyncio'}"
    for code in ("from ecemb.launch import stub", "import ecemb", "import ecemb.memory.scan"):
        tell = f"{code}; import sys; print(sorted({heavy} & {{*sys.modules}}))"
        assert here.plain("-c", tell) == (0, "[]\n", "")
    for words in (["--version"], ["arenas", "ls"]):
        code, _, err = here.plain("-X", "importtime", "-m", "ecemb", *words)
        assert code in (0, 1) and " torch\n" not in err and " ecemb.errors\n" in err
