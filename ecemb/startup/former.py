"""The arenas of another number of ranks, from which an elastic start goes on.

Owns the refusals of such a start, and the description of the arenas as a checkpoint, so that
tables are compared as at a resume. Nothing is read or written here. Must not know: how rows move.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from ..checkpoint.contents import FORMAT
from ..checkpoint.interface import Stored
from ..errors import RendezvousError
from ..recovery import relayout
from ..recovery.plan import RecoveryPlan
from ..session import Session
from ..state import rank_state as rank_states
from .history import History
from .places import Places, unpacked
from .request import Request


@dataclasses.dataclass(frozen=True)
class Former:
    """What another number of ranks left in memory.

    Attributes:
        history: what their arenas hold alike.
        recovery: brings them to one transaction.
        places: where the rows of each rank stand.
    """

    history: History
    recovery: RecoveryPlan
    places: Places

    @classmethod
    def of(cls, history: History, recovery: RecoveryPlan) -> Former:
        """The ranks of a history that `check` let pass."""
        return cls(history, recovery, unpacked(history.everyone))

    @functools.cached_property
    def layout(self) -> relayout.Layout:
        """Each rank's rows, its rank state last."""
        room_bytes = self.history.rank_state_bytes
        shards = [
            (
                *(relayout.Shard(one.key(rank), one.layout, one.start) for one in of_rank),
                relayout.Shard(f"rank_state/{rank}", rank_states.layout(room_bytes)),
            )
            for rank, of_rank in enumerate(self.places)
        ]
        return relayout.Layout(self.history.placement, self.history.k, tuple(shards))

    def stored(self, job: str, more: Mapping[str, Any] | None = None) -> Stored:
        """The arenas as a checkpoint.

        Args:
            job: its name.
            more: facts that are known when the arenas have come to the transaction.
        """
        facts = {
            "format": FORMAT,
            "job": job,
            "lineage": self.history.lineage,
            "step": self.recovery.transaction,
            "world_size": self.history.world_size,
            "code": [self.history.n, self.history.k],
            "tables": [[shard.describe() for shard in of_rank] for of_rank in self.places],
            "rank_state_bytes": [],
            **(more or {}),
        }
        return Stored("the job's memory", self.recovery.transaction, facts)


def is_former(history: History | None, session: Session) -> bool:
    """Whether another number of ranks made the arenas that survived."""
    return history is not None and history.world_size != session.world_size


def check(session: Session, request: Request, history: History) -> None:
    """Refuses another number of ranks, unless the job is elastic.

    Raises:
        RendezvousError: it is not.
    """
    before, now = history.world_size, session.world_size
    launch = f"launch {before} (torchrun --nnodes x --nproc-per-node)"
    if not request.elastic:
        raise RendezvousError(
            f"job {session.job!r} had {before} ranks when it was started, and has {now} in this launch: "
            f"{launch}, let its memory move to this number with ecemb.protect(elastic=True), or begin a new "
            f"job under another name"
        )
