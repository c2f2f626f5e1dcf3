"""Carries a plan out: the fresh start, and the recovery (D8; protocol.md, sections 2 to 4).

Every stage is idempotent: a failure in the middle of it is followed by another start, another plan, and the
same stages again. A newcomer's arena counts as lost until its state says LIVE, which is its last store.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import get_args

from .errors import InconsistentArenas
from .header import State
from .kernels import Kernels
from .memory import RankMemory
from .plan import Kind, RecoveryPlan, plan_recovery
from .rebuild import Ready, copy_replicated, rebuild_lost
from .stripes import chunks, collect, compare, longest_block
from .transport import Transport

__all__ = ["RecoveryPlan", "RecoveryReport", "fill", "headline", "plan_recovery", "recover", "tell"]

logger: logging.Logger = logging.getLogger("ecemb")

SAMPLE_WORDS = 1 << 12


@dataclasses.dataclass(frozen=True)
class RecoveryReport:
    """What happened at this start, as `guard.recovery` gives it.

    Attributes:
        kind: "fresh", "process" (restarted workers, all memory survived), "memory" (ranks were rebuilt) or
            "checkpoint" (resumed from one).
        step: the number of the step to run next.
        lost: ranks whose memory was rebuilt.
        undone_rows: rows that this rank copied back from its journal.
        redone: whether this rank redid the parity of a step that was decided.
        rebuilt_bytes: bytes of rows, parity and replicated state that this rank received.
        seconds: wall time by phase on this rank.
    """

    kind: Kind
    step: int
    lost: tuple[int, ...]
    undone_rows: int
    redone: bool
    rebuilt_bytes: int
    seconds: dict[str, float]

    @property
    def total_s(self) -> float:
        """Wall time of all phases on this rank, in seconds."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {value:.3f} s" for name, value in self.seconds.items())
        if self.kind in ("fresh", "checkpoint"):
            return f"{headline(self)[:-1]}: {phases})"
        redone = "a step redone" if self.redone else "no step redone"
        return (
            f"{headline(self)[:-1]}; this rank: {self.undone_rows} rows undone, {redone}, "
            f"{self.rebuilt_bytes / 1e6:.1f} MB received; {phases})"
        )


def headline(report: RecoveryReport) -> str:
    """A report without its details: a line of the log."""
    total = f"({report.total_s:.2f} s)"
    if report.kind == "fresh":
        return f"fresh start: parity of the initial state is in place {total}"
    what = "resumed from a checkpoint"
    if report.kind != "checkpoint":
        what = "recovered, no memory was lost"
    if report.lost:
        what = f"recovered, ranks {list(report.lost)} lost their memory and were rebuilt from parity"
    return f"{what}; training goes on from step {report.step} {total}"


class Stopwatch:
    """Wall time by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Adds the time that the body takes to a phase."""
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def join(
    memory: RankMemory,
    transport: Transport,
    generation: int,
    generation_id: int,
    mark: Callable[[], None] = lambda: None,
) -> None:
    """Makes this arena a member of the generation. All ranks; only after it may anything change.

    Args:
        memory: this rank's.
        transport: the control group.
        generation: number of this start.
        generation_id: its random id.
        mark: called when all have joined, before the first arena says that the generation is opened.
    """
    memory.arena.join(generation, generation_id)
    transport.barrier("joining the generation")
    mark()
    memory.arena.set("opened", generation)


def fill(
    memory: RankMemory,
    transport: Transport,
    plan: RecoveryPlan,
    write_initial: Callable[[], None],
    watch: Stopwatch,
) -> RecoveryReport:
    """A start with new arenas: what they are filled with becomes the plan's transaction. All ranks.

    Args:
        memory: a new arena in state INIT, joined.
        transport: the control group.
        plan: the same on all ranks; it `begins`.
        write_initial: fills rows, rank state and the slot of the plan's transaction.
        watch: takes the time.
    """
    with watch.phase("initialise"):
        write_initial()
    with watch.phase("encode"):
        _encode(memory, transport)
    memory.arena.set("prepared", plan.transaction)
    transport.barrier("the initial state")
    memory.commit(plan.transaction)
    memory.arena.set("state", State.LIVE)
    return RecoveryReport(plan.kind, plan.transaction, (), 0, False, 0, watch.seconds)


