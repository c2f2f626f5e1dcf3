"""torch's default device and default type are the script's: nothing that ecemb makes follows them.

Each call of a factory in the source names device and type. The factories are those that torch's own default
device reaches. A job trains, is saved and resumed with the same bits under other defaults.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _device

import ecemb
from support.guarded_training import digest, initialise
from support.processes import launch

SOURCE = Path(ecemb.__file__).parent
FACTORIES = {
    one.__name__ for one in _device._device_constructors() if getattr(torch, one.__name__, None) is one
}
INFERRED = {"sparse_coo_tensor", "Generator"}  # the type is that of the values; there is none
LEGACY = {"Tensor", "FloatTensor", "DoubleTensor", "LongTensor", "IntTensor", "BoolTensor", "ByteTensor"}


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
                yield node, node.func.attr


def faults(text: str) -> list[str]:
    """The calls that follow a default, as `line: name lacks argument`."""
    found: list[str] = []
    for call, name in calls(ast.parse(text)):
        given = {keyword.arg for keyword in call.keywords}
        if name in LEGACY:
            found.append(f"{call.lineno}: {name} takes no device: use torch.tensor or torch.empty")
        if name not in FACTORIES | {"Generator"}:
            continue
        asked = {"device"} if name in INFERRED else {"device", "dtype"}
        found += [f"{call.lineno}: {name} lacks {one}=" for one in sorted(asked - given)]
    return found


def test_factories_are_torchs() -> None:
    assert {"empty", "zeros", "arange", "tensor", "as_tensor", "randint", "sparse_coo_tensor"} <= FACTORIES


def test_tensors_name_device_and_type() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    assert not [path for path, text in texts.items() if "from torch import empty" in text]
    assert not {path: wrong for path, text in texts.items() if (wrong := faults(text))}


def test_a_call_that_follows_a_default_is_found() -> None:
    assert faults("torch.zeros(1, device=x)") == ["1: zeros lacks dtype="]
    assert faults("torch.arange(3)") == ["1: arange lacks device=", "1: arange lacks dtype="]
    assert faults("torch.sparse_coo_tensor(a, b)") == ["1: sparse_coo_tensor lacks device="]
    assert faults("torch.FloatTensor(3)") == [
        "1: FloatTensor takes no device: use torch.tensor or torch.empty"
    ]
    assert faults("torch.Generator()") == ["1: Generator lacks device="]
    assert faults("torch.from_numpy(x), torch.zeros_like(y), x.new_empty(3)") == []


# --- a job under other defaults -------------------------------------------------------------------

CPU = torch.device("cpu")


class Model(nn.Module):
    """Tables and a dense part that name their device and type, as a script does that sets a default."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = ecemb.nn.ShardedEmbeddingBag(31, 4, device="cpu", dtype=torch.float32)
        self.late = ecemb.nn.ShardedEmbeddingBag(9, 4, device="meta", dtype=torch.float32)
        self.head = nn.Linear(4, 1, device="cpu", dtype=torch.float32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        begins = torch.tensor([0, 2, 2], dtype=torch.int64, device="cpu")
        return self.head(self.bags(ids) + self.late(ids.reshape(-1) % 9, begins))


def trained(folder: Path, _: object, kind: str, done: int) -> list[str]:
    """The tensors of model and optimizers after three steps, from the checkpoint of step `done` if not 0."""
    if kind == "meta":
        torch.set_default_device("meta")
    if kind == "float64":
        torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    initialise(folder)
    model = Model()
    parallel = nn.parallel.DistributedDataParallel(model.head)
    tables = torch.optim.SparseAdam([model.bags.weight, model.late.weight], lr=0.1)
    dense = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    guard = ecemb.protect(
        model,
        optimizers=[tables, dense],
        code=ecemb.Code(2, 1),
        failure_domain="rank",
        resume=folder / "saved" if done else None,
    )
    batches = guard.batches([torch.arange(6, device=CPU).reshape(3, 2) + one for one in range(4)])
    for number in range(done, done + 3):
        assert guard.next_step == number
        with guard.step():
            tables.zero_grad()
            dense.zero_grad()
            model(next(batches)).square().mean().backward()
            tables.step()
            dense.step()
    assert guard.scrub().wrong_words == 0
    guard.save(folder / "saved")
    states = (state for one in (tables, dense) for state in one.state.values())
    found = [*model.state_dict().values(), *(value for state in states for value in state.values())]
    guard.close()
    torch.distributed.destroy_process_group()
    return [digest(value) for value in found]


def test_a_job_is_the_same_under_another_default(tmp_path: Path) -> None:
    found: list[Any] = []
    for one in ("usual", "meta", "float64"):
        (tmp_path / one).mkdir()
        first = launch(2, trained, tmp_path / one, one, 0)
        (tmp_path / one / "saved" / "finished-guard").unlink()
        found.append([first, launch(2, trained, tmp_path / one, one, 3)])
    usual, *others = found
    assert len(usual[1][0]) > 8
    assert others == [usual] * 2
