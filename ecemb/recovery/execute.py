"""Carries out a plan: the fresh start, and the recovery (docs/protocol.md, 3.3).

Every stage is idempotent: after a failure in the middle, another start makes another plan and runs the same
stages again. A replacement's arena counts as lost until its state is LIVE, which is its last store.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import get_args

from ..errors import InconsistentArenas
from ..memory.header import Word
from ..memory.rank_memory import RankMemory
from ..net.collectives import Transport
from ..net.wording import counted, listed
from .fingerprints import wrong_blocks
from .plan import Kind, RecoveryPlan, rebuilds
from .relay import Ready, rebuild_lost
from .scrub import collect_parity, compare_parity, longest_block, parity_chunks
from .state_slices import compare as compare_state
from .state_slices import copy_lost

logger: logging.Logger = logging.getLogger("ecemb")

SAMPLE_WORDS = 1 << 12


@dataclasses.dataclass(frozen=True)
class RecoveryReport:
    """The outcome of this start, as `guard.recovery` shows it.

    As text it is one line with the time of all phases together; the log has the phases at level DEBUG.

    Attributes:
        kind: "fresh", "process" (restarted workers, all memory survived), "memory" (ranks were rebuilt),
            "checkpoint" (resumed from one) or "move" (moved from the memory of another number of ranks).
        step: the number of the step to run next.
        lost: ranks whose memory was rebuilt; in a move, the earlier ranks whose rows were decoded.
        undone_rows: number of rows that this rank copied back from its journals.
        redone: whether this rank redid the parity of a decided step.
        rebuilt_bytes: bytes of rows, parity and replicated state that this rank received; in a move, all of
            its rows and replicated state.
        seconds: wall time by phase of `protect` on this rank.
        before_s: wall time from the start of this process to `protect`, on this rank: "fork" until a script
            that `ecemb-run` started warm began, "script" for the script's own imports and code (and for the
            interpreter's start, if it was not forked), "rendezvous" for `init_process_group`.
        moved_from: number of ranks that a move began with; 0 if there was no move.
        in_background: whether lost memory is rebuilt beside training; this start did not wait for it.
        verified_step: where memory was lost: the number of steps that had ended when parity was last known,
            from comparisons beside training, to fit all rows; None if it never was, or no memory was lost.
    """

    kind: Kind
    step: int
    lost: tuple[int, ...]
    undone_rows: int
    redone: bool
    rebuilt_bytes: int
    seconds: dict[str, float]
    before_s: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    moved_from: int = 0
    in_background: bool = False
    verified_step: int | None = None

    @property
    def total_s(self) -> float:
        """Wall time of all phases of `protect` on this rank, in seconds."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        total = f"({self.total_s:.2f} s)"
        if self.kind == "fresh":
            return f"fresh start: parity of the initial state is in place {total}"
        what = "recovered, no memory was lost"
        if self.kind == "checkpoint":
            what = "resumed from a checkpoint"
        elif self.kind == "move":
            decoded = f"; that of {listed(self.lost)} was lost and decoded" if self.lost else ""
            what = f"moved from the memory of {counted(self.moved_from, 'rank')}{decoded}"
        elif self.lost:
            done = "is rebuilt beside training" if self.in_background else "rebuilt from parity"
            what = f"recovered, the memory of {listed(self.lost)} was lost and {done}"
        return f"{what}; training goes on from step {self.step} {total}"


def details(report: RecoveryReport) -> str:
    """The report as text, with this rank's undone rows, redone step and received bytes, and all phases."""
    phases = _by_phase(report.seconds)
    if report.before_s:
        phases += f"; before: {_by_phase(report.before_s)}"
    if report.kind in ("fresh", "checkpoint"):
        return f"{str(report)[:-1]}: {phases})"
    redone = "a step redone" if report.redone else "no step redone"
    return (
        f"{str(report)[:-1]}; this rank: {report.undone_rows} rows undone, {redone}, "
        f"{report.rebuilt_bytes / 1e6:.1f} MB received; {phases})"
    )


