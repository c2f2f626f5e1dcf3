"""Stand-ins on CPUs for what TorchRec and FBGEMM run on CUDA devices only.

- `streams_on_cpus`: the streams of pipelines.
- `collection_on_cpus`: DMPCollection without its assertion that the device is CUDA, and with gloo's sums
  instead of NCCL's averages.
- `hash_on_cpus`: FBGEMM's operator of MPZCH, by a loop over ids; and the clock by which it evicts.
- `rounding_on_cpus`: stochastic rounding, which has no effect on CPUs, and the generator of the device.
- `optimizers_on_cpus`: FBGEMM's module without its assertion on optimizers, and their operators by loops over
  rows. They use the same state, by the same names; the arithmetic is not FBGEMM's in every detail.

What surrounds them is TorchRec's and FBGEMM's own code.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
from torch import Tensor
from torchrec.distributed import model_parallel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it is scripted, which torch deprecates
    from torchrec.modules import hash_mc_evictions
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule


def _without(method: Callable[..., None], words: str, instead: str) -> Callable[..., None]:
    """A constructor with other words in its source."""
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(words) == 1, words
    kind = method.__qualname__.split(".")[0]
    source = source.replace(words, instead).replace("super().__init__(", f"super({kind}, self).__init__(")
    names = method.__globals__
    real = names[kind]
    within = f"class {kind}:\n{textwrap.indent(source, '    ')}"  # private names are mangled by it
    exec(compile(within, f"<{method.__qualname__} on CPUs>", "exec"), names)
    made, names[kind] = names[kind].__init__, real
    return made


# --- pipelines ----------------------------------------------------------------------------------


def streams_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets pipelines run on CPUs that are meant for CUDA: they record streams of tensors."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.cpu.Stream, "device", torch.device("cpu"), raising=False)


# --- 2D parallelism -----------------------------------------------------------------------------


def collection_on_cpus(*given: Any, **options: Any) -> Any:
    """A DMPCollection on CPUs, whose `sync()` averages by sums."""
    made = model_parallel.DMPCollection
    words = 'device.type == "cuda" or device.type == "mtia"'
    place = model_parallel._remote_device  # a CPU has no number
    with (
        mock.patch.object(made, "__init__", _without(made.__init__, words, "True")),
        mock.patch.object(
            model_parallel, "_remote_device", lambda name: place(name.partition("cpu")[0] + "cpu")
        ),
    ):
        model: Any = made(*given, **options)
    group = model._default_ctx.replica_pg

    def average(*given: Any) -> None:  # the tensors; TorchRec 1.9 passes the group before them
        for tensor in given[-1]:
            dist.all_reduce(tensor, group=group)
            tensor.div_(dist.get_world_size(group))

    model.set_all_reduce_hook(average)
    return model


# --- MPZCH --------------------------------------------------------------------------------------


def hash_on_cpus() -> Callable[[int], None]:
    """MPZCH on CPUs from here on; the clock is what the returned function was last given, in hours."""
    hours = [0]
    HashZchManagedCollisionModule._zero_collision_hash = _zero_collision_hash
    hash_mc_evictions.time = SimpleNamespace(time=lambda: 3600 * hours[0])
    return lambda now: hours.__setitem__(0, now)


def _zero_collision_hash(_: Any, **given: Any) -> tuple[Tensor, Tensor]:
    """Each id takes the slot that has it, an empty one, or one that may be evicted, of those that it probes.

    Slots may be evicted if their score is below the threshold, or, under LRU, the one with the lowest score.
    """
    identities, metadata, counts = given["identities"].data, given["metadata"], given["runtime_meta"]
    slots: list[int] = []
    evicted: list[int] = []
    for number, raw in enumerate(given["input"].tolist()):
        size, first = int(given["local_sizes"][number]), int(given["offsets"][number])
        begin = raw * 2654435761 % 2**32 % size
        probed = [first + (begin + place) % size for place in range(min(given["max_probe"], size))]
        at = next((slot for slot in probed if identities[slot] == raw), None)
        if at is None and not given["readonly"]:
            at = next((slot for slot in probed if identities[slot] == -1), None)
            if at is None and metadata is not None and (at := _victim(metadata, probed, given)) is not None:
                evicted.append(at)
        if at is not None and not given["readonly"]:
            identities[at] = raw
            if metadata is not None and given["input_metadata"] is not None:
                metadata[at] = given["input_metadata"][number]
            if counts is not None:
                counts.data[at] = 1 if at in evicted else counts.data[at] + 1
        slots.append((-1 if given["disable_fallback"] else probed[0]) if at is None else at)
    return torch.tensor(slots, dtype=torch.int64), torch.tensor(evicted, dtype=torch.int64)


def _victim(metadata: Tensor, probed: list[int], given: dict[str, Any]) -> int | None:
    if given["eviction_policy"] == 1:
        return min(probed, key=lambda slot: int(metadata[slot]))
    return next((slot for slot in probed if int(metadata[slot]) < given["eviction_threshold"]), None)


# --- FBGEMM's optimizers ------------------------------------------------------------------------


@contextmanager
def optimizers_on_cpus() -> Iterator[None]:
    """FBGEMM's module takes its CUDA optimizers on CPUs, and their operators are loops over rows."""
    kind, invokers = training.SplitTableBatchedEmbeddingBagsCodegen, training.invokers
    words = "if self.use_cpu:\n        # Construct optimizer states"
    made = _without(inspect.unwrap(kind.__init__), words, words.replace("self.use_cpu", "False"))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(kind, "__init__", made))
        stack.enter_context(mock.patch.object(kind, "_feature_is_enabled", return_value=True))
        for name, update in _UPDATES.items():
            operator = getattr(invokers, f"lookup_{name}")
            stack.enter_context(mock.patch.object(operator, "invoke", functools.partial(_look_up, update)))
        yield


