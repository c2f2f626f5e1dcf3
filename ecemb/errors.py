"""The tree of exceptions: everything that ecemb raises on purpose.

    EcembError
    ├── ConfigurationError (ValueError)      an argument breaks a rule
    │   ├── CodeError                        no such (n, k) code, or blocks that it can't decode from
    │   ├── PlacementError                   the code doesn't fit the ranks or the failure domains
    │   ├── UnsupportedTable                 a table that can't be protected
    │   └── UnsupportedOptimizer             an optimizer that would change undeclared rows
    ├── KernelError (ValueError)             a kernel was called with arrays that break its contract
    ├── KernelUnavailable (RuntimeError)     a requested kernel isn't available on this machine
    ├── UsageError (RuntimeError)            a call at the wrong time
    │   ├── NotInitialized                   ecemb.init_process_group() has to be called first
    │   ├── StepFailed                       the step can't be committed; the guard takes no more steps
    │   └── UndeclaredWrite                  rows or their storage changed without being declared
    ├── ArenaError                           the memory that outlives the worker
    │   ├── ArenaBusy                        another living process holds it
    │   ├── ArenaDamaged                     its header can't be read
    │   ├── ArenaIncompatible                another version of ecemb wrote it, in another format
    │   ├── ArenaInsecure                    owner, permissions or a symbolic link are not ours
    │   ├── NotEnoughSpace                   the mount or the memory limit is too small
    │   └── LayoutMismatch                   the model is not the one that the arena holds
    ├── CheckpointError                      the durable tier
    │   ├── CheckpointFailed                 a checkpoint can't be written or read; earlier ones are untouched
    │   ├── CheckpointInsecure               others could have written what is in it
    │   └── CheckpointMismatch               it belongs to another training
    ├── PeerFailure (RuntimeError)           another rank is dead or didn't answer in time
    ├── RendezvousError (RuntimeError)       the workers couldn't agree on their ranks
    └── RecoveryError (RuntimeError)
        ├── TooManyErasures                  more than r blocks of one stripe are gone
        ├── InconsistentArenas               reports that no failure can leave behind
        ├── JobFinished                      the job was closed and can't start again at step 0
        └── StateLost                        the job had started, but none of its memory is left

A message has the thing, the rule, the value and the way out. A docstring has the meaning of the class, then
what to do.
"""

from __future__ import annotations


class EcembError(Exception):
    """Base of all errors that ecemb raises on purpose.

    The message says what to do. Please report a plain `EcembError`.
    """


class ConfigurationError(EcembError, ValueError):
    """An argument breaks a rule.

    Correct the argument in the message. Nothing was changed.
    """


class CodeError(ConfigurationError):
    """No such (n, k) code, or a set of blocks that it can't decode from.

    Choose k >= 1 and n > k, with n at most 256 and at most the number of ranks; `ecemb plan`
    compares codes.
    """


class PlacementError(ConfigurationError):
    """The code doesn't fit the ranks or the failure domains.

    The message lists codes that fit these hosts, and how many hosts this code takes: change `code=`, start
    more ranks or hosts, or give up the guarantee for hosts with `failure_domain="rank"`.
    """


class UnsupportedTable(ConfigurationError):
    """A table that can't be protected.

    Build it as the message says (sparse, on the CPU, a CUDA device or the meta device).
    """


class UnsupportedOptimizer(ConfigurationError):
    """An optimizer, or one of its options, that changes undeclared rows.

    Set the option to 0 for the tables, or use another optimizer for them; dense parameters may have any
    optimizer.
    """


class KernelError(EcembError, ValueError):
    """A kernel was called with arrays that break its contract; nothing was written.

    User code doesn't call kernels: please report it.
    """


class KernelUnavailable(EcembError, RuntimeError):
    """A kernel that was requested by name isn't available on this machine.

    Install ecemb with its dependencies (`pip check`).
    """


class UsageError(EcembError, RuntimeError):
    """A call at the wrong time.

    Move the call to the place in the message: inside of a step, between steps, or before `protect`.
    """


class NotInitialized(UsageError):
    """`ecemb.init_process_group()` has to be called first.

    Call it in place of `torch.distributed.init_process_group`, before anything that needs ranks.
    """


class StepFailed(UsageError):
    """The step can't be committed; the guard takes no more steps in this process.

    Let the process end: torchrun restarts the job, which repeats the failed step. If the same step fails
    again, correct the script where the message says.
    """


