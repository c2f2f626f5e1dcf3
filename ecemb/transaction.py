"""A step as a transaction: begin, capture, exchange, prepare, agree, apply, commit; or undo.

The order is protocol.md's, sections 3 and 5, and normative. What may be concluded:

- before `prepared` is stored, a failure undoes the transaction locally and ends the guard;
- after it, nothing undoes locally: the process ends, and recovery decides from what survived;
- whoever returns from the agreement knows that every rank has prepared;
- a rank that aborts says so in its heads, which go to all ranks: whoever has the heads of all ranks knows it,
  and nobody prepares without them. All undo, and commit the transaction empty in a second attempt, whose
  heads a rank sends after its own undo: nobody prepares it before all have undone the first.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from torch.profiler import record_function

from .errors import StepFailed, UsageError
from .memory import RankMemory
from .rankstate import RankState, read, write_
from .replicated import ReplicatedState, Savepoint
from .transport import Transport
from .watch import EXIT_UNDECIDED
from .window import Window

Words = NDArray[np.uint64]

logger = logging.getLogger("ecemb")

DIGEST_EVERY = 1000
_FINE, _FAILED, _ABORTED = range(3)


def lost_name(path: Path) -> str:
    """What to say when an arena's file was removed under the job."""
    return (
        f"{path} was removed while the job runs (by hand, or by systemd's RemoveIPC= when its user logs "
        f"out): this process goes on, but its memory ends with it, and a restart counts it as lost"
    )


