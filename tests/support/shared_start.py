"""What processes have from the fork server that they come from: ecemb imported and compiled, pages shared."""

from __future__ import annotations

import gc

from ecemb.launch import preload


def finish() -> None:
    """The last line of what a fork server imports."""
    preload.load("ecemb")
    gc.collect()
    gc.freeze()  # collections of forked processes leave these pages shared
