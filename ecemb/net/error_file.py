"""What others read of this process: where it is and how long it waits there, and torchrun's error file.

`Activity` is what this process does: its call, its step, and the time that it has waited there for
other ranks. The main thread writes it, and the failure detector's thread reads it.

Owns the error file that TORCHELASTIC_ERROR_FILE names, in the form of torch.distributed.elastic's `record`,
which scripts need not use. Of all ranks' files, torchrun takes the one with the earliest time for the cause.
An error that began on this rank gets the time of the error; an error that another rank caused gets a later
time. The file appears complete or not at all: torchrun's agent fails on a partial file.

The files of the last attempt are beside it: they show an error that comes again and again.
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

logger: logging.Logger = logging.getLogger("ecemb")

_C = TypeVar("_C", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error of this rank's own that ended a step: no other rank caused it.

    Attributes:
        text: the error in one line.
        stack: its traceback.
        code: with which Python ends a process by it.
        at: when it was, by `time.time`.
    """

    text: str
    stack: str
    code: int
    at: float


class Activity:
    """What this process's main thread does.

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
    """One `with` block; a step waits for a dozen messages, and a generator for each would cost more."""

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
    """Makes a method of a guard the place of this process while it runs."""

    @functools.wraps(call)
    def within(self: Any, *arguments: Any, **named: Any) -> Any:
        before = self._activity.place
        self._activity.place = f"in guard.{call.__name__}(), before step {self.next_step}"
        try:
            return call(self, *arguments, **named)
        finally:
            self._activity.place = before

    return cast("_C", within)


_WRITING_S = 2.0  # time for the main thread to finish a file that it has begun
_LATER_S = 3  # added to the time of an error that another rank caused, so that it does not count as the cause
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
    """The error of a wait for another rank that has failed.

    Args:
        rank: this rank.
        world_size: number of ranks.
        what: names the wait.
        waited_s: how long it took.
        timeout_s: its deadline.
        error: how it failed.
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
    """What to do about an error that a restart mends, also where torchrun starts no worker any more."""
    if is_last_attempt():
        return "end this process, and launch the job again: it goes on from its arenas"
    return "end this process, so that torchrun restarts the job from its arenas"


def cause_of(error: BaseException) -> str | None:
    """The class of the other rank's error that caused this one, "" if unknown; None if no rank caused it."""
    return error.__dict__.get("_ecemb_cause")


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether this is, or comes from, an error that torch.distributed raises for a peer that is gone."""
    while error is not None:
        names = [each.__name__ for each in type(error).__mro__]  # torch need not be imported
        if "DistError" in names or ("RuntimeError" in names and "gloo/" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def own_failure(error: BaseException) -> Failure | None:
    """An error of this rank as text; None if another rank caused it, or may have, and for Ctrl-C."""
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
    """Writes the file; if it exists, adds only the missing keys. Logs it if that fails.

    Args:
        text: the error in one line.
        callstack: the stack, for torchrun's summary.
        later: whether another rank caused the error.
        name: of the error, by which the next attempt recognizes it; "" if it need not.
        repeats: how many attempts before this one ended by the error.
        at: when the error was, by `time.time`; now by default.
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
    except FileExistsError:  # another thread was faster
        pass
    except OSError as error:
        logger.warning("torchrun will not show why this process ended: %s", error)
    finally:
        with suppress(OSError):
            os.unlink(whole)


def read(path: str | os.PathLike[str]) -> Any:
    """The content of a file if it is complete and of `record`'s form; else None."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        int(content["message"]["extraInfo"]["timestamp"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return content


def repeats(name: str) -> int:
    """How many attempts of this host's workers in a row, up to the last, ended by an error of this name."""
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
    """Waits a moment if the main thread is writing its exception to the file."""
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
