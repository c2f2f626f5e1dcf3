"""TorchRec's own model-parallel tests, as the package installs them, with the model protected by ecemb.

Each case is one test of TorchRec with one choice of its parameters. The body of the test and its assertions
run unmodified; what is replaced is how its processes start and how their group is made, and the training step
is done inside `guard.step()`. When it has ended, all rows are compared with their parity: a row that changed
uncaptured would show.

torchrec is imported once, here; every rank of every case is a fork of that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

from contracts.torchrec_suite.forks import fork_ranks

ANY_BOOL = (False, True)
NO_QCOMMS, FP16_QCOMMS = "full precision", "fp16 and bf16"
FUSED_SGD, IN_BACKWARD_SGD = "fused_params", "apply_optimizer_in_backward"
SHARDINGS = ("table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise")
TOGETHER: dict[str, tuple[Any, ...]] = {
    "sharder_type": ("embedding_bag_collection",),
    "kernel_type": ("fused",),
    "qcomms_config": (NO_QCOMMS, FP16_QCOMMS),
    "apply_optimizer_in_backward_config": (FUSED_SGD, IN_BACKWARD_SGD),
}
TRAINING = TOGETHER | {"variable_batch_size": ANY_BOOL, "data_type": ("FP32", "FP16")}
POOLED = {"pooling": ("SUM", "MEAN")}
# What is left out fails on gloo without ecemb, too (docs/torchrec.md): batches of different sizes where rows
# are sharded, grid with mean pooling, batch sizes by feature with row-wise or data-parallel tables.
EQUAL_BATCHES = {"variable_batch_size": (False,)}
ONE = {"sharder_type": ("embedding_bag_collection",), "kernel_type": ("fused",)}
LOADING = ONE | {"sharding_type": SHARDINGS}


@dataclasses.dataclass(frozen=True)
class Case:
    """One test of TorchRec with one choice of its parameters.

    Attributes:
        test: class and method of the installed package.
        world_size: number of ranks.
        parameters: of the method, as plain values; `_values` makes TorchRec's of them.
    """

    test: str
    world_size: int
    parameters: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return " ".join([self.test, *(f"{name}={value}" for name, value in self.parameters)])


def _of(test: str, world_size: int, parameters: dict[str, tuple[Any, ...]]) -> list[Case]:
    choices = itertools.product(*parameters.values())
    return [Case(test, world_size, tuple(zip(parameters, choice, strict=True))) for choice in choices]


MODEL = "_ModelParallelBase"
STATE = "ModelParallelStateDictBase"
CASES = [
    *_of(f"{MODEL}.test_sharding_tw", 2, TRAINING | {"qcomms_config": (FP16_QCOMMS,)}),
    *_of(f"{MODEL}.test_sharding_cw", 2, TRAINING | {"allow_zero_batch_size": ANY_BOOL}),
    *_of(f"{MODEL}.test_sharding_twcw", 2, TRAINING),
    *_of(f"{MODEL}.test_sharding_rw", 2, TRAINING | POOLED | EQUAL_BATCHES),
    *_of(
        f"{MODEL}.test_sharding_twrw",
        2,
        TRAINING | {"qcomms_config": (FP16_QCOMMS,)} | POOLED | EQUAL_BATCHES,
    ),
    *_of(f"{MODEL}.test_sharding_grid", 4, TOGETHER | {"pooling": ("SUM",)}),
    *_of(
        f"{MODEL}.test_sharding_dp",
        2,
        ONE
        | {
            "kernel_type": ("dense",),
            "apply_optimizer_in_backward_config": (FUSED_SGD,),
            "data_type": ("FP32", "FP16"),
        },
    ),
    *_of(
        f"{MODEL}.test_sharding_diff_table_index_type",
        2,
        ONE | {"dtype": ("int32", "int64"), "use_offsets": ANY_BOOL},
    ),
    *_of(
        f"{MODEL}.test_sharding_variable_batch",
        2,
        {
            "sharding_type": ("table_wise", "column_wise"),
            "global_constant_batch": ANY_BOOL,
            "data_type": ("FP32", "FP16"),
        }
        | POOLED,
    ),
    *_of(f"{STATE}.test_load_state_dict", 1, LOADING | {"is_training": ANY_BOOL}),
    *_of(f"{STATE}.test_load_state_dict_prefix", 1, LOADING | {"is_training": ANY_BOOL}),
    *_of(f"{STATE}.test_optimizer_load_state_dict", 1, LOADING),
    *_of(
        f"{STATE}.test_load_state_dict_cw_multiple_shards",
        1,
        ONE | {"sharding_type": ("column_wise",), "is_training": ANY_BOOL},
    ),
    *_of(
        f"{STATE}.test_load_state_dict_dp",
        1,
        ONE | {"kernel_type": ("dense",), "sharding_type": ("data_parallel",), "is_training": ANY_BOOL},
    ),
    *_of(f"{STATE}.test_params_and_buffers", 1, LOADING),
]


# --- the process that all ranks are forks of ------------------------------------------------------


def run(cases: list[Case]) -> dict[Case, str]:
    """Runs cases one after another; what failed in each, or ""."""
    load()
    return {case: fork_ranks(case.world_size, _rank, case) for case in cases}


def load() -> None:
    """Imports TorchRec's tests; their package leaves out one module that they import."""
    import torchrec.distributed.embedding as embedding

    absent = types.ModuleType("torchrec.distributed.tests.test_sequence_model")
    absent.TestEmbeddingCollectionSharder = embedding.EmbeddingCollectionSharder
    sys.modules.setdefault("torchrec.distributed.tests", types.ModuleType("torchrec.distributed.tests"))
    sys.modules.setdefault(absent.__name__, absent)
    import torch._dynamo  # noqa: F401
    import torchrec.distributed.test_utils.test_model_parallel
    import torchrec.distributed.test_utils.test_model_parallel_base  # noqa: F401

    import ecemb.kernels.cpu  # noqa: F401


