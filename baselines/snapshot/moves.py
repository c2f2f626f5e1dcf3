"""Carries out a plan: parts go from one machine's memory to another's.

Must not know: which, and why.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from baselines.slots import Slots

from .plan import Plan


def carry_out(plan: Plan, slots: Slots) -> int:
    """Sends and receives this rank's share of all moves. All ranks.

    Returns:
        Bytes sent from here.
    """
    rank, sent_bytes = dist.get_rank(), 0
    for move in plan.moves:
        if rank == move.source:
            part = torch.from_numpy(slots.read(move.name, plan.stamp))
            dist.send(torch.tensor([part.numel()]), move.target)
            dist.send(part, move.target)
            sent_bytes += part.numel()
        elif rank == move.target:
            size = torch.empty(1, dtype=torch.int64)
            dist.recv(size, move.source)
            dist.recv(torch.from_numpy(slots.begin(move.name, int(size))), move.source)
            slots.seal(plan.stamp)
    return sent_bytes
