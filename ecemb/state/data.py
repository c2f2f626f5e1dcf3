"""The position in the data as a part of the step: a failure neither loses nor repeats a batch.

Owns the conversion between a loader and its position, and the resumption of an epoch in its middle. The
position counts the batches that were *returned* to the script, not those that workers have read ahead, and is
packed with the rank state when the step commits. It has the epoch, the number of batches returned in it, and
the states of all random generators at the epoch's start, with which its iterator is created again.

`find_source` distinguishes three kinds of loader:

- `Indexed`, a DataLoader over a map-style dataset, also torchdata's: the stream of indices of its sampler is
  started again and skipped up to the position. No sample is read twice. (torchdata's own state is not used:
  in 0.11 it loses the order of the next epoch with generator=, and of this epoch with a sampler of torch.)
- `StatefulLoader`, any other loader with state_dict() and load_state_dict(): its own state is restored.
- `Repeatable`, any other iterable: it is iterated again, and the batches that were returned are skipped.

A process that a loader forked ends with its parent, even if the parent is killed before the process first
checks for it.

Must not know: the storage of positions, steps, other ranks.
"""

from __future__ import annotations

import abc
import collections
import copy
import inspect
import io
import itertools
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)
from torch.utils.data._utils import worker as torch_worker

from ..errors import ConfigurationError, LayoutMismatch, UsageError
from . import rank_state as rank_states
from .rank_state import Position, RankState, is_stateful
from .serialize import dump, load

logger: logging.Logger = logging.getLogger("ecemb")


