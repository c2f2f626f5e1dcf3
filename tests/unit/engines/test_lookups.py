"""Tables under stock optimizers whose rows are on their way: every lookup waits for those that it reads."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ecemb.coding.rows import Table, arrange
from ecemb.engines import sparse
from ecemb.engines.contract import Hooks, Ids
from ecemb.engines.discover import Tables, find
from ecemb.engines.discover import tables as live_tables
from ecemb.kernels import contract
from ecemb.nn import ShardedEmbedding, ShardedEmbeddingBag, ShardedTable
from support.arriving_rows import Arriving
from support.processes import run_ranks
from support.stepping import Stepping

ROWS, DIM, STEPS = 30, 4, 4
Build = Callable[[], nn.Module]
BUILDS: dict[str, Build] = {
    "embedding": lambda: nn.Embedding(ROWS, DIM, sparse=True),
    "embedding, padding": lambda: nn.Embedding(ROWS, DIM, sparse=True, padding_idx=2),
    "bag": lambda: nn.EmbeddingBag(ROWS, DIM, sparse=True, mode="sum"),
    "sharded": lambda: ShardedEmbedding(ROWS, DIM),
    "sharded bag": lambda: ShardedEmbeddingBag(ROWS, DIM),
}
pytestmark = pytest.mark.usefixtures("checked_sparse_tensors")
every_build = pytest.mark.parametrize("name", list(BUILDS))


class Model(nn.Module):
    """Two tables, and a dense layer over the first one's mean."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.user, self.item = build(), build()
        self.over = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.over(self.user(ids)) + self.item(ids % 7).sum()).sum()


class Job(Stepping):
    """A model whose tables are in memory that lives here; its rows come when they are waited for."""

    def __init__(self, build: Build, *, arriving: bool = True, seed: int = 3) -> None:
        torch.manual_seed(seed)
        self.model = Model(build)
        modules = {"user": self.model.user, "item": self.model.item}
        weights = [module.weight for module in modules.values()]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adagrad(weights, lr=0.5),
            torch.optim.SGD(self.model.over.parameters(), lr=0.5),
        ]
        given = {} if isinstance(self.model.user, ShardedTable) else modules
        self.tables, _ = find(self.model, given, self.optimizers)
        layouts = [table.layout for table in self.tables.tables]
        starts, size = arrange(layouts)
        self.memory = np.zeros(size, np.uint8)
        kernels = contract.get_kernels("reference")
        stored = [Table(layout, self.memory, at, kernels) for layout, at in zip(layouts, starts, strict=True)]
        self.tables.place(stored, fresh=True)
        self.hooks = Hooks(self._capture, lambda: self.is_open, list)
        if arriving:
            self.arriving = Arriving(layouts, [table.columns for table in stored])
            self.hooks.ensure, self.hooks.ensure_all = self.arriving.ensure, self.arriving.ensure_all
        self.tables.watch(self.hooks)

    def train(self, ids: Tensor) -> Tensor:
        with self.step():
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = self.model(ids)
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
        return loss.detach()

    def _capture(self, table: int, ids: Ids) -> None:
        if self.hooks.ensure is not None:
            self.arriving.assert_there(table, ids)


