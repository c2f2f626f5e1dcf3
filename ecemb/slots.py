"""Where replicated state is kept: two slots of the arena (D6), and this process's memory.

The slots hold the last two transactions; a restarted rank reads its own slot, a newcomer gets a survivor's.

Invariant: the slot of the last committed transaction is never written.
Must not know: what replicated state is made of.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .arena import Arena
from .errors import InconsistentArenas

_SLOTS = ("slot0", "slot1")


class StateStore(Protocol):
    """Where `ReplicatedState` is saved to and loaded from."""

    def open(self, transaction: int, size_bytes: int) -> NDArray[np.uint8]:
        """Room for a transaction's state, uint8 [size_bytes]; it is void until it is sealed."""
        ...

    def seal(self, transaction: int) -> None:
        """Says that the whole state of `transaction` is there."""
        ...

    def read(self, transaction: int) -> NDArray[np.uint8]:
        """The state of a transaction, uint8, a view."""
        ...


class Slots:
    """The two versions of replicated state in an arena; the one that is not committed is written.

    Args:
        arena: holds the regions "slot0" and "slot1" and the words `slot0_label`, `slot0_bytes`, ....
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def open(self, transaction: int, size_bytes: int) -> NDArray[np.uint8]:
        """Room for a transaction's state, uint8 [size_bytes]; the slot is void until it is sealed."""
        slot = self._free()
        self._arena.set(f"{slot}_label", -1)
        self._arena.reserve(slot, size_bytes, spare_bytes=0)  # it hardly ever grows again
        self._arena.set(f"{slot}_bytes", size_bytes)
        return self._arena.region(slot)[:size_bytes]

    def seal(self, transaction: int) -> None:
        """Says that the slot that was opened holds the whole state of `transaction`."""
        self._arena.set(f"{self._free()}_label", transaction)

    def read(self, transaction: int) -> NDArray[np.uint8]:
        """The state of a transaction, uint8, a view.

        Raises:
            InconsistentArenas: neither slot holds it.
            ArenaDamaged: the slot says that it holds more than it can.
        """
        labels = {slot: self._arena.get(f"{slot}_label") for slot in _SLOTS}
        found = [slot for slot, label in labels.items() if label == transaction]
        if len(found) != 1:
            raise InconsistentArenas(
                f"the replicated state of transaction {transaction} is not in one of the slots, which hold "
                f"{list(labels.values())}: no failure leaves this behind; the arena's memory is damaged. "
                f"{self._arena.way_out}"
            )
        return self._arena.filled(found[0], f"{found[0]}_bytes")

    def _free(self) -> str:
        committed = self._arena.get("committed")
        others = [slot for slot in _SLOTS if self._arena.get(f"{slot}_label") != committed]
        return others[-1] if others else _SLOTS[0]  # a new arena has committed nothing


class Savepoint:
    """Replicated state as it was when a step began, in this process's memory: what an abort goes back to."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return len(self._memory)

    def open(self, transaction: int, size_bytes: int) -> NDArray[np.uint8]:
        """See `StateStore.open`."""
        if len(self._memory) != size_bytes:
            self._memory = np.empty(size_bytes, np.uint8)
        return self._memory

    def seal(self, transaction: int) -> None:
        """See `StateStore.seal`."""

    def read(self, transaction: int) -> NDArray[np.uint8]:
        """What was saved last."""
        return self._memory
