"""ecemb keeps a recommendation model's sharded embedding tables alive through the loss of machines.

ecemb.init_process_group("gloo", job="ctr")
guard = ecemb.protect(model, optimizers=[sparse, dense], code=ecemb.Code(n=4, k=3))
for step in guard.steps(total):
    with step:
        ...
guard.close()
"""

from __future__ import annotations

from . import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import nn
    from .checkpoint.interface import CheckpointReader, CheckpointWriter
    from .coding.code import Code
    from .engines.discover import tables
    from .guard import Guard, Step, protect
    from .place import run
    from .recovery.execute import RecoveryReport
    from .recovery.scrub import ScrubReport
    from .session import init_process_group

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
    "run",
    "tables",
]

__version__ = "0.1.0"

# Where the names come from. They are imported when the first of them is used, and all at once, as what one of
# these modules does when it is imported has to be done whichever name is used: so `ecemb-run` and
# `ecemb arenas` don't have to wait for torch.
_HOME = {
    "CheckpointReader": "checkpoint.interface",
    "CheckpointWriter": "checkpoint.interface",
    "Code": "coding.code",
    "Guard": "guard",
    "RecoveryReport": "recovery.execute",
    "ScrubReport": "recovery.scrub",
    "Step": "guard",
    "init_process_group": "session",
    "nn": "nn",
    "protect": "guard",
    "run": "place",
    "tables": "engines.discover",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from .requirements import check

    check()
    for public, home in _HOME.items():
        module = import_module(f"{__name__}.{home}")
        globals()[public] = module if public == home else getattr(module, public)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
