"""The operations of one rank on its own arena: capture, undo, apply, redo, commit.

`rank_memory` has the operations of a transaction, `journal` the undo records and the inbox, `as_of` reads
what a transaction has left, `ahead` makes memory ready before it is needed, `state_slots` has the two slots
of replicated state.
"""
