"""Whole copies of each rank's own part, at the ranks after it.

Must not know: when snapshots are made, what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from baselines.slots import Slots, Stamp

from .moves import carry_out
from .plan import Plan, own, plan
from .redundancy import Redundancy, sizes


@dataclass(frozen=True)
class Copies(Redundancy):
    """As many lost machines are survived.

    Attributes:
        count: ranks that a rank's own part is sent to.

    Raises:
        ValueError: there are none.
    """

    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"copies, of each rank's state at others, are at least 1; got {self.count}")

    @property
    def survives(self) -> int:
        """See `Redundancy.survives`."""
        return self.count

    def plan(self, held: Sequence[Sequence[tuple[str, Stamp]]]) -> Plan | None:
        """See `Redundancy.plan`."""
        return plan(held)

    def fetch(self, plan: Plan, slots: Slots) -> int:
        """See `Redundancy.fetch`."""
        return carry_out(plan, slots)

    def spread(self, stamp: Stamp, slots: Slots, group: dist.ProcessGroup | None = None) -> int:
        """See `Redundancy.spread`."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = torch.from_numpy(slots.read(own(rank), stamp))
        lengths = sizes(mine.numel(), group)
        partners = min(self.count, ranks - 1)
        for distance in range(1, partners + 1):
            source = (rank - distance) % ranks
            sending = dist.isend(mine, (rank + distance) % ranks, group=group)
            dist.recv(torch.from_numpy(slots.begin(own(source), lengths[source])), source, group=group)
            slots.seal(stamp)
            if sending is not None:
                sending.wait()
        return partners * mine.numel()
