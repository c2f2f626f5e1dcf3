"""What the callback refuses; that it protects a real fit is in test_examples.py."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ecemb
from ecemb.errors import ConfigurationError, UsageError
from support.refusals import refused
from support.without_lightning import lightning

TAKES = "Trainer.fit takes protection.batches(loader)"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return lightning()


@pytest.fixture(scope="module")
def kind(module: ModuleType) -> Any:
    return module.Protection


@pytest.fixture
def protection(kind: Any) -> Any:
    return kind(code=ecemb.Code(2, 1))


def trainer_of(*schedules: Any, ranks: int = 2) -> Any:
    """What a callback sees of a Trainer that begins to fit, with two batches of a step."""
    return SimpleNamespace(
        num_training_batches=3,
        accumulate_grad_batches=2,
        is_last_batch=False,
        world_size=ranks,
        strategy=SimpleNamespace(model=nn.Module()),
        optimizers=[],
        lr_scheduler_configs=schedules,
        callbacks=[],
        gradient_clip_val=None,
        precision_plugin=SimpleNamespace(state_dict=dict),
        fit_loop=SimpleNamespace(
            state_dict=dict,
            epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=SimpleNamespace(ready=0))),
        ),
    )


class Watched:
    """Stands for a guard: it remembers how its steps went, and the state that it was given."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.state: dict[str, Any] = {}

    def protect(self, model: nn.Module, *, state: dict[str, Any], **_: Any) -> Watched:
        self.state = state
        return self

    def batches(self, loader: list[int], *, order_may_change: bool) -> Iterator[int]:
        return iter(loader)

    @contextmanager
    def step(self) -> Generator[None]:
        self.told.append("begins")
        yield
        self.told.append("commits")


@pytest.fixture
def watched(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Watched:
    guard = Watched()
    monkeypatch.setattr(module, "protect", guard.protect)
    return guard


def test_before_the_fit(protection: Any) -> None:
    for call in (lambda: protection.guard, protection.close):
        with refused(UsageError, "when Trainer.fit begins"):
            call()
    with refused(ConfigurationError, "a loader with a length", "generator"):
        protection.batches(i for i in range(3))
    assert len(protection.batches([1, 2, 3])) == 3
    with refused(ConfigurationError, "one loader"):
        protection.batches([1])


def test_a_fit_of_another_loader(protection: Any) -> None:
    trainer = trainer_of()
    trainer.num_training_batches = 2
    with refused(ConfigurationError, TAKES):
        protection.on_fit_start(trainer, nn.Module())
    with refused(ConfigurationError, TAKES):
        protection.on_train_batch_start(trainer, nn.Module(), None, 0)
    protection.batches([1, 2, 3])
    with refused(ConfigurationError, "takes 2 batches of an epoch, and the loader has 3", "fast_dev_run"):
        protection.on_train_start(trainer, nn.Module())


def test_tables_have_keys(kind: Any) -> None:
    with refused(ConfigurationError, "tables= takes a mapping", "list"):
        kind(code=ecemb.Code(2, 1), tables=[nn.Embedding(3, 2, sparse=True)])


def test_distributed_data_parallel_leaves_tables_alone(kind: Any) -> None:
    by_hand = nn.Embedding(3, 2, sparse=True)
    model = nn.Module()
    model.table, model.by_hand, model.head = ecemb.nn.ShardedEmbeddingBag(4, 2), by_hand, nn.Linear(2, 1)
    model._ddp_params_and_buffers_to_ignore = ["head.bias"]
    kind(code=ecemb.Code(2, 1), tables={"by hand": by_hand}).setup(None, model, "fit")
    ignored: Any = model._ddp_params_and_buffers_to_ignore
    assert set(ignored) == {"head.bias", "table.weight", "by_hand.weight"}


def test_what_lightning_would_move_behind_the_guard(kind: Any) -> None:
    model = nn.Module()
    model.table = ecemb.nn.ShardedEmbeddingBag(4, 2, device="meta")
    by_hand = nn.Embedding(3, 2, sparse=True, device="meta")
    for module, name in ((model, "table"), (nn.Module(), "by hand")):
        protection = kind(code=ecemb.Code(2, 1), tables={"by hand": by_hand} if name == "by hand" else None)
        protection.batches([1, 2, 3])
        with refused(ConfigurationError, f"table '{name}' is on meta", "Trainer(accelerator='cpu')"):
            protection.on_fit_start(trainer_of(), module)


def test_a_schedule_that_is_stepped_after_the_commit(protection: Any) -> None:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)]))
    protection.batches([1, 2, 3])
    with refused(ConfigurationError, "ReduceLROnPlateau follows a metric", "on_before_zero_grad", "state="):
        protection.on_fit_start(
            trainer_of(SimpleNamespace(scheduler=schedule, reduce_on_plateau=True)), nn.Module()
        )


