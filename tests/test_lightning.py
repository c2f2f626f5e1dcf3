"""What the callback refuses; that it protects a real fit is in test_examples.py."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from raised import refused
from torch import nn
from without_lightning import lightning

import ecemb
from ecemb.errors import ConfigurationError, UsageError

TAKES = "Trainer.fit takes protection.batches(loader)"


@pytest.fixture(scope="module")
def kind() -> Any:
    return lightning().Protection


@pytest.fixture
def protection(kind: Any) -> Any:
    return kind(code=ecemb.Code(2, 1))


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
    trainer: Any = SimpleNamespace(num_training_batches=2)
    with refused(ConfigurationError, TAKES):
        protection.on_fit_start(trainer, nn.Module())
    with refused(ConfigurationError, TAKES):
        protection.on_train_batch_start(trainer, nn.Module(), None, 0)
    protection.batches([1, 2, 3])
    with refused(ConfigurationError, "takes 2 batches of an epoch, and the loader has 3", "fast_dev_run"):
        protection.on_train_start(trainer, nn.Module())


def test_distributed_data_parallel_leaves_tables_alone(kind: Any) -> None:
    by_hand = nn.Embedding(3, 2, sparse=True)
    model = nn.Module()
    model.table, model.by_hand, model.head = ecemb.nn.ShardedEmbeddingBag(4, 2), by_hand, nn.Linear(2, 1)
    kind(code=ecemb.Code(2, 1), tables={"by hand": by_hand}).setup(None, model, "fit")
    assert set(model._ddp_params_and_buffers_to_ignore) == {"table.weight", "by_hand.weight"}


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "lightning" in name else find(name))
    monkeypatch.delitem(sys.modules, "ecemb.lightning", raising=False)
    with refused(ConfigurationError, "which is not installed", "pip install 'ecemb[lightning]'"):
        importlib.import_module("ecemb.lightning")
