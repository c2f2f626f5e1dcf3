"""An optimizer and a module as scripts bring them, which ecemb doesn't know."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RowWise(torch.optim.Optimizer):
    """Adagrad with one number a row, as recommendation models have it: a class that ecemb doesn't know."""

    ecemb_row_state = ("moment",)

    def __init__(self, parameters: Any, lr: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.1})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight] = {"step": 0, "moment": torch.full((len(weight),), 0.25)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                gradient, state = weight.grad.coalesce(), self.state[weight]
                rows, values = gradient.indices()[0], gradient.values()
                state["step"] += 1
                state["moment"][rows] += values.square().mean(1)
                weight[rows] -= group["lr"] * values / state["moment"][rows].sqrt()[:, None]


class Quotients(nn.Module):
    """A table as two: a row is the product of a row of each."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.quotient, self.remainder = nn.Parameter(torch.rand(4, dim)), nn.Parameter(torch.rand(3, dim))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = [(ids // 3, self.quotient), (ids % 3, self.remainder)]
        left, right = (nn.functional.embedding(rows, weight, sparse=True) for rows, weight in found)
        return left * right
