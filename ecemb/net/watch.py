"""The failure detector: notices a peer's end at once, and ends this process.

gloo reports a peer's end only to some ranks; the other ranks would wait for the group's timeout, and the
workers of another host would not be informed. So a thread of every worker listens to its neighbours on
separate links. Each worker sends a heartbeat every second. A link that ends without a goodbye means a death,
and so does a silence longer than the deadline. A report of the first death is passed from neighbour to
neighbour.

The process then ends, so that torchrun restarts the job: its arena is recoverable at any instant. Only
silence counts, never slowness: a rank that computes for minutes sends heartbeats meanwhile, even while a call
keeps the interpreter's lock, because `Beats` run outside of the interpreter. A silence counts only while this
thread was awake itself: a thread that was stopped, or waited for the lock, does not take other workers for
dead.

`Beats` sends the heartbeats while the process runs, from a thread that Python does not know of: a loop of
machine code, started by the C library's pthread_create. A call that keeps the interpreter's lock for minutes
(an extension that compiles, sorts or copies) stops every thread of Python, but not this thread. It stops when
the process dies or is stopped.

Owns as well the functions to call before a hard exit of this process (`before_hard_exit`), as `os._exit` runs
no exit handlers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import math
import os
import select
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, Final

from ..kernels.llvm import assembled
from ..kernels.threads import without_signals
from . import error_file, replacement
from .error_file import Activity, Failure
from .links import Link, drop, neighbours, pair
from .staying import Stay
from .wording import listed

logger: logging.Logger = logging.getLogger("ecemb")


EXIT_UNDECIDED = 75  # exit code of a process that ends so that recovery decides from the arenas
GRACE_S = 0.5  # time for the main thread to fail by itself, with a traceback that shows its place
BRIEF_GRACE_S = 0.05  # the same where the process is replaced, and training waits for its successor
REPORT_S = 5.0  # longest time for log and torchrun's summary: a busy machine is slow, a full pipe blocks
_BEAT_S = 1.0
_BEATS = 10  # heartbeats, at least, within the deadline
_GOODBYE_S = 1.0  # for neighbours to receive a goodbye

_BEAT = b"\1"  # one byte, never sent in parts; every other message begins with another byte
_MESSAGE = struct.Struct("!BBHII")  # kind; of a death: why, bytes of text that follow, index, silence in ms
_MOST_BYTES = 400  # longest text of a message
_BYE, _DEAD, _ASK, _HERE = 2, 3, 4, 5
WAIT_S = 30.0  # a longer wait of the main thread is logged, with the places of the neighbours
_ANSWER_S = 3.0  # time for the neighbours' answers
_DIED, _SILENT, _GAVE_UP, _GARBLED = 1, 2, 3, 4


@dataclasses.dataclass(frozen=True)
class _Death:
    """The end of a worker, as this worker or another has noticed it.

    Attributes:
        index: index of the dead worker.
        why: one of the codes above.
        silence_s: duration of its silence, in seconds.
        error: the error that ended it, if it gave up.
    """

    index: int
    why: int
    silence_s: float = 0.0
    error: str = ""

    def pack(self) -> bytes:
        """Packs the message that reports the death."""
        text = self.error.encode()[:_MOST_BYTES]
        silence_ms = min(int(self.silence_s * 1000), 2**32 - 1)
        return _MESSAGE.pack(_DEAD, self.why, len(text), self.index, silence_ms) + text

    def described(self, name: str) -> str:
        """Describes the death of the worker `name`, for the log."""
        return {
            _DIED: f"{name} died",
            _SILENT: f"{name} was silent for {self.silence_s:.1f} s",
            _GAVE_UP: f"{name} ended by {self.error or 'an exception'} (see its log)",
            _GARBLED: f"{name} sent bytes that are not a message",
        }[self.why]


class FailureDetector:
    """Watches the neighbours from its own thread until `say_goodbye`, `announce_failure` or a death.

    When the process ends, the object calls `say_goodbye`, or `announce_failure` if an exception ended the
    main thread.

    Args:
        links: links with all neighbours; consumed.
        index: index of this worker.
        names: index -> name of the worker, for messages.
        timeout_s: a longer silence counts as a death.
        activity: the place of this worker's main thread, sent to ranks that wait for it.
        stay: how this process stays after a worker's death; None: it ends.

    Attributes:
        stays: whether a worker's process has died, and this process stays: its main thread has to come back.
    """

    def __init__(
        self,
        links: Sequence[Link],
        index: int,
        names: Sequence[str],
        timeout_s: float,
        activity: Activity | None = None,
        stay: Stay | None = None,
    ) -> None:
        self.stays: bool = False
        self._stay = stay
        self._links = {link.fileno(): link for link in links}
        self._silence_s = {link.peer: 0.0 for link in links}
        self._index, self._names, self._timeout_s = index, names, timeout_s
        self._beat_s = min(_BEAT_S, timeout_s / _BEATS)
        self._last_word: bytes | None = None
        self._death: _Death | None = None
        self._decided = threading.Event()
        self._pid = os.getpid()
        self._wake, self._alarm = pair()
        self._poll = select.poll()
        self._activity = activity or Activity()
        self._answers: dict[int, tuple[str, bool]] = {}  # neighbour -> its place, and whether it waits
        self._asked_at: float | None = None
        self._asked = ""  # this worker's place when it asked last
        self._beats = Beats(list(self._links), self._beat_s, _BEAT)
        self._at_exit = Finalize(None, self._at_process_end, exitpriority=0)
        self._thread = threading.Thread(target=self._run, name="ecemb-watch", daemon=True)
        self._thread.start()

    def say_goodbye(self) -> None:
        """Sends a goodbye to the neighbours: this worker's end is no failure. May be called twice."""
        self._stop(_MESSAGE.pack(_BYE, 0, 0, self._index, 0))

    def announce_failure(self, error: str = "") -> None:
        """Sends the neighbours a report that this worker fails. May be called twice.

        Args:
            error: this worker's error, in one line.
        """
        self._stop(_Death(self._index, _GAVE_UP, error=error).pack())

    def news(self, timeout_s: float) -> str | None:
        """Waits for a worker's death, and returns its description; None if there is none within the time."""
        self._decided.wait(timeout_s)
        return None if self._death is None else self._verdict(self._death)

    @property
    def saw_death(self) -> bool:
        """Whether a worker's process has died, which `ecemb-run` replaces on its host."""
        return self._death is not None and self._death.why == _DIED

    def _at_process_end(self) -> None:
        if last_exception() is None and sys.exc_info()[0] is None:
            self.say_goodbye()
        else:
            self.announce_failure()

    def _stop(self, last_word: bytes) -> None:
        if os.getpid() != self._pid or not self._thread.is_alive():
            return
        self._last_word = last_word
        self._at_exit.cancel()
        drop(self._alarm)  # wakes the thread from its poll
        self._decided.wait(_GOODBYE_S)
        if self._death is None:  # else that thread ends the process, unless the caller does so before
            self._thread.join(2 * _GOODBYE_S)

    def _run(self) -> None:
        try:
            self._death = self._watch()
            self._beats.stop()
            if self.saw_death and self._activity.failure is None:
                replacement.peer_died()
            elif self._death is not None:
                replacement.leave()
            self.stays = self._stay is not None and self._stay.is_possible and replacement.is_due()
            self._decided.set()
            if self._death is not None:
                self._send_to_all(self._death.pack())
                if not self._main_thread_returns(self._death):
                    end_process(
                        self._verdict(self._death),
                        briefly=self._another_rank_reports(self._death),
                        own=self._activity.failure,
                    )
            elif self._last_word is not None:
                self._send_to_all(self._last_word)
                self._await_hang_ups()
        except BaseException:  # noqa: BLE001 - no other thread would report the error
            self._decided.set()
            replacement.leave()
            end_process(f"the watch over the other ranks failed:\n{traceback.format_exc()}")
        finally:
            self._beats.stop()
            for link in self._links.values():
                link.close()
            drop(self._wake)
            drop(self._alarm)

    def _main_thread_returns(self, death: _Death) -> bool:
        """Whether this process stays, and its main thread is back in time."""
        if self._stay is None or not self.stays:
            return False
        level = logging.DEBUG if self._another_rank_reports(death) else logging.WARNING
        text = "%s; this process stays, and goes on from its arena"
        report_within(REPORT_S, lambda: logger.log(level, text, self._verdict(death)))
        self._at_exit.cancel()
        return self._stay.await_return()

    def owns(self, thread: threading.Thread) -> bool:
        """Whether a thread is this object's."""
        return thread is self._thread

    def join(self) -> None:
        """Waits for the thread's end, after the main thread is back."""
        self._thread.join()

    def _watch(self) -> _Death | None:
        """Listens until a worker has died (returned), or this worker stops (None)."""
        self._poll.register(self._wake, select.POLLIN)
        for descriptor in self._links:
            self._poll.register(descriptor, select.POLLIN)
        last = time.monotonic()
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll(math.ceil(self._beat_s * 1000))]
            awake_s = min(time.monotonic() - last, 2 * self._beat_s)  # without time in which it was stopped
            last = time.monotonic()
            for link in self._links.values():
                self._silence_s[link.peer] += awake_s
            found = [self._listen(self._links[one]) for one in ready if one in self._links]
            deaths = [death for death in found if death is not None]
            if deaths:
                # A neighbour's report of a death has more information than the end of its link.
                return min(deaths, key=lambda death: death.why == _DIED)
            for peer in (link.peer for link in self._links.values()):
                if self._silence_s[peer] > self._timeout_s:
                    return _Death(peer, _SILENT, self._silence_s[peer])
            self._ask_where_others_are(last)
            if self._last_word is not None:
                return None
            if _main_thread_failed():
                logger.error("the main thread has ended by an exception: announcing it to the other ranks")
                self._last_word = _Death(self._index, _GAVE_UP).pack()
                return None

    def _listen(self, link: Link) -> _Death | None:
        """Receives and handles a neighbour's messages. Returns a death that they report or show."""
        there = link.read()
        while (first := link.peek(1)) is not None:
            self._silence_s[link.peer] = 0.0
            if first == _BEAT:
                link.take(1)
                continue
            if (head := link.peek(_MESSAGE.size)) is None:
                break
            kind, why, size, index, silence_ms = _MESSAGE.unpack(head)
            if kind == _BYE:
                self._forget(link)
                return None
            if kind not in (_DEAD, _ASK, _HERE) or size > _MOST_BYTES:
                return _Death(link.peer, _GARBLED)
            if (message := link.take(_MESSAGE.size + size)) is None:
                break
            text = "".join(filter(str.isprintable, message[_MESSAGE.size :].decode(errors="replace")))
            if kind == _HERE:
                self._answers[link.peer] = text, bool(why)
            elif kind == _ASK:
                self._answer(link)
            elif index >= len(self._names) or not _DIED <= why <= _GARBLED:
                return _Death(link.peer, _GARBLED)
            else:
                return _Death(index, why, silence_ms / 1000, text)
        return None if there else _Death(link.peer, _DIED)

    def _ask_where_others_are(self, now: float) -> None:
        """Asks the neighbours for their places, once per long wait of the main thread.

        Questions and answers go over the same links as the heartbeats. A heartbeat could come between two
        parts of a message only if the connection is full: if the neighbour hasn't read for hours.
        """
        place, waited_s = self._activity.place, self._activity.waited_s
        if waited_s < WAIT_S:
            self._asked_at = None
        elif self._asked_at is None and place != self._asked:
            self._asked_at, self._asked = now, place
            self._answers.clear()
            self._send_to_all(_MESSAGE.pack(_ASK, 0, 0, self._index, 0))
        elif self._asked_at is not None and (
            len(self._answers) >= len(self._links) or now - self._asked_at > _ANSWER_S
        ):
            self._asked_at = None
            self._say_where_others_are(place, waited_s)

    def _answer(self, link: Link) -> None:
        text = self._activity.place.encode()[:_MOST_BYTES]
        link.send(_MESSAGE.pack(_HERE, self._activity.waited_s > 0, len(text), self._index, 0) + text)

    def _say_where_others_are(self, place: str, waited_s: float) -> None:
        """Logs the neighbours at other places than this worker.

        Leaves out a neighbour that another waiting worker of a lower index will log.
        """
        waiting = {peer for peer, (_, waits) in self._answers.items() if waits}
        elsewhere: dict[str, list[int]] = {}
        for peer in sorted(link.peer for link in self._links.values()):
            there, _ = self._answers.get(
                peer, ("in a call that keeps Python's interpreter, or stopped", False)
            )
            lower = {one for one in (peer, *neighbours(peer, len(self._names))) if one < self._index}
            if there != place and not lower & waiting:
                elsewhere.setdefault(there, []).append(peer)
        if elsewhere:
            logger.warning(
                "%s has waited for %.0f s %s, and %s: all ranks make the same calls in every step",
                listed([self._rank(self._index)]),
                waited_s,
                place,
                ", ".join(
                    f"{listed(list(map(self._rank, peers)))} {'is' if len(peers) == 1 else 'are'} {there}"
                    for there, peers in elsewhere.items()
                ),
            )

    def _rank(self, index: int) -> int:
        """The rank in the name of a worker: `rank 2 (host a, pid 7)` -> 2."""
        return int(self._names[index].split()[1])

    def _forget(self, link: Link) -> None:
        """Closes a link. The beats are stopped before: its descriptor's number may be reused."""
        self._beats.stop()
        self._poll.unregister(link)
        del self._links[link.fileno()]
        link.close()
        self._beats = Beats(list(self._links), self._beat_s, _BEAT)

    def _send_to_all(self, message: bytes) -> None:
        for link in self._links.values():
            link.send(message)

    def _await_hang_ups(self) -> None:
        """Waits until the neighbours have closed their links.

        If this end were closed with unread heartbeats, the kernel would reset the connection, and the last
        message could be lost.
        """
        deadline = time.monotonic() + _GOODBYE_S
        poll = select.poll()
        for descriptor, link in self._links.items():
            link.finish()
            poll.register(descriptor, select.POLLIN)
        waiting = dict(self._links)
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(math.ceil(left_s * 1000)):
                if not waiting[descriptor].read():
                    poll.unregister(descriptor)
                    del waiting[descriptor]

    def _another_rank_reports(self, death: _Death) -> bool:
        """Whether another rank logs a death at length, so that this rank logs it briefly.

        The lowest neighbour of the dead worker does. A worker that gave up has logged its error itself. After
        a silence every rank logs it at length: that neighbour may be cut off as well.
        """
        if death.why in (_SILENT, _GAVE_UP):
            return death.why == _GAVE_UP
        return death.index != self._index != min(neighbours(death.index, len(self._names)))

    def _verdict(self, death: _Death) -> str:
        name = self._names[death.index]
        if death.index == self._index:
            return f"the other ranks count this rank as lost: {death.described(name)}"
        return death.described(name)


