"""CPR-MFU counts each lookup, also of tables whose owners see a row once in a batch."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

import ecemb
from baselines.cpr.accesses import Accesses
from baselines.cpr.saving import Saving
from support.processes import run_ranks

RANKS, ROWS, STEPS = 3, 40, 5


def batch(rank: int, step: int) -> torch.Tensor:
    """Ids [8, 2] of a rank, in which some occur often."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return (ROWS * torch.rand(8, 2, generator=generator) ** 3).long()


def counts_of_a_rank() -> tuple[range, list[int], list[int]]:
    model = torch.nn.ModuleDict({name: ecemb.nn.ShardedEmbeddingBag(ROWS, 4) for name in ("user", "item")})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    tables = ecemb.tables(model, optimizers=optimizer)
    saving = Saving(8, "mfu", share=1.0)
    saving.watch(tables, {table.name: 100 for table in tables}, dict(model.items()))
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = batch(dist.get_rank(), step)
        loss = model["user"](ids).sum() + model["user"](ids[:2]).sum() + model["item"](ids % 7).sum()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model["user"](ids)  # an evaluation is no access
        if step == 2:
            saving.count_lookups()  # in two parts
    assert saving.memory_bytes > 0
    saving.count_lookups()
    assert saving.sent_bytes > 0
    kept = saving.lasting()
    saving.unwatch()
    model["user"](batch(dist.get_rank(), 0))
    return model["user"].rows, kept["counts of user"].tolist(), kept["counts of item"].tolist()


def test_owners_count_what_all_ranks_look_up() -> None:
    user: Counter[int] = Counter()
    item: Counter[int] = Counter()
    for rank in range(RANKS):
        for step in range(STEPS):
            ids = batch(rank, step)
            user.update([*ids.reshape(-1).tolist(), *ids[:2].reshape(-1).tolist()])
            item.update((ids % 7).reshape(-1).tolist())
    assert max(user.values()) > RANKS * STEPS  # more often than there are batches
    for rows, of_user, of_item in run_ranks(RANKS, counts_of_a_rank):
        assert of_user == [user[row] for row in rows]
        assert of_item == [item[row] for row in rows]


def test_without_such_tables_nothing_is_sent() -> None:
    followed = Accesses({})
    assert followed.exchange() == {} and followed.sent_bytes == followed.memory_bytes == 0
