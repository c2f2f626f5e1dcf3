"""The helper that runs ranks: what they return comes back, and no failure is swallowed."""

from __future__ import annotations

import os
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support import processes
from support.processes import RankFailed, run_ranks


def total_and_rank(offset: int) -> tuple[int, int]:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return int(value), dist.get_rank()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("wrong on purpose")
    dist.barrier()


def die(rank: int) -> None:
    if rank == 1:
        os._exit(3)


def hang_on_rank_0(rank: int) -> None:
    while rank == 0:
        os.sched_yield()


def test_every_rank_returns_its_result() -> None:
    assert run_ranks(3, total_and_rank, 10) == [(33, 0), (33, 1), (33, 2)]


def test_the_first_failure_is_raised_with_its_traceback_though_others_wait() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 raised.*fail_on_rank_1.*wrong on purpose"):
        run_ranks(2, fail_on_rank_1)


class Ended:
    """As a rank's process that has ended."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode
        self.sentinel, self._writer = Pipe(duplex=False)
        self._writer.close()

    def join(self) -> None:
        self.sentinel.close()


@pytest.mark.parametrize(
    ("raised", "codes", "told"),
    [
        ({0: 2.0, 1: 1.0, 2: 3.0}, [1, 1, 1], "rank 1 raised:\nat 1.0"),
        ({0: 2.0, 2: 1.0}, [1, -9, 1], "rank 1 died"),
        ({0: 2.0}, [1, 75, 75], "rank 0 raised:\nat 2.0"),
    ],
)
def test_of_failures_that_are_seen_together_the_first_is_raised(
    raised: dict[int, float], codes: list[int], told: str
) -> None:
    """As when the test's own process stands still until all ranks have ended."""
    pipes: dict[Connection, int] = {}
    for rank in range(3):
        here, there = Pipe(duplex=False)
        if rank in raised:
            there.send((None, (raised[rank], f"at {raised[rank]}")))
        there.close()
        pipes[here] = rank
    ended: Any = [Ended(code) for code in codes]
    with pytest.raises(RankFailed) as error:
        processes._collect(pipes, ended, time.monotonic() + processes.DEADLINE_S)
    assert str(error.value) == told
    for one in [*pipes, *(process.sentinel for process in ended)]:
        one.close()


def test_a_death_is_a_failure() -> None:
    with pytest.raises(RankFailed, match="rank 1 died"):
        run_ranks(2, die, group=False)


def test_a_rank_that_hangs_is_killed_at_the_deadline() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0.* did not end"):
        run_ranks(2, hang_on_rank_0, deadline_s=2, group=False)
