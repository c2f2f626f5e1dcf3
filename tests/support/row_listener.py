"""Listens to tables, and compares what they tell with what changes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ecemb.engines.discover import LiveTable


class Heard:
    """The rows that each table reported, and the values that they had then."""

    def __init__(self, tables: list[LiveTable]) -> None:
        self.tables = tables
        self.rows: dict[str, set[int]] = {table.name: set() for table in tables}
        self.before = {table.name: table.tensors["weight"].clone() for table in tables}
        self.ends = [table.on_touch(self._hook(table)) for table in tables]

    def _hook(self, table: LiveTable) -> Callable[[torch.Tensor], None]:
        def hook(rows: torch.Tensor) -> None:
            assert rows.dtype == torch.int64 and rows.dim() == 1 and len(rows)
            assert torch.equal(table.tensors["weight"][rows], self.before[table.name][rows])
            self.rows[table.name].update(rows.tolist())

        return hook

    def changed(self) -> dict[str, set[int]]:
        return {
            table.name: set(
                (table.tensors["weight"] != self.before[table.name]).any(1).nonzero()[:, 0].tolist()
            )
            for table in self.tables
        }