class UndeclaredWrite(UsageError):
    """Rows, or the storage under them, changed without being declared.

    Call `guard.touch(table, rows)` before a manual write; load state before `protect`, or inside of a step.
    Then restart the job: it encodes parity from the current rows.
    """


class ArenaError(EcembError):
    """Something is wrong with the memory that outlives the worker.

    `ecemb arenas ls` lists arenas.
    """


class ArenaBusy(ArenaError):
    """Another living process holds the arena.

    End the other launch of the job, or its orphaned worker, by the process id in the message; or use another
    `job=`.
    """


class ArenaDamaged(ArenaError):
    """The arena's header can't be read.

    The arena counts as lost, and is rebuilt if at most r blocks of a stripe are lost. If no other arena is
    left, remove it (`ecemb arenas rm`) and start from a checkpoint.
    """


class ArenaIncompatible(ArenaError):
    """Another version of ecemb wrote the arena, in a format that this version doesn't read.

    The arena is neither damaged nor lost, so the job doesn't start beside it, not even from a checkpoint.
    Continue with the version that wrote it, or remove the arena and its content (`ecemb arenas
    rm`).
    """


class ArenaInsecure(ArenaError):
    """Owner, permissions, or a symbolic link on the arena's path are not ours.

    Another user may have created it: have it removed, or pass another `arena_dir=`.
    """


class NotEnoughSpace(ArenaError):
    """The mount or the memory limit leaves too little space for the arena.

    Enlarge the mount or limit in the message (the mount of /dev/shm, the container's limit), remove arenas of
    earlier jobs, or spread the tables over more hosts.
    """


class LayoutMismatch(ArenaError):
    """The model's tables differ from those in the arena.

    Run the script that started the job, with the same model, code, optimizers and number of ranks; or use
    another `job=` for the new model. To change the number of ranks, use `protect(elastic=True)`, or start
    from a checkpoint: `protect(resume=)`. To begin again under the same name, remove what the job holds:
    `ecemb arenas rm --job JOB`.
    """


class CheckpointError(EcembError):
    """Something is wrong with a checkpoint, or with the folder of checkpoints.

    Training itself is not affected.
    """


class CheckpointFailed(CheckpointError):
    """A checkpoint can't be written or read, or is damaged; earlier complete checkpoints are untouched.

    Free space, or repair the file system in the message, and save again; training can continue. To begin from
    the checkpoint before a damaged one, move the folder in the message away.
    """


class CheckpointInsecure(CheckpointError):
    """Owner, permissions or a symbolic link let other users write the files to load, or replace their folder.

    Revoke the write permission of others (`chmod -R go-w`), or copy the folder, if you trust its content. If
    the message names a folder above it, save to a folder where each level above is yours or root's.
    """


class CheckpointMismatch(CheckpointError):
    """The checkpoint belongs to another training, model or number of ranks.

    Pass the right folder, or save to a new one.
    """


class PeerFailure(EcembError, RuntimeError):
    """Another rank is dead or did not answer before the deadline.

    Let the process end: torchrun restarts all workers, and training continues. The log of the rank in the
    message has the cause. If a slow rank was declared dead, raise `timeout=`.
    """


class RendezvousError(EcembError, RuntimeError):
    """The workers could not agree on their ranks before the deadline.

    Check the missing workers in the message, and that their hosts reach each other; launch as many workers as
    at the job's start.
    """


class RecoveryError(EcembError, RuntimeError):
    """The job can't continue from the arenas that are left.

    Nothing was overwritten. Pass `protect(resume=)` to continue from a checkpoint.

    Attributes:
        reason: the message without the way out.
    """

    def __init__(self, reason: str, way_out: str = "") -> None:
        super().__init__(f"{reason}. {way_out}" if way_out else reason)
        self.reason = reason


class TooManyErasures(RecoveryError):
    """More than r blocks of at least one stripe are lost.

    Bring a lost host back if it may still have its memory; otherwise start from a checkpoint with
    `protect(resume=)`, or remove the arenas to start at step 0.
    """


class InconsistentArenas(RecoveryError):
    """Arenas have a state that no failure can leave behind; nothing was written.

    If the message blames one arena, remove it: it then counts as lost, and is rebuilt. Otherwise keep a copy
    for a bug report, and start from a checkpoint.
    """


class JobFinished(RecoveryError):
    """The job was closed and can't start again at step 0.

    To train again, use another `job=`, or remove the arenas that are left of this job.
    """


class StateLost(RecoveryError):
    """The job had started, but none of its memory is left.

    Start from a checkpoint with `protect(resume=)`; to start at step 0, use another `job=`.
    """