def batches() -> list[Tensor]:
    return [
        torch.randint(ROWS // 2, (3, 2), generator=torch.Generator().manual_seed(i)) for i in range(STEPS)
    ]


@every_build
def test_training_gets_the_bits_of_an_undisturbed_run(name: str) -> None:
    job, plain = Job(BUILDS[name]), Job(BUILDS[name], arriving=False)
    assert not job.tables.unannounced
    for ids in batches():
        assert torch.equal(job.train(ids), plain.train(ids))
        assert not job.arriving.is_whole
    seen = set(torch.cat(batches()).reshape(-1).tolist())
    assert set(np.flatnonzero(job.arriving.there[0]).tolist()) == seen
    for index in range(2):
        job.tables.wait_for_table(index)
    assert job.memory.tobytes() == plain.memory.tobytes()


@every_build
def test_lookups_without_a_gradient_wait_inside_and_outside_of_steps(name: str) -> None:
    job, plain = Job(BUILDS[name]), Job(BUILDS[name], arriving=False)
    first, second, third, fourth = batches()
    with torch.no_grad():
        assert torch.equal(job.model(first), plain.model(first))
    assert torch.equal(job.model.eval()(second), plain.model(second))
    assert torch.equal(job.model.user.forward(third), plain.model.user(third))  # past all other hooks
    with job.step(), torch.inference_mode():
        assert torch.equal(job.model.user(input=fourth), plain.model.user(fourth))
    assert not job.arriving.is_whole


@every_build
def test_a_lookup_that_does_not_wait_would_be_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_rows", lambda *_: np.empty(0, np.int64))
    job = Job(BUILDS[name])
    with pytest.raises(AssertionError, match="captured before they are there"):
        job.train(batches()[0])
    assert torch.isnan(job.model(batches()[0]))


def test_a_read_past_the_module_is_noticed_when_it_is_trained() -> None:
    job = Job(BUILDS["embedding"])
    read = functional.embedding(torch.tensor([1]), job.model.user.weight, sparse=True)
    with job.step():
        read.sum().backward()
        with pytest.raises(AssertionError, match="captured before they are there"):
            job.optimizers[0].step()


@every_build
def test_ids_that_a_table_does_not_have_raise_as_before(name: str) -> None:
    for ids in (
        torch.tensor([[ROWS]]),
        torch.tensor([[-1]]),
        torch.tensor([[1.5]]),
        torch.tensor([[2]]).bool(),
    ):
        kinds = []
        for arriving in (False, True):
            with pytest.raises(Exception) as raised:
                Job(BUILDS[name], arriving=arriving).model.user(ids)
            kinds.append((raised.type, str(raised.value)))
        assert kinds[0] == kinds[1]


@every_build
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_may_be_empty_and_of_either_type(name: str, dtype: torch.dtype) -> None:
    job = Job(BUILDS[name])
    job.model.user(torch.empty((0, 2), dtype=dtype))
    assert not job.arriving.calls
    job.model.user(torch.tensor([[4, 4]], dtype=dtype))
    assert np.flatnonzero(job.arriving.there[0]).tolist() == [4]


# --- reads of whole tables ----------------------------------------------------------------------


WHOLE: dict[str, Callable[[Job], Any]] = {
    "model": lambda job: job.model.state_dict(),
    "optimizer": lambda job: job.optimizers[0].state_dict(),
    "another optimizer": lambda job: job.optimizers[1].state_dict(),
    "live tables": lambda job: [table.tensors for table in live_tables(job.model)],
}


@every_build
@pytest.mark.parametrize("read", list(WHOLE))
def test_what_shows_whole_tables_waits_for_all_rows(name: str, read: str) -> None:
    job = Job(BUILDS[name])
    WHOLE[read](job)
    assert job.arriving.is_whole


def test_one_tables_state_dict_waits_for_that_table_only() -> None:
    job = Job(BUILDS["embedding"])
    shown = job.model.item.state_dict()
    assert not torch.isnan(shown["weight"]).any()
    assert [there.all() for there in job.arriving.there] == [False, True]


def test_rows_declared_by_hand_are_there_before_they_are_captured() -> None:
    job = Job(BUILDS["embedding"])
    with job.step(), torch.no_grad():
        job.tables.touch("user", torch.tensor([5, 1, 5]))
        assert not torch.isnan(job.model.user.weight[[1, 5]]).any()
        job.model.user.weight[[1, 5]] += 1
        assert [int(there.sum()) for there in job.arriving.there] == [2, 0]
        job.tables.touch("item")
    assert [bool(there.all()) for there in job.arriving.there] == [False, True]


def test_loading_in_a_step_captures_rows_that_are_there() -> None:
    job, plain = Job(BUILDS["embedding"]), Job(BUILDS["embedding"], arriving=False, seed=4)
    with job.step():
        job.model.load_state_dict(plain.model.state_dict())
    assert job.arriving.is_whole
    assert torch.equal(job.model.user.weight, plain.model.user.weight)


# --- which lookups are announced ----------------------------------------------------------------


class Hashed(nn.Embedding):
    """Its rows are not its arguments."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input % self.num_embeddings)


def found(model: nn.Module, tables: dict[str, nn.Module]) -> Tables:
    return find(model, tables, [])[0]


def test_tables_whose_lookups_are_not_seen_are_named() -> None:
    class Tied(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.again = weight

    tables: dict[str, nn.Module] = {
        "plain": nn.Embedding(5, 2, sparse=True),
        "hashed": Hashed(5, 2, sparse=True),
        "replaced": nn.Embedding(5, 2, sparse=True),
        "tied": nn.EmbeddingBag(5, 2, sparse=True),
        "apart": nn.Embedding(5, 2, sparse=True),
    }
    tables["replaced"].forward = tables["replaced"].forward
    model = nn.ModuleDict({"tables": nn.ModuleDict(tables), "tied": Tied(tables["tied"].weight)})
    assert found(model, tables).unannounced == [1, 2, 3]
    assert found(nn.Module(), tables).unannounced == [1, 2]  # of the model, only the tables are known


def test_unannounced_tables_get_no_hook_for_lookups() -> None:
    job = Job(lambda: Hashed(ROWS, DIM, sparse=True))
    assert job.tables.unannounced == [0, 1]
    assert torch.isnan(job.model(torch.tensor([[1]])))
    job.model.state_dict()
    assert job.arriving.is_whole


# --- the end of it ------------------------------------------------------------------------------


@every_build
def test_nothing_is_called_when_all_rows_are_there(name: str) -> None:
    job = Job(BUILDS[name])
    job.train(batches()[0])
    job.tables.wait_for_table(0)
    job.tables.wait_for_table(1)
    job.tables.all_are_there()
    calls = job.arriving.calls
    job.train(batches()[1])
    job.model.state_dict(), job.optimizers[0].state_dict()
    assert job.arriving.calls == calls and job.hooks.ensure is None and job.hooks.ensure_all is None


@every_build
def test_unwatched_tables_wait_for_nothing_and_have_their_own_methods(name: str) -> None:
    job = Job(BUILDS[name])
    job.tables.unwatch()
    job.model(batches()[0])
    job.model.state_dict(), job.optimizers[0].state_dict()
    assert not job.arriving.calls
    assert not {"forward", "_route"} & set(vars(job.model.user)) and "state_dict" not in vars(
        job.optimizers[0]
    )


@every_build
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_a_module_wait_for_nothing(name: str, copied: Callable[[Any], Any]) -> None:
    job = Job(BUILDS[name])
    other = copied(job.model)
    other(batches()[0]), other.state_dict()
    assert not job.arriving.calls
    assert torch.isnan(other.user.weight).all()
    job.model(batches()[0])
    assert job.arriving.calls


def test_a_copied_optimizer_waits_for_nothing() -> None:
    job = Job(BUILDS["embedding"])
    copy.deepcopy(job.optimizers[0]).state_dict()
    pickle.loads(pickle.dumps(job.optimizers[0])).state_dict()
    assert not job.arriving.calls


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_models_wait_for_their_rows() -> None:
    job, plain = Job(BUILDS["embedding"]), Job(BUILDS["embedding"], arriving=False)
    compiled = torch.compile(job.model, backend="eager")
    for ids in batches():
        assert torch.equal(compiled(ids), plain.model(ids))
    assert not job.arriving.is_whole


# --- over ranks ---------------------------------------------------------------------------------


def _train_on_ranks(rank: int, arriving_on: int) -> bytes:
    job = Job(BUILDS["sharded"], arriving=rank == arriving_on)
    for step in range(STEPS):
        ids = torch.randint(ROWS, (2,), generator=torch.Generator().manual_seed(10 * step + rank))
        job.train(ids.reshape(1, 2))
    if rank == arriving_on:
        assert not job.arriving.is_whole
        for index in range(2):
            job.tables.wait_for_table(index)
    return job.memory.tobytes()


def _both() -> bool:
    rank = dist.get_rank()
    return _train_on_ranks(rank, 1) == _train_on_ranks(rank, -1)


def test_an_owner_waits_for_rows_that_other_ranks_look_up() -> None:
    assert run_ranks(2, _both) == [True, True]
