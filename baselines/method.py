"""The contract `Method`: a way to keep a training alive. ecemb is one, and so is every rival.

In the order of the calls, on every rank:

1. The process group: by `ecemb.init_process_group` under every method, so that all notice deaths and restart
   ranks alike. Then the script builds its model.
2. `prepare`: a fresh start, or the whole recovery after a failure. It returns the step that comes next.
3. `step`: a context around every step's body; saves and sends happen here.
4. `close`, when the training is done.

A failure is the death of processes, by SIGKILL. A rank that fails "with its memory" stands for a lost
machine, and loses the files that `memory` names. After a failure all ranks start again, as under torchrun.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


@dataclass(frozen=True)
class Training:
    """What a method is to keep alive, on one rank. Random generators of torch, numpy and python belong to it.

    Attributes:
        model: What is not a sharded table of it is the same on all ranks.
        optimizers: All of them.
        tables: Further tables, sharded by hand, by key.
        state: What differs by rank; plain values and tensors.
        samples: That all ranks together take in a step.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    tables: Mapping[str, nn.Module] = field(default_factory=dict)
    state: Sequence[Stateful] = ()
    samples: int = 0


@dataclass(frozen=True)
class Promise:
    """What holds after a failure that the method is made for.

    Attributes:
        bit_identical: The training ends with the bytes of one that never failed.
        steps_again: The most steps that are run again, beside the one that was cut off; None: any number.
        samples_lost: Updates may be forgotten, which `Costs.samples_lost` then counts.
        survives: Any this many ranks may be lost at once with their memory; None: all.
    """

    bit_identical: bool
    steps_again: int | None
    samples_lost: bool = False
    survives: int | None = None


@dataclass(frozen=True)
class Costs:
    """What a method has cost this rank in this life of its process.

    Attributes:
        stalled_s: Seconds that training waited for it, waits for slower ranks included.
        written_bytes: To files that outlive the machine.
        sent_bytes: To other ranks.
        stored_bytes: This rank's part of such files now.
        memory_bytes: Of this rank's machine, beside the training's own; the most at any time.
        samples_lost: Samples, of all ranks, whose updates this rank's rows have forgotten.
    """

    stalled_s: float = 0.0
    written_bytes: int = 0
    sent_bytes: int = 0
    stored_bytes: int = 0
    memory_bytes: int = 0
    samples_lost: float = 0.0


class Method(Protocol):
    """One way to survive failures; an object on every rank, new in each life of its process."""

    @property
    def promise(self) -> Promise:
        """What holds after a failure."""
        ...

    @property
    def interval_steps(self) -> int | None:
        """Steps between what one can go back to, by now; None: not known yet, or there is nothing."""
        ...

    def prepare(self, training: Training) -> int:
        """Starts, or brings the training back to where it goes on from. All ranks, before the first step.

        Returns:
            The step to run next, the same on all ranks: 0 at a fresh start.
        """
        ...

    def step(self) -> AbstractContextManager[object]:
        """Around the body of each step, which changes all that changes. All ranks."""
        ...

    def memory(self) -> Sequence[Path]:
        """Files of this rank that are in its machine's memory, and are lost with it."""
        ...

    def costs(self) -> Costs:
        """Of this life until now; between steps."""
        ...

    def close(self) -> None:
        """The training is done. All ranks."""
        ...


def total(lives: Iterable[Costs]) -> Costs:
    """Of several lives of a rank, in their order."""
    sum_ = Costs()
    for one in lives:
        both = {
            name: getattr(sum_, name) + getattr(one, name)
            for name in ("stalled_s", "written_bytes", "sent_bytes", "samples_lost")
        }
        most = max(sum_.memory_bytes, one.memory_bytes)
        sum_ = Costs(**both, stored_bytes=one.stored_bytes, memory_bytes=most)
    return sum_
