"""The arena's header: its words and constants as plain values, and their format.

Owns the byte format of the first pages of an arena's file, and the frozen dataclasses that the rest of
ecemb passes around (`Constants`, `Header`, `Found`). All functions are pure but `load` and `last_holder`,
which read a file. Must not know how files are found, mapped or locked, nor which arenas count (`classify`).

The file begins with three parts:

    byte 0       preamble: magic, format version, length and checksum of the constants
    byte 4096    the words: int64, each written by one aligned store, outside of the checksum
    byte 8192    the constants, as canonical JSON; then, aligned to 4096 bytes, the regions

Invariant: the word `state` is stored last at creation, so a file whose state is 0 is a torn
creation, whatever the rest of it holds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

from ..errors import ArenaDamaged, ArenaIncompatible, ConfigurationError

SUFFIX = ".arena"
"""Suffix of the name of an arena's file."""
MAGIC = b"ecembARN"
FORMAT = 7
NONE = -1
"""The value of a word that has none yet: no transaction, no generation."""

PAGE_BYTES = 4096
"""Page size of the format, the same on all machines."""
MEMORY_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
"""Page size in which this machine allocates memory: 4 to 64 KiB."""
WORDS_OFFSET = PAGE_BYTES
CONSTANTS_OFFSET = 2 * PAGE_BYTES
MAX_REGIONS = 256
MAX_CONSTANTS_BYTES = 1 << 26
_FORMATS = 1 << 16  # a higher number is no format version: the bytes are damaged

RESERVED = 64
"""Index of the first region's reserved bytes in the page of the words."""

_PREAMBLE = struct.Struct("<8sQQ16s")
_ARENA_ID = re.compile(r"[0-9a-f]{8,64}")
_NO_HEADER = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)


class State(IntEnum):
    """The state of an arena's content (docs/protocol.md, 2); `classify` decides which arenas count."""

    INIT = 1
    """The arena is being filled for the first time: by a fresh start, or from a checkpoint."""
    REBUILDING = 2
    """The arena of a replacement rank, not yet rebuilt completely: counts as lost."""
    LIVE = 3
    FINISHED = 4
    """Tombstone of a closed job."""


class Word(str, Enum):
    """The mutable words in the order of the file (docs/protocol.md, 2); each equals its name as a string."""

    STATE = "state"
    JOINED = "joined"
    GENERATION_ID = "generation_id"
    OPENED = "opened"
    COMMITTED = "committed"
    PREPARED = "prepared"
    PID = "pid"
    """Pid of the process that attached to the arena last; 0 after that process has closed the arena."""
    PID_START = "pid_start"
    """Start time of that process, in clock ticks since boot: tells it from a later one with the same pid."""
    ROWS_LABEL = "rows_label"
    ROWS_BYTES = "rows_bytes"
    PARITY_LABEL = "parity_label"
    PARITY_ROW = "parity_row"
    INBOX_LABEL = "inbox_label"
    INBOX_BYTES = "inbox_bytes"
    SLOT0_LABEL = "slot0_label"
    SLOT0_BYTES = "slot0_bytes"
    SLOT1_LABEL = "slot1_label"
    SLOT1_BYTES = "slot1_bytes"
    UNDECLARED = "undeclared"
    NEXT_LABEL = "next_label"
    NEXT_BYTES = "next_bytes"
    COMMITTED_NS = "committed_ns"
    """This word and all after it are for people and for `window="auto"`: recovery reads none of them."""
    RECOVERED_NS = "recovered_ns"
    RECOVERY_US = "recovery_us"
    RECOVERY_STEP = "recovery_step"
    RECOVERY_KIND = "recovery_kind"
    WINDOW_COMMIT_NS = "window_commit_ns"
    WINDOW_STEP_NS = "window_step_ns"
    WINDOW_ROOM = "window_room"
    """The most steps of a window, after a longer window ran out of memory; 0 without such a limit."""
    LACKING_BYTES = "lacking_bytes"
    VERIFIED = "verified"
    """The last transaction by which every stripe had been compared, and fitted its rows; 0 before that."""

    def __str__(self) -> str:
        return self.value


WORDS = tuple(Word)


