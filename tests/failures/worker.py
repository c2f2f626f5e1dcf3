"""The training under test: two sharded tables, a small dense part, and every kind of state.

Started by torchrun, which `driver.py` starts. Negatives and dropout are drawn from the rank's own
generators; the loss's history, as a chain of hashes, is in the state that the guard keeps, so that
one wrong bit at any time shows at the end.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import random
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ecemb
from ecemb.engines import sparse as sparse_tables
from ecemb.net.collectives import Fabric
from ecemb.recovery import scrub as scrub_module
from ecemb.start import opening
from failures import phases
from failures.observer import SOAK_TIMEOUT_S, Observer
from failures.plan import ABORT_EVERY, Plan, Setting

USERS, ITEMS, BATCH = 997, 1301, 24
OPTIMIZERS = {
    "SGD": lambda tables: torch.optim.SGD(tables, lr=0.5),
    "Adagrad": lambda tables: torch.optim.Adagrad(tables, lr=0.1),
    "SparseAdam": lambda tables: torch.optim.SparseAdam(tables, lr=0.01),
}


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Batch by step's number: users int64 [BATCH, 3], items int64 [BATCH, 2]."""

    def __init__(self, rank: int, steps: int) -> None:
        self.rank, self.steps = rank, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step * 1000 + self.rank)
        users = torch.randint(USERS, (BATCH, 3), generator=generator)
        items = torch.randint(ITEMS, (BATCH, 2), generator=generator) ** 2 // ITEMS  # skewed
        return users, items


