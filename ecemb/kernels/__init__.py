"""Bulk bytes: the few operations on rows and words that all protection is built on.

`contract` has the abstract kernels with their checks, and chooses an implementation. `reference` is the
specification, `cpu` runs loops that are compiled for this machine (`llvm`). `threads` is for all packages:
teams of threads, calls in other threads, and calls that complete in spite of signals.
"""
