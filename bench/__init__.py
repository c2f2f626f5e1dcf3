"""Measurements: `python -m bench QUESTION`. Each verifies its results before it times them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Of the repository."""
RESULTS = ROOT / "bench" / "results"
"""Where answers to all questions are kept, as JSON."""
