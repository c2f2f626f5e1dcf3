"""The operations of one rank on its own arena: capture, undo, apply, redo, commit.

`rank_memory` has the operations of a transaction and the slots of replicated state; `journal` has the undo
records, the deltas made of them, and what a redo needs.
"""
