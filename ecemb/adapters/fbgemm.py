"""FBGEMM's tables: batches of tables that share their buffers, and their move into the arena.

FBGEMM keeps the tables of a *batch* (a SplitTableBatchedEmbeddingBagsCodegen module) in one buffer of
weights and one of optimizer state, and changes rows inside backward, without a hook. `Batch` moves both
buffers into the arena, and reports the rows of a lookup.

Nothing here imports fbgemm_gpu: the code that built the model did. Private attributes of FBGEMM are checked
when a batch is made.

Must not know: TorchRec's modules, journals, parity, other ranks.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..coding.rows import Column, Table, TableLayout, base, joined, part_of
from ..errors import UndeclaredWrite, UnsupportedTable
from ..state.optimizers import drop_options, options
from .engine import Hooks, Ids
from .fbgemm_lookups import Features
from .host_mirror import is_apart
from .residence import Move, Places
from .table_optimizers import Rule, rule_of

logger: logging.Logger = logging.getLogger("ecemb")

TESTED = "1.8.0"
INSTALL = (
    f"pip install -e '.[torchrec-cpu]' && pip install --no-deps torchrec=={TESTED}, or with CUDA: "
    f"pip install -e '.[torchrec]'"
)
REPLACED = (
    "the tensors in training are not the protected ones. Shard, load with assign=True, and move the model "
    "before ecemb.protect()"
)
_DTYPES = (torch.float32, torch.float16)
_OPTIONS = ("eps", "beta1", "beta2", "weight_decay")  # that update_hyper_parameters() may change


def own(thing: object, name: str) -> Any:
    """Reads an attribute that TorchRec or FBGEMM doesn't promise; the error names the versions."""
    try:
        return getattr(thing, name)
    except AttributeError:
        versions = ", ".join(f"{package} {version(package)}" for package in ("torchrec", "fbgemm-gpu"))
        raise UnsupportedTable(
            f"{type(thing).__name__} has no {name!r} in this version ({versions}), and ecemb needs it to "
            f"protect the tables: ecemb is tested with torchrec {TESTED} and the fbgemm-gpu of the same "
            f"version; install these: {INSTALL}"
        ) from None


def held(module: nn.Module, name: str, default: Any = None) -> Any:
    """`getattr` of a module's tensor or part: each step asks, and `nn.Module.__getattr__` takes longer."""
    attributes = vars(module)
    if name in attributes:
        return attributes[name]
    for kind in ("_parameters", "_buffers", "_modules"):
        if name in (found := attributes[kind]):
            return found[name]
    return getattr(module, name, default)


