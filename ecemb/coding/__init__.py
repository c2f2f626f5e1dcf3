"""Rows, deltas and parity: pure functions of bytes and integers, without arena or network.

`code` is the (n, k) erasure code. `placement` assigns the parity of each rank to its keepers, and cuts the
replicated state into slices. `rows` is a rank's address space of records, `parity` has the deltas of rows and
the parity blocks that a rank keeps.
"""
