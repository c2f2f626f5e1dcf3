"""TorchRec's managed collision: the maps from raw ids to rows, with their counters and histories.

Owns the engine of all maps, and one `Remap` for each MCHManagedCollisionModule of this rank. A map and its
history are two tables of records, which are captured before `profile` changes them: the entries that it
appends to the history, and the whole map if it evicts. Counters of iterations are rank state. `torchrec`
captures the rows of tables that an eviction initialises again.

Owns one `HashedRemap` for each HashZchManagedCollisionModule: TorchRec's MPZCH, maps that probe slots by a
hash of the raw id, in FBGEMM's operator. Its identities, scores and counts by slot are one table of records.
Only the operator's result says which slots a batch has taken. So the tensors stay where they are, on a CUDA
device as on the CPU, and the arena holds an image of them: slots are marked after the operator has changed
the tensors, and when the transaction ends they are journalled from the image, which still has the old values.

TorchRec calls these methods directly, so that no hook of a module sees the calls: the instances' methods are
wrapped. Must not know: journals, parity, other ranks.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..coding.rows import Column, Table, TableLayout
from ..errors import UndeclaredWrite, UnsupportedTable
from .contract import Engine, EngineTable, Hooks, Ids, Move, Tied, Unit, all_rows
from .fbgemm import check_inside, local
from .internals import After, Before, own
from .members import HASHED, POLICIES, REMAPPING

_BYTES = 8  # of an entry: all buffers are int64
_COUNTERS = ("_current_iter", "_last_eviction_iter", "_current_history_buffer_offset")


class Map(Unit):
    """One ManagedCollisionModule of this rank, as the engine of all maps uses it.

    Args:
        path: of the module in the model.
        module: the module.

    Attributes:
        tables: the tables of its entries.
    """

    def __init__(self, path: str, module: Any) -> None:
        super().__init__(path, "a batch", repr(f"{path}.map"))
        self.path, self.module = path, module
        self.tables: list[EngineTable] = []

    def trained(self) -> list[Any]:
        """See `Unit.trained`."""
        return [getattr(self.module, name, None) for name in self.kept]

    @abstractmethod
    def watch(self, before: Callable[[], None], capture: Callable[[int, Ids], None]) -> list[Before]:
        """Wraps the module's methods, so that they report the entries that a batch in training changes.

        Args:
            before: called before each batch in training.
            capture: called with the engine's number of a table and entries of it, int64 [m].

        Returns:
            Handles, whose `remove()` ends the calls.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The counters that are not per entry."""

    @abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""


class Remap(Map):
    """One ManagedCollisionModule of this rank.

    Args:
        path: of the module in the model.
        module: an MCHManagedCollisionModule.

    Raises:
        UnsupportedTable: its eviction policy is unknown, its history has no size yet, or a buffer is not a
            one-dimensional int64 tensor on the CPU.
    """

    def __init__(self, path: str, module: Any) -> None:
        super().__init__(path, module)
        if (policy := type(own(module, "_eviction_policy")).__name__) not in POLICIES:
            raise UnsupportedTable(
                f"{path} evicts by a {policy}, which may hold state that would be lost: ecemb protects "
                f"{', '.join(POLICIES)} (docs/torchrec.md)"
            )
        if own(module, "_input_history_buffer_size") < 0:
            raise UnsupportedTable(
                f"{path} has no history yet, since TorchRec sizes it by the first batch: call the model once "
                f"in training mode before ecemb.protect(), with the same batch at each start"
            )
        for name in (*_COUNTERS, "_current_iter_tensor", "_eviction_interval", "_evicted"):
            own(module, name)
        parts = parts_of(module)
        self._buffers = list(parts.values())
        self.kept = [name for names in self._buffers for name in names]
        for part, names in parts.items():
            for tensor in (own(module, name) for name in names):
                if tensor.dtype is not torch.int64 or tensor.device.type != "cpu" or tensor.dim() != 1:
                    raise UnsupportedTable(
                        f"the {part} of {path} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: "
                        f"ecemb protects managed collision on CPUs only"
                    )
            columns = tuple(Column(name.lstrip("_"), "int64", _BYTES) for name in names)
            self.tables.append(
                EngineTable(TableLayout(f"{path}.{part}", len(own(module, names[0])), columns))
            )

    def tensors(self, table: int) -> dict[str, torch.Tensor]:
        """See `Unit.tensors`; of the map (table 0), or of the history (1)."""
        return {name.lstrip("_"): getattr(self.module, name) for name in self._buffers[table]}

    def place(self, stored: Sequence[Table], *, fresh: bool) -> list[Move]:
        """See `Unit.place`."""
        self.spans = []
        memory = [column.reshape(-1) for table in stored for column in table.columns]
        buffers = zip(self.trained(), memory, strict=True)
        moves = [move for buffer, here in buffers for move in self.move(buffer, here, fresh=fresh)]
        self.keep(memory)
        return moves

    def check_views(self) -> None:
        """See `Unit.check_views`."""
        metadata = (self.module._mch_metadata, self.module._history_metadata)
        shown = [tensor for of_part in metadata for tensor in of_part.values()]
        shown += [value for name, value in self.module.state_dict().items() if name in self.kept]
        check_inside(self.path, shown, self.spans)

    def watch(self, before: Callable[[], None], capture: Callable[[int, Ids], None]) -> list[Before]:
        """See `Map.watch`."""

        def profiled(features: Mapping[str, Any]) -> None:
            if self.module.training:
                before()
                for table, ids in self.changes(features):
                    capture(self.base + table, ids)

        return [Before(self.module, "profile", profiled)]

    def changes(self, features: Mapping[str, Any]) -> Iterator[tuple[int, Ids]]:
        """The entries that the next `profile` changes: (0, entries of the map) or (1, of the history)."""
        module = self.module
        first, size = module._current_history_buffer_offset, module._input_history_buffer_size
        count = sum(feature.values().numel() for feature in features.values())
        if end := min(count, size - first):
            yield 1, np.arange(first, first + end)
        begun = module._current_iter >= 0
        since = module._current_iter - module._last_eviction_iter if begun else 0
        if since + 1 == module._eviction_interval:
            for ids in all_rows(self.tables[0].layout):
                yield 0, ids

    def state(self) -> dict[str, Any]:
        """Counters of iterations."""
        counters = {name: int(getattr(self.module, name)) for name in _COUNTERS}
        return counters | {"_current_iter_tensor": self.module._current_iter_tensor.detach().clone()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the counters. No eviction is pending: evicted rows were initialised before the commit."""
        for name in _COUNTERS:
            setattr(self.module, name, state[name])
        with torch.no_grad():
            self.module._current_iter_tensor.copy_(state["_current_iter_tensor"])
        self.module._evicted = False


