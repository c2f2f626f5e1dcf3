"""The durable tier: checkpoints in storage, for `guard.save` and `protect(resume=)`.

`interface` has the public protocols. `contents` names the saved tensors, `saver` has the collective part,
`folder_store` is a folder of checkpoints, written and read by torch.distributed.checkpoint (`dcp`).
"""

from __future__ import annotations

from .interface import CheckpointReader, CheckpointWriter, DifferentialWriter, Piece, Stored, is_stored

__all__ = ["CheckpointReader", "CheckpointWriter", "DifferentialWriter", "Piece", "Stored", "is_stored"]
