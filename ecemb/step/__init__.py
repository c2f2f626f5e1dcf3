"""A step is a transaction: `transaction` drives it, `body` is the user's view, `window` groups several steps.

`between_steps` and `replica_check` notice what a step can't protect: changes outside of it, and ranks that
differ.
"""
