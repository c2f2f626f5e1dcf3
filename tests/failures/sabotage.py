"""Recovery with a part left out, to see that the comparison notices. Installed in workers under test.

Each part must be one whose absence lets training go on and end as if nothing were wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from failures.plan import Sabotage

from ecemb import recovery
from ecemb.journal import RowJournal
from ecemb.memory import RankMemory
from ecemb.rankstate import RankState
from ecemb.replicated import ReplicatedState


def install(part: Sabotage) -> None:
    """Leave out a part of every recovery."""
    {
        "undo": _no_undo,
        "redo": _no_redo,
        "generators": _no_generators,
        "replicated": _no_replicated,
        "rebuild": _no_rebuild,
    }[part]()


def _no_undo() -> None:
    RowJournal.undo = lambda self: 0


def _no_redo() -> None:
    decide = RankMemory.decide

    def without_parity(self: RankMemory, transaction: int) -> Any:
        parity, self.parity = self.parity, None
        try:
            return decide(self, transaction)
        finally:
            self.parity = parity

    RankMemory.decide = without_parity


def _no_generators() -> None:
    unpack = RankState.unpack

    def but_generators(self: RankState, data: bytes) -> None:
        state = torch.get_rng_state()
        unpack(self, data)
        torch.set_rng_state(state)

    RankState.unpack = but_generators


def _no_replicated() -> None:
    ReplicatedState.load = lambda self, slots, transaction: None


def _no_rebuild() -> None:
    recovery._rebuild = lambda *args: 0
    recovery._verify = lambda *args: None
