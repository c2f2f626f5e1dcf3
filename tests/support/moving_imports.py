"""What the fork server of a moving training imports."""

# ruff: noqa: F401
from __future__ import annotations

import torch._dynamo
import torch.distributed.checkpoint

import ecemb
from baselines.check_n_run import durable
from ecemb.kernels import contract
from support.forked_torchrun import end_with_parent

contract.get_kernels("cpu")
end_with_parent()
