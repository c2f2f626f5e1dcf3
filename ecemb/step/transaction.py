"""A step as a transaction: begin, capture, exchange, prepare, agree, apply, commit; or undo.

The order is that of docs/protocol.md, 1.1 and 1.6, which is normative. A rank may conclude:

- before `prepared` is stored, a failure undoes the transaction locally and ends the guard;
- after `prepared`, nothing is undone locally: the process ends, and recovery decides from the survivors;
- a rank that returns from the agreement knows that every rank has prepared;
- a rank that aborts sends this in its status. The verdict folds the status of all ranks, so every rank knows
  of the abort. All gather dense state of the last commit, undo, and commit the transaction empty. A rank
  prepares after its own undo.
- a rank that fails reports it once, to all ranks that may wait for it: in the place of its status; or, after
  the verdict, in the place of its deltas and of its vote.

With `overlap`, the commit thread does the work that follows the status, while the body of the next step runs.
The next step's rows go to the other row journal. The commit thread also copies changed rows of tables outside
the arena into it. The end of the next transaction first waits for the thread, so at most two transactions are
undecided, and a slot is written only when the transaction before is decided on all ranks. The rest is the
same as without `overlap`.

`Step` is the user's view of one step. Parts of `Transactions`: `OffArenaRows` copies changed rows of tables
outside the arena into it when a transaction ends; `CommitThrottle` makes the commit thread rest after each
part of its work, so that it slows down no step much, but not while training waits for the commit; `Between`
warns of changes between two steps; `Sigterm` ends the process between two steps; `end_process` ends a process
that has prepared a transaction and can't decide it (docs/protocol.md, 1.1).

SIGTERM: torchrun's agent forwards the SIGTERM that announces the end of its machine to its workers, and kills
them 30 s later (`--shutdown-timeout`). The end of a worker between two transactions undoes no step of any
rank. That only saves work: an end at any other moment is as safe, and no rule of recovery depends on it.

Changes between two steps: after a failure or an abort, training continues from the last committed step. Code
in front of a step (`lr = f(step)` at the top of the loop) then runs again and makes the same change. Code
behind a step does not run again, and code between `ecemb.protect` and the loop runs on another state. A
thing that changes before the first step and again before the second one counts as set in front of every step,
which is safe. Every other change is logged as a warning.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ContextDecorator
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch.autograd import profiler
from torch.profiler import record_function

from ..engines.device_image import Images, StagedRows
from ..errors import NotEnoughSpace, PeerFailure, UsageError
from ..kernels.contract import Ids
from ..kernels.threads import IdleProcessors, hand_over, to_the_end
from ..memory.journal import RowJournal
from ..memory.private_files import lost_name
from ..memory.rank_memory import RankMemory
from ..net import error_file
from ..net.collectives import Transport
from ..net.error_file import Activity, cause_of, follows, is_lost_connection
from ..net.watch import EXIT_UNDECIDED, FailureDetector, say_last_words
from ..net.wording import short
from ..net.worker_exit import NEWS_S, hook
from ..recovery.background import Background
from ..recovery.state_slices import gathered
from ..state.rank_state import RankState, front, read
from ..state.replicated import ReplicatedState
from . import agreement
from .agreement import ABORTED, FINE, Agreement, Decision, Verdict
from .window import Window

logger: logging.Logger = logging.getLogger("ecemb")


COMPARE_EVERY = 1000
_NAMED_EVERY = 1000  # steps between two checks that the arena's file still has its name

BESIDE = ("store", "delta", "exchange", "agree", "apply")
"""Phases that run in the commit thread with `overlap`; training's time of waiting for them is in "wait"."""


