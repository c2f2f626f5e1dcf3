"""Would it pay to pack deltas before they are sent?

A delta is old XOR new. Values that move little keep sign, exponent and the upper bits of the mantissa, and
there the delta is 0. A small click model is trained on skewed lookups, with each optimizer and learning rate;
of one step early and one late in its training, the deltas of all touched rows are taken, weights and
optimizer state each as a message of its own, packed, unpacked, compared, and timed on one thread.

- `wire_ratio`: packed bytes over bytes.
- `pack_gb_per_s`, `unpack_gb_per_s`: bytes of unpacked deltas; median, smallest and largest of all deltas.
- `pays_below_gbit_per_s`: the network speed below which packing, sending and unpacking is sooner done than
  sending: (1 - wire_ratio) / (1 / pack + 1 / unpack). A rank sends to each of its r keepers: that all of
  these messages share one link is in favour of packing, which is done once; so this is for r = 1, and up to
  r times that for r, as far as unpacking doesn't bound it.
- `saved_pct`: of the time that sending takes at a network's speed, what packing would save; below 0 it
  costs. Median, smallest and largest of all deltas.
- `pays`: 1 if it saves more than 0 for all of them, else 0.

Packings: `row planes` and `block planes` leave out byte planes (of 4 bytes a value) that are 0 in a whole
row, or in a block of 64 rows; `row bits` keeps of each value as many lower bits as the row's largest has;
`bitmap` has a bit for each byte, and the bytes that aren't 0; `lz4` and `zstd` (level 1) are the
system's libraries. Messages stay in the cache: memory is not what is measured here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from bench.packings import PACKINGS, Bytes, Values, bound
from bench.result import Arguments, Label, Row, WrongResult, once, summary
from bench.timing import interleaved

NETWORKS_GBIT = (1, 10, 25, 100)
RATES = (0.001, 0.01, 0.1)
EPS = 1e-10


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        tables: Number of tables.
        rows: Of each.
        dim: Of each row.
        batch: Samples of a step; each looks up one row of each table.
        skew: Popularity falls with a row's place in its order to this power.
        when: Name -> the step whose deltas are taken; not the first, at which there is no state yet.
        repeats: Of each timing.
        at_least_s: That each takes.
    """

    tables: int = 8
    rows: int = 20_000
    dim: int = 64
    batch: int = 1024
    skew: float = 1.2
    when: tuple[tuple[str, int], ...] = (("early", 10), ("late", 600))
    repeats: int = 5
    at_least_s: float = 0.01


FULL = Scale()
QUICK = Scale(rows=1000, dim=16, batch=128, when=(("early", 2), ("late", 20)), repeats=2, at_least_s=0.001)


class Table:
    """All tables in one, with what its optimizer keeps of each row."""

    def __init__(self, rows: int, dim: int) -> None:
        self.weight = nn.Parameter(torch.empty(rows, dim).uniform_(-(rows**-0.5), rows**-0.5))

    def columns(self) -> list[Tensor]:
        """The weight, then the states, [rows, ...] each."""
        return [self.weight.detach()]

    def update(self, ids: Tensor, gradient: Tensor) -> None:
        """Changes distinct rows `ids` by their gradients [m, dim]."""
        raise NotImplementedError


class Torch(Table):
    """Under an optimizer of torch with sparse gradients."""

    def __init__(
        self, rows: int, dim: int, optimizer: torch.optim.Optimizer | Callable, *states: str
    ) -> None:
        super().__init__(rows, dim)
        self._optimizer = optimizer([self.weight])
        self._states = states

    def columns(self) -> list[Tensor]:
        kept = self._optimizer.state[self.weight]
        return [self.weight.detach(), *(kept[name] for name in self._states)]

    def update(self, ids: Tensor, gradient: Tensor) -> None:
        self.weight.grad = torch.sparse_coo_tensor(ids.unsqueeze(0), gradient, self.weight.shape)
        self._optimizer.step()


class RowWiseAdagrad(Table):
    """As FBGEMM updates rows: one sum of squares for each."""

    def __init__(self, rows: int, dim: int, lr: float) -> None:
        super().__init__(rows, dim)
        self._lr = lr
        self._sums = torch.zeros(rows, 1)

    def columns(self) -> list[Tensor]:
        return [self.weight.detach(), self._sums]

    @torch.no_grad()
    def update(self, ids: Tensor, gradient: Tensor) -> None:
        self._sums[ids] += gradient.square().mean(1, keepdim=True)
        self.weight[ids] -= self._lr * gradient / (self._sums[ids].sqrt() + EPS)


OPTIMIZERS: Mapping[str, Callable[[int, int, float], Table]] = {
    "SGD": lambda rows, dim, lr: Torch(rows, dim, partial(torch.optim.SGD, lr=lr)),
    "Adagrad": lambda rows, dim, lr: Torch(rows, dim, partial(torch.optim.Adagrad, lr=lr), "sum"),
    "row-wise Adagrad": RowWiseAdagrad,
    "Adam": lambda rows, dim, lr: Torch(
        rows, dim, partial(torch.optim.SparseAdam, lr=lr), "exp_avg", "exp_avg_sq"
    ),
}
"""Name -> what builds a table of so many rows and values, trained at this learning rate."""


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale = QUICK if arguments.quick else FULL
    torch.set_num_threads(1)
    measured = [
        ({"optimizer": optimizer, "lr": lr, "when": when}, measure(scale, columns))
        for optimizer in OPTIMIZERS
        for lr in RATES
        for when, columns in deltas(scale, optimizer, lr, arguments.seed)
    ]
    return rows_of(measured)


