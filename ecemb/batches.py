"""Batches whose position in the data is part of the step: none is lost or repeated by a failure.

Owns the way from a loader to its position and back. The position says what was *given out*, not what
workers have read ahead, and is packed with the rank state when the step commits: the epoch, the batches drawn
of it, and the states of all random generators when it began, under which its iterator is made again.

Must not know: how and where positions are kept, steps, other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from . import generators
from .errors import ConfigurationError, LayoutMismatch, UsageError
from .loaders import Source, find_source, set_epoch
from .packing import dump, load
from .rankstate import Position, RankState

logger: logging.Logger = logging.getLogger("ecemb")


class Batches(Iterator[Any]):
    """What `guard.batches(loader)` gives: endless batches, epoch after epoch.

    Args:
        source: the loader.
        others: what was bound before it (and not after it, which would be a cycle, with workers in it).
        is_open: whether a step is open.

    Attributes:
        epoch: counts from 0: the epoch of the batch drawn last.
        name: for messages.
    """

    def __init__(self, source: Source, others: Sequence[Position], is_open: Callable[[], bool]) -> None:
        self.source = source
        self._others = others
        self._is_open = is_open
        self._generators = generators.owned(source.parts)
        self.epoch: int = 0
        self.name: str = f"loader {len(others)} of guard.batches() ({source.description})"
        self._iterator: Iterator[Any] | None = None
        self._stale = False  # the iterator is not where the position is
        self._drawn = 0  # batches of this epoch
        self._start: list[Any] | None = None  # `_states` at this epoch's start, the process's packed
        self._saved: Any = None  # the source's own state, when the position was loaded

    def __next__(self) -> Any:
        """The next batch; inside a step.

        Raises:
            UsageError: no step is open.
            ConfigurationError: the loader gives no batches.
            LayoutMismatch: it gives fewer than were drawn of this epoch before the restart.
        """
        if not self._is_open():
            raise UsageError(
                "next(batches) outside of a step: put it inside `with guard.step():`; a batch drawn outside "
                "of a step, or ahead of it, would be lost at a failure"
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
        """The position: after the batch given out last."""
        return {
            "loader": self.source.description,
            "epoch": self.epoch,
            "drawn": self._drawn,
            "start": self._start,
            "generators": [generators.state(generator) for generator in self._generators],
            "state": self._saved if self._iterator is None or self._stale else self.source.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position; the loader's iterator is made by the next `next`.

        Raises:
            LayoutMismatch: it is another loader's position.
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
            generators.set_state(generator, value)
        self._stale = True  # the iterator goes when another takes its place: ending its workers may take long

    def _begin(self) -> Iterator[Any]:
        set_epoch(self.source.parts, self.epoch)
        process, own = self._states()
        self._start = [self._known(torch.frombuffer(bytearray(dump(process)), dtype=torch.uint8)), own]
        self._stale = False
        return self.source.begin()

    def _known(self, packed: torch.Tensor) -> torch.Tensor:
        """Packed states, or another loader's tensor of the same, so that they are stored once."""
        for other in self._others:
            if isinstance(other, Batches) and other._start and torch.equal(other._start[0], packed):
                return other._start[0]
        return packed

    def _resume(self, start: Sequence[Any]) -> Iterator[Any]:
        """The epoch's iterator again, made as it was the first time; all generators stay as they are."""
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
                f"{self.name} ends before batch {self._drawn} of epoch {self.epoch}, up to which it was "
                f"drawn before the restart: its data, or its order, is not the same any more"
            )
        if not self.source.fits(self._saved):
            logger.error(
                "%s: after this restart its sampler gives other samples for batch %d of epoch %d than "
                "before: samples of this epoch may be met twice, or not at all. Its order must follow from "
                "its epoch and from random generators as they are when an epoch begins: give it a seed, a "
                "generator of its own, or state_dict() and load_state_dict()",
                self.name,
                self._drawn - 1,
                self.epoch,
            )
        self._stale = False
        return iterator

    def _states(self) -> list[Any]:
        return [generators.process_states(), [generators.state(one) for one in self._generators]]

    def _set_states(self, states: Sequence[Any]) -> None:
        process, own = states
        generators.set_process_states(process)
        for generator, value in zip(self._generators, own, strict=True):
            generators.set_state(generator, value)


def bind(loader: Any, rank_state: RankState, is_open: Callable[[], bool]) -> Batches:
    """Makes a loader's position a part of the rank state.

    Raises:
        ConfigurationError: the loader has no position that could be found again.
        UsageError: it is bound already.
        LayoutMismatch: at this place another loader was bound when the job was started.
    """
    for other in rank_state.positions:
        if isinstance(other, Batches) and other.source.loader is loader:
            raise UsageError(f"{other.name} is bound already: call guard.batches() once for each loader")
    batches = Batches(find_source(loader), tuple(rank_state.positions), is_open)
    rank_state.bind(batches)
    return batches
