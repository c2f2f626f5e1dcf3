"""Where this process is: in which call of which step, and whether it waits there for the other ranks.

Owns nothing but words. They are written by the thread that trains, and read by whoever is asked for them.
"""

from __future__ import annotations


class Whereabouts:
    """Where the training thread of this process is.

    Attributes:
        steps: that have ended on all ranks since this process began.
    """

    def __init__(self) -> None:
        self.steps = 0
