"""The table of versions that `make compat` has tried, for README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import tables
from bench.report.headlines import Unknown

QUESTION = "compat"
PACKAGES = {"torch": "torch", "TorchRec": "torchrec", "FBGEMM": "fbgemm-gpu-cpu", "Python": "python"}
PARTS = {
    "contracts": "contracts, TorchRec's own tests",
    "engines": "engines",
    "scenarios": "scenarios, with kills",
    "demo": "demo",
}
"""Part -> its column."""
_SHORT_HASH = 8


def table(documents: Sequence[Mapping[str, Any]]) -> str:
    """A line for each set: its versions, and the tests of each part that passed.

    Raises:
        Unknown: `make compat` has tried no set.
    """
    tried = [one for one in documents if one["question"] == QUESTION]
    if not tried:
        raise Unknown(QUESTION)
    lines = [
        [
            *(one["versions"].get(package, "-") for package in PACKAGES.values()),
            *(outcome(part, one["rows"]) for part in PARTS),
            one["commit"][:_SHORT_HASH],
        ]
        for one in tried
    ]
    return tables.grid((*PACKAGES, *PARTS.values(), "commit"), len(PACKAGES), lines)


def outcome(part: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The tests of a part that passed, failed or were skipped."""
    found = {row["outcome"]: row["value"] for row in rows if row["part"] == part}
    said = [f"{number:,.0f} {name}" for name, number in found.items() if number]
    return ", ".join(said) or "not run"
