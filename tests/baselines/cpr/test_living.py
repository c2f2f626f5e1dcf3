"""Tensors that live in files: they are trained on there, whatever looks at them."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from baselines.cpr.living import LivingTensors


@pytest.fixture
def _frozen() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


def trained(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


def test_what_is_trained_outlives_the_process(tmp_path: Path) -> None:
    model, twin = nn.Linear(3, 5), nn.Linear(3, 5)
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adagrad(model.parameters())
    state = optimizer.state[model.weight]["sum"]
    rows, same = model.weight.detach()[1:3], model.weight.data.view(-1)
    folder = tmp_path / "memory" / "rank-0"
    living = LivingTensors(folder)

    def find() -> dict[str, Tensor]:
        return {"weight": model.weight.detach(), "its last row": model.weight.detach()[4], "sum": state}

    living.move(find, survived=False)
    assert len(living.paths) == 2  # storages
    assert {path.stat().st_mode & 0o777 for path in living.paths} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    living.move(find, survived=False)  # nothing is left to move
    trained(model, optimizer, 3)
    trained(twin, torch.optim.Adagrad(twin.parameters()), 3)
    assert torch.equal(model.weight, twin.weight) and torch.equal(model.bias, twin.bias)
    assert torch.equal(rows, model.weight[1:3]) and torch.equal(same, model.weight.reshape(-1))
    again, other = nn.Linear(3, 5), torch.zeros(5, 3)
    LivingTensors(folder).move(lambda: {"weight": again.weight.detach(), "sum": other}, survived=True)
    assert torch.equal(again.weight, twin.weight) and torch.equal(other, state)
    living.remove()
    assert not living.paths
    trained(model, optimizer, 1)
    assert torch.equal(again.weight, model.weight)  # still one memory


def test_a_later_life_reads_what_was_trained(tmp_path: Path) -> None:
    table, steps = torch.arange(12, dtype=torch.float32).reshape(3, 4), torch.tensor(1.0)
    living, turned = LivingTensors(tmp_path), table.t()[1:]
    tensors = {"turned": turned, "steps": steps, "empty": torch.empty(0)}
    living.move(lambda: tensors, survived=False)
    places = json.loads(json.dumps(living.places(tensors)))
    table.mul_(2), steps.add_(4)
    again = LivingTensors(tmp_path)
    found = again.read(places)
    assert again.are_there(places) and found.keys() == {"turned", "steps"}
    assert torch.equal(found["turned"], turned) and found["steps"].item() == 5
    again.paths[0].unlink()
    assert not again.are_there(places)


def test_storages_without_bytes_stay(tmp_path: Path) -> None:
    living = LivingTensors(tmp_path)
    living.move(lambda: {"empty": torch.empty(0, 3)}, survived=False)
    assert not living.paths


def test_files_of_another_training_are_refused(tmp_path: Path) -> None:
    first, second = torch.zeros(4), torch.zeros(5)
    LivingTensors(tmp_path).move(lambda: {"a": first}, survived=False)
    with pytest.raises(ValueError, match="16 bytes, and a has 20"):
        LivingTensors(tmp_path).move(lambda: {"a": second}, survived=True)


def test_what_is_not_found_is_no_silent_loss(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    tensor = torch.zeros(4)
    request.getfixturevalue("_frozen")
    with pytest.raises(RuntimeError, match=r"gc\.unfreeze"):
        LivingTensors(tmp_path).move(lambda: {"a": tensor[:]}, survived=False)


def test_what_was_cut_off_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(4)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        LivingTensors(tmp_path).move(lambda: {"a": tensor}, survived=False)
    monkeypatch.undo()
    living = LivingTensors(tmp_path)
    assert [path.suffix for path in living.paths] == [".partial"]
    living.move(lambda: {"a": tensor}, survived=False)
    assert [path.suffix for path in living.paths] == [".rows"]
