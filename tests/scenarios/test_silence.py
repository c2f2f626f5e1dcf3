"""Scripts that lose something after a failure are named before they do; mended, they lose nothing.

Each script runs undisturbed, and with all processes ended in front of a step and a rank's memory lost. The
digests of both runs, step by step, say where it goes wrong, and ecemb must have named it before. All scripts
run one after another in the same two processes, which stand for two hosts.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

import ecemb
from ecemb.errors import ConfigurationError, EcembError, UndeclaredWrite, UsageError
from ecemb.recovery.verify import WARM_UP
from ecemb.tools.rehearsal import digests
from support.processes import run_ranks
from support.training_lives import launched

WORLD, STEPS, ENDS, DEADLINE_S = 2, 8, 6, 600
EVERY = 3  # steps between evaluations, updates and the like
ROWS = 40


class Ended(BaseException):
    """All processes end here."""


@dataclass
class Seen:
    """What a run said and left, in its order.

    Attributes:
        said: warnings, and an error that ended it, with the step in front of which they came.
        left: digests after each step.
        error: class of the error.
    """

    said: list[tuple[int, str]] = field(default_factory=list)
    left: dict[int, dict[str, str]] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Script:
    """A script, and what is to be said of it: nothing, if it ends the same."""

    run: Callable[[], None]
    says: str
    error: str
    ends: int  # the step in front of which all processes end, and a rank's memory is lost


SCRIPTS: dict[str, Script] = {}


def named(
    says: str, error: type[EcembError] | None = None, ends: int = ENDS
) -> Callable[[Callable[[], None]], None]:
    """Registers a script that must be named by a warning with these words, or by an error."""

    def register(run: Callable[[], None]) -> None:
        SCRIPTS[run.__name__] = Script(run, says, error.__name__ if error is not None else "", ends)

    return register


mended = named("")
"""Registers a script of which nothing must be said, and that ends the same."""


# --- what the scripts share -----------------------------------------------------------------------


class Model(nn.Module):
    """A table and a dense layer, with their optimizers."""

    def __init__(self, dense: type[torch.optim.SGD] = torch.optim.SGD) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = ecemb.nn.ShardedEmbeddingBag(ROWS, 4), nn.Linear(4, 1)
        sparse = torch.optim.Adagrad(self.table.parameters(), lr=0.1)
        self.optimizers = [sparse, dense(self.head.parameters(), lr=0.1)]
        torch.manual_seed(dist.get_rank())

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))

    def protect(self, **options: Any) -> ecemb.Guard:
        return ecemb.protect(self, optimizers=self.optimizers, code=CODE, **options)

    def add_gradients(self, ids: Tensor | None = None) -> None:
        ids = torch.randint(ROWS, (8, 3)) if ids is None else ids
        (self(ids).square().mean() / WORLD).backward()

    def update(self) -> None:
        for parameter in self.head.parameters():
            dist.all_reduce(parameter.grad)
        for optimizer in self.optimizers:
            optimizer.step()

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def fit(self, ids: Tensor | None = None) -> None:
        self.clear()
        self.add_gradients(ids)
        self.update()


CODE = ecemb.Code(n=2, k=1)


# --- gradients ------------------------------------------------------------------------------------


@named("a gradient of p", UsageError)
def an_update_takes_gradients_of_three_steps() -> None:
    model = Model()
    guard = model.protect()
    for number in range(guard.next_step, STEPS):
        with guard.step():
            if number % EVERY == 0:
                model.clear()
            model.add_gradients()
            if number % EVERY == EVERY - 1:
                model.update()
    guard.close()


class Seldom(torch.optim.SGD):
    """Updates once in some calls, and keeps the gradients in between."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.calls % EVERY == 0:
            super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.calls += 1
        if self.calls % EVERY == 0:
            super().step()


