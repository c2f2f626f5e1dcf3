"""Bulk bytes: the few operations on rows and words that all protection is built on.

`contract` has the abstract kernels with their checks, and chooses one. `reference` is the specification,
`cpu` runs loops that are compiled for this machine (`llvm`). `threads` is for all packages: teams, calls in
other threads, and calls that no signal ends.
"""
