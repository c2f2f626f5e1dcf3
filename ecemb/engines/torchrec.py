"""Tables of TorchRec: DistributedModelParallel shards them, and FBGEMM looks them up and updates them.

Owns the search of a model for FBGEMM's batches of tables, and the hooks: the rows of a lookup are reported in
backward, when the gradient of the lookup is ready, just before FBGEMM changes them. So they belong to the
step that changes them, however early a pipeline looked them up.

torchrec is imported by the code that built the model; without such a model nothing here needs it.

In TorchRec's 2D parallelism a DMPCollection holds each table in several groups of ranks, and averages them.
`DMPCollection.sync()` writes all rows of the tables, with their optimizers' states, on each rank. The script
calls it directly, so that no hook of a module sees the call: the instance's method is wrapped. Until the next
average the groups differ, so each rank's rows count as its own in a checkpoint.

Must not know: journals, parity, other ranks.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..coding.rows import Table, base
from ..errors import UndeclaredWrite, UnsupportedOptimizer, UnsupportedTable, UsageError
from .collisions import Remaps
from .contract import Engine, Hooks, Ids, Places, Tied
from .fbgemm import REPLACED, Batch, check_inside, local
from .internals import Before, held, need, own
from .members import AROUND, AVERAGING, COLLECTIONS, EVICTING, KERNELS, MAPS, check_model, check_module

Optimizer = torch.optim.Optimizer

AGREED = (("torchrec.distributed.collective_utils", "_INITIALIZED"),)
"""Modules and their variables that say that all ranks have agreed on something."""


def find(model: nn.Module) -> FusedTables | None:
    """The tables of all of a model's modules that TorchRec has sharded; None if there are none.

    Raises:
        UnsupportedTable: ecemb can't protect a module, a table or this version of TorchRec.
        UnsupportedOptimizer: ecemb can't protect a table with its optimizer.
    """
    if "torchrec" not in sys.modules:
        return None
    sharded = need("torchrec.distributed.types", "ShardedModule")
    parallel = need("torchrec.distributed.model_parallel", "DistributedModelParallel")
    models = {path: module for path, module in model.named_modules() if isinstance(module, parallel)}
    for path, module in models.items():
        check_model(path, module)
    found = {path: module for path, module in _walk(model) if isinstance(module, sharded)}
    collections = [
        Collection(path, module)
        for path, module in found.items()
        if type(module).__name__ not in (*AROUND, *MAPS)
    ]
    evicting = [module for module in found.values() if type(module).__name__ in EVICTING]
    if not collections:
        return None
    averaging = [
        TableReplicas(path, module)
        for path, module in models.items()
        if any(kind.__name__ in AVERAGING for kind in type(module).__mro__)
    ]
    return FusedTables(collections, evicting, averaging)


def forget_session() -> None:
    """Ends what TorchRec keeps of process groups that have ended, in a process that goes on with new ones.

    It makes groups, and has ranks agree, once in a process, and says so in global variables: a process that
    stayed would not do it again with the others. A backward that was cut off leaves requests of lookups that
    refer to themselves by the graph of autograd, where Python's garbage collector does not look: the tables
    would stay with them.
    """
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] == "torchrec":
            for variable, value in tuple(vars(module).items()):
                if isinstance(value, dist.ProcessGroup):
                    setattr(module, variable, None)
    for name, variable in AGREED:
        if name in sys.modules:
            setattr(sys.modules[name], variable, False)
    if (operations := sys.modules.get("torchrec.distributed.comm_ops")) is not None:
        for thing in gc.get_objects():
            if issubclass(type(thing), operations.Request):
                thing.dummy_tensor = None


def find_maps(model: nn.Module) -> Remaps | None:
    """The maps from raw ids to rows of all managed collisions of a model; None if there are none.

    Raises:
        UnsupportedTable: see `collisions.Remaps`.
    """
    if "torchrec" not in sys.modules:
        return None
    found = {path: module for path, module in _walk(model) if type(module).__name__ in MAPS}
    return Remaps(found) if found else None


def leaves(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """The optimizers that hold state that is the same on all ranks, the parts of combined ones by themselves.

    TorchRec's combined and keyed optimizers are taken apart; fused ones, whose state is the tables', are left
    out; state that a wrapper adds (a warm-up's counter) and optimizers that run in backward are added.

    Raises:
        UnsupportedOptimizer: an optimizer computes its state from that of others, so it can't be restored.
    """
    found = {id(optimizer): optimizer for optimizer in optimizers}
    fused: Any = ()
    if "torchrec" in sys.modules:
        owned: set[int] = set()
        found = {id(leaf): leaf for optimizer in optimizers for leaf in _leaves(optimizer, owned)}
        fused = need("torchrec.optim.fused", "FusedOptimizer")
    for parameter in model.parameters():
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            if not isinstance(optimizer, fused):
                found[id(optimizer)] = optimizer
    return list(found.values())


def fused_optimizers(model: nn.Module) -> list[Any]:
    """A model's fused optimizers, one per DistributedModelParallel; state_dict() reads the tables' state."""
    if "torchrec" not in sys.modules:
        return []
    parallel = need("torchrec.distributed.model_parallel", "DistributedModelParallel")
    return [own(module, "fused_optimizer") for module in model.modules() if isinstance(module, parallel)]


def _leaves(optimizer: Any, owned: set[int]) -> Iterator[Any]:
    """The parts of one optimizer that hold state, the innermost first.

    Wrappers share the mapping of parameters with the optimizer that they wrap, and so with each other: a
    parameter that one of them adds is in all of these. It belongs to the innermost one.

    Args:
        optimizer: of any class.
        owned: ids of the parameters that have an owner; extended.
    """
    keyed = "torchrec.optim.keyed"
    if isinstance(optimizer, need(keyed, "CombinedOptimizer")):
        for _, part in optimizer.optimizers:
            yield from _leaves(part, owned)
    elif isinstance(optimizer, need(keyed, "KeyedOptimizerWrapper")):
        yield from _leaves(own(optimizer, "_optimizer"), owned)
    elif isinstance(optimizer, need(keyed, "OptimizerWrapper")):
        yield from _leaves(own(optimizer, "_optimizer"), owned)
        owned.update(id(one) for group in optimizer.param_groups for one in group["params"])
        kept = [one for one in vars(optimizer).values() if isinstance(one, nn.Parameter)]
        shown = [*optimizer.params.values(), *kept]
        if added := {id(one): one for one in shown if id(one) not in owned}:
            owned.update(added)
            yield _Added([{"params": list(added.values())}], optimizer)
    elif not isinstance(optimizer, need("torchrec.optim.fused", "FusedOptimizer")):
        if isinstance(optimizer, need(keyed, "KeyedOptimizer")) and optimizer.state is not optimizer.state:
            kind = type(optimizer).__name__
            raise UnsupportedOptimizer(
                f"{kind} computes its state from that of the optimizers inside it, and hands out copies, so "
                f"that ecemb can't restore it: train with an optimizer whose state is its own, or with "
                f"KeyedOptimizerWrapper, CombinedOptimizer or OptimizerWrapper around it (docs/torchrec.md)"
            )
        yield optimizer


class _Added:
    """The state that a wrapper adds to that of its optimizer.

    Args:
        param_groups: one group, of the parameters that the wrapper adds.
        wrapper: the wrapper; its state is read at each access, as loading replaces it.
    """

    def __init__(self, param_groups: list[dict[str, Any]], wrapper: Any) -> None:
        self.param_groups = param_groups
        self._state: Callable[[], Any] = lambda: wrapper.state

    @property
    def state(self) -> Any:
        """The wrapper's present state, which includes that of its optimizer."""
        return self._state()


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, with its path in the model's state_dict; without the modules in a collection."""
    unwrapped = need("torchrec.distributed.model_parallel", "get_unwrapped_module")
    sharded = need("torchrec.distributed.types", "ShardedModule")
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        module = unwrapped(module)
        if id(module) in seen:
            return
        seen.add(id(module))
        yield path, module
        if not isinstance(module, sharded) or type(module).__name__ in AROUND:
            for name, child in module.named_children():
                yield from walk(child, f"{path}.{name}" if path else name)

    return walk(model, "")


class Collection:
    """One sharded module with tables, of those in `members.COLLECTIONS`.

    Args:
        path: of the module in the model.
        module: the sharded module.

    Raises:
        UnsupportedTable, UnsupportedOptimizer: see `find`.
    """

    def __init__(self, path: str, module: Any) -> None:
        self.path: str = path
        self.module: Any = module
        check_module(path, module)
        shown = COLLECTIONS[type(module).__name__]
        self._shown: Any = own(module, shown)
        plan: Any = own(module, "module_sharding_plan")
        prefix = f"{path}.{shown}" if path else shown
        self._replicated = {name for name, one in plan.items() if one.sharding_type == "data_parallel"}
        if self._replicated and type(module).__name__ == "ShardedFusedEmbeddingBagCollection":
            raise UnsupportedOptimizer(
                f"data-parallel tables {sorted(self._replicated)} of {path or 'the model'}: their optimizer "
                f"is inside of DistributedDataParallel, where its state can't be found, and would be lost. "
                f"Use an EmbeddingBagCollection for them"
            )
        self._names = [name for name in plan if name not in self._replicated]
        self._places = Places()
        kernels = list(self._kernels())
        self._check_kernels(kernels)
        self.batches: list[Batch] = [Batch(prefix, kernel, number) for number, kernel in enumerate(kernels)]

    def _kernels(self) -> Iterator[Any]:
        """TorchRec's modules around FBGEMM's, except those of data-parallel tables."""
        for lookup in own(self.module, "_lookups"):
            if not isinstance(lookup, nn.parallel.DistributedDataParallel):
                yield from own(lookup, "_emb_modules")

    def _check_kernels(self, kernels: Sequence[Any]) -> None:
        fused = need(
            "fbgemm_gpu.split_table_batched_embeddings_ops_training", "SplitTableBatchedEmbeddingBagsCodegen"
        )
        for kernel in kernels:
            known = type(kernel).__name__ in KERNELS
            fbgemm = own(kernel, "emb_module") if known else held(kernel, "emb_module")
            if type(fbgemm) is not fused or not known:
                names = [config.name for config in own(own(kernel, "_config"), "embedding_tables")]
                raise UnsupportedTable(
                    f"tables {names} of {self.path or 'the model'} use {type(kernel).__name__} with "
                    f"{type(fbgemm).__name__}: ecemb protects the compute kernel 'fused', whose "
                    f"optimizer is given by apply_optimizer_in_backward() or fused_params="
                )

    @property
    def averaged(self) -> list[nn.parallel.DistributedDataParallel]:
        """The wrappers that average the gradients of data-parallel tables."""
        lookups = own(self.module, "_lookups")
        return [lookup for lookup in lookups if isinstance(lookup, nn.parallel.DistributedDataParallel)]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded tables' parameters in the model."""
        shown = self._shown._modules  # read in each step: `__getattr__` takes longer
        return [shown[name]._parameters["weight"] for name in self._names]

    def check(self) -> None:
        """Raises UndeclaredWrite if the module was sharded again."""
        lookups = own(self.module, "_lookups")
        kernels = [id(one) for lookup in lookups for one in held(lookup, "_emb_modules", ())]
        if kernels != [id(batch.kernel) for batch in self.batches]:
            raise UndeclaredWrite(f"{self.path or 'the model'} was sharded again: {REPLACED}")

    def check_shown(self) -> None:
        """Raises UndeclaredWrite if the model's parameters are not in the memory of those in training."""
        self._places.check_addresses(self.parameters)

    def check_views(self) -> None:
        """Raises UnsupportedTable unless the tensors of state_dict() are in the arena."""
        spans = [span for batch in self.batches for span in batch.spans]
        shown: list[torch.Tensor] = []
        for key, value in self.module.state_dict().items():
            if key.split(".")[1] not in self._replicated:
                shown += local(value)
        check_inside(self.path or "the model", [*shown, *self.parameters], spans)
        self._places = Places()
        for name, parameter in zip(self._names, self.parameters, strict=True):
            self._places.keep(f"parameter {name}.weight of {self.path or 'the model'}", parameter)


class FusedTables(Engine[Batch]):
    """The engine of TorchRec's tables.

    Args:
        collections: the sharded modules.
        evicting: modules around some of them, which initialise evicted rows again.
        replicas: the tables that are in several groups of ranks.
    """

    name = "torchrec"

    def __init__(
        self,
        collections: Sequence[Collection],
        evicting: Sequence[Any] = (),
        replicas: Sequence[TableReplicas] = (),
    ) -> None:
        self._collections = list(collections)
        self._evicting = list(evicting)
        self._replicas = list(replicas)
        self._batches = [batch for one in collections for batch in one.batches]
        parameters = [parameter for one in collections for parameter in one.parameters]
        super().__init__(self._batches, [batch.tables for batch in self._batches], parameters)
        for batch in self._batches:
            for table in batch.tables:
                table.in_groups = any(one.has(batch) for one in self._replicas)
        self.left_out = [one.module for one in collections]
        self.averaged = [module for one in collections for module in one.averaged]
        self._turn = 0  # number of begins and ends of steps: odd in a step, even between steps

    def place(self, stored: Sequence[Table], *, fresh: bool) -> None:
        """See `Engine.place`."""
        super().place(stored, fresh=fresh)
        for collection in self._collections:
            collection.check_views()
        for replicas in self._replicas:
            replicas.check_views([span for batch in self._batches for span in batch.spans])

    def watch(self, hooks: Hooks) -> None:
        """Registers with lookups; from here on undeclared changes raise."""
        super().watch(hooks)
        for batch in self._batches:
            after = Tied(functools.partial(self._after_lookup, batch))
            self._handles.append(batch.module.register_forward_hook(after, with_kwargs=True))
            if hooks.ensure is not None:
                waits = Tied(functools.partial(batch.wait_for_rows, hooks))
                self._handles.append(batch.module.register_forward_pre_hook(waits, with_kwargs=True))
            if batch.rule.counts:
                counted = Tied(functools.partial(self._before_lookup, batch))
                self._handles.append(batch.module.register_forward_pre_hook(counted))
        for collection in self._collections:
            before = Tied(functools.partial(self._before_load, collection))
            self._handles.append(collection.module.register_load_state_dict_pre_hook(before))
            for batch in collection.batches if hooks.ensure is not None else ():
                whole = Tied(functools.partial(batch.wait_for_all, hooks))
                self._handles.append(collection.module.register_state_dict_pre_hook(whole))
        for module in self._evicting:
            before_eviction = functools.partial(self._before_eviction, own(module, "_embedding_module"))
            self._handles.append(Before(module, "_evict", before_eviction))
        for replicas in self._replicas:
            before_sync = functools.partial(self._before_sync, replicas)
            self._handles.append(Before(replicas.model, "sync", before_sync))

    def check(self) -> None:
        """See `Engine.check`. A step's begin doesn't check the model's parameters: no lookup reads them."""
        if self._hooks.is_open():
            self._turn += 1
        for collection in self._collections:
            collection.check()
        super().check()
        for collection in self._collections if self._turn % 2 == 0 else ():
            collection.check_shown()

    def mark_clean(self) -> None:
        """Accepts the present state of all tables as declared (after an undo)."""
        super().mark_clean()
        for batch in self._batches:
            batch.features.clear_beyond()

    def state(self) -> dict[str, Any]:
        """The state that differs by rank and is not per row: learning rates, options, counters, by batch."""
        return {batch.names: batch.state() for batch in self._batches}

    def set_state(self, state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        """See `Engine.set_state`; in `state`, the tables of a batch may be in other batches."""
        last_first = [*state.items()][::-1]
        kept = {base(name): one for names, one in last_first for name in names.split("\n")}
        for batch in self._batches:
            batch.set_state(kept, renamed)

    def _capture(self, index: int, ids: Ids) -> None:
        batch = self._unit_of[index]
        for table, rows in batch.named(batch.numbers(index - batch.base, ids)):
            super()._capture(batch.base + table, rows)

    def _check(self, unit: Batch) -> None:
        super()._check(unit)
        if self._hooks.protects and unit.features.has_beyond():
            self._hooks.on_undeclared()
            raise UndeclaredWrite(
                f"an id of this step is beyond a table of {unit.what} of which this rank has no rows: "
                f"FBGEMM has trained what lies behind that table. Look up ids below num_embeddings. "
                f"The step isn't in the arena: let the process end, and a restart takes the tables from there"
            )

    def _before_lookup(self, batch: Batch, *_: Any) -> None:
        """Captures all rows of a batch's tables, if the next lookup overwrites them."""
        if not self._hooks.is_open():
            raise UndeclaredWrite(
                f"a lookup of {batch.what} outside of a step: FBGEMM counts lookups, and "
                f"{batch.rule.why_in_steps}. Call the model inside `with guard.step():`, also to evaluate "
                f"it. No row was written"
            )
        if batch.rule.overwrites_next(batch.module):
            self._touch_all(batch)

    def _after_lookup(self, batch: Batch, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Registers the capture of a lookup's rows, in training, before backward changes them."""
        if not output.requires_grad:
            return
        output.register_hook(functools.partial(self._before_update, batch, (args, kwargs), self._turn))

    def _before_update(self, batch: Batch, call: tuple[Any, Any], turn: int, _: torch.Tensor) -> None:
        if not self._hooks.is_open():
            raise UndeclaredWrite(
                f"backward() would update {batch.what} outside of a step: call it inside "
                f"`with guard.step():`. No row was written"
            )
        if turn < self._turn - 1:
            raise UsageError(
                f"backward() would update {batch.what} by a lookup of an earlier step. A failure loses the "
                f"values that it read, and a repeated lookup would read newer rows: so semi-synchronous "
                f"pipelines can't be protected. Look up and call backward() in one step. No row was written"
            )
        if batch.is_off_arena:  # the rows stay on the device
            self._hooks.mark(batch.base, batch.marked(*call))
            return
        for table, ids in batch.looked_up(*call):
            self._hooks.capture(batch.base + table, ids)

    def _before_eviction(self, module: Any, evictions_per_table: Mapping[str, torch.Tensor | None]) -> None:
        """Captures the evicted rows, which TorchRec is about to initialise again."""
        collection = next(one for one in self._collections if one.module is module)
        for batch in collection.batches:
            for number, config in enumerate(batch.configs):
                if (rows := evictions_per_table[config.name]) is not None:
                    self.touch(batch.base + number, rows.cpu().numpy())  # written even if empty

    def _before_load(self, collection: Collection, *_: Any) -> None:
        if not self._hooks.is_open():
            raise UndeclaredWrite(
                f"load_state_dict() would overwrite protected tables of {collection.path or 'the model'} "
                f"outside of a step: load before ecemb.protect(), or inside `with guard.step():`"
            )
        for batch in collection.batches:
            self._touch_all(batch)

    def _before_sync(self, replicas: TableReplicas, *_: Any, **__: Any) -> None:
        """Captures all rows of the tables that are about to be averaged over groups of ranks."""
        if not self._hooks.is_open():
            raise UndeclaredWrite(
                f"sync() of {replicas.path} would average protected tables outside of a step: call it inside "
                f"`with guard.step():`, after the optimizers. No row was written"
            )
        for batch in self._batches:
            if replicas.has(batch):
                self._touch_all(batch)

    def _touch_all(self, batch: Batch) -> None:
        for number in range(len(batch.tables)):
            self.touch_all(batch.base + number)


class TableReplicas:
    """The tables of one DMPCollection.

    Args:
        path: of the DMPCollection in the model; "" if it is the model.
        model: the DMPCollection.

    Raises:
        UnsupportedTable: its strategy is FULLY_SHARDED, or it has a managed collision.
    """

    def __init__(self, path: str, model: Any) -> None:
        self.path: str = path or "the model"
        self.model: Any = model
        self._contexts: list[Any] = own(model, "_ctxs")
        for context in self._contexts:
            if (strategy := own(context, "sharding_strategy").name) == "FULLY_SHARDED":
                raise UnsupportedTable(
                    f"{self.path} is a DMPCollection with the strategy {strategy}: its tables are only there "
                    f"during a lookup, and are scattered again beside the step. Use ShardingStrategy.DEFAULT "
                    f"(docs/torchrec.md)"
                )
            if own(context, "hash_zch_modules"):
                raise UnsupportedTable(
                    f"{self.path} is a DMPCollection with a managed collision: its sync() merges the maps of "
                    f"several ranks, which is untried. Use DistributedModelParallel (docs/torchrec.md)"
                )
        self._modules = {
            id(module) for context in self._contexts for module, _ in own(context, "modules_to_sync")
        }

    def has(self, batch: Batch) -> bool:
        """Whether `sync()` averages the tables of a batch."""
        return id(batch.module) in self._modules

    def check_views(self, spans: Sequence[torch.Tensor]) -> None:
        """Raises UnsupportedTable unless the tensors that `sync()` averages are within `spans`."""
        for context in self._contexts:
            for by_dtype in (own(context, "weights_by_dtype"), own(context, "optimizer_tensors_by_dtype")):
                check_inside(self.path, [one for tensors in by_dtype.values() for one in tensors], spans)
