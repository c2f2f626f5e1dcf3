"""The forked process: its setup before it runs a script, and the run.

Owns every property by which a process forked from a server could differ from one that the interpreter
started: descriptors, environment, folder, signals, its own limits, streams, seeds, what Python's library has
noted of the process, `__main__`. The fork server's own stack is left before the script begins, and no frame
of ecemb's is in its tracebacks.
"""

from __future__ import annotations

import builtins
import fcntl
import importlib
import io
import logging
import mmap
import os
import random
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from typing import Any, NamedTuple

from ..net import processes, replacement


def become(
    request: Mapping[str, Any],
    sent: Sequence[int],
    server: int,
    changed: Mapping[str, str | None],
    torch_seed: int | None,
    page: mmap.mmap | None,
) -> None:
    """Turns a process that was just forked, with all signals blocked, into the requested worker.

    Args:
        request: as `stub` sends it.
        sent: the descriptors that came with it: the folder's, and those that it names. They are closed.
        server: id of the process that this one was forked from; its own descriptors are closed already.
        changed: environment variables that imports have set, or removed (None), as they would have done here.
        torch_seed: the random seed with which torch was imported; None if it was not.
        page: of `replacement`, shared with the server; None if the worker may not be replaced.
    """
    os.setsid()
    if not processes.die_with_parent(server):
        os._exit(1)
    _take_signals(request["ignored"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _take_descriptors(request["descriptors"], *sent)
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["processors"])
    _open_streams(unbuffered=request["unbuffered"])
    replacement.begin(page, int(request["replaced"]))
    _seed_anew(torch_seed)
    _renew_library()
    processes.show_command(request["command_line"])
    sys.orig_argv[:] = request["command_line"]
    if request["script_folder"] is not None:
        sys.path.insert(0, request["script_folder"])
    importlib.invalidate_caches()
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _take_signals(ignored: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        if number in ignored or number in (signal.SIGPIPE, signal.SIGXFSZ):  # the latter by Python itself
            action: Any = signal.SIG_IGN
        else:
            action = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        if signal.getsignal(number) is not action and signal.getsignal(number) is not None:
            signal.signal(number, action)


def _take_descriptors(numbers: Sequence[int], folder: int, *descriptors: int) -> None:
    try:
        os.fchdir(folder)
    finally:
        os.close(folder)
    # First move descriptors away: a wanted number may still belong to another descriptor.
    above = 1 + max([*numbers, *descriptors, 2])
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for number in {0, 1, 2} - set(numbers):
        os.close(number)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)


def _open_streams(*, unbuffered: bool) -> None:
    """Makes the standard streams for the present descriptors, as the interpreter would.

    Log handlers that imports have made on a stream of the server continue with the stream in its place.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        stream = _stream(descriptor, name, before, unbuffered=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
        for reference in logging._handlerList:  # pyright: ignore
            handler: Any = reference()
            if getattr(handler, "stream", None) is before:
                handler.stream = stream


def _stream(descriptor: int, name: str, like: Any, *, unbuffered: bool) -> Any:
    try:
        os.fstat(descriptor)
    except OSError:
        return None
    writes = name != "stdin"
    mode, buffering = ("wb", 0 if unbuffered else -1) if writes else ("rb", -1)
    buffer: Any = open(descriptor, mode, buffering, closefd=False)  # noqa: SIM115
    raw = buffer if writes and unbuffered else buffer.raw
    raw.name = f"<{name}>"
    stream: Any = io.TextIOWrapper(
        buffer,
        encoding=like.encoding,
        errors=like.errors,
        newline="\n" if writes else None,
        line_buffering=not unbuffered and (raw.isatty() or name == "stderr"),
        write_through=unbuffered,
    )
    stream.mode = mode[0]
    return stream


def _seed_anew(torch_seed: int | None) -> None:
    """Seeds randomly each generator that starts with a random seed; a seed that imports gave torch stays."""
    random.seed()  # every fork does so, unless an import has changed that
    modules = sys.modules
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    if torch_seed is not None and modules["torch"].initial_seed() == torch_seed:
        modules["torch"].default_generator.seed()  # not torch.seed(), which seeds devices as well
    if "multiprocessing.process" in modules:
        process: Any = modules["multiprocessing.process"]
        process.ORIGINAL_DIR = os.getcwd()
        process.current_process().authkey = os.urandom(32)


def _renew_library() -> None:
    """Replaces values that Python's library has kept of the server's process since its import."""
    main_thread: Any = threading.main_thread()
    main_thread._set_native_id()  # os.fork() renews it from Python 3.12 on
    module: Any = logging
    module._startTime = time.time_ns() if isinstance(module._startTime, int) else time.time()


class Work(NamedTuple):
    """A script to run as `__main__`.

    Attributes:
        target: its path, or a module's name.
        arguments: the words after its name.
        is_module: whether `target` is a module's name.
    """

    target: str
    arguments: Sequence[str]
    is_module: bool

    def __call__(self) -> None:
        """Runs it; the interpreter ends as it would after a plain start once the caller returns or raises.

        Raises:
            SystemExit: the script's own, or 1 after it has raised.
            KeyboardInterrupt: after the script's own was shown, so that the signal ends this process.
        """
        processes.script_began = time.monotonic()
        try:
            self._run()
            return
        except SystemExit:
            raise
        except BaseException as raised:  # noqa: BLE001 - shown as the interpreter shows it
            error = raised
        _show(error)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None
            raise KeyboardInterrupt
        raise SystemExit(1)

    def _run(self) -> None:
        main = types.ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, __annotations__={})
        sys.modules["__main__"] = main
        if self.is_module:
            sys.argv[:] = ["-m", *self.arguments]
            runpy._run_module_as_main(self.target)  # pyright: ignore[reportAttributeAccessIssue]
            return
        sys.argv[:] = [self.target, *self.arguments]
        path = os.path.abspath(self.target)
        if is_importable(path):  # a folder or an archive, with __main__.py in it
            runpy._run_module_as_main("__main__", False)  # pyright: ignore[reportAttributeAccessIssue]
            return
        loader = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
        main.__dict__.update(__file__=path, __cached__=None, __loader__=loader("__main__", path))
        if loader is SourcelessFileLoader:
            code: Any = loader("__main__", path).get_code("__main__")
        else:
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def is_importable(path: str) -> bool:
    """Whether modules can be imported from a path: then python runs its `__main__`."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def _show(error: BaseException) -> None:
    """Shows a script's error as the interpreter would, without ecemb's frames."""
    trace = error.__traceback__ = _without_ours(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException as other:  # noqa: BLE001 - as the interpreter does
        print("Error in sys.excepthook:", file=sys.stderr)
        other.__traceback__ = _without_ours(other)
        sys.__excepthook__(type(other), other, other.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)


def _without_ours(error: BaseException) -> types.TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
