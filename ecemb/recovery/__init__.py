"""After a failure: decide, undo or redo, rebuild, verify.

`plan` is the pure decision, `execute` carries it out, `relay` rebuilds lost blocks and moves rows to another
number of ranks, as `relayout` plans it, and `state_slices` gathers replicated state. `background` is the
rebuild beside training: `requester` requests the rows and parity that are `missing`, at the rate that
`throttle` allows, and `server` answers. `scrub` compares parity with rows, also while the job runs.
"""
