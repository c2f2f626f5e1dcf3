"""What a script sees, prints and ends with is the same started warm and started by python."""

# ruff: noqa: E501
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator

import pytest

from support.warm_starts import LIGHT, Home, eventually, home, line_of


@pytest.fixture(scope="module")
def here() -> Iterator[Home]:
    with home() as made:
        yield made


FACTS = """
import faulthandler, gc, json, locale, os, resource, signal, sys, threading, warnings
def stream(of):
    names = ("encoding", "errors", "line_buffering", "write_through", "mode", "name", "newlines")
    known = [str(getattr(of, name)) for name in names]
    return [*known, of.fileno(), of.isatty(), of.seekable(), type(of).__name__]
with open("/proc/self/cmdline") as file:
    command = file.read().rstrip(chr(0))
facts = dict(
    argv=sys.argv, orig_argv=sys.orig_argv, path=sys.path, executable=sys.executable, flags=list(sys.flags),
    options=str(sys._xoptions), warn=sys.warnoptions, filters=[str(one) for one in warnings.filters],
    recursion=sys.getrecursionlimit(), excepthook=str(sys.excepthook), file=__file__, name=__name__,
    spec=str(__spec__), package=__package__, loader=type(__loader__).__name__, builtins=str(__builtins__),
    names=sorted(globals()), annotations=__annotations__, main=sys.modules["__main__"].__dict__ is globals(),
    cwd=os.getcwd(), environment=dict(os.environ), umask=os.umask(0o22), nice=os.nice(0),
    processors=sorted(os.sched_getaffinity(0)), limits=[resource.getrlimit(n) for n in range(16)],
    handlers=[str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
    blocked=sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    descriptors=[fd for fd in range(50) if os.path.exists(f"/proc/self/fd/{fd}")],
    streams=[stream(one) for one in (sys.stdin, sys.stdout, sys.stderr)],
    same=[sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    locale=locale.setlocale(locale.LC_ALL), faults=faulthandler.is_enabled(), gc=gc.isenabled(),
    threads=[threading.active_count(), threading.current_thread() is threading.main_thread()],
    tasks=len(os.listdir("/proc/self/task")), leader=[os.getpid() == os.getsid(0), os.getpid() == os.getpgrp()],
    hash=hash("a"), wakeup=signal.set_wakeup_fd(-1), command=command,
    tracing=sys.gettrace(), frames=sys._getframe().f_code.co_filename,
)
json.dump(facts, sys.stdout, sort_keys=True)
"""


@pytest.mark.parametrize(
    "flags", [(), ("-u", "-X", "dev", "-W", "error"), ("-s", "-E", "-X", "utf8")], ids=str
)
def test_what_it_sees(here: Home, flags: tuple[str, ...]) -> None:
    name = here.write("folder/facts.py", FACTS)
    here.environment["PYTHONHASHSEED"] = "7"
    try:
        before = os.umask(0o27)
        shown: list[dict[str, object]] = []
        for command in (
            [sys.executable, *flags, name, "a", "--b c", "ü"],
            here.command(name, "a", "--b c", "ü", flags=flags),
        ):
            code, out, err = here.run(command)
            assert (code, err) == (0, "")
            shown.append(json.loads(out))
    finally:
        os.umask(before)
        del here.environment["PYTHONHASHSEED"]
    if "-E" in flags:  # each start has a seed of its own
        shown[0].pop("hash"), shown[1].pop("hash")
    assert shown[1] == shown[0]


def test_it_runs_on_the_processors_that_its_launcher_binds_it_to(here: Home) -> None:
    """As `numactl --physcpubind`, which is what torchrun --numa-binding puts before the command."""
    name = here.write("bound.py", "import os; print(sorted(os.sched_getaffinity(0)), os.getppid())")
    bind = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"
    alike = {"OMP_NUM_THREADS": "1"}  # as by torchrun: one server for all workers, however bound
    servers = set[str]()
    for processor in sorted(os.sched_getaffinity(0))[:2]:
        command = [sys.executable, "-c", bind, str(processor), *here.command(name)]
        code, out, _ = here.run(command, changed=alike)
        assert (code, out.split("] ")[0]) == (0, f"[{processor}")
        servers.add(out.split("] ")[1])
    assert len(servers) == 1


