"""FBGEMM's tables: batches of tables that share their buffers, and their move into the arena.

FBGEMM keeps the tables of a *batch* (a SplitTableBatchedEmbeddingBagsCodegen module) in one buffer of
weights and one of optimizer state, and changes rows inside backward, without a hook. `Batch` moves both
buffers into the arena, and reports the rows of a lookup.

Owns the rule of each optimizer that ecemb protects: the state that it keeps with a table's rows, and what
else its updates depend on. These optimizers change only rows that a step looks up; for those that overwrite
all rows in some lookups, the rule says in which. `Features` computes the rows that a lookup reads from its
arguments, on the host or on the device.

Nothing here imports fbgemm_gpu: the code that built the model did. Private attributes of FBGEMM are checked
when a batch is made.

Must not know: TorchRec's modules, journals, parity, other ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..coding.rows import Column, Table, TableLayout, base, joined, part_of
from ..errors import UndeclaredWrite, UnsupportedOptimizer, UnsupportedTable, UsageError
from ..kernels.contract import Ids
from ..state.optimizers import drop_options, options
from .contract import EngineTable, Hooks, Move, Unit
from .device_image import is_off_arena
from .internals import TESTED, held, own, version

logger: logging.Logger = logging.getLogger("ecemb")


REPLACED = (
    "the tensors in training are not the protected ones. Shard, load with assign=True, and move the model "
    "before ecemb.protect()"
)
_DTYPES = (torch.float32, torch.float16)
_OPTIONS = ("eps", "beta1", "beta2", "weight_decay")  # that update_hyper_parameters() may change
_LOOKUPS = ("iter", "iter_cpu")  # the number of lookups so far


class FusedTable(EngineTable):
    """One shard of a TorchRec table.

    Args:
        layout: of the shard; its name is the path of the table in the model, with the columns if the shard
            hasn't all columns.
        first_row: the whole table's row at which the shard begins.
        rows: rows of the whole table.
        is_off_arena: whether it stays in a GPU's memory.

    Attributes:
        in_groups: whether several groups of ranks have the table, each with rows of its own.
    """

    def __init__(self, layout: TableLayout, first_row: int, rows: int, *, is_off_arena: bool) -> None:
        super().__init__(layout, is_off_arena=is_off_arena)
        self.announces_lookups = not is_off_arena
        self.first_row, self.rows, self.in_groups = first_row, rows, False

    def whole(self, world_size: int) -> tuple[int, int] | None:
        """See `EngineTable.whole`. None for a table in several groups of ranks, whose rows differ."""
        return None if self.in_groups else (self.first_row, self.rows)

    def alike(self) -> tuple[list[int], dict[str, Any]]:
        """See `EngineTable.alike`. No ranks are required to have the table: TorchRec's plan says which do."""
        columns = [[column.name, column.dtype, column.row_bytes] for column in self.layout.columns]
        return [], {"num_embeddings": self.rows, "name, type and bytes of a row's parts": columns}


