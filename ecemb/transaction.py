"""A step as a transaction: begin, capture, exchange, prepare, agree, apply, commit; or undo.

The order is protocol.md's, sections 3 and 5, and normative. What may be concluded:

- before `prepared` is stored, a failure undoes the transaction locally and ends the guard;
- after it, nothing undoes locally: the process ends, and recovery decides from what survived;
- whoever returns from the agreement knows that every rank has prepared;
- a rank that aborts says so in its heads, which go to all ranks: whoever has the heads of all ranks knows it,
  and nobody prepares without them. All undo, and commit the transaction empty in a second attempt, whose
  heads a rank sends after its own undo: nobody prepares it before all have undone the first.

With `overlap`, what follows the heads is done in a thread of its own, beside the body of the next step. That
one's rows go to the other row journal; its end waits for that thread first, so that no more than two
transactions are undecided, a slot is only written when the one before is decided everywhere, and all else
is as without.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
import traceback
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from torch.profiler import record_function

from . import error_file, replicas
from .between import Between
from .error_file import cause_of, follows
from .errors import StepFailed, UsageError
from .memory import RankMemory
from .rankstate import RankState, Taken, read, write_
from .replicated import Began, ReplicatedState
from .slots import Savepoint
from .threads import hand_over
from .transport import Transport
from .watch import EXIT_UNDECIDED
from .whereabouts import Whereabouts
from .window import Window
from .words import short

Words = NDArray[np.uint64]

logger: logging.Logger = logging.getLogger("ecemb")

COMPARE_EVERY = 1000
_NAMED_EVERY = 1000  # steps between two looks whether the arena still has its name
_FINE, _FAILED, _ABORTED = range(3)


def lost_name(path: Path) -> str:
    """What to say when an arena's file was removed under the job."""
    return (
        f"{path} was removed while the job runs (by hand, or by systemd's RemoveIPC= when its user logs "
        f"out): this process goes on, but its memory ends with it, and a restart counts it as lost"
    )


@dataclasses.dataclass(frozen=True)
class _Met:
    """What the ranks told each other at the end of a step.

    Attributes:
        messages: this rank's, by keeper.
        incoming: the words that each rank announces.
        aborted: the ranks that abort: if any, nothing is sent.
    """

    messages: dict[int, Words]
    incoming: list[int]
    aborted: list[int]


BESIDE = ("exchange", "agree", "apply")
"""Phases that keep nobody waiting with `overlap`: those of a decision. Training waits for them in "wait"."""


