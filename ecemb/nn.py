"""Embeddings whose rows are sharded over the ranks of a process group.

Owns `ShardedEmbeddingBag` and `ShardedEmbedding`: the exchange of ids, rows and gradients between the ranks
that ask and the rows' owners.

Invariant: the result of a lookup or its backward depends only on the inputs of all ranks. Every sum is taken
in a fixed order (on the asking rank by position in the batch, on the owner by rank), never in order of
arrival, so two runs agree bit for bit.

Must not know: guards, arenas, codes. A model that uses it trains without ecemb's protection as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .errors import ConfigurationError, UsageError

__all__ = ["ShardedEmbedding", "ShardedEmbeddingBag"]

# Rows of a block, which is initialised from one seed. Whole blocks of the table are drawn, regardless of
# shards' begins, so that initial values don't depend on the number of ranks.
_INIT_ROWS = 4096

# A rank's verdict on its input, sent with the count of ids that it asks for and the facts of its table.
_FINE, _OUT_OF_RANGE, _REFUSED = 0, 1, 2

_MODES = ("sum", "mean", "none")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # others are sent as one number

T = TypeVar("T")

ALIKE = "build the table with the same arguments on all ranks"


class ShardedTable(nn.Module):
    """The shard of a table, its initial values, and the exchange of rows: the base of this module's classes.

    Attributes:
        weight: the shard, a parameter [local rows, embedding_dim].
        rows: the shard's rows of the table, a `range`: row i of `weight` is row `rows[i]`.
        rank: of this process within the group, at construction.
        world_size: of the group, at construction.
        mode: how rows are pooled: "sum", "mean", or "none".
    """

    weight: nn.Parameter
    mode: str = "none"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        init: Callable[[Tensor, torch.Generator], object] | None,
        generator: torch.Generator | None,
        name: str | None,
    ) -> None:
        super().__init__()
        self.name: str = name or f"{type(self).__name__}({num_embeddings}, {embedding_dim})"
        if num_embeddings < 1 or embedding_dim < 1:
            raise ConfigurationError(
                f"{self.name}: num_embeddings and embedding_dim must be at least 1, "
                f"got {num_embeddings} and {embedding_dim}"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.group = group
        self.rank: int
        self.world_size: int
        self.rank, self.world_size = _place(group)
        if self.rank < 0:
            raise ConfigurationError(
                f"{self.name}: this process is not in the group that it was given; "
                f"build the table on the group's members only"
            )
        self._block_rows = -(-num_embeddings // self.world_size)
        start = min(self.rank * self._block_rows, num_embeddings)
        self.rows: range = range(start, min(start + self._block_rows, num_embeddings))
        self._init = init
        self._seed = int(torch.randint(2**62, (), generator=generator, dtype=torch.int64, device="cpu"))

        shard = torch.empty(len(self.rows), embedding_dim, device=device, dtype=dtype)
        if not shard.is_floating_point():
            raise ConfigurationError(f"{self.name}: dtype must be a floating type, got {dtype}")
        self.weight = nn.Parameter(shard)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the shard with its initial values; not collective, does nothing on device "meta".

        Every block of 4096 rows of the table is drawn on the CPU from a generator seeded by the
        table's seed and the block's number. The table's seed was drawn at construction, so another
        call gives the same values again. If all ranks were seeded alike before construction (by
        `torch.manual_seed`, or `generator`), the whole table depends on neither the number of
        ranks nor the device.
        """
        if self.weight.is_meta or not self.rows:
            return
        generator = torch.Generator(device="cpu")
        for block in range(self.rows.start // _INIT_ROWS, -(-self.rows.stop // _INIT_ROWS)):
            start = block * _INIT_ROWS
            stop = min(start + _INIT_ROWS, self.num_embeddings)
            values = torch.empty(stop - start, self.embedding_dim, dtype=self.weight.dtype, device="cpu")
            generator.manual_seed((self._seed + block) % 2**63)
            if self._init is None:
                values.normal_(generator=generator)
            else:
                self._init(values, generator)
            first, last = max(start, self.rows.start), min(stop, self.rows.stop)
            shard = self.weight[first - self.rows.start : last - self.rows.start]
            shard.copy_(values[first - start : last - start])

    def _fetched(self, wanted: Callable[[], tuple[Tensor, T]]) -> tuple[Tensor, Tensor, T]:
        """The rows of a lookup. All ranks; raises on all of them if one rank's input breaks a rule.

        Args:
            wanted: checks the input, may raise, and returns the ids, int64 or int32 [m], and anything else.

        Returns:
            The distinct rows [r, embedding_dim]; the index of each id's row among them, int64 [m]; and what
            else `wanted` returned.
        """
        rank, world_size = _place(self.group)
        if (rank, world_size) != (self.rank, self.world_size):
            raise UsageError(
                f"{self.name} was built on rank {self.rank} of {self.world_size}, and the process "
                f"group now says rank {rank} of {world_size}; build the table after the group"
            )
        says, bad_id = _FINE, 0
        problem: Exception | None = None
        unique = position = torch.empty(0, dtype=torch.int64, device=self.weight.device)
        more: T | None = None
        try:
            ids, more = wanted()
            # `found` is sorted, so the ids of each owner are neighbours.
            found, position = _unique(ids.long())
            low, high = _listed(found[[0, -1]]) if found.numel() else (0, 0)
            if low < 0 or high >= self.num_embeddings:
                says, bad_id = _OUT_OF_RANGE, low if low < 0 else high
                problem = ConfigurationError(self._range_message(bad_id, self.rank))
            else:
                unique = found
        except Exception as error:  # noqa: BLE001 (raised after the others have learned of it)
            says, problem = _REFUSED, error
        route = self._route(unique, says, bad_id, problem)
        return cast(Tensor, _FetchRows.apply(self.weight, route)), position, cast(T, more)

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dtype not in (torch.int64, torch.int32):
            raise ConfigurationError(f"{self.name}: input must be int64 or int32, got {ids.dtype}")
        if ids.device != self.weight.device:
            raise ConfigurationError(
                f"{self.name}: input is on {ids.device} and the table on {self.weight.device}; move the input"
            )

    def _range_message(self, bad_id: int, rank: int) -> str:
        return (
            f"{self.name}: id {bad_id} on rank {rank} is outside [0, {self.num_embeddings}); "
            f"hash or map ids into the table before the lookup"
        )

    def _numbers(self) -> list[int]:
        """`facts_of` this table as 4 numbers, which ranks can send."""
        dtype, mode = self.weight.dtype, _MODES.index(self.mode)
        known = _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)
        return [self.num_embeddings, self.embedding_dim, known, mode]

    def _check_alike(self, facts: list[list[int]]) -> None:
        """Raises ConfigurationError, on all ranks, if the ranks have built different tables.

        Args:
            facts: for each of `_numbers`, its values by rank.
        """
        shown = [str(dtype).removeprefix("torch.") for dtype in _DTYPES] + ["another type"]
        names: list[Sequence[Any] | None] = [None, None, shown, _MODES]
        for fact, names_of, numbers in zip(facts_of(self), names, facts, strict=True):
            if len(set(numbers)) > 1:
                values = [number if names_of is None else names_of[number] for number in numbers]
                text = differing(fact, dict(enumerate(values)))
                raise ConfigurationError(f"{self.name} is not the same on all ranks: {text}; {ALIKE}")

    def _route(self, unique: Tensor, says: int, bad_id: int, problem: Exception | None) -> _Route:
        """Send every owner the ids of its rows that this rank wants; raise if any rank refused its input.

        The counts travel first, with each rank's verdict: no rank waits for one that has raised.
        """
        if self.world_size == 1:
            if problem is not None:
                raise problem
            return _Route(None, [unique.numel()], [unique.numel()], unique)
        device = self.weight.device
        starts = torch.arange(self.world_size + 1, dtype=torch.int64, device=device) * self._block_rows
        header = torch.empty(self.world_size, 7, dtype=torch.int64, device=device)
        header[:, 0] = torch.searchsorted(unique, starts).diff()
        header[:, 1:] = torch.tensor([says, bad_id, *self._numbers()], dtype=torch.int64, device="cpu")
        one_each = [1] * self.world_size
        received = _exchange(header, one_each, one_each, self.group)
        wanted, verdicts, bad_ids, *facts = _listed(received.t())
        self._check_alike(facts)
        if problem is not None:
            raise problem
        for rank, verdict in enumerate(verdicts):
            if verdict == _OUT_OF_RANGE:
                raise ConfigurationError(self._range_message(bad_ids[rank], rank))
            if verdict == _REFUSED:
                raise ConfigurationError(
                    f"{self.name}: rank {rank} refused its input; its own error says why"
                )
        asked = _listed(header[:, 0])
        ids = _exchange(unique, asked, wanted, self.group)
        return _Route(self.group, asked, wanted, ids - self.rows.start)