class Model(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.users = ecemb.nn.ShardedEmbeddingBag(USERS, 12, device=device)
        self.items = ecemb.nn.ShardedEmbeddingBag(ITEMS, 7, mode="mean", dtype=torch.bfloat16, device=device)
        self.head = nn.Sequential(
            nn.Linear(19, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)
        ).to("cpu" if device == "meta" else device)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.head(torch.cat([self.users(users), self.items(items).float()], dim=1))[:, 0]


class Progress:
    """What the training script itself counts: given to the guard in `state=`."""

    def __init__(self) -> None:
        self.samples, self.best, self.chain = 0, float("inf"), ""

    def add(self, loss: float, *drawn: object) -> None:
        self.samples += BATCH
        self.best = min(self.best, loss)
        text = f"{self.chain} {loss.hex()} {drawn}"
        self.chain = hashlib.sha256(text.encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        vars(self).update(state_dict)


class Kept:
    """The model, its optimizers, and what goes with them."""

    def __init__(self, setting: Setting, rank: int) -> None:
        torch.manual_seed(1)
        self.model = Model(setting.device if setting.apart else "meta")
        self.sparse = OPTIMIZERS[setting.optimizer]([self.model.users.weight, self.model.items.weight])
        self.dense = torch.optim.Adam(self.model.head.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.dense, step_size=7, gamma=0.8)
        self.progress = Progress()
        torch.manual_seed(100 + rank)
        np.random.seed(200 + rank)
        random.seed(300 + rank)


def batches(setting: Setting, rank: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """From step `first` on, read ahead by the setting's workers."""
    data = Batches(rank, setting.steps)
    return iter(
        DataLoader(
            data,
            batch_size=None,
            sampler=range(first, setting.steps),
            num_workers=setting.workers,
            generator=torch.Generator().manual_seed(0),
            multiprocessing_context="fork" if setting.workers else None,
        )
    )


def train(
    setting: Setting,
    results: Path,
    arena_dir: str,
    *,
    host: str | None = None,
    failure_domain: Literal["auto", "host"] = "auto",
    timeout_s: float = 300,
    say: Callable[[ecemb.Guard, int], object] = lambda guard, step: None,
    ends: Callable[[int], bool] = lambda step: False,
    checkpoints: Path | None = None,
    saves: int = 0,
    place: ecemb.Place | None = None,
) -> None:
    """Train to the end; `say` is called with the number of each step when it begins and when it has ended.

    If `ends` is true of the next step's number, on all ranks, that is the end. Every `saves` steps a
    checkpoint is saved, if there is a folder for `checkpoints`. If there is a `place`, it keeps the model.
    """
    ecemb.init_process_group(
        "gloo", job="failures", arena_dir=arena_dir, host=host, timeout=timedelta(seconds=timeout_s)
    )
    leave_out_the_compiler()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = setting.device
    build = partial(Kept, setting, rank)
    kept = build() if place is None else place.keep("all", build)
    model, sparse, dense = kept.model, kept.sparse, kept.dense
    schedule, progress, dense_parameters = kept.schedule, kept.progress, list(kept.model.head.parameters())
    if setting.apart and device == "cpu":  # as if that were a device of its own
        sparse_tables.is_off_arena = lambda tensor: True
    if setting.fabric:  # NCCL refuses ranks that share a device
        group = dist.new_group(backend="gloo")
        opening.fabric = lambda session, *_: Fabric(group, torch.device("cpu"), session.patience_s)
    guard = ecemb.protect(
        model,
        optimizers=[sparse, dense],
        code=ecemb.Code(n=setting.n, k=setting.k),
        state=[schedule, progress],
        window=setting.window,
        overlap=setting.overlap,
        failure_domain=failure_domain,
        parity_backend="nccl" if setting.fabric else "tcp",
        resume=checkpoints,
        rebuild="background" if setting.background else "blocking",
        verify=0.5,  # so often that processes die in comparisons as well
    )
    data, read = iter(()), -1  # the batches, and the step that the next one of them is for
    probe = torch.arange(0, USERS, 10, device=device)[:, None]

    for step in guard.steps(setting.steps):
        if ends(step.number):
            break
        if setting.background and step.number % setting.background == 0:
            scrub(guard)
        with step:
            say(guard, step.number)
            if step.number != read:
                data = batches(setting, rank, step.number)
            read = step.number + 1
            sparse.zero_grad()
            dense.zero_grad()
            users, items = next(data)
            negatives = torch.randint(ITEMS, (BATCH, 2))
            negatives[:, 1] = int(np.random.randint(ITEMS))
            negatives[0, 0] = random.randrange(ITEMS)
            met = torch.cat([torch.ones(BATCH), torch.zeros(BATCH)]).to(device)
            looked_up = torch.cat([users, users]), torch.cat([items, negatives])
            scores = model(*(ids.to(device) for ids in looked_up))
            loss = nn.functional.binary_cross_entropy_with_logits(scores, met)
            (loss / ranks).backward()
            for parameter in dense_parameters:
                dist.all_reduce(parameter.grad)
            sparse.step()
            dense.step()
            for buffer in model.head.buffers():  # the batch norm's, which each rank has its own of
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)
                    buffer /= ranks
            if step.number % 5 == 2:  # a write by hand
                rows = torch.tensor([step.number % 100, step.number % 100 + 50])
                guard.touch("users", rows)
                with torch.no_grad():
                    model.users.weight[rows] *= 0.5
            schedule.step()
            progress.add(loss.item(), negatives.sum().item())
            turn, due = divmod(step.number, ABORT_EVERY)
            if due == ABORT_EVERY - 1 and rank == turn % ranks:
                step.abort()
        say(guard, step.number)
        if checkpoints is not None and (step.number + 1) % saves == 0:
            guard.save(checkpoints)
        if step.number % 10 == 9:
            with torch.no_grad():  # a look at the model between steps
                model.users(probe)

    if setting.background:
        scrub(guard)
    final = {**digests(model, sparse, dense), **own_digests(schedule, progress), **parity(guard)}
    path = results / f"{rank}.json"
    path.with_suffix(".new").write_text(json.dumps(final, indent=1, sort_keys=True))
    path.with_suffix(".new").rename(path)
    guard.close()
    dist.destroy_process_group()


def scrub(guard: ecemb.Guard) -> None:
    """Waits until no rank lacks anything, and compares all of it. All ranks.

    Raises:
        RuntimeError: Rows don't fit their parity.
    """
    report = guard.scrub()
    if report.wrong_words:
        raise RuntimeError(f"rows don't fit their parity: {report}")


def digest(value: object) -> str:
    """A hash of a tensor's bytes, or of anything else's text."""
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        data = repr(value).encode()
    return hashlib.sha256(data).hexdigest()


def digests(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, str]:
    """Every tensor and option of the model and its optimizers."""
    found = {f"model {name}": digest(tensor) for name, tensor in model.state_dict().items()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            options = {name: value for name, value in group.items() if name != "params"}
            found[f"{kind} options {number}"] = digest(options)
            for at, parameter in enumerate(group["params"]):
                for name, value in optimizer.state[parameter].items():
                    found[f"{kind} {number}.{at} {name}"] = digest(value)
    return found


def own_digests(*stateful: Any) -> dict[str, str]:
    """What differs by rank."""
    found = {f"state {type(item).__name__}": digest(item.state_dict()) for item in stateful}
    kind, key, *rest = np.random.get_state()
    found["torch's generator"] = digest(torch.get_rng_state())
    found["numpy's generator"] = digest((kind, np.asarray(key).tolist(), rest))
    found["python's generator"] = digest(random.getstate())
    if torch.cuda.is_initialized():
        found["CUDA's generator"] = digest(torch.cuda.get_rng_state())
    return found


def parity(guard: ecemb.Guard) -> dict[str, str]:
    """The parity kept here, after comparing all of it with the rows. All ranks."""
    guard._drain()  # the last step may be on its way beside, on the wires that are used here
    memory, longest = guard._memory, scrub_module.longest_block(guard._memory)
    wrong = scrub_module.compare_parity(memory, guard._transport, 0, longest, "comparing parity with rows")
    return {
        "parity": hashlib.sha256(memory.arena.region("parity").tobytes()).hexdigest(),
        "stripe classes whose parity is wrong": str([one.stripe_class for one in wrong]),
    }


def leave_out_the_compiler() -> None:
    """Put an empty torch._dynamo in place: optimizers import it, which takes a third of a start.

    They need two of its functions, which do nothing where nothing is compiled. A fork server has imported it.
    """
    if "torch._dynamo" in sys.modules:
        return
    empty: Any = types.ModuleType("torch._dynamo")
    empty.disable = lambda function=None, *args, **kwargs: function
    empty.graph_break = lambda *args, **kwargs: None
    sys.modules[empty.__name__] = empty
    vars(torch)["_dynamo"] = empty


def main() -> None:
    """What each worker does, from its first line on."""
    worker = phases.install()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # or its sums may differ from run to run
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    form = f"%(asctime)s {os.getpid()} %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, force=True)
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    folder = Path(os.environ[phases.FOLDER])
    arguments = Plan.read(folder / "plan.json").setting, folder / "results", os.environ[phases.ARENAS]
    try:
        if worker.plan.soak:

            def soaked(place: ecemb.Place | None = None) -> None:
                observer = Observer(folder, worker.board)
                look, ends = observer.look, observer.ends
                train(*arguments, timeout_s=SOAK_TIMEOUT_S, say=look, ends=ends, place=place)

            ecemb.run(soaked) if worker.plan.stays else soaked()
        elif worker.plan.saves:
            train(*arguments, checkpoints=folder / "checkpoints", saves=worker.plan.saves)
        elif worker.plan.stays:
            ecemb.run(lambda place: train(*arguments, place=place))
        else:
            train(*arguments)
    except ecemb.errors.JobFinished:  # killed while it was closing: its results are there
        logging.info("the job is finished")
        worker.board.went_on()
    except ecemb.errors.TooManyErasures as error:
        worker.refused(error)
        raise


if __name__ == "__main__":
    main()
