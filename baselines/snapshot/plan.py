"""Which snapshot all ranks go back to, and who sends what to whom: pure functions of what machines hold.

Must not know: processes, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baselines.ring import Ring
from baselines.slots import Stamp

SHARED = "shared"


def own(rank: int) -> str:
    """Name of a rank's own part."""
    return f"own-{rank}"


def parity(rank: int) -> str:
    """Name of the parity that a rank keeps."""
    return f"parity-{rank}"


@dataclass(frozen=True)
class Move:
    """One part that a machine sends to another's.

    Attributes:
        name: of the part.
        source: rank on the machine that has it.
        target: rank that needs it.
    """

    name: str
    source: int
    target: int


@dataclass(frozen=True)
class Plan:
    """Where all ranks go back to.

    Attributes:
        stamp: of the snapshot.
        moves: parts that their ranks don't have themselves, and others do.
        lost: ranks whose own parts are decoded from parity.
    """

    stamp: Stamp
    moves: tuple[Move, ...]
    lost: tuple[int, ...] = ()


def plan(held: Sequence[Sequence[tuple[str, Stamp]]]) -> Plan | None:
    """The newest snapshot of which every part is somewhere.

    Args:
        held: rank -> names and stamps of the parts in its machine's memory.

    Returns:
        None if there is no such snapshot.
    """
    ranks = range(len(held))
    needed = [SHARED, *(own(rank) for rank in ranks)]
    for stamp in _stamps(held):
        holders = {name: [rank for rank in ranks if (name, stamp) in held[rank]] for name in needed}
        if all(holders.values()):
            moves = [
                Move(name, holders[name][0], rank)
                for rank in ranks
                for name in (own(rank), SHARED)
                if rank not in holders[name]
            ]
            return Plan(stamp, tuple(moves))
    return None


def plan_coded(held: Sequence[Sequence[tuple[str, Stamp]]], ring: Ring) -> Plan | None:
    """The newest snapshot of which every own part is there, or parity gives it.

    Args:
        held: rank -> names and stamps of the parts in its machine's memory.
        ring: who keeps parity of what.

    Returns:
        None if there is no such snapshot.
    """
    ranks = range(len(held))
    for stamp in _stamps(held):
        there = [{name for name, one in parts if one == stamp} for parts in held]
        sharers = [rank for rank in ranks if SHARED in there[rank]]
        lost: tuple[int, ...] = ()
        if not all(own(rank) in there[rank] for rank in ranks):
            lost = tuple(rank for rank in ranks if not {own(rank), parity(rank)} <= there[rank])
        if sharers and ring.tolerates(lost):
            moves = [Move(SHARED, sharers[0], rank) for rank in ranks if rank not in sharers]
            return Plan(stamp, tuple(moves), lost)
    return None


def _stamps(held: Sequence[Sequence[tuple[str, Stamp]]]) -> list[Stamp]:
    """All that there are, the newest first."""
    return sorted({stamp for parts in held for _, stamp in parts}, reverse=True)
