"""What tests' processes need, imported and compiled once: in the fork server that they all come from."""

# ruff: noqa: F401
from __future__ import annotations

import hypothesis
import pytest
import torch._dynamo  # torch's optimizers import it when they are made
import torch.distributed.checkpoint
import torch.distributed.optim

from bench.methods import registry
from support import arena_holders, guarded_training
from support.shared_start import finish

finish()