# --- one rank -------------------------------------------------------------------------------------


def _rank(rank: int, world_size: int, folder: str, case: Case) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        (_model_parallel if case.test.startswith(MODEL) else _state_dict)(case, rank, folder)


def _group(folder: str) -> Any:
    """ecemb's group of all ranks, in place of the one that TorchRec's tests would make."""
    import torch.distributed as dist

    import ecemb

    rank = os.environ["RANK"]
    ecemb.init_process_group("gloo", job="peer", arena_dir=folder)
    assert str(dist.get_rank()) == rank
    return dist.group.WORLD


def _body(case: Case, module: Any) -> tuple[Any, Callable[..., None]]:
    """The class of a test, and the test without what draws its parameters and skips it without GPUs."""
    name, method = case.test.split(".")
    kind = getattr(module, name)
    return kind, getattr(kind, method).hypothesis.inner_test


def _values(case: Case) -> dict[str, Any]:
    import torch
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig
    from torchrec.modules.embedding_configs import PoolingType
    from torchrec.types import DataType

    meaning: dict[str, dict[Any, Any]] = {
        "qcomms_config": {
            NO_QCOMMS: None,
            FP16_QCOMMS: QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16),
        },
        "apply_optimizer_in_backward_config": {
            FUSED_SGD: None,
            IN_BACKWARD_SGD: {
                "embedding_bags": (torch.optim.SGD, {"lr": 0.01}),
                "embeddings": (torch.optim.SGD, {"lr": 0.2}),
            },
        },
        "pooling": {kind.name: kind for kind in PoolingType},
        "data_type": {kind.name: kind for kind in DataType},
        "dtype": {"int32": torch.int32, "int64": torch.int64},
    }
    return {name: meaning.get(name, {}).get(value, value) for name, value in case.parameters}


