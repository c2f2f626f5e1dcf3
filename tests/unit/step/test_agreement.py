"""What a rank says when it fails, by how far it has come: no rank waits for one that has left."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from ecemb.coding.parity import messages, write_heads_
from ecemb.coding.placement import Placement
from ecemb.errors import InconsistentArenas, StepFailed
from ecemb.memory.journal import Inbox
from ecemb.memory.rank_memory import RankMemory
from ecemb.net.collectives import rounds
from ecemb.net.mesh import Channels
from ecemb.start import opening
from ecemb.state.replicated import ReplicatedState
from ecemb.step.agreement import FINE, Agreement
from support.processes import run_ranks, session_of
from support.simulation import Hub, Killed, Machines, Rank, Wires, job_of

DONE = 2
SHAPES = [(2, 1, 2), (3, 2, 3), (4, 2, 4), (3, 1, 5), (2, 1, 6)]
"""n, k and the number of ranks."""


def failing(owner: Any, name: str, ranks: frozenset[int]) -> Any:
    """Some ranks raise where they call a method of the first step to come."""
    method = getattr(owner, name)

    def fails(self: Any, *args: Any, **more: Any) -> Any:
        if threading.current_thread().name in {str(rank) for rank in ranks}:
            raise ValueError("on purpose")
        return method(self, *args, **more)

    return mock.patch.object(owner, name, fails)


STAGES: dict[str, tuple[Any, str]] = {
    "the body": (Rank, "_train"),
    "state": (ReplicatedState, "save"),
    "delta": (RankMemory, "lay_out"),
    "after the verdict": (Agreement, "exchange"),
    "after the sizes": (Inbox, "receive"),
    "before prepared": (RankMemory, "prepare"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "stage"),
    [(shape, stage) for i, shape in enumerate(SHAPES) for j, stage in enumerate(STAGES) if (i + j) % 2 == 0],
)
def test_nobody_waits_for_ranks_that_failed(
    shape: tuple[int, int, int], stage: str, tmp_path: Path, seed: int
) -> None:
    """One rank, or two, stay alive and take no part any more; the next start loses nothing."""
    rng = random.Random(seed)
    machines = Machines(tmp_path / "job", job_of(*shape, rng))
    assert not machines.run(DONE).failures
    for count in (1, min(2, shape[2] - 1)):
        ranks = frozenset(rng.sample(range(shape[2]), count))
        with failing(*STAGES[stage], ranks):
            life = machines.run(DONE + 1)
        assert {type(life.failures[rank]) for rank in ranks} <= {ValueError, StepFailed, Killed}
        assert any(isinstance(life.failures[rank], ValueError) for rank in ranks)
        others = {type(error) for rank, error in life.failures.items() if rank not in ranks}
        assert len(life.failures) == shape[2] and others <= {StepFailed, Killed}, life.failures
    life = machines.run(DONE + 2)
    assert not life.failures and life.plan.transaction == DONE
    machines.check(DONE + 2)


def heap(sizes: Mapping[int, int]) -> dict[int, Any]:
    """Where deltas arrive that are not kept."""
    return {sender: np.zeros(size, np.uint64) for sender, size in sizes.items()}


@pytest.mark.parametrize(("n", "k", "size"), [(2, 1, 2), (3, 2, 3), (4, 2, 4), (4, 3, 9), (3, 1, 16)])
def test_messages_of_a_transaction(n: int, k: int, size: int) -> None:
    """Two disseminations, and deltas to each keeper."""
    hub, placement = Hub(size), Placement.ranks(n, k, size)
    sent: dict[int, list[int]] = {}

    def run(rank: int) -> None:
        wires = Wires(hub, rank, size)
        agreement, counts = Agreement(wires, placement, heap), [0]
        edges = [(n - k) * block for block in range(k + 1)]
        words = np.zeros(1000, np.uint64)
        write_heads_(words, edges, n - k)
        for transaction in range(1, 4):
            verdict = conclude(agreement, transaction)
            empty = messages(words, edges, placement, rank)
            agreement.exchange(verdict.decision, empty, "the exchange")
            agreement.vote(verdict.decision, "the vote")
            counts.append(wires.sent_messages)
        sent[rank] = [b - a for a, b in itertools.pairwise(counts)]

    together(size, run)
    assert sent == {rank: [2 * rounds(size) + n - 1] * 3 for rank in range(size)}


def conclude(agreement: Agreement, transaction: int, **more: Any) -> Any:
    given = {"window": 1, "digest": 0, "committed": 0, "differs": str, **more}
    return agreement.conclude(transaction, given.pop("flag", FINE), **given)


def together(size: int, run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_smallest_window_who_aborted_and_whether_a_rank_lacks_rows_are_known_to_all() -> None:
    size, hub = 70, Hub(70)  # more ranks than bits in a word
    placement, found = Placement.ranks(2, 1, size), dict[int, tuple[int, list[int], list[bool]]]()

    def run(rank: int) -> None:
        agreement = Agreement(Wires(hub, rank, size), placement, heap)
        verdict = conclude(agreement, 1, flag=int(rank in (3, 69)), window=5 + abs(rank - 40), digest=rank)
        is_lacking = [
            conclude(agreement, 2, is_lacking=rank == 41).is_lacking,
            conclude(agreement, 3).is_lacking,
        ]
        found[rank] = verdict.window, verdict.aborted, is_lacking

    together(size, run)
    assert found == {rank: (5, [3, 69], [True, False]) for rank in range(size)}


def test_ranks_out_of_step_wait_for_no_deltas_of_each_other() -> None:
    """All of them fail: none sends any."""
    hub, placement, found = Hub(2), Placement.ranks(2, 1, 2), list[int]()

    def run(rank: int) -> None:
        agreement = Agreement(Wires(hub, rank, 2), placement, heap)
        with pytest.raises(StepFailed, match="not in the same step"):
            conclude(agreement, 2 + rank)
        agreement.leave(2 + rank)
        found.append(rank)

    together(2, run)
    assert sorted(found) == [0, 1]


@pytest.mark.parametrize("size", [0, -5, -(2**63)])
def test_a_size_of_nonsense_is_refused_and_ends_the_step_on_all(size: int) -> None:
    hub, placement, found = Hub(2), Placement.ranks(2, 1, 2), dict[int, str]()

    def run(rank: int) -> None:
        agreement = Agreement(Wires(hub, rank, 2), placement, heap)
        decision = conclude(agreement, 1).decision
        words = np.array([1 if rank == 0 else size], np.int64).view(np.uint64)
        try:
            agreement.exchange(decision, {1 - rank: words}, "the exchange")
            agreement.vote(decision, "the vote")
        except (InconsistentArenas, StepFailed) as error:
            found[rank] = str(error)
            agreement.withdraw(decision)

    together(2, run)
    assert f"the exchange: the ranks announce messages of {{1: {size}}} words" in found[0]
    assert "another rank failed" in found[1]


LARGE = 1 << 19
"""Words of a block's deltas: more than connections hold."""