def _by_phase(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())


class Stopwatch:
    """Measures wall time by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """A `with` block whose wall time is added to a phase."""
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
    """Makes this rank's arena a member of the generation. All ranks; no state may change before it.

    Args:
        memory: this rank's memory.
        transport: the control group.
        generation: number of this start.
        generation_id: random id of this start.
        mark: called when all ranks have joined, before the first arena is marked as opened in this
            generation.
    """
    memory.join(generation, generation_id)
    transport.barrier("joining the generation")
    mark()
    memory.mark_opened(generation)


def fill(
    memory: RankMemory,
    transport: Transport,
    plan: RecoveryPlan,
    write_initial: Callable[[], None],
    watch: Stopwatch,
) -> RecoveryReport:
    """Fills new arenas; their content becomes the plan's transaction. All ranks.

    Args:
        memory: this rank's new arena in state INIT, joined.
        transport: the control group.
        plan: the plan, the same on all ranks; its `begins` is True.
        write_initial: fills rows, rank state and the slot of the plan's transaction.
        watch: measures the phases.
    """
    with watch.phase("move" if plan.kind == "move" else "initialise"):
        write_initial()
    with watch.phase("encode"):
        _encode(memory, transport)
    memory.mark_prepared(plan.transaction)
    transport.barrier("the initial state")
    memory.commit(plan.transaction)
    memory.go_live()
    return RecoveryReport(plan.kind, plan.transaction, (), 0, False, 0, watch.seconds)


def recover(
    memory: RankMemory,
    transport: Transport,
    plan: RecoveryPlan,
    watch: Stopwatch,
    ready: Ready = lambda start, stop: None,
    *,
    in_background: bool = False,
) -> RecoveryReport:
    """Brings every rank to the plan's transaction and rebuilds lost memory. All ranks.

    Args:
        memory: this rank's arena: a survivor's, or a replacement's in state REBUILDING; joined.
        transport: the control group.
        plan: the plan, the same on all ranks.
        watch: measures the phases.
        ready: called with ranges of words of this rank's row space, once recovery will not change them.
        in_background: whether lost rows and parity are not rebuilt here: replacements stay REBUILDING.

    Raises:
        InconsistentArenas: the rebuilt bytes don't fit the parity, or a journal that a rank undoes or redoes
            from is damaged: an error on all ranks.
        PeerFailure: a peer died; the next start recovers again.
    """
    is_replacement = memory.rank in plan.lost
    received = 0

    def roll() -> tuple[int, bool]:
        return (0, False) if is_replacement else memory.roll_to(plan.transaction)

    with watch.phase("decide"):
        undone, redone = transport.together("undo and redo", roll)
    if plan.lost and not in_background:
        with watch.phase("verify"):
            plan = _without_wrong_blocks(memory, transport, plan)
    verified = None
    if plan.lost:
        own = str(memory.arena.get(Word.VERIFIED)).encode()
        steps = [int(text) for text in transport.gather(own, "asking when parity was compared")]
        verified = min(steps[rank] for rank in plan.survivors) or None
    if not is_replacement:
        repaired = {one.block for one in plan.rebuild if one.rank == memory.rank}
        for block, (start, stop) in enumerate(itertools.pairwise(memory.space.bounds)):
            if block not in repaired:
                ready(start, stop)
    if plan.encode:
        with watch.phase("encode"):
            _encode_again(memory, transport)
    if plan.lost and not in_background:
        with watch.phase("rebuild"):
            received += rebuild_lost(memory, transport, plan, ready)
    with watch.phase("replicated"):
        sizes = compare_state(memory, transport, plan)
        if plan.lost:
            received += copy_lost(memory, transport, plan, *sizes)
    if plan.lost and not in_background:
        with watch.phase("verify"):
            _verify(memory, transport)
    if is_replacement:
        memory.commit(plan.transaction)
        memory.mark_prepared(plan.transaction)
    if not (is_replacement and in_background):
        memory.go_live()
    return RecoveryReport(
        plan.kind,
        plan.transaction,
        plan.lost,
        undone,
        redone,
        received,
        watch.seconds,
        in_background=in_background,
        verified_step=verified,
    )


def write_to_header(memory: RankMemory, report: RecoveryReport) -> None:
    """Writes kind, step and time of the recovery to the arena's header, for `top`."""
    memory.record_recovery(1 + get_args(Kind).index(report.kind), report.step, report.total_s)


