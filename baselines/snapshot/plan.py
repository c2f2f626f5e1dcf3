"""Which snapshot all ranks go back to, and who sends what to whom: pure functions of what machines hold.

Must not know: processes, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baselines.slots import Stamp

SHARED = "shared"


def own(rank: int) -> str:
    """Name of a rank's own part."""
    return f"own-{rank}"


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
        moves: parts that their ranks don't have themselves.
    """

    stamp: Stamp
    moves: tuple[Move, ...]


def plan(held: Sequence[Sequence[tuple[str, Stamp]]]) -> Plan | None:
    """The newest snapshot of which every part is somewhere.

    Args:
        held: rank -> names and stamps of the parts in its machine's memory.

    Returns:
        None if there is no such snapshot.
    """
    ranks = range(len(held))
    needed = [SHARED, *(own(rank) for rank in ranks)]
    for stamp in sorted({stamp for parts in held for _, stamp in parts}, reverse=True):
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
