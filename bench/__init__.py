"""Measurements: `python -m bench QUESTION`. Each verifies its results before it times them."""