def recover(
    memory: RankMemory,
    transport: Transport,
    plan: RecoveryPlan,
    kernels: Kernels,
    watch: Stopwatch,
    ready: Ready = lambda start, stop: None,
) -> RecoveryReport:
    """Brings every rank to the plan's transaction and rebuilds what was lost. All ranks.

    Args:
        memory: this rank's arena: a survivor's, or a newcomer's in state REBUILDING; joined.
        transport: the control group.
        plan: the same on all ranks.
        kernels: does the work on bytes.
        watch: takes the time.
        ready: told of this rank's rows, as soon as no more of recovery will change them.

    Raises:
        InconsistentArenas: the rebuilt bytes don't fit the parity, or what a rank has to undo or redo from is
            damaged: an error on all ranks.
        PeerFailure: a peer died; the next start recovers again.
    """
    newcomer = memory.rank in plan.lost
    received = 0

    def decide() -> tuple[int, bool]:
        return (0, False) if newcomer else memory.decide(plan.transaction)

    with watch.phase("decide"):
        undone, redone = transport.together("undo and redo", decide)
    if not newcomer:
        ready(0, memory.space.words)
    if plan.encode:
        with watch.phase("encode"):
            _encode_again(memory, transport)
    if plan.lost:
        with watch.phase("rebuild"):
            received += rebuild_lost(memory, transport, plan, kernels, ready)
        with watch.phase("replicated"):
            received += copy_replicated(memory, transport, plan)
        with watch.phase("verify"):
            _verify(memory, transport)
    if newcomer:
        memory.commit(plan.transaction)
        memory.arena.set("prepared", plan.transaction)
    memory.arena.set("state", State.LIVE)
    return RecoveryReport(plan.kind, plan.transaction, plan.lost, undone, redone, received, watch.seconds)


def tell(memory: RankMemory, report: RecoveryReport) -> None:
    """Writes the report's facts to the arena's header, for people who watch the job from outside."""
    for word, value in (
        ("recovery_kind", 1 + get_args(Kind).index(report.kind)),
        ("recovery_step", report.step),
        ("recovery_us", round(report.total_s * 1e6)),
        ("recovered_ns", time.time_ns()),
    ):
        memory.arena.set(word, value)


def _encode(memory: RankMemory, transport: Transport) -> None:
    if memory.parity is None:
        return
    for start, stop in chunks(0, longest_block(memory)):
        memory.parity.update_(collect(memory, transport, start, stop, "encoding"))


def _encode_again(memory: RankMemory, transport: Transport) -> None:
    """Makes parity anew from rows, some of which were written undeclared. All ranks.

    Every arena says so while it lasts: a loss of memory in the middle of it can't be rebuilt.
    """
    memory.arena.set("undeclared", 1)
    transport.barrier("before encoding again")
    if memory.parity is not None:
        memory.parity.clear_()
    _encode(memory, transport)
    transport.barrier("after encoding again")
    memory.arena.set("undeclared", 0)


def _verify(memory: RankMemory, transport: Transport) -> None:
    """Compares parity with rows at the blocks' beginning, middle and end."""
    if memory.parity is None:
        return
    longest = longest_block(memory)
    wrong = [
        f"class {one.stripe_class} in words {start}..{start + SAMPLE_WORDS}"
        for start in sorted({0, longest // 2, max(0, longest - SAMPLE_WORDS)})
        for one in compare(memory, transport, start, start + SAMPLE_WORDS, "verifying")
    ]
    fine = transport.vote(not wrong, "verifying")
    if not all(fine):
        raise InconsistentArenas(
            f"after the rebuild, parity and rows differ in stripes whose parity is kept by ranks "
            f"{[rank for rank, yes in enumerate(fine) if not yes]} (here: {', '.join(wrong) or 'none'}): "
            f"memory rotted, or rows changed without being declared. Remove the arenas "
            f"(python -m ecemb arenas rm --job JOB), and resume from a checkpoint: ecemb.protect(resume=)"
        )
