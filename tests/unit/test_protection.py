"""What `ecemb.protect` refuses before it looks at the process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ecemb
from ecemb.errors import ConfigurationError


@pytest.mark.parametrize("model", [None, "model", 3, [torch.nn.Linear(1, 1)]])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigurationError, match="takes the model, a torch.nn.Module; it got .*tables="):
        ecemb.protect(model, code=ecemb.Code(2, 1))
