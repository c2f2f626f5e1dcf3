"""Who survived, which step comes next, and who takes up its saved rows: a pure function of what ranks hold.

Must not know: processes, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .saved import Mark, SavesLost


@dataclass(frozen=True)
class Held:
    """What one rank finds at its start.

    Attributes:
        steps: of which its machine's memory has the state that is no row, at most two; its rows are there if
            any is.
        saved: when it saved last; None if it never did.
    """

    steps: tuple[int, ...]
    saved: Mark | None


@dataclass(frozen=True)
class Plan:
    """How all ranks go on.

    Attributes:
        step: that comes next.
        source: rank with the state that all ranks share: a survivor, if there is one.
        failed: ranks that take up what they saved, ascending.
        steps_lost: for each of them, how many steps its rows have forgotten.
    """

    step: int
    source: int
    failed: tuple[int, ...]
    steps_lost: tuple[int, ...]


def plan(held: Sequence[Held]) -> Plan | None:
    """How to go on from what is there.

    Survivors may have ended a step apart: one can't end a step that another has not begun. The step that not
    all of them have ended is run again, and rows that had taken it take it twice. What is older than that is
    left over: its rank has been elsewhere since, and failed. If no rank survived, all take up what they
    saved.

    Args:
        held: by rank.

    Returns:
        None if training hasn't begun: not all ranks have saved, which they do before the first step.

    Raises:
        SavesLost: training has begun, and there is no way to go on.
    """
    newest = max((max(one.steps) for one in held if one.steps), default=None)
    survivors = [
        rank
        for rank, one in enumerate(held)
        if newest is not None and max(one.steps, default=-2) >= newest - 1
    ]
    failed = [rank for rank in range(len(held)) if rank not in survivors]
    unsaved = [rank for rank in failed if held[rank].saved is None]
    step, behind = 0, list[int]()
    if survivors:
        step = min(max(held[rank].steps) for rank in survivors)
        behind = [rank for rank in survivors if step not in held[rank].steps]
    elif (saved := held[0].saved) is not None:
        step = saved.step
    if unsaved:
        if step == 0:
            return None
        raise SavesLost(
            f"ranks {unsaved} have lost their memory, and there are no files of theirs, though step {step} "
            f"comes next: name the folder that the job was started with, or start over with empty ones"
        )
    if behind:
        raise SavesLost(
            f"step {step} comes next, and ranks {behind} hold only steps "
            f"{[held[rank].steps for rank in behind]}: their memory is of another job; start with empty "
            f"folders"
        )
    lost = [max(0, step - one.saved.since) for rank in failed if (one := held[rank]).saved is not None]
    return Plan(step, survivors[0] if survivors else 0, tuple(failed), tuple(lost))
