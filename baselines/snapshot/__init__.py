"""In-memory snapshots: now and then state is copied to other machines' memory, to which all ranks roll back.

After GEMINI (Wang et al., SOSP 2023: checkpoints in the host memory of this machine and of others) and
DLRover's flash checkpoint (shared memory that outlives the process, and a copy at a partner): published are
these; the form of the files, and that a snapshot stalls training until it is whole, are chosen. No erasure
code: whole copies.

Snapshots survive any number of dead processes, and the loss of as many machines' memory as there are copies.

- `recovery`: the method: `SnapshotRecovery`.
- `plan`: which snapshot to go back to, and who sends what to whom.
- `moves`: carries that out.
"""

from .recovery import SnapshotRecovery, SnapshotsLost

__all__ = ["SnapshotRecovery", "SnapshotsLost"]