def test_gradients_of_tables_are_not_clipped(protection: Any, watched: Watched) -> None:
    def by_lightning(self: object, *arguments: object) -> None: ...

    by_lightning.__module__ = "pytorch_lightning.core.module"

    class Plain(nn.Module):
        configure_gradient_clipping = by_lightning

    class Mine(Plain):
        def configure_gradient_clipping(self, *arguments: object) -> None: ...

    protection.batches([1, 2, 3])
    trainer = trainer_of()
    trainer.gradient_clip_val = 1.0
    model, dense, mine = Plain(), Plain(), Mine()
    model.table, mine.table = ecemb.nn.ShardedEmbeddingBag(4, 2), ecemb.nn.ShardedEmbeddingBag(4, 2)
    with refused(ConfigurationError, "gradient_clip_val=1.0", "sparse", "configure_gradient_clipping()"):
        protection.on_fit_start(trainer, model)
    protection._check(trainer, dense)
    protection.on_fit_start(trainer, mine)
    assert watched.told == []


def test_a_callback_that_needs_the_start_of_every_epoch(protection: Any) -> None:
    class GradientAccumulationScheduler:  # as Lightning names it
        pass

    class Mine(GradientAccumulationScheduler):
        pass

    protection.batches([1, 2, 3])
    trainer = trainer_of()
    trainer.callbacks = [protection, Mine()]
    with refused(ConfigurationError, "callback Mine", "accumulate_grad_batches="):
        protection.on_fit_start(trainer, nn.Module())


def test_a_fit_that_stops_amid_an_accumulation_leaves_no_step_open(protection: Any, watched: Watched) -> None:
    trainer, model = trainer_of(), nn.Module()
    batches = iter(protection.batches([1, 2, 3]))
    protection.on_fit_start(trainer, model)
    for batch_idx, told in enumerate((["begins"], ["begins", "commits"], ["begins", "commits", "begins"])):
        batch = next(batches)
        protection.on_train_batch_start(trainer, model, batch, batch_idx)
        protection.on_train_batch_end(trainer, model, None, batch, batch_idx)
        assert watched.told == told
    for _ in range(2):
        protection.on_train_end(trainer, model)
        assert watched.told == ["begins", "commits"] * 2


def test_a_place_in_epochs_of_another_length(protection: Any, watched: Watched) -> None:
    protection.batches([1, 2, 3])
    protection.on_fit_start(trainer_of(ranks=2), nn.Module())
    progress = watched.state["progress"]
    saved = progress.state_dict()
    other = type(progress)(trainer_of(ranks=4))
    with refused(ConfigurationError, "saved by 2 ranks, and these are 4", "resume with 2 ranks"):
        other.load_state_dict(saved)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "lightning" in name else find(name))
    monkeypatch.delitem(sys.modules, "ecemb.integrations.lightning", raising=False)
    with refused(ConfigurationError, "which is not installed", "pip install 'ecemb[lightning]'"):
        importlib.import_module("ecemb.integrations.lightning")


def test_schedules_and_the_users_objects_have_names(kind: Any, watched: Watched) -> None:
    def schedule(name: str | None) -> Any:
        optimizer = torch.optim.SGD([torch.zeros(1)])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return SimpleNamespace(scheduler=scheduler, reduce_on_plateau=False, name=name)

    first, second = torch.nn.Linear(1, 1), torch.nn.Bilinear(1, 1, 1)
    for names, given, expected in (
        (("warmup", None), {"a": first, "b": first}, ["schedule warmup", "schedule 1", "state a", "state b"]),
        (("same", "same"), [first, second], ["schedule 0", "schedule 1", "state 0", "state 1"]),
    ):
        protection = kind(code=ecemb.Code(2, 1), state=given)
        protection.batches([1, 2, 3])
        protection.on_fit_start(trainer_of(*map(schedule, names)), nn.Module())
        assert list(watched.state) == ["progress", *expected]
    with refused(ConfigurationError, "both have the class Linear", "name them"):
        kind(code=ecemb.Code(2, 1), state=[first, torch.nn.Linear(2, 2)])
