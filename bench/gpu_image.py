"""Tables of tensors, with images of them in host memory, for what is measured about images.

Must not know: what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ecemb import kernels
from ecemb.adapters.image import Image
from ecemb.rows import Column, Table, TableLayout, arrange


def layout_of(tensors: Sequence[Tensor]) -> TableLayout:
    """The layout of a table whose columns are tensors [rows, width]."""
    columns = (
        Column(f"column {i}", str(one.dtype).removeprefix("torch."), one.shape[1] * one.itemsize)
        for i, one in enumerate(tensors)
    )
    return TableLayout("table", len(tensors[0]), tuple(columns))


def imaged(tensors: Sequence[Tensor]) -> tuple[Table, Image]:
    """An image of a table of tensors [rows, width], zeros at first, and the host memory that it is in."""
    layout = layout_of(tensors)
    (starts,), size = arrange([layout])
    table = Table(layout, np.zeros(size, np.uint8), starts, kernels.get("cpu", torch.get_num_threads()))
    return table, Image(table, tensors)
