"""The operations of one rank on its own arena: capture, undo, apply, redo, commit.

`rank_memory` has the operations of a transaction, `journal` the undo records and the inbox, `ahead` makes
their memory ready before they need it, `state_slots` has the two slots of replicated state.
"""
