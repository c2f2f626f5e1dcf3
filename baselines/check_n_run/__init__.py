"""Check-N-Run: differential and quantized checkpoints, written beside the training.

Follows Eisenman et al., "Check-N-Run: A Checkpointing System for Training Deep Learning Recommendation
Models", NSDI 2022, arXiv 2010.08679.

What a checkpoint takes, and how it is written and restored:

- `tracking`: one bit a row, set when the row is about to change.
- `policy`: what a checkpoint takes: full, one-shot, consecutive, intermittent.
- `manifest`: what makes a checkpoint whole, and what it stands on.
- `store`: where checkpoints lie: a folder, or any URL that fsspec knows.
- `retention`: what may be removed.
- `codec`: how rows are stored: as they are, or quantized.
- `chunks`: some rows of a table as one object.
- `buffer`: the copy that training waits for.
- `writing`: what happens in the background, from the copy to the manifest.
- `background`: in a thread, or in a process of its own (`worker`).
- `progress`: bars on stderr.
- `restoring`: from a chain of checkpoints, into any number of ranks.
- `recovery`: the method: `CheckNRun`.
- `durable`: what `guard.save` takes in place of a path: `DurableTier`.

Quantization of the stored copy, as pure functions:

- `quantize`: rows as packed codes, and back; `quantize_scheme`: how, and what holds of what comes back.
- `quantize_search`: the search's parameters, chosen on a sample of rows.
- `choose_bits`: bits of a code, by how often a job expects to restore.
- `quantize_rows`, `bits`: the compiled loops.

In the modules' docstrings each parameter is marked *published* (the paper says it), *recalled* (a formula or
figure as remembered, not checked against the paper's text), *calibrated* (found so that a published result
comes out, which then is no evidence), *derived* (by our own arithmetic) or *chosen* (by us).
"""