class Batch(Unit):
    """The tables of one FBGEMM module, which share their buffers.

    Args:
        path: of the tables in the model.
        kernel: TorchRec's module around FBGEMM's.
        number: among the batches of this path.

    Raises:
        UnsupportedTable, UnsupportedOptimizer: see `torchrec.find`.
    """

    def __init__(self, path: str, kernel: Any, number: int) -> None:
        self.kernel = kernel
        self.module: Any = kernel.emb_module
        self.configs: list[Any] = own(own(kernel, "_config"), "embedding_tables")
        names = ", ".join(repr(config.name) for config in self.configs)
        super().__init__(f"{path} ({names})", "its optimizer", "table, rows")
        self.rule: Rule = rule_of(self.what, own(self.module, "optimizer").name, self.module)
        kinds = ("weights", *self.rule.states)
        where = "dev" if own(self.module, "weights_dev").numel() else "host"
        self._check_buffers(kinds, where)
        self.kept = [f"{kind}_{where}" for kind in kinds]
        self.is_off_arena = is_off_arena(getattr(self.module, self.kept[0]))
        self.tables: list[FusedTable] = [
            self._table(path, number, config, i) for i, config in enumerate(self.configs)
        ]
        self.names: str = "\n".join(dict.fromkeys(base(table.name) for table in self.tables))
        self._check_empty(where)
        rows = np.array([table.layout.rows for table in self.tables], np.int64)
        self._first = np.cumsum([0, *rows])
        tables = np.array(list(own(self.module, "feature_table_map")), np.int64)
        self.features = Features(self.what, rows[tables], self._first[tables])
        if self.rule.mode:
            own(self.module, self.rule.mode)
        self._has_max_counter: bool = "prev_iter" in self.rule.states
        self._joined = joined([table.layout for table in self.tables])[0].rows == self._first[-1]

    def _check_empty(self, where: str) -> None:
        """Raises UnsupportedTable if, on the CPU, a table without rows precedes one of another width.

        FBGEMM treats the two as one table there.
        """
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
        for name in ("learning_rate_tensor", *_LOOKUPS, "optimizer_args"):
            own(self.module, name)

    def _table(self, path: str, number: int, config: Any, index: int) -> FusedTable:
        rows, width = config.local_rows, config.local_cols
        metadata = config.local_metadata
        first_row, first_column = metadata.shard_offsets if metadata is not None else (0, 0)
        name = f"{path}.{config.name}"
        if width != config.embedding_dim:
            name = part_of(name, first_column, first_column + width)
        columns: list[Column] = []
        for buffer in self.kept:
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
        return FusedTable(layout, first_row, config.num_embeddings, is_off_arena=self.is_off_arena)

    def tensors(self, table: int) -> dict[str, torch.Tensor]:
        """See `Unit.tensors`: as FBGEMM shows them."""
        shown = [
            self.module.split_embedding_weights(),
            *zip(*self.module.split_optimizer_states(), strict=True),
        ]
        names = (column.name for column in self.tables[table].layout.columns)
        return {name: tensors[table].detach() for name, tensors in zip(names, shown, strict=True)}

    def place(self, stored: Sequence[Table], *, fresh: bool) -> list[Move]:
        """See `Unit.place`."""
        self.spans = []
        if self.is_off_arena:
            self.spans += [tensor.detach() for tensor in self.trained()]
            self.keep()
            return []
        moves: list[Move] = []
        memory: list[NDArray[np.uint8]] = []
        for i, buffer in enumerate(self.trained()):
            columns = [table.columns[i] for table in stored]
            size = sum(column.nbytes for column in columns)
            memory.append(np.lib.stride_tricks.as_strided(columns[0].reshape(-1), (size,), (1,)))
            moves += self.move(buffer, memory[i], fresh=fresh)
        self.keep(memory)
        return moves

    def looked_up(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[int, Ids]]:
        """The rows that a call of FBGEMM's module with these arguments reads, as `named` gives them."""
        if (numbers := self.features.rows(*_arguments(args, kwargs))) is not None:
            yield from self.named(numbers)

    def marked(self, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """The rows of the batch that a call of FBGEMM's module reads; see `Features.there`."""
        return self.features.there(*_arguments(args, kwargs))

    def wait_for_rows(self, hooks: Hooks, module: Any, args: Any, kwargs: Any) -> None:
        """Waits for the rows of a lookup, before a call of FBGEMM's module, in training or not."""
        if hooks.ensure is not None:
            for table, rows in self.looked_up(args, kwargs):
                hooks.wait_for(self.base + table, rows)

    def wait_for_all(self, hooks: Hooks, *_: Any) -> None:
        """Waits for all rows."""
        for table in range(len(self.tables)):
            hooks.wait_for_table(self.base + table)

    def named(self, numbers: Ids) -> Iterator[tuple[int, Ids]]:
        """Splits rows of the batch by table, as `Hooks.capture` takes them.

        If the batch's tables are joined (see `rows.joined`), all rows are the first table's.

        Args:
            numbers: int64 [m], in any order: rows of the batch, its tables' rows one after another.

        Yields:
            A table's index in the batch, and rows of it.
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

    def trained(self) -> list[Any]:
        """See `Unit.trained`. FBGEMM's own updates don't change the tensors' versions."""
        return [held(self.module, name) for name in self.kept]

    def check_storage(self) -> None:
        """See `Unit.check_storage`."""
        if held(self.kernel, "emb_module") is not self.module:
            raise UndeclaredWrite(f"the module that looks up {self.what} was replaced: {REPLACED}")
        super().check_storage()

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
        """Learning rate, options and counters, which are not per row.

        Without the number of lookups, which evaluations change, where no update depends on it.
        """
        arguments = self.module.optimizer_args
        counters: dict[str, Any] = {}
        if self._has_max_counter:
            counters["max_counter"] = float(self.module.max_counter)
        if self.rule.counts:
            counters |= {name: held(self.module, name).item() for name in _LOOKUPS}
        return counters | {
            "lr": held(self.module, "learning_rate_tensor").item(),
            "options": {name: getattr(arguments, name) for name in _OPTIONS if hasattr(arguments, name)},
            "groups": [options(group) for group in self.kernel.fused_optimizer.param_groups],
        }

    def set_state(self, kept: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        """Restores the result of `state`.

        Args:
            kept: base name of a table -> state of the batch that it was in. If it has none of this batch's
                tables, the script's values stay.
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
            for name in _LOOKUPS if self.rule.counts else ():
                if name in state:
                    getattr(self.module, name).fill_(state[name])
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


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one of FBGEMM's optimizers changes tables.

    Attributes:
        states: the states of a row, in the order of `split_optimizer_states()`.
        by_row: those with one value for a row; the others have one for each value of the row.
        counts: whether updates depend on the number of lookups so far, training or not.
        mode: the attribute of FBGEMM's module with the options of lookups that overwrite all rows; "" if no
            lookup does.
        every: those of these options that are periods: a lookup whose number is a multiple of one of them
            overwrites all rows.
    """

    states: tuple[str, ...] = ()
    by_row: tuple[str, ...] = ()
    counts: bool = False
    mode: str = ""
    every: tuple[str, ...] = ()

    def overwrites_next(self, module: Any) -> bool:
        """Whether the next lookup overwrites all rows, as FBGEMM's module decides."""
        if not self.mode or not module.training:
            return False
        count = int(module.iter_cpu) or int(module.iter)
        return any((count + 1) % int(getattr(module, self.mode)[name]) == 0 for name in self.every)

    @property
    def why_in_steps(self) -> str:
        """For messages, why lookups have to be inside steps, if the optimizer counts them."""
        return "averages all rows in some of them" if self.mode else "updates rows by their number"


_FIRST, _BOTH = ("momentum1",), ("momentum1", "momentum2")
_COUNTERS = "prev_iter", "row_counter"

RULES: dict[str, Rule] = {
    "EXACT_SGD": Rule(),
    "EXACT_ROWWISE_ADAGRAD": Rule(_FIRST, by_row=_FIRST),
    "EXACT_ADAGRAD": Rule(_FIRST),
    "EMAINPLACE_ROWWISE_ADAGRAD": Rule(_FIRST, _FIRST, True, "_emainplace_mode", ("step_ema",)),
    "ENSEMBLE_ROWWISE_ADAGRAD": Rule(_BOTH, _FIRST, True, "_ensemble_mode", ("step_ema", "step_swap")),
    "ADAM": Rule(_BOTH, counts=True),
    "PARTIAL_ROWWISE_ADAM": Rule(_BOTH, by_row=("momentum2",), counts=True),
    "LAMB": Rule(_BOTH, counts=True),
    "PARTIAL_ROWWISE_LAMB": Rule(_BOTH, by_row=("momentum2",), counts=True),
}
"""The rules by the optimizers' names in `EmbOptimType`."""


def rule_of(what: str, kind: str, module: Any) -> Rule:
    """The rule of an optimizer, with its options.

    Args:
        what: names the tables, for the message.
        kind: name of the optimizer.
        module: FBGEMM's, which has its options.

    Raises:
        UnsupportedOptimizer: ecemb doesn't know which rows it changes.
    """
    decays = "_used_rowwise_adagrad_with_global_weight_decay"
    if kind not in RULES or getattr(module, decays, False):
        how = f" with {decays}" if getattr(module, decays, False) else ""
        raise UnsupportedOptimizer(
            f"{what} is updated by FBGEMM's {kind}{how}, and ecemb doesn't know that it changes only the "
            f"rows that a step looks up: use one of {', '.join(RULES)} (docs/torchrec.md)"
        )
    rule = RULES[kind]
    more: tuple[str, ...] = ()
    if getattr(module, "_used_rowwise_adagrad_with_counter", False):
        more = _COUNTERS
    elif kind == "ADAM" and getattr(module, "use_rowwise_bias_correction", False):
        more = _COUNTERS[1:]
    if more:
        rule = dataclasses.replace(
            rule, states=(*rule.states, *more), by_row=(*rule.by_row, *more), counts=True
        )
    return rule


class Features:
    """The features of a batch of tables.

    Args:
        what: the batch, in errors.
        rows: int64 [features], rows of the table that each feature looks up.
        first: int64 [features], that table's first row in the batch, whose tables' rows follow one another.
    """

    def __init__(self, what: str, rows: Ids, first: Ids) -> None:
        self._what, self._rows, self._first = what, rows, first
        self._there: tuple[torch.Tensor, torch.Tensor] | None = None  # both on the device of lookups
        self._all_have_rows = bool(rows.all())
        self._beyond: torch.Tensor | None = None  # bool [], on the device of lookups

    def clear_beyond(self) -> None:
        """Clears the record of ids that `has_beyond` reads."""
        self._beyond = None

    def has_beyond(self) -> bool:
        """Whether `there` got an id of a table of which this rank has no rows. May wait for the device."""
        if self._beyond is not None and not self._beyond:
            self._beyond = None
        return self._beyond is not None

    def rows(self, indices: torch.Tensor, offsets: torch.Tensor, sizes: Any) -> Ids | None:
        """The rows of a lookup in the batch, int64 [m], with repeats; None if there are none.

        Args:
            indices: integers [L], an argument of the lookup, before or after FBGEMM's bounds check.
            offsets: integers [bags + 1]; features one after another, each with its bags.
            sizes: bags by feature and rank, or None if all features have equally many.

        Raises:
            UsageError: an id is of a table of which this rank has no rows.
        """
        values, ends = indices.numpy(force=True), offsets.numpy(force=True)
        if sizes is None:
            bags = (len(ends) - 1) // len(self._rows)
            edges = ends[::bags] if bags else np.zeros(len(self._rows) + 1, np.int64)
        else:
            edges = ends[np.cumsum([0, *(sum(of_feature) for of_feature in sizes)])]
        values = values[edges[0] : edges[-1]].astype(np.int64, copy=False)
        if not len(values):
            return None
        counts = edges[1:] - edges[:-1]
        some = counts.nonzero()[0]
        highest = np.maximum.reduceat(values.view(np.uint64), edges[some] - edges[0])
        numbers = self._first.repeat(counts)
        if np.logical_and.reduce(highest < self._rows[some].view(np.uint64)):  # so none is negative
            numbers += values
        else:  # FBGEMM looks up row 0 instead, and warns
            rows = np.repeat(self._rows, counts)
            if not rows.all():
                raise UsageError(
                    f"an id is beyond a table of {self._what} of which this rank has no rows: FBGEMM would "
                    f"train row 0 of another one. Look up ids below num_embeddings. No row was written"
                )
            numbers += np.where((values < 0) | (values >= rows), 0, values)
        return numbers

    def there(self, indices: torch.Tensor, offsets: torch.Tensor, sizes: Any) -> torch.Tensor:
        """Like `rows`, computed on the lookup's device without waiting for it: those rows, perhaps more.

        Ids behind the last bag, which aren't read, may also give rows. An id of a table of which this rank
        has no rows gives the row behind that table, and is recorded for `has_beyond`: to raise an error here
        would mean to wait for the device.

        Returns:
            int64 [L] on the device of `indices`.
        """
        if sizes is None:
            edges = offsets[:: max(1, (len(offsets) - 1) // len(self._rows))]
        else:
            ends = np.cumsum([0, *(sum(of_feature) for of_feature in sizes)])
            edges = offsets[torch.from_numpy(ends).to(offsets.device, non_blocking=True)]  # copied at once
        if self._there is None or self._there[0].device != indices.device:
            rows, first = (torch.from_numpy(one).to(indices.device) for one in (self._rows, self._first))
            self._there = rows, first
        rows, first = self._there
        place = torch.arange(len(indices), dtype=torch.int64, device=indices.device)
        feature = torch.searchsorted(edges[1:].to(torch.int64).contiguous(), place, right=True)
        feature.clamp_(max=len(rows) - 1)
        ids = indices.to(torch.int64)
        if not self._all_have_rows:
            is_read = (place >= edges[0]) & (place < edges[-1])
            found = (is_read & (rows[feature] == 0)).any()
            self._beyond = found if self._beyond is None else self._beyond | found
        is_row = (ids >= 0) & (ids < rows[feature])
        return first[feature] + torch.where(is_row, ids, 0)  # FBGEMM looks up row 0 instead, and warns
