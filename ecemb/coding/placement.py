"""The placement of parity, rotating and declustered over all ranks; and of the slices of replicated state.

Owns the map between ranks, positions, stripe classes and blocks. Its invariant: the n blocks of a stripe
class sit at n consecutive positions of a ring of N >= n positions, so on n different ranks. The map is
arithmetic over integers, with the same results on every rank. Must not know: the code's coefficients, bytes,
processes.

Stripe class c (0 <= c < N) has its r = n - k parity blocks at positions c .. c+r-1 and its k data
blocks at c+r .. c+n-1, modulo N. A class's blocks are numbered as in the code: data 0 .. k-1,
parity k .. n-1.

`Share` is the part of the replicated state that a rank's slots hold: some of its N slices. Invariant: any r
lost ranks leave a holder of each slice (`Placement.slice_holders`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import PlacementError


@dataclass(frozen=True)
class Placement:
    """The stripe classes of N ranks under an (n, k) code.

    Attributes:
        n: Blocks in a stripe.
        k: Data blocks among them. A rank's row space is cut into k blocks, each in another class.
        positions: Rank -> position on the ring, a permutation of 0 .. N-1.

    Raises:
        PlacementError: n > N.
    """

    n: int
    k: int
    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.positions) < self.n:
            raise PlacementError(_too_few_ranks(self.n, self.k, range(self.world_size)))

    @classmethod
    def ranks(cls, n: int, k: int, world_size: int) -> Placement:
        """Places rank p at position p, for ranks that are their own failure domains.

        Raises:
            PlacementError: n > world_size; the message lists codes that fit.
        """
        return cls(n, k, tuple(range(world_size)))

    @classmethod
    def plan(cls, n: int, k: int, domains: Sequence[str | int]) -> Placement:
        """Finds positions that put the n blocks of every stripe in n different domains.

        M ranks of one domain have to be n or more positions apart on the ring, which needs N >= n * M
        positions, so no domain may hold more than floor(N / n) ranks. This condition is also sufficient:
        `_interleaved` constructs the positions in O(N log N), and its docstring has the proof.

        Args:
            n: Blocks in a stripe.
            k: Data blocks among them.
            domains: Rank -> name of its failure domain, usually its host.

        Raises:
            PlacementError: n > N, or a domain holds too many ranks; the message lists codes that fit these
                domains, and domains that fit this code.
        """
        world_size = len(domains)
        if world_size < n:
            raise PlacementError(_too_few_ranks(n, k, domains))
        limit = world_size // n
        crowded = [(name, held) for name, held in Counter(domains).items() if held > limit]
        if crowded:
            held_by = ", ".join(f"{name!r} holds {held}" for name, held in crowded[:4])
            more = f" and {len(crowded) - 4} more do" if len(crowded) > 4 else ""
            raise PlacementError(
                f"code ({n}, {k}) needs the {n} blocks of every stripe in {n} different failure "
                f"domains, so none may hold more than floor({world_size} / {n}) = {limit} of the "
                f"{world_size} ranks, but {held_by}{more}; {_suggestion(n, k, domains)}; "
                f"{_domains_that_fit(n, k, domains)}"
            )
        return cls(n, k, _interleaved(domains))

    @classmethod
    def interleaved(cls, n: int, k: int, domains: Sequence[str | int]) -> Placement:
        """Keeps ranks of one domain as far apart as possible, also where `plan` raises.

        `fragile` returns the domains whose loss is then not tolerated.

        Args:
            n: Blocks in a stripe.
            k: Data blocks among them.
            domains: Rank -> name of its failure domain.

        Raises:
            PlacementError: n > N.
        """
        return cls(n, k, _interleaved(domains) if domains else ())

    @property
    def r(self) -> int:
        """Parity blocks in a stripe, n - k."""
        return self.n - self.k

    @property
    def world_size(self) -> int:
        """The number N of ranks, of positions and of stripe classes."""
        return len(self.positions)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Position -> rank, the inverse of `positions`."""
        return tuple(sorted(range(self.world_size), key=self.positions.__getitem__))

    def stripe_class(self, rank: int, block: int) -> int:
        """The class that data block `block` of `rank` belongs to, with the same number in the class."""
        return (self.positions[rank] - self.r - block) % self.world_size

    def keepers(self, rank: int, block: int) -> tuple[int, ...]:
        """The r ranks that keep parity of data block `block` of `rank`; the q-th keeps row q."""
        c = self.stripe_class(rank, block)
        return tuple(self.order[(c + q) % self.world_size] for q in range(self.r))

    def recipients(self, rank: int) -> dict[int, range]:
        """The keepers of the parity of `rank`: n - 1 ranks, each for at most r neighbouring data blocks.

        By `keepers`, parity of block i at position p is at positions p - r - i + q, so the rank at p - d
        keeps parity of the blocks i = d - r + q.
        """
        position = self.positions[rank]
        return {
            self.order[(position - d) % self.world_size]: range(max(0, d - self.r), min(self.k, d))
            for d in range(1, self.n)
        }

    def senders(self, rank: int) -> tuple[int, ...]:
        """The n - 1 ranks for whose data blocks `rank` keeps parity: `rank` is among their `recipients`."""
        position = self.positions[rank]
        return tuple(self.order[(position + d) % self.world_size] for d in range(1, self.n))

    def kept(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The r parity blocks that `rank` keeps, as (class, parity row) for row 0 .. r-1."""
        position = self.positions[rank]
        return tuple(((position - q) % self.world_size, q) for q in range(self.r))

    def members(self, c: int) -> tuple[int, ...]:
        """The n ranks that hold blocks 0 .. n-1 of class c: k with data, then r with parity."""
        offsets = (*range(self.r, self.n), *range(self.r))
        return tuple(self.order[(c + offset) % self.world_size] for offset in offsets)

    def erasures(self, lost: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Class -> its blocks on the `lost` ranks, ascending; only classes with such blocks."""
        found: dict[int, list[int]] = {}
        for rank in set(lost):
            for offset in range(self.n):
                c = (self.positions[rank] - offset) % self.world_size
                block = self.k + offset if offset < self.r else offset - self.r
                found.setdefault(c, []).append(block)
        return {c: tuple(sorted(found[c])) for c in sorted(found)}

    def broken(self, lost: Collection[int]) -> tuple[int, ...]:
        """The classes that lose more than r blocks with the `lost` ranks: their data can't be rebuilt."""
        return tuple(c for c, blocks in self.erasures(lost).items() if len(blocks) > self.r)

    def tolerates(self, lost: Collection[int]) -> bool:
        """Whether all data of the `lost` ranks can be rebuilt. Exact for any set; always true for r ranks."""
        return not self.broken(lost)

    def slice_holders(self, c: int) -> tuple[int, ...]:
        """The r + 1 ranks that each hold slice c of the replicated state, which is cut into N slices.

        The holders are the r members of class c with parity, and the member at the next position. So a slice
        is lost only with more than r members of one class: slices tolerate all losses that parity tolerates.
        Holders are in different failure domains if the members of a stripe are.
        """
        return tuple(self.order[(c + offset) % self.world_size] for offset in range(self.r + 1))

    def held_slices(self, rank: int) -> tuple[int, ...]:
        """The r + 1 slices of the replicated state that `rank` holds, ascending."""
        position = self.positions[rank]
        return tuple(sorted((position - offset) % self.world_size for offset in range(self.r + 1)))

    def spread(self, domains: Sequence[str | int]) -> bool:
        """Whether every stripe is in n different `domains` (rank -> name).

        Then the loss of any r domains is tolerated, with any number of ranks in each.
        """
        ring = [domains[rank] for rank in self.order]
        ring += ring[: self.n - 1]
        return all(len(set(ring[c : c + self.n])) == self.n for c in range(self.world_size))

    def fragile(self, domains: Sequence[str | int]) -> list[str | int]:
        """The domains whose loss alone, with all their ranks, is not tolerated.

        Args:
            domains: Rank -> name of its failure domain.
        """
        ranks: dict[str | int, list[int]] = {}
        for rank, name in enumerate(domains):
            ranks.setdefault(name, []).append(rank)
        return [name for name, lost in ranks.items() if not self.tolerates(lost)]


def fitting_codes(domains: Sequence[str | int]) -> list[tuple[int, int]]:
    """All codes (n, k) that `Placement.plan` can place, largest n first, then least parity first.

    Args:
        domains: Rank -> name of its failure domain. `range(N)`: the codes that `Placement.ranks` can place on
            N ranks.
    """
    return [(n, k) for n in range(_longest(domains), 1, -1) for k in range(n - 1, 0, -1)]


def _longest(domains: Sequence[str | int]) -> int:
    """The largest n with M <= floor(N / n), which is floor(N / M), M the most ranks of a domain."""
    most = max(Counter(domains).values(), default=1)
    return min(256, len(domains) // most)  # GF(2^8) has codes of 256 blocks at most


def _interleaved(domains: Sequence[str | int]) -> tuple[int, ...]:
    """Computes rank -> position so that ranks of one domain are floor(N / M) or more positions apart.

    M is the most ranks that one domain holds. Write the ranks, domain by domain and the fullest
    first, into the columns of a table with M rows, top to bottom; rows have L = floor(N / M)
    columns, and the first N mod M of them one more. Reading row by row gives the ring.

    A domain with M ranks fills one column, so its ranks are a row's length apart: L or more. A
    domain with fewer ranks may start in row a of column j and wrap to rows 0 .. b of column j+1,
    where b <= a - 2. Downwards, and around the ring from the last row to the first, its ranks are
    again L or more apart; from (b, j+1) to (a, j) the distance is two rows or more, less one:
    2L - 1 >= L. For domains of equal size the result is plain round-robin.
    """
    counts = Counter(domains)  # by first appearance, which sorted() keeps: the same on every rank
    height = max(counts.values())
    place = {name: i for i, name in enumerate(sorted(counts, key=lambda name: -counts[name]))}
    listed = sorted(range(len(domains)), key=lambda rank: place[domains[rank]])
    width, longer_rows = divmod(len(domains), height)
    positions = [0] * len(domains)
    for i, rank in enumerate(listed):
        column, row = divmod(i, height)
        positions[rank] = row * width + min(row, longer_rows) + column
    return tuple(positions)


def _too_few_ranks(n: int, k: int, domains: Sequence[str | int]) -> str:
    more, world_size = "start more ranks", len(domains)
    if len(set(domains)) < world_size:
        more = _domains_that_fit(n, k, domains)
    return (
        f"code ({n}, {k}) needs n = {n} ranks or more for the {n} blocks of a stripe, but there "
        f"are {world_size}; {_suggestion(n, k, domains)}; or {more}"
    )


def _domains_that_fit(n: int, k: int, domains: Sequence[str | int]) -> str:
    """Names numbers of hosts on which the code fits: with today's ranks on each host, or today's total."""
    most, limit = max(Counter(domains).values()), len(domains) // n
    fitting = [f"{n} hosts with {most} ranks on each" if most > 1 else f"{n} hosts"]
    if limit > 0:
        fitting.append(
            f"{-(-len(domains) // limit)} hosts with at most {limit} of {len(domains)} ranks on each"
        )
    return f"({n}, {k}) fits on {', or on '.join(reversed(fitting))}"


def _suggestion(n: int, k: int, domains: Sequence[str | int]) -> str:
    """Names the codes with the largest n that fit: first with as much parity as (n, k), then with less."""
    longest = _longest(domains)
    codes = [(longest, longest - r) for r in range(min(n - k, longest - 1), 0, -1)]
    if not codes:
        return "no code fits here"
    return "codes that fit here: " + ", ".join(str(code) for code in codes[:4])


ALIGN_BYTES = 64
"""Slices begin at multiples of this number, and so do tensors: no element of a tensor is in two slices."""


@dataclass(frozen=True)
class Share:
    """The slices of the replicated state that the slots of one rank hold.

    Attributes:
        count: Number of slices that the state is cut into.
        held: Numbers of the slices that the rank holds, ascending.
    """

    count: int
    held: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement | None, rank: int) -> Share:
        """The share of a rank: r + 1 of N slices, or all of the state.

        Args:
            placement: Of the job; None for one rank alone, which holds all of the state.
            rank: The rank.
        """
        if placement is None:
            return WHOLE
        return cls(placement.world_size, placement.held_slices(rank))

    @property
    def is_whole(self) -> bool:
        """Whether all slices are held."""
        return len(self.held) == self.count

    def edges(self, area_bytes: int) -> list[int]:
        """The bounds of all slices: slice c is bytes edges[c] to edges[c + 1] - 1.

        Args:
            area_bytes: Size of the replicated state, a multiple of `ALIGN_BYTES`.
        """
        units = area_bytes // ALIGN_BYTES
        return [units * c // self.count * ALIGN_BYTES for c in range(self.count + 1)]

    def runs(self, area_bytes: int) -> list[range]:
        """The ranges of bytes of the state that are held, ascending; neighbouring slices are one range."""
        return runs(self.edges(area_bytes), self.held)

    def size_bytes(self, area_bytes: int) -> int:
        """Number of bytes that are held."""
        return sum(map(len, self.runs(area_bytes)))


WHOLE = Share(1, (0,))


def runs(edges: Sequence[int], slices: Sequence[int]) -> list[range]:
    """The ranges of bytes of some slices, in the order of `slices`.

    Neighbouring slices are one range; empty slices have none.

    Args:
        edges: As `Share.edges` returns them.
        slices: Numbers of slices.
    """
    found: list[range] = []
    for c in slices:
        start, stop = edges[c], edges[c + 1]
        if found and found[-1].stop == start:
            found[-1] = range(found[-1].start, stop)
        elif start < stop:
            found.append(range(start, stop))
    return found


HOST_FAULTS_PER_DAY = 4.2e-3
"""Faults of one host per day: 584 of 400 GPU servers in 349 days (published: InfiniteHBD's fault trace,
2025)."""


HOST_SHARE = 0.25
"""The part of a job's faults that lose a host's memory: three of four faults end with a restart of the
process (published: DLRover)."""
