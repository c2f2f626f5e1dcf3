"""Which of the reported headers count, and for what: the one judgement that every part of a start asks.

Assignment of ranks, negotiation, plan and removal of arenas use `classify`, and judge no header themselves.
Pure: all ranks get the same answer from the same reports. Must not know where arenas lie.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .errors import InconsistentArenas
from .header import NONE, Header, State


@dataclass(frozen=True)
class Judgement:
    """What the headers say together. Headers keep the order in which they were given.

    Attributes:
        opened: the last generation that was opened, by the headers that have a say and by the store's mark;
            NONE before the first.
        survivors: those whose memory counts; of one fill, and one of each rank at most.
        finished: tombstones that count: the job is finished if there is one.
        evidence: those that show that the job had started, whether their memory counts or not.
        hollow: those that no later start can use, whatever else is found then. They may be removed to make
            room; all others stay until the arenas of this start are LIVE.
    """

    opened: int
    survivors: tuple[Header, ...]
    finished: tuple[Header, ...]
    evidence: tuple[Header, ...]
    hollow: tuple[Header, ...]


def classify(headers: Sequence[Header], opened: int = NONE) -> Judgement:
    """Judges all headers that were reported.

    - An INIT arena is *settled* iff a LIVE, REBUILDING or FINISHED arena of its fill is reported. One that is
      not has no say in what was opened: its fresh start or resume was cut off before anything depended on it.
    - A header is stale if its `joined` is below the last generation that was opened: the job went on without
      it. The last generation is the highest `opened` or fill of the headers that have a say, or what the mark
      says.
    - Survivors are LIVE, or INIT and prepared beside a LIVE or REBUILDING one of their fill; and not stale.
    - LIVE and REBUILDING arenas show that the job had started, and so does an INIT arena that was prepared
      with a transaction above 0, by a resume.
    - A tombstone counts only if it is not stale, and nothing shows that a later history had started. One of
      an earlier run of the same name does not.

    Args:
        headers: every arena of the job that was found, in any order.
        opened: the last generation that was opened as far as the store knows; NONE without its mark.

    Raises:
        InconsistentArenas: one generation with two ids; survivors of two fills, or two of one rank.
    """
    born = {header.constants.fill for header in headers if header.state is not State.INIT}
    heard = [header for header in headers if header.constants.fill in born]
    last = max([opened, *(max(header.opened, header.constants.fill) for header in heard)])
    current = [header for header in heard if header.joined >= last]
    _check_generations(current)
    living = {h.constants.fill for h in headers if h.state in (State.LIVE, State.REBUILDING)}
    survivors = tuple(header for header in current if _holds(header, living))
    _check_fills(survivors)
    _check_ranks(survivors)
    evidence = tuple(header for header in headers if _shows_a_start(header))
    begun = max((header.constants.fill for header in evidence), default=NONE)
    tombstones = (header for header in current if header.state is State.FINISHED)
    return Judgement(
        opened=last,
        survivors=survivors,
        finished=tuple(header for header in tombstones if header.constants.fill >= begun),
        evidence=evidence,
        hollow=tuple(
            header for header in headers if header.constants.fill not in born and _spent(header, headers)
        ),
    )


def _holds(header: Header, living: Collection[int]) -> bool:
    """Whether all of a transaction is in the arena, of a fill that LIVE or REBUILDING arenas are of."""
    if header.state is State.INIT:
        return header.prepared >= 0 and header.constants.fill in living
    return header.state is State.LIVE


def _shows_a_start(header: Header) -> bool:
    if header.state is State.INIT:
        return header.prepared > 0
    return header.state in (State.LIVE, State.REBUILDING)


def _spent(header: Header, headers: Sequence[Header]) -> bool:
    """Whether an INIT arena that isn't settled can never be: unprepared, or of a fill that never went LIVE.

    Nothing of a fill goes LIVE before all of it is prepared. If every rank's arena of the fill is reported,
    none is LIVE elsewhere. What a resume prepared is kept all the same: it shows that the job had started.
    """
    if header.prepared < 0:
        return True
    fill, size = header.constants.fill, header.constants.world_size
    ranks = {other.constants.rank for other in headers if other.constants.fill == fill}
    return header.prepared == 0 and len(ranks) == size


def _check_generations(headers: Sequence[Header]) -> None:
    ids: dict[int, int] = {}
    for header in headers:
        if header.joined == NONE or header.generation_id == NONE:
            continue
        known = ids.setdefault(header.joined, header.generation_id)
        if known != header.generation_id:
            raise InconsistentArenas(
                f"generation {header.joined} of job {header.constants.job!r} was begun twice, with "
                f"ids {known:x} and {header.generation_id:x} (arena {header.constants.arena_id} of "
                f"rank {header.constants.rank}): two groups of workers ran the same job apart from "
                "each other. Remove the arenas of the group that shall not count with "
                "`python -m ecemb arenas rm`."
            )


def _check_fills(survivors: Sequence[Header]) -> None:
    """Memory of two histories must not be mixed: parity of one doesn't fit rows of the other."""
    fills: dict[int, Header] = {}
    for header in survivors:
        fills.setdefault(header.constants.fill, header)
    if len(fills) > 1:
        one, other = (fills[fill].constants for fill in sorted(fills)[-2:])
        raise InconsistentArenas(
            f"arenas of job {one.job!r} are of two histories, begun in generations {one.fill} (such as arena "
            f"{one.arena_id} of rank {one.rank}) and {other.fill} (such as arena {other.arena_id} of rank "
            f"{other.rank}), and neither is known to have replaced the other. Remove the arenas of the one "
            "that shall not count with `python -m ecemb arenas rm`."
        )


def _check_ranks(headers: Sequence[Header]) -> None:
    owners: dict[int, str] = {}
    for header in headers:
        constants = header.constants
        other = owners.setdefault(constants.rank, constants.arena_id)
        if other != constants.arena_id:
            raise InconsistentArenas(
                f"rank {constants.rank} of job {constants.job!r} has two valid arenas, {other} and "
                f"{constants.arena_id}. Remove the one that shall not count with "
                "`python -m ecemb arenas rm`."
            )
