"""Warns once of each change between two steps, because a failure or an abort would lose it.

Both continue from the last committed step. Code in front of a step (`lr = f(step)` at the top of the
loop) then runs again and makes the same change. Code behind a step does not run again, and code between
`ecemb.protect` and the loop runs on another state. So a thing that changes before the first step and again
before the second one is set in front of every step, which is safe. Every other change gets a warning.

Must not know: where the state is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger: logging.Logger = logging.getLogger("ecemb")


class Between:
    """Compares the state at each transaction's first step with the state at the last commit.

    Args:
        speaks: Whether to log warnings; else the same lines are logged at DEBUG.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        self._level = logging.WARNING if speaks else logging.DEBUG
        self._checks = 0
        self._at_first: dict[str, str] = {}
        self._known: set[str] = set()  # reported, or changed in front of each step

    def check(self, step: int, moved: Mapping[str, str]) -> None:
        """Checks the state when the first step of a transaction begins.

        Args:
            step: The step's number.
            moved: Each thing that changed since the last commit, or since `protect`; and how it changed.
        """
        self._checks += 1
        if self._checks == 1:
            self._at_first = dict(moved)
            return
        if self._checks == 2:
            self._known |= self._at_first.keys() & moved.keys()
            for thing in self._at_first.keys() - moved.keys():
                self._tell(thing, self._at_first[thing], "between ecemb.protect() and the first step")
        for thing in moved.keys() - self._known:
            self._tell(thing, moved[thing], f"between steps {step - 1} and {step}")

    def _tell(self, thing: str, how: str, when: str) -> None:
        self._known.add(thing)
        logger.log(
            self._level,
            "%s changed %s (%s): after a failure or an abort the job continues from the last committed step, "
            "this change is not made again, and training ends with other bits. Move it into "
            "`with guard.step():`, or in front of ecemb.protect(). This is said once",
            thing,
            when,
            how,
        )
