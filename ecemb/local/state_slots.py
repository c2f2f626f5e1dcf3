"""Where replicated state is kept: two slots of the arena, and this process's memory.

The slots hold the last two transactions, each a share of the whole: some of its slices. A rank gets the other
slices from other ranks, at a restart and in an abort (`ecemb.recovery.state_slices`).

Invariant: the slot of the last committed transaction is never written. Must not know: the content of
replicated state.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..arena.arena import Arena
from ..arena.header import NONE, Word
from ..coding.placement import WHOLE, Share
from ..errors import InconsistentArenas

_SLOTS = {
    "slot0": (Word.SLOT0_LABEL, Word.SLOT0_BYTES),
    "slot1": (Word.SLOT1_LABEL, Word.SLOT1_BYTES),
}
"""Regions, each with its words."""


class StateStore(Protocol):
    """The place that `ReplicatedState` is saved to, and loaded from if its share is the whole."""

    @property
    def share(self) -> Share:
        """The part of the state that is kept here."""
        ...

    def open(self, transaction: int, size_bytes: int) -> NDArray[np.uint8]:
        """Reserves uint8 [size_bytes] for a transaction's state, which is void until it is sealed."""
        ...

    def seal(self, transaction: int) -> None:
        """Records that the state of `transaction` is complete."""
        ...

    def read(self, transaction: int) -> NDArray[np.uint8]:
        """The state of a transaction, uint8, a view."""
        ...


class Slots:
    """The two versions of replicated state in an arena. Only the uncommitted one is written.

    Args:
        arena: holds the regions "slot0" and "slot1" and the words `slot0_label`, `slot0_bytes`, ....
        share: the part of the state that this rank's slots hold.
    """

    def __init__(self, arena: Arena, share: Share = WHOLE) -> None:
        self._arena = arena
        self.share = share

    def open(self, transaction: int, size_bytes: int) -> NDArray[np.uint8]:
        """Reserves uint8 [size_bytes] for a transaction's state; the slot is void until it is sealed."""
        slot = self._free()
        label, used = _SLOTS[slot]
        self._arena.set(label, NONE)
        self._arena.reserve(slot, size_bytes, spare_bytes=0)  # it rarely grows again
        self._arena.set(used, size_bytes)
        return self._arena.region(slot)[:size_bytes]

    def seal(self, transaction: int) -> None:
        """Records that the opened slot holds the complete state of `transaction`."""
        label, _ = _SLOTS[self._free()]
        self._arena.set(label, transaction)

    def read(self, transaction: int) -> NDArray[np.uint8]:
        """The state of a transaction, uint8, a view.

        Raises:
            InconsistentArenas: neither slot holds it.
            ArenaDamaged: the slot claims more bytes than are reserved.
        """
        labels = {slot: self._arena.get(label) for slot, (label, _) in _SLOTS.items()}
        found = [slot for slot, label in labels.items() if label == transaction]
        if len(found) != 1:
            raise InconsistentArenas(
                f"the replicated state of transaction {transaction} is not in exactly one of the slots, "
                f"which hold {list(labels.values())}: no failure leaves this behind; the arena's memory is "
                f"damaged. {self._arena.way_out}"
            )
        return self._arena.filled(found[0], _SLOTS[found[0]][1])

    def _free(self) -> str:
        committed = self._arena.get(Word.COMMITTED)
        others = [slot for slot, (label, _) in _SLOTS.items() if self._arena.get(label) != committed]
        return others[-1] if others else next(iter(_SLOTS))  # a new arena has committed nothing


class StateCopy:
    """Replicated state in this process's memory, whole.

    Args:
        memory: a saved state; none by default.
    """

    share: Share = WHOLE

    def __init__(self, memory: NDArray[np.uint8] | None = None) -> None:
        self._memory = np.empty(0, np.uint8) if memory is None else memory

    def open(self, transaction: int, size_bytes: int) -> NDArray[np.uint8]:
        """See `StateStore.open`."""
        if len(self._memory) != size_bytes:
            self._memory = np.empty(size_bytes, np.uint8)
        return self._memory

    def seal(self, transaction: int) -> None:
        """See `StateStore.seal`."""

    def read(self, transaction: int) -> NDArray[np.uint8]:
        """The state that was saved last."""
        return self._memory
