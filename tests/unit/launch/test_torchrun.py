"""Trainings under stock torchrun, started cold and warm: the same bits, also when a warm one is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.warm_starts import DEADLINE_S, Home, home

TRAINS = """
import hashlib, os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
import ecemb

torch.sparse.check_sparse_tensor_invariants.disable()
out, arenas, job, killed = Path(sys.argv[1]), *sys.argv[2:5]
ecemb.init_process_group("gloo", job=job, arena_dir=arenas)
torch.manual_seed(3)
model = torch.nn.ModuleDict({"table": ecemb.nn.ShardedEmbeddingBag(500, 8, device="meta", name="table"),
                             "top": torch.nn.Linear(8, 1)})
sparse = torch.optim.Adagrad(model["table"].parameters(), lr=0.1)
dense = torch.optim.Adam(model["top"].parameters())
rank = dist.get_rank()
torch.manual_seed(10 + rank)
guard = ecemb.protect(model, optimizers=[sparse, dense], code=ecemb.Code(n=2, k=1), failure_domain="rank")
for _ in range(guard.next_step, 8):
    with guard.step() as step:
        sparse.zero_grad(), dense.zero_grad()
        model["top"](model["table"](torch.randint(0, 500, (16, 3)))).square().sum().backward()
        for one in model["top"].parameters():
            dist.all_reduce(one.grad)
        sparse.step(), dense.step()
    if (step.number, str(rank), os.environ["TORCHELASTIC_RESTART_COUNT"]) == (4, killed, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
states = [*model.state_dict().values(), *sparse.state_dict()["state"][0].values(), torch.get_rng_state()]
digest = hashlib.sha256(b"".join(torch.as_tensor(one).numpy().tobytes() for one in states)).hexdigest()
before = ",".join(guard.recovery.before_s)
(out / f"{job}-{rank}").write_text(f"{digest} {os.getppid()} {torch.get_num_threads()} {before}")
guard.close()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def here() -> Iterator[Home]:
    with home() as made:
        made.environment["OMP_NUM_THREADS"] = "1"
        yield made


def train(here: Home, job: str, killed: str, command: list[str]) -> list[list[str]]:
    """By rank: a digest of where it ended, its last parent, its threads, and phases of its start."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=2",
    ]
    script = ["train.py", str(here.folder), str(here.arena_dir), job, killed]
    done = subprocess.run(
        [*launch, "--no-python", *command, *script],
        cwd=here.folder,
        env=here.environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(here.folder / f"{job}-{rank}").read_text().split() for rank in range(2)]


def test_a_warm_training_ends_with_the_same_bits_whatever_is_killed(here: Home) -> None:
    here.write("train.py", TRAINS)
    cold = train(here, "cold", "nobody", [sys.executable])
    warm = train(here, "warm", "1", here.command(options=()))
    assert [one[0] for one in warm] == [one[0] for one in cold]
    assert [one[2] for one in warm] == [one[2] for one in cold] == ["1", "1"]
    assert {one[3] for one in cold} == {"script,rendezvous"}
    assert {one[3] for one in warm} == {"fork,script,rendezvous"}
    assert warm[0][1] == warm[1][1] and int(warm[0][1]) != os.getpid()
    assert not [line for line in here.processes().values() if "train.py" in line and "server" not in line]