def full(sizes: Mapping[int, int]) -> dict[int, Any]:
    """Where no deltas fit."""
    raise ValueError("full")


@contextmanager
def interrupted(owner: Any, name: str, *, at_begin: bool = False) -> Iterator[None]:
    """A signal's handler raises at the end of each of the first calls of a method, or at the begin."""
    method, calls = getattr(owner, name), itertools.count()

    def raises(*args: Any, **more: Any) -> Any:
        is_cut = next(calls) < 4
        if is_cut and at_begin:
            raise KeyboardInterrupt
        found = method(*args, **more)
        if is_cut:
            raise KeyboardInterrupt
        return found

    with mock.patch.object(owner, name, raises):
        yield


def fail_over_a_mesh(stage: str) -> str:
    """Rank 1 fails after the verdict, and stays alive; the error of each rank."""
    transport = opening.control_group(session_of(), notes=True)
    rank, placement = transport.rank, Placement.ranks(4, 2, 4)
    transport.swap_mesh = opening.swap_mesh(session_of(), transport, placement)
    fails = rank == 1
    agreement = Agreement(transport, placement, full if fails and stage == "without room" else heap)
    edges, words = [0, LARGE, 2 * LARGE], np.zeros(2 * LARGE, np.uint64)
    write_heads_(words, edges, placement.r)
    decision = conclude(agreement, 1).decision
    try:
        if fails and stage in ("before it sends", "interrupted while it leaves"):
            raise ValueError("on purpose")
        if fails and stage == "interrupted while it sends":
            with pytest.raises(KeyboardInterrupt), interrupted(Channels, "run", at_begin=True):
                agreement.exchange(decision, messages(words, edges, placement, rank), "the exchange")
            assert all(size for size, *_ in decision.heads.values())  # it has waited for them
            raise ValueError("on purpose")
        agreement.exchange(decision, messages(words, edges, placement, rank), "the exchange")
        if fails and stage == "before prepared":
            raise ValueError("on purpose")
        agreement.vote(decision, "the vote")
        error = ""
    except Exception as raised:  # noqa: BLE001 - looked at by the test
        error = type(raised).__name__
        if fails and stage == "interrupted while it leaves":
            with pytest.raises(KeyboardInterrupt), interrupted(Channels, "run"):
                agreement.leave(1)
        else:
            agreement.withdraw(decision)
    dist.barrier()
    transport.close()
    return error


@pytest.mark.parametrize(
    "stage",
    [
        "before it sends",
        "without room",
        "before prepared",
        "interrupted while it sends",
        "interrupted while it leaves",
    ],
)
def test_no_connection_stays_full_of_what_a_failed_rank_does_not_want(stage: str) -> None:
    """Its neighbours would wait until their messages are taken."""
    assert run_ranks(4, fail_over_a_mesh, stage) == ["StepFailed", "ValueError", "StepFailed", "StepFailed"]