class Transactions:
    """Runs this rank's side of the step protocol.

    Args:
        memory: This rank's arena, opened.
        transport: The control group.
        replicated: The model's replicated state.
        rank_state: The state that differs by rank.
        window: Steps of a transaction, or the object that chooses their number.
        overlap: Whether to exchange, prepare and apply while the next step's body runs.
        compare_every: Commits between two comparisons of replicated state among the ranks.
        activity: Updated at the begin and the end of each step.
        images: Images of the tables outside the arena; None if there are none.
        background: The rebuild beside training, until no rank lacks rows or parity; None if there is none.

    Attributes:
        rank: Rank of this process.
        window: Steps of a transaction.
        in_flight: The transaction whose step is open; None between steps.
        aborts: The first step of the open transaction that this rank aborts; None if there is none.
        is_position_read: Whether the script has asked for the number of a step.
        seconds: phase -> wall time so far, in seconds.
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
        activity: Activity | None = None,
        images: Images | None = None,
        background: Background | None = None,
    ) -> None:
        self._memory = memory
        self.rank: int = memory.rank
        self._transport = transport
        self._agreement = Agreement(transport, memory.geometry.placement, memory.inbox.receive)
        self._replicated = replicated
        self._rank_state = rank_state
        self.window: Window = window or Window(1)
        self._activity = activity or Activity()
        self.in_flight: int | None = None
        self.aborts: int | None = None
        self._alone: int | None = None  # the step that is a transaction of its own, as it was aborted before
        self.is_position_read: bool = False
        self._steps = 0  # steps of the open transaction that have ended
        self._background = background or Background()
        self._off_arena = OffArenaRows(images, self._background, self.phase)
        self._between = Between(speaks=transport.rank == 0)
        self._commits, self._compare_every = 0, compare_every
        self._thread = ThreadPoolExecutor(1, "ecemb-commit") if overlap else None
        self._pending: Future[None] | None = None
        self._throttle = CommitThrottle()
        self._handed = 0  # the transaction handed to the commit thread; valid while _pending is set
        self._captured_rows = 0
        self.seconds: dict[str, float] = {}

    @property
    def next_step(self) -> int:
        """The number of the step that begins next, which is the number of steps that have ended."""
        return (self._memory.committed if self._pending is None else self._handed) + self._steps

    @property
    def _size(self) -> int:
        """Number of steps of the open window, or of the next one."""
        first = self.next_step - self._steps
        if self._alone is None or self._alone < first:
            return self.window.size
        return min(self.window.size, max(1, self._alone - first))

    @property
    def captured_rows(self) -> int:
        """Number of rows saved in journals before they changed, each counted once in a transaction."""
        return self._captured_rows + self._off_arena.captured_rows

    @property
    def held_bytes(self) -> dict[str, int]:
        """Allocated bytes by purpose: the arena's regions, messages, and the fabric's buffers."""
        arena, fabric = self._memory.arena, self._transport.fabric
        held = {name: arena.reserved(name) for name, _ in arena.constants.regions}
        held["messages"] = self._memory.message_bytes
        return held if fabric is None else {**held, "fabric": fabric.held_bytes}

    def begin(self) -> int:
        """Begins a step: arms the journal for the next transaction, or extends the open window by this step.

        Returns:
            The transaction's number: the number of steps that have ended when this step has.

        Raises:
            UsageError: A step is in flight.
        """
        if self.in_flight is not None:
            raise UsageError(f"step {self.in_flight - 1} is open: commit or undo it first")
        self.window.begin()
        self.in_flight = transaction = self.next_step + 1
        self._activity.place = f"in the body of step {transaction - 1}"
        if self._steps > 0:
            self._memory.journal.extend(transaction)
        else:
            self._memory.arm(transaction, self._size)
            with self.phase("compare"):
                moved = {**self._replicated.moved(), **self._rank_state.moved()}
                self._between.check(transaction - 1, moved)
        if transaction % _NAMED_EVERY == 0 and not self._memory.arena.is_named():
            logger.warning("%s", lost_name(self._memory.arena.path))
        return transaction

    def capture(self, table: int, ids: NDArray[np.int64]) -> None:
        """Saves rows before they change.

        Args:
            table: index of the table in the row space.
            ids: rows of the table, int64 [m], in any order, repeats allowed.
        """
        self._background.assert_there(table, ids)
        with self.phase("capture"):
            self._captured_rows += self._memory.journal.capture(table, ids)

    def abort(self, *, goes_back: bool = False) -> None:
        """Votes against the step in flight: the end of its transaction then undoes that on all ranks.

        A transaction of one step commits empty. After one of several, `next_step` is its first step again.

        Args:
            goes_back: Whether the script runs the steps again.

        Raises:
            UsageError: No step is open, or steps are committed together and the script doesn't go back.
        """
        step, window = self._open() - 1, self.window.asked[0]
        if window != 1 and not goes_back:
            raise UsageError(
                f"step {step} can't be aborted in this loop with window={window!r}: an abort undoes all "
                f"steps since the last commit, and the good ones before this one have to run again. Loop "
                f"over guard.steps(), or call ecemb.protect(..., window=1)"
            )
        if self.aborts is None:
            self.aborts = step

    def cancel(self) -> None:
        """Ends the step in flight as if it had not begun: it has captured no row. This rank alone."""
        transaction = self._open()
        if self._steps > 0:
            self._memory.journal.retract(transaction - 1)
        else:
            self._memory.journal.undo()  # of no row: the journal is void
        self.in_flight = None
        self._activity.place = f"before step {transaction - 1}"

    def commit(self) -> list[int]:
        """Ends the step in flight; if its window is full, commits the transaction on all ranks, or on none.

        All ranks. A step that doesn't fill its window ends without messages. With `overlap` the call returns
        after the status; the commit thread does the rest. The call that ends the next transaction, or
        `drain`, waits for the thread, and raises its errors.

        Returns:
            The ranks that aborted a step, usually none. If there are any, the transaction is undone on all
            ranks.

        Raises:
            StepFailed: Another rank's step failed, or the ranks are not in the same step.
            PeerFailure: A peer died before this rank prepared.
            NotEnoughSpace: A journal can't grow.
            After each of these the caller undoes the transaction on this rank.
        """
        transaction, began = self._open(), time.perf_counter()
        self._activity.place = f"at the end of step {transaction - 1}"
        whole = self._steps + 1 >= self._size
        if whole or self._pending is None or self._pending.done():
            self.settle()
        aborted: list[int] = []
        if whole:
            aborted = self._end_window(transaction, began)
        else:
            self._steps += 1
        self.in_flight = None
        self._activity.place = f"before step {self.next_step}"
        return aborted

    def drain(self) -> list[int]:
        """Commits the steps of an open window and waits for a pending commit. All ranks, between steps.

        Returns:
            The result of `commit`.

        Raises:
            The errors of `commit`.
        """
        aborted: list[int] = []
        if self._steps or self._pending is not None:
            self.in_flight, began = self.next_step, time.perf_counter()
            self.settle()
            if self._steps:
                aborted = self._end_window(self.in_flight, began)
                self.settle()
            self.in_flight = None
        return aborted

    @property
    def is_between(self) -> bool:
        """Whether no step and no window is open: all ended steps are decided or in the commit thread."""
        return self.in_flight is None and self._steps == 0

    def close(self) -> None:
        """Ends the commit thread, if there is one; the last call."""
        self._throttle.hurry()
        if self._thread is not None:
            self._thread.shutdown()

    def settle(self) -> None:
        """Waits until the transaction in the commit thread is decided, if there is one. This rank alone.

        Raises:
            The errors of `commit`: that transaction is then not prepared.
        """
        if self._pending is not None:
            self._throttle.hurry()
            with self.phase("wait"), self._activity.waiting():
                self._pending.result()
            self._pending = None

    def _end_window(self, transaction: int, began: float) -> list[int]:
        """Ends a transaction: agrees on its status, then decides it here or in the commit thread. All ranks.

        Returns:
            The ranks that aborted a step; if there are any, the transaction is undone. It commits without
            changed rows if it is this step alone.
        """
        self._off_arena.take(self._memory.journal)
        if self.aborts is None:
            self._write(transaction)
        verdict = self._conclude(transaction)
        goes_back = bool(verdict.aborted) and transaction - self._memory.committed > 1
        if verdict.aborted:
            self._undo_all(verdict.decision, goes_back=goes_back)
            if not goes_back:
                self._write(transaction)
        self._steps = 0
        self.window.agree(verdict.window)
        if not verdict.is_lacking:
            self._background.end()
        if goes_back:
            self._alone = verdict.aborts - 1
            return verdict.aborted
        changed = self._off_arena.hand_over(self._memory.journal)
        if self._thread is None or not self._background.is_over:
            self._decide(transaction, verdict.decision, changed)
            self.window.end(time.perf_counter() - began)
        else:
            spent_s = time.perf_counter() - began
            self._handed = transaction
            self._pending = pending = Future[None]()  # set before the thread can begin: a signal may come
            self._throttle.begin()
            hand_over(
                self._thread, pending, self._decide_beside, transaction, verdict.decision, changed, spent_s
            )
        return verdict.aborted

    def _write(self, transaction: int) -> None:
        """Writes rank state and replicated state at the end of the transaction into the arena."""
        with self.phase("state"):
            self._memory.write_rank_state(front(self._memory.rank_state, self._rank_state.pack()))
            self._replicated.save(self._memory.slots, transaction)

    def _conclude(self, transaction: int) -> Verdict:
        """Agrees with all ranks on how the transaction ended."""
        flag, digest = FINE if self.aborts is None else ABORTED, 0
        if flag == FINE and self._commits % self._compare_every == 0:
            digest = self._replicated.digest()
        with self.phase("status"):
            return self._agreement.conclude(
                transaction,
                flag,
                window=self.window.wish(self._off_arena.owed_bytes),
                digest=digest,
                committed=self._memory.committed,
                differs=lambda: agreement.compare_replicas(self._replicated.whole(), self._transport),
                aborts=None if self.aborts is None else self.aborts + 1,
                is_lacking=self._background.is_lacking,
            )

    def _decide_beside(self, transaction: int, decision: Decision, changed: Changed, spent_s: float) -> None:
        """Runs `_decide` in the commit thread.

        Args:
            transaction: The transaction.
            decision: The verdict's decision.
            changed: The rows that it changed.
            spent_s: Seconds that the main thread took to end the transaction.
        """
        self._throttle.start()
        try:
            worked_s = self._decide(transaction, decision, changed, self._throttle.rest)
            self.window.end(spent_s + worked_s)
        except BaseException as error:
            if self._is_undecided:
                end_process(transaction, error)
            raise

    def _decide(
        self, transaction: int, decision: Decision, changed: Changed, rest: Callable[[], None] = lambda: None
    ) -> float:
        """Lays out and exchanges deltas, prepares, votes, applies and commits. All ranks.

        Args:
            transaction: The transaction.
            decision: The verdict's decision.
            changed: The rows that it changed.
            rest: Called after each part of the work.

        Returns:
            Processor time of all this, in seconds: what it takes from training where processors are busy.
        """
        began = time.thread_time()
        try:
            self._off_arena.store(changed)
            with self.phase("delta"):
                messages = self._memory.lay_out(self._memory.outbox(changed.journal), rest)
            with self.phase("exchange"):
                what = f"the exchange of step {transaction - 1}"
                self._agreement.exchange(decision, messages, what)
            self._background.pause()
            self._memory.prepare(transaction)
        except BaseException:
            self._agreement.withdraw(decision)
            raise
        with self.phase("agree"):
            self._agreement.vote(decision, f"the agreement on step {transaction - 1}")
        with self.phase("apply"):
            self._memory.apply(transaction, rest)
        self._memory.commit(transaction)
        self._background.resume()
        self._commits += 1
        return time.thread_time() - began

    def undo(self, error: BaseException) -> None:
        """Undoes the transaction in flight on this rank, and announces the failure to the other ranks.

        Rows and rank state are as when the transaction began, at the first step of its window. Replicated
        state is undefined in this process. The other ranks receive the failure when they end the transaction.
        The job needs a restart, as this rank may have left collectives.

        A prepared transaction is not undone: the process ends (docs/protocol.md, 1.1). `undo` first waits for
        the commit thread: its transaction commits, or is undone with this one.

        Args:
            error: The cause.
        """
        transaction = self._open()
        level = logging.ERROR if cause_of(error) is None else logging.INFO  # that rank logs the cause itself
        text = short(f"{type(error).__name__}: {error}", 110)
        logger.log(
            level,
            "rank %d: step %d failed (%s); undoing it; dense state stays undefined in this process, not in "
            "the arenas",
            *(self.rank, transaction - 1, text),
        )
        pending, self._pending = self._pending, None
        self._throttle.hurry()
        if pending is not None and not pending.cancel():
            to_the_end(lambda: wait([pending]))  # the commit thread owes other ranks rounds of the vote
        if self._is_undecided:
            self.in_flight = None  # where the process stays, no write may be saved in the journal any more
            end_process(transaction, error)
        if isinstance(error, (NotEnoughSpace, MemoryError)):
            self.window.run_out()
        try:
            try:
                self._agreement.leave(transaction)
            finally:
                self._memory.undo(self._memory.committed)
                self._rank_state.unpack(read(self._memory.rank_state))
        finally:
            self.in_flight, self._steps = None, 0
            self.aborts = None
            self._background.resume()

    def _undo_all(self, decision: Decision, *, goes_back: bool) -> None:
        """Restores the state of the last commit after an abort. All ranks.

        Args:
            decision: The verdict's decision.
            goes_back: Whether the steps run again. Otherwise positions in the data stay, and the transaction
                goes on.
        """
        with self._agreement.gathering(decision, is_void=goes_back):
            dense = gathered(self._memory, self._transport)
        self._off_arena.drop()
        if goes_back:
            self._memory.undo(self._memory.committed)
        else:
            self._memory.journal.empty()
        self._replicated.load(dense, self._memory.committed)
        self._rank_state.unpack(read(self._memory.rank_state), positions=goes_back)
        self.aborts = None

    @property
    def _is_undecided(self) -> bool:
        """Whether a transaction is prepared and not committed: only recovery may decide it."""
        return self._memory.prepared > self._memory.committed

    def _open(self) -> int:
        if self.in_flight is None:
            raise UsageError("no step is open: use `with guard.step():`")
        return self.in_flight

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A `with` block whose duration is added to `seconds`, and which profilers show."""
        return Phase(name, self.seconds)


