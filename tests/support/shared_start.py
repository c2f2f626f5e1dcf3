"""What processes have from the fork server that they come from: ecemb imported and compiled, pages shared."""

from __future__ import annotations

import gc

from ecemb import protect  # noqa: F401 - with the first public name all modules of ecemb are imported
from ecemb.kernels import contract
from ecemb.net import mesh, watch


def finish() -> None:
    """The last line of what a fork server imports."""
    contract.get_kernels("cpu")
    mesh.loop()
    watch._code()
    gc.collect()
    gc.freeze()  # collections of forked processes leave these pages shared
