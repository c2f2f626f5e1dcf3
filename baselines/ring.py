"""Rotating parity over all ranks, as ecemb places it: which rank has which block of which stripe.

A rank's data is cut into k blocks. Stripe class c has its r parity rows on ranks c .. c+r-1, and its k data
blocks on ranks c+r .. c+n-1, modulo their number.

Must not know: what blocks are, and how parity is made.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """The stripe classes of a number of ranks.

    Attributes:
        n: blocks of a stripe.
        k: of them with data.
        ranks: n or more.

    Raises:
        ValueError: there are fewer ranks.
    """

    n: int
    k: int
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < self.n:
            raise ValueError(f"a code of n = {self.n} blocks needs as many ranks; there are {self.ranks}")

    @property
    def r(self) -> int:
        """Parity rows of a stripe."""
        return self.n - self.k

    def keepers(self, rank: int, block: int) -> list[int]:
        """The ranks that keep parity of a data block; the q-th one row q."""
        return [(rank - self.r - block + q) % self.ranks for q in range(self.r)]

    def members(self, rank: int, row: int) -> list[int]:
        """The ranks under parity row `row` of a rank; the i-th one with its block i."""
        return [(rank - row + self.r + i) % self.ranks for i in range(self.k)]

    def stripe(self, rank: int, block: int) -> list[int]:
        """The n ranks of the stripe that a data block is in: k with data, then r with parity."""
        keepers = self.keepers(rank, block)
        return self.members(keepers[0], 0) + keepers

    def tolerates(self, lost: Collection[int]) -> bool:
        """Whether no stripe loses more than r blocks with these ranks."""
        stripes = (self.stripe(rank, 0) for rank in range(self.ranks))
        return all(len(set(lost).intersection(stripe)) <= self.r for stripe in stripes)
