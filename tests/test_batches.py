"""No batch is lost or repeated, whatever the loader, however often the process dies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    get_worker_info,
)
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from ecemb import batches as module
from ecemb.batches import Batches
from ecemb.rankstate import RankState

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:'set_vital' is deprecated:UserWarning"
    ),  # torchdata 0.11 with torch 2.13
]

SAMPLES, BATCH, EPOCHS = 22, 4, 3
STEPS = EPOCHS * -(-SAMPLES // BATCH)


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    """Leaves the process's generators as they were."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(kept[0])
    np.random.set_state(kept[1])
    random.setstate(kept[2])


# --- a rank that dies and is started again ---------------------------------------------------------


class Rank:
    """One process of a training: what `protect` and the steps do with the rank state.

    Args:
        loaders: bound in this order.
        record: the rank state that was committed last; None at a fresh start.
    """

    def __init__(self, loaders: Sequence[Any], record: bytes | None = None) -> None:
        self.is_open = False
        self.state = RankState([], dict, lambda _: None)
        if record is not None:
            self.state.unpack(record)
        self.record = record or self.state.pack()
        self.batches = [self.bind(loader) for loader in loaders]

    def bind(self, loader: Any) -> Batches:
        return module.bind(loader, self.state, lambda: self.is_open)

    def step(self, take: Sequence[int] = (0,)) -> list[Any]:
        """Draws from the loaders of these numbers, and from all generators, as a training's body does."""
        self.is_open = True
        drawn: list[Any] = [
            (self.batches[i].epoch, _numbers(batch)) for i in take for batch in [next(self.batches[i])]
        ]
        drawn.append([torch.rand(()).item(), float(np.random.random()), random.random()])
        return drawn

    def commit(self) -> bytes:
        self.record = self.state.pack()
        self.is_open = False
        return self.record

    def fail(self) -> None:
        self.state.unpack(self.record)
        self.is_open = False


def _numbers(batch: Any) -> list[int]:
    return batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def train(
    make: Callable[[], Any], seed: int, *, deaths: Sequence[int] = (), steps: int = STEPS
) -> list[list[Any]]:
    """What the committed steps drew; the process dies once in the body of each step in `deaths`."""
    left, committed, record = set(deaths), [], None
    while len(committed) < steps:
        seed_all(seed)
        rank = Rank([make()], record)
        while len(committed) < steps:
            drawn = rank.step()
            if len(committed) in left:
                left.remove(len(committed))
                break
            record = rank.commit()
            committed.append(drawn)
    return committed


def per_epoch(committed: list[list[Any]]) -> list[Counter[int]]:
    found: dict[int, Counter[int]] = {}
    for (epoch, numbers), *_ in committed:
        found.setdefault(epoch, Counter()).update(numbers)
    assert list(found) == list(range(len(found)))
    return list(found.values())


# --- loaders ------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    """0, 1, …; counts how often it is read in this process."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples, self.reads = samples, 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


class Noisy(Numbers):
    """Draws from every generator for each sample: they come back exactly without workers."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng(7)

    def __getitem__(self, index: int) -> int:
        return index + 100 * int(torch.randint(9, ())) + 1000 * int(self.own.integers(9))


class Buckets(Sampler[list[int]]):
    """A batch sampler by hand: draws all batches at once, from generators of every library."""

    def __init__(self) -> None:
        self.own = [np.random.default_rng(3), random.Random(4), np.random.RandomState(5)]
        self.numpy, self.python, self.legacy = self.own

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.numpy.permutation(SAMPLES).tolist()
        for generator in (self.python, random, self.legacy, np.random):
            generator.shuffle(order)
        return iter([order[i : i + BATCH] for i in range(0, SAMPLES, BATCH)])


class Lazy(Buckets):
    """Draws each batch when it is asked for, from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(6)

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(SAMPLES))
        while left:
            order = torch.randperm(len(left), generator=self.generator).tolist()
            yield [left[i] for i in order[:BATCH]]
            left = [left[i] for i in order[BATCH:]]


class Stream(IterableDataset[int]):
    """0, 1, …, each worker its part; without state."""

    def __init__(self) -> None:
        self.given = 0
        self.loaded = False

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info is not None else (0, 1)
        if not self.loaded:
            self.given = 0
        self.loaded = False  # now, and not when the first number is asked for

        def numbers() -> Iterator[int]:
            while (number := first + every * self.given) < SAMPLES:
                self.given += 1
                yield number

        return numbers()


class StatefulStream(Stream):
    """Its state after the last sample says so: iterated with it, it gives nothing."""

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given, self.loaded = state["given"], True