class Batches(Iterator[Any]):
    """The result of `guard.batches(loader)`: endless batches, epoch after epoch.

    Args:
        source: the loader.
        others: positions that were bound earlier; not later ones, which would form a reference cycle that
            keeps workers alive.
        is_open: whether a step is open.
        order_may_change: whether to continue an epoch whose order differs from that before the restart.
        limit: most batches of an epoch; None for all.

    Attributes:
        epoch: the epoch of the last batch, from 0.
        name: name of the loader in messages.
    """

    def __init__(
        self,
        source: Source,
        others: Sequence[Position],
        is_open: Callable[[], bool],
        *,
        order_may_change: bool = False,
        limit: int | None = None,
    ) -> None:
        self.source = source
        self._order_may_change, self._limit = order_may_change, limit
        self._others = others
        self._is_open = is_open
        self._generators = rank_states.owned_generators(source.parts)
        self.epoch: int = 0
        self.name: str = f"loader {len(others)} of guard.batches() ({source.description})"
        self._iterator: Iterator[Any] | None = None
        self._stale = False  # a position was loaded since the iterator was created
        self._drawn = 0  # batches returned in this epoch
        self._start: list[Any] | None = None  # `_states` at this epoch's start, the process's part packed
        self._saved: Any = None  # the source's own state in the loaded position

    def __next__(self) -> Any:
        """The next batch. Called inside a step.

        Raises:
            UsageError: no step is open.
            ConfigurationError: the loader has no batches.
            LayoutMismatch: it has fewer batches in this epoch than were returned before the restart; or their
                order has changed, and `order_may_change` is False.
        """
        if not self._is_open():
            raise UsageError(
                "next(batches) was called outside of a step: put it inside `with guard.step():`; a batch "
                "drawn outside of a step, or ahead of it, would be lost at a failure"
            )
        if self._iterator is None or self._stale:
            self._iterator = self._begin() if self._start is None else self._resume(self._start)
        while True:
            try:
                if self._limit is not None and self._drawn >= self._limit:
                    raise StopIteration
                batch = next(self._iterator)
            except StopIteration:
                if not self._drawn:
                    raise ConfigurationError(
                        f"{self.name} gives no batches in epoch {self.epoch}: it is empty, drops its only "
                        f"batch (drop_last=True), or can't be iterated twice"
                    ) from None
                self.epoch, self._drawn, self._start, self._iterator = self.epoch + 1, 0, None, None
                self._iterator = self._begin()
                continue
            self._drawn += 1
            self.source.given()
            return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch."""
        return {
            "loader": self.source.description,
            "epoch": self.epoch,
            "drawn": self._drawn,
            "start": self._start,
            "generators": [rank_states.generator_state(generator) for generator in self._generators],
            "state": self._saved if self._iterator is None or self._stale else self.source.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to a position. The next call of `next` creates the loader's iterator.

        Raises:
            LayoutMismatch: the position belongs to another loader.
        """
        if state["loader"] != self.source.description or len(state["generators"]) != len(self._generators):
            raise LayoutMismatch(
                f"{self.name} was {state['loader']} with {len(state['generators'])} generators when the job "
                f"was started, and has {len(self._generators)} now: call guard.batches() for the same "
                f"loaders over the same data, in the same order, or give the job another job="
            )
        self.epoch, self._drawn = int(state["epoch"]), int(state["drawn"])
        self._start, self._saved = state["start"], state["state"]
        self.source.reset()
        for generator, value in zip(self._generators, state["generators"], strict=True):
            rank_states.set_generator_state(generator, value)
        self._stale = True  # the old iterator stays until another replaces it: its workers may end slowly

    def _begin(self) -> Iterator[Any]:
        set_epoch(self.source.parts, self.epoch)
        process, own = self._states()
        self._start = [self._known(torch.frombuffer(bytearray(dump(process)), dtype=torch.uint8)), own]
        self._stale = False
        return self.source.begin()

    def _known(self, packed: torch.Tensor) -> torch.Tensor:
        """The tensor of packed states, or an equal one of another loader, so that it is stored once."""
        for other in self._others:
            if isinstance(other, Batches) and other._start and torch.equal(other._start[0], packed):
                return other._start[0]
        return packed

    def _resume(self, start: Sequence[Any]) -> Iterator[Any]:
        """Creates the epoch's iterator again, with the generators' states at its start; then resets these."""
        self._iterator = None
        set_epoch(self.source.parts, self.epoch)
        now, begun = self._states(), [load(start[0].numpy().tobytes()), start[1]]
        try:
            iterator = self.source.resume(
                self.epoch, self._drawn, self._saved, lambda: self._set_states(begun)
            )
        finally:
            self._set_states(now)
        if iterator is None:
            raise LayoutMismatch(
                f"{self.name} ends before batch {self._drawn} of epoch {self.epoch}, the position "
                f"before the restart: its data or its order has changed"
            )
        if not self.source.fits(self._saved):
            found = (
                f"{self.name}: its sampler now gives other samples for batch {self._drawn - 1} of epoch "
                f"{self.epoch} than before the restart"
            )
            if not self._order_may_change:
                raise LayoutMismatch(
                    f"{found}, so the rest of the epoch would repeat some samples and skip others. Its order "
                    f"must follow from its epoch and from the random generators at the epoch's start: give "
                    f"it a seed, a generator of its own, or state_dict() and load_state_dict(). To accept "
                    f"this order, call guard.batches(loader, order_may_change=True)"
                )
            logger.warning("%s: samples of this epoch are repeated or skipped (order_may_change=True)", found)
        self._stale = False
        return iterator

    def _states(self) -> list[Any]:
        return [rank_states.process_states(), [rank_states.generator_state(one) for one in self._generators]]

    def _set_states(self, states: Sequence[Any]) -> None:
        process, own = states
        rank_states.set_process_states(process)
        for generator, value in zip(self._generators, own, strict=True):
            rank_states.set_generator_state(generator, value)


