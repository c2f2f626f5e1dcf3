"""One rank of a rehearsal: runs the script, records what each step leaves, and dies where it is to.

Owns the digests of a training's state, and the changes to `init_process_group`, `protect` and the guard that
make a run of the script one of a rehearsal: a job of its own, a host for each rank, no checkpoints, an end.
`rehearse` starts the ranks, and compares their records.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import logging
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from .. import guard as guards
from .. import session as sessions
from ..engines.discover import optimizers_of
from ..start.survey import buffers_of, is_of_the_script, reachable
from ..state.metric_states import is_metric, states_of
from ..state.rank_state import objects_of
from .rehearse import BEGIN, END, KINDS, Run, kind_of

_JOB_CHARACTERS = 40  # of the script's job and host that a rehearsal's keep
_FROM_CHECKPOINTS = "resume", "resume_required", "renamed"
_OF_AUTO = "mtbf", "max_replay"
_MOST_LINES = 5000  # after which no line is looked for any more


class Ended(BaseException):
    """Ends the script when all steps of a rehearsal are done."""


class _Rank:
    """This process's part of a run.

    Args:
        folder: The run's, for all ranks.
        run: What to do.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder, self._run = folder, run
        self._losses = hashlib.blake2b(digest_size=8)
        self._records: TextIO | None = None
        self._place = 0  # of the last record
        self._arguments: dict[str, Any] = {}

    def install(self) -> None:
        """Replaces functions of ecemb and torch.autograd.backward, before the script runs."""
        logging.getLogger("ecemb").addHandler(_Warnings(self._folder))
        package = sys.modules["ecemb"]  # which may have the functions already
        join, protect = self._joining(sessions.init_process_group), self._protecting(guards.protect)
        for home, name, function in (
            (sessions, "init_process_group", join),
            (package, "init_process_group", join),
            (guards, "protect", protect),
            (package, "protect", protect),
            (guards.Guard, "_run", self._stepping(vars(guards.Guard)["_run"])),
            (guards.Guard, "save", lambda *_, **__: None),
            (torch.autograd, "backward", self._backward(torch.autograd.backward)),
        ):
            setattr(home, name, function)

    def _joining(self, join: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(join)
        def rehearsed(*arguments: Any, job: str, host: str | None = None, **options: Any) -> None:
            name = f"{job[:_JOB_CHARACTERS]}.{self._run.name}"
            where = {"job": name, "arena_dir": str(options.get("arena_dir", "/dev/shm"))}
            (self._folder / "job.json").write_text(json.dumps(where))
            own = f"{(host or socket.gethostname())[:_JOB_CHARACTERS]}-{os.environ.get('RANK', '0')}"
            join(*arguments, job=name, host=own, **options)

        return rehearsed

    def _protecting(self, protect: Callable[..., guards.Guard]) -> Callable[..., guards.Guard]:
        signature = inspect.signature(protect)

        @functools.wraps(protect)
        def rehearsed(*arguments: Any, **options: Any) -> guards.Guard:
            for name in _FROM_CHECKPOINTS:  # a rehearsal begins at step 0
                options.pop(name, None)
            if self._run.window is not None:
                for name in _OF_AUTO:
                    options.pop(name, None)
                options["window"] = self._run.window
            self._arguments = signature.bind(*arguments, **options).arguments
            guard = protect(*arguments, **options)
            self._losses = hashlib.blake2b(digest_size=8)  # a restart differentiates something of its own
            if guard.stats()["next_step"] == 0:  # guard.next_step would note that it was read
                self._record(-1, END, inspect.currentframe())
            return guard

        return rehearsed

    def _stepping(self, run: Callable[[guards.Guard, Any], Any]) -> Callable[[guards.Guard, Any], Any]:
        @contextlib.contextmanager
        def rehearsed(guard: guards.Guard, step: Any) -> Generator[None]:
            script, number = inspect.currentframe(), guard.stats()["next_step"]
            with run(guard, step):
                self._die_at(number, BEGIN)
                self._record(number, BEGIN, script)
                try:
                    yield
                except StopIteration:  # the step has not begun
                    self._forget()
                    raise
                self._die_at(number, END)
            self._record(number, END, script)
            if number + 1 >= self._run.steps:
                guard.close()
                raise Ended

        return rehearsed

    def _backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def noted(tensors: Any, *arguments: Any, **options: Any) -> None:
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                self._losses.update(_bytes_of(tensor))
            backward(tensors, *arguments, **options)

        return noted

    def _record(self, number: int, when: str, frame: FrameType | None) -> None:
        sys.settrace(None)
        if self._records is None:
            self._records = open(self._folder / f"rank-{dist.get_rank()}.jsonl", "a")  # noqa: SIM115
        state = digests(self._arguments, reachable(frame))
        if when == END:
            state["loss"] = self._losses.hexdigest()
            self._losses = hashlib.blake2b(digest_size=8)
        self._place = self._records.tell()
        self._records.write(json.dumps([number, when, state]) + "\n")
        self._records.flush()
        wanted = self._run.line
        if wanted is not None and (number + 1, when, dist.get_rank()) == (wanted.step, END, wanted.rank):
            _Lines(self._folder / "line", lambda: self._digest(wanted.name), state.get(wanted.name)).begin()

    def _forget(self) -> None:
        """Takes the last record back."""
        if self._records is not None:
            self._records.truncate(self._place)
            self._records.seek(self._place)

    def _digest(self, name: str) -> str | None:
        objects = reachable(inspect.currentframe()) if kind_of(name) == "object" else []
        return digests(self._arguments, objects, kind_of(name)).get(name)

    def _die_at(self, number: int, when: str) -> None:
        for i, death in enumerate(self._run.deaths):
            if (death.step, death.when, death.rank) != (number, when, dist.get_rank()):
                continue
            with contextlib.suppress(FileExistsError):
                (self._folder / f"death-{i}").touch(exist_ok=False)
                if death.memory:
                    shutil.rmtree(sessions.current().directory.path)
                os.kill(os.getpid(), signal.SIGKILL)


class _Warnings(logging.Handler):
    """Appends ecemb's warnings to a file of the run's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = folder / "warnings"

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            with open(self._path, "a") as file:
                file.write(record.getMessage() + "\n")


class _Lines:
    """Traces the script's lines until one changes a value, and writes its place to a file.

    Args:
        path: The file.
        digest: The value's digest now.
        before: The value's digest before the first line.
    """

    def __init__(self, path: Path, digest: Callable[[], str | None], before: str | None) -> None:
        self._path, self._digest, self._before = path, digest, before
        self._left = _MOST_LINES
        self._last = ""

    def begin(self) -> None:
        """Begins to trace; `sys.settrace(None)` ends it."""
        frame = inspect.currentframe()
        while frame is not None:
            if is_of_the_script(frame.f_code.co_filename):
                frame.f_trace = self._trace
            frame = frame.f_back
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not is_of_the_script(frame.f_code.co_filename):
            return None
        if event != "line":
            return self._trace
        self._left -= 1
        if self._last and self._digest() != self._before:
            self._path.write_text(self._last)
            self._left = 0
        self._last = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
        if self._left <= 0:
            sys.settrace(None)
            return None
        return self._trace


def digests(
    arguments: Mapping[str, Any], objects: Sequence[tuple[str, object]], kind: str | None = None
) -> dict[str, str]:
    """Digests of a training's state now, by the names of its parts.

    Args:
        arguments: Of `protect`.
        objects: The script's, by name; those with a state_dict() count.
        kind: One of `KINDS`, for the parts of this kind only.

    Returns:
        Name of a tensor or value -> its digest.
    """
    model: nn.Module = arguments["model"]
    optimizers = optimizers_of(arguments.get("optimizers", ()))
    state = objects_of(arguments.get("state"))
    known = {id(one) for one in (*model.modules(), *optimizers, *state.values())}
    found: dict[str, Callable[[], Any]] = {
        "model": lambda: {
            **{
                f"{path}.{name}".lstrip("."): buffer
                for path, module in model.named_modules()
                for name, buffer in buffers_of(module).items()
            },
            **model.state_dict(),
        },
        "optimizers": lambda: dict(enumerate(map(_state_of, optimizers))),
        "state": lambda: {key: _state_of(one) for key, one in state.items()},
        "generators": _generators,
        "object": lambda: {name: _state_of(one) for name, one in _with_state(objects, known)},
    }
    return dict(_flat("", {name: found[name]() for name in KINDS if name in found and kind in (None, name)}))


def _with_state(objects: Sequence[tuple[str, object]], known: set[int]) -> Iterator[tuple[str, object]]:
    """The objects that count; of a module and its submodules, the module."""
    for name, one in objects:
        if _has_state(one, known):
            yield name, one
            known.update(map(id, one.modules() if isinstance(one, nn.Module) else ()))


def _has_state(one: object, known: set[int]) -> bool:
    """Whether an object of the script counts: it has a state_dict(), and is no loader nor ecemb's."""
    kind = type(one)
    if id(one) in known or not hasattr(kind, "state_dict"):
        return False
    if hasattr(kind, "__iter__") and not isinstance(one, nn.Module):
        return False
    return not isinstance(one, torch.utils.data.DataLoader) and not kind.__module__.startswith("ecemb")


def _state_of(one: Any) -> dict[str, Any]:
    """An object's state_dict(), and a metric's states or the numbers and tensors in attributes."""
    attributes: dict[str, Any] = getattr(one, "__dict__", {})
    if is_metric(one):
        found = {name: getattr(one, name) for name in states_of(one)}
    elif type(one).__module__.partition(".")[0] in ("torch", "torchrec"):  # what they keep is in state_dict()
        found = {}
    else:
        found = {k: value for k, value in attributes.items() if type(value) in (int, float, torch.Tensor)}
    with contextlib.suppress(Exception):  # the script doesn't call it here, and it may not be able to
        found["state_dict()"] = one.state_dict()
    return found


def _generators() -> dict[str, Any]:
    _, words, *others = np.random.get_state()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": _hash(np.asarray(words).tobytes() + repr(others).encode()),
        "python": _hash(repr(random.getstate()).encode()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The leaves of a nested value, by name, as digests."""
    if hasattr(value, "local_shards"):
        for shard in value.local_shards():
            yield f"{name}, from row {shard.metadata.shard_offsets[0]}", _digest(shard.tensor)
    elif hasattr(value, "_local_tensor"):  # a DTensor, whose shards TorchRec wraps once more
        yield from _flat(name, value._local_tensor)
    elif isinstance(value, Mapping):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _flat(f"{name}.{key}" if name else str(key), item)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            yield from _flat(f"{name}[{i}]", item)
    elif isinstance(value, torch.Tensor):
        yield name, _digest(value)
    elif isinstance(value, np.ndarray):
        yield name, _digest(torch.as_tensor(value, device="cpu", dtype=None))
    elif type(value) in (bool, int, float, str, type(None)):
        yield name, repr(value)[:40]


def _digest(tensor: torch.Tensor) -> str:
    return f"{_hash(_bytes_of(tensor))} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.is_meta:  # as in modules that TorchRec has replaced: it has no values
        return b""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def main(words: Sequence[str]) -> None:
    """Runs a script as one rank of a rehearsal.

    Args:
        words: Folder of the run, path of the script, and the script's arguments.
    """
    folder, script, *arguments = words
    run = Run.from_json(json.loads((Path(folder) / "run.json").read_text()))
    _Rank(Path(folder), run).install()
    random.seed(0)  # unless the script does, so that its runs can be compared
    np.random.seed(0)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except Ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # not all that a script does at its end was done
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            _note(Path(folder), script, error)
        raise


def _note(folder: Path, script: str, error: BaseException) -> None:
    """Leaves the error and the script's line for `rehearse`."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    where = f"{script}, line {lines[-1]}: " if lines else ""
    path = folder / f"error-{os.environ.get('RANK', '0')}-{os.getpid()}"
    text = f"{where}{type(error).__name__}: {error}"
    path.write_text(json.dumps({"error": type(error).__name__, "text": text}))


if __name__ == "__main__":
    main(sys.argv[1:])