def new_arena_id() -> str:
    """A random name for a new arena (16 hexadecimal digits)."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Identity:
    """The constants that say whose memory an arena is; a start needs them before ranks can communicate.

    Reports of an arena to other hosts have only these constants: the others grow with the tables.

    Attributes:
        job: name of the job.
        arena_id: random hexadecimal digits; the file's name.
        rank: the logical rank whose memory this is.
        world_size: number of ranks N.
        domains: rank -> host at the fresh start.
        fill: the generation whose fresh start or resume made the history that this arena belongs to; a
            replacement has its donor's.

    Raises:
        ConfigurationError: a value breaks one of these rules.
    """

    job: str
    arena_id: str
    rank: int
    world_size: int
    domains: tuple[str, ...]
    fill: int

    def __post_init__(self) -> None:
        named = bool(_ARENA_ID.fullmatch(self.arena_id))
        _require(named, "arena_id", self.arena_id, "8 to 64 hexadecimal digits")
        _require(self.fill >= 0, "fill", self.fill, "a generation")
        _require(self.world_size >= 1, "world_size", self.world_size, "at least 1")
        _require(0 <= self.rank < self.world_size, "rank", self.rank, f"in 0..{self.world_size - 1}")
        _require(len(self.domains) == self.world_size, "domains", self.domains, f"{self.world_size} names")

    @property
    def identity(self) -> Identity:
        """These constants alone, for reports to other hosts."""
        return Identity(*(getattr(self, field.name) for field in dataclasses.fields(Identity)))


@dataclass(frozen=True)
class Constants(Identity):
    """The part of a header that never changes. Written once, under a checksum, before `state`.

    Attributes:
        n: blocks in a stripe.
        k: data blocks in a stripe.
        positions: rank -> placement position, fixed at the fresh start; a permutation of 0..N-1.
        layout_hash: hash that must be equal for the model of the same rank after a restart.
        layout: JSON text that describes this rank's tables.
        block_words: [N][k] length of every rank's blocks in 8-byte words.
        regions: (name, capacity in bytes) in the order of the file.

    Raises:
        ConfigurationError: a value breaks one of these rules.
    """

    n: int
    k: int
    positions: tuple[int, ...]
    layout_hash: str
    layout: str
    block_words: tuple[tuple[int, ...], ...]
    regions: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(1 <= self.k < self.n <= 256, "(n, k)", (self.n, self.k), "1 <= k < n <= 256")
        size, positions = self.world_size, self.positions
        permutation = len(positions) == size and sorted(positions) == list(range(size))
        _require(permutation, "positions", positions, f"a permutation of 0..{size - 1}")
        rows = self.block_words
        lengths = len(rows) == size and all(len(row) == self.k and min(row) >= 0 for row in rows)
        _require(lengths, "block_words", rows, f"[{size}][{self.k}] lengths >= 0")
        names = [name for name, _ in self.regions]
        regions = len(set(names)) == len(names) <= MAX_REGIONS and all(room >= 0 for _, room in self.regions)
        rule = f"at most {MAX_REGIONS} different names with capacities >= 0"
        _require(regions, "regions", self.regions, rule)

    def encode(self) -> bytes:
        """Canonical JSON: equal constants give equal bytes.

        Raises:
            ConfigurationError: the JSON is longer than `MAX_CONSTANTS_BYTES`.
        """
        payload = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":")).encode("ascii")
        if (size := len(payload)) > MAX_CONSTANTS_BYTES:
            what = f"the tables' description takes {size} bytes of at most {MAX_CONSTANTS_BYTES}"
            raise ConfigurationError(f"{what}: protect fewer tables, or fewer shards of them")
        return payload

    @classmethod
    def decode(cls, payload: bytes) -> Constants:
        """Inverse of `encode`.

        Raises:
            ArenaDamaged: the bytes are not constants that `encode` could have written.
        """
        try:
            return _constants(json.loads(payload))
        except _NO_HEADER as error:
            raise ArenaDamaged(f"the constants of the header can't be read: {error}") from error


@dataclass(frozen=True)
class Header:
    """A snapshot of an arena's header.

    Attributes:
        constants: the part that never changes: `Constants` on the arena's host, `Identity` in reports of
            other hosts.
        state: see `State`.
        joined: generation that this arena was last a member of; NONE before the first.
        generation_id: random id of that generation; NONE while it is not known (see `Arena.join`).
        opened: highest generation that was opened for changes; NONE before the first.
        committed: last committed transaction, or NONE.
        prepared: last prepared transaction, or NONE.
        undeclared: 1 if rows were written undeclared, so that parity doesn't fit them.
    """

    constants: Identity
    state: State
    joined: int = NONE
    generation_id: int = NONE
    opened: int = NONE
    committed: int = NONE
    prepared: int = NONE
    undeclared: int = 0


@dataclass(frozen=True)
class Found:
    """An arena's file as a scan saw it.

    Attributes:
        path: .../{job}/{host}/{arena id}.arena
        inode: number of the file's inode: the path may name another file later.
        header: the arena's header; None if it can't be read.
        damage: why the header can't be read; None if it can.
        holder: pid of the living process that holds the arena (0: one of another pid namespace), or None.
        torn: whether its creation was interrupted, so that it holds no data.
        incompatible: whether another version of ecemb wrote it, in a format that this version doesn't read.
        pid: pid of the process that attached to it last, living or not; 0 if that process has closed it.
        size_bytes: allocated memory of the file.
        job: name of the job's folder; None if this object reports an untrusted folder above it.
        host: name of the host's folder; None as for `job`.
        words: all words of the header; empty if the header can't be read.
    """

    path: Path
    inode: int
    header: Header | None
    damage: str | None
    holder: int | None
    torn: bool = False
    incompatible: bool = False
    pid: int = 0
    size_bytes: int = 0
    job: str | None = None
    host: str | None = None
    words: Mapping[Word, int] = dataclasses.field(default_factory=dict[Word, int], compare=False)


# The bytes of the file


def preamble(payload: bytes) -> bytes:
    """The first bytes of the file, for constants that were encoded as `payload`."""
    return _PREAMBLE.pack(MAGIC, FORMAT, len(payload), _checksum(payload))


def initial_words() -> dict[Word, int]:
    """Values of all words of a new arena; `state` is 0 until the creation is complete."""
    informing = WORDS[WORDS.index(Word.COMMITTED_NS) :]
    counts = {Word.STATE, Word.PID, Word.PID_START, Word.UNDECLARED, *informing}
    return {word: 0 if word in counts or word.endswith("_bytes") else NONE for word in WORDS}


def words_of(head: bytes) -> dict[Word, int]:
    """The words in the first `CONSTANTS_OFFSET` bytes of a file; empty if the file has another format."""
    if len(head) < CONSTANTS_OFFSET or _PREAMBLE.unpack_from(head)[:2] != (MAGIC, FORMAT):
        return {}
    return dict(zip(WORDS, struct.unpack_from(f"<{len(WORDS)}q", head, WORDS_OFFSET), strict=True))


def last_holder(fd: int) -> tuple[int, int]:
    """Pid and start of the process that attached to the file `fd` last; (0, 0) if it can't be read."""
    words = words_of(os.pread(fd, CONSTANTS_OFFSET, 0))
    return words.get(Word.PID, 0), words.get(Word.PID_START, 0)


