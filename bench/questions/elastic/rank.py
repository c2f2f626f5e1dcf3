"""One rank of a job whose memory moves: it starts, trains a step, and leaves its arena to the next launch."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecemb
from bench.harness.guarded_job import GuardedJob
from bench.harness.ranks import Line
from bench.questions.recovery.wire import WORD_BYTES, Links, seconds
from ecemb.recovery.relay import PROCESS_BYTES
from ecemb.recovery.relayout import Relayout
from ecemb.start import moving

DIM = 64
RECORD_BYTES = 2 * 4 * DIM
"""Of one row: its weights and Adagrad's sums, float32."""
_POLL_S = 0.001


@dataclass(frozen=True)
class Order(GuardedJob):
    """What a rank is to do.

    Attributes:
        rows: Of the table, over all ranks.
        hosts: Of each rank; n and k are of the code.
    """

    rows: int
    hosts: tuple[str, ...]


class Peak:
    """The most memory that the arenas of a job, and this process's own pages, take while a block runs."""

    def __init__(self, order: Order) -> None:
        self._folder = Path(order.arena_dir, f"ecemb-{os.geteuid()}", order.job)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.before_bytes = self.arena_bytes = self._arenas()
        self.own_before_bytes = self.own_bytes = _own_bytes()

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_POLL_S):
            self.arena_bytes = max(self.arena_bytes, self._arenas())
            self.own_bytes = max(self.own_bytes, _own_bytes())

    def _arenas(self) -> int:
        total = 0
        for path in self._folder.glob("*/*.arena"):
            try:
                total += path.stat().st_blocks * 512
            except FileNotFoundError:
                continue
        return total


def _own_bytes() -> int:
    """Private memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this kernel doesn't count private memory")


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    host = order.hosts[int(os.environ["RANK"])]
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir, host=host, timeout=timeout)
    torch.manual_seed(order.seed)
    table = ecemb.nn.ShardedEmbeddingBag(order.rows, DIM, device="meta")
    sparse = torch.optim.Adagrad([table.weight], lr=0.1)
    plans: list[Relayout] = []
    planned = moving.plan_relayout

    def kept(*arguments: Any, **more: Any) -> Relayout:
        plans.append(planned(*arguments, **more))
        return plans[-1]

    moving.plan_relayout = kept
    dist.barrier()
    with Peak(order) as peak:
        guard = ecemb.protect(
            nn.ModuleDict({"table": table}),
            optimizers=sparse,
            code=ecemb.Code(n=order.n, k=order.k),
            elastic=True,
        )
    first = guard.next_step
    found = checksum(table, sparse)
    wire_s = seconds(links(plans[0])) if plans else 0.0
    with guard.step():
        sparse.zero_grad()
        ids = torch.randint(order.rows, (256, 4))
        table(ids).square().mean().backward()
        sparse.step()
    dist.barrier()
    line.send(
        {
            "kind": guard.recovery.kind,
            "step": first,
            "checksum": found,
            "next": checksum(table, sparse),
            "seconds": guard.recovery.seconds,
            "wire_s": wire_s,
            "received_bytes": guard.recovery.rebuilt_bytes,
            "sent_bytes": sum(links(plans[0]).values()) if plans else 0,
            "said_bytes": sum(plans[0].needed_bytes.values()) if plans else 0,
            "arena_bytes": peak.arena_bytes - peak.before_bytes,
            "own_bytes": peak.own_bytes - peak.own_before_bytes,
            "buffer_bytes": PROCESS_BYTES,
        }
    )
    line.await_end()


def links(plan: Relayout) -> Links:
    """What a move sends from rank to rank."""
    traffic: Counter[tuple[int, int]] = Counter()
    for move in plan.moves:
        for sender, receiver in itertools.pairwise(plan.path(move)):
            if sender != receiver:
                traffic[sender, receiver] += len(move.words) * WORD_BYTES
    return traffic


def checksum(table: ecemb.nn.ShardedEmbeddingBag, sparse: torch.optim.Optimizer) -> int:
    """A sum over the bits of all rows, each times its number, of all ranks: the same for any sharding."""
    total = torch.zeros((), dtype=torch.int64)
    numbers = torch.arange(table.rows.start, table.rows.stop)[:, None] * DIM + torch.arange(DIM) + 1
    tensors: list[Tensor] = [table.weight.detach(), sparse.state[table.weight]["sum"]]
    for place, tensor in enumerate(tensors):
        total += (tensor.view(torch.int32).to(torch.int64) * (numbers * 2 + place)).sum()
    dist.all_reduce(total)
    return int(total)
