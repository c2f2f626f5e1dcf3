"""The public view of a model's tables: their live tensors, and reports of rows about to change.

Owns `tables` and `LiveTable`, a thin layer over `adapters.discover`: listeners get the rows that a guard
would capture, from the same hooks.

Must not know: guards, arenas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigurationError
from .discover import Tables, find, modules_of, optimizers_of, protected
from .engine import Ids

TouchHook = Callable[[torch.Tensor], None]


def tables(
    model: nn.Module,
    *,
    optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer = (),
    tables: Mapping[str, nn.Module] | None = None,
) -> list[LiveTable]:
    """The sharded embedding tables of a model on this rank, protected or not.

    Finds the tables that `ecemb.protect` would find. For a model that a guard protects, these are the
    guard's own tables, and the other arguments are ignored.

    Args:
        model: the whole model.
        optimizers: the optimizers of the tables; TorchRec's fused ones need not be named.
        tables: further tables, sharded by hand, by a key of your choice.

    Returns:
        The tables, in the order of `guard.tables`.

    Raises:
        UnsupportedTable, UnsupportedOptimizer: as `ecemb.protect`: changes of rows can't be reported.
        ConfigurationError: two tables have one name, `optimizers` are not optimizers, or `tables` have no
            keys.
    """
    if (found := protected(model)) is None:
        found, _ = find(model, modules_of(tables), optimizers_of(optimizers))
    return [LiveTable(found, index) for index in range(len(found.tables))]


class LiveTable:
    """This rank's shard of one table, live.

    Attributes:
        name: the table's key, as in `guard.tables`.
        rows: number of rows of the shard, 0 allowed.
    """

    def __init__(self, of: Tables, index: int) -> None:
        self._of, self._index = of, index
        self._table = of.tables[index]
        self.name: str = self._table.name
        self.rows: int = self._table.layout.rows

    @property
    def whole(self) -> tuple[int, int] | None:
        """The shard's position in the whole table: its first row there, and the whole table's number of rows.

        None if the order of the shards over the ranks isn't known, as for a table that is sharded by hand.
        """
        return self._table.whole(dist.get_world_size() if dist.is_initialized() else 1)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The training's own tensors: "weight" [rows, dim], then each per-row optimizer state by its name.

        States are [rows] or [rows, dim]. Maps and histories of a managed collision have their buffers
        instead, int64 [rows]. Row i of each is row i of the shard. They are live: training uses
        the values written to them, and a guard needs such writes declared. Fetch the tensors each time you
        need them: `ecemb.protect` moves them, an optimizer may create state in its first step, and
        this waits for rows that are still on their way to a replacement rank.
        """
        self._of.wait_for_table(self._index)
        return self._of.tensors(self._index)

    def on_touch(self, hook: TouchHook) -> Callable[[], None]:
        """Calls `hook(rows)` whenever rows of this shard are about to change, just before they do.

        The optimizer's step changes them, or, with TorchRec, backward; `guard.touch` and load_state_dict()
        (all rows) count, writes by hand without a guard don't. `tensors` still has the old values then.
        Evaluation reports nothing; an undone step has reported its rows.

        Args:
            hook: called in the training's thread with int64 [m], m > 0: row numbers of the shard, in any
                order, repeats allowed. Read it, and copy it to keep it. Its errors are raised by the step.

        Returns:
            A function that ends the calls.

        Raises:
            ConfigurationError: the table is trained by none of `optimizers`, so changes can't be reported.
        """
        if not (self._table.sees_all_changes or self._of.is_protected):
            raise ConfigurationError(
                f"table {self.name!r} is updated by none of the optimizers that ecemb.tables() got, so "
                f"changes of its rows can't be reported: name them, ecemb.tables(model, optimizers=[...])"
            )

        def listener(index: int, ids: Ids) -> None:
            if index == self._index:
                hook(torch.from_numpy(ids))

        return self._of.listen(listener)
