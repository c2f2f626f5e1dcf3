"""TorchRec's MPZCH: maps that probe slots by a hash of the raw id, in FBGEMM's operator.

Owns one `HashedRemap` for each HashZchManagedCollisionModule of this rank. Its identities, scores and counts
by slot are one table of records. Which slots a batch takes, the operator alone knows, and its result names
all of them. So the tensors stay where they are, on a CUDA device as on the CPU, and the arena holds an image
of them: slots are marked after the operator has changed the tensors, and journalled from the image, which is
as it was before, when the transaction ends.

Must not know: journals, parity, other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..coding.rows import Column, Table, TableLayout
from ..errors import UnsupportedTable
from .engine import Ids
from .fbgemm import check_inside, local, own
from .remap_table import After, Before, RemapTable
from .residence import Move, Places

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
        self.tables: list[RemapTable] = [RemapTable(name, layout, is_apart=True)]
        held = [getattr(module, name) for name in self._names]
        self.parameters: list[nn.Parameter] = [one for one in held if isinstance(one, nn.Parameter)]
        self.spans: list[torch.Tensor] = []
        self._places = Places()
        self._versions: list[int] = []

    def tensors(self, table: int) -> dict[str, torch.Tensor]:
        """The buffers of the map."""
        return {name.lstrip("_"): getattr(self.module, name).detach() for name in self._names}

    def place(self, stored: Sequence[Table], *, fresh: bool) -> list[Move]:
        """Keeps the tensors where they are; the image is the business of all tables that stay apart."""
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
