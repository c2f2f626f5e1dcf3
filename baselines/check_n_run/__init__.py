"""Check-N-Run: differential and quantized checkpoints.

Follows Eisenman et al., "Check-N-Run: A Checkpointing System for Training Deep Learning Recommendation
Models", NSDI 2022, arXiv 2010.08679.

Quantization of the stored copy, as pure functions:

- `quantize`: rows as packed codes, and back; `quantize_scheme`: how, and what holds of what comes back.
- `quantize_search`: the search's parameters, chosen on a sample of rows.
- `choose_bits`: bits of a code, by how often a job expects to restore.
- `quantize_rows`, `bits`: the compiled loops.

In the modules' docstrings each parameter is marked *published* (the paper says it), *recalled* (a formula or
figure as remembered, not checked against the paper's text), *calibrated* (found so that a published result
comes out, which then is no evidence), *derived* (by our own arithmetic) or *chosen* (by us).
"""
