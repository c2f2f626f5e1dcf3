"""Starts with another number of ranks on real processes: what goes on, is refused, and is begun again.

As in test_checkpoint, the scenarios run one after another in the same processes, each as a job of its own
with several lives, and processes beyond a life's number of ranks wait.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ecemb
from ecemb.errors import (
    CheckpointMismatch,
    ConfigurationError,
    NotEnoughSpace,
    PlacementError,
    RendezvousError,
    TooManyErasures,
)
from ecemb.memory import arena as arenas
from ecemb.memory import capacity
from ecemb.net.collectives import Transport
from ecemb.recovery import scrub
from support import training_lives
from support.moves import everything
from support.processes import run_ranks
from support.refusals import matching
from support.torchrec.checkpoint_runs import assert_same
from support.training_lives import DIM

PROCESSES = 4
DEADLINE_S = 600
ROWS = 17
STRIDE = 5
"""Of the moments at which a move is cut off, every fifth is tried, beginning with a random one."""

MEETINGS = itertools.count()
MOST_MEETINGS = 1000

Whole = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """Where a process is, and where the arenas lie."""

    index: int
    root: Path
    job: str
    port: int
    seed: int

    def arenas(self, host: str = "*") -> list[Path]:
        return sorted(self.root.glob(f"*/{self.job}/{host}/*.arena"))

    def meet(self) -> None:
        """Returns when all processes are here."""
        store, number = dist.TCPStore("127.0.0.1", self.port, is_master=False), next(MEETINGS)
        store.set(f"meet/{number}/{self.index}", "here")
        names = [f"meet/{number}/{other}" for other in range(PROCESSES)]
        store.wait(names, timedelta(seconds=DEADLINE_S))


class Training(training_lives.Training):
    """The small training."""

    def __init__(self, rows: int = ROWS, kind: str = "adagrad") -> None:
        super().__init__(lambda: nn.Linear(DIM, 1), rows=rows, device="meta", kind=kind)

    def protect(self, **changes: Any) -> ecemb.Guard:
        codes = [ecemb.Code(3, 2), ecemb.Code(2, 1)]
        return super().protect(**{"code": codes, "elastic": True, "failure_domain": "rank", **changes})

    def whole(self) -> Whole:
        return everything(self.model, self.head, self.dense)


def live(place: Place, hosts: str, act: Callable[[], Any]) -> Any:
    """One launch of the job, with a worker for each letter, on the host of this name; all meet at its end."""
    result = None
    try:
        if place.index < len(hosts):
            os.environ.update(RANK=str(place.index), WORLD_SIZE=str(len(hosts)), MASTER_PORT=str(place.port))
            with training_lives.launched(place.job, place.root, hosts[place.index]):
                result = act()
    finally:
        place.meet()
    return result


def trained(until: int, **changes: Any) -> Whole:
    """Trains up to a step."""
    training = Training()
    training.run(training.protect(**changes), until)
    return training.whole()


def moved(kind: str = "move", step: int | None = 2, **changes: Any) -> Whole:
    """Starts, and checks how."""
    training = Training()
    guard = training.protect(**changes)
    assert guard.recovery.kind == kind, guard.recovery
    assert step in (None, guard.next_step)
    longest = scrub.longest_block(guard._memory)
    assert not scrub.compare_parity(guard._memory, guard._transport, 0, longest, "comparing")
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split()[-1] for line in maps if line.endswith(".arena") and guard._session.job in line}
    assert mapped == {str(guard._memory.arena.path)}, mapped  # the memory of old arenas is free
    return training.whole()


def same(one: Whole | None, other: Whole | None) -> None:
    """What processes had in both lives is equal."""
    if one is not None and other is not None:
        assert_same(one, other)


# --- what goes on ---------------------------------------------------------------------------------


def any_number_of_ranks_takes_over_from_any_other(place: Place) -> None:
    """Workers hold the arenas of several ranks, or of none; one rank has no parity."""
    before = live(place, "abc", lambda: trained(2))
    for number, hosts in enumerate(("aabc", "ac", "a", "aaaa")):
        if number == 1 and place.index == 3:
            place.arenas("b")[0].unlink()  # of four ranks' arenas, one is lost: code (3, 2)
        if number == 2 and place.index == 3:
            place.arenas("c")[0].unlink()  # of two: code (2, 1)
        place.meet()
        after = live(place, hosts, moved)
        same(before, after)
        before = after if after is not None else before
    assert len(place.arenas()) == 4
    live(place, "aaaa", lambda: moved("process"))


def other_arguments_may_come_with_the_move(place: Place) -> None:
    """Windows and overlap are those of the start."""
    arguments: dict[str, Any] = {"window": 2}

    def unfinished() -> Whole:
        training = Training()
        guard = training.protect(overlap=True)
        training.run(guard, 2)
        before = training.whole()
        with contextlib.suppress(ZeroDivisionError), guard.step() as step:
            training.step(step.number)
            raise ZeroDivisionError
        return before

    before = live(place, "abc", unfinished)
    after = live(place, "ab", lambda: moved(**arguments))
    same(before, after)
    live(place, "ab", lambda: trained(4, **arguments))
    after = live(place, "ab", lambda: moved("process", 4, **arguments))
    same(after, live(place, "abc", lambda: moved(step=4)))


class ByHand:
    """A table that the script shards, in runs of neighbouring rows."""

    def __init__(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        first, last = (ROWS * one // size for one in (rank, rank + 1))
        torch.manual_seed(5 + rank)
        self.bag = nn.EmbeddingBag(last - first, DIM, sparse=True)
        self.model = nn.ModuleDict({"bag": self.bag, "head": nn.Linear(2, 2)})
        nn.init.zeros_(self.model["head"].weight), nn.init.zeros_(self.model["head"].bias)
        self.sparse = torch.optim.Adagrad(self.bag.parameters(), lr=0.5)
        self.place = {"words": (first, ROWS)}

    def protect(self, **changes: Any) -> ecemb.Guard:
        given = {"shards": self.place, "elastic": True, "failure_domain": "rank", "code": ecemb.Code(2, 1)}
        more = {"without_optimizer": [self.model["head"]], "tables": {"words": self.bag}, **given, **changes}
        return ecemb.protect(self.model, optimizers=self.sparse, **more)

    def step(self, guard: ecemb.Guard) -> None:
        with guard.step():
            self.sparse.zero_grad()
            self.bag(torch.arange(self.bag.num_embeddings)[:, None]).pow(2).sum().backward()
            self.sparse.step()

    def whole(self) -> Whole:
        parts: list[Any] = [None] * dist.get_world_size()
        own = self.bag.weight.detach().clone(), self.sparse.state[self.bag.weight]["sum"].clone()
        dist.all_gather_object(parts, own)
        return {name: torch.cat([part[i] for part in parts]) for i, name in enumerate(("weight", "sum"))}


def tables_by_hand_move_if_the_script_says_where_they_stand(place: Place) -> None:
    saved = place.root / f"saved-{place.job}"

    def trained(**changes: Any) -> Whole:
        training = ByHand()
        training.step(training.protect(**changes))
        return training.whole()

    def moved(kind: str, **changes: Any) -> Whole:
        training = ByHand()
        guard = training.protect(**changes)
        assert (guard.recovery.kind, guard.next_step) == (kind, 1)
        guard.save(saved)
        return training.whole()

    def refused(error: type[Exception], text: str, **changes: Any) -> None:
        with matching(error, text):
            ByHand().protect(**changes)

    live(place, "abc", lambda: refused(ConfigurationError, "missing or twice", shards={"words": (0, ROWS)}))
    before = live(place, "abc", trained)
    same(before, live(place, "ab", lambda: moved("move")))
    elsewhere = replace(place, job=f"{place.job}-elsewhere")
    same(before, live(elsewhere, "abc", lambda: moved("checkpoint", resume=saved)))
    unplaced = replace(place, job=f"{place.job}-unplaced")
    live(unplaced, "abc", lambda: trained(shards=None))
    live(unplaced, "ab", lambda: refused(CheckpointMismatch, "sharded by hand.*shards="))


# --- what is refused ------------------------------------------------------------------------------


def what_cannot_move_is_refused_and_nothing_is_lost(place: Place) -> None:
    before = live(place, "abc", lambda: trained(2))
    arenas = place.arenas()

    def refused(name: str, hosts: str, error: type[Exception], *texts: str, **changes: Any) -> None:
        def act() -> None:
            with matching(error, *texts):
                Training().protect(**changes)

        live(place, hosts, act)
        assert place.arenas() == arenas, name

    refused(
        "plain", "ab", RendezvousError, "had 3 ranks when it was started, and has 2", "move to", elastic=False
    )
    refused("code", "ab", PlacementError, "codes that fit here: .2, 1.", code=ecemb.Code(3, 2))
    refused(
        "codes", "abc"[:2], PlacementError, "none of the codes", code=[ecemb.Code(3, 2), ecemb.Code(3, 1)]
    )
    refused("function", "ab", PlacementError, "fit here", code=lambda ranks: ecemb.Code(ranks + 1, ranks))
    full = mock.patch.object(
        capacity, "limits", return_value=[capacity.Limit("this test", 1000, "Make room.")]
    )
    with full:
        text = ("3 ranks can't move to 2 ranks", "this test leaves 1000", "launch 3 ranks", "resume=")
        refused("space", "ab", NotEnoughSpace, *text)

    def other_rows() -> None:
        with matching(CheckpointMismatch, "the job's memory", "18 rows now, and 17 there"):
            Training(ROWS + 1).protect()

    live(place, "ab", other_rows)
    assert place.arenas() == arenas
    place.meet()
    if place.index == 3:
        for host in "ab":
            aside = place.arenas(host)[0]
            aside.rename(aside.with_suffix(".aside"))
    place.meet()

    def too_many() -> None:
        with matching(TooManyErasures, "ranks 0 and 1|ranks .0, 1."):
            Training().protect()

    live(place, "cc", too_many)
    if place.index == 3:
        for aside in place.root.glob(f"*/{place.job}/*/*.aside"):
            aside.rename(aside.with_suffix(".arena"))
    place.meet()
    same(before, live(place, "ab", moved))


def a_job_moves_that_was_not_elastic_before(place: Place) -> None:
    before = live(place, "abc", lambda: trained(2, elastic=False))

    def refused() -> None:
        with matching(RendezvousError, "had 3 ranks", "launch 3", "elastic=True"):
            Training().protect(elastic=False)

    live(place, "ab", refused)
    same(before, live(place, "ab", moved))


# --- what is begun again --------------------------------------------------------------------------


class Cut(BaseException):
    """The process ends here, as far as it can tell."""


@contextmanager
def cut_off(at: int) -> Iterator[None]:
    """All ranks end at a collective call; all make the same calls."""
    calls = 0

    def counted(self: Transport, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > at:
            raise Cut
        return gather(self, *arguments)

    def counted_barrier(self: Transport, what: str) -> None:
        nonlocal calls
        calls += 1
        if calls > at:
            raise Cut
        barrier(self, what)

    gather, barrier = Transport.gather, Transport.barrier
    with (
        mock.patch.object(Transport, "gather", counted),
        mock.patch.object(Transport, "barrier", counted_barrier),
    ):
        yield


def a_move_that_is_cut_off_is_begun_again(place: Place) -> None:
    """By as many ranks, or by as many as before."""
    for at in range(place.seed % STRIDE, 1000, STRIDE):
        job = replace(place, job=f"{place.job}-{at}")
        before = live(job, "abc", lambda: trained(2))

        def cut(at: int = at) -> bool:
            with cut_off(at), contextlib.suppress(Cut):
                Training().protect()
                return False
            for arena in list(arenas._attached):  # also one that no object has yet
                arena.close()
            return True

        store = dist.TCPStore("127.0.0.1", place.port, is_master=False)
        if live(job, "ab", cut) is False:
            store.set(f"{job.job}/whole", "")
        job.meet()
        ended = store.check([f"{job.job}/whole"])
        again = "abc" if at % 2 else "ba"
        after = live(job, again, lambda: trained(2))
        same(before, after)
        left = [path for host in again for path in job.arenas(host)]
        assert len(left) == len(again), (at, left)
        job.meet()
        if ended:
            break


SCENARIOS: dict[str, Callable[[Place], None]] = {
    scenario.__name__: scenario
    for scenario in (
        any_number_of_ranks_takes_over_from_any_other,
        other_arguments_may_come_with_the_move,
        what_cannot_move_is_refused_and_nothing_is_lost,
        tables_by_hand_move_if_the_script_says_where_they_stand,
        a_job_moves_that_was_not_elastic_before,
        a_move_that_is_cut_off_is_begun_again,
    )
}


def play(index: int, port: int, root: str, chosen: list[str], seed: int) -> dict[str, str]:
    """Runs the scenarios in this process; scenario -> traceback of what failed."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    logging.getLogger("ecemb").setLevel(logging.ERROR)
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    for number, name in enumerate(chosen):
        try:
            SCENARIOS[name](Place(index, Path(root), f"job{number}", port, seed))
        except BaseException:  # noqa: BLE001 - the scenario's test raises it
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            for meeting in range(MOST_MEETINGS):  # no process waits for this one
                store.set(f"meet/{meeting}/{index}", "failed")
            return dict.fromkeys(chosen[number + 1 :], f"not played, as {name} failed") | {
                name: traceback.format_exc()
            }
    return {}


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, run_seed: int, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """What failed in each process. The store is kept here, as torchrun's agent does."""
    timeout = timedelta(seconds=DEADLINE_S)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    items = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    chosen = [name for name in SCENARIOS if name in items]
    root = str(tmp_path_factory.mktemp("arenas"))
    return run_ranks(
        PROCESSES,
        play,
        store.port,
        root,
        chosen,
        run_seed,
        deadline_s=DEADLINE_S,
        group=False,
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, played: list[dict[str, str]]) -> None:
    failed = [f"process {index}:\n{one[name]}" for index, one in enumerate(played) if name in one]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