def need(module: str, name: str) -> Any:
    """Imports a name from TorchRec or FBGEMM; the error says what to install if it is missing."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedTable(
            f"torchrec {version('torchrec')} with fbgemm-gpu {version('fbgemm-gpu')} doesn't give {name} of "
            f"{module} ({error}): ecemb is tested with version {TESTED} of both; install it: {INSTALL}"
        ) from error


def version(package: str) -> str:
    """The version of a package, without the name of its build."""
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@dataclasses.dataclass(frozen=True)
class FusedTable:
    """One shard of a TorchRec table.

    Attributes:
        name: path of the table in the model, with the columns if the shard hasn't all columns.
        layout: of the shard.
        first_row: the whole table's row at which the shard begins.
        rows: rows of the whole table.
        is_apart: whether it stays in a GPU's memory.
        in_groups: whether several groups of ranks have the table, each with rows of its own.
    """

    name: str
    layout: TableLayout
    first_row: int
    rows: int
    is_apart: bool
    in_groups: bool = False

    @property
    def announces_lookups(self) -> bool:
        """See `EngineTable.announces_lookups`."""
        return not self.is_apart

    @property
    def sees_all_changes(self) -> bool:
        """See `EngineTable.sees_all_changes`: lookups report changes."""
        return True

    def whole(self, world_size: int) -> tuple[int, int] | None:
        """See `EngineTable.whole`. Each group of ranks has other rows until the next average."""
        return None if self.in_groups else (self.first_row, self.rows)

    def alike(self) -> tuple[list[int], dict[str, Any]]:
        """See `EngineTable.alike`. The plan says which ranks have a shard."""
        columns = [[column.name, column.dtype, column.row_bytes] for column in self.layout.columns]
        return [], {"num_embeddings": self.rows, "name, type and bytes of a row's parts": columns}


class Batch:
    """The tables of one FBGEMM module, which share their buffers.

    Args:
        path: of the tables in the model.
        kernel: TorchRec's module around FBGEMM's.
        number: among the batches of this path.

    Raises:
        UnsupportedTable, UnsupportedOptimizer: see `find`.
    """

    def __init__(self, path: str, kernel: Any, number: int) -> None:
        self.kernel = kernel
        self.module: Any = kernel.emb_module
        self.configs: list[Any] = own(own(kernel, "_config"), "embedding_tables")
        names = ", ".join(repr(config.name) for config in self.configs)
        self.what: str = f"{path} ({names})"
        self.rule: Rule = rule_of(self.what, own(self.module, "optimizer").name, self.module)
        kinds = ("weights", *self.rule.states)
        where = "dev" if own(self.module, "weights_dev").numel() else "host"
        self._check_buffers(kinds, where)
        self.buffers: list[str] = [f"{kind}_{where}" for kind in kinds]
        self._is_apart = is_apart(getattr(self.module, self.buffers[0]))
        self.tables: list[FusedTable] = [
            self._table(path, number, config, i) for i, config in enumerate(self.configs)
        ]
        self.names: str = "\n".join(dict.fromkeys(base(table.name) for table in self.tables))
        self._check_empty(where)
        self.base = 0
        self.spans: list[
            torch.Tensor
        ] = []  # the arena's tensors under the buffers, or the buffers themselves
        self._places = Places()
        self._versions: list[int] = []
        rows = np.array([table.layout.rows for table in self.tables], np.int64)
        self._first = np.cumsum([0, *rows])
        tables = np.array(list(own(self.module, "feature_table_map")), np.int64)
        self._features = Features(self.what, rows[tables], self._first[tables])
        if self.rule.mode:
            own(self.module, self.rule.mode)
        self._has_max_counter: bool = "prev_iter" in self.rule.states
        self._joined = joined([table.layout for table in self.tables])[0].rows == self._first[-1]

    def _check_empty(self, where: str) -> None:
        """Refuses a table without rows before one of another width: on CPUs, FBGEMM takes them for one."""
        behind: Any = None
        for config in reversed(self.configs if where == "host" else []):
            if config.local_rows:
                behind = config
            elif behind is not None and behind.local_cols != config.local_cols:
                raise UnsupportedTable(
                    f"table {config.name!r} of {config.local_cols} columns has no rows on this rank, and is "
                    f"in one batch with {behind.name!r} of {behind.local_cols}: on CPUs FBGEMM trains wrong "
                    f"rows of {behind.name!r} then. Shard {config.name!r} table_wise, or give both the same "
                    f"embedding_dim"
                )

    def _check_buffers(self, kinds: Sequence[str], where: str) -> None:
        for kind in kinds:
            for other in {"dev", "uvm", "host"} - {where}:
                if own(self.module, f"{kind}_{other}").numel():
                    raise UnsupportedTable(
                        f"{self.what} has {kind} in {other!r} memory beside {where!r}: with UVM and caches, "
                        f"a row's last value may be in either; shard these tables with the compute kernel "
                        f"'fused' (EmbeddingComputeKernel.FUSED), on one device"
                    )
            buffer = own(self.module, f"{kind}_{where}")
            own(self.module, f"{kind}_physical_offsets")
            if buffer.device.type not in ("cpu", "cuda") or buffer.dtype not in _DTYPES:
                raise UnsupportedTable(
                    f"{self.what} has {kind} of {buffer.dtype} on {buffer.device}: ecemb protects tables of "
                    f"float32 and float16 on CPUs and CUDA devices"
                )
        for name in ("learning_rate_tensor", "iter", "iter_cpu", "optimizer_args"):
            own(self.module, name)

    def _table(self, path: str, number: int, config: Any, index: int) -> FusedTable:
        rows, width = config.local_rows, config.local_cols
        metadata = config.local_metadata
        first_row, first_column = metadata.shard_offsets if metadata is not None else (0, 0)
        name = f"{path}.{config.name}"
        if width != config.embedding_dim:
            name = part_of(name, first_column, first_column + width)
        columns: list[Column] = []
        for buffer in self.buffers:
            kind = buffer.rpartition("_")[0]
            by_row = kind in self.rule.by_row
            tensor = getattr(self.module, buffer)
            row_bytes = (1 if by_row else width) * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            columns.append(Column("weight" if kind == "weights" else kind, dtype, row_bytes))
            start = sum(one.local_rows * (1 if by_row else one.local_cols) for one in self.configs[:index])
            offsets = getattr(self.module, f"{kind}_physical_offsets")
            if int(offsets[index]) != start:
                raise UnsupportedTable(
                    f"table {name!r} begins at value {int(offsets[index])} of {buffer}, and not at {start}, "
                    f"where the tables before it end: ecemb is tested with torchrec {TESTED}; install it"
                )
        layout = TableLayout(name, rows, tuple(columns), group=f"{path}#{number}")
        return FusedTable(name, layout, first_row, config.num_embeddings, self._is_apart)

    def tensors(self, table: int) -> dict[str, torch.Tensor]:
        """Weight and per-row state of a table of this batch, as FBGEMM shows them."""
        shown = [
            self.module.split_embedding_weights(),
            *zip(*self.module.split_optimizer_states(), strict=True),
        ]
        names = (column.name for column in self.tables[table].layout.columns)
        return {name: tensors[table].detach() for name, tensors in zip(names, shown, strict=True)}

    def place(self, stored: Sequence[Table], *, fresh: bool) -> list[Move]:
        """Moves the buffers into the arena, unless they stay apart.

        Returns:
            The storages that the buffers left, and the tensors in their places.
        """
        self._places = Places()
        self.spans = []
        if self._is_apart:
            for name in self.buffers:
                self.spans.append(getattr(self.module, name).detach())
                self._places.keep(f"{name} of {self.what}", getattr(self.module, name))
            return []
        moves: list[Move] = []
        for i, name in enumerate(self.buffers):
            buffer: torch.Tensor = getattr(self.module, name)
            columns = [table.columns[i] for table in stored]
            size = sum(column.nbytes for column in columns)
            span = torch.from_numpy(np.lib.stride_tricks.as_strided(columns[0].reshape(-1), (size,), (1,)))
            span = span.view(buffer.dtype)
            self.spans.append(span)
            if buffer.numel():
                if fresh:
                    with torch.no_grad():
                        span.copy_(buffer)
                moves.append(Move(buffer.untyped_storage(), span))
                buffer.data = span
            self._places.keep(f"{name} of {self.what}", buffer, columns[0])
        return moves

    def looked_up(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[int, Ids]]:
        """The rows that a call of FBGEMM's module with these arguments reads, as `named` gives them."""
        return self.touched(*_arguments(args, kwargs))

    @property
    def marks(self) -> bool:
        """Whether `marked` finds the rows of a lookup, and the host needn't see them."""
        return self._is_apart

    def marked(self, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """The rows of the batch that a call of FBGEMM's module reads; see `Features.there`."""
        return self._features.there(*_arguments(args, kwargs))

    def wait_for_rows(self, hooks: Hooks, module: Any, args: Any, kwargs: Any) -> None:
        """Waits for the rows of a lookup, before a call of FBGEMM's module, in training or not."""
        if hooks.ensure is not None:
            for table, rows in self.looked_up(args, kwargs):
                hooks.wait_for(self.base + table, rows)

    def wait_for_all(self, hooks: Hooks, *_: Any) -> None:
        """Waits for all rows."""
        for table in range(len(self.tables)):
            hooks.wait_for_table(self.base + table)

    def touched(self, indices: torch.Tensor, offsets: torch.Tensor, sizes: Any) -> Iterator[tuple[int, Ids]]:
        """The rows that a lookup reads, as `named` gives them.

        Args:
            indices: integers [L], an argument of the lookup, before or after FBGEMM's bounds check.
            offsets: integers [bags + 1]; features one after another, each with its bags.
            sizes: bags by feature and rank, or None if all features have equally many.
        """
        if (numbers := self._features.rows(indices, offsets, sizes)) is not None:
            yield from self.named(numbers)

    @property
    def overwrites_next(self) -> bool:
        """Whether the next lookup writes all rows."""
        return self.rule.overwrites_next(self.module)

    def named(self, numbers: Ids) -> Iterator[tuple[int, Ids]]:
        """Rows in the form for capture, by table of this batch (see `rows.joined`).

        Args:
            numbers: int64 [m], in any order: rows of the batch, its tables' rows one after another.
        """
        if self._joined:
            yield 0, numbers
            return
        numbers = np.sort(numbers)
        edges = np.searchsorted(numbers, self._first)
        for table, (a, b) in enumerate(itertools.pairwise(edges)):
            if a < b:
                yield table, numbers[a:b] - self._first[table]

    def numbers(self, table: int, ids: Ids) -> Ids:
        """Rows of one table as rows of the batch."""
        return ids + self._first[table]

    def mark_clean(self) -> None:
        """Accepts the buffers' present versions as declared. FBGEMM's own updates don't change versions."""
        self._versions = [getattr(self.module, name)._version for name in self.buffers]

    def clear_beyond(self) -> None:
        """Forgets the lookups that `is_beyond` tells of."""
        self._features.clear_beyond()

    def is_beyond(self) -> bool:
        """Whether a lookup in training of this step had ids of a table without rows on this rank."""
        return self._features.has_beyond()

    def is_written(self) -> bool:
        """Whether a buffer, or a view of it, was written in place through torch since `mark_clean`."""
        return [held(self.module, name)._version for name in self.buffers] != self._versions

    def check_storage(self) -> None:
        """Raises UndeclaredWrite if the trained tensors are not the protected ones any more."""
        if held(self.kernel, "emb_module") is not self.module:
            raise UndeclaredWrite(f"the module that looks up {self.what} was replaced: {REPLACED}")
        self._places.check([held(self.module, name) for name in self.buffers])

    def check_views(self) -> None:
        """Raises UnsupportedTable unless all of TorchRec's views of the tables are in the arena."""
        optimizer: Any = self.kernel.fused_optimizer
        shown: list[torch.Tensor] = []
        count = self.module.iter.data_ptr()  # which some optimizers show beside the state of rows
        for state in optimizer.state.values():
            for value in state.values():
                shown += [one for one in local(value) if one.data_ptr() != count]
        for parameter in optimizer.params.values():
            shown += local(parameter)
        shown += self.module.split_embedding_weights()
        shown += [state for states in self.module.split_optimizer_states() for state in states]
        check_inside(self.what, shown, self.spans)

    def state(self) -> dict[str, Any]:
        """Learning rate, options and counters, which are not per row."""
        arguments = self.module.optimizer_args
        counter = {"max_counter": float(self.module.max_counter)} if self._has_max_counter else {}
        return counter | {
            "lr": held(self.module, "learning_rate_tensor").item(),
            "iter": held(self.module, "iter").item(),
            "iter_cpu": held(self.module, "iter_cpu").item(),
            "options": {name: getattr(arguments, name) for name in _OPTIONS if hasattr(arguments, name)},
            "groups": [options(group) for group in self.kernel.fused_optimizer.param_groups],
        }

    def set_state(self, kept: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        """Restores them.

        Args:
            kept: base name of a table -> state of the batch that it was in. Without one, the script's stays.
            renamed: see `Engine.set_state`.
        """
        names = self.names.split("\n")
        found = {one: state for one in names if (state := kept.get(one, kept.get(renamed.get(one, ""))))}
        if not found:
            return
        (first, state), *others = found.items()
        if differing := [name for name, other in others if other != state]:
            logger.warning(
                "table %s had another learning rate, other options or another number of steps than %s, whose "
                "batch it is in now: those of %s count for both",
                *(differing[0], first, first),
            )
        with torch.no_grad():
            self.module.learning_rate_tensor.fill_(float(state["lr"]))
            self.module.iter.fill_(state["iter"])
            self.module.iter_cpu.fill_(state["iter_cpu"])
            if self._has_max_counter:
                self.module.max_counter.fill_(state["max_counter"])
        self.module.optimizer_args = self.module.optimizer_args._replace(**state["options"])
        fused = self.kernel.fused_optimizer
        for group, then in zip(fused.param_groups, state["groups"], strict=True):
            drop_options(fused, group, then)
            group.update(then)


def _arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Indices, offsets and sizes of a call of FBGEMM's module."""
    call = dict(zip(("indices", "offsets", "per_sample_weights"), args, strict=False)) | kwargs
    return call["indices"], call["offsets"], call.get("batch_size_per_feature_per_rank")


def local(value: Any) -> list[torch.Tensor]:
    """The tensors of this rank in a ShardedTensor, a DTensor or a tensor."""
    if hasattr(value, "local_shards"):
        return [getattr(shard, "tensor", shard) for shard in value.local_shards()]
    if hasattr(value, "to_local"):
        return local(value.to_local())
    return [value]


def check_inside(what: str, shown: Sequence[torch.Tensor], spans: Sequence[torch.Tensor]) -> None:
    """Raises UnsupportedTable if a tensor is not within one of `spans`."""
    for tensor in shown:
        if tensor.numel() and not any(
            span.data_ptr() <= tensor.data_ptr() < span.data_ptr() + span.nbytes for span in spans
        ):
            raise UnsupportedTable(
                f"a view of {what} could not be moved into the arena, so the model would show other values "
                f"than it trains: call gc.unfreeze() before ecemb.protect(); if gc.freeze() was not "
                f"used, this is a version of TorchRec that ecemb doesn't know ({version('torchrec')}; "
                f"tested with {TESTED})"
            )
