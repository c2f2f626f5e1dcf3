"""Each class, kernel, optimizer and type that TorchRec and FBGEMM offer is protected, or refused by name.

`support/torchrec/members.py` decides. A version of TorchRec or FBGEMM with a member that is not there fails
these tests until it is added. Kill tests (`tests/scenarios/test_torchrec_kills.py`) train the protected ones.
"""

from __future__ import annotations

import ast
import copy
import gc
import importlib
import inspect
import pkgutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.torchrec import members
from support.torchrec.models import QUIET, Watched, batch, build
from support.torchrec.runs import KILLED, varied_tables

import torchrec.distributed  # isort: skip  # after the models, which silence its warnings
from fbgemm_gpu.tbe import ssd  # isort: skip
from fbgemm_gpu import split_table_batched_embeddings_ops_inference as inference  # isort: skip
from fbgemm_gpu import split_table_batched_embeddings_ops_training as training  # isort: skip
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType  # isort: skip
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation  # isort: skip
from torchrec.distributed.embedding_kernel import BaseEmbedding  # isort: skip
from torchrec.distributed.embedding_types import EmbeddingComputeKernel  # isort: skip
from torchrec.distributed.model_parallel import DistributedModelParallel  # isort: skip
from torchrec.distributed.train_pipeline import train_pipelines  # isort: skip
from torchrec.distributed.types import ShardedModule, ShardingType  # isort: skip
from torchrec import optim  # isort: skip
from torchrec.modules import mc_modules  # isort: skip
from torchrec.optim import keyed, optimizers, warmup  # isort: skip
from torchrec.optim.fused import FusedOptimizer  # isort: skip
from torchrec.optim.semi_sync import SemisyncOptimizer  # isort: skip

from ecemb.engines import discover, internals
from ecemb.engines import torchrec as adapter
from ecemb.engines.members import KERNELS
from ecemb.errors import UnsupportedOptimizer, UnsupportedTable
from ecemb.state import rank_state
from ecemb.state.replicated import ReplicatedState
from support.refusals import refused
from support.simulation import alone
from support.torchrec.compositions import COMPOSITIONS, WRAPPERS, compose

