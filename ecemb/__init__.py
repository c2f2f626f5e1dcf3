"""ecemb keeps a recommendation model's sharded embedding tables alive through the loss of machines.

ecemb.init_process_group("gloo", job="ctr")
guard = ecemb.protect(model, optimizers=[sparse, dense], code=ecemb.Code(n=4, k=3))
for _ in range(guard.next_step, total_steps):
    with guard.step() as step:
        ...
guard.close()
"""

from __future__ import annotations

from . import errors, nn
from .adapters.live import tables
from .checkpoint import CheckpointReader, CheckpointWriter
from .code import Code
from .guard import Guard, Step, protect
from .recovery import RecoveryReport
from .rendezvous import init_process_group
from .scrub import ScrubReport

__all__ = [
    "CheckpointReader",
    "CheckpointWriter",
    "Code",
    "Guard",
    "RecoveryReport",
    "ScrubReport",
    "Step",
    "__version__",
    "errors",
    "init_process_group",
    "nn",
    "protect",
    "tables",
]

__version__ = "0.1.0"
