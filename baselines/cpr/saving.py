"""What a save takes, and when: everything each T_save, or, by priority, r of the rows each r T_save.

Small tables are saved whole each time: they are few bytes (chosen). What is large is decided by the bytes of
whole tables, over all ranks. The interval r T_save is a whole number of steps, at least one (chosen).

Rows count as used when they are about to change (`LiveTable.on_touch`): with TorchRec once for each lookup,
with ecemb.nn once for each batch that has them, because its gradients name each row once; `accesses` finds
the other lookups, where `Saving` is given it.

Must not know: files, other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from baselines.state import Table, row_key
from baselines.stopwatch import Stopwatch
from ecemb.errors import ConfigurationError
from ecemb.nn import ShardedEmbeddingBag

from .accesses import Accesses
from .priority import PRIORITIES, SHARE, Mfu, RowPriority, large_tables
from .saved import ROWS


class LiveTable(Table, Protocol):
    """One of `ecemb.tables`."""

    rows: int

    def on_touch(self, hook: Callable[[Tensor], None]) -> Callable[[], None]:
        """Calls a hook with the rows that are about to change; returns what ends it."""
        ...


class Saving:
    """When a rank saves, and what.

    Args:
        every: steps in which the volume of everything is saved once (T_save).
        priority: "mfu", "ssu" or "scar", of `priority.PRIORITIES`; None saves everything each time (vanilla).
        share: r, for priorities.

    Attributes:
        interval: steps between saves.
        touching: what following rows has taken within steps.

    Raises:
        ValueError: an interval below 1, or no such priority, or a share that is not in (0, 1].
    """

    def __init__(self, every: int, priority: str | None = None, share: float = SHARE) -> None:
        if every < 1:
            raise ValueError(f"every=, in steps, is above 0; got {every}")
        if priority is not None and priority not in PRIORITIES:
            raise ValueError(f"priority= is one of {sorted(PRIORITIES)}, or None; got {priority!r}")
        if not 0 < share <= 1:
            raise ValueError(f"share=, of the rows that a save takes, is above 0 and at most 1; got {share}")
        self._every, self._priority, self._share = every, priority, share
        self.interval = every if priority is None else max(1, round(share * every))
        self.touching = Stopwatch()
        self._ranked: dict[str, RowPriority] = {}
        self._accesses: Accesses | None = None
        self._ends: list[Callable[[], None]] = []

    def lasting(self) -> dict[str, Tensor]:
        """Tensors by name in which priorities go on after a restart of the process; live."""
        return {
            f"{kind} of {name}": tensor
            for name, ranked in self._ranked.items()
            for kind, tensor in ranked.lasting.items()
        }

    @property
    def memory_bytes(self) -> int:
        """What priorities take."""
        followed = 0 if self._accesses is None else self._accesses.memory_bytes
        return followed + sum(one.memory_bytes for one in self._ranked.values())

    def watch(
        self,
        tables: Sequence[LiveTable],
        sizes: Mapping[str, int],
        modules: Mapping[str, ShardedEmbeddingBag] | None = None,
    ) -> None:
        """From here on, follows the rows of large tables, which stand as they are saved.

        Args:
            tables: this rank's.
            sizes: bytes of whole tables, over all ranks, by name.
            modules: those of ecemb.nn by name, the same on all ranks: their lookups are counted, where a
                priority counts them.
        """
        if self._priority is None:
            return
        names = sorted(sizes)
        large = {names[number] for number in large_tables([sizes[name] for name in names])}
        if modules and PRIORITIES[self._priority] is Mfu:
            self._accesses = Accesses({name: one for name, one in modules.items() if name in large})
        for table in tables:
            if table.name not in large or not table.rows:
                continue
            ranked = PRIORITIES[self._priority](table.tensors["weight"], self._share)
            self._ranked[table.name] = ranked
            with suppress(ConfigurationError):  # nothing trains it: no row of it ever needs to be saved again
                self._ends.append(table.on_touch(self._hook(table.name, ranked.touch)))

    def _hook(self, table: str, touch: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def hook(rows: Tensor) -> None:
            with self.touching.running():
                touch(rows)
                if self._accesses is not None and table in self._accesses:
                    self._accesses.changed(table, rows)

        return hook

    @property
    def sent_bytes(self) -> int:
        """To other ranks, to count lookups."""
        return 0 if self._accesses is None else self._accesses.sent_bytes

    def count_lookups(self) -> None:
        """Before a save that is due: counts lookups of other ranks. All ranks."""
        if self._accesses is None:
            return
        for name, (rows, times) in self._accesses.exchange().items():
            if isinstance(ranked := self._ranked.get(name), Mfu):
                ranked.add(rows, times)

    def unwatch(self) -> None:
        """Ends that."""
        if self._accesses is not None:
            self._accesses.end()
        for end in self._ends:
            end()
        self._ends.clear()

    def is_due(self, step: int) -> bool:
        """Whether to save before this step."""
        return step % self.interval == 0

    def since(self, step: int) -> int:
        """Since which step samples count as lost, if a save before this step is the last one.

        With priorities, PLS follows T_save as without: at equal PLS, they are to lose less quality.
        """
        return step - step % self._every

    def some(self, tables: Sequence[LiveTable]) -> dict[str, Tensor] | None:
        """What a save takes, as `SavedRank.save_rows` has it; None: everything."""
        if self._priority is None:
            return None
        found: dict[str, Tensor] = {}
        for table in tables:
            ranked = self._ranked.get(table.name)
            rows = None if ranked is None else ranked.rows_to_save(table.tensors["weight"])
            for name, tensor in table.tensors.items():
                key = row_key(table.name, name)
                if rows is not None:
                    found[key], found[f"{ROWS}{key}"] = tensor[rows], rows
                elif tensor.numel():
                    found[key] = tensor
        return found

    def saved(self, tables: Sequence[LiveTable], some: Mapping[str, Tensor] | None) -> None:
        """What `some` gave is saved; None: everything."""
        for table in tables:
            if (ranked := self._ranked.get(table.name)) is not None:
                rows = None if some is None else some[f"{ROWS}{row_key(table.name, 'weight')}"]
                ranked.saved(torch.arange(table.rows) if rows is None else rows, table.tensors["weight"])