def end_process(why: str, *, briefly: bool = False, own: Failure | None = None) -> None:
    """Ends this process after a report and `GRACE_S`, unless its main thread ends it first. Does not return.

    Args:
        why: the reason, for the log and for torchrun's summary of failures.
        briefly: whether another rank logs the reason at length.
        own: an earlier error of this rank, which caused the end of the other ranks; it is reported, and has
            the exit code.
    """
    grace_ends_at = time.monotonic() + (BRIEF_GRACE_S if replacement.is_due() else GRACE_S)
    report_within(REPORT_S, partial(_report, why, briefly) if own is None else partial(_report_own, own, why))
    time.sleep(max(0.0, grace_ends_at - time.monotonic()))
    error_file.wait_while_written()
    report_within(REPORT_S, flush)  # what the main thread has written meanwhile
    os._exit(EXIT_UNDECIDED if own is None else own.code)


def report_within(timeout_s: float, report: Callable[[], None]) -> None:
    """Calls a function in a thread, since logging may block, on a pipe or on a lock of the main thread.

    Args:
        timeout_s: longest wait for the function, in seconds.
        report: the function.
    """
    reporter = threading.Thread(target=report, daemon=True)
    try:
        reporter.start()
    except RuntimeError:  # no more threads: the interpreter is ending
        report()
    else:
        reporter.join(timeout_s)