def bind(
    loader: Any,
    rank_state: RankState,
    is_open: Callable[[], bool],
    *,
    limit: int | None = None,
    replay: bool = False,
    order_may_change: bool = False,
) -> Batches:
    """Makes a loader's position a part of the rank state.

    Args:
        loader: the loader.
        rank_state: this rank's state.
        is_open: whether a step is open.
        limit: see `Batches`.
        replay: whether a restart reads the epoch's earlier batches again, whatever the loader is.
        order_may_change: see `Batches`.

    Raises:
        ConfigurationError: `loader` is not a loader, or has no position that a restart can find; or an
            argument breaks a rule.
        UsageError: the loader is already bound.
        LayoutMismatch: another loader was bound in this order when the job was started.
    """
    for name, given in (("order_may_change", order_may_change), ("replay", replay)):
        if not isinstance(given, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"{name}= is True or False; it is {given!r}")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ConfigurationError(f"limit= is the most batches of an epoch, 1 or more; it is {limit!r}")
    for other in rank_state.positions:
        if isinstance(other, Batches) and other.source.loader is loader:
            raise UsageError(f"{other.name} is already bound: call guard.batches() once for each loader")
    others = tuple(rank_state.positions)
    source = find_source(loader, replay=replay)
    batches = Batches(source, others, is_open, order_may_change=order_may_change, limit=limit)
    rank_state.bind(batches)
    return batches


# Samplers whose order follows from their arguments and the epoch.
_DETERMINED = (SequentialSampler, DistributedSampler, BatchSampler, Sequence)
_RESTARTS = "restart_on_stop_iteration"


class Source(abc.ABC):
    """A loader whose epochs can be started, and resumed in the middle.

    Attributes:
        loader: the user's loader.
        parts: the loader's objects that may have generators and set_epoch().
        description: text that identifies the loader; equal in two starts of the job.
    """

    def __init__(self, loader: Any, parts: Sequence[object], description: str) -> None:
        self.loader = loader
        self.parts = parts
        self.description = description

    def begin(self) -> Iterator[Any]:
        """An iterator over an epoch from its first batch."""
        return iter(self.loader)

    @abc.abstractmethod
    def resume(self, epoch: int, drawn: int, saved: Any, rewind: Callable[[], None]) -> Iterator[Any] | None:
        """Resumes an epoch in its middle, in a process that hasn't started it.

        Args:
            epoch: number of the epoch.
            drawn: number of batches to skip.
            saved: the result of `state` after the last skipped batch.
            rewind: restores all generators to the epoch's start.

        Returns:
            An iterator over the rest of the epoch; None if the epoch has fewer than `drawn` batches.
        """

    def given(self) -> None:
        """Notes that a batch was returned to the script."""
        return

    def state(self) -> Any:
        """The state that `resume` needs as `saved`."""
        return None

    def fits(self, saved: Any) -> bool:
        """Whether the batches that `resume` skipped are those that were returned; True if it can't check."""
        return True

    def reset(self) -> None:
        """Discards the state of the current epoch."""
        return


class Repeatable(Source):
    """Any iterable that can be iterated again; `resume` reads the batches that it skips."""

    def resume(self, epoch: int, drawn: int, saved: Any, rewind: Callable[[], None]) -> Iterator[Any] | None:
        """See `Source.resume`."""
        rewind()
        iterator = iter(self.loader)
        return iterator if _pass_over(iterator, drawn) else None


class StatefulLoader(Source):
    """A loader with state_dict() and load_state_dict()."""

    _checked = False

    def resume(self, epoch: int, drawn: int, saved: Any, rewind: Callable[[], None]) -> Iterator[Any] | None:
        """See `Source.resume`."""
        rewind()
        self.loader.load_state_dict(saved)
        if not getattr(self.loader, _RESTARTS, False):
            return iter(self.loader)
        setattr(self.loader, _RESTARTS, False)  # a torchdata.nodes.Loader would start the next epoch silently
        try:
            return iter(self.loader)
        finally:
            setattr(self.loader, _RESTARTS, True)

    def given(self) -> None:
        """Checks at the first batch that an IterableDataset has state.

        Raises:
            ConfigurationError: the dataset has no state.
        """
        if not self._checked and isinstance(getattr(self.loader, "dataset", None), IterableDataset):
            found = [*_states_of_datasets(self.loader.state_dict())]
            if found and all(item is None for item in found):
                raise ConfigurationError(_no_state(self.loader))
        self._checked = True

    def state(self) -> Any:
        """The loader's state."""
        return self.loader.state_dict()


