"""Batches whose position in the data is part of the step: a failure neither loses nor repeats one.

Owns the conversion between a loader and its position. The position counts the batches that were *given out*,
not those that workers have read ahead, and is packed with the rank state when the step commits. It has the
epoch, the number of its batches that were drawn, and the states of all random generators at the epoch's
start, with which its iterator is created again.

Must not know: the storage of positions, steps, other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import ConfigurationError, LayoutMismatch, UsageError
from . import rng
from .loaders import Source, find_source, set_epoch
from .rank_state import Position, RankState
from .serialize import dump, load

logger: logging.Logger = logging.getLogger("ecemb")


class Batches(Iterator[Any]):
    """The result of `guard.batches(loader)`: endless batches, epoch after epoch.

    Args:
        source: the loader.
        others: positions that were bound earlier (later ones would form a reference cycle, with workers in
            it).
        is_open: whether a step is open.
        order_may_change: whether an epoch goes on if its order can't be found again.

    Attributes:
        epoch: the epoch of the last batch, from 0.
        name: for messages.
    """

    def __init__(
        self,
        source: Source,
        others: Sequence[Position],
        is_open: Callable[[], bool],
        *,
        order_may_change: bool = False,
    ) -> None:
        self.source = source
        self._order_may_change = order_may_change
        self._others = others
        self._is_open = is_open
        self._generators = rng.owned(source.parts)
        self.epoch: int = 0
        self.name: str = f"loader {len(others)} of guard.batches() ({source.description})"
        self._iterator: Iterator[Any] | None = None
        self._stale = False  # the iterator is not at the position
        self._drawn = 0  # batches of this epoch
        self._start: list[Any] | None = None  # `_states` at this epoch's start; the process's states packed
        self._saved: Any = None  # the source's own state in the loaded position

    def __next__(self) -> Any:
        """The next batch; inside a step.

        Raises:
            UsageError: no step is open.
            ConfigurationError: the loader gives no batches.
            LayoutMismatch: it gives fewer batches in this epoch than were drawn before the restart; or
                others, if their order may not change.
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
            "generators": [rng.state(generator) for generator in self._generators],
            "state": self._saved if self._iterator is None or self._stale else self.source.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to a position; the next `next` creates the loader's iterator.

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
            rng.set_state(generator, value)
        self._stale = (
            True  # the old iterator stays until another replaces it: ending its workers may take long
        )

    def _begin(self) -> Iterator[Any]:
        set_epoch(self.source.parts, self.epoch)
        process, own = self._states()
        self._start = [self._known(torch.frombuffer(bytearray(dump(process)), dtype=torch.uint8)), own]
        self._stale = False
        return self.source.begin()

    def _known(self, packed: torch.Tensor) -> torch.Tensor:
        """Packed states, or an equal tensor of another loader, so that equal states are stored once."""
        for other in self._others:
            if isinstance(other, Batches) and other._start and torch.equal(other._start[0], packed):
                return other._start[0]
        return packed

    def _resume(self, start: Sequence[Any]) -> Iterator[Any]:
        """Creates the epoch's iterator again, from the states at its start; generators keep theirs."""
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
        return [rng.process_states(), [rng.state(one) for one in self._generators]]

    def _set_states(self, states: Sequence[Any]) -> None:
        process, own = states
        rng.set_process_states(process)
        for generator, value in zip(self._generators, own, strict=True):
            rng.set_state(generator, value)


def bind(
    loader: Any, rank_state: RankState, is_open: Callable[[], bool], *, order_may_change: bool = False
) -> Batches:
    """Makes a loader's position a part of the rank state.

    Args:
        loader: the loader.
        rank_state: of this rank.
        is_open: whether a step is open.
        order_may_change: see `Batches`.

    Raises:
        ConfigurationError: the loader is none, or has no position that a restart can find; or an option is
            no bool.
        UsageError: the loader is already bound.
        LayoutMismatch: another loader was bound in this order when the job was started.
    """
    if not isinstance(order_may_change, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"order_may_change= is True or False; it is {order_may_change!r}")
    for other in rank_state.positions:
        if isinstance(other, Batches) and other.source.loader is loader:
            raise UsageError(f"{other.name} is already bound: call guard.batches() once for each loader")
    others = tuple(rank_state.positions)
    batches = Batches(find_source(loader), others, is_open, order_may_change=order_may_change)
    rank_state.bind(batches)
    return batches
