"""What a worker does with the exception that ends it, without other processes."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ecemb.errors import ConfigurationError, PeerFailure, StepFailed
from ecemb.net import error_file, worker_exit
from ecemb.net import watch as watch_module
from ecemb.net.error_file import cause_of, follows
from ecemb.net.worker_exit import ExceptHook


class Attempts:
    """The attempts of a launch; each call is one, that ends by an error."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.count = folder, monkeypatch, -1
        self.waits: list[float] = []
        self.printed: list[BaseException] = []
        self.enforced = 0
        monkeypatch.setattr(time, "sleep", self.waits.append)
        monkeypatch.setattr(worker_exit, "enforce_end", self._note_enforced)
        monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: self.printed.append(error))
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "8")

    def _note_enforced(self) -> None:
        self.enforced += 1

    def __call__(self, error: BaseException, *, steps: int = 0, watch: Any = None) -> dict[str, Any]:
        self.count += 1
        path = self.folder / f"attempt_{self.count}" / "0" / "error.json"
        path.parent.mkdir(parents=True)
        self.patch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        self.patch.setenv("TORCHELASTIC_RESTART_COUNT", str(self.count))
        self.patch.setattr(watch_module, "_last_line", threading.Lock())  # of another process
        hook = ExceptHook()
        with self.patch.context() as during:
            during.setattr(sys, "excepthook", sys.excepthook)  # put back afterwards
            hook.prepare()
            hook.watch, hook.activity.steps = watch, steps
            hook(type(error), error, None)
        return json.loads(path.read_text())["message"] if path.exists() else {}


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(tmp_path, monkeypatch)


