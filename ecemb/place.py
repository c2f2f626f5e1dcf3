"""`ecemb.run`: a training that is called again in the same process after another worker's death.

Owns what this process keeps between two calls (`Place`), the decision whether an error follows from a death,
and the way back: all that belongs to the session ends, and random generators are set as they were.
`net.staying` has the limit of its time; docs/protocol.md, 3.6 says why a start in the same process is right.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import session
from .engines import torchrec
from .errors import ConfigurationError, UsageError
from .guard import Guard
from .net import staying
from .net.error_file import cause_of, is_lost_connection
from .net.staying import Stay
from .net.watch import FailureDetector, end_process
from .net.worker_exit import NEWS_S, hook
from .state import ddp_buckets
from .state.rank_state import cuda_states, process_states, set_cuda_states, set_process_states

logger: logging.Logger = logging.getLogger("ecemb")

T = TypeVar("T")


class Place:
    """What a process keeps while `ecemb.run` calls its training again; made by `run`.

    Attributes:
        calls: number of calls of the training in this process, the present one included.
    """

    def __init__(self) -> None:
        self.calls: int = 0
        self._kept: dict[str, tuple[Any, _Generators]] = {}

    def keep(self, name: str, build: Callable[[], T]) -> T:
        """Returns what `build` has built under this name in this process; calls it the first time.

        For objects that are dear to build: a model with tables of `ecemb.nn`, optimizers, schedules,
        datasets. Of their state, `ecemb.protect` restores what it restores in a new process: tables, dense
        parameters and buffers, the optimizers' state, `state=`. All other state stays as it is: keep no
        object with such state. Gradients are cleared. Afterwards the global random generators are as
        `build` has left them, whether it was called or not.

        Args:
            name: any string.
            build: called without arguments, once in a process. It calls no collective: a replacement calls
                it alone.

        Returns:
            The object.

        Raises:
            ConfigurationError: it contains process groups, which end with the session: a module wrapped in
                DistributedDataParallel or sharded by TorchRec, or a table with `group=`. Or it is a guard.
        """
        if name in self._kept:
            built, generators = self._kept[name]
            generators.restore()
            return built
        built = build()
        _check(name, built)
        self._kept[name] = built, _Generators()
        return built


class _Generators:
    """The states of the global generators of torch, its devices, numpy and python, as they are now."""

    def __init__(self) -> None:
        self._states, self._on_devices = process_states(), cuda_states()

    def restore(self) -> None:
        """Sets the generators to these states."""
        set_process_states(self._states)
        if self._on_devices:
            set_cuda_states(*self._on_devices)


def run(train: Callable[[Place], T]) -> T:
    """Calls `train`, and again in this process when another worker has died. All ranks.

        def train(place):
            ecemb.init_process_group("gloo", job="ctr")
            model, optimizers = place.keep("model", build)
            guard = ecemb.protect(model, optimizers=optimizers, code=ecemb.Code(n=4, k=3))
            for step in guard.steps(total):
                with step:
                    ...
            guard.close()

        ecemb.run(train)

    Under `ecemb-run`, a worker's process that a signal kills is replaced, and the other workers' processes
    stay: their main threads leave `train` by an error, such as `PeerFailure` or torch.distributed's,
    connections and process groups end, and `train` is called again. Its start is that of a new process: all
    ranks meet, and recover from their memory. What `place` keeps, imports, compiled code and a device's
    context are still there. A process whose main thread is not back within 2 s ends, and is replaced as
    without `run`: it may be in a long call, or the script may have caught the error.

    All else is as without `run`: torchrun restarts all processes after an error of the script, after the
    silence of a host, and under plain torchrun after each failure. An error of `train` is raised.

    The global random generators are at each call as at the first one. Variables of modules are not: `train`
    must not depend on what an earlier call has left there, and calls the same collectives each time. It
    builds modules with process groups again: DistributedDataParallel, which may wrap a module that is kept,
    and what TorchRec shards.

    Args:
        train: begins with `ecemb.init_process_group`.

    Returns:
        What `train` returns.

    Raises:
        UsageError: the script has called `ecemb.init_process_group` before, or `run` is running.
        Exception: the error of `train`.
    """
    if staying.current() is not None:
        raise UsageError("ecemb.run() is running already: call it once, around the whole training")
    if session.is_begun() or dist.is_initialized():
        raise UsageError(
            "torch.distributed is initialised already, and outside of ecemb.run() it would not end with the "
            "session: call ecemb.init_process_group() in the function that ecemb.run() calls"
        )
    stay, place, generators, oldest = Stay(), Place(), _Generators(), _oldest_graph()
    staying.use(stay)
    try:
        while True:
            place.calls += 1
            try:
                result = train(place)
            except Exception as error:
                if (watch := _stays(error)) is None:
                    raise
                _come_back(stay, watch, oldest, error)
            else:
                if (watch := _stays(None)) is None:
                    return result
                del result
                _come_back(stay, watch, oldest, None)
            generators.restore()
    finally:
        stay.release()
        staying.use(None)


def _stays(error: Exception | None) -> FailureDetector | None:
    """The failure detector that has seen a worker's death for which this process stays; else None.

    Args:
        error: the error with which the training has ended; None if it has returned. Each error counts as a
            consequence of a death that is known, as in `net.worker_exit`.
    """
    watch = hook.watch
    if watch is not None and error is not None and (cause_of(error) is not None or is_lost_connection(error)):
        watch.news(NEWS_S)
    return watch if watch is not None and watch.stays else None


def _oldest_graph() -> Tensor:
    """A scalar with a graph of autograd, older than all others of this thread."""
    with torch.enable_grad():
        return torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True) * 1


def _come_back(stay: Stay, watch: FailureDetector, oldest: Tensor, error: Exception | None) -> None:
    """Ends the session. If that fails, or takes too long, the process ends, and is replaced.

    Args:
        stay: how this process stays.
        watch: the session's failure detector.
        oldest: of `_oldest_graph`.
        error: the error with which the training has ended, if it has.
    """
    try:
        stay.end_session()  # before the frames are dropped: an arena that nothing refers to is never closed
        torchrec.forget_session()
        _end_threads(watch)
        if error is not None:
            _forget(error)
        # A backward that was cut off leaves tasks in this thread's queue, and they refer to the tables. The
        # next one drops them, but only those of operations that came after its own.
        oldest.backward(retain_graph=True)
        gc.collect()  # what the frames of `train` held, and destructors that end threads and connections
        if made := ddp_buckets.alive():
            raise UsageError(
                f"{len(made)} modules of DistributedDataParallel, of an earlier call of the training, are "
                f"still referred to, and their process groups have ended: keep them in its local variables"
            )
        may_stay = True
    except BaseException as failed:  # noqa: BLE001 - a new process has nothing left of this one
        logger.error(
            "this process can't stay, and is replaced: %s", "".join(traceback.format_exception(failed))
        )
        may_stay = False
    if not (may_stay and stay.is_back()):
        end_process("this process has not come back from another rank's death", briefly=True)
    watch.join()
    stay.begin_session(time.monotonic())


def _end_threads(watch: FailureDetector) -> None:
    """Waits for ecemb's threads, whose connections have ended; the failure detector has the deadline."""
    for thread in threading.enumerate():
        if thread.name.startswith("ecemb-") and not watch.owns(thread):
            thread.join()


