"""The rows that a lookup of FBGEMM's tables reads, by its arguments: as the host sees them, or on the device.

Must not know: FBGEMM's modules, journals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import UsageError
from ..kernels.contract import Ids


class Features:
    """The features of a batch of tables.

    Args:
        what: the batch, in errors.
        rows: int64 [features], rows of the table that each feature looks up.
        first: int64 [features], that table's first row in the batch, whose tables' rows follow one another.
    """

    def __init__(self, what: str, rows: Ids, first: Ids) -> None:
        self._what, self._rows, self._first = what, rows, first
        self._there: tuple[torch.Tensor, torch.Tensor] | None = None  # both where lookups are
        self._all_have_rows = bool(rows.all())
        self._beyond: torch.Tensor | None = None  # bool (), where lookups are

    def clear_beyond(self) -> None:
        """Forgets the ids that `has_beyond` tells of."""
        self._beyond = None

    def has_beyond(self) -> bool:
        """Whether `there` had an id of a table of which this rank has no rows. May wait for the device."""
        if self._beyond is not None and not self._beyond:
            self._beyond = None
        return self._beyond is not None

    def rows(self, indices: torch.Tensor, offsets: torch.Tensor, sizes: Any) -> Ids | None:
        """The rows of a lookup in the batch, int64 [m], with repeats; None if there are none.

        Args:
            indices: integers [L], an argument of the lookup, before or after FBGEMM's bounds check.
            offsets: integers [bags + 1]; features one after another, each with its bags.
            sizes: bags by feature and rank, or None if all features have equally many.

        Raises:
            UsageError: an id is of a table of which this rank has no rows.
        """
        values, ends = indices.numpy(force=True), offsets.numpy(force=True)
        if sizes is None:
            bags = (len(ends) - 1) // len(self._rows)
            edges = ends[::bags] if bags else np.zeros(len(self._rows) + 1, np.int64)
        else:
            edges = ends[np.cumsum([0, *(sum(of_feature) for of_feature in sizes)])]
        values = values[edges[0] : edges[-1]].astype(np.int64, copy=False)
        if not len(values):
            return None
        counts = edges[1:] - edges[:-1]
        some = counts.nonzero()[0]
        highest = np.maximum.reduceat(values.view(np.uint64), edges[some] - edges[0])
        numbers = self._first.repeat(counts)
        if np.logical_and.reduce(highest < self._rows[some].view(np.uint64)):  # so none is negative
            numbers += values
        else:  # FBGEMM looks up row 0 instead, and warns
            rows = np.repeat(self._rows, counts)
            if not rows.all():
                raise UsageError(
                    f"an id is beyond a table of {self._what} of which this rank has no rows: FBGEMM would "
                    f"train row 0 of another one. Look up ids below num_embeddings. No row was written"
                )
            numbers += np.where((values < 0) | (values >= rows), 0, values)
        return numbers

    def there(self, indices: torch.Tensor, offsets: torch.Tensor, sizes: Any) -> torch.Tensor:
        """The same where the lookup is, without a wait: those rows at least.

        Ids behind the last bag, which aren't read, may also give rows. An id of a table of which this rank
        has no rows gives the row behind it, and `has_beyond` tells of it: to refuse it here would be a wait.

        Returns:
            int64 [L] on the device of `indices`.
        """
        if sizes is None:
            edges = offsets[:: max(1, (len(offsets) - 1) // len(self._rows))]
        else:
            ends = np.cumsum([0, *(sum(of_feature) for of_feature in sizes)])
            edges = offsets[torch.from_numpy(ends).to(offsets.device, non_blocking=True)]  # read at once
        if self._there is None or self._there[0].device != indices.device:
            rows, first = (torch.from_numpy(one).to(indices.device) for one in (self._rows, self._first))
            self._there = rows, first
        rows, first = self._there
        place = torch.arange(len(indices), dtype=torch.int64, device=indices.device)
        feature = torch.searchsorted(edges[1:].to(torch.int64).contiguous(), place, right=True)
        feature.clamp_(max=len(rows) - 1)
        ids = indices.to(torch.int64)
        if not self._all_have_rows:
            is_read = (place >= edges[0]) & (place < edges[-1])
            found = (is_read & (rows[feature] == 0)).any()
            self._beyond = found if self._beyond is None else self._beyond | found
        is_row = (ids >= 0) & (ids < rows[feature])
        return first[feature] + torch.where(is_row, ids, 0)  # FBGEMM looks up row 0 instead, and warns