SCRIPTS = {
    "prints": "import sys; print('out'); print('err', file=sys.stderr); sys.stdout.write('no newline')",
    "reads": "import sys; print([line for line in sys.stdin])",
    "reads no text": "import sys; print(sys.stdin.buffer.read())",
    "much": "print('x' * 5_000_000)",
    "exits": "import sys; sys.exit(3)",
    "exits by a text": "import sys; sys.exit('a text')",
    "exits by none": "import sys; sys.exit()",
    "exits at once": "import os, sys; print('lost', end=''); os._exit(7)",
    "raises": "def f():\n    raise ValueError('x')\ntry:\n    f()\nexcept ValueError as error:\n    raise KeyError('y') from error",
    "raises an exit of its own": "class E(SystemExit): pass\nraise E(9)",
    "group": "raise ExceptionGroup('g', [ValueError(1)])",
    "wrong": "x = 1\nif x\n    pass\n",
    "null": "x = '\\0'",
    "interrupted": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
    "killed": "import os, signal\nprint('lost', end='')\nos.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "import faulthandler, os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "hook": "import sys\nsys.excepthook = lambda *what: print('hook', what[0], what[2].tb_lineno)\n1 / 0",
    "broken hook": "import sys\ndef hook(*what):\n    raise OSError('h')\nsys.excepthook = hook\n1 / 0",
    "last": "import atexit, sys\natexit.register(lambda: print(type(sys.last_value).__name__))\n1 / 0",
    "at the end": "import atexit\natexit.register(print, 1)\natexit.register(print, 2)\nprint(3)",
    "a thread goes on": "import threading\nthreading.Thread(target=lambda: (threading.main_thread().join(), print('late'))).start()\nprint('main')",
    "a thread raises": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='t').start()",
    "warns": "import warnings\nwarnings.warn('w', stacklevel=1)\nimport os; os.popen",
    "closes": "import sys\nsys.stdout.close()",
    "pickles": "import pickle\nclass C:\n    pass\nprint(type(pickle.loads(pickle.dumps(C()))) is C, C.__module__)",
    "spawns": """
import multiprocessing, os, sys
class C:
    def __init__(self, x): self.x = x
def f(c, q): q.put((type(c).__name__, c.x, __name__, os.path.basename(__file__), os.getcwd(), sys.argv))
if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        q = context.SimpleQueue()
        p = context.Process(target=f, args=(C(4), q)); p.start(); print(q.get()); p.join(); print(p.exitcode)
""",
    "subprocess": "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True))",
    "inspects": "import inspect\ndef f(): pass\nprint(inspect.getsource(f), inspect.getmodule(f).__name__)",
    "imports beside": "import beside_it\nprint(beside_it.__file__)",
    "recursion": "def f(n): return n and f(n - 1)\nprint(f(900))",
    "seeds": "import random\nrandom.seed(4); print(random.random())",
    "faults": "import faulthandler, os, signal\nfaulthandler.register(signal.SIGUSR1)\nos.kill(os.getpid(), signal.SIGUSR1)",
}  # fmt: skip


@pytest.mark.parametrize("what", [one for one in SCRIPTS if one != "group" or sys.version_info >= (3, 11)])
def test_what_it_does(here: Home, what: str) -> None:
    here.write("beside_it.py", "")
    name = here.write(f"it_{what.replace(' ', '_')}.py", SCRIPTS[what])
    given = "one\ntwo ü\n"
    plain, warm = here.plain(name, stdin=given), here.warm(name, stdin=given)
    if what == "faults":  # it shows a thread's number, and all frames below
        assert 'faults.py", line 3 in <module>' in warm[2]
        return
    assert warm == plain