def _forget(error: BaseException) -> None:
    """Drops the frames of an error and of its causes, and all that their variables refer to."""
    left, known = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) in known:
            continue
        known.add(id(one))
        left += [other for other in (one.__cause__, one.__context__) if other is not None]
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def _check(name: str, built: object) -> None:
    """Raises ConfigurationError if an object has parts that end with the session."""
    for one in _items(built):
        if isinstance(one, Guard):
            raise ConfigurationError(
                f"place.keep({name!r}) got a guard, which ends with the session: call ecemb.protect() in "
                f"each call of the training"
            )
        for path, module in one.named_modules() if isinstance(one, nn.Module) else ():
            if (what := _of_a_group(module)) is not None:
                at = f"module {path!r} of it" if path else "it"
                raise ConfigurationError(
                    f"place.keep({name!r}) can't keep its object: {at} ({type(module).__name__}) {what}, "
                    f"and process groups end with the session. Build it again in each call of the training"
                )


def _of_a_group(module: nn.Module) -> str | None:
    """Why a module belongs to a process group; None if it doesn't."""
    if isinstance(module, DistributedDataParallel):
        return "uses a process group"
    kinds = [kind.__module__ for kind in type(module).__mro__]
    if any(one == "torchrec" or one.startswith(("torchrec.", "torch.distributed.")) for one in kinds):
        return "is or will be sharded over a process group"
    if any(isinstance(value, dist.ProcessGroup) for value in vars(module).values()):
        return "has a process group of its own"
    return None


def _items(built: object) -> Iterator[object]:
    """The object, and objects in lists, tuples and mappings of it."""
    yield built
    parts = (
        built.values() if isinstance(built, Mapping) else built if isinstance(built, (list, tuple)) else ()
    )
    for one in parts:  # pyright: ignore[reportUnknownVariableType]
        yield from _items(one)  # pyright: ignore[reportUnknownArgumentType]
