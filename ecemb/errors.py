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
    │   ├── ArenaIncompatible                another version of ecemb wrote it, in another format
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

A message names the thing, the rule, the value, and the way out. A class says what it means, then what to do.
"""

from __future__ import annotations


class EcembError(Exception):
    """Base of all errors that ecemb raises on purpose.

    Read the message: it names what to do. If it is the message of a plain `EcembError`, please report it.
    """


class ConfigurationError(EcembError, ValueError):
    """An argument breaks a rule.

    Correct the argument that the message names. Nothing was changed.
    """


class CodeError(ConfigurationError):
    """No such (n, k) code, or a set of blocks that it can't decode from.

    Choose k >= 1 and n > k, with n at most 256 and at most the number of ranks; `python -m ecemb plan`
    compares codes.
    """


class PlacementError(ConfigurationError):
    """The code doesn't fit the ranks or the failure domains.

    The message lists codes that fit these hosts, and how many hosts this code takes: change `code=`, start
    more ranks or hosts, or give up the promise with `failure_domain="rank"`.
    """


class UnsupportedTable(ConfigurationError):
    """A table that can't be protected.

    Build it as the message says (sparse, on the CPU, a CUDA device or the meta device).
    """


class UnsupportedOptimizer(ConfigurationError):
    """An optimizer, or one of its options, that changes rows nobody declared.

    Set the option to 0 for the tables, or take another optimizer for them; dense parameters may have any.
    """


class KernelError(EcembError, ValueError):
    """A kernel was called with arrays that break its contract; nothing was written.

    You don't call kernels: please report it.
    """


class KernelUnavailable(EcembError, RuntimeError):
    """A kernel that was asked for by name can't be had here.

    Install ecemb with its dependencies (`pip check`).
    """


class UsageError(EcembError, RuntimeError):
    """A call at the wrong time.

    Move the call to where the message says that it belongs: inside of a step, between steps, or before
    `protect`.
    """


class NotInitialized(UsageError):
    """`ecemb.init_process_group()` has to come first.

    Call it in place of `torch.distributed.init_process_group`, before anything that needs ranks.
    """


class StepFailed(UsageError):
    """The step can't be committed; the guard takes no more steps in this process.

    Let the process end: torchrun restarts the job, and it goes on from the step that failed. If the same
    step fails again, what the message names is the script's to mend.
    """


class UndeclaredWrite(UsageError):
    """Rows, or the storage under them, changed without being declared.

    Declare writes by hand with `guard.touch(table, rows)` before them; load state before `protect`, or
    inside of a step. Then restart the job: parity is made anew from the rows as they are.
    """


class ArenaError(EcembError):
    """Something is wrong with the memory that outlives the worker.

    Look at it with `python -m ecemb arenas ls`.
    """


class ArenaBusy(ArenaError):
    """Another living process holds the arena.

    End the other launch of the job, or an orphaned worker of it, by the process id in the message; or choose
    another `job=`.
    """


class ArenaDamaged(ArenaError):
    """The arena's header can't be read.

    It counts as lost, and is rebuilt while no more than r blocks of a stripe are gone. If it is all that is
    left, remove it (`python -m ecemb arenas rm`) and begin from a checkpoint.
    """


class ArenaIncompatible(ArenaError):
    """Another version of ecemb wrote the arena, in a format that this one doesn't read.

    The arena is neither damaged nor lost, so nothing starts beside it, not even from a checkpoint. Go on with
    the version that wrote it, or remove it (`python -m ecemb arenas rm`) to begin without what it holds.
    """


class ArenaInsecure(ArenaError):
    """Owner, permissions, or a symbolic link on the arena's path are not ours.

    Another user may have put it there: have it removed, or pass another `arena_dir=`.
    """


class NotEnoughSpace(ArenaError):
    """The mount or the memory limit leaves too little space for the arena.

    Enlarge what the message names (the mount of /dev/shm, the container's limit), remove arenas that earlier
    jobs left, or spread the tables over more hosts.
    """


class LayoutMismatch(ArenaError):
    """The model's tables are not the ones that the arena holds.

    Run the script that started the job, with the same model, code, optimizers and number of ranks; or give
    what you have now another `job=`. Another number of ranks begins from a checkpoint: `protect(resume=)`.
    """


class CheckpointError(EcembError):
    """Something is wrong with a checkpoint, or with the folder of checkpoints.

    Training itself is not touched by it.
    """


class CheckpointFailed(CheckpointError):
    """A checkpoint can't be written or read; those that were complete before are untouched.

    Make room, or mend the file system that the message names, and save again; training can go on.
    """


class CheckpointInsecure(CheckpointError):
    """Owner, permissions, or a symbolic link let others write what would be loaded.

    Take the right to write from others (`chmod -R go-w`), or copy the folder, if you trust what is in it.
    """


class CheckpointMismatch(CheckpointError):
    """The checkpoint is of another training, model or number of ranks than this one.

    Name the right folder, or save to a new one.
    """


class PeerFailure(EcembError, RuntimeError):
    """Another rank is dead or did not answer before the deadline.

    Let the process end: torchrun restarts all, and training goes on. Look for the cause in the log of the
    rank that the message names. If a slow rank is taken for a dead one, raise `timeout=`.
    """


class RendezvousError(EcembError, RuntimeError):
    """The workers could not agree on who is who before the deadline.

    See which workers the message misses, and whether their hosts reach each other; launch as many as the job
    was started with.
    """


class RecoveryError(EcembError, RuntimeError):
    """The job can't go on from what is left of it.

    Nothing was overwritten. Pass `protect(resume=)` to go on from a checkpoint.

    Attributes:
        reason: the message without the way out.
    """

    def __init__(self, reason: str, way_out: str = "") -> None:
        super().__init__(f"{reason}. {way_out}" if way_out else reason)
        self.reason = reason


class TooManyErasures(RecoveryError):
    """More than r blocks of at least one stripe are gone.

    Bring a lost host back if its memory may still be there; else begin from a checkpoint with
    `protect(resume=)`, or remove the arenas to begin at step 0.
    """


class InconsistentArenas(RecoveryError):
    """Arenas report what no failure can have left behind; nothing was written.

    Remove the arena that the message says is wrong: it counts as lost then, and is rebuilt. If the message
    names none, keep a copy for a bug report, and begin from a checkpoint.
    """


class JobFinished(RecoveryError):
    """The job was closed; it does not train again from step 0.

    To train anew, give `job=` another name, or remove what is left of it.
    """


class StateLost(RecoveryError):
    """The job had started, and none of its memory is left.

    Begin from a checkpoint with `protect(resume=)`; to begin at step 0, give `job=` another name.
    """