class Indexed(Source):
    """A DataLoader over a map-style dataset: `resume` skips indices of its sampler, and reads no sample.

    Iterates a shallow copy of the loader, whose sampler is wrapped; the user's loader stays unchanged. Warns
    once if the first batch shows that reading samples moves a position of the dataset's own.
    """

    def __init__(self, loader: Any, parts: Sequence[object], description: str) -> None:
        super().__init__(loader, parts, description)
        self._persistent: bool = loader.persistent_workers and loader.num_workers > 0
        self._before: dict[str, Any] | None = None  # the dataset's positions before the first batch
        self._is_looked_at = loader.num_workers > 0  # in workers, whose copies of the dataset can't be seen
        self.reset()

    def begin(self) -> Iterator[Any]:
        """An iterator over an epoch from its first batch.

        Raises:
            ConfigurationError: the loader's class doesn't iterate its sampler when its iterator is created.
        """
        if not self._is_looked_at:
            self._before = _positions(self.loader.dataset)
        iterator = iter(self._copy)
        if self._indexes.latest is None:
            raise ConfigurationError(
                f"{type(self.loader).__name__}.__iter__ makes no iterator of the loader's sampler before the "
                f"first batch, as torch's DataLoader does: give the class state_dict() and "
                f"load_state_dict(), or use torch.utils.data.DataLoader"
            )
        return iterator

    def resume(self, epoch: int, drawn: int, saved: Any, rewind: Callable[[], None]) -> Iterator[Any] | None:
        """See `Source.resume`."""
        self.reset()
        if self._persistent and epoch > 0:  # workers are created in epoch 0, which draws random numbers
            self._indexes.closed = True
            set_epoch(self.parts, 0)  # the epoch that they were created in
            self.begin()
            set_epoch(self.parts, epoch)
            self._indexes.closed = False
        rewind()
        self._indexes.skip = drawn
        iterator = self.begin()
        self._indexes.settle()
        return None if self._indexes.short else iterator

    def given(self) -> None:
        """Notes that a batch was returned to the script."""
        self._indexes.given()
        if self._before is not None:
            before, self._before, self._is_looked_at = self._before, None, True
            now = _positions(self.loader.dataset)
            if moved := [name for name, value in before.items() if now.get(name) != value]:
                logger.warning(
                    "%s: reading samples changes %s of the dataset: if a sample follows from more than its "
                    "index, samples after a failure are others, since a restart reads none of the earlier "
                    "ones. Let them follow from the index; give the dataset state_dict() and "
                    "load_state_dict(), and pass it to ecemb.protect() in state=; or call "
                    "guard.batches(loader, replay=True), which reads them again",
                    self.description,
                    ", ".join(moved),
                )

    def state(self) -> int | None:
        """A checksum of the indices of the last batch."""
        return self._indexes.last

    def fits(self, saved: Any) -> bool:
        """Whether the indices of the last batch are the same."""
        return self._indexes.last == saved

    def reset(self) -> None:
        """Discards the state of the current epoch."""
        self._copy = copy.copy(self.loader)
        name = "sampler" if self.loader.batch_sampler is None else "batch_sampler"
        self._indexes = Indexes(getattr(self.loader, name))
        self._copy.__dict__[name] = self._indexes


