"""The public way to tables, on TorchRec's: rows are reported by table, just before backward changes them."""

from __future__ import annotations

import pytest
import torch

import ecemb
from support.row_listener import Heard
from support.torchrec.models import OPTIMIZERS, QUIET, batch, build

BAGS = "collection.embedding_bags"
STATES = {"sgd": {}, "rowwise-adagrad": {"momentum1": (7,)}, "adagrad": {"momentum1": (7, 4)}}
pytestmark = [*QUIET, pytest.mark.usefixtures("one_rank")]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rows_are_told_before_they_change_without_a_guard(kind: str) -> None:
    model = build({"user": (7, ("u", "v")), "item": (5, ("i",))}, kind)
    tables = ecemb.tables(model)
    assert [(table.name, table.rows) for table in tables] == [(f"{BAGS}.user", 7), (f"{BAGS}.item", 5)]
    heard = Heard(tables)
    bags = batch({"u": [[1, 2], [2]], "v": [[], [6]], "i": [[0], [4, 4]]})
    with torch.no_grad():
        model(bags)
    loss, _ = model(bags)
    assert heard.rows == heard.changed() == {f"{BAGS}.user": set(), f"{BAGS}.item": set()}
    loss.backward()
    assert heard.rows == heard.changed() == {f"{BAGS}.user": {1, 2, 6}, f"{BAGS}.item": {0, 4}}
    user = tables[0].tensors
    shapes = {name: tuple(tensor.shape) for name, tensor in user.items()}
    assert shapes == {"weight": (7, 4)} | STATES[kind]
    for tensor in user.values():
        tensor[3] = 5
    again = ecemb.tables(model)[0].tensors
    assert all((tensor[3] == 5).all() for tensor in again.values())
    for end in heard.ends:
        end()
    model(bags)[0].backward()
    model.load_state_dict(model.state_dict())
    assert heard.rows == {f"{BAGS}.user": {1, 2, 6}, f"{BAGS}.item": {0, 4}}


def test_loading_touches_all_rows_and_is_not_refused() -> None:
    model = build({"user": (7, ("u",)), "item": (5, ("i",))})
    heard = Heard(ecemb.tables(model))
    model.load_state_dict(model.state_dict())
    assert heard.rows == {f"{BAGS}.user": set(range(7)), f"{BAGS}.item": set(range(5))}
