"""After a failure: decide, undo or redo, rebuild, verify.

`plan` is the pure decision, `execute` carries it out, `rebuild` reconstructs lost blocks, `missing` says what
is still lost while training goes on, and `state_slices` brings replicated state together. `parity_check`
compares parity with rows, and `scrub` does so while the job runs.
"""
