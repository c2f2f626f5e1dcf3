"""No batch is lost or repeated, whatever the loader, however often the process dies."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
)
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import ecemb
from ecemb.errors import ConfigurationError, LayoutMismatch, StepFailed, UsageError
from ecemb.memory import private_files
from ecemb.state import data as module
from ecemb.state import rank_state
from ecemb.state.data import Batches
from ecemb.state.rank_state import RankState
from support.processes import RankFailed, launch
from support.refusals import refused

pytestmark = [
    pytest.mark.usefixtures("kept_generators"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:'set_vital' is deprecated:UserWarning"
    ),  # torchdata 0.11 with torch 2.13
]

SAMPLES, BATCH, EPOCHS = 22, 4, 3
STEPS = EPOCHS * -(-SAMPLES // BATCH)


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

    def bind(self, loader: Any, **options: Any) -> Batches:
        return module.bind(loader, self.state, lambda: self.is_open, **options)

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

    def end(self) -> None:
        """The process ends, and its loaders' workers; the garbage collector would wait 5 s for each."""
        del self.batches, self.state


def _numbers(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


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
        rank.end()
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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "persistent"),
    [
        ("shuffled", False),
        ("generator", True),
        ("lazy buckets", False),
        ("torchdata generator", True),
        ("iterable", False),
        ("iterable", True),
    ],
)
def test_nor_with_workers_that_read_ahead(name: str, persistent: bool, seed: int) -> None:
    def make() -> Any:
        return (MAP_LOADERS | OTHERS)[name](num_workers=2, persistent_workers=persistent)

    steps = STEPS
    if name == "iterable":  # two workers, each with a last batch of its own
        steps = EPOCHS * 2 * -(-SAMPLES // 2 // BATCH)
    check(make, seed, some_deaths(seed, 2), steps)


@pytest.mark.parametrize("name", ["shuffled", "generator", "buckets", "torchdata generator"])
def test_the_order_is_the_one_that_a_plain_loop_has(name: str, seed: int) -> None:
    seed_all(seed)
    loader = MAP_LOADERS[name]()
    expected = [(epoch, batch.tolist()) for epoch in range(EPOCHS) for batch in loader]
    seed_all(seed)
    rank = Rank([MAP_LOADERS[name]()])
    rank.is_open = True
    drawn = [(rank.batches[0].epoch, batch.tolist()) for batch in (next(rank.batches[0]) for _ in expected)]
    assert drawn == expected


class Told(Numbers):
    """Samples that depend on the epoch that is set."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return index + 1000 * self.epoch


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_workers_know_the_epoch_that_they_would_have_known(persistent: bool, seed: int) -> None:
    """Persistent ones that of their start: that of the first epoch."""

    def make() -> Any:
        return map_loader(dataset=Told(), num_workers=2, persistent_workers=persistent)

    undisturbed = train(make, seed)
    assert train(make, seed, deaths=some_deaths(seed, 2)) == undisturbed


def test_what_the_dataset_draws_comes_back_without_workers(seed: int) -> None:
    def make() -> Any:
        return map_loader(dataset=Noisy(), shuffle=True)

    assert train(make, seed, deaths=some_deaths(seed, 5)) == train(make, seed)


def test_a_sampler_with_replacement_goes_on(seed: int) -> None:
    """Not every sample once, and more than the 32 that it draws at a time."""

    def make() -> Any:
        sampler = RandomSampler(Numbers(), replacement=True, num_samples=80, generator=seeded())
        return map_loader(sampler=sampler, batch_size=3)

    assert train(make, seed, deaths=[5, 20, 31], steps=60) == train(make, seed, steps=60)


def test_a_sampler_without_batches_goes_on(seed: int) -> None:
    def make() -> Any:
        return DataLoader(Numbers(), batch_size=None, shuffle=True)

    def drawn(committed: list[list[Any]]) -> list[int]:
        return [number for (_, number), *_ in committed]

    steps = 2 * SAMPLES
    committed = train(make, seed, deaths=[3, SAMPLES], steps=steps)
    assert drawn(committed) == drawn(train(make, seed, steps=steps))
    assert Counter(drawn(committed)) == Counter(2 * list(range(SAMPLES)))


def test_several_loaders_each_have_a_position(seed: int) -> None:
    """Also if they share a generator, and are not drawn from in every step."""

    def run(deaths: set[int]) -> list[Any]:
        left, committed, record = set(deaths), [], None
        while len(committed) < 30:
            seed_all(seed)
            shared = seeded()
            loaders = [map_loader(shuffle=True, generator=shared), map_loader(shuffle=True, generator=shared)]
            rank = Rank([*loaders, OTHERS["list"](), Shuffled()], record)
            while len(committed) < 30:
                step = len(committed)
                drawn = rank.step([0, *[1] * (step % 3), *[2] * (step > 4), *[3] * (step % 2)])
                if step in left:
                    left.remove(step)
                    break
                record = rank.commit()
                committed.append(drawn)
        return committed

    assert run({1, 4, 5, 12, 13, 29}) == run(set())


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_no_sample_is_read_to_find_the_position(kind: type[DataLoader[Any]], seed: int) -> None:
    seed_all(seed)
    rank = Rank([map_loader(kind, shuffle=True)])
    for _ in range(4):
        rank.step()
        rank.commit()
    dataset = Numbers()
    again = Rank([map_loader(kind, dataset=dataset, shuffle=True)], rank.record)
    again.step()
    assert dataset.reads == BATCH


def test_many_loaders_with_generators_of_their_own_fit_the_room(seed: int) -> None:
    """What is the same for all, the process's generators, is stored once, after a restart too."""

    def loaders(count: int) -> list[Any]:
        owned = [torch.Generator() for _ in range(count)]
        return [DataLoader(range(SAMPLES), BATCH, shuffle=True, generator=one) for one in owned]  # pyright: ignore[reportArgumentType]

    seed_all(seed)
    sizes: list[int] = []
    for count in (1, 9):
        rank = Rank(loaders(count))
        rank.state.room_bytes = rank_state.room(len(rank.record))
        drawn = rank.step(range(count))
        sizes.append(len(rank.commit()))
        record, expected = rank.record, rank.step(range(count))
        again = Rank(loaders(count), record)
        assert again.step(range(count)) == expected != drawn
        assert len(again.commit()) == len(rank.commit())
    assert (sizes[1] - sizes[0]) / 8 < 13_000
    assert rank_state.room(14_000) > 9 * 20_000 + 14_000  # where none has begun together with another


def test_a_failed_step_puts_the_position_back_and_an_aborted_one_does_not(seed: int) -> None:
    seed_all(seed)
    rank = Rank([map_loader(shuffle=True, generator=seeded())])
    drawn = [rank.step()]
    rank.fail()  # the first step of all: nothing was bound when the record was written
    assert rank.step() == drawn[0]
    rank.commit()
    for number in range(1, STEPS):
        drawn.append(rank.step())
        if number % 4 == 1:
            rank.fail()
            assert rank.step() == drawn[-1]
        rank.commit()
    assert per_epoch(drawn) == [Counter(range(SAMPLES))] * EPOCHS

    rank.step()
    rank.commit()
    first = rank.step()
    rank.state.unpack(rank.record, positions=False)
    rank.commit()
    second = rank.step()
    assert first[0] != second[0] and first[1] == second[1]  # other samples, the same random numbers
    rank.commit()
    again = Rank([map_loader(shuffle=True, generator=seeded())], rank.record)
    assert again.step()[0] == rank.step()[0]


def test_a_position_waits_for_its_loader(seed: int) -> None:
    """Steps may be committed before the loaders are bound again."""
    rank = Rank([OTHERS["list"](), Counting()])
    rank.step([0, 1])
    rank.step([0])
    rank.commit()
    for _ in range(2):
        again = Rank([], rank.record)
        again.commit()
        again.bind(OTHERS["list"]())
        again.commit()
        rank.record = again.record
    again = Rank([OTHERS["list"](), Counting()], rank.record)
    assert again.step([0, 1])[:2] == [(0, [8, 9, 10, 11]), (0, [4, 5, 6, 7])]


def test_epochs_are_told_to_who_asks(seed: int) -> None:
    class Told(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    dataset = Told()
    distributed = DistributedSampler(dataset, 2, 1, seed=seed)
    rank = Rank([DataLoader(dataset, batch_sampler=BatchSampler(distributed, BATCH, drop_last=True))])
    for _ in range(5):
        rank.step()
    assert rank.batches[0].epoch == distributed.epoch == 2
    assert dataset.epochs == [0, 1, 2]
    rank.commit()
    dataset = Told()
    again = Rank(
        [DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, 2, 1, seed=seed))]
    )
    assert again.batches[0].epoch == 0 and dataset.epochs == []


