"""How rows are stored: the seam behind which quantizers stand.

Must not know: tables, chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class Codec(Protocol):
    """Turns rows into tensors that are stored in their place, and back; row by row."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """Plain values (JSON) that `codec_of` makes the codec from, "name" among them."""
        ...

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        """What is stored of rows.

        Args:
            rows: [m, ...] on the CPU, of any type, m > 0. Read.

        Returns:
            By name; may be `rows` itself.
        """
        ...

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Rows as they are stored: [m, ...], of the type that `encode` was given."""
        ...


class Exact:
    """Rows as they are."""

    spec: Mapping[str, Any] = {"name": "exact"}

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        """See `Codec.encode`."""
        return {"rows": rows}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """See `Codec.decode`."""
        return parts["rows"]


def codec_of(spec: Mapping[str, Any]) -> Codec:
    """The codec that a manifest names.

    Raises:
        ValueError: this version has none of that name.
    """
    if spec["name"] != "exact":
        raise ValueError(f"rows are stored by {spec['name']!r}, which this version of baselines can't read")
    return Exact()


def kind_of(tensor: str) -> str:
    """The kind of a table's tensor, by which its codec is chosen: "weight", or "state" of its optimizer."""
    return tensor if tensor == "weight" else "state"
