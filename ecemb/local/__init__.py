"""The operations of one rank on its own arena: capture, undo, apply, redo, commit.

`rank_memory` has the operations of a transaction, `journal` the undo records and the inbox, `state_slots`
the two slots of replicated state.
"""
