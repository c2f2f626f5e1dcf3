"""What the fork server of the failure matrix's workers imports."""

from __future__ import annotations

import gc

from ecemb.kernels import contract
from failures import worker  # noqa: F401
from support.forked_torchrun import end_with_parent

contract.get_kernels("cpu")  # compiled once, here
end_with_parent()
gc.collect()
gc.freeze()  # collections of forked processes leave these pages shared
