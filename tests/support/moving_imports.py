"""What the fork server of a moving training imports."""

# ruff: noqa: F401
from __future__ import annotations

import torch._dynamo
import torch.distributed.checkpoint

from baselines.check_n_run import durable
from support.forked_torchrun import end_with_parent
from support.shared_start import finish

end_with_parent()
finish()