TABLES = {"user": (7, ("u",)), "item": (5, ("i",))}
NOT_FOR_TRAINING = ("benchmark", "test_utils", "tests")
pytestmark = [
    *QUIET,
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


def below(base: type) -> set[type]:
    """The classes below one that can have instances, of torchrec's own."""
    found = {one for child in base.__subclasses__() for one in (child, *below(child))}
    return {one for one in found if one.__module__.startswith("torchrec.")}


def load_all() -> None:
    """Imports all of torchrec.distributed, so that its classes can be found."""
    for module in pkgutil.walk_packages(torchrec.distributed.__path__, "torchrec.distributed."):
        if not any(part in NOT_FOR_TRAINING for part in module.name.split(".")):
            importlib.import_module(module.name)


def sharded_modules() -> dict[str, type]:
    load_all()
    return {one.__name__: one for one in below(ShardedModule) if not inspect.isabstract(one)}


def models() -> dict[str, type]:
    load_all()
    return {one.__name__: one for one in below(DistributedModelParallel)}


def kernels() -> dict[str, type]:
    """TorchRec's modules around FBGEMM's."""
    load_all()
    return {one.__name__: one for one in below(BaseEmbedding) if hasattr(one, "emb_module")}


def maps() -> dict[str, type]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is scripted, which torch deprecates
        importlib.import_module("torchrec.modules.hash_mc_modules")
    return {one.__name__: one for one in below(mc_modules.ManagedCollisionModule)}


def around_others() -> dict[str, type]:
    """TorchRec's optimizers of other optimizers, and not of fused tables."""
    for module in pkgutil.walk_packages(optim.__path__, "torchrec.optim."):
        if not any(part in NOT_FOR_TRAINING for part in module.name.split(".")):
            importlib.import_module(module.name)
    found = below(keyed.KeyedOptimizer) - below(FusedOptimizer) - {FusedOptimizer}
    return {one.__name__: one for one in found if "test_utils" not in one.__module__}


def here(family: dict[str, members.Decision]) -> dict[str, members.Decision]:
    """Of a family, the members that the installed version is to have."""
    installed = tuple(map(int, internals.version("torchrec").split(".")[:2]))
    return {name: one for name, one in family.items() if members.SINCE.get(name, (0, 0)) <= installed}


def refusals(family: dict[str, members.Decision]) -> list[str]:
    return [name for name, decision in here(family).items() if isinstance(decision, members.Refused)]


def pipelines() -> set[str]:
    """TorchRec's pipelines, but for the abstract one."""
    load_all()
    return {one.__name__ for one in below(train_pipelines.TrainPipeline)}


# --- each has a decision ------------------------------------------------------------------------


def offered(family: str) -> set[str]:
    """The members that the installed TorchRec and FBGEMM have."""
    return {
        "model": lambda: {DistributedModelParallel.__name__, *models()},
        "sharded module": lambda: set(sharded_modules()),
        "map of ids": lambda: set(maps()),
        "eviction policy of a map": lambda: {one.__name__ for one in below(mc_modules.MCHEvictionPolicy)},
        "sharding type": lambda: {one.value for one in ShardingType},
        "compute kernel": lambda: {one.value for one in EmbeddingComputeKernel},
        "optimizer of tables": lambda: set(EmbOptimType.__members__),
        "type of weights": lambda: set(SparseType.__members__),
        "optimizer around others": lambda: set(around_others()),
        "pipeline": pipelines,
    }[family]()


@pytest.mark.parametrize("family", members.FAMILIES)
def test_each_member_has_a_decision(family: str) -> None:
    assert offered(family) == set(here(members.FAMILIES[family]))


@pytest.mark.parametrize("family", members.FAMILIES)
def test_a_new_member_has_none(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(iter(members.FAMILIES[family]))
    monkeypatch.delitem(members.FAMILIES[family], first)
    assert offered(family) - set(members.FAMILIES[family]) == {first}


def test_a_new_sharded_module_is_found() -> None:
    base = sharded_modules()["ShardedEmbeddingBagCollection"]
    kind = type("ShardedNovelty", (base,), {"__module__": "torchrec.distributed.novelty"})
    assert sharded_modules()["ShardedNovelty"] is kind
    del kind
    gc.collect()
    assert "ShardedNovelty" not in sharded_modules()


@pytest.mark.parametrize("family", members.FAMILIES)
def test_kill_tests_train_each_protected_member(family: str) -> None:
    tables = [table for collections in KILLED.values() for table in varied_tables(*collections)]
    for name, decision in members.FAMILIES[family].items():
        if isinstance(decision, members.Protected) and decision.part:
            assert any(decision.part in table.split("/") for table in tables), name


# --- refused by name ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", refusals(members.MODULES))
def test_a_sharded_module_is_refused(name: str) -> None:
    kind = sharded_modules()[name]
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    decision = members.MODULES[name]
    assert isinstance(decision, members.Refused)
    with refused(UnsupportedTable, f"place is a {name}", decision.reason, "docs/torchrec.md"):
        adapter.find(nn.ModuleDict({"place": module}))


@pytest.mark.parametrize("name", refusals(members.MODELS))
def test_a_kind_of_model_is_refused(name: str) -> None:
    kind = models()[name]
    for one in (kind, type("Mine", (kind,), {})):
        model = one.__new__(one)
        nn.Module.__init__(model)
        with refused(UnsupportedTable, f"the model is a {name}", "docs/torchrec.md"):
            adapter.find(model)


def test_kernels_are_refused_by_the_class_around_fbgemms_module() -> None:
    """Also those with FBGEMM's protected module, which they use in another way."""
    found = kernels()
    assert set(KERNELS) < set(found)
    for name, kind in found.items():
        model = build(TABLES, "rowwise-adagrad")
        real = kernel_of(model)
        if inspect.isabstract(kind):
            continue
        kernel = kind.__new__(kind)
        nn.Module.__init__(kernel)
        kernel._config, kernel._emb_module, kernel._optim = real._config, real._emb_module, real._optim
        model.module.collection._lookups[0]._emb_modules[0] = kernel
        if name in KERNELS:
            assert adapter.find(model) is not None
        else:
            with refused(UnsupportedTable, f"use {name} with", "user", "item", "'fused'"):
                adapter.find(model)


def kernel_of(model: Any) -> Any:
    """TorchRec's module around FBGEMM's."""
    return model.module.collection._lookups[0]._emb_modules[0]


def in_uvm(model: Any) -> None:
    module = copy.copy(kernel_of(model)._emb_module)
    module._buffers = module._buffers | {"weights_uvm": torch.ones(3)}
    kernel_of(model)._emb_module = module


def by_another_module(kind: type) -> Any:
    def put(model: Any) -> None:
        module = kind.__new__(kind)
        nn.Module.__init__(module)
        kernel_of(model)._emb_module = module

    return put


_SSD = by_another_module(ssd.SSDTableBatchedEmbeddingBags)
_QUANT = by_another_module(inference.IntNBitTableBatchedEmbeddingBagsCodegen)
_OTHER = by_another_module(nn.EmbeddingBag)
STAND_INS = {  # where CPUs lack the kernel: what FBGEMM's module would be
    "dense": by_another_module(training.DenseTableBatchedEmbeddingBagsCodegen),
    "fused_uvm": in_uvm,
    "fused_uvm_caching": in_uvm,
    "fused_triton": _OTHER,
    "unfused_tpu": _OTHER,
    "customized_kernel": _OTHER,
    **dict.fromkeys(("key_value", "ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table"), _SSD),
    **dict.fromkeys(("quant", "quant_uvm", "quant_uvm_caching"), _QUANT),
}


def test_compute_kernels_are_refused() -> None:
    model = build(TABLES, "rowwise-adagrad")
    module = kernel_of(model)._emb_module
    for name in refusals(members.KERNELS):
        STAND_INS[name](model)
        with refused(UnsupportedTable, "user", "item", "'fused'"):
            adapter.find(model)
        kernel_of(model)._emb_module = module
    assert adapter.find(model) is not None


def fbgemm(**options: Any) -> Any:
    """FBGEMM's module with one table on the CPU."""
    spec = (7, 4, EmbeddingLocation.HOST, training.ComputeDevice.CPU)
    defaults = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    return training.SplitTableBatchedEmbeddingBagsCodegen([spec], **defaults | options)


def trains(**options: Any) -> bool:
    try:
        module = fbgemm(**options)
        module(torch.tensor([1, 2, 2]), torch.tensor([0, 2, 3])).sum().backward()
    except (AssertionError, NotImplementedError):
        return False
    return True


@pytest.mark.parametrize("name", here(members.OPTIMIZERS))
def test_what_is_said_of_an_optimizer_is_so(name: str) -> None:
    decision = members.OPTIMIZERS[name]
    assert not isinstance(decision, members.Untried)
    by_fbgemm = decision.by_fbgemm if isinstance(decision, members.Refused) else bool(decision.stand_in)
    assert trains(optimizer=EmbOptimType[name]) is not by_fbgemm


def test_optimizers_are_refused() -> None:
    model = build(TABLES, "rowwise-adagrad")
    for name in refusals(members.OPTIMIZERS):
        kernel_of(model)._emb_module.optimizer = EmbOptimType[name]
        with refused(UnsupportedOptimizer, f"FBGEMM's {name}", "user", "docs/torchrec.md"):
            adapter.find(model)


@pytest.mark.parametrize("name", here(members.WEIGHTS))
def test_what_is_said_of_a_type_is_so(name: str) -> None:
    decision = members.WEIGHTS[name]
    by_fbgemm = isinstance(decision, members.Refused) and decision.by_fbgemm
    assert trains(weights_precision=SparseType[name]) is not by_fbgemm


def test_types_of_weights_are_refused() -> None:
    model = build(TABLES)
    module = kernel_of(model)._emb_module
    for name in refusals(members.WEIGHTS):
        try:
            weights = torch.empty(module.weights_host.numel(), dtype=SparseType[name].as_dtype())
        except (NotImplementedError, RuntimeError):  # of a type without tensors on CPUs
            weights = torch.empty(module.weights_host.numel(), dtype=torch.uint8)
        module.weights_host = nn.Parameter(weights, requires_grad=False)
        with refused(UnsupportedTable, str(weights.dtype), "user", "float32 and float16"):
            adapter.find(model)


def test_the_fused_model_itself_is_protected() -> None:
    assert len(Watched(build(TABLES, "rowwise-adagrad")).names) == len(TABLES)


# --- optimizers around optimizers ----------------------------------------------------------------


class Composed:
    """A model that trains with a composition, and what a guard would find of it."""

    def __init__(self, name: str) -> None:
        self.model = build(TABLES, "rowwise-adagrad")
        parameters = dict(optimizers.in_backward_optimizer_filter(self.model.named_parameters()))
        dense = keyed.KeyedOptimizerWrapper(parameters, lambda given: torch.optim.Adam(given, lr=0.05))
        self.optimizer = compose(name, self.model, dense)
        self.tables, self.leaves = discover.find(self.model, {}, [self.optimizer])
        self.replicated = ReplicatedState(
            self.model, self.leaves, self.tables.parameters, self.tables.left_out
        )

    def train(self, steps: range) -> None:
        for number in steps:
            self.optimizer.zero_grad()
            loss, _ = self.model(batch({"u": [[number % 7, 1], []], "i": [[number % 5], [2, 2]]}))
            (loss * (number + 1)).backward()
            self.optimizer.step()

    def rows(self) -> list[torch.Tensor]:
        found = (self.tables.tensors(index) for index in range(len(self.tables.tables)))
        return [one for tensors in found for one in tensors.values()]

    def bits(self) -> list[bytes]:
        """Rows, dense parameters, learning rates, and the counters of all warm-ups."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        dense = [one for name, one in self.model.named_parameters() if "collection" not in name]
        counts = [leaf.state[p]["warmup"] for leaf in self.leaves for p in _added(leaf)]
        tensors = [*self.rows(), *dense, torch.tensor(rates, dtype=torch.float64), *counts]
        return [one.detach().contiguous().numpy().tobytes() for one in tensors]


def _added(leaf: Any) -> list[Any]:
    """The parameters of a leaf that warm-ups have added: they have no elements."""
    return [one for group in leaf.param_groups for one in group["params"] if not one.numel()]


def test_compositions_have_all_wrappers() -> None:
    words = {
        "clipping": "GradientClippingOptimizer",
        "warmup": "WarmupOptimizer",
        "plain": "OptimizerWrapper",
        "combined": "CombinedOptimizer",
    }
    protected = {name for name, one in members.AROUND.items() if isinstance(one, members.Protected)}
    assert {words[name] for name in WRAPPERS} | {"KeyedOptimizerWrapper"} == protected


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composition_comes_back(name: str, tmp_path: Path) -> None:
    first, second = Composed(name), Composed(name)
    added = [id(one) for leaf in first.leaves for one in _added(leaf)]
    assert len(added) == len(set(added)) == name.count("warmup")
    first.train(range(3))
    with alone(tmp_path, [rank_state.layout(40)]) as memory:
        first.replicated.save(memory.slots, 3)
        second.replicated.load(memory.slots, 3)
    second.tables.set_state(first.tables.state(), {})
    with torch.no_grad():
        for ours, theirs in zip(second.rows(), first.rows(), strict=True):
            ours.copy_(theirs)
    assert second.bits() == first.bits()
    for one in (first, second):
        one.train(range(3, 6))
    assert second.bits() == first.bits()


@pytest.mark.parametrize("outer", ["clipping", "warmup", "plain"])
def test_warm_ups_of_one_name_are_both_found(outer: str) -> None:
    """The later one takes the place of the other in the mapping that they share; both count."""
    one = Composed(f"{outer}(warmup(dense))")
    inner = one.optimizer.optimizers[0][1]
    again = warmup.WarmupOptimizer(inner, [warmup.WarmupStage(max_iters=9)], param_name="__warmup_0")
    added = [id(p) for leaf in adapter.leaves(one.model, [again, inner]) for p in _added(leaf)]
    assert len(added) == len(set(added)) == 2 + (outer == "warmup")


def test_an_optimizer_whose_state_is_computed_is_refused() -> None:
    model = build(TABLES, "rowwise-adagrad")
    dense = list(model.module.over.parameters())
    parts = [
        keyed.KeyedOptimizerWrapper({str(i): one for i, one in enumerate(dense)}, torch.optim.SGD)
        for _ in range(2)
    ]
    with refused(UnsupportedOptimizer, "SemisyncOptimizer computes its state", "docs/torchrec.md"):
        discover.find(model, {}, [SemisyncOptimizer(dense, *parts)])


def assigned_globals() -> set[str]:
    """Global variables that functions of torchrec.distributed assign, by module."""
    load_all()
    found: set[str] = set()
    for name, module in tuple(sys.modules.items()):
        parts = name.split(".")
        if parts[:2] == ["torchrec", "distributed"] and not any(part in NOT_FOR_TRAINING for part in parts):
            for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
                if isinstance(node, ast.FunctionDef):
                    of_one = [one for one in ast.walk(node) if isinstance(one, ast.Global)]
                    found |= {f"{name}.{variable}" for one in of_one for variable in one.names}
    return found


def test_what_torchrec_keeps_of_a_session_is_set_back_in_a_process_that_stays() -> None:
    """A new global variable may keep a group, or that ranks have agreed, once in a process."""
    assert assigned_globals() == set(members.GLOBALS)
    reset = [name.rpartition(".")[::2] for name, kept in members.GLOBALS.items() if not kept]
    groups = [(module, variable) for module, variable in reset if variable.endswith(("_PG", "_PG_2D"))]
    assert {*reset} - {*groups} == {*adapter.AGREED}
    try:
        for module, variable in groups:
            setattr(sys.modules[module], variable, torch.distributed.group.WORLD)
        for module, variable in adapter.AGREED:
            setattr(sys.modules[module], variable, True)
        adapter.forget_session()
        assert not any(getattr(sys.modules[module], variable) for module, variable in reset)
    finally:
        adapter.forget_session()
