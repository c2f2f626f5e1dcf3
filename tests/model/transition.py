"""What each part of the model says of a successor of a state."""

from __future__ import annotations

from typing import Any, NamedTuple


class Next(NamedTuple):
    """A successor: what happened, and the state after it or why it must never be."""

    text: str
    state: Any
    broken: str = ""
