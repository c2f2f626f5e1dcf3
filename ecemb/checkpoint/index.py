"""ecemb's index of a checkpoint's files: which of their bytes are which rows, and the checksums of all bytes.

Owns the JSON text of the index, and the reading of rows through it. A *chunk* is a run of rows of one tensor,
in one file: the bytes that `torch.save` writes, a zip archive with the values in one stored record. The
record is found by the archive's directory; nothing is unpickled.

Checksums are zlib.crc32 of a file's bytes up to the end of each chunk. So a chunk is verified alone, by the
rank that reads it and before a value of it is used, and the chunks of a file verify all of it. CRC-32 finds
every change of up to 32 neighbouring bits, and misses one other change in 2^32. It is in the standard
library, and zip files and the rest of ecemb use it as well. It is no defence against a malicious user: the
folder's owner and mode are.

Must not know: folders of checkpoints, torch.distributed.checkpoint, other ranks.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import CheckpointFailed, CheckpointMismatch
from .interface import Piece, row_major

READ_BYTES: Final = 1 << 30
"""Most bytes of a chunk that one call reads; the kernel reads at most 2 GiB."""
_NAME_AND_EXTRA = slice(26, 30)
_LOCAL_HEADER_BYTES = 30


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A run of rows of a stored tensor.

    Attributes:
        file: its name.
        at: first byte in the file.
        length: number of bytes.
        start: first row; 0 for a tensor without dimensions.
        rows: number of rows; 1 for a tensor without dimensions.
        sums: checksums of the file's bytes before the chunk, and up to its end; None if none were written.
    """

    file: str
    at: int
    length: int
    start: int
    rows: int
    sums: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A stored tensor.

    Attributes:
        dtype: as torch names it.
        shape: of the whole tensor.
        chunks: in any order.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


Index = Mapping[str, StoredTensor]
"""The stored tensors by key."""


def text_of(index: Index) -> str:
    """The JSON text of an index."""
    tensors = {
        key: [one.dtype, one.shape, [dataclasses.astuple(chunk) for chunk in one.chunks]]
        for key, one in index.items()
    }
    return json.dumps({"tensors": tensors}, sort_keys=True)


def index_of(text: str | bytes) -> Index:
    """The index in a JSON text.

    Raises:
        ValueError, KeyError, TypeError: the text is no index.
    """
    return {
        key: StoredTensor(dtype, tuple(shape), [_chunk(*one) for one in chunks])
        for key, (dtype, shape, chunks) in json.loads(text)["tensors"].items()
    }


def _chunk(file: str, at: int, length: int, start: int, rows: int, sums: Sequence[int] | None) -> Chunk:
    return Chunk(file, at, length, start, rows, None if sums is None else (sums[0], sums[1]))


def signed(facts: Mapping[str, Any]) -> str:
    """The JSON text of facts, with their checksum, which is that of the facts as a reader parses them.

    JSON turns keys into strings, which have another order than numbers.
    """
    read = json.loads(json.dumps(facts))
    plain = json.dumps(read, sort_keys=True)
    return json.dumps({**read, "crc32": zlib.crc32(plain.encode())}, sort_keys=True)


def facts_in(text: str | bytes) -> dict[str, Any]:
    """The facts in the text of `signed`, or of an ecemb that wrote no checksums: these have no "files".

    Raises:
        ValueError: the text is not as it was written; or no JSON.
    """
    facts = json.loads(text)
    if not isinstance(facts, dict):
        raise ValueError("it is no JSON object")
    written = facts.pop("crc32", None)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if written is None and "files" not in facts:
        return facts  # pyright: ignore[reportUnknownVariableType]
    found = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    if written != found:
        raise ValueError(f"its checksum (crc32) is {found}, and {written} was written")
    return facts  # pyright: ignore[reportUnknownVariableType]


def damaged(place: object, what: str) -> CheckpointFailed:
    """The error that names a damaged checkpoint, and the way out."""
    return CheckpointFailed(
        f"{place} is damaged ({what}): to use the checkpoint before it, move this folder away"
    )


