"""The public way to a model's tables: their live tensors, and which rows are about to change.

Owns `tables` and `LiveTable`, a thin face over `adapters.tables`: whoever listens hears what a guard would
capture, from the same hooks.

Must not know: guards, arenas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigurationError
from .engine import Ids
from .tables import Tables, find, modules_of, optimizers_of, protected

TouchHook = Callable[[torch.Tensor], None]


def tables(
    model: nn.Module,
    *,
    optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer = (),
    tables: Mapping[str, nn.Module] | None = None,
) -> list[LiveTable]:
    """The sharded embedding tables of a model on this rank, protected or not.

    Finds what `ecemb.protect` would, by the same rules. Of a model that a guard protects, these are the
    guard's own tables, and the other arguments are not looked at.

    Args:
        model: the whole model.
        optimizers: those that update the tables; TorchRec's fused ones need not be named.
        tables: further tables, sharded by hand, by a key of your choice.

    Returns:
        The tables, in the order of `guard.tables`.

    Raises:
        UnsupportedTable, UnsupportedOptimizer: as `ecemb.protect`: which rows change can't be told.
        ConfigurationError: two tables have one name, `optimizers` are none, or `tables` have no keys.
    """
    if (found := protected(model)) is None:
        found, _ = find(model, modules_of(tables), optimizers_of(optimizers))
    return [LiveTable(found, index) for index in range(len(found.tables))]


class LiveTable:
    """This rank's shard of one table, as it is trained.

    Attributes:
        name: the table's key, as in `guard.tables`.
        rows: of the shard, 0 allowed.
    """

    def __init__(self, of: Tables, index: int) -> None:
        self._of, self._index = of, index
        self._table = of.tables[index]
        self.name: str = self._table.name
        self.rows: int = self._table.layout.rows

    @property
    def whole(self) -> tuple[int, int] | None:
        """Where the shard stands in the whole table: its first row there, and how many rows the whole has.

        None if the order of the shards over the ranks isn't known, as of a table that is sharded by hand.
        """
        return self._table.whole(dist.get_world_size() if dist.is_initialized() else 1)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The training's own tensors: "weight" [rows, dim], then each per-row optimizer state by its name.

        States are [rows] or [rows, dim]. Row i of each is row i of the shard. They are live: what is written
        to them is trained on, and, with a guard, has to be declared. Take them anew when you need them: they
        move in `ecemb.protect`, and state that an optimizer makes in its first step isn't there before.
        """
        return self._of.tensors(self._index)

    def on_touch(self, hook: TouchHook) -> Callable[[], None]:
        """Calls `hook(rows)` whenever rows of this shard are about to change, just before they do.

        The optimizer's step changes them, or, with TorchRec, backward; `guard.touch` and load_state_dict()
        (all rows) count, writes by hand without a guard don't. The values in `tensors` are the old ones then.
        Evaluation touches nothing; a step that is undone has touched what it has.

        Args:
            hook: called in the training's thread with int64 [m], m > 0: row numbers of the shard, in any
                order, repeats allowed. To be read, and copied if it is kept. What it raises, the step raises.

        Returns:
            Ends it when called.

        Raises:
            ConfigurationError: the table is trained by none of `optimizers`, and nobody would tell.
        """
        if not (self._table.is_told or self._of.is_protected):
            raise ConfigurationError(
                f"table {self.name!r} is updated by none of the optimizers that ecemb.tables() was given, so "
                f"that nothing tells which rows change: name them, ecemb.tables(model, optimizers=[...])"
            )

        def listener(index: int, ids: Ids) -> None:
            if index == self._index:
                hook(torch.from_numpy(ids))

        return self._of.listen(listener)
