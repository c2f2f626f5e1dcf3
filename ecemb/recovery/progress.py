"""A progress line on stderr for work of more than a few seconds.

Nothing is written unless stderr is a terminal: logs and pipes get log lines only.
"""

from __future__ import annotations

import sys
import time

_AFTER_S = 3.0
_EVERY_S = 0.2


class Progress:
    """The progress of some work; a context that removes the line at its end.

    Args:
        what: The work, e.g. "rebuilding".
        total: Bytes of work.
        shown: Whether this process writes the line.
    """

    def __init__(self, what: str, total: int, *, shown: bool) -> None:
        self._what, self._total = what, total
        self._shown = shown and sys.stderr.isatty()
        self._began = time.monotonic()
        self._next = self._began + _AFTER_S
        self._done = self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            sys.stderr.write(f"\r{'':{self._width}}\r")
            sys.stderr.flush()

    def advance(self, size_bytes: int) -> None:
        """Counts bytes of work as done."""
        self._done += size_bytes
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next = now + _EVERY_S
        spent = now - self._began
        part = min(1.0, self._done / max(1, self._total))
        left = f", about {spent * (1 - part) / part:.0f} s left" if part else ""
        line = f"ecemb: {self._what}: {part:4.0%} of {self._total / 1e9:.2f} GB, {spent:.0f} s{left}"
        sys.stderr.write(f"\r{line:{self._width}}")
        sys.stderr.flush()
        self._width = max(self._width, len(line))
