"""What tests' processes need, imported and compiled once: in the fork server that they all come from."""

# ruff: noqa: F401
from __future__ import annotations

import gc

import hypothesis
import pytest
import torch._dynamo  # torch's optimizers import it when they are made
import torch.distributed.checkpoint
import torch.distributed.optim

from bench.methods import registry
from ecemb import protect  # with the first public name all modules of ecemb are imported
from ecemb.kernels import contract
from support import arena_holders, guarded_training

contract.get_kernels("cpu")
gc.collect()
gc.freeze()  # collections of forked processes leave these pages shared