def test_waits_grow_while_the_same_error_comes_without_a_step(
    attempts: Attempts, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(8):
        attempts(ConfigurationError("no such thing " + 400 * "x"))
    assert attempts.waits == [2, 4, 8, 16, 32, 60, 60]
    assert len(attempts.printed) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith(
        "start 2 in a row that ends by ConfigurationError, next in 2 s: no such thing x"
    )
    assert max(map(len, lines)) <= 160
    attempts(ConfigurationError("no such thing"))  # the last attempt of all
    assert len(attempts.waits) == 7 and len(attempts.printed) == 2


@pytest.mark.parametrize(
    ("first", "second", "steps"),
    [
        (ValueError("a"), TypeError("a"), 0),
        (ValueError("a"), ValueError("a"), 1),  # the second came further
        (follows(PeerFailure("a rank died")), follows(PeerFailure("a rank died")), 0),
        (PeerFailure("of a message"), PeerFailure("of a message"), 0),
    ],
)
def test_other_errors_are_not_waited_after(
    attempts: Attempts, first: Exception, second: Exception, steps: int
) -> None:
    attempts(first)
    attempts(second, steps=steps)
    assert not attempts.waits
    assert attempts.printed == [error for error in (first, second) if cause_of(error) is None]


def test_an_error_that_another_ranks_permanent_one_caused_is_waited_after_too(attempts: Attempts) -> None:
    attempts(ConfigurationError("here"))
    attempts(follows(PeerFailure("checking failed on rank 1"), "ConfigurationError"))
    attempts(follows(StepFailed("step 1 failed on ranks [1]"), "StepFailed"))
    assert attempts.waits == [2]


class Watching:
    def __init__(self, news: str | None) -> None:
        self._news, self.told = news, list[str]()
        self.saw_death = news is not None and "died" in news

    def news(self, timeout_s: float) -> str | None:
        return self._news

    def announce_failure(self, error: str) -> None:
        self.told.append(error)


def test_what_follows_has_a_later_time_and_the_cause_in_it(attempts: Attempts) -> None:
    failed = Watching(None)
    own = attempts(ValueError("first"), watch=failed)
    watch = Watching("rank 1 (host a, pid 7) ended by ValueError: first (see its log)")
    told = attempts(follows(PeerFailure("lost a peer")), watch=watch)
    assert failed.told == ["ValueError: first"] and not watch.told
    assert int(told["extraInfo"]["timestamp"]) > int(own["extraInfo"]["timestamp"])
    assert told["message"].startswith("rank 1 (host a, pid 7) ended by ValueError: first (see its log); Peer")
    assert told["extraInfo"]["py_callstack"].startswith("rank 1 (host a, pid 7) ended by ValueError: first")
    assert own["message"] == "ValueError: first"


def follower() -> Exception:
    """An error that another rank caused, raised as all are: in place of another one."""
    try:
        try:
            raise OSError("the socket's own error")
        except OSError as error:
            raise follows(StepFailed("step 3 failed on ranks [1]:\n see their logs"), "StepFailed") from error
    except StepFailed as error:
        return error


@pytest.mark.parametrize("said", [False, True], ids=["first", "the watch has said it"])
def test_what_another_rank_caused_is_one_line_and_the_file_has_its_traceback(
    said: bool, attempts: Attempts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("RANK", "0")
    news = "rank 1 (host a, pid 7) died"
    monkeypatch.setattr(worker_exit, "claim_last_line", lambda: not said)
    told = attempts(follower(), steps=3, watch=Watching(news))
    assert not attempts.printed
    line, trace = caplog.records
    assert line.levelno == (logging.DEBUG if said else logging.ERROR)
    assert line.getMessage() == (
        f"rank 0 ends: {news}; StepFailed: step 3 failed on ranks [1]: see their logs (the log has the "
        f"traceback at level DEBUG)"
    )
    assert trace.levelno == logging.DEBUG and trace.exc_info
    stack = told["extraInfo"]["py_callstack"]
    assert "the socket's own error" in stack and "in follower" in stack and stack.startswith(news)


def wrapped(error: Exception) -> Exception:
    """An error of a script's that comes from another one."""
    try:
        raise ValueError("of the script") from error
    except ValueError as outer:
        return outer


CONNECTION = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:7"
)
LOST = {
    "gloo": lambda: RuntimeError(CONNECTION),
    "torch": lambda: dist.DistNetworkError("the store is gone"),
    "wrapped": lambda: wrapped(RuntimeError(CONNECTION)),
}


@pytest.mark.parametrize("news", ["rank 1 (host a, pid 7) died", None])
@pytest.mark.parametrize("kind", LOST)
def test_a_connection_of_the_scripts_is_lost_with_its_peer_if_the_watch_knows_of_that(
    kind: str, news: str | None, attempts: Attempts, caplog: pytest.LogCaptureFixture
) -> None:
    error = LOST[kind]()
    assert error_file.own_failure(error) is None
    watch = Watching(news)
    began = int(time.time())
    told = attempts(error, watch=watch)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    if news is None:
        assert attempts.printed == [error] and not lines and len(watch.told) == 1
        assert told["message"] == f"{type(error).__name__}: {error}"
        return
    assert not attempts.printed and not watch.told
    assert len(lines) == 1 and f"ends: {news}; {type(error).__name__}: " in lines[0]
    assert int(told["extraInfo"]["timestamp"]) >= began + 3
    assert (
        told["extraInfo"]["py_callstack"].startswith(news) and str(error) in told["extraInfo"]["py_callstack"]
    )
    attempts(type(error)("of the script's own"))  # whose traceback has not been seen
    assert not attempts.waits and len(attempts.printed) == 1


def test_without_a_verdict_the_watch_learns_at_once_that_this_rank_ends(attempts: Attempts) -> None:
    """The process may be stuck from here on, and no other rank would end the one that began it."""
    watch = Watching(None)
    attempts(follows(StepFailed("step 3 failed on ranks [0]"), "StepFailed"), steps=3, watch=watch)
    assert watch.told == ["StepFailed: step 3 failed on ranks [0]"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(3), 3),
        (SystemExit(256 + 7), 7),
        (SystemExit(), 0),
        (SystemExit("text"), 1),
        (ValueError("a"), 1),
        (follows(StepFailed("of another rank")), None),
    ],
)
def test_what_ends_a_step_of_this_ranks_own_accord_has_pythons_code(
    error: BaseException, code: int | None
) -> None:
    failure = error_file.own_failure(error)
    assert (failure.code if failure else None) == code


