"""Clicks with a signal in them: each category, and some of the integers, make one more or less likely.

The weights are drawn, and the model doesn't know them. Tables have the proportions of Criteo's.
"""

from __future__ import annotations

import numpy as np
import torch

from bench.workloads.clicks import Clicks, Data
from bench.workloads.models import INTEGERS

KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Rows of the 26 tables of Criteo's Kaggle data, as DLRM counts them."""
SCALE, LEAST = 200, 10
"""By how much tables are smaller than Criteo's, and the least rows, where Criteo's have as many."""
ROWS = tuple(max(min(rows, LEAST), rows // SCALE) for rows in KAGGLE_ROWS)
WEIGHTS = 0.6
"""The largest weight of a category, in log odds."""


def draw(steps: int, batch: int, held_out: int, seed: int) -> Data:
    """Draws samples: low ids are frequent, as by Zipf's law."""
    rng = np.random.default_rng(seed)
    samples = steps * batch + held_out
    rows = np.array(ROWS)
    bases = np.cumsum([0, *ROWS[:-1]])
    ids = (rows ** rng.random((samples, len(ROWS)))).astype(np.int64) - 1 + bases
    integers = np.log1p(np.floor(np.exp(2 * rng.standard_normal((samples, INTEGERS)))))
    weights = WEIGHTS * rng.uniform(-1, 1, sum(ROWS))
    logits = weights[ids].sum(1) + 0.2 * (integers[:, :4] - 1).sum(1) - 1
    clicks = rng.random(samples) < 1 / (1 + np.exp(-logits))
    all_ = Clicks(torch.from_numpy(integers).float(), torch.from_numpy(ids), torch.from_numpy(clicks).float())
    return Data(all_.part(0, steps * batch), all_.part(steps * batch, samples), batch, ROWS)
