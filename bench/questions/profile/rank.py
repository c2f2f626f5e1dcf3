"""One rank: trains under a guard and torch's profiler, and reports when each span was."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import ecemb
from bench.harness.ranks import Line
from bench.workloads.models import ENGINES
from bench.workloads.training_rank import WARM_UP, Bare, Order, Protected, draw, protect, run

STEP = "step"
OWN, OURS = "bench.", "ecemb."
"""What the names of spans begin with: of training, and of protection."""

COPIED_BYTES, COPIES = 64 << 20, 8
"""Each copy is larger than caches."""


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
    batches = draw(order, rank, 2 * WARM_UP + order.steps)
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
    line.send(
        {
            "rank": rank,
            "dense_bytes": guard.stats()["bytes"]["slot0"],
            "copied_bytes_per_s": copied_bytes_per_s(),
            "steps": steps_of(profiler.events()),
            "record_bytes": record_bytes,
            "sent_bytes": after["sent_bytes"] - before["sent_bytes"],
            "touched_rows": after["touched_rows"] - before["touched_rows"],
            "wrong_words": report.wrong_words,
        }
    )
    guard.close()
    dist.destroy_process_group()


def copied_bytes_per_s() -> float:
    """What a rank reads and writes in a second of processor time; all copy what no cache holds. All ranks."""
    source, target = np.ones(COPIED_BYTES, np.uint8), np.ones(COPIED_BYTES, np.uint8)
    dist.barrier()
    began = time.process_time()
    for _ in range(COPIES):
        np.copyto(target, source)
    return 2 * COPIES * COPIED_BYTES / (time.process_time() - began)


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
