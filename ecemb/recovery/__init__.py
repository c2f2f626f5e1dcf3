"""After a failure: decide, undo or redo, rebuild, verify.

`plan` is the pure decision, `execute` carries it out, `relay` rebuilds lost blocks and moves rows to another
number of ranks, as `relayout` plans it, and `state_slices` brings replicated state together. `background`
rebuilds beside training: `requester` asks for what is `missing`, as fast as `throttle` lets it, and `server`
answers. `scrub` compares parity with rows, also while the job runs.
"""