@named("a gradient of p", UsageError)
def a_wrapped_optimizer_takes_gradients_of_three_steps() -> None:
    model = Model(Seldom)
    guard = model.protect()
    for _ in range(guard.next_step, STEPS):
        with guard.step():
            model.fit()
    guard.close()


@mended
def all_micro_batches_of_an_update_are_in_one_step() -> None:
    model = Model()
    guard = model.protect()
    for _ in range(guard.next_step, STEPS):
        with guard.step():
            model.clear()
            for _ in range(EVERY):
                model.add_gradients()
            model.update()
    guard.close()


# --- tables ---------------------------------------------------------------------------------------


@contextmanager
def by_hand() -> Iterator[tuple[nn.Embedding, Callable[[], None], ecemb.Guard]]:
    """A table of this rank, a training step, and the guard."""
    torch.manual_seed(dist.get_rank())
    table = nn.Embedding(ROWS, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        table(torch.randint(ROWS, (8,))).square().mean().backward()
        optimizer.step()

    model = nn.ModuleDict({"table": table})
    guard = ecemb.protect(model, optimizers=optimizer, tables={"table": table}, code=CODE)
    yield table, train, guard
    guard.close()


@named("storage of weight", UndeclaredWrite)
def rows_are_normalised_into_a_new_tensor() -> None:
    with by_hand() as (table, train, guard):
        for number in range(guard.next_step, STEPS):
            with guard.step():
                train()
            if number % EVERY == EVERY - 1:
                table.weight.data = functional.normalize(table.weight.data)


def normalised_in_place() -> None:
    with by_hand() as (table, train, guard):
        for number in range(guard.next_step, STEPS):
            with guard.step():
                train()
            if number % EVERY == EVERY - 1:
                table.weight.data.copy_(functional.normalize(table.weight.data))


@named("parity does not fit rows")
def rows_are_normalised_in_place_past_torch() -> None:
    """The first comparison of parity and rows, after `WARM_UP` steps at any pace, names them."""
    normalised_in_place()


@named("parity was last known to fit all rows, from comparisons beside training: never yet", ends=WARM_UP - 1)
def memory_is_lost_before_the_first_comparison() -> None:
    """The recovery says that nothing vouches for parity."""
    normalised_in_place()


@mended
def rows_are_declared_and_normalised_in_a_step() -> None:
    with by_hand() as (table, train, guard):
        for number in range(guard.next_step, STEPS):
            with guard.step(), torch.no_grad():
                with torch.enable_grad():
                    train()
                if number % EVERY == EVERY - 1:
                    guard.touch("table", torch.arange(ROWS))
                    table.weight.copy_(functional.normalize(table.weight))


@named("no table to protect", ConfigurationError)
def tables_are_dense_copies_under_ddp() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(ROWS, 4), nn.Linear(4, 1)))
    ecemb.protect(model, optimizers=torch.optim.Adam(model.parameters()), code=CODE)


# --- optimizers, schedules, averages --------------------------------------------------------------


@named("optimizers= of ecemb.protect()", UsageError)
def each_epoch_makes_its_optimizer() -> None:
    model = Model()
    guard = model.protect()
    for number in range(guard.next_step, STEPS):
        if number % EVERY == 0:
            model.optimizers[0] = torch.optim.Adagrad(model.table.parameters(), lr=0.1)
        with guard.step():
            model.fit()
    guard.close()


def under_a_schedule(*, is_given: bool) -> None:
    model = Model()
    schedule = OneCycleLR(model.optimizers[1], max_lr=0.5, total_steps=STEPS + 1)
    guard = model.protect(state={"schedule": schedule} if is_given else None)
    for _ in range(guard.next_step, STEPS):
        with guard.step():
            model.fit()
            schedule.step()
    guard.close()


@named("schedule (OneCycleLR)")
def a_schedule_is_forgotten() -> None:
    under_a_schedule(is_given=False)


@mended
def a_schedule_is_given_in_state() -> None:
    under_a_schedule(is_given=True)


