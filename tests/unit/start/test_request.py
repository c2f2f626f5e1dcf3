"""Arguments of `protect` that name another training's tables."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import ecemb
from ecemb.checkpoint import Transfer
from ecemb.checkpoint.folder_store import CheckpointFolder
from ecemb.errors import ConfigurationError
from ecemb.start.request import Request
from ecemb.step.window import Window
from support.refusals import refused


def request(**changes: Any) -> Request:
    arguments: dict[str, Any] = {
        "model": nn.Linear(1, 1),
        "optimizers": (),
        "modules": {},
        "code": ecemb.Code(2, 1),
        "state": None,
        "window": Window(1, None, None),
        "overlap": False,
        "failure_domain": "auto",
    }
    return Request(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rebuild": True}, "rebuild is 'blocking' or 'background'; it is True"),
        ({"resume_required": 1, "reader": CheckpointFolder("there")}, "resume_required= is True or False"),
        ({"resume_required": True}, "resume= names none"),
        ({"renamed": ["user"]}, "renamed= takes a mapping"),
        ({"renamed": {"user": 3}, "reader": CheckpointFolder("there")}, "renamed= takes a mapping"),
        ({"renamed": {"user": "b.user"}}, "pass resume="),
        ({"transfer": "there"}, "ecemb.checkpoint.Transfer"),
        ({"transfer": Transfer(3)}, "Transfer(source) takes a path or a CheckpointReader"),  # type: ignore[arg-type]
    ],
)
def test_what_breaks_a_rule_is_refused(changes: dict[str, Any], text: str) -> None:
    with refused(ConfigurationError, text):
        request(**changes)


def test_ranks_compare_what_they_ask_for() -> None:
    transfer = Transfer("/there", {"now": "then"}, rows={"now": range(5)})
    assert request(transfer=transfer).origin() == {
        "renamed": {},
        "transfer": ["/there", {"now": "then"}, {"now": 5}, False],
    }
