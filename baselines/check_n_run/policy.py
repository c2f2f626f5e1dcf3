"""What a checkpoint takes: all rows, or those that have changed, since when.

Published by name: one-shot (each checkpoint has all rows modified since the one full baseline), consecutive
(rows modified in the last interval, so that a restore needs the chain), intermittent (one-shot, with a new
baseline when the history says so). "full" takes all rows each time.

The history predictor is recalled: with S_1 ... S_i the sizes of the differential checkpoints since the last
full one, as fractions of it, the next one is full if

    1 + S_1 + ... + S_i <= (i + 1) S_i

The left side is what the i + 1 checkpoints since the last full one, it included, have taken; if rows go on to
be modified as before, a new baseline now makes the next i + 1 take as much again. The right side is less than
what they take without one, since one-shot sizes only grow.

Pure functions of sizes: all ranks that know the same sizes choose alike.

Must not know: rows, bytes, ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Policy:
    """When checkpoints are full, and what others stand on.

    Attributes:
        takes_full: given the sizes of the differential checkpoints since the last full one, in their order,
            as fractions of a full one: whether the next is full.
        is_chained: a differential checkpoint has the rows since the last checkpoint of any kind, and
            stands on all since the last full one; else it has the rows since the last full one, and stands on
            that one alone.
    """

    takes_full: Callable[[Sequence[float]], bool]
    is_chained: bool = False

    def needs(self, last: str, last_needs: Sequence[str]) -> tuple[str, ...]:
        """What the next differential checkpoint stands on, in the order of their restore.

        Args:
            last: the checkpoint before it.
            last_needs: what that one stands on; nothing if it is full.
        """
        if self.is_chained or not last_needs:
            return (*last_needs, last)
        return (last_needs[0],)


def intermittent(sizes: Sequence[float]) -> bool:
    """1 + S_1 + ... + S_i <= (i + 1) S_i; see above."""
    return bool(sizes) and 1 + sum(sizes) <= (len(sizes) + 1) * sizes[-1]


POLICIES: Final[Mapping[str, Policy]] = {
    "full": Policy(lambda _: True),
    "one_shot": Policy(lambda _: False),
    "consecutive": Policy(lambda _: False, is_chained=True),
    "intermittent": Policy(intermittent),
}
"""By the paper's names."""


def policy_of(name: str) -> Policy:
    """The policy of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in POLICIES:
        raise ValueError(f"policy= is one of {sorted(POLICIES)}; got {name!r}")
    return POLICIES[name]
