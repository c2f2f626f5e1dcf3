"""A training that ends by an exception. Started by torchrun.

    ending_worker.py FOLDER HOW [record]

HOW is `misfit`, a code that doesn't fit the ranks: the same at each start, in which rank 0 ends first; or
`raise`, in a step of rank 1, which then takes longer than the others to end. These end, however, only once it
has written why: torchrun stops all others as soon as one has ended, and a busy machine may let a rank stand
still. Or it is `stuck`: the first start fails while a prefetcher waits for room in a queue.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import ecemb
from ecemb.net import error_file, worker_exit


def end_after_the_cause() -> None:
    """Beside rank 1: this process ends, in whatever way, once rank 1 has written its file of errors."""
    own = Path(os.environ["TORCHELASTIC_ERROR_FILE"])  # .../attempt_0/RANK/error.json
    cause, leave = own.parent.with_name("1") / own.name, os._exit

    def wait() -> None:
        while error_file.read(cause) is None:
            time.sleep(0.01)

    def leaves(code: int) -> None:
        wait()
        leave(code)

    atexit.register(wait)
    os._exit = leaves
    error_file._LATER_S = 1000  # than rank 1's time, which may come later than this rank's


@contextmanager
def rank_0_first(folder: Path) -> Iterator[None]:
    """The error of another rank comes once rank 0, which reports it for all, has ended by its own."""
    ended = folder / f"ended.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    if os.environ["RANK"] == "0":
        atexit.register(ended.touch)
        yield
        return
    try:
        yield
    except Exception:
        while not ended.exists():
            time.sleep(0.01)
        raise


def prefetch() -> None:
    """Has an executor fill a queue that stays full."""
    batches: queue.Queue[int] = queue.Queue(maxsize=1)

    def produce() -> None:
        while True:
            batches.put(1)

    ThreadPoolExecutor(1).submit(produce)
    while not batches.full():
        time.sleep(0.01)


def train(folder: Path, how: str) -> None:
    if how == "stuck":
        worker_exit.GRACE_S, worker_exit.REPORT_S = 0.1, 600.0
        note_start(folder)
        ecemb.init_process_group("gloo", job="ending", arena_dir=folder)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            prefetch()
            raise ValueError("of the script")
        return
    with rank_0_first(folder) if how == "misfit" else nullcontext():
        begin(folder, how)


def note_start(folder: Path) -> None:
    (folder / f"start.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}").touch()


def begin(folder: Path, how: str) -> None:
    note_start(folder)
    ecemb.init_process_group("gloo", job="ending", arena_dir=folder)
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.ModuleDict({"bag": ecemb.nn.ShardedEmbeddingBag(30, 4)})
    sparse = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = dist.get_world_size()
    code = ecemb.Code(9, 8) if how == "misfit" else ecemb.Code(ranks, ranks - 1)
    guard = ecemb.protect(model, optimizers=[sparse], code=code)
    if how == "raise" and rank != 1:
        end_after_the_cause()
    if rank == 1:
        atexit.register(time.sleep, 3.0)
    for _ in range(5):
        with guard.step() as step:
            sparse.zero_grad()
            model["bag"](torch.randint(30, (4, 2))).square().sum().backward()
            sparse.step()
            if step.number == 2 and rank == 1:
                raise ValueError("the first error of all")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    run = record(train) if "record" in sys.argv else train
    run(Path(sys.argv[1]), sys.argv[2])
