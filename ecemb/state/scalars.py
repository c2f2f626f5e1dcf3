"""The tables' scalars of several ranks together: a table may be where it was not when they were saved.

They are dicts: tables or buckets; an engine; what it names, such as a batch of tables. Must not know: what a
scalar is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from .serialize import dump, load

_LEVELS = 3


def packed(scalars: Sequence[Mapping[str, Any]]) -> bytes:
    """The scalars of some ranks, together, for `joined`; those of the first count where they differ."""
    together: dict[str, Any] = {}
    for one in scalars:
        _add(together, one, _LEVELS)
    return dump(together)


def joined(own: bytes, told: Iterable[bytes]) -> dict[str, Any]:
    """This rank's, and what only other ranks have.

    Args:
        own: the result of `packed`.
        told: those of all ranks.

    Raises:
        InconsistentArenas: the bytes are not those of `packed`.
    """
    together: dict[str, Any] = {}
    for one in (own, *told):
        _add(together, load(one), _LEVELS)
    return together


def _add(own: dict[str, Any], other: Mapping[str, Any], levels: int) -> None:
    """Adds what `own` lacks, down to some levels."""
    for key, value in other.items():
        if key not in own:
            own[key] = value
        elif levels > 1 and isinstance(value, dict):
            _add(own[key], cast("Mapping[str, Any]", value), levels - 1)
