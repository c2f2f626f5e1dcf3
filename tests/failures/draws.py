"""What the matrix draws with: lengths of phases as they were seen, and decks of cards.

Lines are counted in earlier runs (`Lengths`); where nothing is known yet, a guess is as good: who runs
out of lines dies at the end of its phase, or else at the next step's beginning, which counts as missed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Container, Sequence
from typing import Generic, TypeVar

from failures.board import PHASES, STARTING
from failures.plan import Setting

T = TypeVar("T")


class Lengths:
    """How many lines of code, and calls of kernels, a phase was seen to run.

    The longest counts: what a start runs depends on what happened before, and on the rank.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bool, str], int] = {}

    def learn(self, setting: Setting, lines: Counter[str], calls: Counter[str]) -> None:
        """Take over what a run counted."""
        for counts, torn in ((lines, False), (calls, True)):
            for phase, count in counts.items():
                key = self._key(setting, phase, torn)
                self._seen[key] = max(count, self._seen.get(key, 0))

    def of(self, setting: Setting, phase: str, *, torn: bool) -> int:
        """The number of lines, or of calls if `torn`; 0 if none were seen."""
        return self._seen.get(self._key(setting, phase, torn), 0)

    @staticmethod
    def _key(setting: Setting, phase: str, torn: bool) -> tuple[str, bool, str]:
        optimizer = "" if PHASES[phase] in STARTING else setting.optimizer
        return phase, torn, f"{setting.ranks} {setting.n} {setting.k} {optimizer}"


class Deck(Generic[T]):
    """Cards in random order; none comes again before all others that may come have come."""

    def __init__(self, random_: random.Random, cards: Sequence[T]) -> None:
        self._random, self._cards = random_, tuple(cards)
        self._left: list[T] = []

    def draw(self, allowed: Container[T] | None = None) -> T:
        """The next one of those allowed."""
        left = [card for card in self._left if allowed is None or card in allowed]
        if not left:
            left = [card for card in self._cards if allowed is None or card in allowed]
            self._random.shuffle(left)
            self._left += left
        self._left.remove(left[0])
        return left[0]