class Step(ContextDecorator):
    """One step of training, as `guard.step()` and `guard.steps()` give it: `with step:`, once.

    Attributes:
        aborted: Whether any rank aborted the step, so that it was undone on all ranks, and has ended; the
            same on all of them. False for a step that runs again.
    """

    def __init__(
        self,
        run: Callable[[Step], AbstractContextManager[None]],
        transactions: Transactions,
        *,
        goes_back: bool = False,
    ) -> None:
        self._run, self._transactions, self._goes_back = run, transactions, goes_back
        self._number = transactions.next_step
        self._body: AbstractContextManager[None] | None = None
        self.aborted = False

    @property
    def number(self) -> int:
        """The step's number from 0, the same on all ranks; use it to choose the batch."""
        self._transactions.is_position_read = True
        return self._number

    @property
    def has_begun(self) -> bool:
        """Whether its block was entered."""
        return self._body is not None

    def __enter__(self) -> Step:
        """Begins the step: see `Guard.step`."""
        if self._body is not None:
            raise UsageError(f"step {self._number} was run: call guard.step() again for the next one")
        self._number = self._transactions.next_step
        body = self._run(self)
        body.__enter__()
        self._body = body
        return self

    def __exit__(self, *error: Any) -> bool | None:
        """Ends the step: see `Guard.step`."""
        return None if self._body is None else self._body.__exit__(*error)

    def _recreate_cm(self) -> Step:
        """As a decorator: a step for each call."""
        return Step(self._run, self._transactions)

    def abort(self, reason: str = "") -> None:
        """Votes against this step, e.g. for a loss that is NaN; one rank's vote is enough. This rank.

        When the body ends, all ranks undo the step: rows, dense parameters, optimizer state, generators and
        `state=` objects are as after the last commit, so changes in front of the step are undone as well.
        Positions of `guard.batches` and the step's number still advance. The body runs to its end after this
        call, because other ranks may wait in its collectives.

        With a window of several steps, all of them are undone when it ends, with positions in the data, and
        `guard.steps()` gives them again. This step is then a transaction of its own: if it is aborted again,
        it is undone alone, as above.

        Args:
            reason: Text for the log.

        Raises:
            UsageError: the step has ended; or `window=` of `ecemb.protect` is not 1, and the loop is not over
                `guard.steps()`, which can go back.
        """
        if self._transactions.in_flight != self._number + 1:
            raise UsageError(f"step {self._number} has ended: call step.abort() inside `with guard.step():`")
        is_known = self._transactions.aborts == self._number  # not for each micro-batch
        level = logging.DEBUG if is_known else logging.WARNING
        self._transactions.abort(goes_back=self._goes_back)
        why = f": {short(reason)}" if reason else ""
        logger.log(level, "rank %d aborts step %d%s", self._transactions.rank, self._number, why)


