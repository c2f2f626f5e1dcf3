"""Reports of this process: its activity, for other ranks, and its error file, for torchrun.

`Activity` has the main thread's place, that is call and step, and the time for which it has waited there for
other ranks. The main thread writes it, and the failure detector's thread reads it.

Owns the error file that TORCHELASTIC_ERROR_FILE names, in the form of torch.distributed.elastic's `record`,
which scripts need not use. Of all ranks' files, torchrun takes the file with the earliest time for the cause.
An error that began on this rank has the time of the error; an error that another rank caused has a later
time. The file appears complete or not at all, by a link or a rename: torchrun's agent fails on a partial
file.

The error files of the last attempt are in a folder beside that of this attempt: they show an error that
occurs in every attempt.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from ..errors import PeerFailure
from . import replacement

logger: logging.Logger = logging.getLogger("ecemb")

_C = TypeVar("_C", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error that ended a step and began on this rank: no other rank caused it.

    Attributes:
        text: the error in one line.
        stack: its traceback.
        code: exit code of a Python process that the error ends.
        at: time of the error, by `time.time`.
    """

    text: str
    stack: str
    code: int
    at: float


class Activity:
    """The activity of this process's main thread.

    Attributes:
        failure: the error that ended a step here, if it began on this rank.
        steps: number of steps that have ended since the process began.
        place: a phrase that is the same on all ranks that are in the same call of the same step.
        began: when the main thread's present wait began, by `time.monotonic`; None if it does not wait.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.steps = 0
        self.place = "before ecemb.protect()"
        self.began: float | None = None

    @property
    def waited_s(self) -> float:
        """Duration of the main thread's present wait; 0 if it does not wait."""
        began = self.began
        return 0.0 if began is None else time.monotonic() - began

    def waiting(self) -> _Waiting:
        """Marks a `with` block as a wait for other ranks. Threads other than the main thread don't count."""
        return _Waiting(self)


class _Waiting:
    """The `with` block of `Activity.waiting`. Not a generator, which would cost more: a step has a dozen."""

    __slots__ = ("_counts", "_where")

    def __init__(self, where: Activity) -> None:
        self._where = where
        self._counts = False

    def __enter__(self) -> None:
        where = self._where
        if where.began is None and threading.current_thread() is threading.main_thread():
            self._counts, where.began = True, time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._counts:
            self._where.began = None


def placed(call: _C) -> _C:
    """Decorates a method of a guard: while the method runs, it is the place of this process's activity."""

    @functools.wraps(call)
    def within(self: Any, *arguments: Any, **named: Any) -> Any:
        before = self._activity.place
        self._activity.place = f"in guard.{call.__name__}(), before step {self.next_step}"
        try:
            return call(self, *arguments, **named)
        finally:
            self._activity.place = before

    return cast("_C", within)


_WRITING_S = 2.0  # longest wait for the main thread to complete a file
_LATER_S = 3  # added to the time of an error that another rank caused, so that it is not the cause
_FACTS = "ecemb"
_E = TypeVar("_E", bound=BaseException)


def follows(error: _E, cause: str = "") -> _E:
    """Marks an error that another rank's error has caused.

    Args:
        error: the error to raise.
        cause: the class of the other rank's error, if known.
    """
    error.__dict__["_ecemb_cause"] = cause
    return error


def lost_peer(
    rank: int, world_size: int, what: str, waited_s: float, timeout_s: float, error: Exception
) -> PeerFailure:
    """Makes the error of a failed wait for another rank, marked by `follows`.

    Args:
        rank: this rank.
        world_size: number of ranks.
        what: names the wait.
        waited_s: duration of the wait.
        timeout_s: deadline of the wait.
        error: the error with which it failed.
    """
    why = (str(error).splitlines() or [type(error).__name__])[0]
    deadline = slow = ""
    if waited_s >= timeout_s or "timed out" in why.lower():  # gloo counts from the begin of a message
        deadline = f" (deadline {timeout_s:.0f} s)"
        slow = ". If the peer is only slow, raise timeout="
    text = (
        f"rank {rank} of {world_size} lost a peer in {what} after {waited_s:.1f} s{deadline}: {why}; "
        f"{way_on()}{slow}"
    )
    return follows(PeerFailure(text))


