"""A second launch of a job whose first one ends meanwhile: it is refused as well. Real processes."""

from __future__ import annotations

import os
from multiprocessing.synchronize import Event
from pathlib import Path

from torch import nn

import ecemb
from bench.harness.ports import ReservedPort
from ecemb.memory import scan
from support.fork_server import fork_server
from support.processes import DEADLINE_S, run_ranks
from support.training_lives import Training


def two_launches(
    which: int, arena_dir: str, ports: list[int], running: Event, looked: Event, closed: Event
) -> str:
    """Launch `which` of the same job, of one rank and with a store of its own; returns how it ended."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[which]))
    if which == 1:
        assert running.wait(DEADLINE_S)
        look = scan._look

        def looking(place: scan.Directory, name: str, awaited: dict[str, int]) -> object:
            found = look(place, name, awaited)
            if found is not None and found.holder is not None:
                looked.set()
                assert closed.wait(DEADLINE_S)  # the file goes while this launch looks at it
            return found

        scan._look = looking
    try:
        ecemb.init_process_group("gloo", job="twice", arena_dir=arena_dir, host="a")
        training = Training(lambda: nn.Linear(3, 1), rows=7, device=None, kind="adagrad")
        guard = training.protect(failure_domain="rank")
        if which == 1:
            return f"trains from step {guard.next_step}"
    except ecemb.errors.EcembError as error:
        return type(error).__name__
    training.run(guard, until=3)
    running.set()
    assert looked.wait(DEADLINE_S)
    guard.close()
    closed.set()
    return "closed"


def test_a_job_that_closes_while_it_is_launched_again_does_not_train_from_step_0(tmp_path: Path) -> None:
    """The second launch waits for the first one's arena, which is gone when that has closed."""
    context = fork_server()
    with ReservedPort() as one, ReservedPort() as other:
        told = run_ranks(
            2,
            two_launches,
            str(tmp_path),
            [one.number, other.number],
            context.Event(),
            context.Event(),
            context.Event(),
            group=False,
        )
    assert told == ["closed", "JobFinished"]
    assert not list(tmp_path.rglob("*.arena"))
