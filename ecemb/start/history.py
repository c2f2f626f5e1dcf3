"""The constants that all arenas of one history share, sent to all ranks at a start.

A *history* begins with the fresh start or the resume that made its first arenas; replacements are made with
the same constants. Constants may be large, so they don't go through torchrun's store at a start: survivors
compare digests over the process group, and one of them sends the bytes to the ranks that have none. The
arenas may be those of another number of ranks.

`Places` are the places of every rank's rows in the whole tables, as one text in the arenas' constants: an
arena describes the tables of its own rank, and another number of ranks needs those of lost ranks as well. The
text is compact: tables that ranks share are in it once. `OldArenas` are the arenas of another number of
ranks, from which an elastic start continues, described as a checkpoint: tables are compared as at a resume.

Writes to no arena. Must not know: how rows move.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..checkpoint.contents import FORMAT, Shard
from ..checkpoint.interface import Stored
from ..coding.placement import Placement
from ..coding.rows import Column, TableLayout
from ..errors import ConfigurationError, InconsistentArenas, PeerFailure
from ..memory.arena import Arena
from ..memory.header import MAX_CONSTANTS_BYTES, Constants
from ..net.collectives import Transport, Words
from ..recovery import relayout
from ..recovery.plan import RecoveryPlan
from ..session import Session
from ..state import rank_state as rank_states

_DIGEST_BYTES = 16
_CONSTANTS = struct.Struct(f"<qq{_DIGEST_BYTES}s")
"""Description of a rank's arenas: bytes of the shared constants; room of a slot; digest of the constants."""


@dataclasses.dataclass(frozen=True)
class History:
    """Constants that all surviving arenas share, written at the fresh start or resume that made them.

    Attributes:
        n: total blocks of the code.
        k: data blocks of the code.
        positions: rank -> placement position.
        domains: rank -> host.
        layout_hash: hash of all ranks' tables.
        lineage: see `World`; empty in arenas that older versions made.
        rank_state_bytes: room for each rank's packed state.
        slot_bytes: room of a slot in the donor's arena; it differs between arenas.
        everyone: each rank's tables with their places in the whole tables, by `pack_places`.
    """

    n: int
    k: int
    positions: tuple[int, ...]
    domains: tuple[str, ...]
    layout_hash: str
    lineage: str
    rank_state_bytes: int
    slot_bytes: int
    everyone: str

    @property
    def world_size(self) -> int:
        """The number of ranks that made the arenas."""
        return len(self.positions)

    @property
    def placement(self) -> Placement | None:
        """Who keeps whose parity in the arenas; None for one rank."""
        return Placement(self.n, self.k, self.positions) if self.world_size > 1 else None

    @classmethod
    def of(cls, constants: Constants) -> History:
        """The history in an arena's constants."""
        layout = json.loads(constants.layout)
        return cls(
            n=constants.n,
            k=constants.k,
            positions=constants.positions,
            domains=constants.domains,
            layout_hash=constants.layout_hash,
            lineage=layout.get("lineage", ""),
            rank_state_bytes=layout["rank_state_bytes"],
            slot_bytes=dict(constants.regions)["slot0"],
            everyone=layout["everyone"],
        )