class Sigterm:
    """Ends this process after a SIGTERM, as soon as all its transactions are decided.

    If the script has its own handler of SIGTERM, it stays, and this object does nothing.

    Args:
        transactions: the transactions of this process.
        watch: announces the end to the other ranks; None if there are none.
    """

    def __init__(self, transactions: Transactions, watch: FailureDetector | None) -> None:
        self._transactions, self._watch = transactions, watch
        self._pid = os.getpid()
        self._came = self._listens = False

    def listen(self) -> None:
        """Installs the handler, if SIGTERM has its default action and this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._take)
            self._listens = True

    def stop(self) -> None:
        """Restores SIGTERM's default action: it ends the process at once."""
        if self._listens and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._listens = False

    def obey(self) -> None:
        """Ends the process if SIGTERM has come and no step or window is open. Called after each step.

        Raises:
            The errors of `Transactions.settle`.
        """
        if not (self._came and self._transactions.is_between):
            return
        self._transactions.settle()
        logger.warning(
            "rank %d was asked to end (SIGTERM), and ends between two steps: step %d is next",
            self._transactions.rank,
            self._transactions.next_step,
        )
        if self._watch is not None:
            self._watch.announce_failure("SIGTERM, between two steps")
        _end_by_signal()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if os.getpid() != self._pid:
            _end_by_signal()
        self.obey()