def deltas(scale: Scale, optimizer: str, lr: float, seed: int) -> Iterator[tuple[str, list[Values]]]:
    """Trains a model, and gives the deltas of its touched rows at some of its steps, column by column."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    rows = scale.tables * scale.rows
    table = OPTIMIZERS[optimizer](rows, scale.dim, lr)
    dense = nn.Sequential(nn.Linear(scale.tables * scale.dim, 64), nn.ReLU(), nn.Linear(64, 1))
    dense_optimizer = torch.optim.Adagrad(dense.parameters(), lr=0.01)
    taste = rng.normal(size=rows)  # of each row: what makes a sample's click more or less likely
    popularity = np.arange(1, scale.rows + 1, dtype=np.float64) ** -scale.skew
    heaped = np.cumsum(popularity) / popularity.sum()
    names = {step: name for name, step in scale.when}
    for step in range(max(names) + 1):
        place = np.minimum(np.searchsorted(heaped, rng.random((scale.batch, scale.tables))), scale.rows - 1)
        ids = place + np.arange(scale.tables) * scale.rows
        likely = 1 / (1 + np.exp(-taste[ids].mean(1) * 3))
        clicks = torch.from_numpy((rng.random(scale.batch) < likely).astype(np.float32))
        touched, position = torch.unique(torch.from_numpy(ids), return_inverse=True)
        embedded = table.weight.detach()[touched].requires_grad_()
        dense_optimizer.zero_grad()
        logits = dense(embedded[position].flatten(1)).squeeze(1)
        functional.binary_cross_entropy_with_logits(logits, clicks).backward()
        dense_optimizer.step()
        before = bits(table.columns(), touched) if step in names else []
        table.update(touched, embedded.grad)
        if step in names:
            after = bits(table.columns(), touched)
            yield names[step], [old ^ new for old, new in zip(before, after, strict=True)]


def bits(columns: list[Tensor], rows: Tensor) -> list[Values]:
    """Some rows of all columns, as they lie in memory: uint32 [m, w] each."""
    return [column[rows].numpy().view(np.uint32) for column in columns]


def measure(scale: Scale, columns: list[Values]) -> dict[str, tuple[float, float, float]]:
    """Packs the messages of one step in every way.

    Returns:
        Packing -> packed bytes over bytes, bytes packed a second, bytes unpacked a second.

    Raises:
        WrongResult: Something else came out than was put in, or there is nothing to pack.
    """
    size = sum(values.nbytes for values in columns)
    if not any(values.any() for values in columns):
        raise WrongResult("the step has changed nothing")
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    ratios: dict[str, float] = {}
    for name, packing in PACKINGS.items():
        packed = [np.empty(bound(values), np.uint8) for values in columns]
        out = [np.empty_like(values) for values in columns]
        lengths = list(map(packing.pack, columns, packed))
        for values, message, into in zip(columns, packed, out, strict=True):
            packing.unpack(message, into)
            if not np.array_equal(values, into):
                raise WrongResult(f"{name}: unpacked deltas are not what was packed")
        ratios[name] = sum(lengths) / size
        calls[name, "pack"] = partial(each, packing.pack, columns, [message.copy() for message in packed])
        calls[name, "unpack"] = partial(each, packing.unpack, packed, out)
    times = interleaved(calls, repeats=scale.repeats, at_least_s=scale.at_least_s)
    per_s = {key: size / statistics.median(seconds) for key, seconds in times.items()}
    return {name: (ratios[name], per_s[name, "pack"], per_s[name, "unpack"]) for name in PACKINGS}


def each(call: Callable[..., object], first: list[NDArray], second: list[Bytes]) -> None:
    for one, other in zip(first, second, strict=True):
        call(one, other)


def pays_below(ratio: float, pack_per_s: float, unpack_per_s: float) -> float:
    """The network speed, in bits a second, below which packing is worth its time."""
    return 8 * max(0.0, 1 - ratio) / (1 / pack_per_s + 1 / unpack_per_s)


def saved(ratio: float, pack_per_s: float, unpack_per_s: float, network_gbit: float) -> float:
    """Of the time that sending takes, what packing saves, in per cent."""
    per_s = network_gbit * 1e9 / 8
    return 100 * (1 - ratio - per_s * (1 / pack_per_s + 1 / unpack_per_s))


def rows_of(measured: list[tuple[dict[str, Label], dict[str, tuple[float, float, float]]]]) -> list[Row]:
    """Returns all metrics."""
    rows: list[Row] = []
    for labels, found in measured:
        rows += [once("wire_ratio", "ratio", one[0], **labels, packing=name) for name, one in found.items()]
    for metric, at in (("pack_gb_per_s", 1), ("unpack_gb_per_s", 2)):
        for name in PACKINGS:
            speeds = [found[name][at] / 1e9 for _, found in measured]
            rows.append(summary(metric, "GB/s", speeds, packing=name))
    for labels, found in measured:
        for name, one in found.items():
            limit = pays_below(*one) / 1e9
            rows.append(once("pays_below_gbit_per_s", "Gbit/s", limit, **labels, packing=name))
    for metric in ("saved_pct", "pays"):
        for network_gbit in NETWORKS_GBIT:
            for name in PACKINGS:
                part = [saved(*found[name], network_gbit) for _, found in measured]
                labels = {"network_gbit": network_gbit, "packing": name}
                if metric == "pays":
                    rows.append(once(metric, "0 or 1", float(min(part) > 0), **labels))
                else:
                    rows.append(summary(metric, "%", part, **labels))
    return rows
