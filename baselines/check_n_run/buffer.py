"""The copy that training waits for: rows that have changed, and all other state, in memory of their own.

A file on tmpfs, so that a process apart can read it; each life of a rank makes a new one, so that a writer
that outlives its rank by a moment never sees another's bytes. Its name says whose it is: what the dead have
left may be as large as all tables. Space is reserved before it is used.

    {process}-{its start}-{nonce}.copy

Must not know: where copies go.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from baselines import packing
from baselines.files import made, mapped

_ALIGN_BYTES = 64
_SUFFIX = ".copy"


@dataclass(frozen=True)
class Span:
    """A tensor in a copy.

    Attributes:
        dtype: as torch names it.
        shape: of the tensor.
        at: where it begins, in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    at: int

    @property
    def size_bytes(self) -> int:
        """Of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Rows:
    """Rows of one table that are to be copied.

    Attributes:
        table: its key in the checkpoint.
        start: row of the whole table with which the shard begins.
        tensors: of the shard by name, [rows, ...], live; read.
        numbers: which rows of the shard, int64 [m], ascending; None: all.
    """

    table: str
    start: int
    tensors: Mapping[str, Tensor]
    numbers: Tensor | None


@dataclass(frozen=True)
class CopiedRows:
    """The same in a copy.

    Attributes:
        table: its key in the checkpoint.
        start: row of the whole table with which the shard begins.
        rows: how many there are.
        numbers: which rows of the shard, int64 [rows]; None: the first ones.
        tensors: [rows, ...] by name.
    """

    table: str
    start: int
    rows: int
    numbers: Span | None
    tensors: Mapping[str, Span]


@dataclass(frozen=True)
class Copy:
    """What there is in the file.

    Attributes:
        path: of the file.
        size_bytes: of what was copied.
        tables: their rows.
        rest: packed by `baselines.packing`, uint8 [size], by kind.
    """

    path: str
    size_bytes: int
    tables: tuple[CopiedRows, ...]
    rest: Mapping[str, Span]


def clear(memory: Path) -> None:
    """Removes copies whose makers are dead, in the folders of all ranks of this machine.

    Who lives in another container counts as dead: if a rank does, its next copy has a new file.

    Args:
        memory: the folder above theirs; need not be there.
    """
    for path in memory.glob(f"*/*{_SUFFIX}"):
        life = path.stem.rpartition("-")[0]
        process = life.partition("-")[0]
        if process.isdecimal() and _life(int(process)) != life:
            path.unlink(missing_ok=True)


def _life(process: int) -> str:
    """A process by its number and when it was started, since numbers come again; "" if it is dead."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = stat.rpartition(")")[2].split()  # the name in brackets may hold anything
    return "" if fields[0] in "ZX" else f"{process}-{fields[19]}"


class Buffer:
    """Memory for one copy after the other.

    Args:
        folder: on tmpfs, this rank's own; what earlier lives have left there goes.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in folder.glob(f"*{_SUFFIX}"):
            path.unlink(missing_ok=True)
        self.path = folder / f"{_life(os.getpid())}-{secrets.token_hex(8)}{_SUFFIX}"

    @property
    def memory_bytes(self) -> int:
        """That it takes now."""
        return self.path.stat().st_size if self.path.exists() else 0

    def fill(self, tables: Sequence[Rows], rest: Mapping[str, Mapping[str, Tensor]]) -> Copy:
        """Copies; what was copied before is overwritten.

        Args:
            tables: rows to be copied. Read.
            rest: other tensors, by kind and key. Read.

        Raises:
            OSError: there is not enough space.
        """
        copied, at = _arranged(tables)
        kinds: dict[str, Span] = {}
        for kind, tensors in rest.items():
            kinds[kind] = Span("uint8", (packing.size(tensors),), at)
            at = _aligned(at + kinds[kind].size_bytes)
        data = made(self.path, at) if at > self.memory_bytes else mapped(self.path)
        for rows, to in zip(tables, copied, strict=True):
            if rows.numbers is not None and to.numbers is not None:
                seen(data, to.numbers).copy_(rows.numbers)
            for name, span in to.tensors.items():
                tensor = rows.tensors[name].detach()
                if rows.numbers is None:
                    seen(data, span).copy_(tensor)
                elif tensor.device.type == "cpu":
                    torch.index_select(tensor, 0, rows.numbers, out=seen(data, span))
                else:  # gathered there first
                    seen(data, span).copy_(tensor.index_select(0, rows.numbers.to(tensor.device)))
        for kind, span in kinds.items():
            packing.pack(rest[kind], seen(data, span).numpy())
        return Copy(str(self.path), at, tuple(copied), kinds)

    def remove(self) -> None:
        """Gives the memory back."""
        self.path.unlink(missing_ok=True)


def seen(data: packing.Bytes, span: Span) -> Tensor:
    """A tensor of a copy, in place in the file's bytes (uint8 [size])."""
    part = torch.from_numpy(data[span.at : span.at + span.size_bytes])
    return part.view(getattr(torch, span.dtype)).reshape(span.shape)


def _arranged(tables: Sequence[Rows]) -> tuple[list[CopiedRows], int]:
    """Where all rows go, and the first byte behind them."""
    found: list[CopiedRows] = []
    at = 0

    def spans(tensors: Mapping[str, Tensor], count: int) -> Iterator[tuple[str, Span]]:
        nonlocal at
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            span = Span(dtype, (count, *tensor.shape[1:]), at)
            at = _aligned(at + span.size_bytes)
            yield name, span

    for rows in tables:
        numbers = None
        count = len(rows.tensors["weight"]) if rows.numbers is None else len(rows.numbers)
        if rows.numbers is not None:
            _, numbers = next(spans({"numbers": rows.numbers}, count))
        found.append(CopiedRows(rows.table, rows.start, count, numbers, dict(spans(rows.tensors, count))))
    return found, at


def _aligned(place: int) -> int:
    return -(-place // _ALIGN_BYTES) * _ALIGN_BYTES
