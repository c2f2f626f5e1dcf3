"""The durable tier: checkpoints in storage, for `guard.save`, `protect(resume=, transfer=)` and `Follower`.

`interface` has the public protocols. `contents` names the saved tensors, `saver` has the collective part,
`folder_store` is a folder of checkpoints, written by torch.distributed.checkpoint (`dcp`) and read by
`index`. `transfer` finds the stored values for tables of another name, engine or training. `follower` serves
rows of a training that goes on, from chains of checkpoints.
"""

from __future__ import annotations

from .follower import Chain, Follower, IncrementReader, Link, Snapshot, StoredTable
from .interface import CheckpointReader, CheckpointWriter, DifferentialWriter, Piece, Stored, is_stored
from .transfer import Transfer

__all__ = [
    "Chain",
    "CheckpointReader",
    "CheckpointWriter",
    "DifferentialWriter",
    "Follower",
    "IncrementReader",
    "Link",
    "Piece",
    "Snapshot",
    "Stored",
    "StoredTable",
    "Transfer",
    "is_stored",
]