class Transactions:
    """Runs this rank's side of the step protocol.

    Args:
        memory: this rank's arena, opened.
        transport: the control group.
        replicated: the model's replicated state.
        rank_state: what differs by rank.
        window: steps of a transaction, or what chooses their number.
        overlap: whether to exchange, prepare and apply beside the next step's body.
        compare_every: commits between two comparisons of replicated state among the ranks.
        whereabouts: told of each step's begin and end.
    """

    def __init__(
        self,
        memory: RankMemory,
        transport: Transport,
        replicated: ReplicatedState,
        rank_state: RankState,
        window: Window | None = None,
        *,
        overlap: bool = False,
        compare_every: int = COMPARE_EVERY,
        whereabouts: Whereabouts | None = None,
    ) -> None:
        self._memory = memory
        self._transport = transport
        self._replicated = replicated
        self._rank_state = rank_state
        self._window = window or Window(1)
        self._whereabouts = whereabouts or Whereabouts()
        self.in_flight: int | None = None
        self.aborting: bool = False
        self._steps = 0  # of the transaction, that have ended
        self._savepoint = Savepoint()
        self._taken: Taken | None = None  # rank state at the step's begin
        self._began = Began(None, {})
        self._between = Between(speaks=transport.rank == 0)
        self._commits, self._compare_every = 0, compare_every
        self._thread = ThreadPoolExecutor(1, "ecemb-commit") if overlap else None
        self._pending: Future[None] | None = None
        self._handed = 0  # the transaction that is pending, if one is
        self.captured_rows: int = 0
        self.seconds: dict[str, float] = {}

    @property
    def next_step(self) -> int:
        """The number of the step that begins next: that of all steps that have ended."""
        return self._memory.committed + self._steps if self._pending is None else self._handed

    @property
    def rank(self) -> int:
        """This process's."""
        return self._memory.rank

    @property
    def window(self) -> Window:
        """How many steps a transaction takes."""
        return self._window

    @property
    def held_bytes(self) -> dict[str, int]:
        """Memory in the arena and beside it, by what it holds."""
        arena, fabric = self._memory.arena, self._transport.fabric
        held = {name: arena.reserved(name) for name, _ in arena.constants.regions}
        held |= {"messages": self._memory.message_bytes, "savepoint": self._savepoint.size_bytes}
        return held if fabric is None else {**held, "fabric": fabric.held_bytes}

    def begin(self) -> int:
        """Begins a step: arms the journal for the next transaction, or extends the one whose window is open.

        Returns:
            The transaction's number: that of the steps that have ended when this one has.

        Raises:
            UsageError: a step is in flight.
        """
        if self.in_flight is not None:
            raise UsageError(f"step {self.in_flight - 1} is open: commit or undo it first")
        self._window.begin()
        self.in_flight = transaction = self.next_step + 1
        self._whereabouts.place = f"in the body of step {transaction - 1}"
        if self._steps == 0:
            self._memory.arm(transaction)
        else:
            self._memory.journal.extend(transaction)
        with self.phase("savepoint"):
            self._taken = self._rank_state.take()
            if self._steps == 0:
                self._began = self._replicated.begin(self._savepoint, transaction - 1)
                moved = {**self._began.moved, **self._rank_state.moved(self._taken)}
                self._between.check(transaction - 1, moved)
            else:
                self._replicated.save(self._savepoint, transaction - 1)
                self._began = Began(None, {})
        if transaction % _NAMED_EVERY == 0 and not self._memory.arena.is_named():
            logger.warning("%s", lost_name(self._memory.arena.path))
        return transaction

    def capture(self, table: int, ids: NDArray[np.int64]) -> None:
        """Saves rows before they change.

        Args:
            table: index of the table in the row space.
            ids: int64 [m], in any order, repeats allowed.
        """
        with self.phase("capture"):
            self.captured_rows += self._memory.journal.capture(table, ids)

    def abort(self) -> None:
        """Votes against the step in flight: `commit` undoes it on all ranks, and it is an empty one then."""
        self._open()
        self.aborting = True

    def commit(self) -> list[int]:
        """Ends the step in flight; if its window is full, commits the transaction on all ranks, or on none.

        All ranks. With `overlap` it returns when the ranks have told each other how the step went; the next
        `commit`, or `drain`, waits for the rest, and raises what came of it.

        Returns:
            The ranks that aborted the step: then it is undone on all ranks, and empty. None as a rule.

        Raises:
            StepFailed: another rank's step failed, or the ranks are not in the same step. Undone here.
            PeerFailure: a peer died before this rank prepared. Undone here.
            NotEnoughSpace: a journal can't grow. Undone here.
        """
        transaction, began = self._open(), time.perf_counter()
        self._whereabouts.place = f"at the end of step {transaction - 1}"
        self._settle()
        whole = self._steps + 1 >= self._window.size  # which the transaction before may have chosen
        found = self._attempt(transaction, 1) if whole else self._meet(transaction, 1, None)
        if aborted := found.aborted:
            self._restore_step(transaction)
            self.aborting = False
            if whole:
                found = self._attempt(transaction, 2)
        if whole:
            self._finish(transaction, found, began)
        else:
            self._steps += 1
        self.in_flight = None
        self._whereabouts.place = f"before step {transaction}"
        return aborted

    def drain(self) -> None:
        """Commits what has ended and is not committed: all steps of an open window. All ranks, between steps.

        Raises:
            As `commit` does.
        """
        if self._steps or self._pending is not None:
            self.in_flight, began = self.next_step, time.perf_counter()
            self._settle()
            if self._steps:
                self._finish(self.in_flight, self._attempt(self.in_flight, 1), began)
                self._settle()
            self.in_flight = None

    def close(self) -> None:
        """Ends the thread, if there is one; no call may follow."""
        if self._thread is not None:
            self._thread.shutdown()

    def _settle(self) -> None:
        """Waits until the transaction before is decided, if it isn't yet.

        Raises:
            As `commit` does: that transaction is not prepared then.
        """
        if self._pending is not None:
            with self.phase("wait"), self._whereabouts.waiting():
                self._pending.result()
            self._pending = None

    def _finish(self, transaction: int, found: _Met, began: float) -> None:
        """Decides a transaction: now, or beside what comes next. All ranks."""
        self._steps = 0
        if self._thread is None:
            self._decide(transaction, found)
            self._window.end(time.perf_counter() - began, self._transport)
        else:
            spent_s = time.perf_counter() - began
            self._handed = transaction
            self._pending = pending = Future[None]()  # known before it can begin, whatever interrupts here
            hand_over(self._thread, pending, self._decide_beside, transaction, found, spent_s)

    def _decide_beside(self, transaction: int, found: _Met, spent_s: float) -> None:
        """See `_decide`; in the thread.

        Args:
            transaction: the one that has ended.
            found: what the ranks told each other.
            spent_s: what its end has taken of the main thread's time.
        """
        try:
            self._decide(transaction, found)
            self._window.end(spent_s, self._transport)
        except BaseException as error:
            if self._is_undecided:
                self._leave(transaction, error)
            raise

    def _decide(self, transaction: int, found: _Met) -> None:
        """The exchange, and from `prepared` to `committed`. All ranks."""
        with self.phase("exchange"):
            inbox = self._memory.receive(found.incoming)
            self._transport.exchange(found.messages, inbox, f"the exchange of step {transaction - 1}")
        self._memory.prepare(transaction)
        with self.phase("agree"):
            self._transport.vote(True, f"the agreement on step {transaction - 1}")
        with self.phase("apply"):
            self._memory.apply(transaction)
        self._memory.commit(transaction)
        self._commits += 1

    def _attempt(self, transaction: int, attempt: int) -> _Met:
        """Everything before the exchange: states, deltas, heads. All ranks."""
        messages: dict[int, Words] = {}
        if not self.aborting:
            with self.phase("state"):
                self._memory.capture_rank_state()
                write_(self._memory.rank_state, self._rank_state.pack())
                self._replicated.save(self._memory.slots, transaction)
            with self.phase("delta"):
                messages = self._memory.outgoing()
        return self._meet(transaction, attempt, messages)

    def undo(self, error: BaseException) -> None:
        """Takes the transaction in flight back on this rank, and tells the others that it failed.

        Rows, replicated state and rank state are as they were when it began, with the first step of its
        window. The others notice at their exchange; the job needs a restart, because this rank may have left
        collectives half-way.

        A transaction that is prepared is not undone: the process ends (protocol.md, section 3). One before
        it that is still being decided comes first: it commits, or is undone, too.

        Args:
            error: why.
        """
        transaction = self._open()
        level = logging.ERROR if cause_of(error) is None else logging.INFO  # else that rank says it
        text = short(f"{type(error).__name__}: {error}", 110)
        logger.log(level, "rank %d: step %d failed (%s); undoing it", self.rank, transaction - 1, text)
        if self._pending is not None:
            if not self._pending.cancel():
                wait([self._pending])
            self._pending = None
        if self._is_undecided:
            self._leave(transaction, error)
        try:
            self._restore()
        finally:
            self.in_flight = None
            self.aborting = False
            self._steps = 0
            self._transport.leave(self._heads(transaction, 0, None, _FAILED))

    def _restore(self) -> None:
        """Puts this rank's rows and states back to what they were after the last committed transaction."""
        committed = self._memory.committed
        self._memory.undo(committed)
        self._replicated.load(self._memory.slots, committed)
        self._rank_state.unpack(read(self._memory.rank_state))

    def _restore_step(self, transaction: int) -> None:
        """Puts this rank's rows and states back to what they were when the step began, but for positions."""
        self._memory.journal.undo_step()
        self._replicated.back(self._memory.slots, self._savepoint, transaction - 1, self._began)
        if self._taken is not None:
            self._rank_state.put(self._taken)

    @property
    def _is_undecided(self) -> bool:
        """Whether only recovery may decide."""
        return self._memory.arena.get("prepared") > self._memory.committed

    def _open(self) -> int:
        if self.in_flight is None:
            raise UsageError("no step is open: use `with guard.step():`")
        return self.in_flight

    def _heads(
        self, transaction: int, attempt: int, messages: dict[int, Words] | None, flag: int
    ) -> NDArray[np.int64]:
        digest = 0
        if messages is not None and flag == _FINE and self._commits % self._compare_every == 0:
            digest = self._replicated.digest(self._memory.slots, transaction)
        heads = np.tile(np.array([0, transaction, attempt, flag, digest]), (self._transport.world_size, 1))
        for keeper, words in (messages or {}).items():
            heads[keeper, 0] = len(words)
        return heads

    def _meet(self, transaction: int, attempt: int, messages: dict[int, Words] | None) -> _Met:
        """All ranks tell each other how their step went.

        Args:
            transaction: the one in flight.
            attempt: 1, or 2 after an abort.
            messages: what will be sent; None if the transaction goes on with another step.
        """
        step = transaction - 1
        flag = _ABORTED if self.aborting else _FINE
        with self.phase("heads"):
            heads = self._transport.tell(
                self._heads(transaction, attempt, messages, flag), f"the heads of step {step}"
            )
        incoming, transactions, attempts, flags, digests = (column.tolist() for column in heads.T)
        failed = [rank for rank, flag in enumerate(flags) if flag == _FAILED]
        aborted = [rank for rank, flag in enumerate(flags) if flag == _ABORTED]
        if failed:
            raise follows(
                StepFailed(
                    f"step {step} failed on ranks {failed} and is undone here: see their logs, then restart "
                    f"the job; it goes on from step {self._memory.committed}"
                ),
                "StepFailed",
            )
        if len(set(transactions)) > 1 or len(set(attempts)) > 1:
            raise StepFailed(
                f"the ranks are not in the same step: {dict(enumerate(t - 1 for t in transactions))}; "
                f"every rank must run every step from guard.next_step on"
            )
        if len(set(digests)) > 1 and not aborted:
            differs = replicas.compare(self._memory.slots.read(transaction), self._transport)
            raise StepFailed(
                f"replicated state (dense parameters, buffers, optimizer state) differs between ranks "
                f"in step {step}: {differs}; inside the step, average the dense "
                f"gradients over the ranks (e.g. DistributedDataParallel), and buffers, such as a batch "
                f"norm's, too (SyncBatchNorm, or all_reduce them), so that all ranks hold the same"
            )
        return _Met(messages or {}, incoming, aborted)

    def _leave(self, transaction: int, error: BaseException) -> NoReturn:
        """Ends the process: it is prepared, and only recovery may decide from here (protocol.md 3)."""
        logger.critical(
            "step %d is prepared but undecided on this rank (%s: %s); ending the process, so that "
            "recovery decides from the arenas",
            transaction - 1,
            type(error).__name__,
            short(error),
        )
        with suppress(OSError):
            stack = "".join(traceback.format_exception(error))
            error_file.leave(f"{type(error).__name__}: {error}", stack, later=cause_of(error) is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_UNDECIDED)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Adds the time that the block takes to `seconds`, and shows it to profilers."""
        began = time.perf_counter()
        with record_function(f"ecemb.{name}"):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
