"""How far a measurement is: a bar on a terminal, else a line for each part."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm


class Progress:
    """The parts of one measurement, one after another. A context.

    Args:
        what: Is measured.
        parts: How many there are.
    """

    def __init__(self, what: str, parts: int) -> None:
        self._what, self._parts, self._begun = what, parts, 0
        self._bar: tqdm[Any] | None = None
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._bar = tqdm(total=self._parts, desc=self._what, unit="part")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.update(self._begun - self._bar.n)
            self._bar.close()

    def part(self, name: str) -> None:
        """The next part begins."""
        self._begun += 1
        if self._bar is not None:
            self._bar.set_postfix_str(name)
            self._bar.update(self._begun - 1 - self._bar.n)
            return
        minutes = (time.monotonic() - self._began) / 60
        print(
            f"{self._what}: {self._begun} of {self._parts}, after {minutes:.1f} min: {name}",
            file=sys.stderr,
            flush=True,
        )
