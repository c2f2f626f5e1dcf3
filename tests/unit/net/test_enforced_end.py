"""A failed worker ends, whatever keeps the interpreter from its end; a good end is left alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.warm_starts import Home, home

ENDS = """
import atexit, builtins, ctypes, sys, threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from ecemb.net import replacement, watch
from ecemb.net import worker_exit
from ecemb.net.worker_exit import hook

how, worker_exit.GRACE_S, worker_exit.REPORT_S = sys.argv[1], *map(float, sys.argv[2:4])
hook.prepare()
watch.before_hard_exit(lambda: print("last words", file=sys.stderr))
stuck = threading.Event().wait

def blocks():
    print("before it blocks")
    stuck()

class Blocks:
    def __del__(self):
        stuck()

if how == "executor":
    ThreadPoolExecutor(1).submit(blocks)
elif how == "thread":
    threading.Thread(target=blocks).start()
elif how == "handler":
    atexit.register(blocks)
elif how == "native handler":  # of Python's, but no Python code, and it lets go of the interpreter's lock
    atexit.register(ctypes.CDLL(None).pause)
elif how == "destructor":
    builtins.kept = Blocks()
elif how == "lock":  # of the interpreter
    atexit.register(ctypes.PyDLL(None).pause)
elif how == "library":
    at_exit, pause = ctypes.CDLL(None).__cxa_atexit, ctypes.CDLL(None).pause
    at_exit(pause, None, None)
elif how == "saves":
    begun, called = threading.Event(), threading.Event()

    def save():
        with worker_exit.before_end():
            begun.set()
            called.wait()  # until the process has failed, and longer than its grace
            begun.clear()
            begun.wait(20 * worker_exit.GRACE_S)
            print("saved", flush=True)

    saver = threading.Thread(target=save, daemon=True)
    saver.start()
    begun.wait()
    atexit.register(saver.join)
    atexit.register(called.set)
elif how == "goes on":
    try:
        raise ValueError("of the script")
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    threading.Event().wait(20 * worker_exit.GRACE_S)
else:
    if how == "replaced":
        replacement.begin(replacement.new_page(), 0)
        replacement.peer_died()
        hook.watch = SimpleNamespace(saw_death=True, news=lambda timeout_s: "rank 1 died")
        builtins.kept = Blocks()
    atexit.register(print, "handled")
    threading.Thread(target=lambda: print("of a thread")).start()
print("of the script")
if how not in ("good", "goes on"):
    raise ValueError("of the script")
"""


@pytest.fixture(scope="module")
def here() -> Iterator[Home]:
    with home() as made:
        made.environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
        made.write("ends.py", ENDS)
        yield made


@pytest.fixture(params=["cold", "warm"])
def started(request: pytest.FixtureRequest, here: Home) -> list[str]:
    """The command that starts the script. Warm, the module with the hook is imported before the fork."""
    return [sys.executable] if request.param == "cold" else here.command(options=())


def end(here: Home, started: list[str], how: str, grace_s: float, report_s: float) -> tuple[int, str, str]:
    code, out, err = here.run([*started, "ends.py", how, str(grace_s), str(report_s)])
    assert out.startswith("of the script") or how in ("executor", "thread", "failed", "good", "replaced")
    assert err.count("ValueError: of the script") == (how != "good"), err
    return code, out, err


@pytest.mark.parametrize("how", ["executor", "thread", "handler"])
def test_what_python_waits_for_is_named(here: Home, started: list[str], how: str) -> None:
    code, out, err = end(here, started, how, 0.1, 600)
    assert code == 1
    assert sorted(out.splitlines()) == ["before it blocks", "of the script"]  # both were in a buffer
    [line] = [one for one in err.splitlines() if "can't end by itself" in one]
    who = {
        "executor": r"ThreadPoolExecutor-\d_0",
        "thread": r"Thread-\d \(blocks\)",
        "handler": "MainThread",
    }[how]
    assert err.splitlines()[-1] == "last words"
    assert re.search(rf"has failed.*within 0 s: .*{who} is in blocks \(.*ends.py:\d+\).*with code 1", line), (
        line
    )


def test_a_handler_without_python_code_is_named_so(here: Home, started: list[str]) -> None:
    code, _, err = end(here, started, "native handler", 0.1, 600)
    assert code == 1
    assert (
        "within 0 s: MainThread is past the script, in code of a C library, such as an exit handler; " in err
    )


@pytest.mark.parametrize("how", ["destructor", "lock", "library"])
def test_where_no_thread_of_pythons_runs_a_timer_ends_it(here: Home, started: list[str], how: str) -> None:
    code, out, err = end(here, started, how, 600, -599.9)  # the timer has the sum, and the thread the first
    assert code == 1 and out == "of the script\n"
    assert "can't end by itself" not in err


@pytest.mark.parametrize(("how", "grace_s"), [("failed", 600), ("good", 1e-6)])
def test_an_end_that_comes_is_not_disturbed(here: Home, started: list[str], how: str, grace_s: float) -> None:
    code, out, err = end(here, started, how, grace_s, 1e-6)
    assert code == (how == "failed")
    assert sorted(out.splitlines()) == ["handled", "of a thread", "of the script"]
    assert "can't end by itself" not in err


def test_one_that_is_replaced_ends_its_threads_and_handlers_but_destroys_nothing(
    here: Home, started: list[str]
) -> None:
    code, out, err = end(here, started, "replaced", 120, 1)
    assert code == 1
    assert sorted(out.splitlines()) == ["handled", "of a thread", "of the script"]
    assert "can't end by itself" not in err


@pytest.mark.parametrize("how", ["saves", "goes on"])
def test_a_save_and_a_script_that_goes_on_are_not_cut_off(here: Home, started: list[str], how: str) -> None:
    """They take 20 times the grace."""
    code, out, err = end(here, started, how, 0.1, 0.05)
    assert code == (how == "saves")
    assert out.splitlines() == ["of the script", *(["saved"] if how == "saves" else [])]
    assert how == "saves" or "can't end by itself" not in err  # a save's grace may be over before the end
