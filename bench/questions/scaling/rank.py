"""One rank: trains a few steps under a guard, and counts what it sends for protection.

Counted where ecemb calls torch.distributed: on groups other than the default one, which is the training's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecemb
from bench.harness.guarded_job import GuardedJob
from bench.harness.phase_clocks import PhaseClocks
from bench.harness.ranks import Line

DIM = 32
RECORD_BYTES = 2 * 4 * DIM
"""Of one row: its weights and Adagrad's sums, float32."""
MARK_BYTES = 64
"""A message of at most this many bytes says how things stand; a longer one may carry deltas."""
CARRIES = "exchange"
"""The phase of a commit in which deltas are sent."""
KINDS = DELTAS, AGREEMENT, EMPTY = "deltas", "agreement", "empty"
OTHERS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)
"""Collectives that ecemb doesn't use, so that the number of their messages is not known here."""


@dataclass(frozen=True)
class Order(GuardedJob):
    """What a rank is to do.

    Attributes:
        rows: Of the table on each rank.
        batch: Samples a rank takes in a step; each looks up one row of the table.
        steps: That are counted.
    """

    rows: int
    batch: int
    steps: int


@dataclass
class Sent:
    """Messages that this rank has sent.

    Attributes:
        sizes: Peer -> the bytes of each message to it.
        kinds: Peer -> what each of them is.
        unknown: Names of collectives that were called and are not counted.
        phase: Says in which phase of the protection the process is.
        by_phase: phase -> the messages with anything in them, and their bytes.
    """

    sizes: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    kinds: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    unknown: set[str] = field(default_factory=set[str])
    phase: Callable[[], str] = str
    by_phase: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def add(self, peer: int, size: int) -> None:
        phase = self.phase()
        self.sizes.setdefault(peer, []).append(size)
        self.kinds.setdefault(peer, []).append(kind_of(size, phase))
        if size:
            messages, total = self.by_phase.get(phase, (0, 0))
            self.by_phase[phase] = messages + 1, total + size

    def told(self, kind: str) -> dict[str, int]:
        """Of messages of a kind: how many, to how many peers, and their bytes."""
        chosen = {
            peer: [size for size, one in zip(sizes, self.kinds[peer], strict=True) if one == kind]
            for peer, sizes in self.sizes.items()
        }
        return {
            "messages": sum(map(len, chosen.values())),
            "peers": sum(1 for sizes in chosen.values() if sizes),
            "bytes": sum(map(sum, chosen.values())),
        }


def kind_of(size: int, phase: str) -> str:
    """What a message of this size in this phase is: deltas, agreement, or an empty part of a collective."""
    return DELTAS if size > MARK_BYTES and phase == CARRIES else AGREEMENT if size else EMPTY


@contextmanager
def counting() -> Iterator[Sent]:
    """Counts what this process sends on groups other than the default one, while the block lasts."""
    sent = Sent()
    replaced = {"all_to_all_single": _all_to_all_single, "isend": _send, "send": _send}
    originals = {name: getattr(dist, name) for name in (*replaced, *OTHERS)}
    for name, original in originals.items():
        note = replaced.get(name, functools.partial(_unknown, name))
        setattr(dist, name, functools.partial(_noted, sent, original, note))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _noted(
    sent: Sent, original: Callable[..., Any], note: Callable[..., None], *args: Any, **kwargs: Any
) -> Any:
    if kwargs.get("group") not in (None, dist.group.WORLD):
        note(sent, *args, **kwargs)
    return original(*args, **kwargs)


def _all_to_all_single(
    sent: Sent,
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    *,
    group: dist.ProcessGroup,
    **_: object,
) -> None:
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    of_row = input.nbytes // max(len(input), 1)
    splits = input_split_sizes or [len(input) // ranks] * ranks
    for peer, rows in enumerate(splits):
        if peer != own:
            sent.add(peer, rows * of_row)


def _send(
    sent: Sent,
    tensor: Tensor,
    dst: int | None = None,
    *,
    group: dist.ProcessGroup,
    group_dst: int | None = None,
    **_: object,
) -> None:
    sent.add(dist.get_group_rank(group, dst) if group_dst is None else group_dst, tensor.nbytes)


def _unknown(name: str, sent: Sent, *_: object, **__: object) -> None:
    sent.unknown.add(name)


class Model(nn.Module):
    """One table, and a small dense part that is the same on all ranks."""

    def __init__(self, rows: int, dim: int = DIM) -> None:
        super().__init__()
        self.table = ecemb.nn.ShardedEmbeddingBag(rows, dim, device="meta")
        self.head = nn.Linear(dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores samples: ids int64 [batch, 1]."""
        return self.head(self.table(ids))


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(order.seed)
    model = Model(order.rows * ranks)
    sparse = torch.optim.Adagrad(model.table.parameters(), lr=0.1)
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1)
    code = ecemb.Code(n=order.n, k=order.k)
    guard = ecemb.protect(model, optimizers=[sparse, dense], code=code, failure_domain="rank")
    generator = torch.Generator().manual_seed(order.seed * 1000 + rank)

    def train(steps: int) -> None:
        for _ in range(steps):
            with guard.step():
                sparse.zero_grad()
                dense.zero_grad()
                ids = torch.randint(order.rows * ranks, (order.batch, 1), generator=generator)
                (model(ids).square().mean() / ranks).backward()
                for parameter in model.head.parameters():
                    dist.all_reduce(parameter.grad)
                sparse.step()
                dense.step()

    train(1)  # the first step compares more than others do
    before = guard.stats()
    phases = PhaseClocks(guard)
    with counting() as sent:
        sent.phase = lambda: phases.now
        train(order.steps)
    stats = guard.stats()
    report = guard.scrub()
    line.send(
        {
            "rank": rank,
            "sent": {kind: sent.told(kind) for kind in KINDS},
            "unknown": sorted(sent.unknown),
            "peers": sorted(peer for peer, kinds in sent.kinds.items() if DELTAS in kinds),
            "sent_bytes": stats["sent_bytes"] - before["sent_bytes"],
            "touched_rows": stats["captured_rows"] - before["captured_rows"],
            "bytes": stats["bytes"],
            "wrong_words": report.wrong_words,
        }
    )
    guard.close()
    dist.destroy_process_group()
