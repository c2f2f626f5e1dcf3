"""What plain gloo send and receive take for the bytes that a rebuild moves, between the same processes."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist

from ecemb.coding.parity import class_words
from ecemb.coding.placement import Placement
from ecemb.memory.header import Constants, Header
from ecemb.memory.scan import arenas
from ecemb.recovery.plan import plan_recovery

WORD_BYTES = 8
MESSAGE_BYTES = 1 << 20
SAME, DIRECT = "same messages", "lost bytes alone"
"""What is sent: all that the rebuild sends, on the same links; or each lost byte once, from one survivor."""

Links = Mapping[tuple[int, int], int]
"""(sender, receiver) -> bytes."""


def measure(job: str, arena_dir: str, lost: Sequence[int]) -> dict[str, float]:
    """How long all ranks take for each kind of traffic of a rebuild of `lost`, in seconds. All ranks."""
    headers = [one.header for one in arenas(arena_dir) if one.job == job and one.header is not None]
    traffic = links(headers, lost)
    return {name: seconds(each) for name, each in traffic.items()} | {
        f"{name} bytes": float(sum(each.values())) for name, each in traffic.items()
    }


def links(headers: Sequence[Header], lost: Sequence[int]) -> dict[str, Links]:
    """What a rebuild of ranks `lost` sends from whom to whom."""
    left = [header for header in headers if header.constants.rank not in lost]
    constants = cast("Constants", left[0].constants)  # read from an arena: all of them
    placement = Placement(constants.n, constants.k, constants.positions)
    same: Counter[tuple[int, int]] = Counter()
    direct: Counter[tuple[int, int]] = Counter()
    for task in plan_recovery(left, placement).rebuild:
        words = class_words(placement, constants.block_words, task.stripe_class)
        if task.block < constants.k:
            words = constants.block_words[task.rank][task.block]
        chain = [rank for _, rank in task.sources] + [task.rank]
        for link in itertools.pairwise(chain):
            same[link] += words * WORD_BYTES
        direct[chain[-2], chain[-1]] += words * WORD_BYTES
    return {SAME: same, DIRECT: direct}


def seconds(traffic: Links) -> float:
    """Sends it, all links at once, every message as soon as gloo takes it. All ranks."""
    rank = dist.get_rank()
    # Filled: memory that was never touched is no match for what a rebuild sends.
    buffers = {link: torch.ones(size, dtype=torch.uint8) for link, size in traffic.items() if rank in link}
    dist.barrier()
    began = time.perf_counter()
    works: list[dist.Work | None] = []
    for (sender, receiver), buffer in buffers.items():
        for part in buffer.split(MESSAGE_BYTES):
            works.append(dist.isend(part, receiver) if rank == sender else dist.irecv(part, sender))
    for work in works:
        if work is not None:
            work.wait()
    dist.barrier()
    return time.perf_counter() - began