def _encode(memory: RankMemory, transport: Transport) -> None:
    if memory.parity is None:
        return
    for start, stop in parity_chunks(0, longest_block(memory)):
        memory.parity.update_(collect_parity(memory, transport, start, stop, "encoding"))


def _encode_again(memory: RankMemory, transport: Transport) -> None:
    """Computes parity again from rows, as some rows were written without being declared. All ranks.

    Every arena is marked as undeclared until the end, as memory that is lost in between can't be rebuilt.
    """
    memory.mark_undeclared()
    transport.barrier("before encoding again")
    if memory.parity is not None:
        memory.parity.clear_()
    _encode(memory, transport)
    transport.barrier("after encoding again")
    memory.mark_encoded()


def _without_wrong_blocks(memory: RankMemory, transport: Transport, plan: RecoveryPlan) -> RecoveryPlan:
    """Compares survivors' blocks before they are decoded; a wrong block is rebuilt as well. All ranks.

    Raises:
        InconsistentArenas: blocks don't fit, and it isn't known which one is wrong: an error on all ranks.
    """
    placement = memory.geometry.placement
    if placement is None:
        return plan
    wrong = wrong_blocks(memory, transport, plan.lost, "comparing the blocks that survived")
    if unknown := sorted(c for c, block in wrong.items() if block < 0):
        members = sorted({rank for c in unknown for rank in placement.members(c)} - set(plan.lost))
        raise InconsistentArenas(
            f"before the rebuild, blocks that survived of stripe classes {unknown} contradict each other, "
            f"and it isn't known which are wrong: memory of {listed(members)} rotted, or rows changed "
            f"without being declared. Nothing was rebuilt from them. Remove the arenas "
            f"(ecemb arenas rm --job JOB), and resume from a checkpoint: ecemb.protect(resume=)"
        )
    for c, block in wrong.items():
        owner = placement.members(c)[block]
        if memory.rank in (min(plan.survivors), owner):
            logger.warning(
                "rank %d: block %d of stripe class %d, in the memory of rank %d, contradicts the others: it "
                "is left out of the rebuild, and rebuilt from them. Its memory is defective, or the script "
                "has written rows that were not declared (guard.touch): such writes are taken back",
                *(memory.rank, block, c, owner),
            )
    return dataclasses.replace(plan, rebuild=rebuilds(placement, plan.lost, wrong)) if wrong else plan


def _verify(memory: RankMemory, transport: Transport) -> None:
    """Compares parity with rows in `SAMPLE_WORDS` words at the blocks' beginning, middle and end. All ranks.

    Raises:
        InconsistentArenas: they differ on a rank; an error on all ranks.
    """
    longest = longest_block(memory)
    wrong = [
        f"class {one.stripe_class} in words {start}..{start + SAMPLE_WORDS}"
        for start in sorted({0, longest // 2, max(0, longest - SAMPLE_WORDS)})
        for one in compare_parity(memory, transport, start, start + SAMPLE_WORDS, "verifying")
    ]
    fine = transport.vote(not wrong, "verifying")
    if not all(fine):
        raise InconsistentArenas(
            f"after the rebuild, parity and rows differ in stripes whose parity is kept by ranks "
            f"{[rank for rank, yes in enumerate(fine) if not yes]} (here: {', '.join(wrong) or 'none'}): "
            f"memory rotted, or rows changed without being declared. Remove the arenas "
            f"(ecemb arenas rm --job JOB), and resume from a checkpoint: ecemb.protect(resume=)"
        )
