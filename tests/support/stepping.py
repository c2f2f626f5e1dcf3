"""Steps of tables that no guard takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ecemb.engines.discover import Tables


class Stepping:
    """Has tables whose hooks ask it whether a step is open."""

    tables: Tables
    is_open = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """What a guard does around a step's body."""
        self.tables.check()
        self.is_open = True
        try:
            yield
            self.tables.check()
        finally:
            self.is_open = False
