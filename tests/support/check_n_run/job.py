"""All ranks of a job in one process, with Check-N-Run below parity: it saves and resumes as ecemb does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baselines.check_n_run.durable import DurableTier
from ecemb.checkpoint import Piece
from support.check_n_run.training import DIM, ROWS, changed, state

COLUMNS = [["weight", "float32", DIM], ["sum", "float32", 1]]
RUNS = {"weight": 7, "sum": 11}
"""Rows of a piece, by column."""


class Job:
    """All ranks of a job in one process, which saves and resumes as ecemb does; it trains as `Life` does.

    Args:
        target: of its checkpoints.
        memory: for copies.
        ranks: how many.
        lineage: of the training.
        resumes: from its newest checkpoint, if there is one; else memory had survived, or it begins.
        runs: rows of a piece, by column.
        options: of the tiers.
    """

    def __init__(
        self,
        target: str | Path,
        memory: Path,
        ranks: int = 2,
        *,
        lineage: str = "one",
        resumes: bool = True,
        runs: Mapping[str, int] = RUNS,
        **options: Any,
    ) -> None:
        self.runs = runs
        self.tiers = [DurableTier(target, memory, **options) for _ in range(ranks)]
        bounds = [ROWS * rank // ranks for rank in range(ranks + 1)]
        self.held = [range(*ends) for ends in pairwise(bounds)]
        self.tensors = [self.two_dimensional(state(0), held) for held in self.held]
        self.head, self.next, self.lineage = torch.tensor(0.5), 0, lineage
        stored = self.tiers[-1].newest() if resumes else None
        if stored is not None:
            self.next = stored.step
        for rank, tier in enumerate(self.tiers):
            if stored is not None:
                size = stored.facts["world_size"]
                tier.read(stored, [one for one in self.rows(rank) if one.table == "table" or rank < size])
                source = rank if rank < size else 0
                own, head = torch.zeros(3, dtype=torch.int64), torch.tensor(0.0)
                tier.read(stored, [Piece("head", (), 0, head)])
                tier.read(stored, [Piece(f"rank_state/{source}", (3,), 0, own)])
                assert own.tolist() == [source] * 3 and head == stored.step + 0.5
            tier.follow({"table": self.held[rank], f"own/rank{rank}": range(rank)})

    def step(self) -> None:
        rows = changed(self.next)
        for tier, held, tensors in zip(self.tiers, self.held, self.tensors, strict=True):
            here = rows[(rows >= held.start) & (rows < held.stop)] - held.start
            if len(here):
                tier.touched("table", here)
                tensors["weight"][here] = float(self.next) * torch.arange(1, DIM + 1)
                tensors["sum"][here] = float(self.next)
        self.next += 1

    def save(self, keep: int = 1) -> bool:
        """As `guard.save`; returns whether there was something to save."""
        ranks = list(range(len(self.tiers)))
        first, facts = self.tiers[0], self.facts()
        if not (token := first.prepare(self.next, facts)):
            return False
        try:
            for rank, tier in enumerate(self.tiers):
                tier.take(token, rank, self.pieces(rank))
            for tensors in self.tensors:  # the next step is here before what was taken is written
                kept = {name: tensor.clone() for name, tensor in tensors.items()}
                for tensor in tensors.values():
                    tensor.fill_(-1.0)
                tensors |= kept
            receipts = [self.tiers[rank].write(token, rank, len(ranks), []) for rank in reversed(ranks)]
            first.commit(token, facts, receipts)
            first.retain(keep)
        except Exception:
            with suppress(Exception):  # as `guard.save`, which logs it
                first.discard(token)
            raise
        return True

    def pieces(self, rank: int) -> list[Piece]:
        self.head.fill_(self.next + 0.5)
        dense = [Piece("head", (), 0, self.head)] if rank == len(self.tiers) - 1 else []
        own = Piece(f"rank_state/{rank}", (3,), 0, torch.tensor([rank] * 3))
        return [*self.rows(rank), *dense, own]

    def rows(self, rank: int) -> list[Piece]:
        held = self.held[rank]
        found = [
            Piece(f"table.{name}", (ROWS, tensor.shape[1]), held.start + at, tensor[at : at + run], "table")
            for name, run in self.runs.items()
            for tensor in [self.tensors[rank][name]]
            for at in range(0, len(held), run)
        ]
        key = f"own/rank{rank}"  # by hand; rank 0 has no row
        return [*found, Piece(f"{key}.weight", (rank, 2), 0, torch.ones(rank, 2), key)]

    def facts(self) -> dict[str, Any]:
        tables = [
            [["table", ROWS, None, COLUMNS], ["own", None, rank, [["weight", "float32", 2]]]]
            for rank in range(len(self.tiers))
        ]
        common = {"step": self.next, "lineage": self.lineage, "job": "job"}
        return {**common, "world_size": len(self.tiers), "tables": tables}

    def is_right(self) -> bool:
        wanted = [self.two_dimensional(state(self.next), held) for held in self.held]
        return all(
            torch.equal(tensor, there[name])
            for there, tensors in zip(wanted, self.tensors, strict=True)
            for name, tensor in tensors.items()
        )

    @staticmethod
    def two_dimensional(tensors: dict[str, Tensor], held: range) -> dict[str, Tensor]:
        part = slice(held.start, held.stop)
        return {name: tensor[part].reshape(len(held), -1) for name, tensor in tensors.items()}
