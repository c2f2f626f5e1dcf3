"""What changed between two steps, and would be lost at a failure: a warning names it.

A restart goes on from what the last step has committed. Code in front of a step (`lr = f(step)` at the top
of the loop) is run again then, and changes the same. Code behind one is not, and code between `ecemb.protect`
and the loop meets another state. So what moves before the first step and again before the next that is looked
at stands in front of each step, and is fine. All else is told, once.

Must not know: where the state is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger: logging.Logger = logging.getLogger("ecemb")


class Between:
    """Looks at what moved before the first step of each transaction.

    Args:
        speaks: whether it warns; else it logs for debugging.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        self._level = logging.WARNING if speaks else logging.DEBUG
        self._checks = 0
        self._at_first: dict[str, str] = {}
        self._known: set[str] = set()  # told of, or moved in front of each step

    def check(self, step: int, moved: Mapping[str, str]) -> None:
        """The first step of a transaction begins.

        Args:
            step: its number.
            moved: what is other than the last commit has left it, or as `protect` has; and how.
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
            "%s changed %s (%s): a failure goes back to what the last step has committed, and this change is "
            "not made again then, so that the training would end with other bits. Move it into `with "
            "guard.step():`, or in front of ecemb.protect(). This is said once",
            thing,
            when,
            how,
        )
