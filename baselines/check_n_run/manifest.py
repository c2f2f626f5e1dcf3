"""What makes a checkpoint whole: one small text, written last, that names all of its chunks.

A checkpoint is there when its manifest is, and a manifest counts when its checksum holds: a torn one is none.
JSON, no pickle.

    {name}.manifest              the manifest: a line with the SHA-256 of the next one, which is JSON
    {name}/rank-{r}.json         what rank r has written; the same form
    {name}/rank-{r}-{i}.chunk    its chunks

`name` is `{number}-{nonce}`: numbers rise, and the nonce, drawn for each attempt, keeps what a killed attempt
has left from being taken for another's.

Must not know: where objects lie, what is in chunks.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

FORMAT: Final = 1
SUFFIX: Final = ".manifest"
T = TypeVar("T")

OWN, SHARED = "own", "shared"
"""Kinds of chunks that have no rows: what a rank has alone, what all ranks share."""


class NotWhole(ValueError):
    """A text that is not whole, as a kill leaves it."""


class OtherFormat(ValueError):
    """A whole text that another version has written."""


@dataclass(frozen=True)
class Chunk:
    """One object of a checkpoint.

    Attributes:
        path: in the store.
        size_bytes: of the object.
        crc: its CRC-32.
        table: key of the table that it has rows of; `OWN` or `SHARED` without a table are what `is_rows` is
            False for.
        is_rows: it has rows of a table.
        first: the lowest of its rows, in the whole table.
        last: the highest.
        rows: how many.
    """

    path: str
    size_bytes: int
    crc: int
    table: str
    is_rows: bool = False
    first: int = 0
    last: int = -1
    rows: int = 0


@dataclass(frozen=True)
class Receipt:
    """What one rank has written.

    Attributes:
        rank: which.
        chunks: all of its chunks.
        error: what it failed with instead; "" if it didn't.
    """

    rank: int
    chunks: tuple[Chunk, ...] = ()
    error: str = ""

    @property
    def size_bytes(self) -> int:
        """Of the chunks."""
        return sum(chunk.size_bytes for chunk in self.chunks)


@dataclass(frozen=True)
class Facts:
    """What ranks agree on before any of them writes.

    Attributes:
        number: of the checkpoint; they rise.
        nonce: of this attempt.
        step: that comes next.
        world_size: number of ranks.
        policy: its name.
        needs: names of the checkpoints that this one stands on, in the order of their restore, a full one
            first; none if it is full.
        sizes: of the differential checkpoints since the last full one, this one included, as fractions.
        tables: rows of each whole table by key, and its tensors: dtype and shape of a row by name.
        schemes: how they are stored, by kind of tensor; fields of a `Scheme`.
        restores: how often the training has been restored before.
        about: what else is to be known of the training, as plain values.
    """

    number: int
    nonce: str
    step: int
    world_size: int
    policy: str
    needs: tuple[str, ...] = ()
    sizes: tuple[float, ...] = ()
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schemes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    restores: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the checkpoint."""
        return f"{self.number:012d}-{self.nonce}"


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint.

    Attributes:
        facts: see there.
        ranks: what each rank has written, in their order.
    """

    facts: Facts
    ranks: tuple[Receipt, ...]

    @property
    def name(self) -> str:
        """Of the checkpoint."""
        return self.facts.name

    @property
    def chunks(self) -> list[Chunk]:
        """Of all ranks."""
        return [chunk for receipt in self.ranks for chunk in receipt.chunks]


def drawn() -> str:
    """A nonce."""
    return secrets.token_hex(4)


def number_of(path: str) -> int | None:
    """The number of the checkpoint that an object belongs to; None if it is none of ours."""
    number, dash, _ = path.partition("/")[0].partition("-")
    return int(number) if dash and len(number) == 12 and number.isdigit() else None


def manifest_path(name: str) -> str:
    """Of a checkpoint's manifest."""
    return f"{name}{SUFFIX}"


def receipt_path(name: str, rank: int) -> str:
    """Of what a rank says of a checkpoint."""
    return f"{name}/rank-{rank}.json"


def chunk_path(name: str, rank: int, number: int) -> str:
    """Of a rank's chunk."""
    return f"{name}/rank-{rank}-{number:06d}.chunk"


def text_of(what: Manifest | Receipt | Facts) -> bytes:
    """As text, with its checksum."""
    body = json.dumps(asdict(what) | {"format": FORMAT}, sort_keys=True)
    return f"{_sum(body)}\n{body}\n".encode()


def manifest_of(text: bytes) -> Manifest:
    """From its text.

    Raises:
        NotWhole: its checksum doesn't hold.
        OtherFormat: it does, and another version has written it.
    """
    return _read(text, lambda found: Manifest(_facts(found["facts"]), tuple(map(_receipt, found["ranks"]))))


def facts_of(text: bytes) -> Facts:
    """From its text.

    Raises:
        NotWhole: its checksum doesn't hold.
        OtherFormat: it does, and another version has written it.
    """
    return _read(
        text, lambda found: _facts({name: value for name, value in found.items() if name != "format"})
    )


def receipt_of(text: bytes) -> Receipt:
    """From its text.

    Raises:
        NotWhole: its checksum doesn't hold.
        OtherFormat: it does, and another version has written it.
    """
    return _read(text, _receipt)


def newest(names: Sequence[str]) -> list[str]:
    """Names of checkpoints by their manifests' paths, the newest first."""
    found = [path for path in names if path.endswith(SUFFIX) and number_of(path) is not None]
    return sorted((path.removesuffix(SUFFIX) for path in found), reverse=True)


def _facts(found: Mapping[str, Any]) -> Facts:
    return Facts(**{**found, "needs": tuple(found["needs"]), "sizes": tuple(found["sizes"])})


def _receipt(found: Mapping[str, Any]) -> Receipt:
    return Receipt(found["rank"], tuple(Chunk(**one) for one in found["chunks"]), found["error"])


def _read(text: bytes, make: Callable[[dict[str, Any]], T]) -> T:
    found = _checked(text)
    try:
        return make(found)
    except (KeyError, TypeError) as error:
        raise _other(repr(error)) from error


def _checked(text: bytes) -> dict[str, Any]:
    sum_, _, body = text.decode("utf-8", "replace").partition("\n")
    if not body.endswith("\n") or _sum(body[:-1]) != sum_:
        raise NotWhole("its checksum doesn't hold")
    found = json.loads(body)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise _other("it says so")
    return found


def _other(why: str) -> OtherFormat:
    return OtherFormat(
        f"its checksum holds, and it is of another format than {FORMAT}, which this version reads "
        f"({why}): restore it with the version that wrote it, or use another folder"
    )


def _sum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
