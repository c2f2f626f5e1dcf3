"""Full recovery: all state is saved now and then; after a failure all ranks go back to the last save.

What is usual today, in three forms (`writers`): a file of each rank by torch.save, as scripts do it by
hand; torch.distributed.checkpoint; and its async_save, which copies the state and writes it while training
goes on. The interval is given in steps, or is Young's (J. W. Young, "A first order approximation to the
optimum checkpoint interval", CACM 1974): sqrt(2 O_save T_fail), with O_save measured and T_fail given.

Parameters: two complete checkpoints are kept (chosen).

- `recovery`: the method: `FullRecovery`.
- `writers`: how state is written and read, crash-safe.
"""

from .recovery import CheckpointUnreadable, FullRecovery

__all__ = ["CheckpointUnreadable", "FullRecovery"]