def test_the_users_loader_stays_as_it_is() -> None:
    loader = map_loader(shuffle=True)
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    rank = Rank([loader])
    rank.step()
    assert loader.sampler is sampler and loader.batch_sampler is batch_sampler and len(loader) == 6


# --- what is refused, and what is told ------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(Stream()), "DataLoader over Stream.*IterableDataset.*StatefulDataLoader"),
        (lambda: DataLoader(StatefulStream()), "DataLoader over StatefulStream.*torchdata's Stateful"),
        (lambda: iter([1, 2]), "list_iterator.*can be iterated only once.*pass the list"),
        (lambda: (i for i in range(3)), "generator.*can be iterated only once"),
        (lambda: 7, "takes a loader.*it got a int: pass the loader, or a list"),
        (lambda: "abc", "takes a loader.*it got a str: pass the loader, or a list"),
        (lambda: b"abc", "takes a loader.*it got a bytes"),
        (lambda: {"user": [1]}, "takes a loader.*it got a dict"),
        (dict, "takes a loader.*it got a dict"),
        (list, "takes a loader.*it got an empty list"),
        (tuple, "takes a loader.*it got an empty tuple"),
        (lambda: map_loader(num_workers=2, in_order=False), "in_order=False"),
        (
            lambda: map_loader(StatefulDataLoader, dataset=Kept(), sampler=RandomSampler(Kept())),
            "keeps the state of its Kept, but its sampler, a RandomSampler, has none",
        ),
    ],
)
def test_loaders_without_a_position_are_refused(loader: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Rank([loader()])


class Kept(Numbers):
    """A map-style dataset that has a state."""

    def state_dict(self) -> dict[str, int]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.reads = state["reads"]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_map_style_dataset_with_a_state_keeps_it(shuffle: bool, seed: int) -> None:
    seed_all(seed)
    rank = Rank([map_loader(StatefulDataLoader, dataset=Kept(), shuffle=shuffle)])
    for _ in range(4):
        rank.step()
    rank.commit()
    dataset = Kept()
    again = Rank([map_loader(StatefulDataLoader, dataset=dataset, shuffle=shuffle)], rank.record)
    assert again.step()[0] == rank.step()[0]
    assert dataset.reads == 5 * BATCH


def test_a_stream_without_state_is_refused_when_it_shows() -> None:
    rank = Rank([StatefulDataLoader(Stream(), batch_size=BATCH)])
    with pytest.raises(ConfigurationError, match="Stream, an IterableDataset without state"):
        rank.step()


@pytest.mark.parametrize("loader", [lambda: DataLoader(Stream(), batch_size=BATCH), OTHERS["list"]])
def test_an_epoch_with_a_limit_is_read_again(loader: Callable[[], Any]) -> None:
    """Also of a stream without state, if it is to be."""
    options = {"limit": 3, "replay": True}
    rank = Rank([])
    rank.batches = [rank.bind(loader(), **options)]
    drawn: list[Any] = []
    for at in range(7):
        drawn.append(rank.step()[0])
        rank.commit()
        if at == 4:
            again = Rank([], rank.record)
            again.batches = [again.bind(loader(), **options)]
    assert [epoch for epoch, _ in drawn] == [0, 0, 0, 1, 1, 1, 2]
    assert [one for _, one in drawn[:3]] == [one for _, one in drawn[3:6]]
    assert [again.step()[0] for _ in range(2)] == drawn[5:]


@pytest.mark.parametrize(
    ("option", "given"),
    [("order_may_change", "x"), ("replay", 1), ("limit", 0), ("limit", 2.0), ("limit", True)],
)
def test_an_option_that_breaks_its_rule_is_refused(option: str, given: Any) -> None:
    rank = Rank([])
    with refused(ConfigurationError, f"{option}= is ", f"; it is {given!r}"):
        rank.bind([1], **{option: given})


class Drained:
    """An iterable without a length that gives nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    "loader", [Drained(), map_loader(dataset=Numbers(3), drop_last=True)], ids=["an iterable", "a DataLoader"]
)
def test_a_loader_that_gives_nothing_is_an_error(loader: Any) -> None:
    with pytest.raises(ConfigurationError, match="loader 0 of guard.batches.*gives no batches in epoch 0"):
        Rank([loader]).step()


def test_a_loader_that_makes_its_iterator_late_is_refused() -> None:
    class Late(DataLoader[int]):
        def __iter__(self) -> Any:
            yield from super().__iter__()

    with pytest.raises(ConfigurationError, match="Late.__iter__ makes no iterator"):
        Rank([Late(Numbers())]).step()


def test_a_batch_is_drawn_inside_a_step() -> None:
    rank = Rank([[[1]]])
    with pytest.raises(UsageError, match="outside of a step.*lost at a failure"):
        next(rank.batches[0])


def test_a_loader_is_bound_once() -> None:
    loader = map_loader()
    rank = Rank([loader])
    with pytest.raises(UsageError, match=r"loader 0 of guard.batches\(\) \(a DataLoader.*already bound"):
        rank.bind(loader)
    assert len(rank.state.positions) == 1


def test_another_loader_in_its_place_is_noticed(seed: int) -> None:
    rank = Rank([map_loader(), OTHERS["list"]()])
    rank.step()
    rank.commit()
    others: list[Sequence[Any]] = [
        [OTHERS["list"](), map_loader()],
        [map_loader(dataset=Numbers(SAMPLES + 1))],
        [map_loader(batch_size=5)],
        [map_loader(StatefulDataLoader)],
        [map_loader(sampler=RandomSampler(Numbers(), generator=seeded()))],
    ]
    for loaders in others:
        with pytest.raises(
            LayoutMismatch, match=r"loader 0 .* was a DataLoader over Numbers, 22 samples, 6 b"
        ):
            Rank(loaders, rank.record)
    assert Rank([map_loader(), OTHERS["list"]()], rank.record).step()[0] == (0, [4, 5, 6, 7])


def test_a_sampler_that_gives_fewer_than_before_is_an_error() -> None:
    class Shrinking(Sampler[int]):
        def __init__(self, samples: int) -> None:
            self.samples = samples

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.samples))

        def __len__(self) -> int:
            return SAMPLES

    rank = Rank([map_loader(sampler=Shrinking(SAMPLES))])
    for _ in range(3):
        rank.step()
    rank.commit()
    with pytest.raises(LayoutMismatch, match="ends before batch 3 of epoch 0"):
        Rank([map_loader(sampler=Shrinking(8))], rank.record).step()


def test_an_order_that_does_not_come_back_is_refused(caplog: pytest.LogCaptureFixture, seed: int) -> None:
    """The sampler's generator is hidden where ecemb does not find it. A script can accept another order."""

    class Hidden(Sampler[int]):
        def __init__(self, seed: int) -> None:
            self.generators = [random.Random(seed)]

        def __iter__(self) -> Iterator[int]:
            return iter(self.generators[0].sample(range(SAMPLES), SAMPLES))

        def __len__(self) -> int:
            return SAMPLES

    rank = Rank([map_loader(sampler=Hidden(seed))])
    rank.step()
    rank.step()
    rank.commit()
    told = "other samples for batch 1 of epoch 0"
    with caplog.at_level(logging.WARNING, "ecemb"):
        Rank([map_loader(sampler=Hidden(seed))], rank.record).step()
        again = Rank([map_loader(sampler=Hidden(seed + 1))], rank.record)
        for _ in range(2):  # it stays refused
            with refused(LayoutMismatch, "loader 0", told, "order_may_change=True"):
                again.step()
        caplog.clear()  # Numbers counts what is read
        again = Rank([], rank.record)
        again.batches = [again.bind(map_loader(sampler=Hidden(seed + 1)), order_may_change=True)]
        for _ in range(3):
            again.step()
        again.commit()
    [message] = [text for text in caplog.messages if "reading samples changes" not in text]
    assert "loader 0" in message and told in message


def test_a_position_that_does_not_fit_names_its_loader() -> None:
    loaders = [
        map_loader(shuffle=True, generator=seeded()),
        Counting(10_000),
        Counting(10_000),
        Counting(200_000),
    ]
    rank = Rank(loaders)
    rank.state.room_bytes = rank_state.room(len(RankState([], dict, lambda _: None).pack()))
    rank.step([0, 1, 2])
    rank.commit()
    rank.step([0, 3])
    with pytest.raises(
        StepFailed, match=r"largest part is loader 3 of guard.batches\(\) \(a Counting with"
    ) as e:
        rank.commit()
    assert "were reserved by ecemb.protect()" in str(e.value)


def test_a_state_that_is_no_plain_data_names_its_loader() -> None:
    rank = Rank([Counting()])
    rank.batches[0].source.loader.ballast = object()
    rank.step()
    with pytest.raises(ConfigurationError, match=r"the state of loader 0 .*'ballast'\].*weights_only"):
        rank.commit()


# --- real ranks -----------------------------------------------------------------------------------

ABORTED = 9


def count(folder: Path, meet: Barrier, window: int, deaths: dict[int, int]) -> list[list[int]]:
    """Each rank's own table counts how often each of its samples was trained on."""
    ecemb.init_process_group("gloo", job="count", arena_dir=folder, timeout=timedelta(seconds=300))
    rank = dist.get_rank()
    table = nn.Embedding(2 * SAMPLES, 1, sparse=True, dtype=torch.float64)
    nn.init.zeros_(table.weight)
    optimizer = torch.optim.SGD([table.weight], lr=1.0)
    dataset = Numbers(2 * SAMPLES)
    ahead = DataLoader(
        dataset,
        BATCH,
        sampler=DistributedSampler(dataset, 2, rank),
        num_workers=1,
        multiprocessing_context="fork",  # its worker sees that a killed rank is gone; a fork server's doesn't
    )
    every = StatefulDataLoader(StatefulStream(), batch_size=BATCH)
    seed_all(0)
    head = nn.Linear(1, 1)
    seed_all(rank)
    tables, code = {"count": table}, ecemb.Code(2, 1)
    head.requires_grad_(False)
    guard = ecemb.protect(head, optimizers=optimizer, tables=tables, code=code, window=window)
    batches, others = guard.batches(ahead), guard.batches(every)
    with pytest.raises(UsageError, match="already bound"):
        guard.batches(every)
    with pytest.raises(UsageError, match="outside of a step"):
        next(batches)
    aborted: list[int] = []
    for step in guard.steps(STEPS):
        with step:
            if step.number == ABORTED:
                with pytest.raises(UsageError, match="inside guard.step()"):
                    guard.batches([1])
            drawn = torch.cat([next(batches), next(others)])
            optimizer.zero_grad()
            table(drawn).sum().backward()
            optimizer.step()
            if deaths.get(step.number) == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            if step.number == ABORTED and rank == 1:
                step.abort("a poisoned batch")
        if step.aborted:
            aborted = drawn.tolist()
    assert batches.epoch == others.epoch == EPOCHS - 1
    counts = [-int(one) for one in table.weight.detach().flatten()]
    guard.close()
    with pytest.raises(UsageError, match="closed"):
        guard.batches([1])
    return [counts, aborted, [guard.recovery.step]]


@pytest.mark.parametrize(("window", "goes_on"), [(1, 6), (4, 4)])
def test_every_sample_is_trained_on_once_in_each_epoch(tmp_path: Path, window: int, goes_on: int) -> None:
    """Ranks are killed in an epoch's middle and in its first step; one step is aborted.

    In a window its good steps run again, with the same samples.
    """
    for deaths in ({3: 1}, {6: 0}):
        with pytest.raises(RankFailed, match="died|PeerFailure|StepFailed"):
            launch(2, count, tmp_path, window, deaths)
    own: Counter[int] = Counter()
    for counts, aborted, began in launch(2, count, tmp_path, window, {}):
        assert began == [goes_on]
        assert len(aborted) == 2 * BATCH
        found = Counter(dict(enumerate(counts))) + Counter(aborted)
        shared = Counter(range(SAMPLES))
        own += found - Counter({number: EPOCHS * times for number, times in shared.items()})
    assert own == Counter(dict.fromkeys(range(2 * SAMPLES), EPOCHS))


# Its loader's process kills it before torch looks who its parent is.
KILLED_BY_ITS_LOADER = """
import os, signal, sys
from pathlib import Path
from torch.utils.data import DataLoader
from ecemb import protect

def end_parent(_):
    parent = os.getppid()
    Path(sys.argv[1]).with_suffix(".new").write_text(str(os.getpid()))
    Path(sys.argv[1]).with_suffix(".new").rename(sys.argv[1])
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        pass

loader = DataLoader(range(4), num_workers=1, worker_init_fn=end_parent, multiprocessing_context="fork")
next(iter(loader))
"""


def test_a_loaders_process_ends_although_its_worker_was_killed_before_it_looked(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    killed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED_BY_ITS_LOADER, str(told)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    orphan = int(told.read_text())
    started = private_files.start_of_process(orphan)
    deadline = time.monotonic() + 300
    while started is not None and private_files.start_of_process(orphan) == started:
        if time.monotonic() > deadline:
            os.kill(orphan, signal.SIGKILL)
            pytest.fail("the loader's process outlives its worker")
        time.sleep(0.05)


class NextLine(Dataset[int]):
    """Gives the next sample, whatever the index is."""

    def __init__(self, path: Path | None = None) -> None:
        self.at = 0
        self.file = None if path is None else path.open()
        self.name = "lines"

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if self.file is None:
            self.at += 1
            return self.at
        return int(next(self.file))


class NextLineWithState(NextLine):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_dataset_with_a_position_of_its_own_is_named(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "lines").write_text("".join(f"{i}\n" for i in range(8)))

    def said(dataset: Dataset[Any], **options: Any) -> list[str]:
        caplog.clear()
        source = module.find_source(DataLoader(dataset, batch_size=2, **options))
        for epoch in range(2):
            batches = source.begin() if epoch == 0 or not options else iter(())
            for _ in itertools.islice(batches, 2):
                source.given()
        if isinstance(held := getattr(dataset, "dataset", dataset), NextLine) and held.file is not None:
            held.file.close()
        return caplog.messages.copy()

    [line] = said(NextLine())
    assert "DataLoader over NextLine" in line and "changes at of the dataset" in line and "state=" in line
    [line] = said(Subset(NextLine(tmp_path / "lines"), range(8)))
    assert "changes dataset.file of the dataset" in line
    assert said(NextLineWithState()) == said(TensorDataset(torch.arange(8))) == []
    assert said(NextLine(), num_workers=1) == []  # it is in the worker