MODULES = {
    "module": ("mod.py", "-m", "mod", "x"),
    "package": ("pack/__main__.py", "-m", "pack"),
    "in a package": ("pack/inner.py", "-m", "pack.inner"),
    "a folder": ("direct/__main__.py", "direct", "x"),
    "not there": ("other.py", "-m", "no_such_module"),
    "not in a package": ("pack/__init__.py", "-m", "pack.nothing"),
}


@pytest.mark.parametrize("what", MODULES)
def test_what_else_can_be_run(here: Home, what: str) -> None:
    path, *words = MODULES[what]
    text = "import sys; print(sys.argv, sys.path, __name__, __package__, __spec__ and __spec__.name, __file__)\n1 / 0"
    here.write(path, text)
    plain, warm = here.plain(*words), here.warm(*words)
    assert warm == plain
    assert plain[0] == 1


def test_archives_and_compiled_files(here: Home) -> None:
    text = "import sys; print(sys.argv, sys.path, __name__, __file__)"
    here.write("compiled.py", text)
    with zipfile.ZipFile(here.folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", text)
    here.plain("-c", "import py_compile; py_compile.compile('compiled.py', 'compiled.pyc')")
    for name in ("archive.zip", "compiled.pyc"):
        plain = here.plain(name)
        assert plain[0] == 0
        assert here.warm(name) == plain


def test_descriptors_that_it_inherits(here: Home) -> None:
    name = here.write(
        "third.py", "import os; os.write(7, b'seven'); print(os.path.exists('/proc/self/fd/0'))"
    )
    for command in ([sys.executable, name], here.command(name)):
        path = here.folder / "seven"
        words = " ".join(f"'{word}'" for word in command)
        done = here.run(["sh", "-c", f"exec {words} 7>seven 0<&-"])
        assert done == (0, "False\n", "")
        assert path.read_text() == "seven"
        path.unlink()


WAITS = """
import os, signal, subprocess, sys, time
def handle(number, frame):
    os.write(1, f"got {signal.Signals(number).name}\\n".encode())  # print() isn't reentrant
    if number == signal.SIGTERM: sys.exit(5)
for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT):
    signal.signal(one, handle)
helper = subprocess.Popen(["sleep", "1000"])
os.write(1, f"ready {helper.pid}\\n".encode())
while True: time.sleep(0.01)
"""


@pytest.mark.parametrize("nohup", [False, True])
@pytest.mark.parametrize("launcher", [False, True])
def test_signals_reach_it(here: Home, launcher: bool, nohup: bool) -> None:
    name = here.write("waits.py", WAITS)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        stub = here.start(name, changed={"TORCHELASTIC_RUN_ID": "signals"} if launcher else {})
    finally:
        signal.signal(signal.SIGHUP, before)
    helper = int(line_of(stub).split()[1])
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT):
        if not launcher:
            os.kill(stub.pid, number)
            assert line_of(stub) == f"got {number.name}"
    os.killpg(stub.pid, signal.SIGTERM)
    assert line_of(stub) == "got SIGTERM"
    if launcher:  # which signals all that it has started, as torchrun does
        eventually(lambda: not os.path.exists(f"/proc/{helper}"))
    else:
        os.kill(helper, signal.SIGKILL)
    assert stub.wait() == 5
    stub.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2], ids=str)
def test_a_signal_ends_it(here: Home, number: signal.Signals) -> None:
    name = here.write("sleeps.py", "import time; print('ready', flush=True); time.sleep(1000)")
    ends: list[int] = []
    for process in (
        here.start(name),
        subprocess.Popen(
            [sys.executable, name], cwd=here.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ),
    ):
        assert line_of(process) == "ready"
        os.kill(process.pid, number)
        process.communicate()
        ends.append(process.returncode)
    assert ends == [-number, -number]


