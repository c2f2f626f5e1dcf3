"""TorchRec's managed collision: the maps from raw ids to rows, with their counters and histories.

Owns the engine of all maps, and one `Remap` for each MCHManagedCollisionModule of this rank. A map and its
history are two tables of records, which are captured before `profile` changes them: the entries that it
appends to the history, and the whole map where it evicts. Counters of iterations are the rank's state. The
rows that an eviction draws again belong to `torchrec`.

Owns one `HashedRemap` for each HashZchManagedCollisionModule: TorchRec's MPZCH, maps that probe slots by a
hash of the raw id, in FBGEMM's operator. Its identities, scores and counts by slot are one table of records.
Which slots a batch takes, the operator alone knows, and its result names all of them. So the tensors stay
where they are, on a CUDA device as on the CPU, and the arena holds an image of them: slots are marked after
the operator has changed the tensors, and journalled from the image, which is as it was before, when the
transaction ends.

TorchRec calls these methods directly, so that no hook of a module sees the calls: the instances' methods are
wrapped. Must not know: journals, parity, other ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from ..coding.rows import Column, Table, TableLayout
from ..errors import UndeclaredWrite, UnsupportedTable
from .contract import Hooks, Ids, Move, Places, Tied, all_rows, repoint
from .fbgemm import check_inside, local
from .internals import After, Before, own
from .members import HASHED, POLICIES, REMAPPING

_BYTES = 8  # of an entry: all buffers are int64
_COUNTERS = ("_current_iter", "_last_eviction_iter", "_current_history_buffer_offset")


class Remap:
    """One ManagedCollisionModule of this rank.

    Args:
        path: of the module in the model.
        module: an MCHManagedCollisionModule.

    Raises:
        UnsupportedTable: an unknown policy, or its history has no size yet.
    """

    def __init__(self, path: str, module: Any) -> None:
        self.path, self.module = path, module
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
        self.parameters: list[nn.Parameter] = []
        self._buffers = list(parts.values())
        self.tables: list[RemapTable] = []
        for part, names in parts.items():
            for tensor in (own(module, name) for name in names):
                if tensor.dtype is not torch.int64 or tensor.device.type != "cpu" or tensor.dim() != 1:
                    raise UnsupportedTable(
                        f"the {part} of {path} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: "
                        f"ecemb protects managed collision on CPUs only"
                    )
            columns = tuple(Column(name.lstrip("_"), "int64", _BYTES) for name in names)
            name = f"{path}.{part}"
            self.tables.append(RemapTable(name, TableLayout(name, len(own(module, names[0])), columns)))
        self.map, self.history = range(2)
        self.spans: list[torch.Tensor] = []  # the arena's tensors under the buffers
        self._places = Places()
        self._versions: list[int] = []

    def tensors(self, table: int) -> dict[str, torch.Tensor]:
        """The buffers of the map or of the history."""
        return {name.lstrip("_"): getattr(self.module, name) for name in self._buffers[table]}

    def place(self, stored: Sequence[Table], *, fresh: bool) -> list[Move]:
        """Moves the buffers into the arena; returns the storages that they left."""
        self._places, self.spans = Places(), []
        moves: list[Move] = []
        for names, table in zip(self._buffers, stored, strict=True):
            for name, column in zip(names, table.columns, strict=True):
                buffer: torch.Tensor = getattr(self.module, name)
                span = torch.from_numpy(column.reshape(-1).view(np.int64))
                if fresh:
                    span.copy_(buffer)
                if buffer.numel():
                    moves.append(Move(buffer.untyped_storage(), span))
                    buffer.data = span
                self.spans.append(span)
                self._places.keep(f"{name} of {self.path}", buffer, column)
        return moves

    def check_views(self) -> None:
        """Raises UnsupportedTable unless the tensors of state_dict() are in the arena."""
        metadata = (self.module._mch_metadata, self.module._history_metadata)
        shown = [tensor for of_part in metadata for tensor in of_part.values()]
        names = {name for of_part in self._buffers for name in of_part}
        shown += [value for name, value in self.module.state_dict().items() if name in names]
        check_inside(self.path, shown, self.spans)

    def watch(self, before: Callable[[], None], capture: Callable[[int, Ids], None]) -> list[Before]:
        """Calls `before` before a batch in training, and `capture` with a table and its changed entries."""

        def profiled(features: Mapping[str, Any]) -> None:
            if self.module.training:
                before()
                for table, ids in self.changes(features):
                    capture(table, ids)

        return [Before(self.module, "profile", profiled)]

    def changes(self, features: Mapping[str, Any]) -> Iterator[tuple[int, Ids]]:
        """What the next `profile` changes: a table of this module, and entries of it."""
        module = self.module
        first, size = module._current_history_buffer_offset, module._input_history_buffer_size
        count = sum(feature.values().numel() for feature in features.values())
        if end := min(count, size - first):
            yield self.history, np.arange(first, first + end)
        begun = module._current_iter >= 0
        since = module._current_iter - module._last_eviction_iter if begun else 0
        if since + 1 == module._eviction_interval:
            for ids in all_rows(self.tables[self.map].layout):
                yield self.map, ids

    def mark_clean(self) -> None:
        """Accepts the buffers' present versions as declared."""
        self._versions = [tensor._version for tensor in self._tensors()]

    def is_written(self) -> bool:
        """Whether a buffer was written in place since `mark_clean`."""
        return [tensor._version for tensor in self._tensors()] != self._versions

    def check_storage(self) -> None:
        """Raises UndeclaredWrite if the buffers are not the protected ones any more."""
        self._places.check([getattr(self.module, name, None) for names in self._buffers for name in names])

    def state(self) -> dict[str, Any]:
        """Counters of iterations."""
        counters = {name: int(getattr(self.module, name)) for name in _COUNTERS}
        return counters | {"_current_iter_tensor": self.module._current_iter_tensor.detach().clone()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores them; what was evicted has been drawn again by then."""
        for name in _COUNTERS:
            setattr(self.module, name, state[name])
        with torch.no_grad():
            self.module._current_iter_tensor.copy_(state["_current_iter_tensor"])
        self.module._evicted = False

    def _tensors(self) -> Iterator[torch.Tensor]:
        for names in self._buffers:
            for name in names:
                yield getattr(self.module, name)


def parts_of(module: Any) -> dict[str, list[str]]:
    """The buffers of a map, and of its history."""
    return {
        "map": [
            "_mch_sorted_raw_ids",
            "_mch_remapped_ids_mapping",
            *_named(module, "_mch_metadata", "_mch_"),
        ],
        "history": ["_history_accumulator", *_named(module, "_history_metadata", "_history_")],
    }


def _named(module: Any, metadata: str, prefix: str) -> list[str]:
    """The buffers that a policy asked for; each must be the module's own."""
    names = [prefix + name for name in own(module, metadata)]
    for name in names:
        if own(module, name) is not own(module, metadata)[name.removeprefix(prefix)]:
            raise UnsupportedTable(f"{name} of a {type(module).__name__} is not the tensor in {metadata}")
    return names


class Remaps:
    """The engine of all maps of this rank.

    Args:
        collections: sharded ManagedCollisionCollections, by path.

    Raises:
        UnsupportedTable: a map of another kind; see `Remap` and `hashed_collision.HashedRemap`.
    """

    name = "managed collision"

    def __init__(self, collections: Mapping[str, Any]) -> None:
        self._collections = dict(collections)
        self._remaps = [
            _remap(f"{path}._managed_collision_modules.{table}", module)
            for path, collection in self._collections.items()
            for table, module in own(collection, "_managed_collision_modules").items()
        ]
        self._of = [
            (number, table) for number, remap in enumerate(self._remaps) for table in range(len(remap.tables))
        ]
        self.tables: list[RemapTable] = [table for remap in self._remaps for table in remap.tables]
        self.parameters: list[nn.Parameter] = [one for remap in self._remaps for one in remap.parameters]
        self.stepped: dict[str, nn.Parameter] = {}
        self.left_out: list[nn.Module] = list(self._collections.values())
        self.averaged: list[Any] = []
        self._handles: list[Any] = []
        self._touched: set[int] = set()

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """See `Engine.tensors`."""
        number, table = self._of[index]
        return self._remaps[number].tensors(table)

    def place(self, stored: Sequence[Table], *, fresh: bool) -> None:
        """Moves buffers into the arena, and all views of them here, unless they stay outside."""
        moves: list[Move] = []
        for number, remap in enumerate(self._remaps):
            of_map = [table for (its, _), table in zip(self._of, stored, strict=True) if its == number]
            moves += remap.place(of_map, fresh=fresh)
        repoint(moves)
        for remap in self._remaps:
            remap.check_views()
        for path, collection in self._collections.items():
            spans = [span for remap in self._remaps for span in remap.spans]
            shards = own(collection, "_model_parallel_mc_buffer_name_to_sharded_tensor").values()
            check_inside(path, [tensor for shard in shards for tensor in local(shard)], spans)
        self.mark_clean()

    def watch(self, hooks: Hooks) -> None:
        """Registers with each map; from here on undeclared changes raise."""
        self._hooks = hooks
        for number, remap in enumerate(self._remaps):
            before = functools.partial(self._before_batch, number)
            capture = functools.partial(self._capture, self._of.index((number, 0)))
            self._handles += remap.watch(before, capture)
        for path, collection in self._collections.items():
            before_load = Tied(functools.partial(self._before_load, path))
            self._handles.append(collection.register_load_state_dict_pre_hook(before_load))

    def unwatch(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def touch(self, index: int, ids: Ids) -> None:
        """Captures entries that are about to be written by hand."""
        self._expect(self._of[index][0])
        if len(ids):
            self._hooks.capture(index, ids)

    def check(self) -> None:
        """Raises UndeclaredWrite if a map changed undeclared; called when a step begins and ends."""
        for number, remap in enumerate(self._remaps):
            if number in self._touched:
                remap.mark_clean()
            self._check(remap)
        self._touched.clear()

    def mark_clean(self) -> None:
        """Accepts the present state of all maps as declared (after an undo)."""
        self._touched.clear()
        for remap in self._remaps:
            remap.mark_clean()

    def state(self) -> dict[str, Any]:
        """The counters, by map."""
        return {remap.path: remap.state() for remap in self._remaps}

    def set_state(self, state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        """Restores them, of maps whose paths are the same; others keep theirs."""
        for remap in self._remaps:
            if (kept := state.get(remap.path)) is not None:
                remap.set_state(kept)

    def _expect(self, number: int) -> None:
        """Expects a write of a map, unless it has been written undeclared before."""
        if number not in self._touched:
            self._check(self._remaps[number])
        self._touched.add(number)

    def _check(self, remap: Map) -> None:
        if not self._hooks.protects:
            return
        remap.check_storage()
        if remap.is_written():
            self._hooks.on_undeclared()
            raise UndeclaredWrite(
                f"{remap.path} was written in place, but not by a batch: declare such entries with "
                f"guard.touch({remap.tables[0].name!r}) inside the step, before the write. Restart the job: "
                f"it computes parity again from the present entries"
            )

    def _before_batch(self, number: int) -> None:
        """Expects the changes of a batch in training; TorchRec writes even for one without ids."""
        if not self._hooks.is_open():
            raise UndeclaredWrite(
                f"a lookup in training mode would change {self._remaps[number].path} outside of a step: call "
                f"the model inside `with guard.step():`, or after model.eval(). No entry was written"
            )
        self._expect(number)

    def _capture(self, base: int, table: int, ids: Ids) -> None:
        self.touch(base + table, ids)

    def _before_load(self, path: str, *_: Any) -> None:
        raise UndeclaredWrite(
            f"load_state_dict() would overwrite the maps of {path}, and not their histories: load before "
            f"ecemb.protect()"
        )


def _remap(path: str, module: Any) -> Map:
    """What protects a map, by the class of its module."""
    if (kind := type(module).__name__) not in REMAPPING:
        raise UnsupportedTable(
            f"{path} is a {kind}, which ecemb refuses: it may hold state that would be lost. It protects "
            f"{', '.join(REMAPPING)} (docs/torchrec.md)"
        )
    return HashedRemap(path, module) if kind == HASHED else Remap(path, module)


_PARTS = ("_hash_zch_identities", "_hash_zch_metadata", "_hash_zch_runtime_meta")
_SIZES = {torch.int64: 8, torch.int32: 4}


class HashedRemap:
    """One HashZchManagedCollisionModule of this rank.

    Args:
        path: of the module in the model.
        module: the module.

    Raises:
        UnsupportedTable: it logs scalars, is for inference, or has buffers of another form.
    """

    def __init__(self, path: str, module: Any) -> None:
        self.path, self.module = path, module
        if own(module, "_scalar_logger") is not None:
            raise UnsupportedTable(
                f"{path} logs scalars, whose counters would be lost: build it with tb_logging_frequency=0"
            )
        if own(module, "_is_inference"):
            raise UnsupportedTable(f"{path} is for inference, and trains nothing: leave is_inference out")
        for name in ("_evicted_indices", "_zero_collision_hash"):
            own(module, name)
        self._names = [name for name in _PARTS if (one := own(module, name)) is not None and one.numel()]
        columns: list[Column] = []
        for name in self._names:
            tensor: torch.Tensor = getattr(module, name)
            if tensor.dtype not in _SIZES or tensor.dim() != 2 or not tensor.is_contiguous():
                raise UnsupportedTable(
                    f"{name} of {path} is {tensor.dtype} {list(tensor.shape)}: ecemb protects contiguous "
                    f"int64 and int32 [slots, ...]"
                )
            dtype = str(tensor.dtype).removeprefix("torch.")
            columns.append(Column(name.lstrip("_"), dtype, tensor.shape[1] * _SIZES[tensor.dtype]))
        name = f"{path}.map"
        layout = TableLayout(name, len(own(module, _PARTS[0])), tuple(columns))
        self.tables: list[RemapTable] = [RemapTable(name, layout, is_off_arena=True)]
        held = [getattr(module, name) for name in self._names]
        self.parameters: list[nn.Parameter] = [one for one in held if isinstance(one, nn.Parameter)]
        self.spans: list[torch.Tensor] = []
        self._places = Places()
        self._versions: list[int] = []

    def tensors(self, table: int) -> dict[str, torch.Tensor]:
        """The buffers of the map."""
        return {name.lstrip("_"): getattr(self.module, name).detach() for name in self._names}

    def place(self, stored: Sequence[Table], *, fresh: bool) -> list[Move]:
        """Keeps the tensors where they are; the image is the business of all tables outside the arena."""
        self._places = Places()
        for name in self._names:
            self._places.keep(f"{name} of {self.path}", getattr(self.module, name))
        self.spans = list(self.tensors(0).values())
        return []

    def check_views(self) -> None:
        """Raises UnsupportedTable unless the tensors of state_dict() are the map's own."""
        shown = self.module.state_dict()
        check_inside(
            self.path,
            [one for name in self._names if name in shown for one in local(shown[name])],
            self.spans,
        )

    def watch(self, before: Callable[[], None], capture: Callable[[int, Ids], None]) -> list[Before]:
        """Calls `before` before a batch in training, and `capture` with the slots that it has taken."""

        def remapped(*_: Any, **__: Any) -> None:
            if self.module.training:
                before()

        def hashed(found: tuple[torch.Tensor, torch.Tensor | None], *_: Any, **given: Any) -> None:
            if not given["readonly"]:
                capture(0, slots_of(*found))

        return [
            Before(self.module, "remap", remapped),
            After(self.module, "_zero_collision_hash", hashed),
        ]

    def mark_clean(self) -> None:
        """Accepts the buffers' present versions as declared."""
        self._versions = [getattr(self.module, name)._version for name in self._names]

    def is_written(self) -> bool:
        """Whether a buffer was written in place since `mark_clean`."""
        return [getattr(self.module, name)._version for name in self._names] != self._versions

    def check_storage(self) -> None:
        """Raises UndeclaredWrite if the buffers are not the protected ones any more."""
        self._places.check([getattr(self.module, name, None) for name in self._names])

    def state(self) -> dict[str, Any]:
        """Nothing: scores are by slot, and the clock is the machine's."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Drops slots that were taken by others in a step that is undone."""
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


@dataclasses.dataclass(frozen=True)
class RemapTable:
    """A map of this rank, or its history.

    Attributes:
        name: path of the module in the model, with "map" or "history".
        layout: an entry for a record.
        is_off_arena: whether its tensors stay where they are, and the arena holds an image of them.
    """

    name: str
    layout: TableLayout
    is_off_arena: bool = False

    @property
    def announces_lookups(self) -> bool:
        """See `EngineTable.announces_lookups`: a batch reads the whole map."""
        return False

    @property
    def sees_all_changes(self) -> bool:
        """See `EngineTable.sees_all_changes`: batches in training are the only ones to change it."""
        return True

    def whole(self, world_size: int) -> None:
        """See `EngineTable.whole`: which entries a rank has, its own ids decide."""
        return

    def alike(self) -> None:
        """See `EngineTable.alike`: histories may have different sizes."""
        return


class Map(Protocol):
    """One ManagedCollisionModule of this rank, as the engine of all maps uses it.

    Attributes:
        path: of the module in the model.
        tables: of its entries.
        parameters: of the model that are its buffers.
        spans: the tensors under its buffers, in the arena or outside it.
    """

    path: str
    tables: list[RemapTable]
    parameters: list[nn.Parameter]
    spans: list[torch.Tensor]

    def tensors(self, table: int) -> dict[str, torch.Tensor]:
        """The buffers of a table."""
        ...

    def place(self, stored: Sequence[Table], *, fresh: bool) -> list[Move]:
        """Moves the buffers into the arena, unless they stay outside; returns the storages that they left."""
        ...

    def check_views(self) -> None:
        """Raises UnsupportedTable unless the tensors of state_dict() are those that are protected."""
        ...

    def watch(self, before: Callable[[], None], capture: Callable[[int, Ids], None]) -> list[Before]:
        """Calls `before` before a batch in training, and `capture` with a table and its changed entries."""
        ...

    def mark_clean(self) -> None:
        """Accepts the buffers' present versions as declared."""
        ...

    def is_written(self) -> bool:
        """Whether a buffer was written in place since `mark_clean`."""
        ...

    def check_storage(self) -> None:
        """Raises UndeclaredWrite if the buffers are not the protected ones any more."""
        ...

    def state(self) -> dict[str, Any]:
        """The counters that are not per entry."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores them."""
        ...
