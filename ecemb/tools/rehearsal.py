"""One rank of a rehearsal: runs the script, writes down what each step leaves, and dies where it is to.

Owns the digests of a training's state, and the changes to `init_process_group`, `protect` and the guard that
make a run of the script one of a rehearsal: a job of its own, a host for each rank, no checkpoints, an end.
`rehearse` starts the ranks, and compares what they wrote.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import ecemb

from .. import guard as guards
from .. import session as sessions
from ..start.survey import reachable
from ..state.rank_state import objects_of
from .rehearse import BEGIN, END, Run

_JOB_CHARACTERS = 40  # of the script's job that a rehearsal's keeps


class Ended(BaseException):
    """Ends the script when all steps of a rehearsal are done."""


class _Rank:
    """This process's part of a run.

    Args:
        folder: Of the run, for all ranks.
        run: What to do.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder, self._run = folder, run
        self._losses = hashlib.blake2b(digest_size=8)
        self._records: TextIO | None = None
        self._arguments: dict[str, Any] = {}

    def install(self) -> None:
        """Changes what the script gets from ecemb, and notes the values that it differentiates."""
        join, protect = sessions.init_process_group, guards.protect
        signature = inspect.signature(protect)

        @functools.wraps(join)
        def rehearsed_join(*arguments: Any, job: str, host: str | None = None, **options: Any) -> None:
            name = f"{job[:_JOB_CHARACTERS]}.{self._run.name}"
            where = {"job": name, "arena_dir": str(options.get("arena_dir", "/dev/shm"))}
            (self._folder / "job.json").write_text(json.dumps(where))
            own = f"{(host or socket.gethostname())[:40]}-{os.environ.get('RANK', '0')}"
            join(*arguments, job=name, host=own, **options)

        @functools.wraps(protect)
        def rehearsed_protect(*arguments: Any, **options: Any) -> Any:
            if self._run.window is not None:
                options["window"] = self._run.window
            self._arguments = signature.bind(*arguments, **options).arguments
            return protect(*arguments, **options)

        for home, name, replacement in (
            (sessions, "init_process_group", rehearsed_join),
            (guards, "protect", rehearsed_protect),
        ):
            setattr(home, name, replacement)
            setattr(ecemb, name, replacement)
        step = guards.Guard.step
        guards.Guard.step = self._stepping(step)  # pyright: ignore[reportAttributeAccessIssue]
        guards.Guard.save = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def noted(tensors: Any, *arguments: Any, **options: Any) -> None:
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                self._losses.update(_bytes_of(tensor))
            backward(tensors, *arguments, **options)

        torch.autograd.backward = noted

    def _stepping(self, step: Any) -> Any:
        @contextlib.contextmanager
        def rehearsed(guard: guards.Guard) -> Generator[Any]:
            script = inspect.currentframe()
            with step(guard) as one:
                self._record(one.number, BEGIN, script)
                self._die_at(one.number, BEGIN)
                yield one
                self._die_at(one.number, END)
            self._record(one.number, END, script)
            if one.number + 1 >= self._run.steps:
                guard.close()
                raise Ended

        return rehearsed

    def _record(self, number: int, when: str, script: FrameType | None) -> None:
        if self._records is None:
            self._records = open(self._folder / f"rank-{dist.get_rank()}.jsonl", "a")  # noqa: SIM115
        state = digests(self._arguments, reachable(script))
        if when == END:
            state["loss"] = self._losses.hexdigest()
            self._losses = hashlib.blake2b(digest_size=8)
        self._records.write(json.dumps([number, when, state]) + "\n")
        self._records.flush()

    def _die_at(self, number: int, when: str) -> None:
        for i, death in enumerate(self._run.deaths):
            if (death.step, death.when, death.rank) != (number, when, dist.get_rank()):
                continue
            with contextlib.suppress(FileExistsError):
                (self._folder / f"death-{i}").touch(exist_ok=False)
                if death.memory:
                    shutil.rmtree(sessions.current().directory.path)
                os.kill(os.getpid(), signal.SIGKILL)


def digests(arguments: Mapping[str, Any], objects: Sequence[tuple[str, object]]) -> dict[str, str]:
    """What a training's state is now, by the names of its parts.

    Args:
        arguments: Of `protect`.
        objects: Of the script, by name; those with a state_dict() count.

    Returns:
        Name of a tensor or value -> its digest.
    """
    parts = dict[str, Any]()
    model: nn.Module = arguments["model"]
    known = {id(one) for one in model.modules()}
    parts["model"] = {**dict(model.named_buffers()), **model.state_dict()}
    optimizers = arguments.get("optimizers", ())
    optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    state = objects_of(arguments.get("state", ()))
    for i, optimizer in enumerate(optimizers):
        parts[f"optimizers[{i}]"] = optimizer.state_dict()
    for key, one in state.items():
        parts[f"state[{key!r}]"] = one.state_dict()
    parts["generators"] = {
        "torch": torch.get_rng_state(),
        "numpy": _text_digest(np.random.get_state()),
        "python": _text_digest(random.getstate()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        parts["generators"]["cuda"] = torch.cuda.get_rng_state()
    for name, one in objects:
        if id(one) in known or not hasattr(type(one), "state_dict") or hasattr(type(one), "__iter__"):
            continue
        if isinstance(one, torch.utils.data.DataLoader) or type(one).__module__.startswith("ecemb"):
            continue
        numbers = {
            key: value for key, value in vars(one).items() if type(value) in (bool, int, float, torch.Tensor)
        }
        with contextlib.suppress(Exception):  # the script doesn't call it there, and it may not be able to
            parts[name] = {"state_dict()": one.state_dict(), "attributes": numbers}  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    return dict(_flat("", parts))


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
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        yield name, _digest(torch.as_tensor(value))
    elif type(value) in (bool, int, float, str, type(None)):
        yield name, repr(value)[:40]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _text_digest(value: object) -> str:
    with np.printoptions(threshold=sys.maxsize):
        return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    data = hashlib.blake2b(_bytes_of(tensor), digest_size=8).hexdigest()
    return f"{data} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


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
        pass
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            _note(Path(folder), script, error)
        raise


def _note(folder: Path, script: str, error: BaseException) -> None:
    """Leaves the error and the script's line for `rehearse`."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    where = f"{script}, line {lines[-1]}: " if lines else ""
    text = f"{where}{type(error).__name__}: {error}"
    path = folder / f"error-{os.environ.get('RANK', '0')}-{os.getpid()}"
    path.write_text(json.dumps({"error": type(error).__name__, "text": text, "is_last": not run_again()}))


def run_again() -> bool:
    """Whether torchrun will start this process again after a failure."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < restarts


if __name__ == "__main__":
    main(sys.argv[1:])
