"""What a refusal has to be: the right class, with words that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ecemb.errors import EcembError


@contextmanager
def refused(error: type[EcembError], *words: str) -> Iterator[None]:
    """The body raises exactly this class, with all these words in its message."""
    with pytest.raises(EcembError) as caught:
        yield
    assert type(caught.value) is error, repr(caught.value)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


def matching(error: type[Exception], *patterns: str) -> Any:
    """`pytest.raises`, with a match of every pattern in the message."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{pattern})" for pattern in patterns))
