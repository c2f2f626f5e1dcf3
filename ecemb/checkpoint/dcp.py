"""The files of one checkpoint, as torch.distributed.checkpoint writes them; and the index of older ones.

Owns the translation of pieces into DCP's plans and index, and DCP's file system on a folder's descriptor,
which computes checksums of the files. Every tensor is stored as chunks of one global tensor, so that DCP
reads a checkpoint on any number of ranks. DCP's index is a pickle, written for readers without ecemb: ecemb
reads its own (`ecemb/checkpoint/index.py`), and DCP's only where an older ecemb wrote no other. Even then
nothing is unpickled: the pickle's instructions are read as a description of its objects.

Must not know: folders of checkpoints, the network: no collective of DCP is used.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickletools
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo as StorageInfo,  # pyright: ignore[reportPrivateUsage] - an entry of DCP's own index
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from .index import Chunk, Index, StoredTensor, new_file
from .interface import Piece, row_major

Sums = dict[str, tuple[int, int]]
"""Number of bytes and checksum (crc32) of files, by name."""


def write(fd: int, folder: Path, rank: int, world_size: int, pieces: Sequence[Piece]) -> str:
    """Writes one rank's pieces to a separate file, and syncs it.

    Args:
        fd: descriptor of the folder.
        folder: its path, for DCP's writer.
        rank: this rank.
        world_size: number of ranks.
        pieces: read.

    Returns:
        JSON text of this rank for `sums_of`, `index_of` and `write_index`.
    """
    files = _Files(fd)
    writer = _writer(files, folder)
    plans = [SavePlan([]) for _ in range(world_size)]
    plans[rank] = SavePlan([_write_item(piece) for piece in pieces])
    plan = writer.prepare_global_plan(plans)[rank]
    writer.set_up_storage_writer(rank == 0)
    by_place = {(piece.key, piece.offsets): piece for piece in pieces}
    written = writer.write_data(plan, _Source(by_place))
    written.wait()
    chunks = [_receipt(result, by_place, files.written) for result in written.value()]
    return json.dumps({"chunks": chunks, "files": files.sums()})


def sums_of(receipts: Sequence[str]) -> Sums:
    """Sizes and checksums of all ranks' files."""
    return {name: tuple(said) for one in receipts for name, said in json.loads(one)["files"].items()}


def index_of(receipts: Sequence[str]) -> Index:
    """ecemb's index of all ranks' files."""
    found: dict[str, StoredTensor] = {}
    for receipt in receipts:
        for key, shape, dtype, offsets, sizes, file, at, length, *sums in json.loads(receipt)["chunks"]:
            tensor = found.setdefault(key, StoredTensor(dtype, tuple(shape), []))
            tensor.chunks.append(Chunk(file, at, length, *_rows(offsets, sizes), (sums[0], sums[1])))
    return found


def write_index(fd: int, folder: Path, receipts: Sequence[str]) -> Sums:
    """Writes DCP's index of all ranks' files (their receipts, in the order of ranks), and syncs it.

    Returns:
        Size and checksum of the index.
    """
    chunks: dict[str, TensorStorageMetadata] = {}
    results: list[list[WriteResult]] = []
    for receipt in receipts:
        results.append([])
        for key, shape, dtype, offsets, sizes, file, at, length, *_ in json.loads(receipt)["chunks"]:
            properties = TensorProperties(dtype=getattr(torch, dtype))
            whole = chunks.setdefault(key, TensorStorageMetadata(properties, torch.Size(shape), []))
            whole.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            place = StorageInfo(file, at, length)
            results[-1].append(WriteResult(MetadataIndex(key, offsets), length, place))
    index = Metadata(dict(chunks), planner_data={key: (key,) for key in chunks})
    files = _Files(fd)
    _writer(files, folder).finish(index, results)
    return files.sums()


def older_index(content: bytes) -> Index:
    """The index of a checkpoint of an older ecemb, from the content of DCP's index.

    Raises:
        Exception: of any class, if it is another pickle.
    """
    (index,) = _decode(content)
    if not isinstance(index, _Described) or index.name != f"{Metadata.__module__}.{Metadata.__name__}":
        raise ValueError(f"no index of DCP's, but {getattr(index, 'name', type(index).__name__)}")
    places = {
        (key.state["fqn"], _size(key.state["offset"])): place.state
        for key, place in index.state["storage_data"].items()
    }
    found: dict[str, StoredTensor] = {}
    for name, whole in index.state["state_dict_metadata"].items():
        dtype = whole.state["properties"].state[0].name.removeprefix("torch.")
        found[name] = StoredTensor(dtype, _size(whole.state["size"]), [])
        for chunk in whole.state["chunks"]:
            offsets, sizes = _size(chunk.state["offsets"]), _size(chunk.state["sizes"])
            place = places[name, offsets]
            at = (place["relative_path"], place["offset"], place["length"])
            found[name].chunks.append(Chunk(*at, *_rows(offsets, sizes), None))
    return found


