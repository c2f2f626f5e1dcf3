"""Do FBGEMM's tables on a GPU come back bit for bit, and how soon? A part of `gpu`.

Four ranks that share the device train TorchRec's tables with row-wise Adagrad inside backward, over gloo,
under stock torchrun, in windows that commit beside the next ones. A rank is killed in the middle of a step
with its memory, and later one without; at the end all bytes have to be those of an undisturbed training.
Once as torchrun starts workers, and once with `ecemb-run`, whose server keeps the imports, and no context of
the device.

- `fused_identical`: whether they are, 1 or 0; anything but 1 is an error as well.
- `fused_kill_to_step_s`: from the kill to the end of the slowest rank's next step.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness.devices import APART, CUDA
from bench.harness.result import Arguments, Incomplete, Row, WrongResult, once
from bench.harness.torchrun import LaunchFailed, Torchrun
from bench.questions.gpu.fused_rank import KILLED_IN
from bench.workloads.training_rank import Order

RANKS = 4
FULL = Order(
    engine="torchrec", job="", arena_dir="/dev/shm", n=4, k=3, tables=8, rows=100_000, dim=64, lookups=2,
    dense="dlrm", batch=512, skew=1.05, window=3, overlap=True, steps=0, seed=0, timeout_s=0, device=CUDA,
)  # fmt: skip
SMALL = dataclasses.replace(FULL, tables=4, rows=500, dim=16, batch=32, device=APART)
LOST = "memory", "process"
"""By life."""


def run(arguments: Arguments, device: str, until: float) -> Iterator[Row]:
    """Measures this part.

    Args:
        arguments: Of the question.
        device: Where tables are, one of `devices`.
        until: When it has to be done, on time.monotonic().

    Raises:
        Incomplete: A training ended otherwise than it should, or with other bytes.
    """
    order = dataclasses.replace(FULL if device == CUDA else SMALL, seed=arguments.seed)
    try:
        expected, _ = trained(order, 0, until, warm=False)
        for warm in (False, True):
            digests, seconds = trained(order, len(KILLED_IN), until, warm=warm)
            labels = {
                "engine": "torchrec",
                "optimizer": "row-wise Adagrad",
                "ranks": RANKS,
                "window": order.window,
            }
            labels |= {"device": device, "start": "ecemb-run" if warm else "torchrun"}
            yield once("fused_identical", "of 1", float(digests == expected), **labels)
            for lost, passed_s in zip(LOST, seconds, strict=True):
                yield once("fused_kill_to_step_s", "s", passed_s, **labels, lost=lost)
            if digests != expected:
                raise WrongResult(f"start by {labels['start']}: ended with other bytes than undisturbed")
    except (LaunchFailed, WrongResult) as error:
        raise Incomplete([], str(error)) from error


def trained(order: Order, kills: int, until: float, *, warm: bool) -> tuple[list[str], list[float]]:
    """Trains under torchrun.

    Returns:
        Each rank's hash at the end; and of each kill, how long it took to the next step.

    Raises:
        LaunchFailed: torchrun did, or came too late.
        WrongResult: A life went on from nothing, or lost something else.
    """
    order = dataclasses.replace(order, job=f"bench-{secrets.token_hex(4)}")
    with tempfile.TemporaryDirectory(prefix="ecemb-bench-") as name, order.leaving_nothing():
        folder = Path(name)
        told = folder / "order.json"
        told.write_text(json.dumps({"order": dataclasses.asdict(order), "kills": kills}))
        with Torchrun(
            RANKS, kills, "bench.questions.gpu.fused_rank", str(told), folder=folder,
            name=f"the fused training with {kills} kills", timeout_s=until - time.monotonic(),
            warm=warm, preload=("torchrec", "torchrec.distributed.model_parallel") if warm else (),
        ) as launch:  # fmt: skip
            launch.wait()
        lives = [json.loads(line) for line in (folder / "lives.0").read_text().splitlines()]
        lost = [one["lost"] for one in lives[1:]]
        if lost != [[1], []][:kills] or any(one["resumes"] == 0 for one in lives[1:]):
            raise WrongResult(f"the lives of the training were {lives}")
        seconds = [
            max(float((folder / f"stepped.{i + 1}.{rank}").read_text()) for rank in range(RANKS))
            - float((folder / f"killed.{i}").read_text())
            for i in range(kills)
        ]
        return [(folder / f"digest.{rank}").read_text() for rank in range(RANKS)], seconds