class Indexes:
    """The (batch) sampler of a DataLoader, with iterators that can skip indices.

    Args:
        sampler: the loader's sampler.

    Attributes:
        skip: number of items that the next iterator to be used skips first.
        closed: whether iterators end at once, without an item.
        latest: the iterator of the sampler that was created last.
        short: whether the sampler had fewer items than `skip`.
        last: checksum of the indices of the batch returned last; None if they have no checksum.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._drawn: collections.deque[int | None] = collections.deque()  # checksums of batches read ahead
        self.skip: int = 0
        self.closed: bool = False
        self.short: bool = False
        self.latest: Iterator[Any] | None = None
        self.last: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self._drawn.clear()
        self.latest = iter(self._sampler)
        return self._stream(self.latest)

    def __len__(self) -> int:
        return len(self._sampler)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def settle(self) -> None:
        """Skips `skip` items of the latest iterator, unless its first use already has."""
        if self.skip and self.latest is not None:
            skip, self.skip = self.skip, 0
            self.short = not _pass_over(self.latest, skip - 1)
            for indices in itertools.islice(self.latest, 1):
                self.last = _checksum(indices)
                return
            self.short = True

    def given(self) -> None:
        """Sets `last` to the checksum of the oldest indices that were read ahead: their batch is returned."""
        if self._drawn:
            self.last = self._drawn.popleft()

    def _stream(self, iterator: Iterator[Any]) -> Iterator[Any]:
        if self.closed:
            return
        self.settle()
        for indices in iterator:
            self._drawn.append(_checksum(indices))
            yield indices


def set_epoch(parts: Iterable[object], epoch: int) -> None:
    """Sets the epoch of those parts of a loader that support it."""
    for part in parts:
        if callable(tell := getattr(part, "set_epoch", None)):
            tell(epoch)


def find_source(loader: Any, *, replay: bool = False) -> Source:
    """Returns the source for a loader, by its kind.

    Args:
        loader: the loader.
        replay: whether to iterate it again in any case.

    Raises:
        ConfigurationError: the loader has no position that a restart can find.
    """
    kind = type(loader).__name__
    if isinstance(loader, DataLoader):
        return _of_loader(loader, replay=replay)
    is_empty = isinstance(loader, Sequence) and not len(loader)  # pyright: ignore[reportUnknownArgumentType]
    is_iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    if is_empty or not is_iterable or isinstance(loader, (str, bytes, bytearray, Mapping)):
        raise ConfigurationError(
            f"guard.batches() takes a loader: a DataLoader or another iterable of batches; it got "
            f"{'an empty' if is_empty else 'a'} {kind}: pass the loader, or a list of batches"
        )
    if is_stateful(loader) and not replay:
        return StatefulLoader(loader, [loader, getattr(loader, "dataset", None)], f"a {kind} with state")
    if isinstance(loader, Iterator):
        raise ConfigurationError(
            f"guard.batches() got a {kind}, which can be iterated only once, so its batches can't be found "
            f"again after a failure: pass the list or loader that it iterates"
        )
    return Repeatable(loader, [loader], f"a {kind}{_count(loader, 'batches')}")


def _of_loader(loader: DataLoader[Any], *, replay: bool) -> Source:
    dataset = loader.dataset
    samplers = _samplers(loader)
    parts = [loader, dataset, *samplers]
    description = f"a {type(loader).__name__} over {type(dataset).__name__}"
    with_state = f"{description} with {loader.num_workers} workers"
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ConfigurationError(
            f"{description} has in_order=False, so its batches arrive as workers finish, in another "
            f"order each time: set in_order=True"
        )
    if replay:
        return Repeatable(loader, parts, with_state)
    if isinstance(dataset, IterableDataset):
        if not is_stateful(loader):
            raise ConfigurationError(_no_state(loader))
        return StatefulLoader(loader, parts, with_state)
    users = [part for part in (dataset, *samplers) if is_stateful(part) and not _is_torchdata(part)]
    if not users or not is_stateful(loader):
        counts = _count(dataset, "samples") + _count(loader, "batches")
        return Indexed(loader, parts, description + counts)
    for sampler in samplers:
        if not (is_stateful(sampler) or _is_torchdata(sampler) or isinstance(sampler, _DETERMINED)):
            raise ConfigurationError(
                f"{description} keeps the state of its {type(users[0]).__name__}, but its sampler, a "
                f"{type(sampler).__name__}, has none: also give it state_dict() and load_state_dict()"
            )
    return StatefulLoader(loader, parts, with_state)


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """The loader's samplers, and the samplers inside them, each once."""
    found: list[Any] = []
    left: list[Any] = [loader.batch_sampler, loader.sampler]
    while left:
        sampler = left.pop(0)
        if sampler is None or any(sampler is other for other in found):
            continue
        found.append(sampler)
        for name, value in getattr(sampler, "__dict__", {}).items():
            if name == "sampler" or isinstance(value, Sampler):
                left.append(value)
    return found


