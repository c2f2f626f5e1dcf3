"""How a checkpoint is written and read, crash-safe: after any kill, what counts as complete is complete.

A checkpoint is a folder `step-N`. It is made as `step-N.partial`, written and synced by all ranks, and
renamed by rank 0 as the last act; it goes the same way, by its name first. What was cut off in either goes
with the next save. All ranks see one file system.

Must not know: what is saved, and when.
"""

from __future__ import annotations

import itertools
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from baselines.files import sync
from baselines.pace import Pace

_PARTIAL = ".partial"
Tensors = Mapping[str, Tensor]


def complete(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending."""
    steps = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return sorted(int(step) for step in steps if step.isdecimal())


def place(folder: Path, step: int) -> Path:
    """Of a step's complete checkpoint."""
    return folder / f"step-{step}"


class Writer(ABC):
    """Writes and reads checkpoints in a folder. All ranks, one checkpoint at a time.

    Args:
        bytes_per_s: a rank writes, or reads, at most this much; None: as fast as it goes.

    Attributes:
        behind: saves that may not be complete yet when training goes on.

    Raises:
        ValueError: a bandwidth that is not above 0.
    """

    behind: int = 0

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._pace()  # raises

    def _pace(self) -> Pace:
        """Begins to write, or to read."""
        return Pace(self._bytes_per_s)

    def save(self, folder: Path, step: int, own: Tensors, shared: Tensors, keep: int) -> None:
        """Saves a checkpoint; on return, it is as good as the writer makes it by then (see `wait`).

        Args:
            folder: of all checkpoints of the job.
            step: that comes next.
            own: this rank's tensors. Read.
            shared: tensors that are the same on all ranks. Read.
            keep: how many complete checkpoints stay.
        """
        partial = folder / f"step-{step}{_PARTIAL}"
        if dist.get_rank() == 0:
            for left in folder.glob(f"step-*{_PARTIAL}"):
                shutil.rmtree(left)
            partial.mkdir(parents=True)
        dist.barrier()
        self._write(partial, own, shared, keep)

    @abstractmethod
    def _write(self, partial: Path, own: Tensors, shared: Tensors, keep: int) -> None:
        """Writes to the folder, syncs, and has rank 0 call `_commit` when all ranks have."""

    @abstractmethod
    def load(self, path: Path) -> dict[str, Tensor]:
        """What this rank saved as its own, and what is shared. All ranks."""

    def wait(self) -> None:  # noqa: B027 - nothing to wait for, if saves are complete on return
        """Returns when the last save is complete. All ranks.

        Raises:
            Exception: what it failed with.
        """

    @property
    def copied_bytes(self) -> int:
        """Of memory that copies of tensors take while they are written."""
        return 0

    @abstractmethod
    def part(self, rank: int) -> list[str]:
        """Patterns of the names that a rank's files in a checkpoint have."""

    def stored_bytes(self, folder: Path) -> int:
        """This rank's part of all complete checkpoints in a folder."""
        stored_bytes = 0
        for step, pattern in itertools.product(complete(folder), self.part(dist.get_rank())):
            for path in place(folder, step).glob(pattern):
                with suppress(FileNotFoundError):  # rank 0 is just removing it
                    stored_bytes += path.stat().st_size
        return stored_bytes

    @staticmethod
    def _commit(partial: Path, keep: int) -> None:
        """Makes a checkpoint whole, and removes old ones. Rank 0."""
        partial.rename(partial.with_suffix(""))
        sync(partial.parent)
        for step in complete(partial.parent)[:-keep]:
            old = place(partial.parent, step)
            shutil.rmtree(old.rename(old.with_suffix(_PARTIAL)))


class Files(Writer):
    """A file of each rank by torch.save; rank 0 has one more, for what is shared."""

    def _write(self, partial: Path, own: Tensors, shared: Tensors, keep: int) -> None:
        rank, pace = dist.get_rank(), self._pace()
        _save(partial / f"rank-{rank}.pt", own)
        pace.wait(_size(own))
        if rank == 0:
            _save(partial / "shared.pt", shared)
            pace.wait(_size(shared))
        dist.barrier()
        if rank == 0:
            sync(partial)
            self._commit(partial, keep)

    def part(self, rank: int) -> list[str]:
        """See `Writer.part`."""
        return [f"rank-{rank}.pt", "shared.pt"][: 1 if rank else 2]

    def load(self, path: Path) -> dict[str, Tensor]:
        """See `Writer.load`."""
        names, pace = (f"rank-{dist.get_rank()}.pt", "shared.pt"), self._pace()
        own, shared = (
            torch.load(path / name, map_location="cpu", weights_only=True, mmap=True) for name in names
        )
        pace.wait(_size(own) + _size(shared))
        return {**own, **shared}


class Dcp(Writer):
    """torch.distributed.checkpoint.save: DCP spreads what is shared over the ranks."""

    def _write(self, partial: Path, own: Tensors, shared: Tensors, keep: int) -> None:
        pace = self._pace()
        dcp.save(_named(own, shared), storage_writer=dcp.FileSystemWriter(partial, sync_files=True))
        pace.wait(_share(own, shared))
        dist.barrier()
        if dist.get_rank() == 0:
            sync(partial)
            self._commit(partial, keep)

    def part(self, rank: int) -> list[str]:
        """See `Writer.part`."""
        return [f"__{rank}_*", ".metadata"][: 1 if rank else 2]

    def load(self, path: Path) -> dict[str, Tensor]:
        """See `Writer.load`. DCP's index is a pickle: the folder has to be the job's own."""
        reader = dcp.FileSystemReader(path)
        prefix, pace = _prefix(), self._pace()
        found: dict[str, Any] = {}
        stored: Any  # tensors alone
        for key, stored in reader.read_metadata().state_dict_metadata.items():
            if key.startswith((prefix, "shared/")):
                found[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        dcp.load(found, storage_reader=reader)
        pace.wait(_size(found))
        return {key.removeprefix(prefix).removeprefix("shared/"): tensor for key, tensor in found.items()}


class AsyncDcp(Dcp):
    """torch.distributed.checkpoint.async_save: training waits for a copy in memory, a thread writes it."""

    behind = 1

    def __init__(self, bytes_per_s: float | None = None) -> None:
        super().__init__(bytes_per_s)
        self._group: Any = None
        self._saving: Future[None] | None = None
        self._copied_bytes = 0

    @property
    def copied_bytes(self) -> int:
        """See `Writer.copied_bytes`."""
        return self._copied_bytes

    def save(self, folder: Path, step: int, own: Tensors, shared: Tensors, keep: int) -> None:
        """See `Writer.save`; waits for the save before."""
        self.wait()
        super().save(folder, step, own, shared, keep)

    def _write(self, partial: Path, own: Tensors, shared: Tensors, keep: int) -> None:
        if self._group is None:
            self._group = dist.new_group(backend="gloo")  # the thread's collectives are not the training's
        tensors = _named(own, shared)
        self._copied_bytes = _size(tensors)
        written: Any = dcp.async_save(
            tensors,
            storage_writer=dcp.FileSystemWriter(partial, sync_files=True),
            process_group=self._group,
        )
        self._saving = saving = Future[None]()
        commits, pace, share_bytes = dist.get_rank() == 0, self._pace(), _share(own, shared)

        def finish(done: Any) -> None:
            try:
                done.result()
                pace.wait(share_bytes)
                if commits:
                    sync(partial)
                    self._commit(partial, keep)
                saving.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                saving.set_exception(error)

        written.add_done_callback(finish)

    def wait(self) -> None:
        """See `Writer.wait`."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()


def _prefix() -> str:
    return f"rank-{dist.get_rank()}/"


def _named(own: Tensors, shared: Tensors) -> dict[str, Tensor]:
    """Under keys that differ by rank, but for what is shared."""
    named = {f"{_prefix()}{key}": tensor for key, tensor in own.items()}
    return named | {f"shared/{key}": tensor for key, tensor in shared.items()}


def _size(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _share(own: Tensors, shared: Tensors) -> int:
    """Bytes that this rank writes where what is shared is spread over all ranks."""
    return _size(own) + _size(shared) // dist.get_world_size()


def _save(path: Path, tensors: Tensors) -> None:
    with path.open("wb") as file:
        torch.save(dict(tensors), file)
        file.flush()
        os.fsync(file.fileno())