def averaged(*, is_given: bool) -> None:
    model = Model()
    average = AveragedModel(model.head)
    if is_given:
        average.requires_grad_(False)
        model.average = average
    guard = model.protect()
    for _ in range(guard.next_step, STEPS):
        with guard.step():
            model.fit()
            average.update_parameters(model.head)
    guard.close()


@named("average (AveragedModel)")
def an_averaged_model_is_forgotten() -> None:
    averaged(is_given=False)


@mended
def an_averaged_model_is_part_of_the_model() -> None:
    averaged(is_given=True)


# --- random generators ----------------------------------------------------------------------------


def validated(*, is_declared: bool) -> None:
    model = Model()
    held_out = DataLoader(list(torch.arange(24).view(8, 3)), batch_size=4)
    guard = model.protect()
    block = guard.evaluation if is_declared else mock.MagicMock()
    with block(), torch.no_grad():
        for ids in held_out:
            model(ids)
    for _ in range(guard.next_step, STEPS):
        with guard.step():
            model.fit()
    guard.close()


@named("changed between ecemb.protect() and the first step")
def a_validation_in_front_of_the_loop_iterates_over_a_loader() -> None:
    validated(is_declared=False)


@mended
def a_validation_in_front_of_the_loop_is_declared() -> None:
    validated(is_declared=True)


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.randint(ROWS, (8, 5)))


@named("torch's random generator changed between steps 2 and 3")
def an_evaluation_draws_between_steps() -> None:
    model = Model()
    guard = model.protect()
    for number in range(guard.next_step, STEPS):
        with guard.step():
            model.fit()
        if number % EVERY == EVERY - 1:
            evaluate(model)
    guard.close()


@mended
def an_evaluation_that_draws_is_declared() -> None:
    model = Model()
    guard = model.protect()
    for number in range(guard.next_step, STEPS):
        if number % EVERY == 0:
            with guard.evaluation():
                evaluate(model)
        with guard.step():
            model.fit()
    guard.close()


# --- data -----------------------------------------------------------------------------------------


class Lines(Dataset[Tensor]):
    """Gives its next line, or that of the index."""

    def __init__(self, *, by_index: bool) -> None:
        self.by_index, self.line = by_index, 0

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> Tensor:
        if self.by_index:
            return torch.tensor([index * 7 % ROWS, index * 11 % ROWS])
        self.line += 1
        return torch.tensor([self.line * 7 % ROWS, self.line * 11 % ROWS])


def read(*, by_index: bool) -> None:
    model = Model()
    guard = model.protect()
    batches = guard.batches(DataLoader(Lines(by_index=by_index), batch_size=8))
    for _ in range(guard.next_step, STEPS):
        with guard.step():
            model.fit(next(batches))
    guard.close()


@named("reading samples changes line of the dataset")
def a_dataset_reads_its_next_line() -> None:
    read(by_index=False)


@mended
def a_dataset_reads_the_line_of_the_index() -> None:
    read(by_index=True)


