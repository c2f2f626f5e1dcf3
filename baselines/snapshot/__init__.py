"""In-memory snapshots: now and then state is copied to other machines' memory; all ranks roll back to it.

After GEMINI (Wang et al., SOSP 2023: checkpoints in the host memory of this machine and of others), DLRover's
flash checkpoint (shared memory that outlives the process, and a copy at a partner) and ECCheck (ICDCS 2025:
erasure-coded snapshots in memory): published are these; the form of the files, where parity lies, and that a
snapshot stalls training until it is whole, are chosen.

Snapshots survive any number of dead processes, and the loss of as many machines' memory as there are copies,
or parity blocks in a stripe.

- `recovery`: the method: `SnapshotRecovery`.
- `redundancy`: what others keep: `Copies` or `Coded`.
- `plan`: which snapshot to go back to, and who sends what to whom.
- `moves`: carries that out.
"""

from .coded import Coded
from .copies import Copies
from .recovery import SnapshotRecovery, SnapshotsLost

__all__ = ["Coded", "Copies", "SnapshotRecovery", "SnapshotsLost"]
