"""Which rows to save more often: CPR-MFU, CPR-SSU and CPR-SCAR, for one shard of a table each.

Follows Maeng et al. (MLSys 2021), and for SCAR Qiao et al., "Fault Tolerance in Iterative-Convergent Machine
Learning", ICML 2019. Instead of all N rows every T_save, r N of them are saved every r T_save: as many bytes.

- MFU and SSU are published; their parameters here are recalled, as r = 0.125 is.
- MFU counts the accesses of each row, and clears a row's count when it is saved; 0.78 to 6.25 % of the
  memory: recalled. 32 bits each, which is that for dims of 128 to 16: derived.
- SSU lists at most r N rows of sub-sampled inputs; 0.097 to 0.78 % of the memory: recalled. 32 bits each:
  derived. It looks at one input of 2 and discards at random when the list is full: recalled; an input is a
  batch, and all rows of the list and the batch are equally likely to go: chosen.
- SCAR takes the largest L2 changes since last saved; 100 % of the memory: recalled. Weights only, without the
  optimizer's state: chosen.
- Rows that have not been looked up, or for SCAR have not changed, are not saved, even if fewer than r N have;
  of equal ones the lower row is saved: chosen.
- Large tables are those with 99 % of the bytes; small ones are saved whole: recalled.

After a row's server took up its saved rows again, they stand as last saved: begin with a new object.

Must not know: files, time, other ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

SHARE: Final = 0.125
"""r: the share of a table's rows that one save takes."""
PERIOD: Final = 2
"""SSU looks at one batch of this many."""

_INT32_MAX: Final = 2**31 - 1
_CHUNK_ROWS: Final = 1 << 16


class RowPriority(ABC):
    """Picks the rows of one shard that are most worth saving.

    In this order: `touch` for each batch, and when a save is due `rows_to_save`, then, once they are
    written and before the next batch, `saved`. All tensors are on the CPU.

    Args:
        weight: float [rows, dim], read: the shard as it is when training starts.
        share: r, in (0, 1].

    Attributes:
        rows: of the shard.
        budget_rows: that a save takes at most: r of them, rounded down, but one at least.

    Raises:
        ValueError: a weight that has no rows or isn't [rows, dim], more rows than an int32 can number, or
            another share.
    """

    def __init__(self, weight: Tensor, share: float = SHARE) -> None:
        if weight.ndim != 2 or not 0 < weight.shape[0] <= _INT32_MAX:
            raise ValueError(
                f"weight is [rows, dim] with 1 to {_INT32_MAX} rows; its shape is {tuple(weight.shape)}"
            )
        if not 0 < share <= 1:
            raise ValueError(f"share, of the rows that a save takes, is above 0 and at most 1; it is {share}")
        self.rows: Final = weight.shape[0]
        self.budget_rows: Final = max(1, math.floor(share * self.rows))

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """What it holds between two calls, at most."""

    @property
    def lasting(self) -> dict[str, Tensor]:
        """Tensors by name, changed in place, in which it goes on after a restart of its process; live."""
        return {}

    @abstractmethod
    def touch(self, rows: Tensor) -> None:
        """A batch looks these rows up.

        Args:
            rows: integers of any shape, each from 0 to rows - 1, read. Twice means looked up
                twice.

        Raises:
            ValueError: no such row.
        """

    @abstractmethod
    def rows_to_save(self, weight: Tensor) -> Tensor:
        """The rows with the highest priority.

        Args:
            weight: float [rows, dim], read: the shard as it is now.

        Returns:
            int64 [at most budget_rows], ascending, each once.
        """

    @abstractmethod
    def saved(self, rows: Tensor, weight: Tensor) -> None:
        """These rows are saved: their priority starts from nothing.

        Args:
            rows: int64 [any number], each once, read: of `rows_to_save`, or all rows after a whole save.
            weight: float [rows, dim], read: the shard as it was saved.

        Raises:
            ValueError: no such row.
        """

    def _checked(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1)
        if flat.numel():
            low, high = (int(end) for end in flat.aminmax())
            if low < 0 or high >= self.rows:
                raise ValueError(f"rows are from 0 to {self.rows - 1}; they are from {low} to {high}")
        return flat


class Mfu(RowPriority):
    """CPR-MFU: the rows that were looked up most often since they were saved."""

    def __init__(self, weight: Tensor, share: float = SHARE) -> None:
        super().__init__(weight, share)
        self._counts = torch.zeros(self.rows, dtype=torch.int32)
        self._room = 0  # accesses that no count can overflow by; found when it is used up
        self._ones = torch.ones(0, dtype=torch.int32)

    @property
    def memory_bytes(self) -> int:
        """4 for each row."""
        return self._counts.nbytes

    @property
    def lasting(self) -> dict[str, Tensor]:
        """The counts."""
        return {"counts": self._counts}

    def touch(self, rows: Tensor) -> None:
        """Adds to the counts; they stop at the largest int32."""
        flat = rows.reshape(-1)
        accesses = flat.numel()
        if accesses > len(self._ones):
            self._ones = torch.ones(2 * accesses, dtype=torch.int32)
        if not self._has_room(accesses):
            self.add(*torch.unique(self._checked(flat), return_counts=True))
            return
        try:
            self._counts.index_add_(0, flat, self._ones[:accesses])
        except IndexError:
            self._checked(flat)  # says which row there isn't
            raise

    def add(self, rows: Tensor, times: Tensor) -> None:
        """Adds to the counts of rows that were looked up several times.

        Args:
            rows: integers [m], each once, read.
            times: int64 [m], from 0, read.

        Raises:
            ValueError: no such row.
        """
        checked = self._checked(rows)
        counts = self._counts[checked].to(torch.int64) + times
        self._counts[checked] = counts.clamp(max=_INT32_MAX).to(torch.int32)
        self._room = 0

    def _has_room(self, accesses: int) -> bool:
        """Whether this many more fit, whichever rows they are of."""
        if accesses > self._room:
            self._room = _INT32_MAX - int(self._counts.max())
        if accesses > self._room:
            return False
        self._room -= accesses
        return True

    def rows_to_save(self, weight: Tensor) -> Tensor:
        """Those with the highest counts."""
        return _highest(self._counts, self.budget_rows)

    def saved(self, rows: Tensor, weight: Tensor) -> None:
        """Clears their counts."""
        self._counts[self._checked(rows)] = 0


