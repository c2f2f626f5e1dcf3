"""One rank of paired trainings: in each round, every model trains one step on the same batch, in any order.

Other load on the machine, which changes within seconds, so meets all models alike. Of each model's step the
processor time of all threads is taken. Threads that the protection has made may work on while another model
trains: their own clocks say how much, so that it can be counted where it belongs.

A window of more steps than are measured is filled with *quiet* steps: a quiet step captures the rows that a
batch would change, by as many calls, and trains nothing. It costs a hundredth of a step. Its time is not
measured. Commits are always measured.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import ecemb
from baselines import live_copies
from bench.harness.devices import begin, settle
from bench.harness.phase_clocks import PhaseClocks
from bench.harness.ranks import Line
from bench.harness.thread_clocks import ThreadClocks, threads, with_own_network
from bench.workloads.models import ENGINES, EVICT_EVERY, Batch, Twin
from bench.workloads.training_rank import (
    BARE,
    CONTROL,
    PROTECTED,
    REPLICATION,
    WARM_UP,
    Bare,
    Order,
    Protected,
    Replicated,
    by_columns,
    digest,
    draw,
    popularity,
    protect,
    run,
)
from ecemb.coding.rows import TableLayout, joined
from ecemb.step.window import MEASURED
from ecemb.step.window import WARM_UP as SKIPPED

SETTLING = 3
"""Steps of all models between the guard and what is measured."""
CHOOSING = SKIPPED + MEASURED + 5
"""Instead of them, for the window "auto", which chooses by the times of these. A choice holds a few later."""
SETTLING_OF = {"managed": EVICT_EVERY}
"""The same by engine: the first eviction lets journals grow to the size of the maps, once in a training."""
IDLE_ROUNDS = 10
"""Rounds of bare steps, after all others, in which the protection's threads have nothing to do."""
LEAST_COMMITS = 3
"""Windows among which measured steps are spread, if there are enough steps."""


class Clocked(Protected):
    """A protected model that counts the processor time of the protection's own calls on the thread's clock.

    Attributes:
        phases_s: phase -> seconds of processor time, of whichever thread ran it.
        ends_s: of the training's thread, at the begin and at the end of all steps.
    """

    def __init__(self, twin: Twin, guard: ecemb.Guard) -> None:
        super().__init__(twin, guard)
        self.phases_s = PhaseClocks(guard).spent_s
        self.ends_s = 0.0

    def train(self, batch: Batch) -> None:
        """One step, as a transaction."""
        with self.step():
            self.twin.train(batch)

    def keep_window(self) -> None:
        """The window "auto" stays as it is: other models' steps and quiet ones would change its choice."""
        window = self.guard._transactions.window
        setattr(window, "begin", lambda: None)  # noqa: B010 - of this object alone
        setattr(window, "end", lambda _: None)  # noqa: B010

    @contextmanager
    def step(self) -> Generator[None]:
        """Around the body of one step, which doesn't count."""
        began = time.thread_time()
        with self.guard.step():
            begun = time.thread_time()
            yield
            ended = time.thread_time()
        self.ends_s += begun - began + time.thread_time() - ended