def test_what_is_ignored_stays_ignored(here: Home) -> None:
    name = here.write(
        "ignores.py", "import signal; print(signal.getsignal(signal.SIGHUP), signal.getsignal(2))"
    )
    for command in ([sys.executable, name], here.command(name)):
        words = " ".join(f"'{word}'" for word in command)
        code, out, err = here.run(["sh", "-c", f"trap '' HUP INT; exec {words}"])
        assert (code, out, err) == (0, "1 1\n".replace("1", str(signal.SIG_IGN)), ""), out


PARENT = "import os, sys, time; print(os.getppid(), flush=True); time.sleep(float(sys.argv[1]))"


def test_one_server_for_one_script_and_environment(here: Home) -> None:
    """The first process stays: a server without any may end before the next one comes."""
    name = here.write("parent.py", PARENT)
    first = here.start(name, "1000")

    def server(**changed: str) -> str:
        code, out, err = here.run(here.command(name, "0"), changed=changed)
        assert (code, err) == (0, "")
        return out.rstrip()

    one = line_of(first)
    assert server() == one
    assert server(RANK="3", LOCAL_RANK="1", MASTER_PORT="99", CUDA_VISIBLE_DEVICES="") == one
    assert server(ANY_LIBRARY="may read it") != one
    assert server(OMP_NUM_THREADS="3") != one
    assert server(TORCHELASTIC_RUN_ID="a job") != one
    before = set(here.servers())
    _, out, _ = here.run(["sh", "-c", 'ulimit -S -n 100; exec "$@"', "sh", *here.command(name, "0")])
    assert int(out) not in before
    first.kill()
    first.communicate()


def test_randomness_differs_by_process(here: Home) -> None:
    name = here.write(
        "random_one.py",
        "import random, multiprocessing as m; print(random.random(), m.current_process().authkey)",
    )
    assert len({here.warm(name)[1] for _ in range(3)}) == 3


@pytest.mark.parametrize("threads", ["1", "2"])
def test_numbers_of_threads_and_seeds_are_those_of_a_plain_start(here: Home, threads: str) -> None:
    text = "import numpy, torch; print(torch.get_num_threads(), numpy.random.rand(), torch.initial_seed())"
    name = here.write("counts.py", text)
    options = (*LIGHT[:-1], "ecemb,encodings,torch._dynamo,torch.profiler,torch.distributed")
    ends = [here.run(here.command(name, options=options), changed={"OMP_NUM_THREADS": threads}) for _ in "ab"]
    plain = here.run([sys.executable, name], changed={"OMP_NUM_THREADS": threads})
    assert [end[0] for end in ends] == [0, 0] and ends[0][2] == plain[2]
    shown = [end[1].split() for end in (*ends, plain)]
    assert [one[0] for one in shown] == [threads] * 3
    assert len({one[1] for one in shown}) == 3  # numpy's generator is seeded in each process
    assert len({one[2] for one in shown}) == 3  # so is torch's


def test_a_constant_seed_of_an_import_stays(here: Home) -> None:
    here.write("seeding/seeds_torch.py", "import torch; torch.manual_seed(4)")
    name = here.write("seeded.py", "import seeds_torch, torch; print(torch.initial_seed())")
    options = (*LIGHT[:-1], "ecemb,encodings,torch._dynamo,torch.profiler,torch.distributed")
    path = {"PYTHONPATH": str(here.folder / "seeding")}
    command = here.command(name, options=(*options, "--preload", "seeds_torch"))
    assert here.run(command, changed=path) == (0, "4\n", "")


def test_a_profiler_sees_the_script(here: Home) -> None:
    name = here.write("work.py", "def profiled(): return 1\nprofiled()")
    where = ["--arena-dir", str(here.arena_dir), *LIGHT]
    code, out, err = here.plain("-m", "cProfile", "-m", "ecemb", "run", *where, name)
    assert code == 0 and "work.py:1(profiled)" in out, err
    assert "a profiler" in err