class Ssu(RowPriority):
    """CPR-SSU: rows that were looked up in every second batch, as many of them as fit in a list.

    After a restart of its process the list starts empty: the next save would have emptied it.

    Args:
        weight: as in `RowPriority`.
        share: as in `RowPriority`.
        seed: of what is discarded.
    """

    def __init__(self, weight: Tensor, share: float = SHARE, seed: int = 0) -> None:
        super().__init__(weight, share)
        self._generator = torch.Generator().manual_seed(seed)
        self._batches = 0
        self._list = torch.empty(0, dtype=torch.int32)  # ascending, each once

    @property
    def memory_bytes(self) -> int:
        """4 for each row of a full list."""
        return self.budget_rows * self._list.element_size()

    def touch(self, rows: Tensor) -> None:
        """Lists the rows of every second batch: O(r N) work, and as much memory meanwhile."""
        flat = self._checked(rows)
        self._batches += 1
        if self._batches % PERIOD:
            return
        both = torch.unique(torch.cat((self._list, flat.to(torch.int32))))
        if both.numel() > self.budget_rows:
            kept = torch.randperm(both.numel(), generator=self._generator)[: self.budget_rows]
            both = both[kept.sort().values]
        self._list = both

    def rows_to_save(self, weight: Tensor) -> Tensor:
        """The list."""
        return self._list.to(torch.int64)

    def saved(self, rows: Tensor, weight: Tensor) -> None:
        """Takes them off the list."""
        self._list = self._list[~torch.isin(self._list, self._checked(rows).to(torch.int32))]


class Scar(RowPriority):
    """CPR-SCAR: the rows that have moved farthest, by the L2 norm, from what was last saved of them.

    A row with a NaN or an infinite change has moved farther than all others.
    """

    def __init__(self, weight: Tensor, share: float = SHARE) -> None:
        super().__init__(weight, share)
        self._saved = weight.detach().clone()

    @property
    def memory_bytes(self) -> int:
        """As many as the shard's weights."""
        return self._saved.nbytes

    @property
    def lasting(self) -> dict[str, Tensor]:
        """The rows as last saved."""
        return {"saved": self._saved}

    def touch(self, rows: Tensor) -> None:
        """Nothing but a check: what counts is how far rows have moved."""
        self._checked(rows)

    def rows_to_save(self, weight: Tensor) -> Tensor:
        """Those that have moved farthest: reads all rows, in chunks."""
        exact = torch.promote_types(weight.dtype, torch.float32)
        now, then = weight.detach().split(_CHUNK_ROWS), self._saved.split(_CHUNK_ROWS)
        change = torch.cat(
            [
                torch.linalg.vector_norm(a.to(exact) - b.to(exact), dim=1)
                for a, b in zip(now, then, strict=True)
            ]
        )
        return _highest(change.nan_to_num(nan=math.inf, posinf=math.inf), self.budget_rows)

    def saved(self, rows: Tensor, weight: Tensor) -> None:
        """Copies them: the next changes count from here."""
        checked = self._checked(rows)
        self._saved[checked] = weight.detach()[checked]


PRIORITIES: Final[dict[str, type[RowPriority]]] = {"mfu": Mfu, "ssu": Ssu, "scar": Scar}
"""By the papers' names. Each is made from a shard's weight."""


def large_tables(sizes: Sequence[int], share: float = 0.99) -> list[int]:
    """The fewest tables that hold a share of all bytes: those whose rows are saved by priority.

    The paper takes 7 of Criteo's 26 tables (recalled). By this rule they are 6 of Kaggle's, with 99.2 % of
    the rows; a share of 0.995 takes 7.

    Args:
        sizes: of each table, in bytes or, with equal rows, in rows.
        share: in (0, 1].

    Returns:
        Their positions in `sizes`, ascending; of two of the same size the first is taken first.

    Raises:
        ValueError: another share, or a negative size.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share, of all bytes, is above 0 and at most 1; it is {share}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes are numbers from 0 on; they are {list(sizes)}")
    wanted = share * sum(sizes)
    found: list[int] = []
    held = 0
    for table in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        if held >= wanted:
            break
        found.append(table)
        held += sizes[table]
    return sorted(found)


def _highest(priority: Tensor, most: int) -> Tensor:
    """At most `count` rows of the highest priorities above 0, ascending; ties go to the lower row."""
    rows = torch.nonzero(priority > 0).reshape(-1)
    if rows.numel() <= most:
        return rows
    values = priority[rows]
    threshold = torch.topk(values, most).values.min()
    above = rows[values > threshold]
    ties = rows[values == threshold][: most - above.numel()]
    return torch.cat((above, ties)).sort().values