def shared_history(session: Session, transport: Transport) -> History | None:
    """Compares the survivors' constants by digest, and sends them to ranks that have none. All ranks.

    Returns:
        The history; None if no arena survived.

    Raises:
        InconsistentArenas: the constants differ.
        PeerFailure: the constants from the donor don't fit the digest that it announced.
    """
    held = [_packed(arena) for arena in (session.arena, *session.held) if arena is not None]
    own, room_bytes = held[0] if held else (b"", 0)
    alike = _digest(own) if all(text == own for text, _ in held) else bytes(_DIGEST_BYTES)
    answers = transport.gather(_CONSTANTS.pack(len(own), room_bytes, alike), "comparing constants")
    each = [_CONSTANTS.unpack(one) for one in answers]
    holders = [rank for rank, (size, _, _) in enumerate(each) if size]
    if not holders:
        return None
    donor = holders[0]
    size, slot_bytes, digest = each[donor]
    if differing := [rank for rank in holders if each[rank][2] != digest]:
        raise InconsistentArenas(
            f"the arenas of ranks {differing} were made with other constants than that of rank {donor} "
            f"(code, placement, hosts, tables): they are not of one start; nothing was written. Remove those "
            f"that shall not count: ecemb arenas rm PATH"
        )
    if size > MAX_CONSTANTS_BYTES:
        raise PeerFailure(f"rank {donor} announces {size} bytes of constants: at most {MAX_CONSTANTS_BYTES}")
    words = np.zeros(-(-size // 8), np.uint64)
    bare = [rank for rank in range(session.world_size) if rank not in holders]
    send: dict[int, Words] = {}
    if session.rank == donor:
        words.view(np.uint8)[:size] = np.frombuffer(own, np.uint8)
        send = dict.fromkeys(bare, words)
    out = {donor: words} if session.rank in bare else {}
    transport.exchange(send, out, "sharing constants")
    found = own or words.tobytes()[:size]
    if _digest(found) != digest:
        raise PeerFailure(f"the constants that came from rank {donor} are not those that it announced")
    fields: dict[str, Any] = json.loads(found)
    fields["positions"], fields["domains"] = tuple(fields["positions"]), tuple(fields["domains"])
    return History(**fields, slot_bytes=slot_bytes)


def _packed(arena: Arena) -> tuple[bytes, int]:
    """An arena's shared constants as JSON, and the room of its slots in bytes."""
    shared = dataclasses.asdict(History.of(arena.constants))
    room_bytes = shared.pop("slot_bytes")
    return json.dumps(shared, sort_keys=True).encode(), room_bytes


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


Places = list[list[Shard]]
"""[rank][table]: each rank's tables, in the order of their addresses."""


def pack_places(places: Sequence[Sequence[Shard]]) -> str:
    """Packs the tables of all ranks into one text."""
    tables: dict[tuple[str, tuple[Column, ...], str, int | None], int] = {}
    ranks: list[list[tuple[int, int, int]]] = []
    for of_rank in places:
        ranks.append([])
        for shard in of_rank:
            table = shard.layout.name, shard.layout.columns, shard.layout.group, shard.rows
            ranks[-1].append((tables.setdefault(table, len(tables)), shard.layout.rows, shard.start))
    described = [
        [name, [[column.name, column.dtype, column.row_bytes] for column in columns], group, rows]
        for name, columns, group, rows in tables
    ]
    return json.dumps([described, ranks], separators=(",", ":"))


def check_hand(places: Sequence[Sequence[Shard]], named: Sequence[Sequence[str]]) -> None:
    """Checks that the shards that the script places by `shards=` are the whole table, without overlap.

    Args:
        places: rank -> its tables.
        named: rank -> names of the tables in its `shards=`.

    Raises:
        ConfigurationError: rows are missing or in two shards, or a rank doesn't place its shard.
    """
    for name in sorted({name for of_rank in named for name in of_rank}):
        found = {rank: one for rank, held in enumerate(places) for one in held if one.layout.name == name}
        if left := [rank for rank in found if name not in named[rank]]:
            raise ConfigurationError(f"shards= has {name!r}, but not on ranks {left}: place it on all ranks")
        runs = sorted((one.start, one.start + one.layout.rows) for one in found.values() if one.layout.rows)
        wholes = {one.rows or 0 for one in found.values()}
        ends = [0, *(stop for _, stop in runs)]
        if [start for start, _ in runs] != ends[:-1] or wholes != {ends[-1]}:
            held = ", ".join(f"{start} to {stop - 1}" for start, stop in runs)
            raise ConfigurationError(
                f"shards= places rows {held} of {name!r}, a table of {sorted(wholes)} rows: rows are missing "
                f"or twice there. Each rank holds neighbouring rows, and each row is on one rank"
            )


def unpack_places(text: str) -> Places:
    """Inverse of `pack_places`.

    Raises:
        InconsistentArenas: `pack_places` does not return such a text.
    """
    try:
        tables, ranks = json.loads(text)
        return [
            [
                Shard(TableLayout.from_json([tables[at][0], rows, *tables[at][1:3]]), start, tables[at][3])
                for at, rows, start in of_rank
            ]
            for of_rank in ranks
        ]
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise InconsistentArenas(
            f"the arenas say in {text[:60]!r} where the rows of each rank stand, which can't be read "
            f"({error}): another version of ecemb made them. Launch the number of ranks that made them, or "
            f"resume from a checkpoint: ecemb.protect(resume=)"
        ) from error


@dataclasses.dataclass(frozen=True)
class OldArenas:
    """The arenas that another number of ranks made, and from which the job continues.

    Attributes:
        history: the constants that the arenas share.
        recovery: the plan that brings the arenas to one transaction.
    """

    history: History
    recovery: RecoveryPlan

    @functools.cached_property
    def places(self) -> Places:
        """Each old rank's tables, with their places in the whole tables."""
        return unpack_places(self.history.everyone)

    @functools.cached_property
    def layout(self) -> relayout.Layout:
        """The layout of each old rank's rows, with its rank state last."""
        room_bytes = self.history.rank_state_bytes
        shards = [
            (
                *(relayout.Shard(one.key(rank), one.layout, one.start) for one in of_rank),
                relayout.Shard(f"rank_state/{rank}", rank_states.layout(room_bytes)),
            )
            for rank, of_rank in enumerate(self.places)
        ]
        return relayout.Layout(self.history.placement, self.history.k, tuple(shards))

    def stored(self, job: str, more: Mapping[str, Any] | None = None) -> Stored:
        """The arenas, described as a checkpoint.

        Args:
            job: the job's name.
            more: facts that are known once the arenas are at the plan's transaction; None before.
        """
        facts = {
            "format": FORMAT,
            "job": job,
            "lineage": self.history.lineage,
            "step": self.recovery.transaction,
            "world_size": self.history.world_size,
            "code": [self.history.n, self.history.k],
            "tables": [[shard.describe() for shard in of_rank] for of_rank in self.places],
            "rank_state_bytes": [],
            **(more or {}),
        }
        return Stored("the job's memory", self.recovery.transaction, facts)


def is_of_other_ranks(history: History | None, session: Session) -> bool:
    """Whether another number of ranks made the arenas that survived."""
    return history is not None and history.world_size != session.world_size