@dataclass(eq=False)
class _Described:
    """An object in a pickle, as its bytes describe it: no class is imported, and nothing is called.

    Attributes:
        name: of the class or function that would make it.
        args: the arguments of that call.
        state: attributes that would be set; None if the pickle has none.
    """

    name: str
    args: Any = ()
    state: Any = None


def _size(size: _Described | None) -> tuple[int, ...]:
    return tuple(size.args[0]) if size is not None else ()


def _decode(content: bytes) -> list[Any]:
    """Decodes a pickle into values, containers, and descriptions of objects.

    Raises:
        ValueError: it has an instruction that DCP's indices don't have.
    """
    stack: list[Any] = []
    memo: list[Any] = []
    marks: list[int] = []

    def since_mark() -> list[Any]:
        begin = marks.pop()
        taken = stack[begin:]
        del stack[begin:]
        return taken

    for instruction, value, _ in pickletools.genops(content):
        match instruction.name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[instruction.name])
            case "SHORT_BINUNICODE" | "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(value)
            case "MEMOIZE":
                memo.append(stack[-1])
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[cast(int, value)])
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(instruction.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "APPEND":
                added = stack.pop()
                stack[-1].append(added)
            case "APPENDS":
                items = since_mark()
                stack[-1].extend(items)
            case "SETITEM":
                stack[-3][stack[-2]] = stack[-1]
                del stack[-2:]
            case "SETITEMS":
                items = since_mark()
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "STACK_GLOBAL":
                stack[-2:] = [_Described(".".join(stack[-2:]))]
            case "NEWOBJ" | "REDUCE":
                made, args = stack[-2:]
                stack[-2:] = [_Described(made.name, args)]
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case other:
                raise ValueError(f"DCP's index has no {other}")
    return stack


class _SummedFile(io.RawIOBase):
    """A new file that is written from its begin to its end, with its checksum after each write.

    Attributes:
        sums: offset -> checksum (crc32) of the bytes before it, for the begin and the end of each write.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0
        self.sums: dict[int, int] = {0: 0}

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        left = memoryview(data).cast("B")
        total, summed = len(left), zlib.crc32(left, self.sums[self._at])
        while left:
            left = left[os.write(self._fd, left) :]
        self._at += total
        self.sums[self._at] = summed
        return total

    def tell(self) -> int:
        return self._at

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()

    @property
    def sum(self) -> tuple[int, int]:
        """Number of bytes and checksum of all of it."""
        return self._at, self.sums[self._at]


class _Files(FileSystemBase):
    """A file system for DCP: makes new files in the folder of a descriptor.

    Attributes:
        written: the files by name.
    """

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self.written: dict[str, _SummedFile] = {}

    def sums(self) -> Sums:
        return {name: file.sum for name, file in self.written.items()}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        stream = _SummedFile(new_file(self._folder, path))
        self.written[os.fspath(path)] = stream
        with contextlib.closing(stream):
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        os.rename(path, new_path, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self.written[os.fspath(new_path)] = self.written.pop(os.fspath(path))

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def mkdir(self, path: str | os.PathLike[str]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return os.fspath(path) in os.listdir(self._folder)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        os.unlink(path, dir_fd=self._folder)


def _writer(files: _Files, folder: Path) -> FileSystemWriter:
    writer = FileSystemWriter(folder, sync_files=True)
    writer.fs = files  # pyright: ignore[reportAttributeAccessIssue] - where DCP's own fsspec writer sets its own
    return writer


class _Source(SavePlanner):
    """A planner that gives DCP's writer the pieces' tensors; the plan itself is made before."""

    def __init__(self, pieces: Mapping[tuple[str, tuple[int, ...]], Piece]) -> None:
        self._pieces = pieces

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        index = write_item.index
        piece = self._pieces[index.fqn, tuple(index.offset or ())]
        return row_major(piece.tensor)  # torch.save keeps strides and conj, neg bits


def _write_item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
    data = TensorWriteData(chunk, TensorProperties(dtype=piece.tensor.dtype), torch.Size(piece.shape))
    return WriteItem(MetadataIndex(piece.key, piece.offsets), WriteItemType.SHARD, tensor_data=data)


def _rows(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """First row and number of rows of a chunk: ecemb's chunks are runs of whole rows."""
    return (offsets[0], sizes[0]) if sizes else (0, 1)


def _receipt(
    result: WriteResult,
    pieces: Mapping[tuple[str, tuple[int, ...]], Piece],
    files: Mapping[str, _SummedFile],
) -> tuple[Any, ...]:
    """A chunk: its tensor, place in the tensor, place in a file, and the file's checksums around it."""
    place = result.storage_data
    piece = pieces[result.index.fqn, tuple(result.index.offset or ())]
    dtype = str(piece.tensor.dtype).removeprefix("torch.")
    at = (place.relative_path, place.offset, place.length)
    sums = files[place.relative_path].sums
    around = (sums[place.offset], sums[place.offset + place.length])
    return (piece.key, piece.shape, dtype, piece.offsets, tuple(piece.tensor.shape), *at, *around)
