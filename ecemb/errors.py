"""The tree of exceptions: everything that ecemb raises on purpose.

    EcembError
    ├── ConfigurationError (ValueError)      an argument breaks a rule
    │   ├── CodeError                        no such (n, k) code, or blocks that it can't decode from
    │   ├── PlacementError                   the code doesn't fit the ranks or the failure domains
    │   ├── UnsupportedTable                 a table that can't be protected
    │   └── UnsupportedOptimizer             an optimizer that would change rows nobody declared
    ├── KernelError (ValueError)             a kernel was called with arrays that break its contract
    ├── KernelUnavailable (RuntimeError)     a kernel that was asked for can't be had here
    ├── UsageError (RuntimeError)            a call at the wrong time
    │   ├── NotInitialized                   ecemb.init_process_group() comes first
    │   ├── StepFailed                       the step can't be committed; the guard takes no more steps
    │   └── UndeclaredWrite                  rows or their storage changed without being declared
    ├── ArenaError                           the memory that outlives the worker
    │   ├── ArenaBusy                        another living process holds it
    │   ├── ArenaDamaged                     its header can't be read
    │   ├── ArenaInsecure                    owner, permissions or a symbolic link are not ours
    │   ├── NotEnoughSpace                   the mount or the memory limit is too small
    │   └── LayoutMismatch                   the model is not the one that the arena holds
    ├── CheckpointError                      the durable tier
    │   ├── CheckpointFailed                 a checkpoint can't be written or read; earlier ones are untouched
    │   ├── CheckpointInsecure               others could have written what is in it
    │   └── CheckpointMismatch               it is of another training than this one
    ├── PeerFailure (RuntimeError)           another rank is dead or didn't answer in time
    ├── RendezvousError (RuntimeError)       the workers couldn't agree on who is who
    └── RecoveryError (RuntimeError)
        ├── TooManyErasures                  more than r blocks of one stripe are gone
        ├── InconsistentArenas               reports that no failure can have left behind
        ├── JobFinished                      the job was closed; it doesn't train again from step 0
        └── StateLost                        the job had started, and none of its memory is left

A message names the thing, the rule, the value, and the way out.
"""

from __future__ import annotations


class EcembError(Exception):
    """Base of all errors that ecemb raises on purpose."""


class ConfigurationError(EcembError, ValueError):
    """An argument breaks a rule."""


class CodeError(ConfigurationError):
    """No such (n, k) code, or a set of blocks that it can't decode from."""


class PlacementError(ConfigurationError):
    """The code doesn't fit the ranks or the failure domains."""


class UnsupportedTable(ConfigurationError):
    """A table that can't be protected."""


class UnsupportedOptimizer(ConfigurationError):
    """An optimizer, or one of its options, that changes rows nobody declared."""


class KernelError(EcembError, ValueError):
    """A kernel was called with arrays that break its contract; nothing was written."""


class KernelUnavailable(EcembError, RuntimeError):
    """A kernel that was asked for by name can't be had here."""


class UsageError(EcembError, RuntimeError):
    """A call at the wrong time."""


class NotInitialized(UsageError):
    """`ecemb.init_process_group()` has to come first."""


class StepFailed(UsageError):
    """The step can't be committed; the guard takes no more steps in this process."""


class UndeclaredWrite(UsageError):
    """Rows, or the storage under them, changed without being declared."""


class ArenaError(EcembError):
    """Something is wrong with the memory that outlives the worker."""


class ArenaBusy(ArenaError):
    """Another living process holds the arena."""


class ArenaDamaged(ArenaError):
    """The arena's header can't be read."""


class ArenaInsecure(ArenaError):
    """Owner, permissions, or a symbolic link on the arena's path are not ours."""


class NotEnoughSpace(ArenaError):
    """The mount or the memory limit leaves too little space for the arena."""


class LayoutMismatch(ArenaError):
    """The model's tables are not the ones that the arena holds."""


class CheckpointError(EcembError):
    """Something is wrong with a checkpoint, or with the folder of checkpoints."""


class CheckpointFailed(CheckpointError):
    """A checkpoint can't be written or read; those that were complete before are untouched."""


class CheckpointInsecure(CheckpointError):
    """Owner, permissions, or a symbolic link let others write what would be loaded."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is of another training, model or number of ranks than this one."""


class PeerFailure(EcembError, RuntimeError):
    """Another rank is dead or did not answer before the deadline."""


class RendezvousError(EcembError, RuntimeError):
    """The workers could not agree on who is who before the deadline."""


class RecoveryError(EcembError, RuntimeError):
    """The job can't go on from what is left of it."""


class TooManyErasures(RecoveryError):
    """More than r blocks of at least one stripe are gone."""


class InconsistentArenas(RecoveryError):
    """Arenas report what no failure can have left behind; nothing was written."""


class JobFinished(RecoveryError):
    """The job was closed; it does not train again from step 0."""


class StateLost(RecoveryError):
    """The job had started, and none of its memory is left."""