def new_file(folder: int, name: str | os.PathLike[str]) -> int:
    """The descriptor of a new file of a checkpoint, which no other user may write."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.open(name, flags, 0o644, dir_fd=folder)


def read(place: object, index: Index, pieces: Sequence[Piece], opened: Callable[[str], int]) -> None:
    """Overwrites the pieces' tensors with the stored values, after these were verified.

    Args:
        place: the checkpoint, for messages.
        index: its index.
        pieces: the pieces.
        opened: gives a descriptor of a file, which this function closes.

    Raises:
        CheckpointMismatch: the tensor is missing, or has another shape or type.
        CheckpointFailed: a part of a tensor is missing, or is not as it was written.
    """
    wanted: dict[str, dict[Chunk, list[Piece]]] = {}
    for piece in pieces:
        for chunk in _parts(place, index, piece):
            wanted.setdefault(chunk.file, {}).setdefault(chunk, []).append(piece)
    for file, chunks in sorted(wanted.items()):
        fd = opened(file)
        try:
            for chunk in sorted(chunks, key=lambda chunk: chunk.at):
                try:
                    values = _values(_content(fd, chunk))
                    for piece in chunks[chunk]:
                        _fill_(piece, chunk, values)
                except ValueError as error:
                    raise damaged(place, f"{file}: {error}") from None
        finally:
            os.close(fd)


def _rows(piece: Piece) -> int:
    return len(piece.tensor) if piece.shape else 1


def _parts(place: object, index: Index, piece: Piece) -> Iterable[Chunk]:
    """The chunks with rows of a piece."""
    stored = index.get(piece.key)
    if stored is None:
        raise CheckpointMismatch(
            f"{place} has no tensor {piece.key!r}, which this training needs: run the script that saved it, "
            f"or pass another resume="
        )
    needed = (str(piece.tensor.dtype).removeprefix("torch."), piece.shape)
    if (stored.dtype, stored.shape) != needed:
        raise CheckpointMismatch(
            f"{piece.key!r} in {place} is {stored.dtype} of shape {stored.shape}, and this training needs "
            f"{needed[0]} of shape {needed[1]}: run the script that saved it, or pass another resume="
        )
    end = piece.start + _rows(piece)
    found = [one for one in stored.chunks if one.start < end and piece.start < one.start + one.rows]
    rows = sum(min(end, one.start + one.rows) - max(piece.start, one.start) for one in found)
    if rows != _rows(piece):
        raise damaged(place, f"{rows} of {_rows(piece)} rows of {piece.key!r} are there")
    return found


def _content(fd: int, chunk: Chunk) -> io.BytesIO:
    """A chunk's bytes in one buffer, which is a file for zipfile.

    Raises:
        ValueError: bytes are missing, or are not those that were written.
    """
    size, end = os.fstat(fd).st_size, chunk.at + chunk.length
    if not 0 <= chunk.at <= end <= size:
        raise ValueError(f"it has {size} bytes, and rows were written up to byte {end}")
    content = io.BytesIO(bytes(chunk.length))
    buffer, at = content.getbuffer(), 0
    while at < chunk.length and (got := os.preadv(fd, [buffer[at : at + READ_BYTES]], chunk.at + at)):
        at += got
    if at != chunk.length:
        raise ValueError(f"{at} of {chunk.length} bytes from byte {chunk.at} on can be read")
    if chunk.sums is not None:
        before, written = chunk.sums
        found = zlib.crc32(buffer, before)
        if found != written:
            raise ValueError(
                f"bytes {chunk.at} to {end} are not those that were written: the checksum (crc32) of the "
                f"file up to there is {found}, and {written} was written"
            )
    return content


def _values(content: io.BytesIO) -> NDArray[np.uint8]:
    """The bytes of the values in a file by `torch.save` of one contiguous tensor: uint8 [bytes], a view.

    Raises:
        ValueError: the content is something else.
    """
    try:
        with zipfile.ZipFile(content) as archive:
            records = {one.filename.partition("/")[2]: one for one in archive.infolist()}
            order = archive.read(records["byteorder"]).decode() if "byteorder" in records else sys.byteorder
            record = records["data/0"]
    except (zipfile.BadZipFile, KeyError, NotImplementedError, OSError, EOFError) as error:
        raise ValueError(f"no tensor is stored there ({error})") from error
    if order != sys.byteorder:
        raise ValueError(f"its values are of a machine whose byte order is {order}")
    buffer, start = content.getbuffer(), record.header_offset
    lengths = np.frombuffer(bytes(buffer[start : start + _LOCAL_HEADER_BYTES][_NAME_AND_EXTRA]), "<u2")
    at = start + _LOCAL_HEADER_BYTES + int(lengths.sum())
    if record.compress_type != zipfile.ZIP_STORED or at + record.file_size > len(buffer):
        raise ValueError("no values are stored there as they are")
    return np.frombuffer(buffer, np.uint8, record.file_size, at)


def _fill_(piece: Piece, chunk: Chunk, values: NDArray[np.uint8]) -> None:
    """Overwrites the rows of a piece that are in a chunk."""
    row_bytes = math.prod(piece.shape[1:]) * piece.tensor.element_size()
    if len(values) != chunk.rows * row_bytes:
        raise ValueError(
            f"{len(values)} bytes of values stand for {chunk.rows} rows of {row_bytes} bytes of {piece.key!r}"
        )
    first = max(piece.start, chunk.start)
    end = min(piece.start + _rows(piece), chunk.start + chunk.rows)
    filled = row_major(piece.tensor)
    into = filled.reshape(-1).view(torch.uint8).numpy()
    into[(first - piece.start) * row_bytes : (end - piece.start) * row_bytes] = values[
        (first - chunk.start) * row_bytes : (end - chunk.start) * row_bytes
    ]
    if filled.data_ptr() != piece.tensor.data_ptr():  # is a copy
        piece.tensor.detach().copy_(filled)
