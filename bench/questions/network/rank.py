"""What the ranks of the question do, on hosts or on this machine's loopback."""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ecemb
from bench.harness.links import moved_bytes
from bench.harness.ranks import Line
from bench.questions.recovery import wire
from bench.workloads.models import ENGINES, Twin
from bench.workloads.table_training import TableJob, TableTraining
from bench.workloads.training_rank import (
    BARE,
    PROTECTED,
    WARM_UP,
    Bare,
    Order,
    Protected,
    digest,
    draw,
    protect,
    run,
)

METHODS = (PROTECTED, BARE)
STATUS, EXCHANGE, VOTE = "status", "exchange", "agree"
TOGETHER = (STATUS, EXCHANGE, VOTE)
"""Phases of a commit in which ranks send and receive."""
SETTLING = 3
"""Steps of all models between the guard and what is measured."""
TRIPS, PIECE_BYTES, SLICE_S, SLICES = 300, 1 << 20, 0.2, 6
"""Round trips that are timed; of a plain stream the bytes of a call, and how long its speed is averaged, and
how often. The first slice doesn't count, in which TCP still grows its window."""
_POLL_S = 0.005


class Moments:
    """When this rank began and ended each of `TOGETHER`, on a clock that all processes of a machine share.

    Args:
        guard: Of this process.

    Attributes:
        taken: Phase -> (begin, end) of each time, in seconds.
    """

    def __init__(self, guard: ecemb.Guard) -> None:
        self.taken: dict[str, list[tuple[float, float]]] = {name: [] for name in TOGETHER}
        transactions = guard._transactions
        phase = transactions.phase

        @contextmanager
        def timed(name: str) -> Generator[None]:
            began = time.perf_counter()
            with phase(name):
                yield
            if name in self.taken:
                self.taken[name].append((began, time.perf_counter()))

        setattr(transactions, "phase", timed)  # noqa: B010 - of this object alone


def plain(line: Line, timeout_s: float) -> None:
    """A connection of rank 1 to rank 0 without ecemb: its round trips, and the speed of a stream."""
    port = int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.create_server((os.environ["MASTER_ADDR"], port)) as server:
            server.settimeout(timeout_s)
            connection, _ = server.accept()
        with connection:
            answer(connection, timeout_s)
            line.send({"gbit_per_s": received(connection)})
    else:
        with called(port, timeout_s) as connection:
            line.send({"trip_us": trips(connection)})
            send(connection)