class Transactions:
    """Runs this rank's side of the step protocol.

    Args:
        memory: this rank's arena, opened.
        transport: the control group.
        replicated: the model's replicated state.
        rank_state: what differs by rank.
        window: steps of a transaction, or what chooses their number.
    """

    def __init__(
        self,
        memory: RankMemory,
        transport: Transport,
        replicated: ReplicatedState,
        rank_state: RankState,
        window: Window | None = None,
    ) -> None:
        self._memory = memory
        self._transport = transport
        self._replicated = replicated
        self._rank_state = rank_state
        self._window = window or Window(1)
        self.in_flight: int | None = None
        self.aborting = False
        self._steps = 0  # of the transaction, that have ended
        self._savepoint, self._packed = Savepoint(), b""
        self._commits, self._began = 0, 0.0
        self.captured_rows = 0
        self.seconds: dict[str, float] = {}

    @property
    def next_step(self) -> int:
        """The number of the step that begins next: that of all steps that have ended."""
        return self._memory.committed + self._steps

    @property
    def window(self) -> Window:
        """How many steps a transaction takes."""
        return self._window

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
        if self._steps == 0:
            self._memory.journal.arm(transaction)
        else:
            self._memory.journal.extend(transaction)
            with self._phase("savepoint"):
                self._replicated.save(self._savepoint, transaction - 1)
                self._packed = self._rank_state.pack()
        if transaction % DIGEST_EVERY == 0 and not self._memory.arena.is_named():
            logger.warning("%s", lost_name(self._memory.arena.path))
        return transaction

    def capture(self, table: int, ids: NDArray[np.int64]) -> None:
        """Saves rows before they change.

        Args:
            table: index of the table in the row space.
            ids: int64 [m], in any order, repeats allowed.
        """
        with self._phase("capture"):
            self.captured_rows += self._memory.journal.capture(table, ids)

    def abort(self) -> None:
        """Votes against the step in flight: `commit` undoes it on all ranks, and it is an empty one then."""
        self._open()
        self.aborting = True

    def commit(self) -> list[int]:
        """Ends the step in flight; if its window is full, commits the transaction on all ranks, or on none.

        All ranks.

        Returns:
            The ranks that aborted the step: then it is undone on all ranks, and empty. None as a rule.

        Raises:
            StepFailed: another rank's step failed, or the ranks are not in the same step. Undone here.
            PeerFailure: a peer died before this rank prepared. Undone here.
            NotEnoughSpace: a journal can't grow. Undone here.
        """
        transaction = self._open()
        whole = self._steps + 1 >= self._window.size
        self._began = time.perf_counter()
        if whole:
            aborted = self._attempt(transaction, 1)
        else:
            with self._phase("exchange"):
                aborted = self._meet(transaction, 1, None)[1]
        if aborted:
            self._restore_step(transaction)
            self.aborting = False
            if whole:
                self._attempt(transaction, 2)
        if whole:
            self._finish(transaction)
        else:
            self._steps += 1
        self.in_flight = None
        return aborted

    def drain(self) -> None:
        """Commits the steps of a window that is not full. All ranks, between steps.

        Raises:
            As `commit` does.
        """
        if self._steps:
            self.in_flight = transaction = self.next_step
            self._began = time.perf_counter()
            self._attempt(transaction, 1)
            self._finish(transaction)
            self.in_flight = None

    def _finish(self, transaction: int) -> None:
        """From `prepared` to `committed`. All ranks."""
        self._memory.prepare(transaction)
        with self._phase("agree"):
            self._transport.vote(True, f"the agreement on step {transaction - 1}")
        with self._phase("apply"):
            self._memory.apply(transaction)
        self._memory.commit(transaction)
        self._steps = 0
        self._commits += 1
        self._window.end(time.perf_counter() - self._began, self._transport)

    def _attempt(self, transaction: int, attempt: int) -> list[int]:
        """Everything before `prepared`: states, deltas, the exchange. All ranks.

        Returns:
            The ranks that abort: then no inbox was opened, and nothing is prepared.
        """
        messages: dict[int, Words] = {}
        if not self.aborting:
            with self._phase("state"):
                self._memory.capture_rank_state()
                write_(self._memory.rank_state, self._rank_state.pack())
                self._replicated.save(self._memory.slots, transaction)
            with self._phase("delta"):
                messages = self._memory.outgoing()
        with self._phase("exchange"):
            return self._exchange(transaction, attempt, messages)

    def undo(self, error: BaseException) -> None:
        """Takes the transaction in flight back on this rank, and tells the others that it failed.

        Rows, replicated state and rank state are as they were when it began, with the first step of its
        window. The others notice at their exchange; the job needs a restart, because this rank may have left
        collectives half-way.

        A transaction that is prepared is not undone: the process ends (protocol.md, section 3).

        Args:
            error: why.
        """
        transaction = self._open()
        if self._memory.arena.get("prepared") >= transaction:
            self._leave(transaction, error)
        try:
            self._restore(transaction)
        finally:
            self.in_flight = None
            self.aborting = False
            self._steps = 0
            self._transport.leave(self._heads(transaction, 0, None, _FAILED))

    def _restore(self, transaction: int) -> None:
        """Puts this rank's rows and states back to what they were when the transaction began.

        Args:
            transaction: the one in flight, not prepared.
        """
        journal, committed = self._memory.journal, self._memory.committed
        if committed < journal.label <= transaction:  # else it was not armed yet, and holds another's
            journal.undo()
        self._replicated.load(self._memory.slots, committed)
        self._rank_state.unpack(read(self._memory.rank_state))

    def _restore_step(self, transaction: int) -> None:
        """Puts this rank's rows and states back to what they were when the step began, but for positions."""
        self._memory.journal.undo_step()
        if self._steps:
            self._replicated.load(self._savepoint, transaction - 1)
            packed = self._packed
        else:
            self._replicated.load(self._memory.slots, self._memory.committed)
            packed = read(self._memory.rank_state)
        self._rank_state.unpack(packed, positions=False)

    def _open(self) -> int:
        if self.in_flight is None:
            raise UsageError("no step is open: use `with guard.step():`")
        return self.in_flight

    def _heads(
        self, transaction: int, attempt: int, messages: dict[int, Words] | None, flag: int
    ) -> NDArray[np.int64]:
        digest = 0
        if messages is not None and flag == _FINE and self._commits % DIGEST_EVERY == 0:
            digest = self._replicated.digest(self._memory.slots, transaction)
        heads = np.tile(np.array([0, transaction, attempt, flag, digest]), (self._transport.world_size, 1))
        for keeper, words in (messages or {}).items():
            heads[keeper, 0] = len(words)
        return heads

    def _exchange(self, transaction: int, attempt: int, messages: dict[int, Words]) -> list[int]:
        incoming, aborted = self._meet(transaction, attempt, messages)
        if not aborted:
            inbox = self._memory.receive(incoming)
            self._transport.exchange(messages, inbox, f"the exchange of step {transaction - 1}")
        return aborted

    def _meet(
        self, transaction: int, attempt: int, messages: dict[int, Words] | None
    ) -> tuple[list[int], list[int]]:
        """All ranks tell each other how their step went.

        Args:
            transaction: the one in flight.
            attempt: 1, or 2 after an abort.
            messages: what will be sent; None if the transaction goes on with another step.

        Returns:
            The words that each rank announces, and the ranks that abort.
        """
        step = transaction - 1
        flag = _ABORTED if self.aborting else _FINE
        heads = self._transport.tell(
            self._heads(transaction, attempt, messages, flag), f"the exchange of step {step}"
        )
        incoming, transactions, attempts, flags, digests = (column.tolist() for column in heads.T)
        failed = [rank for rank, flag in enumerate(flags) if flag == _FAILED]
        aborted = [rank for rank, flag in enumerate(flags) if flag == _ABORTED]
        if failed:
            raise StepFailed(
                f"step {step} failed on ranks {failed} and is undone here: see their logs, then restart "
                f"the job; it goes on from step {self._memory.committed}"
            )
        if len(set(transactions)) > 1 or len(set(attempts)) > 1:
            raise StepFailed(
                f"the ranks are not in the same step: {dict(enumerate(t - 1 for t in transactions))}; "
                f"every rank must run every step from guard.next_step on"
            )
        if aborted:
            return incoming, aborted
        if len(set(digests)) > 1:
            raise StepFailed(
                f"replicated state (dense parameters, buffers, optimizer state) differs between ranks "
                f"in step {step}: checksums {dict(enumerate(digests))}; inside the step, average the dense "
                f"gradients over the ranks (e.g. DistributedDataParallel), and buffers, such as a batch "
                f"norm's, too (SyncBatchNorm, or all_reduce them), so that all ranks hold the same"
            )
        return incoming, []

    def _leave(self, transaction: int, error: BaseException) -> NoReturn:
        """Ends the process: it is prepared, and only recovery may decide from here (protocol.md 3)."""
        logger.critical(
            "step %d is prepared but undecided on this rank (%s: %s); ending the process, so that "
            "recovery decides from the arenas",
            transaction - 1,
            type(error).__name__,
            error,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_UNDECIDED)

    @contextmanager
    def _phase(self, name: str) -> Generator[None]:
        began = time.perf_counter()
        with record_function(f"ecemb.{name}"):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
