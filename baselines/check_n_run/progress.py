"""Progress bars on stderr, where the user asked for them.

Must not know: of what.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def bar(title: str, total_bytes: int, *, shown: bool) -> Generator[Callable[[int], object]]:
    """Gives what to call with the bytes that were done.

    tqdm is imported where it is shown: it starts a thread, and makes a semaphore.
    """
    if not shown:
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(total=total_bytes, desc=title, unit="B", unit_scale=True) as moved:
        yield moved.update
