"""Memory that outlives the process: one file per rank, claimed by a lock, and the rank's operations on it.

`arena` is one rank's file, `header` its words, `classify` decides which headers of a job count, `scan` finds
and removes arenas on a host, and asks a job to leave. `private_files` has the ownership of files and the
claims on them, `capacity` the allocation of memory. `rank_memory` has the operations of a transaction and the
slots of replicated state; `journal` has the undo records, the deltas made of them, and what a redo needs.
"""
