"""The bytes of one checkpoint, through torch.distributed.checkpoint's own writer and reader.

Owns the translation between `Piece` and DCP's plans and index. Every tensor is stored as chunks of one global
tensor, so that any number of ranks can read it, with DCP or through here. The index that DCP writes is a
pickle: callers of `read` have checked that it can be trusted (`folder_store`).

Must not know: folders of checkpoints, the network: no collective of DCP is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
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
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from ..errors import CheckpointFailed, CheckpointMismatch
from .interface import Piece

INDEX = ".metadata"


def write(folder: Path, rank: int, world_size: int, pieces: Sequence[Piece]) -> tuple[str, set[str]]:
    """Writes one rank's pieces to a separate file, and syncs it.

    Returns:
        JSON text of this rank for `write_index`, and the names of the files.
    """
    writer = FileSystemWriter(folder, sync_files=True)
    plans = [SavePlan([]) for _ in range(world_size)]
    plans[rank] = SavePlan([_write_item(piece) for piece in pieces])
    plan = writer.prepare_global_plan(plans)[rank]
    writer.set_up_storage_writer(rank == 0)
    by_place = {(piece.key, piece.offsets): piece for piece in pieces}
    written = writer.write_data(plan, _Source(by_place))
    written.wait()
    results = written.value()
    receipt = json.dumps([_receipt(result, by_place) for result in results])
    return receipt, {result.storage_data.relative_path for result in results}


def write_index(folder: Path, receipts: Sequence[str]) -> None:
    """Writes DCP's index of all ranks' files (their receipts, in the order of ranks), and syncs it."""
    chunks: dict[str, TensorStorageMetadata] = {}
    results: list[list[WriteResult]] = []
    for receipt in receipts:
        results.append([])
        for key, shape, dtype, offsets, sizes, file, at, length in json.loads(receipt):
            properties = TensorProperties(dtype=getattr(torch, dtype))
            whole = chunks.setdefault(key, TensorStorageMetadata(properties, torch.Size(shape), []))
            whole.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            place = StorageInfo(file, at, length)
            results[-1].append(WriteResult(MetadataIndex(key, offsets), length, place))
    index = Metadata(dict(chunks), planner_data={key: (key,) for key in chunks})
    FileSystemWriter(folder, sync_files=True).finish(index, results)


def read(folder: Path, pieces: Sequence[Piece]) -> None:
    """Overwrites the pieces' tensors with the stored values. Unpickles the index.

    Raises:
        CheckpointMismatch: the tensor is missing, or has another shape or type.
        CheckpointFailed: a part of a tensor is missing.
    """
    reader = FileSystemReader(folder)
    index = reader.read_metadata()
    plan = LoadPlan([item for piece in pieces for item in _read_items(folder, index, piece)])
    reader.set_up_storage_reader(index, False)
    reader.read_data(plan, _Target(pieces)).wait()


class _Source(SavePlanner):
    """Gives DCP's writer the pieces' tensors; the rest of planning is done before."""

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
        return self._pieces[index.fqn, tuple(index.offset or ())].tensor


class _Target(LoadPlanner):
    """Takes the pieces' values from DCP's reader."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = {(piece.key, piece.offsets): piece for piece in pieces}

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        tensor = self._pieces[index.fqn, tuple(index.offset or ())].tensor
        for dimension, (at, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, at, size)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)


def _write_item(piece: Piece) -> WriteItem:
    properties = TensorProperties(dtype=piece.tensor.dtype)
    data = TensorWriteData(_chunk(piece), properties, torch.Size(piece.shape))
    return WriteItem(MetadataIndex(piece.key, piece.offsets), WriteItemType.SHARD, tensor_data=data)


def _receipt(
    result: WriteResult, pieces: Mapping[tuple[str, tuple[int, ...]], Piece]
) -> tuple[str, tuple[int, ...], str, tuple[int, ...], tuple[int, ...], str, int, int]:
    place = result.storage_data
    piece = pieces[result.index.fqn, tuple(result.index.offset or ())]
    dtype = str(piece.tensor.dtype).removeprefix("torch.")
    sizes = tuple(piece.tensor.shape)
    at = (place.relative_path, place.offset, place.length)
    return (piece.key, piece.shape, dtype, piece.offsets, sizes, *at)


def _read_items(folder: Path, index: Metadata, piece: Piece) -> list[ReadItem]:
    whole = index.state_dict_metadata.get(piece.key)
    if not isinstance(whole, TensorStorageMetadata):
        raise CheckpointMismatch(
            f"{folder} has no tensor {piece.key!r}, which this training needs: run the script that saved it, "
            f"or pass another resume="
        )
    stored = (whole.properties.dtype, tuple(whole.size))
    if stored != (piece.tensor.dtype, piece.shape):
        raise CheckpointMismatch(
            f"{piece.key!r} in {folder} is {stored[0]} of shape {stored[1]}, and this training needs "
            f"{piece.tensor.dtype} of shape {piece.shape}: run the script that saved it, or pass another "
            f"resume="
        )
    items = create_read_items_for_chunk_list(piece.key, whole, [_chunk(piece)])
    found = sum(math.prod(item.lengths) for item in items)
    if found != piece.tensor.numel():
        raise CheckpointFailed(
            f"{folder} is damaged: {found} of {piece.tensor.numel()} values of {piece.key!r} are there; to "
            f"use the checkpoint before it, move this folder away"
        )
    return items