def _positions(dataset: Any) -> dict[str, Any]:
    """The attributes of a dataset, and of the dataset that it wraps, that change as samples are read.

    Returns:
        Name -> value: whole numbers, positions of open text files, states of generators, and numbers of lines
        that readers have read. Empty for a dataset with state_dict().
    """
    found: dict[str, Any] = {}
    path = ""
    while hasattr(dataset, "__dict__") and not is_stateful(dataset):
        for name, value in vars(dataset).items():
            if type(value) is int:
                found[path + name] = value
            elif isinstance(value, io.TextIOWrapper) and not value.closed:
                found[path + name] = value.buffer.tell()  # a text file has none while it is iterated
            elif isinstance(value, GeneratorType):
                found[path + name] = inspect.getgeneratorstate(value)
            elif type(lines := getattr(value, "line_num", None)) is int:
                found[path + name] = lines
        dataset, path = vars(dataset).get("dataset"), f"{path}dataset."
    return found


def _is_torchdata(item: object) -> bool:
    return type(item).__module__.split(".")[0] == "torchdata"


def _no_state(loader: DataLoader[Any]) -> str:
    return (
        f"a {type(loader).__name__} over {type(loader.dataset).__name__}, an IterableDataset without state, "
        f"has no position that a restart can find: give the dataset state_dict() and load_state_dict() and "
        f"load it with torchdata's StatefulDataLoader; use a map-style dataset; or, if each iteration gives "
        f"the same samples, call guard.batches(loader, replay=True), which reads them again"
    )


def _states_of_datasets(state: Any) -> Iterator[Any]:
    """States of IterableDatasets in the state of torchdata's StatefulDataLoader; None for those without."""
    for key, item in state.items() if isinstance(state, Mapping) else ():
        if key in ("dataset_state", "dataset_iter_state"):
            yield item
        else:
            yield from _states_of_datasets(item)


def _count(items: Any, what: str) -> str:
    try:
        return f", {len(items)} {what}"
    except (TypeError, NotImplementedError, AttributeError):
        return ""


def _pass_over(iterator: Iterator[Any], count: int) -> bool:
    """Skips `count` items; returns whether there were enough."""
    return sum(1 for _ in itertools.islice(iterator, count)) == count


def _checksum(indices: Any) -> int | None:
    try:
        array = np.asarray(indices)
    except ValueError:  # ragged
        return None
    return zlib.crc32(array.tobytes()) if array.dtype.kind in "iuU" else None


def _watch_forking_parent(watchdog: Any) -> None:
    """Replaces __init__ of torch's ManagerWatchdog, by which a loader's process ends with its parent.

    torch reads the parent's pid when the process starts to wait for its first batch. If the parent is killed
    between the fork and this moment, the process waits forever for init. So the pid is recorded at the fork.
    """
    _torchs_own(watchdog)
    if _parent is not None:
        watchdog.manager_pid = _parent


def _before_fork() -> None:
    global _forking
    _forking = os.getpid()


def _after_fork_in_child() -> None:
    global _parent
    _parent = _forking


_forking = 0
_parent: int | None = None
"""The pid of the process that forked this one; None if it was started otherwise."""

_torchs_own: Callable[[Any], None] = torch_worker.ManagerWatchdog.__init__
os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
setattr(torch_worker.ManagerWatchdog, "__init__", _watch_forking_parent)  # noqa: B010 - torchdata has the class
