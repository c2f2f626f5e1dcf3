"""What the fork server of TorchRec's trainings imports."""

# ruff: noqa: E402, F401
from __future__ import annotations

import gc
import warnings

warnings.simplefilter("ignore")

import torch._dynamo
import torch.distributed.checkpoint
import torchrec.distributed.train_pipeline

from ecemb import protect  # with the first public name all modules of ecemb are imported
from ecemb.kernels import contract
from support.forked_torchrun import end_with_parent

contract.get_kernels("cpu")
end_with_parent()
gc.collect()
gc.freeze()  # collections of forked processes leave these pages shared