def _report(why: str, briefly: bool) -> None:
    what_next = "this process ends as well"
    if not briefly and replacement.is_due():
        what_next = "replacing this process; the job goes on from its arenas"
    elif not briefly and error_file.is_last_attempt():
        what_next += ": launch the job again, it goes on from its arenas"
    elif not briefly:
        what_next = "ending this process so that torchrun restarts the job from its arenas"
    text = f"PeerFailure: {why}; {what_next}"
    error_file.write(text, f"{text}\nThe main thread was here:\n{_main_stack()}", later=True)
    if last_exception() is not None or not claim_last_line():  # the main thread logs it
        logger.debug(text)
    elif briefly:
        logger.warning("%s; this rank ends as well", why)
    else:
        logger.critical(text)
    say_last_words()


def _report_own(own: Failure, why: str) -> None:
    """Reports the error that ended a step of this rank, while its script has not ended yet."""
    error_file.write(
        own.text, f"{own.stack}\nThe main thread was here:\n{_main_stack()}", later=False, at=own.at
    )
    if last_exception() is None and claim_last_line():  # else the main thread has logged it
        logger.critical(
            "a step of this rank failed by %s, and the other ranks end by that (%s), but the script has not "
            "ended yet; ending it with code %d. The error was:\n%s",
            own.text,
            why,
            own.code,
            own.stack.rstrip(),
        )
    say_last_words()


