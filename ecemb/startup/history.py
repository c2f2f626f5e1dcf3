"""What all arenas of one history hold alike, and how ranks without an arena learn it. All ranks.

A *history* begins with the fresh start or the resume that made its first arenas; replacements are made with
the same constants. These may be large, so that they don't go through torchrun's store at a start: survivors
compare digests over the process group, and one of them sends the bytes to the ranks that have none. Writes
to no arena.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from typing import Any

import numpy as np

from ..arena.arena import Arena
from ..arena.header import MAX_CONSTANTS_BYTES, Constants
from ..coding.placement import Placement
from ..errors import InconsistentArenas, PeerFailure
from ..group.collectives import Transport, Words
from ..session import Session

_DIGEST_BYTES = 16
_CONSTANTS = struct.Struct(f"<qq{_DIGEST_BYTES}s")
"""Of a rank's arena: bytes of what it shares with all others; room of its slots; digest of the former."""


@dataclasses.dataclass(frozen=True)
class History:
    """What all arenas that survived hold alike, written at the fresh start or resume that made them.

    Attributes:
        n: of the code.
        k: of the code.
        positions: rank -> placement position.
        domains: rank -> host.
        layout_hash: of all ranks' tables.
        lineage: see `World`; empty in arenas that older versions made.
        rank_state_bytes: room for every rank's packed state.
        slot_bytes: room of the donor's slots: larger in some arenas than in others.
        everyone: where the rows of each rank stand, packed by `ecemb.startup.places`.
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
        """What an arena's constants say of its history."""
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
    """The constants of the arenas that survived: compared by digest, sent to ranks that have none. All ranks.

    Returns:
        None if no arena survived.

    Raises:
        InconsistentArenas: they differ.
        PeerFailure: what came from the donor is not what it announced.
    """
    held = [_packed(arena) for arena in (session.arena, *session.held) if arena is not None]
    own, room_bytes = held[0] if held else (b"", 0)
    alike = _digest(own) if all(text == own for text, _ in held) else bytes(_DIGEST_BYTES)
    told = transport.gather(_CONSTANTS.pack(len(own), room_bytes, alike), "comparing constants")
    each = [_CONSTANTS.unpack(one) for one in told]
    holders = [rank for rank, (size, _, _) in enumerate(each) if size]
    if not holders:
        return None
    donor = holders[0]
    size, slot_bytes, digest = each[donor]
    if differing := [rank for rank in holders if each[rank][2] != digest]:
        raise InconsistentArenas(
            f"the arenas of ranks {differing} were made with other constants than that of rank {donor} "
            f"(code, placement, hosts, tables): they are not of one start; nothing was written. Remove those "
            f"that shall not count: python -m ecemb arenas rm PATH"
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
    """What an arena shares with all others of its history, and the room of its slots."""
    shared = dataclasses.asdict(History.of(arena.constants))
    room_bytes = shared.pop("slot_bytes")
    return json.dumps(shared, sort_keys=True).encode(), room_bytes


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
