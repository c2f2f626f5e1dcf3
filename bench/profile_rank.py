"""One rank of `bench.profile`: trains under a guard and torch's profiler, and tells when each span was."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import ecemb
from bench.overhead_models import ENGINES
from bench.overhead_rank import WARM_UP, Bare, Order, Protected, draw, protect, run
from bench.ranks import Line

STEP = "step"
OWN, OURS = "bench.", "ecemb."
"""What the names of spans begin with: of training, and of protection."""


class Span(NamedTuple):
    """Attributes: its name, and when it began and ended, in ms since its step began."""

    name: str
    begin_ms: float
    end_ms: float


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    rank = dist.get_rank()
    batches = draw(order, rank, WARM_UP + order.warm_up + order.steps)
    torch.manual_seed(order.seed)
    twin = ENGINES[order.engine](order.tables, order.rows, order.dim, order.dense)
    run(Bare(twin), batches[:WARM_UP])
    record_bytes = sum(tensor.nbytes / len(tensor) for tensor in twin.tables()[0])
    guard = protect(twin, order)
    method = Protected(twin, guard)
    run(method, batches[WARM_UP : -order.steps])
    before = method.counted()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for batch in batches[-order.steps :]:
            with record_function(OWN + STEP):
                method.train(batch)
    after = method.counted()
    report = guard.scrub()
    line.tell(
        {
            "rank": rank,
            "steps": steps_of(profiler.events()),
            "record_bytes": record_bytes,
            "sent_bytes": after["sent_bytes"] - before["sent_bytes"],
            "touched_rows": after["touched_rows"] - before["touched_rows"],
            "wrong_words": report.wrong_words,
        }
    )
    guard.close()
    dist.destroy_process_group()


def steps_of(events: Iterable[Any]) -> list[list[Span]]:
    """The spans of each step, the step itself first; in the order of their begin."""
    spans = sorted(
        (event.time_range.start, -event.time_range.end, event.name)
        for event in events
        if event.name.startswith((OWN, OURS))
    )
    steps: list[list[Span]] = []
    began = 0.0
    for start, negative_end, name in spans:
        if name == OWN + STEP:
            began = start
            steps.append([])
        if steps:
            steps[-1].append(Span(name, (start - began) / 1000, (-negative_end - began) / 1000))
    return steps