def _main_stack() -> str:
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames.get(threading.main_thread().ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame))


_last_line = threading.Lock()  # taken by the thread that logs why this process ends


def claim_last_line() -> bool:
    """Whether the caller has to log why this process ends: True for the first call in the process."""
    return _last_line.acquire(blocking=False)


def last_exception() -> BaseException | None:
    """The exception that ended the main thread, if any."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _main_thread_failed() -> bool:
    """Whether an exception has ended the main thread, while other threads keep the process alive."""
    return not threading.main_thread().is_alive() and last_exception() is not None


_CODE: Final = """
define ptr @beats(ptr %plan) {{
entry:
  %every.at = getelementptr i32, ptr %plan, i64 2
  %count.at = getelementptr i32, ptr %plan, i64 3
  %beat = getelementptr i32, ptr %plan, i64 4
  %every = load i32, ptr %every.at
  %count = load i32, ptr %count.at
  br label %round
round:
  br label %each
each:
  %i = phi i32 [ 0, %round ], [ %following, %send ]
  %more = icmp slt i32 %i, %count
  br i1 %more, label %send, label %rest
send:
  %place = add i32 %i, 5
  %descriptor.at = getelementptr i32, ptr %plan, i32 %place
  %descriptor = load i32, ptr %descriptor.at
  %sent = call i64 inttoptr (i64 {send} to ptr)(i32 %descriptor, ptr %beat, i64 1, i32 {flags})
  %following = add i32 %i, 1
  br label %each
rest:
  %ready = call i32 inttoptr (i64 {poll} to ptr)(ptr %plan, i64 1, i32 %every)
  %over = icmp sgt i32 %ready, 0
  br i1 %over, label %end, label %round
end:
  ret ptr null
}}
"""
"""plan: int32 numbers: a struct pollfd whose event ends the thread; ms between beats; number of descriptors;
the beat's byte; the descriptors."""


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    thread, pointer = ctypes.c_ulong, ctypes.c_void_p
    library.pthread_create.argtypes = [ctypes.POINTER(thread), pointer, pointer, pointer]
    library.pthread_join.argtypes = [thread, pointer]
    return library