def torn(head: bytes) -> bool:
    """Whether a file's creation was interrupted, by its first `CONSTANTS_OFFSET` bytes, or all it has.

    An arena that was ever a member of a generation is not torn, whatever its word `state`: its bytes are
    damaged.
    """
    if len(head) < CONSTANTS_OFFSET:
        return True
    known = head[: len(MAGIC)] in (MAGIC, bytes(len(MAGIC)))
    state, joined = struct.unpack_from("<2q", head, WORDS_OFFSET)
    return known and state == 0 and joined in (0, NONE)


def parse(head: bytes, read: Callable[[int], bytes]) -> tuple[Constants, int]:
    """Reads and checks the constants.

    Args:
        head: the first `CONSTANTS_OFFSET` bytes of the file.
        read: called with a number of bytes, returns these bytes of the file from `CONSTANTS_OFFSET` on, fewer
            at the file's end.

    Returns:
        The constants, and their length in the file in bytes.

    Raises:
        ArenaDamaged: torn creation, or a checksum that doesn't match.
        ArenaIncompatible: another version of ecemb wrote it.
    """
    if torn(head):
        raise ArenaDamaged("its creation was cut short; it holds nothing and can be removed")
    magic, version, length, checksum = _PREAMBLE.unpack_from(head)
    if magic != MAGIC:
        raise ArenaDamaged(f"it begins with {magic!r} and not with {MAGIC!r}: not an arena")
    if version != FORMAT and 0 < version < _FORMATS:
        raise ArenaIncompatible(
            f"it has format {version} and this ecemb reads format {FORMAT}. It may hold a job's memory: go "
            f"on with the version of ecemb that wrote it, or remove it with `ecemb arenas rm`"
        )
    payload = read(length) if length <= MAX_CONSTANTS_BYTES else b""
    if version != FORMAT or len(payload) != length or _checksum(payload) != checksum:
        raise ArenaDamaged("the checksum of its header doesn't match")
    return Constants.decode(payload), length


