"""What earlier starts left on this host, and when it may go.

Owns the removal of arenas that a start found and doesn't go on with. `Judgement` says what counts; nothing is
removed here that the arenas of a start have not superseded, or that could still be of use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from ..arena.header import State
from ..arena.scan import remove
from ..errors import EcembError
from ..group.assignment import Report
from ..recovery.plan import RecoveryPlan
from ..session import Session

logger: logging.Logger = logging.getLogger("ecemb")

_BLOCK_BYTES = 512  # of `st_blocks`


def make_room(session: Session, plan: RecoveryPlan) -> None:
    """Removes arenas of this host that hold nothing, before this start's own are LIVE.

    Beside survivors, a replacement's arena that was not rebuilt to the end holds nothing new. Beside arenas
    that move and have opened this start's generation, neither do those that an earlier move made: they are
    stale from here on.
    """
    for report in _spent(session, plan):
        _remove(session, report)


def room_to_make_bytes(session: Session, plan: RecoveryPlan) -> int:
    """Memory that `make_room` frees on this host."""
    here = [report.path for report in _spent(session, plan) if report.host == session.directory.host]
    found = [os.stat(path).st_blocks * _BLOCK_BYTES for path in here if os.path.exists(path)]
    return sum(found)


def _spent(session: Session, plan: RecoveryPlan) -> Iterator[Report]:
    """The arenas of all hosts that `make_room` removes."""
    survivors = {header.constants.arena_id for header in session.roster.judgement.survivors}
    half_made = () if plan.begins else (State.REBUILDING,)
    if plan.kind == "move":
        half_made = (State.INIT, State.REBUILDING)
    spent = {header.constants.arena_id for header in session.roster.judgement.hollow}
    for report in session.roster.reports:
        header = report.header
        if header is None:
            hollow = report.torn
        else:
            name = header.constants.arena_id
            hollow = name in spent or (header.state in half_made and name not in survivors)
        if hollow:
            yield report


def discard_superseded(session: Session) -> None:
    """Removes what the arenas of this start have superseded on this host; all of them are LIVE.

    They have opened a generation that is higher than every other arena's here has joined, and what can't be
    read counted as lost.
    """
    kept = {header.constants.arena_id for header in session.roster.judgement.survivors}
    for report in session.roster.reports:
        if report.header is None or report.header.constants.arena_id not in kept:
            _remove(session, report)


def _remove(session: Session, report: Report) -> None:
    if report.host == session.directory.host:
        try:
            remove(Path(report.path))
        except EcembError as error:
            logger.warning("%s", error)
