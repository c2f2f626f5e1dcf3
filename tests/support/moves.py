"""What trainings that move have: whole tables by name, whatever engine and ranks hold them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecemb
from baselines.check_n_run.durable import DurableTier

_PART = re.compile(r"(.*)\[:, (\d+):(\d+)\]")


def store_of(kind: str, root: Path) -> Path | DurableTier:
    """Where a training saves: a folder of torch.distributed.checkpoint's, or Check-N-Run's chains."""
    if kind == "folder":
        return root / "saved"
    return DurableTier(root / "durable", root / f"copies-{dist.get_rank()}", policy="consecutive")


def whole_tables(model: nn.Module, *, state: str = "sum") -> dict[str, Tensor]:
    """All tables and their optimizer's state, put together from all ranks, by the table's last name."""
    parts: list[tuple[str, int, int, int, Tensor]] = []
    for table in ecemb.tables(model):
        found = _PART.fullmatch(table.name)
        name, column = (table.name, 0) if found is None else (found[1], int(found[2]))
        assert table.whole is not None
        first, rows = table.whole
        for kind, tensor in table.tensors.items():
            key = f"{name.rpartition('.')[2]}.{'weight' if kind == 'weight' else state}"
            values = (tensor if tensor.dim() > 1 else tensor[:, None]).detach().clone()
            parts.append((key, rows, first, column, values))
    shown: list[list[tuple[str, int, int, int, Tensor]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(shown, parts)
    found_: dict[str, Tensor] = {}
    every = [part for of_rank in shown for part in of_rank]
    for key, rows, first, column, values in every:
        width = max(one[3] + one[4].shape[1] for one in every if one[0] == key)
        table_ = found_.setdefault(key, torch.full((rows, width), torch.nan))
        table_[first : first + len(values), column : column + values.shape[1]] = values
    return found_


def everything(model: nn.Module, head: nn.Module, dense: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tables, dense parameters and their optimizer's state."""
    found = whole_tables(model)
    for index, (name, parameter) in enumerate(head.named_parameters()):
        found[f"head.{name}"] = parameter.detach().clone()
        for key, value in dense.state.get(parameter, {}).items():
            found[f"dense.{index}.{key}"] = torch.as_tensor(value).detach().clone()
    return found


def end(process: subprocess.Popen[str]) -> None:
    """Ends a launch that a failed test leaves behind."""
    if process.poll() is None:
        process.kill()
        process.wait()