def test_of_all_threads_one_says_why_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_last_line", threading.Lock())
    assert [watch_module.claim_last_line() for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize(
    ("waited_s", "why", "is_late"),
    [
        (0.1, "the connection with rank 2 has ended", False),
        (60.0, "nothing came", True),
        (3.0, "Timed out", True),
    ],
)
@pytest.mark.parametrize("restarts", [0, 3])
def test_the_way_out_of_a_lost_peer_fits_its_cause(
    waited_s: float, why: str, is_late: bool, restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    text = str(error_file.lost_peer(0, 3, "step 7", waited_s, 60.0, RuntimeError(f"{why}\nmore")))
    assert text.startswith(f"rank 0 of 3 lost a peer in step 7 after {waited_s:.1f} s")
    assert ("raise timeout=" in text) is ("(deadline 60 s)" in text) is is_late
    assert ("torchrun restarts" in text) is (restarts > 0) and (
        "launch the job again" in text
    ) is not restarts


def test_what_record_has_written_stays_but_for_its_time(attempts: Attempts, tmp_path: Path) -> None:
    def recorded(error: Exception, leave: Callable[[], None]) -> dict[str, Any]:
        path = tmp_path / "error.json"
        attempts.patch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        content = {"message": f"{error}", "extraInfo": {"py_callstack": "by record", "timestamp": "7"}}
        path.write_text(json.dumps({"message": content}))
        leave()
        return json.loads(path.read_text())["message"]

    own = recorded(ValueError("a"), lambda: error_file.write("x", "y", later=False, name="ValueError"))
    assert own["message"] == "a" and own["extraInfo"]["timestamp"] == "7"
    assert own["extraInfo"]["py_callstack"] == "by record"
    told = recorded(ValueError("a"), lambda: error_file.write("x", "y", later=True))
    assert int(told["extraInfo"]["timestamp"]) > 7 and told["message"] == "a"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": "text"}', '{"message": {"extraInfo": {}}}'])
def test_files_of_another_form_are_left_alone(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "attempt_1" / "0" / "error.json"
    path.parent.mkdir(parents=True)
    before = tmp_path / "attempt_0" / "0" / "error.json"
    before.parent.mkdir(parents=True)
    for one in (path, before):
        one.write_text(content)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert error_file.repeats("ValueError") == 0
    error_file.write("text", "stack", later=False, name="ValueError")
    assert path.read_text() == content
    assert [one.name for one in path.parent.iterdir()] == ["error.json"]


def test_an_interrupt_and_a_forked_child_end_as_ever(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert attempts(KeyboardInterrupt()) == {} and len(attempts.printed) == 1
    caplog.set_level(logging.DEBUG)
    hook = ExceptHook()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    hook.prepare()
    with monkeypatch.context() as child:
        child.setattr(worker_exit.os, "getpid", lambda: 1)
        hook(ValueError, ValueError("a"), None)
    assert len(attempts.printed) == 2 and not caplog.records and not attempts.enforced


def test_a_forked_process_that_prepares_it_is_a_worker(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = ExceptHook()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    hook.prepare()
    hook(ValueError, ValueError("of the parent"), None)
    monkeypatch.setattr(worker_exit.os, "getpid", lambda: 1)
    hook.prepare()
    hook(ValueError, ValueError("of the child"), None)
    assert [str(error) for error in attempts.printed] == ["of the parent", "of the child"]
    assert attempts.enforced == 2


class Cancelled(BaseException):
    """As asyncio's."""


@pytest.mark.parametrize("error", [ValueError("a"), Cancelled("a")])
def test_the_end_is_enforced_last(
    error: BaseException, attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts(error)
    assert attempts.enforced == 1 and attempts.printed == [error]

    def fails(*_: object) -> None:
        assert attempts.enforced == 1
        raise OSError("a hook of the script's")

    monkeypatch.setattr(sys, "excepthook", fails)
    watch = Watching(None)
    with pytest.raises(OSError, match="a hook of the script's"):
        attempts(error, steps=1, watch=watch)
    assert attempts.enforced == 2
    assert watch.told == (["ValueError: a"] if isinstance(error, Exception) else [])


def test_it_is_put_over_a_later_hook_and_prints_once(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda *_: called.append("python"))
    monkeypatch.setattr(worker_exit, "enforce_end", lambda: called.append("enforced"))
    hook = ExceptHook()
    hook.prepare()

    def over(*arguments: Any) -> None:
        called.append("torch")
        hook(*arguments)

    monkeypatch.setattr(sys, "excepthook", over)
    hook.prepare()
    hook.prepare()
    assert sys.excepthook is hook
    hook(ValueError, ValueError("a"), None)
    assert called == ["torch", "python", "enforced"]


def test_causes_are_marked() -> None:
    assert cause_of(ValueError()) is None
    assert cause_of(follows(PeerFailure("a"))) == ""
    assert cause_of(follows(PeerFailure("a"), "ValueError")) == "ValueError"
