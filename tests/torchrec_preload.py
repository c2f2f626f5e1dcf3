"""What the fork server of TorchRec's trainings imports."""

# ruff: noqa: E402, F401
from __future__ import annotations

import warnings

warnings.simplefilter("ignore")

import torch._dynamo
import torch.distributed.checkpoint
import torchrec.distributed.train_pipeline
from forked import end_with_parent

import ecemb
from ecemb import kernels

kernels.get("cpu")
end_with_parent()
