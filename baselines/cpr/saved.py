"""One rank's saved state, in files that outlive machines: an image of its rows, and the rest beside it.

The image holds every row as it was last saved. A whole save writes another one, under another name until it
is synced. A save of some rows writes them to a record first, with which the image is then changed in place: a
record that has its name is whole, and a process that finds one applies it again, to the same end. So whatever
is killed at any moment, each row of the image is as one save has seen it. Such rows are written twice
(chosen): the second time, from the record to the image, is taken for the storage's own work, as where a
server keeps the image: it is neither slowed down nor counted.

A thread changes the image while training goes on; the next save, or the next read, waits for it.

What is no row, and the step of the save, is in a small file of its own, written after the record: rows may be
newer than it says by one save that was cut off.

Must not know: which rows are worth saving, other ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from baselines import packing
from baselines.files import made, mapped, sync
from baselines.pace import Pace

ROWS = "rows of "
"""Before a tensor's key in a record: which of its rows follow."""
_MARK = "mark"


class SavesLost(RuntimeError):
    """Saves that have to be there are not."""


@dataclass(frozen=True)
class Mark:
    """When a save was made.

    Attributes:
        step: that comes next.
        since: step since which samples count as lost with this rank: that of the last save of everything, or,
            with priorities, of the last time that the volume of everything had been saved.
    """

    step: int
    since: int


class _Storing:
    """The storage's own work: runs beside the training from now on."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, name="cpr-storage")
        self._thread.start()

    def finish(self) -> None:
        """Waits for its end; raises what it has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - raised by `finish`
            self._error = error


_storing: dict[Path, _Storing] = {}
"""By record: of this process, whichever object has begun it."""
os.register_at_fork(after_in_child=_storing.clear)  # its threads are the parent's


class SavedRank:
    """What a rank has saved.

    Args:
        folder: of the job's saves; made if missing.
        rank: whose.
        bytes_per_s: at most this much is sent to files, or read; None: as fast as it goes.

    Attributes:
        written_bytes: that this object has sent to files.

    Raises:
        SavesLost: from all methods that read: a file is damaged.
    """

    def __init__(self, folder: Path, rank: int, bytes_per_s: float | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._image, self._record, self._rest = (
            folder.absolute() / f"rank-{rank}.{kind}" for kind in ("rows", "record", "rest")
        )
        self._bytes_per_s = bytes_per_s
        self.written_bytes = 0

    @property
    def stored_bytes(self) -> int:
        """That the files take, when the last save is in the image."""
        self._settle()
        return sum(path.stat().st_size for path in (self._image, self._record, self._rest) if path.exists())

    def mark(self) -> Mark | None:
        """When the last save was made; None if there was none."""
        if not self._rest.exists():
            return None
        step, since = _opened(self._rest)[_MARK].tolist()
        return Mark(step, since)

    def keys(self) -> set[str]:
        """Of the tensors in the image."""
        return set(_opened(self._image)) if self._image.exists() else set()

    def save(self, rows: Mapping[str, Tensor], rest: Mapping[str, Tensor], mark: Mark) -> None:
        """Saves everything.

        Args:
            rows: tables' tensors by key, whole. Read.
            rest: all other tensors by key. Read.
            mark: when.
        """
        self._settle()
        self._write(self._image, rows)
        self._write(self._rest, {**rest, _MARK: _packed(mark)})

    def save_rows(self, some: Mapping[str, Tensor], rest: Mapping[str, Tensor], mark: Mark) -> None:
        """Saves rows, on top of what is saved.

        Args:
            some: tensors by keys of the image: whole ones, or, where `ROWS` + key names rows (int64 [m], each
                once), those rows of it, [m, ...]. Read.
            rest: all other tensors by key. Read.
            mark: when.
        """
        self._settle()
        self._write(self._record, some)
        self._write(self._rest, {**rest, _MARK: _packed(mark)})
        _storing[self._record] = _Storing(self._apply)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All rows and the rest as last saved; both lie in the files, to be read."""
        self._settle()
        rows, rest = _opened(self._image), _opened(self._rest)
        Pace(self._bytes_per_s).wait(packing.size(rows) + packing.size(rest))
        del rest[_MARK]
        return rows, rest

    def _write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        size, pace = packing.size(tensors), Pace(self._bytes_per_s)
        partial = path.with_name(f"{path.name}.partial")
        packing.pack(tensors, made(partial, size))
        sync(partial)
        partial.rename(path)
        sync(path.parent)
        pace.wait(size)
        self.written_bytes += size

    def close(self) -> None:
        """Waits until the last save is in the image."""
        self._settle()

    def _settle(self) -> None:
        """Waits for the storage's work; or does it, if another life of the process has left it."""
        if (storing := _storing.pop(self._record, None)) is not None:
            storing.finish()
        self._apply()

    def _apply(self) -> None:
        """Changes the image by the record, if there is one, and takes it away."""
        if not self._record.exists():
            return
        put_on(_opened(self._image), _opened(self._record))
        sync(self._image)
        self._record.unlink()


def put_on(image: Mapping[str, Tensor], record: Mapping[str, Tensor]) -> None:
    """Changes saved rows by what `SavedRank.save_rows` saves.

    Args:
        image: tensors by key. Overwritten, where the record has rows.
        record: see there. Read.
    """
    for key, tensor in record.items():
        if key.startswith(ROWS):
            continue
        rows = record.get(f"{ROWS}{key}")
        if rows is None:
            image[key].copy_(tensor)
        else:
            image[key][rows] = tensor


def _opened(path: Path) -> dict[str, Tensor]:
    """A file's tensors, in place."""
    try:
        return packing.unpack(mapped(path))
    except (OSError, ValueError) as error:
        raise SavesLost(
            f"{path} can't be read ({error}): put it back as it was, or train from the start, with empty "
            f"folders; if the rank's memory has survived, remove it, and it is saved again"
        ) from error


def _packed(mark: Mark) -> Tensor:
    return torch.tensor([mark.step, mark.since])