def parts_of(module: Any) -> dict[str, list[str]]:
    """Names of the buffers of a map ("map"), and of its history ("history")."""
    return {
        "map": [
            "_mch_sorted_raw_ids",
            "_mch_remapped_ids_mapping",
            *_named(module, "_mch_metadata", "_mch_"),
        ],
        "history": ["_history_accumulator", *_named(module, "_history_metadata", "_history_")],
    }


def _named(module: Any, metadata: str, prefix: str) -> list[str]:
    """Names of the buffers in a policy's metadata.

    Raises:
        UnsupportedTable: the module has another tensor of that name.
    """
    names = [prefix + name for name in own(module, metadata)]
    for name in names:
        if own(module, name) is not own(module, metadata)[name.removeprefix(prefix)]:
            raise UnsupportedTable(f"{name} of a {type(module).__name__} is not the tensor in {metadata}")
    return names


class Remaps(Engine[Map]):
    """The engine of all maps of this rank.

    Args:
        collections: sharded ManagedCollisionCollections, by path.

    Raises:
        UnsupportedTable: a map of another kind; see `Remap` and `HashedRemap`.
    """

    name = "managed collision"

    def __init__(self, collections: Mapping[str, Any]) -> None:
        self._collections = dict(collections)
        remaps = [
            _remap(f"{path}._managed_collision_modules.{table}", module)
            for path, collection in self._collections.items()
            for table, module in own(collection, "_managed_collision_modules").items()
        ]
        trained = [tensor for remap in remaps for tensor in remap.trained()]
        parameters = [tensor for tensor in trained if isinstance(tensor, nn.Parameter)]
        super().__init__(remaps, [remap.tables for remap in remaps], parameters)
        self.left_out = list(self._collections.values())

    def place(self, stored: Sequence[Table], *, fresh: bool) -> None:
        """See `Engine.place`."""
        super().place(stored, fresh=fresh)
        for path, collection in self._collections.items():
            spans = [span for remap in self._units for span in remap.spans]
            shards = own(collection, "_model_parallel_mc_buffer_name_to_sharded_tensor").values()
            check_inside(path, [tensor for shard in shards for tensor in local(shard)], spans)

    def watch(self, hooks: Hooks) -> None:
        """Registers with each map; from here on undeclared changes raise."""
        super().watch(hooks)
        for remap in self._units:
            self._handles += remap.watch(functools.partial(self._before_batch, remap), self.touch)
        for path, collection in self._collections.items():
            before_load = Tied(functools.partial(self._before_load, path))
            self._handles.append(collection.register_load_state_dict_pre_hook(before_load))

    def state(self) -> dict[str, Any]:
        """The counters, by map."""
        return {remap.path: remap.state() for remap in self._units}

    def set_state(self, state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        """Restores the counters of maps whose paths are in `state`; other maps keep theirs."""
        for remap in self._units:
            if (kept := state.get(remap.path)) is not None:
                remap.set_state(kept)

    def _before_batch(self, remap: Map) -> None:
        """Declares the changes of a batch in training; TorchRec writes even for a batch without ids."""
        if not self._hooks.is_open():
            raise UndeclaredWrite(
                f"a lookup in training mode would change {remap.path} outside of a step: call "
                f"the model inside `with guard.step():`, or after model.eval(). No entry was written"
            )
        self.touch(remap.base, np.empty(0, np.int64))

    def _before_load(self, path: str, *_: Any) -> None:
        raise UndeclaredWrite(
            f"load_state_dict() would overwrite the maps of {path}, and not their histories: load before "
            f"ecemb.protect()"
        )


def _remap(path: str, module: Any) -> Map:
    """The `Map` of a module, by the module's class.

    Raises:
        UnsupportedTable: see `Remaps`.
    """
    if (kind := type(module).__name__) not in REMAPPING:
        raise UnsupportedTable(
            f"{path} is a {kind}, which ecemb refuses: it may hold state that would be lost. It protects "
            f"{', '.join(REMAPPING)} (docs/torchrec.md)"
        )
    return HashedRemap(path, module) if kind == HASHED else Remap(path, module)


_PARTS = ("_hash_zch_identities", "_hash_zch_metadata", "_hash_zch_runtime_meta")
_SIZES = {torch.int64: 8, torch.int32: 4}


class HashedRemap(Map):
    """One HashZchManagedCollisionModule of this rank.

    Args:
        path: of the module in the model.
        module: the module.

    Raises:
        UnsupportedTable: it logs scalars, is for inference, or has buffers of another form.
    """

    def __init__(self, path: str, module: Any) -> None:
        super().__init__(path, module)
        if own(module, "_scalar_logger") is not None:
            raise UnsupportedTable(
                f"{path} logs scalars, whose counters would be lost: build it with tb_logging_frequency=0"
            )
        if own(module, "_is_inference"):
            raise UnsupportedTable(f"{path} is for inference, and trains nothing: leave is_inference out")
        for name in ("_evicted_indices", "_zero_collision_hash"):
            own(module, name)
        self.kept = [name for name in _PARTS if (one := own(module, name)) is not None and one.numel()]
        columns: list[Column] = []
        for name in self.kept:
            tensor: torch.Tensor = getattr(module, name)
            if tensor.dtype not in _SIZES or tensor.dim() != 2 or not tensor.is_contiguous():
                raise UnsupportedTable(
                    f"{name} of {path} is {tensor.dtype} {list(tensor.shape)}: ecemb protects contiguous "
                    f"int64 and int32 [slots, ...]"
                )
            dtype = str(tensor.dtype).removeprefix("torch.")
            columns.append(Column(name.lstrip("_"), dtype, tensor.shape[1] * _SIZES[tensor.dtype]))
        layout = TableLayout(f"{path}.map", len(own(module, _PARTS[0])), tuple(columns))
        self.tables = [EngineTable(layout, is_off_arena=True)]

    def tensors(self, table: int) -> dict[str, torch.Tensor]:
        """See `Unit.tensors`."""
        return {name.lstrip("_"): getattr(self.module, name).detach() for name in self.kept}

    def place(self, stored: Sequence[Table], *, fresh: bool) -> list[Move]:
        """Keeps the tensors where they are; `discover.Tables` makes the image, as for all such tables."""
        self.keep()
        self.spans = list(self.tensors(0).values())
        return []

    def check_views(self) -> None:
        """See `Unit.check_views`."""
        shown = self.module.state_dict()
        check_inside(
            self.path,
            [one for name in self.kept if name in shown for one in local(shown[name])],
            self.spans,
        )

    def watch(self, before: Callable[[], None], capture: Callable[[int, Ids], None]) -> list[Before]:
        """See `Map.watch`. `capture` gets the slots that a batch may have changed, after the batch."""

        def remapped(*_: Any, **__: Any) -> None:
            if self.module.training:
                before()

        def hashed(found: tuple[torch.Tensor, torch.Tensor | None], *_: Any, **given: Any) -> None:
            if not given["readonly"]:
                capture(self.base, slots_of(*found))

        return [
            Before(self.module, "remap", remapped),
            After(self.module, "_zero_collision_hash", hashed),
        ]

    def state(self) -> dict[str, Any]:
        """Empty: scores are stored by slot, and times are those of the machine's clock."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Drops the list of evicted slots, which a step that is undone may have left."""
        self.module._evicted_indices = []


def slots_of(remapped: torch.Tensor, evicted: torch.Tensor | None) -> Ids:
    """The slots that FBGEMM's operator may have changed, int64 [m], ascending, each once.

    Args:
        remapped: integers [ids], the slot of each id on this rank; -1 for an id that got none.
        evicted: integers [e], the slots that went from one id to another; None if there is no eviction.
    """
    found = remapped if evicted is None else torch.cat([remapped.reshape(-1), evicted.reshape(-1)])
    slots = np.unique(found.detach().cpu().to(torch.int64).numpy())
    return slots[np.searchsorted(slots, 0) :]
