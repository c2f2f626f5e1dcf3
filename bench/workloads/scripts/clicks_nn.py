"""A DLRM on tables of `ecemb.nn`, and made-up clicks: what `bench compare` trains without --script.

Settings: tables, rows (of each, over all ranks), dim, batch (samples of a rank), lookups (of a sample in each
table), dense ("dlrm" or "small"), skew (of the rows' popularity).
"""

from __future__ import annotations

from bench.workloads.drawn_clicks import DrawnClicks
from bench.workloads.models import sparse_twin

_CLICKS = DrawnClicks(sparse_twin)
build, batch, train = _CLICKS.build, _CLICKS.batch, _CLICKS.train
