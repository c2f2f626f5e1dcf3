"""Bulk bytes: the few operations on rows and words that all protection is built on.

`contract` has the abstract kernels and chooses one; `checks` validates arguments. `reference` is the
specification, `cpu` runs loops (`loops`) compiled for this machine (`llvm`, `gf_products`), on a
`thread_team`. `row_set` is a set of rows as bits.
"""
