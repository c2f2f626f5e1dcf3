"""What the fork server of TorchRec's trainings imports."""

# ruff: noqa: E402, F401
from __future__ import annotations

import warnings

warnings.simplefilter("ignore")

import torch._dynamo
import torch.distributed.checkpoint
import torchrec.distributed.train_pipeline

from support.forked_torchrun import end_with_parent
from support.shared_start import finish

end_with_parent()
finish()
