"""The same DLRM and clicks as `clicks_nn`, on TorchRec's tables: row-wise Adagrad inside backward.

Settings: as there.
"""

from __future__ import annotations

import torchrec.distributed.model_parallel  # noqa: F401 - for fork servers, which import what scripts import

from bench.workloads.drawn_clicks import DrawnClicks
from bench.workloads.models import torchrec_twin

_CLICKS = DrawnClicks(torchrec_twin)
build, batch, train = _CLICKS.build, _CLICKS.batch, _CLICKS.train
