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
        apart: distance between them, in ranks: as many as a machine has, so that each is on another one.

    Raises:
        ValueError: either is below 1.
    """

    count: int = 1
    apart: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or self.apart < 1:
            raise ValueError(
                f"copies, of each rank's state at others, are at least 1, and so is their distance; got "
                f"{self.count} and {self.apart}"
            )

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
        apart = self.apart if ranks > self.apart * self.count else 1  # one machine, or few
        partners = min(self.count, ranks - 1)
        for distance in range(apart, apart * partners + 1, apart):
            source = (rank - distance) % ranks
            sending = dist.isend(mine, (rank + distance) % ranks, group=group)
            dist.recv(torch.from_numpy(slots.begin(own(source), lengths[source])), source, group=group)
            slots.seal(stamp)
            if sending is not None:
                sending.wait()
        return partners * mine.numel()