def called(port: int, timeout_s: float) -> socket.socket:
    """A connection to rank 0, which may listen later than this rank calls."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout_s)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def trips(connection: socket.socket) -> list[float]:
    """Microseconds of each round trip of a byte."""
    found: list[float] = []
    for _ in range(TRIPS):
        began = time.perf_counter()
        connection.send(b".")
        if not connection.recv(1):
            raise ConnectionError("rank 0 has ended the connection")
        found.append(1e6 * (time.perf_counter() - began))
    return found


def answer(connection: socket.socket, timeout_s: float) -> None:
    """The other end of `trips`."""
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(TRIPS):
        connection.send(connection.recv(1))


def send(connection: socket.socket) -> None:
    """A stream, for somewhat longer than `received` looks at."""
    piece, until = bytes(PIECE_BYTES), time.monotonic() + (SLICES + 2) * SLICE_S
    while time.monotonic() < until:
        connection.sendall(piece)


def received(connection: socket.socket) -> list[float]:
    """Gbit/s of a stream in each slice of time but the first; reads it to its end."""
    piece, found = bytearray(PIECE_BYTES), list[float]()
    size, began = 0, time.perf_counter()
    while part := connection.recv_into(piece):
        size += part
        passed = time.perf_counter() - began
        if passed >= SLICE_S:
            found.append(8 * size / passed / 1e9)
            size, began = 0, time.perf_counter()
    return found[1 : 1 + SLICES]


def steps(line: Line, order: Order) -> None:
    """Trains two equal models in turns, one of them protected: what each step took, and moved over the link.

    A round has a step of each, on the same batch. The protected one's windows begin with the first round.
    """
    torch.set_num_threads(order.threads)
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group(order.backend, job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    rank = dist.get_rank()
    batches = draw(order, rank, WARM_UP + SETTLING + order.steps)
    twins: dict[str, Twin] = {}
    for name in METHODS:
        torch.manual_seed(order.seed)
        twins[name] = ENGINES[order.engine](order.tables, order.rows, order.dim, order.dense)
        run(Bare(twins[name]), batches[:WARM_UP])
    protected = Protected(twins[PROTECTED], protect(twins[PROTECTED], order))
    methods = {PROTECTED: protected, BARE: Bare(twins[BARE])}
    for method in methods.values():
        run(method, batches[WARM_UP : WARM_UP + SETTLING])
    moments, counted = Moments(protected.guard), protected.counted()
    taken: dict[str, list[tuple[float, int, int]]] = {name: [] for name in METHODS}
    gc.collect()
    gc.freeze()
    gc.disable()
    for number, batch in enumerate(batches[WARM_UP + SETTLING :]):
        for name in METHODS[:: -1 if number % 2 else 1]:
            dist.barrier()
            (came, left), began = moved_bytes(), time.perf_counter()
            methods[name].train(batch)
            took_s, (come, gone) = time.perf_counter() - began, moved_bytes()
            taken[name].append((took_s, come - came, gone - left))
    gc.enable()
    protected.end()
    after = protected.counted()
    report = protected.guard.scrub()
    line.send(
        {
            "rank": rank,
            "taken": taken,
            "moments": moments.taken,
            "counted": {name: value - counted.get(name, 0) for name, value in after.items()},
            "digests": {name: digest(twin.tensors()) for name, twin in twins.items()},
            "committed_steps": protected.guard.stats()["steps"] - SETTLING,
            "wrong_words": report.wrong_words,
        }
    )
    protected.guard.close()
    dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Talk(TableJob):
    """A training of a tiny table, whose steps are little else than their agreement.

    Attributes:
        steps: That are measured.
    """

    steps: int


def agree(line: Line, order: Talk) -> None:
    """Trains; when each step's status, exchange and vote began and ended."""
    training = TableTraining(order)
    for _ in range(SETTLING):
        training.step()
    moments = Moments(training.guard)
    for _ in range(order.steps):
        dist.barrier()
        training.step()
    report = training.guard.scrub()
    line.send({"rank": training.rank, "moments": moments.taken, "wrong_words": report.wrong_words})
    training.end()


@dataclass(frozen=True, kw_only=True)
class Life(TableJob):
    """A life of a job, which ends with a kill of all ranks.

    Attributes:
        until: Step that it trains to.
    """

    until: int


def live(line: Line, order: Life) -> None:
    """Begins or recovers, trains, and waits for the kill."""
    came, _ = moved_bytes()
    training = TableTraining(order)
    come, _ = moved_bytes()
    guard, report = training.guard, training.guard.recovery
    first = guard.next_step
    plain_s: Mapping[str, float] = {}
    if report.lost:
        plain_s = wire.measure(order.job, order.arena_dir, report.lost)
    for _ in range(first, order.until):
        training.step()
    arena = guard._memory.arena
    line.send(
        {
            "rank": training.rank,
            "kind": report.kind,
            "lost": report.lost,
            "first": first,
            "seconds": report.seconds,
            "total_s": report.total_s,
            "rebuilt_bytes": report.rebuilt_bytes,
            "memory_bytes": sum(len(arena.region(name)) for name in ("rows", "parity")),
            "received_bytes": come - came,
            "plain": plain_s,
            "digest": bits(training),
        }
    )
    line.await_end()


def bits(training: TableTraining) -> str:
    """A hash of all that a rank trains."""
    states: list[Any] = [state for optimizer in training.optimizers for state in optimizer.state.values()]
    values = [*training.model.parameters(), *(value for state in states for value in state.values())]
    found = hashlib.blake2b()
    for tensor in (value for value in values if isinstance(value, torch.Tensor)):
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
