"""What the fork server of a moving training imports."""

# ruff: noqa: F401
from __future__ import annotations

import gc

import torch._dynamo
import torch.distributed.checkpoint

from baselines.check_n_run import durable
from ecemb import protect  # with the first public name all modules of ecemb are imported
from ecemb.kernels import contract
from support.forked_torchrun import end_with_parent

contract.get_kernels("cpu")
end_with_parent()
gc.collect()
gc.freeze()  # collections of forked processes leave these pages shared