class ShardedEmbeddingBag(ShardedTable):
    """`torch.nn.EmbeddingBag` over a table that is sharded by rows over a process group.

    With N ranks and R rows, rank p owns the rows [p·b, (p+1)·b) with b = ceil(R/N), cut off at R:
    the last shards may be shorter, or empty. Each rank looks up a batch of its own, in any rows of
    the table. Without a process group, or with one rank, this is a plain embedding bag.

    **All ranks must call forward equally often, in the same order, and backward likewise**: both
    are collective. Batches may differ in size and may be empty. An input that is refused on one
    rank raises on all of them. A rank whose loss doesn't depend on its lookup leaves the others
    waiting in backward; multiply by zero instead of leaving it out.

    **Gradients** go to `weight.grad` as a sparse tensor over the shard's rows, which torch's `SGD`,
    `Adagrad` and `SparseAdam` take; one backward names each row once, in order. It is the gradient
    of the **sum of all ranks' losses**: each rank's backward adds its part, nothing is averaged. To
    train on the mean over the global batch, divide the local loss by the number of ranks. The
    gradients of a model's dense parameters are the user's to reduce.

    Args:
        num_embeddings: rows R of the whole table, at least 1.
        embedding_dim: values of a row, at least 1.
        mode: how the rows of one bag are pooled, "sum" or "mean". An empty bag gives zeros.
        include_last_offset: offsets have one more entry, the number of ids, as in
            `torch.nn.EmbeddingBag`.
        group: process group of the ranks that share the table; the default group when None.
        device: of the shard. On "meta" nothing is allocated, and the process that materialises `weight`
            calls `reset_parameters()`.
        dtype: of the shard, a floating type; torch's default when None.
        init: fills a part of the table in place: called as `init(rows, generator)` with a CPU
            tensor [m, dim] of the table's dtype, and must take all randomness from the generator,
            e.g. `lambda rows, generator: rows.uniform_(-0.1, 0.1, generator=generator)`.
            Standard normal when None, like `torch.nn.EmbeddingBag`.
        generator: CPU generator to draw the table's seed from; torch's default one when None. One
            number is drawn, whatever the device.
        name: of the table, for error messages.

    Attributes:
        weight: the shard, a parameter [local rows, embedding_dim].
        rows: the shard's rows of the table, a `range`: row i of `weight` is row `rows[i]`.
        rank: of this process within the group, at construction.
        world_size: of the group, at construction.

    Raises:
        ConfigurationError: an argument breaks a rule.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: Literal["sum", "mean"] = "sum",
        include_last_offset: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        init: Callable[[Tensor, torch.Generator], object] | None = None,
        generator: torch.Generator | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            group=group,
            device=device,
            dtype=dtype,
            init=init,
            generator=generator,
            name=name,
        )
        if mode not in ("sum", "mean"):
            raise ConfigurationError(f'{self.name}: mode must be "sum" or "mean", got {mode!r}')
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pool rows of the table by bags. All ranks; see the class about order.

        Args:
            input: ids, int64 or int32, [L] with `offsets` or [B, L] without (each row is a bag), on
                the shard's device. Read.
            offsets: where each bag begins, integers [B], from 0, not decreasing; the last bag ends
                with the input. With `include_last_offset` [B+1], and the last is L. Read.
            per_sample_weights: factors of the rows, of the shard's dtype and the input's shape;
                only in mode "sum". Read; gets a gradient if it requires one.

        Returns:
            Pooled rows [B, embedding_dim], of the shard's dtype and on its device.

        Raises:
            ConfigurationError: on all ranks, if any rank's input breaks a rule; for an id that is
                out of range the message has the id, the rank and the table. Or if the ranks have
                built the table with different sizes, types or modes. No row has travelled then, and
                the group can still be used.
            UsageError: the table was built for another process group.
        """
        rows, position, begins = self._fetched(
            lambda: (input.reshape(-1), self._offsets(input, offsets, per_sample_weights))
        )
        factors = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        return functional.embedding_bag(
            position,
            rows,
            begins,
            mode=self.mode,
            per_sample_weights=factors,
            include_last_offset=self.include_last_offset,
        )

    def extra_repr(self) -> str:
        """The arguments, and this rank's part of the table."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}, "
            f"rows=[{self.rows.start}, {self.rows.stop})"
        )

    def _offsets(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        """The begins of the bags, int64; raises unless types, shapes and order are right."""
        self._check_ids(ids)
        if weights is not None:
            self._check_weights(weights, ids)
        if offsets is not None and ids.dim() == 1:
            self._check_offsets(offsets, ids)
            return offsets.long()
        if offsets is None and ids.dim() == 2:
            bags, length = ids.shape
            return (
                torch.arange(bags + int(self.include_last_offset), dtype=torch.int64, device=ids.device)
                * length
            )
        raise ConfigurationError(
            f"{self.name}: input must be [L] with offsets or [B, L] without, got shape "
            f"{tuple(ids.shape)} {'without' if offsets is None else 'with'} offsets"
        )

    def _check_weights(self, weights: Tensor, ids: Tensor) -> None:
        if self.mode != "sum":
            raise ConfigurationError(
                f'{self.name}: per_sample_weights need mode "sum", this table has "{self.mode}"'
            )
        if weights.shape != ids.shape or weights.dtype != self.weight.dtype:
            raise ConfigurationError(
                f"{self.name}: per_sample_weights must be {self.weight.dtype} {tuple(ids.shape)} "
                f"like the table and the input, got {weights.dtype} {tuple(weights.shape)}"
            )
        if weights.device != ids.device:
            raise ConfigurationError(
                f"{self.name}: per_sample_weights are on {weights.device} and the input on "
                f"{ids.device}; move them"
            )

    def _check_offsets(self, offsets: Tensor, ids: Tensor) -> None:
        if offsets.dtype not in (torch.int64, torch.int32) or offsets.dim() != 1:
            raise ConfigurationError(
                f"{self.name}: offsets must be int64 or int32 [B], got {offsets.dtype} {tuple(offsets.shape)}"
            )
        if offsets.device != ids.device:
            raise ConfigurationError(
                f"{self.name}: offsets are on {offsets.device} and the input on {ids.device}; move them"
            )
        if not offsets.numel():
            if self.include_last_offset or ids.numel():
                raise ConfigurationError(
                    f"{self.name}: offsets are empty, and no bag takes the {ids.numel()} ids: give "
                    f"each bag the place of its first id"
                )
            return
        first, last = _listed(offsets[[0, -1]])
        if first != 0 or bool((offsets[1:] < offsets[:-1]).any()):
            raise ConfigurationError(
                f"{self.name}: offsets must begin with 0 and not decrease, got {_shown(offsets)}"
            )
        if last > ids.numel() or (self.include_last_offset and last != ids.numel()):
            raise ConfigurationError(
                f"{self.name}: the last offset is {last}, and there are {ids.numel()} ids: it "
                f"must not be beyond them, and with include_last_offset=True be their number"
            )


class ShardedEmbedding(ShardedTable):
    """`torch.nn.Embedding` over a table that is sharded by rows over a process group.

    Shards, collective calls, gradients and `weight` are those of `ShardedEmbeddingBag`; rows are not pooled.

    Args:
        num_embeddings: rows R of the whole table, at least 1.
        embedding_dim: values of a row, at least 1.
        padding_idx: an id without a row: its lookups give zeros, and no gradient. None if all ids have rows.
        group, device, dtype, init, generator, name: as for `ShardedEmbeddingBag`.

    Attributes:
        weight, rows, rank, world_size: as for `ShardedEmbeddingBag`.

    Raises:
        ConfigurationError: an argument breaks a rule.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        init: Callable[[Tensor, torch.Generator], object] | None = None,
        generator: torch.Generator | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            group=group,
            device=device,
            dtype=dtype,
            init=init,
            generator=generator,
            name=name,
        )
        if padding_idx is not None and not 0 <= padding_idx < num_embeddings:
            raise ConfigurationError(
                f"{self.name}: padding_idx must be an id of the table, 0 to {num_embeddings - 1}, "
                f"got {padding_idx}"
            )
        self.padding_idx = padding_idx

    def forward(self, input: Tensor) -> Tensor:
        """Looks up rows of the table. All ranks; see `ShardedEmbeddingBag` about order.

        Args:
            input: ids, int64 or int32, of any shape, on the shard's device. Read.

        Returns:
            The rows, [*input.shape, embedding_dim], of the shard's dtype and on its device.

        Raises:
            ConfigurationError: on all ranks, if any rank's input breaks a rule; as `ShardedEmbeddingBag`.
            UsageError: the table was built for another process group.
        """
        rows, position, known = self._fetched(lambda: self._known(input))
        out = functional.embedding(position, rows)
        if known is not None:
            out = out.new_zeros(input.numel(), self.embedding_dim).index_copy(0, known, out)
        return out.reshape(*input.shape, self.embedding_dim)

    def _known(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The ids that have rows, [m], and their places in the input, int64 [m]; None if all have."""
        self._check_ids(ids)
        flat = ids.reshape(-1)
        if self.padding_idx is None:
            return flat, None
        (known,) = torch.nonzero(flat != self.padding_idx, as_tuple=True)
        return flat[known], known

    def extra_repr(self) -> str:
        """The arguments, and this rank's part of the table."""
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        rows = f"rows=[{self.rows.start}, {self.rows.stop})"
        return f"{self.num_embeddings}, {self.embedding_dim}, {padding}{rows}"


class _Route(NamedTuple):
    """The rows that one lookup exchanges: sent to the ranks that asked; their gradients come back."""

    group: dist.ProcessGroup | None
    asked: list[int]  # rows that this rank asks of each rank
    wanted: list[int]  # rows of this shard that each rank asks for
    local_ids: Tensor  # their ids in the shard, int64 [sum(wanted)], by rank; a rank's are distinct


class _FetchRows(torch.autograd.Function):
    """(shard [local rows, dim], route) -> the rows that this rank asked for [sum(asked), dim]."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, route: _Route) -> Tensor:
        ctx.route, ctx.shape = route, weight.shape
        rows = weight.index_select(0, route.local_ids)
        return _exchange(rows, route.wanted, route.asked, route.group)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        route: _Route = ctx.route
        parts = _exchange(grad_outputs[0].contiguous(), route.asked, route.wanted, route.group)
        touched, position = _unique(route.local_ids)
        sums = parts.new_zeros(touched.numel(), parts.shape[1])
        # One rank's ids are distinct: a call adds to a row at most once, and ranks come in order.
        start = 0
        for count in route.wanted:
            here = slice(start, start + count)
            sums.index_add_(0, position[here], parts[here])
            start += count
        where = touched.unsqueeze(0)
        gradient = torch.sparse_coo_tensor(where, sums, ctx.shape, device=sums.device, check_invariants=False)
        return gradient, None


def _exchange(values: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """All ranks: send `send[p]` rows of `values` to rank p; returns the received rows, by rank."""
    if len(send) == 1:
        return values
    came = values.new_empty(sum(receive), *values.shape[1:])
    dist.all_to_all_single(came, values, receive, send, group=group)
    return came


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(rank, size) within the group; (0, 1) without any process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids, sorted, and the index of each id among them."""
    return cast("tuple[Tensor, Tensor]", torch.unique(ids, return_inverse=True))


def _listed(values: Tensor) -> list[Any]:
    return cast("list[Any]", values.tolist())


def ranks_of(table: ShardedTable) -> list[int] | None:
    """The ranks that share a table; None for all."""
    return None if table.group is None else dist.get_process_group_ranks(table.group)


def facts_of(table: ShardedTable) -> dict[str, int | str]:
    """The properties that must be the same on all ranks that share a table, by name."""
    return {
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "dtype": str(table.weight.dtype).removeprefix("torch."),
        "mode": table.mode,
    }


def differing(what: str, values: Mapping[int, object]) -> str | None:
    """The difference between the ranks' values, in words; None without one.

    Args:
        what: names the value.
        values: by rank.
    """
    first, *others = values
    for rank in others:
        if values[rank] != values[first]:
            return f"{what} is {values[first]!r} on rank {first} and {values[rank]!r} on rank {rank}"
    return None


def _shown(offsets: Tensor) -> str:
    head = ", ".join(str(value) for value in _listed(offsets[:8]))
    return f"[{head}, ... {offsets.numel()} in all]" if offsets.numel() > 8 else f"[{head}]"