@functools.cache
def beat_loop() -> int:
    """The address of the compiled function that the thread runs."""
    flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
    return assembled(_CODE, "beats", ("send", "poll"), flags=flags)


class Beats:
    """Sends a byte to each of some sockets, at once and then regularly until `stop`, from its own thread.

    Args:
        descriptors: descriptors of connected sockets, which stay open until `stop` returns. If a socket's
            buffer is full, the byte is dropped.
        every_s: seconds between two beats.
        beat: one byte.

    Raises:
        OSError: the thread can't be started.
    """

    def __init__(self, descriptors: Sequence[int], every_s: float, beat: bytes) -> None:
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._pid = os.getpid()
        every_ms = max(1, round(every_s * 1000))
        plan = [self._end, 1, every_ms, len(descriptors), 0, *descriptors]  # 1: POLLIN
        self._plan: Any = (ctypes.c_int32 * len(plan))(*plan)
        ctypes.memmove(ctypes.addressof(self._plan) + 4 * 4, beat, 1)
        self._thread = ctypes.c_ulong()
        with without_signals():  # the thread inherits the mask: only Python's threads may handle signals
            error = _library().pthread_create(ctypes.byref(self._thread), None, beat_loop(), self._plan)
        if error:
            os.close(self._end)
            self._end = -1
            raise OSError(error, os.strerror(error))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._plan))  # the interpreter may end before the thread

    def stop(self) -> None:
        """Ends the thread, and returns after its last beat. May be called twice.

        Does nothing in a forked child, which lacks the thread.
        """
        if self._end < 0 or os.getpid() != self._pid:
            return
        os.eventfd_write(self._end, 1)
        _library().pthread_join(self._thread, None)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._plan))
        os.close(self._end)
        self._end = -1


_calls: list[Callable[[], None]] = []


def before_hard_exit(call: Callable[[], None]) -> None:
    """Has a function called before each hard exit of this process, in any thread."""
    _calls.append(call)


def forget(call: Callable[[], None]) -> None:
    """Undoes `before_hard_exit`; does nothing for an unknown function."""
    if call in _calls:
        _calls.remove(call)


def say_last_words() -> None:
    """Calls the functions of `before_hard_exit`, and flushes the standard streams.

    Called by the thread that is about to call `os._exit`.
    """
    for call in tuple(_calls):
        call()
    flush()


def flush() -> None:
    """Flushes the standard streams, which `os._exit` doesn't."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a closed pipe, a closed stream, no stream
            stream.flush()