def snapshot(constants: Constants, words: Mapping[Word, int]) -> Header:
    """Makes a header of its constants and words.

    Raises:
        ArenaDamaged: the word `state` is not a `State`.
    """
    try:
        state = State(words[Word.STATE])
    except ValueError as error:
        raise ArenaDamaged(f"its state is {words[Word.STATE]}, which no ecemb stores") from error
    return Header(
        constants,
        state,
        joined=words[Word.JOINED],
        generation_id=words[Word.GENERATION_ID],
        opened=words[Word.OPENED],
        committed=words[Word.COMMITTED],
        prepared=words[Word.PREPARED],
        undeclared=words[Word.UNDECLARED],
    )


def load(fd: int, path: Path) -> tuple[Constants, int, dict[Word, int]]:
    """Reads and checks the header of the arena `path`, whose file is open as `fd`.

    Returns:
        The constants, their length in the file in bytes, and the words.

    Raises:
        ArenaDamaged: the header can't be read, or belongs to another arena, or the file is truncated; the
            message names `path`.
        ArenaIncompatible: another version of ecemb wrote it; the message names `path`.
    """
    head = os.pread(fd, CONSTANTS_OFFSET, 0)
    words = words_of(head)
    try:
        constants, length = parse(head, lambda size: os.pread(fd, size, CONSTANTS_OFFSET))
        if (constants.arena_id, constants.job) != (path.stem, path.parents[1].name):
            raise ArenaDamaged(
                f"it holds arena {constants.arena_id} of job {constants.job!r}: copied or renamed"
            )
        total_bytes = spans(constants, length)[1]
        if os.fstat(fd).st_size < total_bytes:
            raise ArenaDamaged(f"it has {os.fstat(fd).st_size} bytes and should have {total_bytes}")
        snapshot(constants, words)
    except (ArenaDamaged, ArenaIncompatible) as error:
        raise type(error)(f"{path}: {error}") from error
    return constants, length, words


def page_aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages of the format."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def memory_pages(offset: int, size_bytes: int) -> range:
    """The machine's pages, numbered from the file's begin, under `size_bytes` from byte `offset` on."""
    return range(offset // MEMORY_PAGE_BYTES, -(-(offset + size_bytes) // MEMORY_PAGE_BYTES))


def spans(constants: Constants, constants_bytes: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Computes the place of each region in the file.

    Args:
        constants: of the arena.
        constants_bytes: length of the encoded constants.

    Returns:
        name -> (offset, capacity), both in bytes, and the size of the file in bytes.
    """
    offset = CONSTANTS_OFFSET + page_aligned(constants_bytes)
    result: dict[str, tuple[int, int]] = {}
    for name, capacity in constants.regions:
        result[name] = (offset, capacity)
        offset += page_aligned(capacity)
    return result, offset


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigurationError(f"an arena's {name} must be {rule}; it is {value!r}")


def _constants(fields: dict[str, Any]) -> Constants:
    """Makes constants of decoded JSON, in which tuples are lists."""
    tuples: dict[str, Any] = {
        "positions": tuple(fields["positions"]),
        "domains": tuple(fields["domains"]),
        "block_words": tuple(tuple(row) for row in fields["block_words"]),
        "regions": tuple((name, size) for name, size in fields["regions"]),
    }
    constants = Constants(**{**fields, **tuples})
    lengths = [words for row in constants.block_words for words in row]
    numbers = [constants.rank, constants.world_size, constants.n, constants.k, constants.fill]
    texts = [constants.job, constants.layout_hash, constants.layout, *constants.domains]
    _require_type(int, [*numbers, *constants.positions, *lengths, *(size for _, size in constants.regions)])
    _require_type(str, [*texts, *(name for name, _ in constants.regions)])
    return constants


def _require_type(kind: type, values: Sequence[object]) -> None:
    if other := [value for value in values if type(value) is not kind]:
        raise TypeError(f"{other[0]!r} is no {kind.__name__}")


def _checksum(payload: bytes) -> bytes:
    return hashlib.blake2b(struct.pack("<QQ", FORMAT, len(payload)) + payload, digest_size=16).digest()
