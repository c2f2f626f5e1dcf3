"""The operations of one rank on its own arena: capture, undo, apply, redo, commit.

`rank_memory` has the operations of a transaction, `journal` the undo records, `inbox` and `parity_journal`
what a redo needs, `ahead` makes memory ready before it is needed, `state_slots` has the two slots of
replicated state.
"""