def way_on() -> str:
    """The remedy for messages of errors that a restart mends: by torchrun, or by hand after its last one."""
    if replacement.is_possible():
        return "end this process, so that ecemb-run replaces it, or torchrun restarts the job from its arenas"
    if is_last_attempt():
        return "end this process, and launch the job again: it goes on from its arenas"
    return "end this process, so that torchrun restarts the job from its arenas"


def cause_of(error: BaseException) -> str | None:
    """The class of the other rank's error that caused this one, "" if unknown; None if no rank caused it."""
    return error.__dict__.get("_ecemb_cause")


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether an error, or one in its chain, is torch.distributed's error for a peer that is gone."""
    while error is not None:
        names = [each.__name__ for each in type(error).__mro__]  # torch need not be imported
        if "DistError" in names or ("RuntimeError" in names and "gloo/" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def own_failure(error: BaseException) -> Failure | None:
    """The `Failure` of an error that began on this rank; None if another rank may be the cause, or Ctrl-C."""
    if isinstance(error, KeyboardInterrupt) or cause_of(error) is not None or is_lost_connection(error):
        return None
    code = 1
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = (error.code or 0) & 0xFF
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(f"{type(error).__name__}: {error}", stack, code, time.time())


def write(
    text: str, callstack: str, *, later: bool, name: str = "", repeats: int = 0, at: float | None = None
) -> None:
    """Writes the error file; if the file exists, adds only missing keys. An OSError is logged, not raised.

    Args:
        text: the error in one line.
        callstack: the stack, for torchrun's summary.
        later: whether another rank caused the error.
        name: name by which the next attempt recognizes the error; "" to leave it out.
        repeats: number of attempts in a row before this one that ended by the error.
        at: time of the error, by `time.time`; now by default.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    at = time.time() if at is None else at
    second = math.ceil(at) + _LATER_S if later else int(at)
    extra: dict[str, Any] = {"py_callstack": callstack, "timestamp": str(second)}
    content: Any = {"message": {"message": text, "extraInfo": extra}}
    known = read(path)
    if known is not None:
        content, extra = known, known["message"]["extraInfo"]
        if later:
            extra["timestamp"] = str(max(second, int(extra["timestamp"])))
    if name:
        extra[_FACTS] = {"name": name, "repeats": repeats}
    whole = f"{path}.{os.getpid()}.{time.monotonic_ns()}"
    try:
        with open(whole, "w", encoding="utf-8") as file:
            json.dump(content, file)
        if known is not None:
            os.replace(whole, path)
        else:
            os.link(whole, path)
    except FileExistsError:  # another thread has written the file meanwhile
        pass
    except OSError as error:
        logger.warning("torchrun will not show why this process ended: %s", error)
    finally:
        with suppress(OSError):
            os.unlink(whole)


def read(path: str | os.PathLike[str]) -> Any:
    """The content of an error file, if it is complete and of `record`'s form; else None."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        int(content["message"]["extraInfo"]["timestamp"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return content


def repeats(name: str) -> int:
    """The number of attempts in a row, up to the last one, that an error of this name ended on this host."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    attempt = path.parent.parent  # .../attempt_7/0/error.json
    number = re.fullmatch(r"attempt_(\d+)", attempt.name)
    if number is None or not int(number[1]):
        return 0
    found = [0]
    for file in attempt.with_name(f"attempt_{int(number[1]) - 1}").glob(f"*/{path.name}"):
        facts = ((read(file) or {}).get("message", {}).get("extraInfo", {})).get(_FACTS, {})
        if facts.get("name") == name:
            found.append(1 + int(facts["repeats"]))
    return max(found)


def is_last_attempt() -> bool:
    """Whether torchrun starts no worker after this attempt."""
    count, most = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return not (count.isdigit() and most.isdigit()) or int(count) >= int(most)


def wait_while_written() -> None:
    """Waits until the error file is complete, at most 2 s, if the main thread is writing it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    ends_at = time.monotonic() + _WRITING_S
    while path and time.monotonic() < ends_at:
        try:
            with open(path, encoding="utf-8") as file:
                json.load(file)
            return
        except ValueError:
            time.sleep(0.01)
        except OSError:
            return