class Quiet:
    """Steps that change nothing, and capture as many rows, as popular, as those that a step would change.

    A step's hooks capture the rows of tables that share a buffer in one call; so does a quiet step.

    Args:
        order: What the ranks do; rows are sharded in blocks of equally many.
        protected: The model of this rank.
        rank: This one.
    """

    def __init__(self, order: Order, protected: Clocked, rank: int) -> None:
        self._protected = protected
        self._rng = np.random.default_rng([order.seed, rank, 1])
        ranks = dist.get_world_size()
        share = -(-order.rows // ranks)
        weights, popular = popularity(order)
        self._lookups = ranks * order.batch * order.lookups
        places = places_in_groups([table.layout for table in protected.guard._tables.tables])
        of_groups: dict[int, list[tuple[int, Any]]] = {}
        for name, rows in zip(by_number(protected.guard.tables, order.tables), popular, strict=True):
            of_row = np.empty(order.rows)
            of_row[rows] = weights
            local = of_row[rank * share : (rank + 1) * share]
            if len(local):
                group, first = places[name]
                of_groups.setdefault(group, []).append((first, np.cumsum(local)))
        self._of_groups = of_groups

    def step(self) -> None:
        """One step. All ranks."""
        with self._protected.step():
            for group, tables in self._of_groups.items():
                rows = np.concatenate([first + self._drawn(heaped) for first, heaped in tables])
                self._protected.guard._transactions.capture(group, rows)

    def _drawn(self, heaped: NDArray[np.float64]) -> NDArray[np.int64]:
        """Rows of a table's shard that a batch looks up, some of them several times."""
        drawn = self._rng.random(round(self._lookups * heaped[-1])) * heaped[-1]
        return np.minimum(np.searchsorted(heaped, drawn), len(heaped) - 1)


def places_in_groups(layouts: Sequence[TableLayout]) -> dict[str, tuple[int, int]]:
    """Table -> the number of the first table that it shares a buffer with, and its first row in there."""
    found: dict[str, tuple[int, int]] = {}
    head = first = end = 0
    for number, (layout, whole) in enumerate(zip(layouts, joined(layouts), strict=True)):
        if first == end:
            head, first, end = number, 0, whole.rows
        found[layout.name] = head, first
        first += layout.rows
    return found


def by_number(names: Sequence[str], count: int) -> list[str]:
    """The keys of tables in the order of the last number in each.

    Raises:
        ValueError: They are not numbered from 0 on.
    """
    found = {int(re.findall(r"\d+", name)[-1]): name for name in names}
    if sorted(found) != list(range(count)):
        raise ValueError(f"{count} tables are expected to be numbered from 0 on, in the keys {names}")
    return [found[number] for number in range(count)]


def measured_places(steps: int, window: int, seed: int) -> list[list[int]]:
    """Of each window, the places of the steps that are measured: the last one, and some of the others.

    Args:
        steps: To be measured in all windows together.
        window: Steps of a window.
        seed: Of the choice.
    """
    rng = random.Random(seed)
    least = 2 if window > 1 else 1  # a commit, and another step
    windows = max(1, min(steps // least, max(LEAST_COMMITS, -(-steps // window))))
    found: list[list[int]] = []
    for number in range(windows):
        others = min(window, steps * (number + 1) // windows - steps * number // windows) - 1
        edges = [(window - 1) * cell // others for cell in range(others + 1)] if others else [0]
        places = [rng.randrange(a, b) for a, b in itertools.pairwise(edges)]
        found.append([*places, window - 1])
    return found


def turns(rounds: int, methods: Sequence[str], seed: int) -> list[tuple[str, ...]]:
    """The order of the models in each round: in as many rounds as models, each has each place once."""
    rng = random.Random(seed)
    found: list[tuple[str, ...]] = []
    while len(found) < rounds:
        names = rng.sample(methods, len(methods))
        turned = [tuple(names[i:] + names[:i]) for i in range(len(names))]
        found += rng.sample(turned, len(turned))
    return found[:rounds]


class Slots:
    """Takes the times of single steps.

    Args:
        device: One of `devices`.
        beside: Threads of the protection, which may work while any model trains.
        watch: Threads that watch the other ranks all the time.

    Attributes:
        taken: method -> of each of its steps the processor time of the process, the wall time, the processor
            time of `beside` and of `watch` meanwhile; in seconds.
    """

    def __init__(self, device: str, beside: ThreadClocks, watch: ThreadClocks) -> None:
        self._device, self._beside, self._watch = device, beside, watch
        self.taken: dict[str, list[tuple[float, float, float, float]]] = {}

    def take(self, name: str, method: Bare, batch: Batch) -> None:
        """Trains one step. All ranks."""
        settle(self._device)
        dist.barrier()
        beside, watch = self._beside.read(), self._watch.read()
        wall, cpu = time.perf_counter(), time.process_time()
        method.train(batch)
        settle(self._device)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        times = cpu, wall, self._beside.read() - beside, self._watch.read() - watch
        self.taken.setdefault(name, []).append(times)


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    torch.set_num_threads(order.threads)
    device = begin(order.device, int(os.environ["RANK"]))
    others = {thread.native_id for thread in threading.enumerate()}
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group(order.backend, job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    watch = ThreadClocks(
        t.native_id for t in threading.enumerate() if t.native_id and t.native_id not in others
    )
    rank = dist.get_rank()
    settling = CHOOSING if order.window == "auto" else SETTLING_OF.get(order.engine, SETTLING)
    batches = draw(order, rank, WARM_UP + settling + order.steps)
    if device is not None:
        batches = [Batch(*(tensor.to(device) for tensor in batch)) for batch in batches]
    before, first, timed = (
        batches[:WARM_UP],
        batches[WARM_UP : WARM_UP + settling],
        batches[WARM_UP + settling :],
    )
    staying = {} if device is None else {"device": device, "rule": order.rule}
    twins: dict[str, Twin] = {}
    for name in order.methods:
        torch.manual_seed(order.seed)
        twins[name] = ENGINES[order.engine](order.tables, order.rows, order.dim, order.dense, **staying)
        run(Bare(twins[name]), before)
    began = digest(twins[order.methods[0]].tensors())
    methods = {name: Bare(twin) for name, twin in twins.items()}
    if REPLICATION in twins:
        methods[REPLICATION] = Replicated(twins[REPLICATION], order)
    known = threads()
    protected = None
    if PROTECTED in twins:
        with with_own_network():
            methods[PROTECTED] = protected = Clocked(twins[PROTECTED], protect(twins[PROTECTED], order))
    for method in methods.values():
        run(method, first)
    if protected is not None and order.window == "auto":
        protected.keep_window()
    answer = measure(methods, protected, timed, order, known, watch)
    answer |= {
        "rank": rank,
        "began": began,
        "digests": {name: digest(twin.tensors()) for name, twin in twins.items()},
    }
    if protected is not None:
        bare = {name: method for name, method in methods.items() if name in (BARE, CONTROL)}
        slots = Slots(order.device, ThreadClocks(threads() - known), watch)
        answer["idle"] = idle(bare, timed[-IDLE_ROUNDS:], slots)
    if isinstance(replicated := methods.get(REPLICATION), Replicated):
        replicas = replicated.replication.replicas
        answer["columns"] = by_columns(live_copies.joined(twins[REPLICATION].tables()))
        answer["replicas"] = {source: by_columns(shards) for source, shards in replicas.items()}
    if protected is not None:
        report = protected.guard.scrub() if dist.get_world_size() > 1 else None  # one rank keeps no parity
        answer["committed_steps"] = protected.guard.stats()["steps"] - settling
        answer["wrong_words"] = report.wrong_words if report is not None else 0
        answer["scrubbed"] = report is None or report.complete
    line.send(answer)
    if protected is not None:
        protected.guard.close()
    dist.destroy_process_group()


def measure(
    methods: dict[str, Bare],
    protected: Clocked | None,
    batches: Sequence[Batch],
    order: Order,
    known: set[int],
    watch: ThreadClocks,
) -> dict[str, Any]:
    """Trains all rounds. All ranks.

    Args:
        methods: The models by name.
        protected: The one that is protected, if one is.
        batches: One for each round.
        order: What to do.
        known: Threads that are not of the protection.
        watch: See `Slots`.

    Returns:
        `slots`, see `Slots.taken`; `commits`, of each round whether a transaction ended in it; `cycles`,
        processor time of the threads beside and wall time, from the begin of each commit to the begin of the
        next; and the sums over all steps, quiet ones included (`protected_steps`): `counted`, by method,
        `phases_cpu_s`, `ends_cpu_s`, `beside_cpu_s`, `watch_cpu_s`, with `wall_s`, that all took.
    """
    window, quiet = 1, None
    if protected is not None:
        window = int(protected.guard.stats()["window"])
        if window > 1:
            quiet = Quiet(order, protected, dist.get_rank())
            for _ in range(2 * window):  # each journal grows to its size
                quiet.step()
            protected.end()
    beside = ThreadClocks(threads() - known if protected is not None else ())
    slots = Slots(order.device, beside, watch)
    planned = measured_places(len(batches), window, order.seed)
    orders = iter(turns(len(batches), order.methods, order.seed))
    left = iter(batches)
    commits: list[bool] = []
    marks: list[tuple[float, float]] = []
    steps = 0
    gc.collect()
    gc.freeze()
    gc.disable()
    counted = {name: method.counted() for name, method in methods.items()}
    phases, ends = (dict(protected.phases_s), protected.ends_s) if protected is not None else ({}, 0.0)
    watched, besides, wall = watch.read(), beside.read(), time.perf_counter()
    for places in planned:
        for place in range(window):
            steps += 1
            if place not in places and quiet is not None:
                quiet.step()
                continue
            batch = next(left)
            commits.append(place == window - 1)
            for name in next(orders):
                if name == PROTECTED and commits[-1]:
                    marks.append((beside.read(), time.perf_counter()))
                slots.take(name, methods[name], batch)
            gc.collect()
    for method in methods.values():
        method.end()
    dist.barrier()
    marks.append((beside.read(), time.perf_counter()))
    gc.enable()
    after = {name: method.counted() for name, method in methods.items()}
    answer: dict[str, Any] = {
        "slots": slots.taken,
        "commits": commits,
        "cycles": np.diff(marks, axis=0).tolist(),
        "window": window,
        "protected_steps": steps,
        "counted": {
            name: {key: value - counted[name].get(key, 0) for key, value in of.items()}
            for name, of in after.items()
        },
        "wall_s": time.perf_counter() - wall,
        "watch_cpu_s": watch.read() - watched,
        "beside_cpu_s": beside.read() - besides,
        "expected_steps": steps + (2 * window if quiet is not None else 0),
    }
    if protected is not None:
        answer["ends_cpu_s"] = protected.ends_s - ends
        answer["phases_cpu_s"] = {
            name: spent - phases.get(name, 0.0) for name, spent in protected.phases_s.items()
        }
        answer["window_at_end"] = int(protected.guard.stats()["window"])
    return answer


def idle(bare: dict[str, Bare], batches: Sequence[Batch], slots: Slots) -> float:
    """Processor time of the protection's threads in a second in which they have nothing to do. All ranks.

    A gloo thread looks for messages a hundred times a second. Beside a training, a look takes up to half as
    long again as on an idle machine, so bare models train meanwhile.
    """
    for batch in batches:
        for name, method in bare.items():
            slots.take(name, method, batch)
    _, wall_s, beside_s, _ = np.sum([one for taken in slots.taken.values() for one in taken], axis=0)
    return float(beside_s / wall_s)