def _end_by_signal() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


class Changed(NamedTuple):
    """The rows that a transaction has changed.

    Attributes:
        journal: the transaction's row journal.
        staged: changed rows that are not in the arena yet; None if all are.
    """

    journal: RowJournal
    staged: StagedRows | None


class OffArenaRows:
    """Copies changed rows of tables outside the arena into it.

    Args:
        images: images of these tables; None if there are none: all methods then do nothing.
        background: the rebuild beside training.
        phase: adds a block's duration to a phase of the step.

    Attributes:
        captured_rows: number of rows saved in journals, each counted once in a transaction.
    """

    def __init__(
        self,
        images: Images | None,
        background: Background,
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.images = images
        self._background, self._phase = background, phase
        self._staged: StagedRows | None = None
        self.captured_rows: int = 0

    @property
    def owed_bytes(self) -> int:
        """Bytes that the staged rows will take in the journal."""
        return self._staged.size_bytes if self._staged is not None else 0

    def take(self, journal: RowJournal) -> None:
        """Stages changed rows on their device, after the transaction before is decided.

        If the device has no memory for all of them, stores them into the arena at once.

        Args:
            journal: the row journal of the transaction that changed them.
        """
        if self.images is None:
            return
        with self._phase("image"):
            self._staged = staged = self.images.take()
        if not staged.is_held:
            self.store(self.hand_over(journal))

    def hand_over(self, journal: RowJournal) -> Changed:
        """Returns the staged rows with their journal, for the thread that commits, and forgets them here."""
        changed, self._staged = Changed(journal, self._staged), None
        return changed

    def drop(self) -> None:
        """Drops the staged rows of a transaction that is undone."""
        self._staged = None

    def store(self, changed: Changed) -> None:
        """Copies staged rows into the arena, after saving the old ones in the journal. Any thread.

        Raises:
            NotEnoughSpace: the journal can't grow. Some rows may be in the arena; an undo takes them back.
        """
        if changed.staged is None:
            return

        def capture(table: int, ids: Ids) -> None:
            self._background.assert_there(table, ids)
            self.captured_rows += changed.journal.capture(table, ids)

        with self._phase("store"):
            changed.staged.store(capture)


class Between:
    """Compares the state at each transaction's first step with the state at the last commit.

    Args:
        speaks: Whether to log at WARNING; otherwise at DEBUG.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        self._level = logging.WARNING if speaks else logging.DEBUG
        self._at_first: Mapping[str, str] | None = None  # the first check's changes, until the second check
        self._known: set[str] = set()  # things that are reported, or change in front of each step

    def check(self, step: int, moved: Mapping[str, str]) -> None:
        """Checks the state when the first step of a transaction begins.

        Args:
            step: The step's number.
            moved: thing that changed since the last commit, or since `protect` -> how it changed.
        """
        if self._at_first is None:
            self._at_first = dict(moved)
            return
        self._known |= self._at_first.keys() & moved.keys()
        for thing in self._at_first.keys() - moved.keys():
            self._tell(thing, self._at_first[thing], "between ecemb.protect() and the first step")
        self._at_first = {}
        for thing in moved.keys() - self._known:
            self._tell(thing, moved[thing], f"between steps {step - 1} and {step}")

    def _tell(self, thing: str, how: str, when: str) -> None:
        self._known.add(thing)
        logger.log(
            self._level,
            "%s changed %s (%s): after a failure or an abort the job continues from the last committed step, "
            "this change is not made again, and training ends with other bits. Move it into "
            "`with guard.step():`, or in front of ecemb.protect(). This is said once",
            thing,
            when,
            how,
        )


SHARE = 0.04
"""Share of one processor that a commit takes while it rests between its parts. A smaller share would keep a
transaction undecided for longer, and more of its rows would change before their deltas are laid out."""
AT_ONCE_S = 0.005
"""Processor time of a commit before its first rest, in seconds: a window of few rows commits without rest."""

_work: Callable[[], float] = time.thread_time


class CommitThrottle:
    """Shares the processor between training and the thread that commits.

    A host of GPUs has idle processors while its devices work: there the thread does not rest, and a window is
    decided long before the next one ends.
    """

    def __init__(self) -> None:
        self._waiting, self._idle = threading.Event(), IdleProcessors()
        self._spent_s = self._last_s = 0.0

    def begin(self) -> None:
        """Allows rests in the next commit. Called by the training thread, when no commit is pending."""
        self._waiting.clear()

    def start(self) -> None:
        """Starts the clock of a commit. Called by the commit thread."""
        self._spent_s, self._last_s = 0.0, _work()

    def rest(self) -> None:
        """Rests in proportion to the work since the last rest. Called by the commit thread after a part.

        Does nothing beside idle processors.
        """
        now_s = _work()
        part_s = now_s - self._last_s
        self._spent_s += part_s
        if self._spent_s > AT_ONCE_S and not self._idle.are_idle():
            self._waiting.wait(part_s * (1 / SHARE - 1))
        self._last_s = _work()

    def hurry(self) -> None:
        """Ends the current rest and allows no more until `begin`: training waits for the commit."""
        self._waiting.set()


class Phase:
    """A `with` block whose wall time is added to a sum; a running profiler shows it as `ecemb.<name>`.

    Args:
        name: the phase's name.
        seconds: phase -> its sum so far, in seconds.
    """

    __slots__ = ("_began", "_name", "_seconds", "_shown")

    def __init__(self, name: str, seconds: dict[str, float]) -> None:
        self._name, self._seconds, self._began = name, seconds, 0.0
        self._shown: record_function | None = None

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        if profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
            self._shown = shown = record_function(f"ecemb.{self._name}")
            shown.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._shown is not None:
            self._shown.__exit__(*error)
        spent_s = time.perf_counter() - self._began
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + spent_s


def end_process(transaction: int, error: BaseException) -> NoReturn:
    """Ends the process, because only recovery may decide a prepared transaction.

    Args:
        transaction: The prepared transaction.
        error: The error that occurred after `prepared` was stored.

    Raises:
        PeerFailure: a worker died, and this process stays: its arena is as it is, and it begins again.
    """
    if hook.watch is not None and (cause_of(error) is not None or is_lost_connection(error)):
        hook.watch.news(NEWS_S)  # whether a worker died, and this process is replaced
    if hook.watch is not None and hook.watch.stays:
        text = (
            f"step {transaction - 1} is prepared but undecided on this rank: recovery decides from the arenas"
        )
        raise follows(PeerFailure(text)) from error
    logger.critical(
        "step %d is prepared but undecided on this rank (%s: %s); ending the process, so that "
        "recovery decides from the arenas",
        transaction - 1,
        type(error).__name__,
        short(error),
    )
    stack = "".join(traceback.format_exception(error))
    error_file.write(f"{type(error).__name__}: {error}", stack, later=cause_of(error) is not None)
    say_last_words()
    os._exit(EXIT_UNDECIDED)
