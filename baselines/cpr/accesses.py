"""How often rows are looked up, for tables whose owner can't see it: those of ecemb.nn.

A rank of ecemb.nn asks an owner for each row of its batch once, and gradients name each row once. So the
owner sees one change of a row in each batch, however often it was looked up. Here each rank keeps the ids
that it looks up, and owners the rows that changed. When a save is due, ranks give owners the numbers of their
lookups (chosen: a message in each step would cost more). Rows that changed count at once, by `Mfu.touch`;
what is added then is what they were looked up more often. It is forgotten where a failure comes first.

With TorchRec, each lookup is seen as it comes, and nothing of this is needed.

Must not know: which rows are worth saving.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ecemb.nn import ShardedEmbeddingBag


class Accesses:
    """Lookups of some tables since the last exchange. All ranks, with the same tables in the same order.

    Args:
        tables: by name; tables of a group of their own are left out, and count one access a batch (chosen).
    """

    def __init__(self, tables: Mapping[str, ShardedEmbeddingBag]) -> None:
        self._tables = {name: table for name, table in tables.items() if table.group is None}
        self._asked: dict[str, list[Tensor]] = {name: [] for name in self._tables}
        self._changed: dict[str, list[Tensor]] = {name: [] for name in self._tables}
        self._ends = [
            table.register_forward_pre_hook(partial(self._ask, name), with_kwargs=True)
            for name, table in self._tables.items()
        ]
        self.sent_bytes = 0

    def __contains__(self, table: str) -> bool:
        return table in self._tables

    @property
    def memory_bytes(self) -> int:
        """Of all that it keeps."""
        kept = (*self._asked.values(), *self._changed.values())
        return sum(ids.nbytes for of_table in kept for ids in of_table)

    def changed(self, table: str, rows: Tensor) -> None:
        """These rows of this rank's shard are about to change, and have been counted once.

        Args:
            table: which.
            rows: int64 of any shape, copied.
        """
        self._changed[table].append(rows.reshape(-1).clone())

    def exchange(self) -> dict[str, tuple[Tensor, Tensor]]:
        """What this rank's rows were looked up more often than they were counted. All ranks.

        Returns:
            By table: rows of the shard, int64 [m], each once, and how many times more, int64 [m], from 0.
        """
        if not self._tables:
            return {}
        ranks = dist.get_world_size()
        sizes = torch.zeros(ranks, len(self._tables), dtype=torch.int64)
        parts: list[list[Tensor]] = [[] for _ in range(ranks)]
        for number, (name, table) in enumerate(self._tables.items()):
            ids, times = _counted(self._asked[name])
            block = -(-table.num_embeddings // ranks)
            cuts = torch.searchsorted(ids, torch.arange(ranks + 1) * block)
            sizes[:, number] = cuts.diff()
            pairs = torch.stack([ids % block, times], dim=1)[cuts[0] : cuts[-1]]  # the table has no others
            for rank, part in enumerate(pairs.split(sizes[:, number].tolist())):
                parts[rank].append(part)
        given = torch.cat([part for of_rank in parts for part in of_rank])
        coming, got = sizes, given
        if ranks > 1:
            coming = torch.empty_like(sizes)
            dist.all_to_all_single(coming, sizes)
            got = torch.empty(int(coming.sum()), 2, dtype=torch.int64)
            dist.all_to_all_single(got, given, coming.sum(1).tolist(), sizes.sum(1).tolist())
            self.sent_bytes += given.nbytes + sizes.nbytes
        pieces = iter(got.split(coming.reshape(-1).tolist()))
        by_rank = [[next(pieces) for _ in self._tables] for _ in range(ranks)]
        found = {
            name: self._more(name, torch.cat([of_rank[number] for of_rank in by_rank]))
            for number, name in enumerate(self._tables)
        }
        self.forget()
        return found

    def forget(self) -> None:
        """Begins at 0."""
        for kept in (*self._asked.values(), *self._changed.values()):
            kept.clear()

    def end(self) -> None:
        """Follows the tables no more."""
        for end in self._ends:
            end.remove()
        self.forget()

    def _ask(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():  # evaluation changes no row
            ids: Tensor = args[0] if args else kwargs["input"]
            self._asked[name].append(ids.detach().reshape(-1).to(torch.int64, copy=True))

    def _more(self, name: str, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Lookups of all ranks less the times that rows were counted."""
        changed, counted = _counted(self._changed[name])
        rows, place = torch.unique(torch.cat([pairs[:, 0], changed]), return_inverse=True)
        times = torch.zeros(len(rows), dtype=torch.int64)
        times.index_add_(0, place, torch.cat([pairs[:, 1], -counted]))
        return rows, times.clamp_(min=0)


def _counted(ids: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids, ascending, and how often each is there; int64."""
    return torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *ids]), return_counts=True)
