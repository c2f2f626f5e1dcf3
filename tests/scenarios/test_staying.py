"""Trainings whose processes stay when another one is killed: the same bits as an undisturbed one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from support.warm_starts import Home, home

RANKS = 3

PATIENT = """
from ecemb.net import rendezvous, staying, worker_exit
rendezvous._STUCK_S = rendezvous._PATIENCE_S = worker_exit.NEWS_S = 600.0
"""
"""However slow the machine is, a worker waits for the others."""
STAYS = PATIENT + "staying.AWAY_S = 600.0\n"
"""And none that can come back is replaced."""

OFTEN = """
from ecemb.launch import stub
stub.MOST_A_MINUTE = 10**6
stub.main()
"""
"""`ecemb-run`, which replaces a worker however often it dies."""

SCRIPT = """
import functools, gc, hashlib, json, os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
import ecemb
from ecemb.net import replacement
from ecemb.step.agreement import Agreement

folder, arenas, settings = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
job, steps, kills = settings["job"], settings.get("steps", 9), settings.get("kills", [])
torch.sparse.check_sparse_tensor_invariants.disable()
sizes = []

def note(name, **what):
    with open(folder / f"{job}.{name}", "a") as file:
        file.write(json.dumps(what) + "\\n")

def is_first(what):
    try:
        os.close(os.open(folder / f"{job}-{what}.done", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def die(rank, when, guard=None):
    for number, kill in enumerate(kills):
        if kill["rank"] == rank and kill["when"] == when and is_first(number):
            if kill.get("loses"):
                guard._memory.arena.path.unlink()
            os.kill(os.getpid(), kill.get("signal", signal.SIGKILL))

def build():
    torch.manual_seed(3)
    table = ecemb.nn.ShardedEmbeddingBag(500, 8, device="meta", name="table")
    by_hand = torch.nn.EmbeddingBag(50, 4, sparse=True)
    top = torch.nn.Sequential(torch.nn.Linear(12, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model = torch.nn.ModuleDict({"table": table, "by_hand": by_hand, "top": top})
    adam = torch.optim.Adam(top.parameters())
    optimizers = [torch.optim.Adagrad([table.weight], lr=0.1), torch.optim.SparseAdam([by_hand.weight]), adam]
    return model, optimizers, torch.optim.lr_scheduler.StepLR(adam, 2)

def train(place):
    rank = int(os.environ["RANK"])
    gc.collect()
    maps = [line for line in open("/proc/self/maps") if line.split()[1].endswith("s")]  # shared memory
    sizes.append([len(os.listdir("/proc/self/fd")), threading.active_count(), len(maps)])
    note("sizes", rank=rank, call=place.calls, sizes=sizes[-1])
    drawn = [torch.rand(()).item(), float(np.random.rand())]
    ecemb.init_process_group("gloo", job=job, arena_dir=arenas)
    die(dist.get_rank(), f"in call {place.calls} of process {replacement.predecessors}")
    model, optimizers, schedule = place.keep("model", build)
    drawn.append(torch.rand(()).item())
    if place.calls == 1:
        train.drawn = drawn
    assert drawn == train.drawn, (drawn, train.drawn)
    torch.manual_seed(10 + dist.get_rank())
    top = model["top"]
    if settings.get("ddp"):
        top = torch.nn.parallel.DistributedDataParallel(top)
    guard = ecemb.protect(
        model, optimizers=optimizers, tables={"by hand": model["by_hand"]}, state={"schedule": schedule},
        code=ecemb.Code(n=settings["ranks"], k=settings["ranks"] - 1), failure_domain="rank",
        window=settings.get("window", 1), overlap=settings.get("overlap", False),
        rebuild=settings.get("rebuild", "blocking"))
    note("starts", rank=guard.stats()["rank"], call=place.calls, kind=guard.recovery.kind)
    own = guard.stats()["rank"]
    data = guard.batches(torch.utils.data.DataLoader(torch.arange(60), batch_size=8, shuffle=True))
    vote = Agreement.vote
    def die_at_vote(self, decision, what):
        die(own, f"at the vote on {what}")
        vote(self, decision, what)
    Agreement.vote = die_at_vote
    losses = []
    for step in guard.steps(steps):
        with step:
            bags = model["table"](torch.randint(0, 500, (8, 3))), model["by_hand"](next(data)[:8, None] % 50)
            bags = [bag[:4] for bag in bags]
            top(torch.cat(bags, 1)).square().sum().backward()
            if settings.get("sleeps") == own and step.number == 4 and is_first("sleeps"):
                time.sleep(100000)
            die(own, step.number, guard)
            if not settings.get("ddp"):
                for one in model["top"].parameters():
                    dist.all_reduce(one.grad)
            for one in (model["top"][1].running_mean, model["top"][1].running_var):
                dist.all_reduce(one)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            schedule.step()
        die(own, f"after {step.number}", guard)
        if settings.get("raises") == own and step.number == 4 and is_first("raises"):
            raise ValueError("on purpose")
    guard.wait_rebuilt()
    states = [*model.state_dict().values(), torch.get_rng_state(), torch.tensor(schedule.get_last_lr())]
    for optimizer in optimizers:
        states += [one for state in optimizer.state_dict()["state"].values() for one in state.values()]
    digest = hashlib.sha256(b"".join(torch.as_tensor(one).numpy().tobytes() for one in states)).hexdigest()
    stats = guard.stats()
    note("ends", rank=stats["rank"], digest=digest, replaced=stats["replaced"], rejoined=stats["rejoined"],
         restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    guard.close()
    dist.destroy_process_group()

ecemb.run(train)
"""


@pytest.fixture(scope="module")
def here() -> Iterator[Home]:
    with home() as made:
        made.environment["OMP_NUM_THREADS"] = "1"
        made.write("stays.py", STAYS + SCRIPT)
        made.write("returns.py", PATIENT + SCRIPT)
        made.write("often.py", OFTEN)
        yield made


def launch(
    here: Home,
    job: str,
    *,
    script: str = "stays.py",
    command: Sequence[str] | None = None,
    restarts: int = 0,
    ranks: int = RANKS,
    **settings: Any,
) -> tuple[dict[int, dict[str, Any]], str]:
    """What each rank's last process has noted at its end, and what torchrun printed."""
    words = json.dumps({"job": job, "ranks": ranks, **settings})
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    started = here.command(options=()) if command is None else command
    code, _, err = here.torchrun(*options, *started, script, str(here.folder), str(here.arena_dir), words)
    assert code == 0, err
    return {one["rank"]: one for one in notes(here, job, "ends")}, err


def notes(here: Home, job: str, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (here.folder / f"{job}.{name}").read_text().splitlines()]


def digests(ends: dict[int, dict[str, Any]]) -> dict[int, str]:
    return {rank: one["digest"] for rank, one in sorted(ends.items())}


@pytest.fixture(scope="module")
def undisturbed(here: Home) -> dict[int, str]:
    """What a training ends with that plain processes run, without a failure."""
    return digests(launch(here, "plain", command=[sys.executable])[0])


def kill(rank: int, when: int | str, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "when": when, **more}


AT_VOTE = "at the vote on the agreement on step 4"


# The failure matrix has the moments of the long ones, where processes stay as well.
@pytest.mark.parametrize(
    ("job", "settings"),
    [
        pytest.param("process", {"kills": [kill(1, 4)]}, marks=pytest.mark.long),
        pytest.param("leader", {"kills": [kill(0, 4)]}, marks=pytest.mark.long),
        pytest.param("memory", {"kills": [kill(0, 4, loses=True)]}, marks=pytest.mark.long),
        pytest.param(
            "last", {"kills": [kill(2, 4, loses=True)], "rebuild": "background"}, marks=pytest.mark.long
        ),
        pytest.param("two", {"kills": [kill(0, 4), kill(2, 4)]}, marks=pytest.mark.long),
        ("undecided", {"kills": [kill(1, AT_VOTE)]}),
        pytest.param(
            "beside", {"kills": [kill(1, AT_VOTE, loses=False)], "overlap": True}, marks=pytest.mark.long
        ),
        ("window", {"kills": [kill(2, 6, loses=True)], "overlap": True, "window": 4}),
        pytest.param("between", {"kills": [kill(1, "after 5")], "window": 4}, marks=pytest.mark.long),
        ("twice", {"kills": [kill(1, 3), kill(1, 3), kill(2, 7, loses=True)]}),
        ("rejoin", {"kills": [kill(1, 4), kill(2, "in call 2 of process 0")]}),
        pytest.param(
            "replacement", {"kills": [kill(1, 4), kill(1, "in call 1 of process 1")]}, marks=pytest.mark.long
        ),
    ],
)
def test_the_others_stay(here: Home, undisturbed: dict[int, str], job: str, settings: dict[str, Any]) -> None:
    ends, err = launch(here, job, **settings)
    assert digests(ends) == undisturbed, err
    assert "exitcode" not in err, err
    killed = [one["rank"] for one in settings["kills"]]
    for rank, end in ends.items():
        assert end["restarts"] == 0
        if rank not in killed:  # a replacement may be replaced, if another one dies before it trains
            assert end["rejoined"] >= 1 and end["replaced"] == 0, err


def test_a_process_that_is_not_back_in_time_is_replaced(here: Home, undisturbed: dict[int, str]) -> None:
    """Its main thread is in a call that no thread can end."""
    ends, err = launch(here, "sleeps", script="returns.py", kills=[kill(1, 4)], sleeps=0)
    assert digests(ends) == undisturbed, err
    assert ends[0]["replaced"] >= 1 and ends[0]["restarts"] == 0, err


@pytest.mark.parametrize(
    ("job", "settings"), [("raises", {"raises": 1}), ("without", {"kills": [kill(1, 4)]})]
)
def test_other_ends_are_as_without_it(
    here: Home, undisturbed: dict[int, str], job: str, settings: dict[str, Any]
) -> None:
    """An error of the script, and a death under plain torchrun."""
    command = [sys.executable] if job == "without" else None
    ends, err = launch(here, job, command=command, restarts=1, **settings)
    assert digests(ends) == undisturbed, err
    assert {(one["restarts"], one["replaced"], one["rejoined"]) for one in ends.values()} == {(1, 0, 0)}
    assert "exitcode" in err and ("on purpose" in err) == (job == "raises")


def test_wrappers_are_built_again(here: Home) -> None:
    expected = digests(launch(here, "wrapped", command=[sys.executable], ddp=True)[0])
    ends, err = launch(here, "rewrapped", ddp=True, kills=[kill(1, 4)])
    assert digests(ends) == expected, err
    assert ends[0]["rejoined"] == ends[2]["rejoined"] == 1, err


def test_nothing_is_left_of_a_session(here: Home) -> None:
    """No descriptor, thread or mapping more after many deaths than after the second."""
    kills = [kill(1, step, loses=step % 3 == 2) for step in range(1, 13)]
    ends, err = launch(here, "many", ranks=2, steps=14, kills=kills)
    assert ends[0]["rejoined"] == len(kills) and ends[1]["replaced"] == len(kills), err
    sizes = [one["sizes"] for one in notes(here, "many", "sizes") if one["rank"] == 0]
    assert len(sizes) == 1 + len(kills)
    assert sizes[2:] == [sizes[2]] * (len(kills) - 1), sizes


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_deaths_leave_no_more_than_ten(here: Home) -> None:
    """Of descriptors, threads and shared mappings of one process."""
    kills = [kill(1, step, loses=step % 10 == 2) for step in range(1, 101)]
    command = [sys.executable, "often.py", *here.command(options=())[4:]]
    ends, err = launch(here, "hundred", command=command, ranks=2, steps=102, kills=kills)
    assert ends[0]["rejoined"] == len(kills) and ends[1]["replaced"] == len(kills), err
    sizes = [one["sizes"] for one in notes(here, "hundred", "sizes") if one["rank"] == 0]
    assert len(sizes) == 1 + len(kills)
    assert all(late <= max(early) for late, *early in zip(sizes[100], *sizes[1:11], strict=True)), sizes
