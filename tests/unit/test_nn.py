"""Sharded tables, in real gloo processes, against torch's modules over the whole table."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ecemb import nn as adapter
from ecemb.errors import ConfigurationError, UsageError
from ecemb.nn import ShardedEmbedding, ShardedEmbeddingBag
from support.fork_server import fork_server

DIM = 4
DEADLINE_S = 300
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


# --- ranks: live processes that run functions sent to them ------------------------------------


class Ranks:
    """`world_size` processes in one gloo group; `ranks(function, *args)` runs it on all of them."""

    def __init__(self, world_size: int, store: str) -> None:
        context = fork_server()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, world_size, store), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __len__(self) -> int:
        return len(self._pipes)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(DEADLINE_S):
                pytest.fail(f"rank {rank} did not answer in {DEADLINE_S} s")
            result, failure = pipe.recv()
            results.append(result)
            if failure:
                failures.append(f"rank {rank}:\n{failure}")
        if failures:
            pytest.fail("\n".join(failures))
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(DEADLINE_S)
            process.kill()


def _serve(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    while (work := pipe.recv()) is not None:
        function, args = work
        try:
            pipe.send((_plain(function(*args)), None))
        except Exception:  # noqa: BLE001 (it is reported to the test)
            pipe.send((None, traceback.format_exc()))
    dist.destroy_process_group()


def _plain(value: Any) -> Any:
    """Tensors as (dtype, shape, bytes): these go through a pipe without shared memory."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return ("tensor", value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def tensors(value: Any) -> Any:
    if isinstance(value, tuple):
        _, dtype, shape, data = value
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return [tensors(item) for item in value]


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="N={}".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    running = Ranks(request.param, str(tmp_path_factory.mktemp("ranks") / "store"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    running = Ranks(2, str(tmp_path_factory.mktemp("two_ranks") / "store"))
    yield running
    running.close()


# --- what they run, and what it is compared with -------------------------------------------------


def full_table(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(rows)).to(dtype)


def table_of(rows: int, dtype: torch.dtype = torch.float32, **options: Any) -> ShardedEmbeddingBag:
    """The sharded table that holds this rank's rows of `full_table`."""
    table = ShardedEmbeddingBag(rows, DIM, dtype=dtype, **options)
    with torch.no_grad():
        table.weight.copy_(full_table(rows, dtype)[table.rows.start : table.rows.stop])
    return table


def batch_of(kind: str, rows: int, dtype: torch.dtype, rank: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """(ids, offsets, per-sample weights) of a rank: ids repeat, and bags are empty, on purpose."""
    random = torch.Generator().manual_seed(100 * rows + rank)

    def ids(*shape: int) -> Tensor:
        return torch.randint(rows, shape, generator=random)

    if kind == "matrix":
        batch, offsets = ids(3 + rank, 5), None
    elif kind == "jagged":
        batch, offsets = ids(11), torch.tensor([0, 0, 4, 5, 5, 9, 11])
    elif kind == "hot":
        batch, offsets = ids(300) % 2, torch.arange(0, 300, 100)
    elif kind == "some ranks empty":
        count = 0 if rank % 2 == 0 else 6
        batch, offsets = ids(count), torch.tensor([0, count // 2, count])
    elif kind == "no bags":
        batch, offsets = ids(0), torch.tensor([], dtype=torch.int64)
    else:
        assert kind == "empty matrix"
        batch, offsets = ids(2, 0), None
    return batch, offsets, torch.randn(batch.shape, generator=random).to(dtype)


KINDS = ["matrix", "jagged", "hot", "some ranks empty", "no bags", "empty matrix"]


def coefficients(out: Tensor) -> Tensor:
    """The gradient at the pooled rows; every entry is another."""
    return torch.linspace(-1, 2, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)


def look_up(kind: str, rows: int, dtype: torch.dtype, mode: str, weighted: bool) -> list[Tensor]:
    table = table_of(rows, dtype, mode=mode)
    batch, offsets, weights = batch_of(kind, rows, dtype, dist.get_rank())
    weights.requires_grad_(weighted)
    out = table(batch, offsets, weights if weighted else None)
    out.backward(coefficients(out))
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert (gradient._indices()[0].diff() > 0).all()
    with torch.no_grad():
        assert torch.equal(table(batch, offsets, weights if weighted else None), out)
    return [out, gradient.to_dense(), weights.grad if weighted else torch.empty(0)]


def expected(
    world_size: int, kind: str, rows: int, dtype: torch.dtype, mode: str, weighted: bool
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """(pooled rows by rank, the table's gradient in double, the weights' gradients by rank)."""
    whole = nn.EmbeddingBag.from_pretrained(full_table(rows, dtype), freeze=False, mode=mode)
    outs, weight_grads = [], []
    gradient = torch.zeros(rows, DIM, dtype=torch.float64)
    for rank in range(world_size):
        batch, offsets, weights = batch_of(kind, rows, dtype, rank)
        weights.requires_grad_(weighted)
        if kind == "empty matrix":  # which torch refuses
            batch, offsets, flat = batch.reshape(-1), torch.tensor([0, 0]), weights.reshape(-1)
        else:
            flat = weights
        out = whole(batch, offsets, flat if weighted else None)
        out.backward(coefficients(out))
        gradient += whole.weight.grad
        whole.zero_grad()
        outs.append(out.detach())
        weight_grads.append(weights.grad if weighted else torch.empty(0))
    return outs, gradient, weight_grads


# --- lookups --------------------------------------------------------------------------------------


MODES = ["sum", "mean", "weighted sum"]


@pytest.mark.parametrize(
    ("kind", "rows", "mode"),
    [
        (kind, rows, MODES[(i + j) % 3])
        for i, kind in enumerate(KINDS)
        for j, rows in enumerate((1, 5, 10, 64))  # uneven and empty shards
    ],
)
def test_agrees_with_torch(ranks: Ranks, kind: str, rows: int, mode: str) -> None:
    _agrees(ranks, kind, rows, torch.float32, mode)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_agrees_with_torch_in_every_dtype(ranks: Ranks, dtype: torch.dtype, mode: str) -> None:
    _agrees(ranks, "jagged", 10, dtype, mode)


def _agrees(ranks: Ranks, kind: str, rows: int, dtype: torch.dtype, mode: str) -> None:
    case = (kind, rows, dtype, mode.split()[-1], mode.startswith("weighted"))
    results = tensors(ranks(look_up, *case))
    outs, gradient, weight_grads = expected(len(ranks), *case)
    for (out, _, weight_grad), right, right_weight_grad in zip(results, outs, weight_grads, strict=True):
        assert torch.equal(out, right)  # pooled in torch's own order: not a bit differs
        assert torch.equal(weight_grad, right_weight_grad)
    shards = torch.cat([shard for _, shard, _ in results])
    tolerance = 16 * torch.finfo(dtype).eps * max(1.0, float(gradient.abs().max()))
    torch.testing.assert_close(shards.double(), gradient, rtol=0, atol=tolerance)


def look_up_rows(rows: int, dtype: torch.dtype, padding_idx: int | None) -> list[Tensor]:
    table = ShardedEmbedding(rows, DIM, dtype=dtype, padding_idx=padding_idx)
    with torch.no_grad():
        table.weight.copy_(full_table(rows, dtype)[table.rows.start : table.rows.stop])
    outs = [table(batch) for batch in batches_of_rows(rows, dist.get_rank())]
    torch.autograd.backward(outs, [coefficients(out) for out in outs])
    assert table.weight.grad.is_sparse
    return [*outs, table.weight.grad.to_dense()]


def batches_of_rows(rows: int, rank: int) -> list[Tensor]:
    """Ids in several shapes; some ranks look nothing up, and all ask for row 0."""
    random = torch.Generator().manual_seed(100 * rows + rank)
    shapes = [(7,), (3 + rank, 5), (2, 3, 4), (rank % 2, 2), ()]
    batches = [torch.randint(rows, shape, generator=random) for shape in shapes]
    batches[0][:3] = 0
    return [*batches[:-1], batches[-1].int()]


@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unpooled_lookups_agree_with_torch(
    ranks: Ranks, rows: int, dtype: torch.dtype, padding_idx: int | None
) -> None:
    whole = full_table(rows, dtype)
    if padding_idx is not None:
        whole[padding_idx] = 0
    gradient = torch.zeros(rows, DIM, dtype=torch.float64)
    results = tensors(ranks(look_up_rows, rows, dtype, padding_idx))
    for rank, (*outs, _) in enumerate(results):
        for batch, out in zip(batches_of_rows(rows, rank), outs, strict=True):
            assert torch.equal(out, whole[batch.long()])
            gradient.index_add_(0, batch.reshape(-1).long(), coefficients(out).double().reshape(-1, DIM))
    if padding_idx is not None:
        gradient[padding_idx] = 0
    shards = torch.cat([shard for *_, shard in results])
    tolerance = 16 * torch.finfo(dtype).eps * max(1.0, float(gradient.abs().max()))
    torch.testing.assert_close(shards.double(), gradient, rtol=0, atol=tolerance)


def refused_rows(culprit: int) -> str:
    table = ShardedEmbedding(10, DIM, name="items", padding_idx=3)
    try:
        table([3] if dist.get_rank() == culprit else torch.tensor([1]))
    except (AttributeError, ConfigurationError) as error:
        table(torch.tensor([[9]])).sum().backward()
        return str(error)
    return "nothing"


def test_a_bad_unpooled_input_on_one_rank_raises_on_all(ranks: Ranks) -> None:
    culprit = len(ranks) - 1
    *others, own = ranks(refused_rows, culprit)
    assert "no attribute" in own
    assert all("items: rank" in message and "refused its input" in message for message in others)


def shapes(rows: int) -> list[int]:
    table = ShardedEmbeddingBag(rows, DIM)
    assert len(table.rows) == len(table.weight)
    return [table.rows.start, table.rows.stop]


@pytest.mark.parametrize("rows", [1, 2, 5, 10, 1001])
def test_shards_are_ceil_blocks(ranks: Ranks, rows: int) -> None:
    block = -(-rows // len(ranks))
    starts = [min(rank * block, rows) for rank in range(len(ranks))]
    assert ranks(shapes, rows) == [[start, min(start + block, rows)] for start in starts]


def with_last_offset(rows: int) -> list[Tensor]:
    table = table_of(rows, include_last_offset=True)
    plain = table_of(rows)
    batch, offsets, _ = batch_of("jagged", rows, torch.float32, dist.get_rank())
    whole = torch.cat([offsets, torch.tensor([len(batch)])])
    matrix = batch[:10].reshape(5, 2).int()
    return [
        table(batch, whole),
        plain(batch, offsets),
        table(matrix),
        plain(matrix),
        table(batch[:0], torch.tensor([0])),
    ]


def test_include_last_offset(ranks: Ranks) -> None:
    for last, plain, matrix, plain_matrix, nothing in tensors(ranks(with_last_offset, 10)):
        assert torch.equal(last, plain)
        assert torch.equal(matrix, plain_matrix)
        assert nothing.shape == (0, DIM)


def sent_ids() -> int:
    """How many ids this rank sends for a batch that names row 0 and row 7 fifty times each."""
    sent = []
    real = dist.all_to_all_single

    def spy(output: Tensor, batch: Tensor, *args: Any, **options: Any) -> Any:
        sent.append((batch.dtype, len(batch)))
        return real(output, batch, *args, **options)

    table = table_of(10)
    dist.all_to_all_single = spy
    try:
        table(torch.tensor([0, 7] * 50), torch.tensor([0, 10]))
    finally:
        dist.all_to_all_single = real
    return sent[1][1]


def test_an_id_is_sent_once(two_ranks: Ranks) -> None:
    assert two_ranks(sent_ids) == [2, 2]


# --- training -------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "sparse_adam": torch.optim.SparseAdam,
}


def steps(table: nn.Module, optimizer: str, batches: list[list[Any]]) -> None:
    """One optimizer step for each list of micro-batches."""
    stepper = OPTIMIZERS[optimizer](table.parameters(), lr=0.1)
    for micro_batches in batches:
        stepper.zero_grad()
        for batch, offsets in micro_batches:
            table(batch, offsets).square().sum().backward()
        stepper.step()


def trained(optimizer: str, rows: int, dtype: torch.dtype) -> Tensor:
    table = table_of(rows, dtype)
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [batch_of(kind, rows, dtype, rank + size)[:2] for kind in ("jagged", "hot", "matrix")]
    steps(table, optimizer, [[parts[0]], [parts[1], parts[2], parts[0]], [parts[2]]])
    return table.weight


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rows", [5, 64])
def test_trains_like_the_whole_table(ranks: Ranks, optimizer: str, rows: int) -> None:
    size = len(ranks)
    whole = nn.EmbeddingBag.from_pretrained(
        full_table(rows, torch.float64), freeze=False, mode="sum", sparse=True
    )
    parts = {
        kind: [batch_of(kind, rows, torch.float64, rank + size)[:2] for rank in range(size)]
        for kind in ("jagged", "hot", "matrix")
    }
    steps(
        whole,
        optimizer,
        [parts["jagged"], parts["hot"] + parts["matrix"] + parts["jagged"], parts["matrix"]],
    )
    shards = tensors(ranks(trained, optimizer, rows, torch.float64))
    torch.testing.assert_close(torch.cat(shards), whole.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_agree_bit_for_bit(ranks: Ranks, dtype: torch.dtype) -> None:
    first, second = (ranks(trained, "adagrad", 10, dtype) for _ in range(2))
    assert first == second


# --- initial values -------------------------------------------------------------------------------


def uniform(rows: Tensor, generator: torch.Generator) -> None:
    rows.uniform_(-0.5, 0.5, generator=generator)


def initial(init: Any) -> list[Tensor]:
    torch.manual_seed(7)
    table = ShardedEmbeddingBag(9000, DIM, init=init)
    other = ShardedEmbeddingBag(9000, DIM, init=init)
    after = torch.rand(1)
    torch.manual_seed(7)
    with torch.device("meta"):
        late = ShardedEmbeddingBag(9000, DIM, init=init)
    assert late.weight.is_meta
    assert not torch.equal(table.weight, other.weight)
    late.to_empty(device="cpu")
    late.reset_parameters()
    assert torch.equal(late.weight, table.weight)
    return [table.weight, after]


@pytest.mark.parametrize("init", [None, uniform], ids=["normal", "uniform"])
def test_initial_values_do_not_depend_on_the_ranks(ranks: Ranks, init: Any) -> None:
    results = tensors(ranks(initial, init))
    torch.manual_seed(7)
    alone = ShardedEmbeddingBag(9000, DIM, init=init)
    ShardedEmbeddingBag(9000, DIM, init=init)
    assert torch.equal(torch.cat([shard for shard, _ in results]), alone.weight)
    after = torch.rand(1)
    assert all(torch.equal(draw, after) for _, draw in results)


def test_initial_values_are_standard_normal_and_the_generators() -> None:
    one, same, other = (
        ShardedEmbeddingBag(9000, 8, generator=torch.Generator().manual_seed(seed)).weight.detach()
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert abs(float(one.mean())) < 0.02
    assert abs(float(one.std()) - 1) < 0.02
    assert not torch.equal(one[:4096], one[4096:8192])


# --- without a group ------------------------------------------------------------------------------


def test_without_a_group_it_is_a_plain_embedding_bag() -> None:
    table = table_of(10, mode="mean")
    whole = nn.EmbeddingBag.from_pretrained(full_table(10, torch.float32), freeze=False)
    batch, offsets, _ = batch_of("jagged", 10, torch.float32, 0)
    out, right = table(batch, offsets), whole(batch, offsets)
    assert torch.equal(out, right)
    out.sum().backward()
    right.sum().backward()
    assert torch.equal(table.weight.grad.to_dense(), whole.weight.grad)
    assert table.rows == range(10)
    assert list(table.state_dict()) == ["weight"]
    assert "10, 4, mode='mean', rows=[0, 10)" in repr(table)


def test_frozen_tables_and_weights_that_need_no_gradient() -> None:
    table = table_of(10)
    table.weight.requires_grad_(False)
    assert not table(torch.tensor([[1, 2]])).requires_grad
    factors = torch.ones(1, 2, requires_grad=True)
    table(torch.tensor([[1, 2]]), None, factors).sum().backward()
    sums = full_table(10, torch.float32)[1:3].sum(1).reshape(1, 2)
    torch.testing.assert_close(factors.grad, sums)  # in which order a sum adds differs between processors
    assert table.weight.grad is None


# --- errors ---------------------------------------------------------------------------------------

GOOD = (torch.tensor([1, 2, 3]), torch.tensor([0, 2]), None)
BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "id too high": ((torch.tensor([1, 10]), torch.tensor([0]), None), "id 10 on rank"),
    "id negative": ((torch.tensor([[-3, 99]]), None, None), "id -3 on rank"),
    "float ids": ((torch.tensor([1.0]), torch.tensor([0]), None), "int64 or int32"),
    "no offsets": ((torch.tensor([1]), None, None), "[L] with offsets"),
    "offsets with a matrix": ((torch.tensor([[1]]), torch.tensor([0]), None), "[L] with offsets"),
    "three dimensions": ((torch.tensor([[[1]]]), None, None), "[L] with offsets"),
    "offsets begin late": ((torch.tensor([1, 2]), torch.tensor([1]), None), "begin with 0"),
    "offsets decrease": ((torch.tensor([1, 2]), torch.tensor([0, 2, 1]), None), "not decrease"),
    "offsets too long": ((torch.tensor([1, 2]), torch.tensor([0, 3]), None), "last offset is 3"),
    "offsets empty": ((torch.tensor([1]), torch.tensor([], dtype=torch.int64), None), "no bag"),
    "offsets of floats": ((torch.tensor([1]), torch.tensor([0.0]), None), "offsets must be"),
    "offsets of two dimensions": (
        (torch.tensor([1]), torch.tensor([[0]]), None),
        "offsets must be",
    ),
    "weights' shape": ((torch.tensor([[1, 2]]), None, torch.ones(2)), "per_sample_weights must"),
    "weights' dtype": (
        (torch.tensor([[1]]), None, torch.ones(1, 1, dtype=torch.float64)),
        "per_sample_weights must",
    ),
    "ids elsewhere": ((torch.empty(1, 1, dtype=torch.int64, device="meta"), None, None), "meta"),
    "no tensor": (([[1]], None, None), "no attribute"),
}


def refused(culprit: int, arguments: tuple[Any, ...]) -> list[str]:
    """What this rank's lookup raised when one rank's input was bad, and the lookup after it."""
    table = table_of(10, name="user")
    message = "nothing"
    try:
        table(*(arguments if dist.get_rank() == culprit else GOOD))
    except (ConfigurationError, AttributeError) as error:
        message = str(error)
    again = table(*GOOD)
    again.sum().backward()
    right = nn.functional.embedding_bag(GOOD[0], full_table(10, torch.float32), GOOD[1], mode="sum")
    assert torch.equal(again, right)
    return [message]


@pytest.mark.parametrize("case", BAD)
def test_a_bad_input_on_one_rank_raises_on_all(ranks: Ranks, case: str) -> None:
    arguments, words = BAD[case]
    culprit = len(ranks) - 1
    for rank, [message] in enumerate(ranks(refused, culprit, arguments)):
        if case.startswith("id "):
            assert message.startswith(f"user: {words} {culprit} is outside [0, 10)")
        elif rank == culprit:
            assert words in message
        else:
            assert message == f"user: rank {culprit} refused its input; its own error says why"


def built_differently(first: dict[str, Any], other: dict[str, Any]) -> str:
    """What this rank's lookup raised, when the last rank has built the table with other arguments."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    given = {"num_embeddings": 10, "embedding_dim": DIM} | (other if is_last else first)
    table = ShardedEmbeddingBag(given.pop("num_embeddings"), given.pop("embedding_dim"), name="user", **given)
    try:
        table(torch.tensor([[9, 0]]))
    except ConfigurationError as error:
        table_of(10)(torch.tensor([[1]])).sum().backward()  # the group can still be used
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        ({}, {"num_embeddings": 40}, "num_embeddings is 10 on rank 0 and 40"),
        ({}, {"num_embeddings": 3}, "num_embeddings is 10 on rank 0 and 3"),  # the last rank refuses its ids
        ({}, {"embedding_dim": DIM + 1}, f"embedding_dim is {DIM} on rank 0 and {DIM + 1}"),
        ({}, {"dtype": torch.float64}, "dtype is 'float32' on rank 0 and 'float64'"),
        ({"mode": "mean"}, {"mode": "sum"}, "mode is 'mean' on rank 0 and 'sum'"),
    ],
)
def test_tables_that_the_ranks_have_built_differently(
    ranks: Ranks, first: dict[str, Any], other: dict[str, Any], words: str
) -> None:
    if not (last := len(ranks) - 1):
        return  # nobody to differ from
    text = f"user is not the same on all ranks: {words} on rank {last}; build the table with the same"
    for message in ranks(built_differently, first, other):
        assert message.startswith(text), message


def test_weights_need_mode_sum() -> None:
    with pytest.raises(ConfigurationError, match='need mode "sum"'):
        table_of(10, mode="mean")(torch.tensor([[1]]), None, torch.ones(1, 1))


def test_include_last_offset_must_end_with_the_input() -> None:
    table = table_of(10, include_last_offset=True)
    with pytest.raises(ConfigurationError, match="last offset is 1, and there are 2 ids"):
        table(torch.tensor([1, 2]), torch.tensor([0, 1]))
    with pytest.raises(ConfigurationError, match="offsets are empty"):
        table(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((0, 4), {}, "at least 1"),
        ((4, 0), {}, "at least 1"),
        ((4, 4), {"mode": "max"}, '"sum" or "mean"'),
        ((4, 4), {"dtype": torch.int64}, "floating type"),
        ((4, 4), {"padding_idx": 4}, "padding_idx must be an id of the table, 0 to 3"),
    ],
)
def test_bad_arguments(arguments: Any, options: Any, words: str) -> None:
    build = ShardedEmbedding if "padding_idx" in options else ShardedEmbeddingBag
    with pytest.raises(ConfigurationError, match=words):
        build(*arguments, **options)


def test_a_table_that_was_built_before_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(10)
    monkeypatch.setattr(adapter, "_place", lambda group: (1, 4))
    with pytest.raises(UsageError, match="rank 0 of 1.* rank 1 of 4"):
        table(torch.tensor([[1]]))


def subgroup() -> list[Tensor]:
    group = dist.new_group([1])
    if dist.get_rank() == 0:
        with pytest.raises(ConfigurationError, match="not in the group"):
            ShardedEmbeddingBag(10, DIM, group=group)
        return []
    return [table_of(10, group=group)(torch.tensor([[9, 9]]))]


def test_groups(two_ranks: Ranks) -> None:
    nothing, [out] = tensors(two_ranks(subgroup))
    assert nothing == []
    assert torch.equal(out[0], 2 * full_table(10, torch.float32)[9])
