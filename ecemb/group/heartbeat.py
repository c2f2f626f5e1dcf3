"""Beats: bytes that a process sends regularly while it runs, even while the interpreter's lock is held.

Owns one thread that Python does not know of: a loop of machine code, started by the C library's
pthread_create. A call that keeps the interpreter's lock for minutes (an extension that compiles, sorts or
copies) stops every thread of Python's, but not this thread. The thread stops when the process dies or is
stopped.

Must not know: the receivers of beats, and their deadlines.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
from collections.abc import Sequence
from typing import Any, Final

from ..kernels.llvm import assembled
from ..kernels.threads import without_signals

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
"""plan: a struct pollfd that ends the thread; ms between beats; their number; the beat; the descriptors."""


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    thread, pointer = ctypes.c_ulong, ctypes.c_void_p
    library.pthread_create.argtypes = [ctypes.POINTER(thread), pointer, pointer, pointer]
    library.pthread_join.argtypes = [thread, pointer]
    return library


@functools.cache
def _code() -> int:
    """The address of the thread's code."""
    flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
    return assembled(_CODE, "beats", ("send", "poll"), flags=flags)


class Beats:
    """Sends a byte to each of some sockets, at once and then regularly, until `stop`.

    Args:
        descriptors: of connected sockets, which stay open until `stop` returns. A byte that a socket can't
            take is left out.
        every_s: seconds between two beats.
        beat: one byte.

    Raises:
        OSError: no thread can be started.
    """

    def __init__(self, descriptors: Sequence[int], every_s: float, beat: bytes) -> None:
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._pid = os.getpid()
        every_ms = max(1, round(every_s * 1000))
        plan = [self._end, 1, every_ms, len(descriptors), 0, *descriptors]  # 1: POLLIN
        self._plan: Any = (ctypes.c_int32 * len(plan))(*plan)
        ctypes.memmove(ctypes.addressof(self._plan) + 4 * 4, beat, 1)
        self._thread = ctypes.c_ulong()
        with without_signals():  # the thread inherits this: they are for Python's threads alone
            error = _library().pthread_create(ctypes.byref(self._thread), None, _code(), self._plan)
        if error:
            os.close(self._end)
            self._end = -1
            raise OSError(error, os.strerror(error))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._plan))  # the interpreter may end before the thread

    def stop(self) -> None:
        """Ends the beats before it returns. May be called twice, and in a forked child, which sends none."""
        if self._end < 0 or os.getpid() != self._pid:
            return
        os.eventfd_write(self._end, 1)
        _library().pthread_join(self._thread, None)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._plan))
        os.close(self._end)
        self._end = -1