def _model_parallel(case: Case, rank: int, folder: str) -> None:
    """Tests that compare a step of the sharded model with one of the unsharded model."""
    import torchrec.distributed.test_utils.multi_process as multi_process
    import torchrec.distributed.test_utils.test_model_parallel as module
    import torchrec.distributed.test_utils.test_sharding as sharding
    from torchrec.distributed import DistributedModelParallel

    import ecemb

    def each(*, callable: Callable[..., None], world_size: int, **others: Any) -> None:  # noqa: A002
        callable(rank=rank, world_size=world_size, **others)

    def make_group(**_: Any) -> Any:
        return _group(folder)

    trained: list[int] = []
    train = sharding.gen_full_pred_after_one_step

    def train_protected(model: Any, optimizer: Any, batch: Any) -> Any:
        if not isinstance(model, DistributedModelParallel):
            return train(model, optimizer, batch)
        guard = ecemb.protect(
            model,
            optimizers=optimizer,
            tables=_beside(case),
            code=ecemb.Code(n=case.world_size, k=case.world_size - 1),
            failure_domain="rank",
        )
        with guard.step():
            predicted = train(model, optimizer, batch)
        again = train(model, optimizer, batch, skip_training=True)
        assert again.equal(predicted), "evaluation after the step differs"
        assert guard.scrub().wrong_words == 0
        trained.append(guard.next_step)
        guard.close()
        return predicted

    kind, body = _body(case, module)
    test = kind()
    # gloo, but under a name for which the bodies don't skip what torch 2.13's gloo can do by now
    test.backend = "cpu:gloo"
    with mock.patch.dict(os.environ):
        module.ModelParallelTestShared.setUp(test, backend="cpu:gloo")
    test._run_multi_process_test = each
    random.seed(rank)  # batch sizes, where they vary
    with (
        mock.patch.object(multi_process, "init_distributed_single_host", make_group),
        mock.patch.object(sharding, "gen_full_pred_after_one_step", train_protected),
    ):
        body(test, **_values(case))
    assert trained, "nothing was trained under protection"


def _beside(case: Case) -> dict[str, Any]:
    """Data-parallel tables are replicated state; a model of nothing else needs a table beside them."""
    import torch

    only_replicated = any(value in ("data_parallel", "dense") for _, value in case.parameters)
    return {"beside": torch.nn.Embedding(8, 4, sparse=True).requires_grad_(False)} if only_replicated else {}


def _state_dict(case: Case, rank: int, folder: str) -> None:
    """Tests that load what one model shows into another one; both are protected, as parts of one model.

    All that a test does with the models is one step: they load into tables that are protected.
    """
    import torch
    import torch.distributed as dist
    import torchrec.distributed.test_utils.test_model_parallel_base as module

    import ecemb

    kind, body = _body(case, module)
    test = kind()
    make = test._generate_dmps_and_batch
    guards: list[Any] = []

    def make_protected(*args: Any, **kwargs: Any) -> Any:
        models, batch = make(*args, **kwargs)
        n = max(2, case.world_size)
        both = torch.nn.ModuleList(models)
        beside = _beside(case)
        code = ecemb.Code(n=n, k=n - 1)
        guard = ecemb.protect(both, tables=beside, code=code, without_optimizer=both, failure_domain="rank")
        guards.append(guard)
        step.enter_context(guard.step())
        for model in models:
            _declare_loads(model.fused_optimizer, guard)
        return models, batch

    test._generate_dmps_and_batch = make_protected
    with mock.patch.object(dist, "init_process_group"), mock.patch.dict(os.environ):
        module.ModelParallelSingleRankBase.setUp(test, backend="gloo")
    _group(folder)
    torch.manual_seed(rank)
    with contextlib.ExitStack() as step:
        body(test, **_values(case))
    (guard,) = guards
    guard.close()
    dist.destroy_process_group()


def _declare_loads(optimizer: Any, guard: Any) -> None:
    """Loading a fused optimizer's state writes all rows; ecemb asks for guard.touch."""
    import torch

    load = optimizer.load_state_dict

    def told(state: Any) -> None:
        for table in guard._tables.tables:
            guard.touch(table.name, torch.arange(table.layout.rows))
        load(state)

    optimizer.load_state_dict = told
