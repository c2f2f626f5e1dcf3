"""Where modules hold their tensors: replaced ones are found, what comes and goes is noticed."""

from __future__ import annotations

import torch
from torch import nn

from ecemb.state.tensor_places import Members


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_replaced_tensors_are_found_in_their_places() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    members = Members(model, named(model))
    model[0].weight = nn.Parameter(torch.zeros(3, 2))
    model[1].running_mean = torch.ones(3)
    assert not members.have_changed()
    now, walked = members.now(), named(model)
    assert list(now) == list(walked)
    assert all(now[name] is walked[name] for name in now)


def test_what_comes_and_goes_is_noticed() -> None:
    for change in (
        lambda model: model[0].register_buffer("more", torch.zeros(1)),
        lambda model: model[0].register_parameter("more", nn.Parameter(torch.zeros(1))),
        lambda model: model.append(nn.ReLU()),
        lambda model: delattr(model[0], "bias"),
        lambda model: setattr(model[0], "bias", None),
        lambda model: model.__delitem__(1),
        lambda model: setattr(model[1], "empty", torch.zeros(1)),
        lambda model: model.__setitem__(0, nn.Linear(2, 3)),
    ):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        model[1].register_buffer("empty", None)
        members = Members(model, named(model))
        assert not members.have_changed()
        change(model)
        assert members.have_changed()


def test_what_no_module_holds_is_looked_for_each_time() -> None:
    class Unusual(nn.Linear):
        def named_parameters(self, *args: object, **kwargs: object) -> object:
            return iter([("elsewhere", nn.Parameter(torch.zeros(1)))])

    model = Unusual(1, 1)
    assert Members(model, dict(model.named_parameters())).have_changed()
