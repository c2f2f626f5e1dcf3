"""Judges the headers of a job's arenas: which are survivors, tombstones, or may be removed.

No other module judges headers: assignment of ranks, negotiation, recovery plan and removal of arenas all use
`classify`. It is pure: all ranks get the same result from the same reports. Must not know the paths of
arenas.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..errors import InconsistentArenas
from .header import NONE, Header, State


@dataclass(frozen=True)
class Judgement:
    """The judgement of all headers together. Headers keep their order.

    Attributes:
        opened: the last generation that was opened, according to the settled headers and the store's mark;
            NONE before the first generation.
        survivors: the headers whose memory counts: all of one fill, and at most one for each rank.
        finished: the tombstones that count; if there are any, the job is finished.
        evidence: the headers that show that the job had started, even if their memory doesn't count.
        hollow: the headers of arenas that no later start can use. These arenas may be removed to make room;
            all others stay until the arenas of this start are LIVE.
    """

    opened: int
    survivors: tuple[Header, ...]
    finished: tuple[Header, ...]
    evidence: tuple[Header, ...]
    hollow: tuple[Header, ...]


def classify(headers: Sequence[Header], opened: int = NONE) -> Judgement:
    """Judges all headers that were reported.

    - An INIT arena is *settled* iff a LIVE, REBUILDING or FINISHED arena of its fill is reported. The words
      of an unsettled arena are ignored: its fresh start or resume was interrupted before any transaction
      could depend on the arena.
    - A header is stale if its `joined` is below the last generation that was opened: the job went on without
      it. The last generation is the highest of `opened` and fill in settled headers, and of the mark.
    - A survivor is not stale, and is either LIVE, or INIT, prepared and of the fill of a LIVE or REBUILDING
      arena. If there are survivors of several fills, those of the highest fill count, unless an arena of
      another of them has opened this generation or a later one, which is an error.
    - LIVE and REBUILDING arenas show that the job had started. So does an INIT arena that a resume prepared
      with a transaction above 0.
    - A tombstone counts only if it is not stale, and no header shows that a later history had started. The
      tombstone of an earlier run of the same name doesn't count.

    Args:
        headers: the headers of all arenas of the job that were found, in any order.
        opened: the last generation that was opened according to the store's mark; NONE without a mark.

    Raises:
        InconsistentArenas: one generation has two ids; or two fills both went on after the later one began;
            or two survivors have the same rank.
    """
    born = {header.constants.fill for header in headers if header.state is not State.INIT}
    settled = [header for header in headers if header.constants.fill in born]
    last = max([opened, *(max(header.opened, header.constants.fill) for header in settled)])
    current = [header for header in settled if header.joined >= last]
    _check_generations(current)
    living = {h.constants.fill for h in headers if h.state in (State.LIVE, State.REBUILDING)}
    survivors = _of_last_history([header for header in current if _holds(header, living)], settled)
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
    """Whether an arena holds a whole transaction: it is LIVE, or INIT and prepared, of a fill in `living`.

    Args:
        header: of the arena.
        living: the fills of LIVE and REBUILDING arenas.
    """
    if header.state is State.INIT:
        return header.prepared >= 0 and header.constants.fill in living
    return header.state is State.LIVE


def _shows_a_start(header: Header) -> bool:
    if header.state is State.INIT:
        return header.prepared > 0
    return header.state in (State.LIVE, State.REBUILDING)


def _spent(header: Header, headers: Sequence[Header]) -> bool:
    """Whether an unsettled INIT arena can never be settled: unprepared, or of a fill that never went LIVE.

    No arena of a fill goes LIVE before all arenas of it are prepared. If the arenas of all ranks are
    reported, no other arena of the fill is LIVE. An arena that a resume prepared is kept: it shows that the
    job had started.
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
                f"generation {header.joined} of job {header.constants.job!r} was started twice, with "
                f"ids {known:x} and {header.generation_id:x} (arena {header.constants.arena_id} of "
                f"rank {header.constants.rank}): two groups of workers ran the same job without "
                "seeing each other. Remove the arenas of the group that is not to count with "
                "`ecemb arenas rm`."
            )


def _of_last_history(survivors: Sequence[Header], settled: Sequence[Header]) -> tuple[Header, ...]:
    """The survivors of the highest fill. Parity of one fill doesn't fit the rows of another.

    Raises:
        InconsistentArenas: an arena of another survivor's fill has opened the highest fill's generation, or a
            later one.
    """
    last = max((header.constants.fill for header in survivors), default=NONE)
    others = {header.constants.fill for header in survivors} - {last}
    if apart := [h for h in settled if h.constants.fill in others and h.opened >= last]:
        other = apart[0].constants
        one = next(header.constants for header in survivors if header.constants.fill == last)
        raise InconsistentArenas(
            f"arenas of job {one.job!r} have two histories, which began in generations {other.fill} (such as "
            f"arena {other.arena_id} of rank {other.rank}) and {one.fill} (such as arena {one.arena_id} of "
            f"rank {one.rank}), and it is unknown which replaced the other. Remove the arenas of the "
            f"history that is not to count with `ecemb arenas rm`."
        )
    return tuple(header for header in survivors if header.constants.fill == last)


def _check_ranks(headers: Sequence[Header]) -> None:
    owners: dict[int, str] = {}
    for header in headers:
        constants = header.constants
        other = owners.setdefault(constants.rank, constants.arena_id)
        if other != constants.arena_id:
            raise InconsistentArenas(
                f"rank {constants.rank} of job {constants.job!r} has two valid arenas, {other} and "
                f"{constants.arena_id}. Remove the arena that is not to count with "
                "`ecemb arenas rm`."
            )
