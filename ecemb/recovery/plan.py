"""Decides what a start does: a pure function of the reports of all ranks (docs/protocol.md, 3.3).

Every rank computes the plan from the same reports and compares its digest with the others' before anything
is written. This module touches no memory and no network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Literal

from ..coding.placement import Placement
from ..errors import InconsistentArenas, JobFinished, StateLost, TooManyErasures
from ..memory.classify import Judgement, classify
from ..memory.header import NONE, Header
from ..net.wording import listed

Kind = Literal["fresh", "process", "memory", "checkpoint", "move"]


@dataclasses.dataclass(frozen=True)
class Rebuild:
    """One lost block and the blocks that it is rebuilt from.

    Attributes:
        stripe_class: the stripe class.
        block: index of the lost block in its stripe: data 0..k-1, parity k..n-1.
        rank: the replacement rank that receives it.
        sources: k pairs (block, rank) of survivors, in the order of the chain that adds them up.
    """

    stripe_class: int
    block: int
    rank: int
    sources: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class RecoveryPlan:
    """The actions of all ranks at this start.

    Attributes:
        kind: "fresh" (nothing to recover), "process" (all memory survived), "memory" (ranks are lost),
            "checkpoint" (new arenas are filled from a checkpoint, whatever memory survived; old ones stay
            until the new ones are LIVE, and a start after a crash before that makes this plan again) or
            "move" (new arenas are filled from those of another number of ranks, which are brought to the
            plan's transaction before anything moves).
        transaction: T, which all ranks reach: 0 is the initial state, t is after step t - 1.
        survivors: ranks whose arenas are valid; empty if the plan `begins`.
        lost: ranks without a valid arena; empty if the plan `begins`.
        rebuild: every lost block, in the order in which all ranks rebuild them.
        donor: the survivor that sends replicated state to replacement ranks; -1 without survivors.
        encode: whether parity is computed again from all rows, as rows were written without being declared.
    """

    kind: Kind
    transaction: int
    survivors: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    rebuild: tuple[Rebuild, ...] = ()
    donor: int = -1
    encode: bool = False

    @property
    def begins(self) -> bool:
        """Whether every rank creates a new arena whose first transaction is the plan's."""
        return self.kind in ("fresh", "checkpoint", "move")

    def digest(self) -> bytes:
        """16 bytes that are equal on all ranks exactly if their plans are equal."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def plan_recovery(
    headers: Sequence[Header],
    placement: Placement | None,
    *,
    started: bool = False,
    finished: bool = False,
    opened: int = NONE,
) -> RecoveryPlan:
    """Decides how the job continues. The same on every rank.

    Args:
        headers: headers of all arenas of the job found on any host, in any order.
        placement: who keeps whose parity; None for a world of one rank.
        started: whether the store has the job's `started` mark.
        finished: whether the store has the job's `finished` mark.
        opened: the last opened generation that the store has; NONE if it has none.

    Returns:
        A fresh start if nothing shows that the job had started; otherwise T = min(prepared) over the
        survivors, with the blocks to rebuild. A survivor that has prepared a later transaction undoes it, and
        a survivor that has not committed T redoes it.

    Raises:
        JobFinished: a valid tombstone, or the mark, shows that the job is finished.
        StateLost: the job had started, and no arena of it is left.
        TooManyErasures: more than r blocks of a stripe are lost.
        InconsistentArenas: no failure can have left these headers behind.
    """
    judged = classify(headers, opened)
    if finished or judged.finished:
        raise JobFinished(_over(judged))
    survivors = {header.constants.rank: header for header in judged.survivors}
    if not survivors:
        return _without_survivors(judged, started)
    world_size = next(iter(survivors.values())).constants.world_size
    lost = tuple(rank for rank in range(world_size) if rank not in survivors)
    _check_tolerated(placement, lost, sorted(survivors))
    transaction = min(header.prepared for header in survivors.values())
    ahead = {r: h.committed for r, h in sorted(survivors.items()) if h.committed > transaction}
    if ahead or transaction < 0:
        raise InconsistentArenas(
            f"ranks {ahead} (rank: committed) are ahead of the smallest prepared transaction "
            f"{transaction}: no failure leaves this behind; nothing was written. Keep the arenas for a "
            f"bug report, or remove them: ecemb arenas rm --job JOB"
        )
    undeclared = [rank for rank, header in sorted(survivors.items()) if header.undeclared]
    if lost and undeclared:
        raise InconsistentArenas(
            f"the memory of {listed(lost)} is lost, and rows of {listed(undeclared)} were written without "
            f"being declared, so parity no longer fits what was lost. Remove the arenas "
            f"(ecemb arenas rm --job JOB), and resume from a checkpoint: ecemb.protect(resume=)"
        )
    return RecoveryPlan(
        kind="memory" if lost else "process",
        transaction=transaction,
        survivors=tuple(sorted(survivors)),
        lost=lost,
        rebuild=rebuilds(placement, lost) if placement is not None else (),
        donor=min(survivors),
        encode=bool(undeclared),
    )


def _over(judged: Judgement) -> str:
    where = "the store's mark says so"
    if judged.finished:
        constants = judged.finished[0].constants
        where = f"arena {constants.arena_id} of rank {constants.rank} says so"
    return (
        f"the job is finished: guard.close() was called, {where}. It does not train again from step 0; give "
        f"job= another name, or remove what is left of this one: ecemb arenas rm --job JOB"
    )


def _without_survivors(judged: Judgement, started: bool) -> RecoveryPlan:
    left = sorted({header.constants.rank for header in judged.evidence})
    if left:
        raise TooManyErasures(
            f"only stale or half-rebuilt arenas are left (of ranks {left}): the memory of the ranks that "
            f"continued the job is gone",
            "Resume from a checkpoint: ecemb.protect(resume=), or remove the arenas to begin at step 0: "
            "ecemb arenas rm --job JOB",
        )
    if started:
        raise StateLost(
            "the job had started, and no arena of it is left on any host: it does not silently begin "
            "again at step 0",
            "Resume from a checkpoint: ecemb.protect(resume=), or launch the job again under another job= or "
            "with a new torchrun",
        )
    return RecoveryPlan("fresh", 0)


def _check_tolerated(placement: Placement | None, lost: tuple[int, ...], survivors: Sequence[int]) -> None:
    if placement is None or placement.tolerates(lost):
        return
    classes = placement.broken(lost)
    r = placement.n - placement.k
    raise TooManyErasures(
        f"the memory of {listed(lost)} is lost: more than r = {r} of the n = {placement.n} blocks of "
        f"stripe classes {list(classes)} are gone, so their rows can't be rebuilt. The memory of "
        f"{listed(survivors)} is untouched",
        "Bring back a lost host's memory, or resume from a checkpoint: ecemb.protect(resume=)",
    )


def rebuilds(
    placement: Placement, lost: Sequence[int], wrong: Mapping[int, int] | None = None
) -> tuple[Rebuild, ...]:
    """The blocks to rebuild, with balanced sources, in the order in which all ranks rebuild them.

    Args:
        placement: the placement of blocks.
        lost: ranks whose memory is lost.
        wrong: stripe class -> a survivor's block that is rebuilt as well, as it does not fit the others.
    """
    load = dict.fromkeys(range(placement.world_size), 0)
    found: list[Rebuild] = []
    for stripe_class, erased in sorted(placement.erasures(lost).items()):
        blocks = erased
        if wrong is not None and stripe_class in wrong:
            blocks = *erased, wrong[stripe_class]
        members = placement.members(stripe_class)
        available = [block for block in range(placement.n) if block not in blocks]
        available.sort(key=lambda block: (load[members[block]], members[block]))
        chosen = available[: placement.k]
        for lost_block in blocks:
            for block in chosen:
                load[members[block]] += 1
            sources = tuple((block, members[block]) for block in chosen)
            found.append(Rebuild(stripe_class, lost_block, members[lost_block], sources))
    return tuple(found)
