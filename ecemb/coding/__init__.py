"""Rows, deltas and parity: pure functions of bytes and integers, without arena or network.

`code` is the (n, k) erasure code. `placement` assigns the parity of each rank to its keepers. `rows` is a
rank's address space of records, `delta` the messages with changes to it, `parity` the parity blocks that a
rank keeps. `slices` cuts the replicated state.
"""
