"""What other machines keep of a snapshot, so that it outlives some of them.

Must not know: when snapshots are made, what is in them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from baselines.slots import Slots, Stamp

from .plan import Plan


class Redundancy(ABC):
    """A way to make snapshots outlive machines."""

    @property
    @abstractmethod
    def survives(self) -> int:
        """Any this many machines may be lost at once."""

    @abstractmethod
    def plan(self, held: Sequence[Sequence[tuple[str, Stamp]]]) -> Plan | None:
        """The newest snapshot that can be gone back to.

        Args:
            held: rank -> names and stamps of the parts in its machine's memory.

        Returns:
            None if there is no such snapshot.

        Raises:
            ValueError: there are too few ranks.
        """

    @abstractmethod
    def fetch(self, plan: Plan, slots: Slots) -> int:
        """Brings the parts here that this rank needs and its machine doesn't have. All ranks.

        Returns:
            Bytes sent from here.
        """

    @abstractmethod
    def spread(self, stamp: Stamp, slots: Slots, group: dist.ProcessGroup | None = None) -> int:
        """Makes what others keep of a snapshot, of which each rank has its own part. All ranks.

        Args:
            stamp: of the snapshot.
            slots: of this machine; while it lasts, no other call of `Slots.begin` or `Slots.seal` comes.
            group: of all ranks, that messages go through; None: the default one.

        Returns:
            Bytes sent from here.
        """


def sizes(mine: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """All ranks' numbers, in the order of ranks. All ranks."""
    theirs = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, torch.tensor([mine]), group=group)
    return [int(size) for size in theirs]