EPOCH = [torch.arange(24).view(8, 3) + k for k in range(STEPS // 2)]


@named("the position in the data")
def epochs_begin_again_until_stop_iteration() -> None:
    model = Model()
    guard = model.protect()
    for _ in range(2):
        batches = iter(EPOCH)
        while True:
            try:
                with guard.step():
                    model.fit(next(batches))
            except StopIteration:
                break
    guard.close()


@mended
def epochs_go_on_until_stop_iteration() -> None:
    model = Model()
    guard = model.protect()
    for epoch in range(guard.next_step // len(EPOCH), 2):
        batches = iter(EPOCH[guard.next_step - epoch * len(EPOCH) :])
        while True:
            try:
                with guard.step():
                    model.fit(next(batches))
            except StopIteration:
                break
    guard.close()


# --- their runs -----------------------------------------------------------------------------------


class Said(logging.Handler):
    """Notes warnings; not that memory was lost, which the test does."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(logging.WARNING)
        self._seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno == logging.WARNING and "recovered, the memory of" not in text:
            self._seen.said.append((len(self._seen.left), text))


@contextmanager
def watched(seen: Seen, ends: int) -> Iterator[None]:
    """Notes what is said, and digests after each step; ends the process in front of one."""
    protect, step = ecemb.protect, ecemb.Guard.step
    given: dict[str, Any] = {}

    def noted(model: nn.Module, **options: Any) -> ecemb.Guard:
        given.update(options, model=model)
        return protect(model, **options)

    @contextmanager
    def stepping(guard: ecemb.Guard) -> Iterator[Any]:
        script, number = sys._getframe(2), guard.stats()["next_step"]  # contextlib is in between
        if number == ends:
            raise Ended
        with step(guard) as one:
            yield one
        seen.left[number] = digests(given, list(script.f_locals.items()))

    handler = Said(seen)
    logging.getLogger("ecemb").addHandler(handler)
    try:
        with mock.patch.object(ecemb, "protect", noted), mock.patch.object(ecemb.Guard, "step", stepping):
            yield
    finally:
        logging.getLogger("ecemb").removeHandler(handler)


def life(seen: Seen, script: Script, job: str, root: str, host: str, ends: int = -1) -> None:
    with launched(job, root, host), watched(seen, ends):
        try:
            script.run()
        except Ended:
            pass
        except EcembError as error:
            seen.said.append((len(seen.left), str(error)))
            seen.error = type(error).__name__


def play(index: int, port: int, root: str) -> dict[str, tuple[Seen, Seen] | str]:
    """Runs all scripts; returns what was seen of each, undisturbed and ended, or a traceback."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    os.environ.update(
        RANK=str(index),
        WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    host = f"host{index}"
    found: dict[str, tuple[Seen, Seen] | str] = {}
    for number, (name, script) in enumerate(SCRIPTS.items()):
        plain, ended = Seen(), Seen()
        try:
            life(plain, script, f"{number}-plain", root, host)
            life(ended, script, f"{number}-ended", root, host, 1 if plain.error else script.ends)
            if not ended.error:
                if index == 1:
                    [folder] = Path(root).glob(f"*/{number}-ended/{host}")
                    shutil.rmtree(folder)
                life(ended, script, f"{number}-ended", root, host)
            found[name] = plain, ended
        except BaseException:  # noqa: BLE001 - the script's test raises it
            found[name] = traceback.format_exc()
        store.set(f"{name}/{index}", "ended")
        store.wait([f"{name}/{other}" for other in range(WORLD)], timedelta(seconds=DEADLINE_S))
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Seen, Seen] | str]]:
    """What was seen in each process. The store is kept here, as torchrun's agent does."""
    timeout = timedelta(seconds=DEADLINE_S)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    root = str(tmp_path_factory.mktemp("arenas"))
    return run_ranks(WORLD, play, store.port, root, deadline_s=DEADLINE_S, group=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_loses_nothing_in_silence(
    name: str, played: list[dict[str, tuple[Seen, Seen] | str]]
) -> None:
    script = SCRIPTS[name]
    plain: list[Seen] = []
    ended: list[Seen] = []
    for seen in (of_rank[name] for of_rank in played):
        if isinstance(seen, str):
            pytest.fail(seen, pytrace=False)
        plain.append(seen[0])
        ended.append(seen[1])
    wrong = {
        step
        for one, other in zip(plain, ended, strict=True)
        for step, left in other.left.items()
        if left != one.left.get(step)
    }
    said = [(step, text) for one in (*plain, *ended) for step, text in one.said]
    if script.says:
        named_at = min((step for step, text in said if script.says in text), default=STEPS)
        assert {one.error for one in (*plain, *ended)} == {script.error}
        assert named_at <= min(wrong, default=STEPS - 1), said
        assert wrong or script.error, "it ends the same: a false alarm"
    else:
        assert not said and not wrong
        assert all(list(one.left) == list(range(STEPS)) for one in (*plain, *ended))