class Shuffled:
    """Not a DataLoader: shuffles whenever it is iterated."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        random.shuffle(order)
        for i in range(0, SAMPLES, BATCH):
            yield order[i : i + BATCH]


class Counting:
    """A loader with a state of its own, larger if asked for."""

    def __init__(self, ballast: int = 0) -> None:
        self.at, self.ballast = 0, torch.zeros(ballast, dtype=torch.uint8)

    def __iter__(self) -> Iterator[list[int]]:
        while self.at < SAMPLES:
            self.at += BATCH
            yield list(range(self.at - BATCH, min(self.at, SAMPLES)))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "ballast": self.ballast}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def map_loader(kind: type[DataLoader[Any]] = DataLoader, **options: Any) -> DataLoader[Any]:
    options.setdefault("batch_size", BATCH)
    return kind(options.pop("dataset", Numbers()), **options)


def by_batch_sampler(kind: type[DataLoader[Any]], sampler: Any, **options: Any) -> DataLoader[Any]:
    return kind(Numbers(), batch_sampler=sampler, **options)


# What is given `workers=` and `persistent_workers=`, and gives every sample once in each epoch.
MAP_LOADERS: dict[str, Callable[..., Any]] = {
    "in order": map_loader,
    "shuffled": lambda **o: map_loader(shuffle=True, **o),
    "generator": lambda **o: map_loader(shuffle=True, generator=seeded(), **o),
    "sampler's generator": lambda **o: map_loader(
        sampler=RandomSampler(range(SAMPLES), generator=seeded()), **o
    ),
    "subset": lambda **o: map_loader(sampler=SubsetRandomSampler(range(SAMPLES)), **o),
    "distributed": lambda **o: map_loader(sampler=DistributedSampler(Numbers(), 1, 0), **o),
    "buckets": lambda **o: by_batch_sampler(DataLoader, Buckets(), **o),
    "lazy buckets": lambda **o: by_batch_sampler(DataLoader, Lazy(), **o),
    "nested": lambda **o: by_batch_sampler(
        DataLoader, BatchSampler(RandomSampler(range(SAMPLES), generator=seeded()), BATCH, False), **o
    ),
    "torchdata": lambda **o: map_loader(StatefulDataLoader, shuffle=True, **o),
    "torchdata generator": lambda **o: map_loader(
        StatefulDataLoader, shuffle=True, generator=seeded(), snapshot_every_n_steps=3, **o
    ),
    "torchdata torch sampler": lambda **o: map_loader(
        StatefulDataLoader, sampler=RandomSampler(range(SAMPLES)), **o
    ),
    "torchdata distributed": lambda **o: map_loader(
        StatefulDataLoader, sampler=StatefulDistributedSampler(Numbers(), 1, 0), **o
    ),
    "torchdata buckets": lambda **o: by_batch_sampler(StatefulDataLoader, Buckets(), **o),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "iterable": lambda **o: StatefulDataLoader(StatefulStream(), batch_size=BATCH, **o),
    "list": lambda: [list(range(i, min(i + BATCH, SAMPLES))) for i in range(0, SAMPLES, BATCH)],
    "shuffled anew": Shuffled,
    "state of its own": Counting,
    "nodes": lambda: nodes.Loader(
        nodes.Batcher(nodes.IterableWrapper(range(SAMPLES)), BATCH, drop_last=False)
    ),
}


def some_deaths(seed: int, count: int) -> list[int]:
    """Steps to die in: an epoch's first and its last one, and random others."""
    rng = random.Random(seed)
    epoch = STEPS // EPOCHS
    return [
        epoch,
        2 * epoch - 1,
        *rng.sample([s for s in range(STEPS) if s not in (epoch, 2 * epoch - 1)], count),
    ]


def check(make: Callable[[], Any], seed: int, deaths: Sequence[int], steps: int = STEPS) -> None:
    """Every sample once in each epoch, in the order and with the random numbers of an undisturbed run."""
    undisturbed = train(make, seed, steps=steps)
    committed = train(make, seed, deaths=deaths, steps=steps)
    assert per_epoch(committed) == [Counter(range(SAMPLES))] * EPOCHS, f"deaths in steps {deaths}"
    assert committed == undisturbed, f"deaths in steps {deaths}"


@pytest.mark.parametrize("name", [*MAP_LOADERS, *OTHERS])
def test_no_sample_is_lost_or_repeated(name: str, seed: int) -> None:
    check((MAP_LOADERS | OTHERS)[name], seed, some_deaths(seed, 6))


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("name", ["shuffled", "generator", "lazy buckets", "torchdata generator", "iterable"])
def test_nor_with_workers_that_read_ahead(name: str, persistent: bool, seed: int) -> None:
    def make() -> Any:
        return (MAP_LOADERS | OTHERS)[name](num_workers=2, persistent_workers=persistent)

    steps = STEPS
    if name == "iterable":  # two workers, each with a last batch of its own
        steps = EPOCHS * 2 * -(-SAMPLES // 2 // BATCH)
    check(make, seed, some_deaths(seed, 2), steps)