def _look_up(update: Callable[..., None], common: Any, options: Any, *given: Any, **more: Any) -> Tensor:
    """The sum of each bag, whose gradient updates each of its rows once."""
    states = [one for one in (*given, more.get("row_counter")) if hasattr(one, "host")]
    count = next((one for one in given if isinstance(one, int)), 0)
    return _Lookup.apply(common.host_weights, functools.partial(update, count, options), common, states)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, update: Any, common: Any, states: list[Any]) -> Tensor:
        ctx.given = update, common, states
        bags = (len(common.offsets) - 1) // (len(common.D_offsets) - 1)
        out = torch.zeros(bags, common.total_D)
        for feature, number, columns, bag in _ids(common):
            out[bag, columns] += _part(weights, common.weights_offsets, feature, number, common.max_D)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        update, common, states = ctx.given
        sums: dict[tuple[int, int], Tensor] = {}
        of_table = [int(one) for one in common.weights_offsets]
        for feature, number, columns, bag in _ids(common):
            key = of_table.index(of_table[feature]), number
            sums[key] = sums.get(key, 0) + gradient[bag, columns]
        for (feature, number), of_row in sums.items():
            held = [(common.host_weights, common.weights_offsets)]
            held += [(one.host, one.offsets) for one in states]
            by_value = [values.numel() == common.host_weights.numel() for values, _ in held]
            parts = [
                _part(values, offsets, feature, number, common.max_D if wide else 1)
                for (values, offsets), wide in zip(held, by_value, strict=True)
            ]
            update(float(common.learning_rate_tensor), of_row, *parts)
        return (None,) * 4


def _ids(common: Any) -> Iterator[tuple[int, int, slice, int]]:
    """Of each id: its feature, its row, its columns of the output, and its bag."""
    features = len(common.D_offsets) - 1
    bags = (len(common.offsets) - 1) // features
    for feature in range(features):
        columns = slice(*(int(one) for one in common.D_offsets[feature : feature + 2]))
        for bag in range(bags):
            first, end = (int(one) for one in common.offsets[feature * bags + bag :][:2])
            for number in common.indices[first:end].tolist():
                yield feature, number, columns, bag


def _part(values: Tensor, offsets: Tensor, feature: int, number: int, width: int) -> Tensor:
    """A row's part of weights, or of a state."""
    first = int(offsets[feature]) + number * width
    return values.data[first : first + width]


def _adam(
    count: int,
    options: Any,
    lr: float,
    of_row: Tensor,
    row: Tensor,
    first: Tensor,
    second: Tensor,
    *counter: Tensor,
) -> None:
    """Adam; with one value of the second moment for a row, and with a count for each row, as asked."""
    first.mul_(options.beta1).add_(of_row, alpha=1 - options.beta1)
    square = of_row.square() if len(second) == len(first) else of_row.square().mean()
    second.mul_(options.beta2).add_(square, alpha=1 - options.beta2)
    for one in counter:
        one.add_(1)
        count = int(one)
    scale = (second / (1 - options.beta2**count)).sqrt() + options.eps
    row.sub_(lr * first / (1 - options.beta1**count) / scale)


def _lamb(
    count: int, options: Any, lr: float, of_row: Tensor, row: Tensor, first: Tensor, second: Tensor
) -> None:
    """Adam's step in proportion to the row."""
    _adam(count, options, lr * float(row.norm()), of_row, row, first, second)


_UPDATES: dict[str, Callable[..., None]] = {
    "adam": _adam,
    "partial_rowwise_adam": _adam,
    "lamb": _lamb,
    "partial_rowwise_lamb": _lamb,
}
"""FBGEMM's operators; those of the other optimizers run on CPUs."""


@contextmanager
def rounding_on_cpus(generator: torch.Generator) -> Iterator[None]:
    """FBGEMM's SGD rounds rows of float16 stochastically, and draws from `generator`, which torch.cuda shows.

    On a CUDA device its operator draws from the generator of the device.
    """

    def update(_: int, __: Any, lr: float, of_row: Tensor, row: Tensor) -> None:
        exact = row.float() - lr * of_row
        low = exact.half()
        low = torch.where(low.float() > exact, torch.nextafter(low, torch.full_like(low, -torch.inf)), low)
        high = torch.nextafter(low, torch.full_like(low, torch.inf))
        share = (exact - low.float()) / (high.float() - low.float())
        row.copy_(torch.where(torch.rand(len(row), generator=generator) < share, high, low))

    device: dict[str, Any] = {
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda state, _: generator.set_state(state),
    }
    cuda = SimpleNamespace(**vars(torch.cuda) | device)
    operator = training.invokers.lookup_sgd
    with (
        mock.patch.object(operator, "invoke", functools.partial(_look_up, update)),
        mock.patch("ecemb.state.rank_state.torch.cuda", cuda),
    ):
        yield
