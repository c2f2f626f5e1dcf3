"""N servers in one process, each with its shards of all tables, which save, fail and recover by themselves.

The paper (Maeng et al., MLSys 2021) emulates failures in a real training, and so does this: the training
is real, its servers are not. They save by `saving` and `saver`, as real ranks do under `recovery`, and keep
what they saved in memory in place of files. What is no table belongs to the trainers, which don't fail. So
the others go on, a survivor's priorities as well, and no step is run again.

Tables are sharded by rows into blocks of equal length, as ecemb.nn's are (chosen). A failure strikes between
two steps, and takes the servers' rows to what they saved last, of each row's weight and optimizer state.

Must not know: what is trained, when failures come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from baselines.stopwatch import Stopwatch

from .pls import PlsAccount
from .priority import SHARE
from .saved import Mark, put_on
from .saver import Saver, take_up
from .saving import Saving

Hook = Callable[[Tensor], None]


class Shard:
    """Rows of a table at one server: a `saving.LiveTable`.

    Args:
        name: of the table.
        tensors: by name, of the same number of rows each; live.
    """

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name, self.tensors = name, dict(tensors)
        self.rows = len(self.tensors["weight"])
        self._hooks: list[Hook] = []

    def on_touch(self, hook: Hook) -> Callable[[], None]:
        """Calls a hook with the rows that are about to change; returns what ends it."""
        self._hooks.append(hook)
        return lambda: self._hooks.remove(hook)

    @property
    def followed(self) -> bool:
        """Whether there is a hook."""
        return bool(self._hooks)

    def touch(self, rows: Tensor) -> None:
        """These rows are about to change.

        Args:
            rows: int64 [any number], as often as they are looked up, read.
        """
        for hook in self._hooks:
            hook(rows)


class SavedServer:
    """What a server has saved, in memory: a `saver.Store`."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}

    def keys(self) -> set[str]:
        """Of the rows' tensors that were saved."""
        return set(self.rows)

    def save(self, rows: Mapping[str, Tensor], rest: Mapping[str, Tensor], mark: Mark) -> None:
        """Saves all rows."""
        if self.rows.keys() == rows.keys():
            put_on(self.rows, rows)
        else:
            self.rows = {key: tensor.detach().clone() for key, tensor in rows.items()}

    def save_rows(self, some: Mapping[str, Tensor], rest: Mapping[str, Tensor], mark: Mark) -> None:
        """Saves what `Saving.some` gives, on top of what is saved."""
        put_on(self.rows, some)


class Server:
    """One server.

    Args:
        shards: its part of all tables.
        sizes: bytes of whole tables by name.
        make: makes its priorities.
    """

    def __init__(self, shards: Sequence[Shard], sizes: Mapping[str, int], make: Callable[[], Saving]) -> None:
        self.shards = list(shards)
        self._sizes, self._make, self._store = sizes, make, SavedServer()
        self._touched_s = 0.0
        self._begin()
        self.saver.save(self.shards, {}, 0, whole=True)

    @property
    def touched_s(self) -> float:
        """Seconds that following rows has taken."""
        return self._touched_s + self._saving.touching.seconds

    @property
    def priority_bytes(self) -> int:
        """What priorities take."""
        return self._saving.memory_bytes

    def end(self, step: int) -> bool:
        """Called when `step` steps are done: saves what is due; returns whether anything was."""
        due = self._saving.is_due(step)
        if due:
            self.saver.save(self.shards, {}, step)
        return due

    def fail(self) -> None:
        """Its rows are as last saved, and its priorities start over, as after any start of a process."""
        take_up(self.shards, self._store.rows)
        self._saving.unwatch()
        self._touched_s = self.touched_s
        since = self.saver.since
        self._begin()
        self.saver.since = since

    def _begin(self) -> None:
        self._saving = self._make()
        self._saving.watch(self.shards, self._sizes)
        self.saver = Saver(self._store, self._saving)


class Servers:
    """All tables of a training, on N servers.

    In this order: `touch`, for each table of a step, before its rows change; `end`, after the step; `fail`
    between two steps.

    Args:
        tables: by name, their tensors by name, of the same number of rows each: "weight", float [rows, dim],
            and what the optimizer keeps for each row. Live: changed in place by `fail` alone.
        servers: N.
        steps: of the whole training.
        every: see `Saving`.
        priority: see `Saving`.
        share: see `Saving`.

    Attributes:
        saving_s: seconds that saves took, all servers together.
        saves: how many there were, of all servers at once, without the first.

    Raises:
        ValueError: see `Saving` and `PlsAccount`.
    """

    def __init__(
        self,
        tables: Mapping[str, Mapping[str, Tensor]],
        servers: int,
        steps: int,
        *,
        every: int,
        priority: str | None = None,
        share: float = SHARE,
    ) -> None:
        self._account = PlsAccount(steps, servers)
        self._saving_watch = Stopwatch()
        self.saves = 0
        self._blocks = {name: -(-len(tensors["weight"]) // servers) for name, tensors in tables.items()}
        self._bounds = {name: torch.arange(servers + 1) * block for name, block in self._blocks.items()}
        sizes = {name: sum(tensor.nbytes for tensor in tensors.values()) for name, tensors in tables.items()}

        def shard(name: str, server: int) -> Shard:
            block = self._blocks[name]
            own = slice(server * block, (server + 1) * block)
            return Shard(name, {kind: tensor[own] for kind, tensor in tables[name].items()})

        self._servers = [
            Server(
                [shard(name, server) for name in tables],
                sizes,
                lambda: Saving(every, priority, share),
            )
            for server in range(servers)
        ]
        self._of_table = {
            name: [server.shards[place] for server in self._servers] for place, name in enumerate(tables)
        }

    @property
    def pls(self) -> float:
        """The portion of lost samples so far."""
        return self._account.pls

    @property
    def saving_s(self) -> float:
        """Seconds that saves took, all servers together."""
        return self._saving_watch.seconds

    @property
    def touched_s(self) -> float:
        """Seconds that following rows took, all servers together."""
        return sum(server.touched_s for server in self._servers)

    @property
    def priority_bytes(self) -> int:
        """What the priorities of all servers take."""
        return sum(server.priority_bytes for server in self._servers)

    def touch(self, table: str, rows: Tensor) -> None:
        """These rows are about to change.

        Args:
            table: which.
            rows: int64 [any number], ascending, as often as they are looked up, read.
        """
        shards = self._of_table[table]
        if not any(shard.followed for shard in shards):
            return
        cuts = torch.searchsorted(rows, self._bounds[table]).tolist()
        for server, shard in enumerate(shards):
            first, end = cuts[server], cuts[server + 1]
            if end > first:
                shard.touch(rows[first:end] - server * self._blocks[table])

    def end(self, step: int) -> None:
        """Called when `step` steps are done: all servers save what is due."""
        with self._saving_watch.running():
            saved = [number for number, server in enumerate(self._servers) if server.end(step)]
        self.saves += bool(saved)
        for number in saved:
            self._account.saved(self._servers[number].saver.since, [number])

    def fail(self, step: int, servers: Sequence[int]) -> None:
        """These servers fail together when `step` steps are done, and take up their saved rows.

        Raises:
            ValueError: no such server, or one named twice.
        """
        self._account.failed(step, servers)
        for number in servers:
            self._servers[number].fail()
