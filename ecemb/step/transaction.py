"""A step as a transaction: begin, capture, exchange, prepare, agree, apply, commit; or undo.

The order is that of docs/protocol.md, 1.1 and 1.6, which is normative. A rank may conclude:

- before `prepared` is stored, a failure undoes the transaction locally and ends the guard;
- after `prepared`, nothing is undone locally: the process ends, and recovery decides from the survivors;
- a rank that returns from the agreement knows that every rank has prepared;
- a rank that aborts says so in its status. The verdict has something of the status of all ranks, so every
  rank knows of the abort. All gather dense state of the last commit, undo, and commit the transaction empty.
  A rank prepares after its own undo.
- a rank that fails tells all that may wait for it, once: in the place of its status; or, after the verdict,
  in the place of its deltas and of its vote.

With `overlap`, a separate thread does the work that follows the status, beside the body of the next step.
The next step's rows go to the other row journal. Rows of tables that are apart from the arena come there in
that thread also. The end of the next transaction first waits for the thread, so at most two transactions are
undecided, and a slot is written only when the transaction before is decided on all ranks. The rest is the
same as without `overlap`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from .._wording import short
from ..adapters.host_mirror import Images
from ..arena.private_files import lost_name
from ..errors import NotEnoughSpace, UsageError
from ..group.collectives import Transport
from ..group.error_file import Whereabouts, cause_of
from ..kernels.threads import hand_over, to_the_end
from ..local.rank_memory import RankMemory
from ..recovery.background import Background
from ..recovery.state_slices import gathered
from ..state.rank_state import RankState, front, read
from ..state.replicated import ReplicatedState
from . import replica_check, undecided
from .agreement import ABORTED, FINE, Agreement, Turn, Verdict
from .apart import Apart, Changed
from .between_steps import Between
from .pace import Pace
from .phase import Phase
from .window import Window

logger: logging.Logger = logging.getLogger("ecemb")

COMPARE_EVERY = 1000
_NAMED_EVERY = 1000  # steps between two checks that the arena still has its name

BESIDE = ("store", "delta", "exchange", "agree", "apply")
"""Phases of a decision, which training does not wait for with `overlap`; it waits for them in "wait"."""


class Transactions:
    """Runs this rank's side of the step protocol.

    Args:
        memory: This rank's arena, opened.
        transport: The control group.
        replicated: The model's replicated state.
        rank_state: The state that differs by rank.
        window: Steps of a transaction, or the object that chooses their number.
        overlap: Whether to exchange, prepare and apply beside the next step's body.
        compare_every: Commits between two comparisons of replicated state among the ranks.
        whereabouts: Updated at the begin and the end of each step.
        images: Of tables that are apart from the arena; None if there are none.
        background: The rebuild beside training, until no rank lacks anything.
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
        images: Images | None = None,
        background: Background | None = None,
    ) -> None:
        self._memory = memory
        self._transport = transport
        self._agreement = Agreement(transport, memory.geometry.placement, memory.inbox)
        self._replicated = replicated
        self._rank_state = rank_state
        self._window = window or Window(1)
        self._whereabouts = whereabouts or Whereabouts()
        self.in_flight: int | None = None
        self.aborting: bool = False
        self._steps = 0  # steps of the transaction that have ended
        self._background = background or Background()
        self._apart = Apart(images, self._background, self.phase)
        self._between = Between(speaks=transport.rank == 0)
        self._commits, self._compare_every = 0, compare_every
        self._thread = ThreadPoolExecutor(1, "ecemb-commit") if overlap else None
        self._pending: Future[None] | None = None
        self._pace = Pace()
        self._handed = 0  # the transaction that is pending, if one is
        self._captured_rows = 0
        self.seconds: dict[str, float] = {}

    @property
    def next_step(self) -> int:
        """The number of the step that begins next, which is the number of steps that have ended."""
        return (self._memory.committed if self._pending is None else self._handed) + self._steps

    @property
    def captured_rows(self) -> int:
        """Rows saved before they changed, each once in a transaction."""
        return self._captured_rows + self._apart.captured_rows

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._memory.rank

    @property
    def window(self) -> Window:
        """The number of steps in a transaction."""
        return self._window

    @property
    def held_bytes(self) -> dict[str, int]:
        """Memory in the arena and beside it, by purpose."""
        arena, fabric = self._memory.arena, self._transport.fabric
        held = {name: arena.reserved(name) for name, _ in arena.constants.regions}
        held["messages"] = self._memory.message_bytes
        return held if fabric is None else {**held, "fabric": fabric.held_bytes}

    def begin(self) -> int:
        """Begins a step: arms the journal for the next transaction, or extends the one whose window is open.

        Returns:
            The transaction's number: the number of ended steps after this step.

        Raises:
            UsageError: A step is in flight.
        """
        if self.in_flight is not None:
            raise UsageError(f"step {self.in_flight - 1} is open: commit or undo it first")
        self._window.begin()
        self.in_flight = transaction = self.next_step + 1
        self._whereabouts.place = f"in the body of step {transaction - 1}"
        if self._steps > 0:
            self._memory.journal.extend(transaction)
        else:
            self._memory.arm(transaction, self._window.size)
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
            ids: int64 [m], in any order, repeats allowed.
        """
        self._background.assert_there(table, ids)
        with self.phase("capture"):
            self._captured_rows += self._memory.journal.capture(table, ids)

    def abort(self) -> None:
        """Votes against the step in flight: `commit` then undoes it on all ranks and commits it empty.

        Raises:
            UsageError: No step is open, or steps are committed together.
        """
        transaction, window = self._open(), self._window.asked[0]
        if window != 1:
            raise UsageError(
                f"step {transaction - 1} can't be aborted with window={window!r}: an abort undoes all steps "
                f"since the last commit, also the good ones before this. Call ecemb.protect(..., window=1)"
            )
        self.aborting = True

    def commit(self) -> list[int]:
        """Ends the step in flight; if its window is full, commits the transaction on all ranks, or on none.

        All ranks. A step inside a window ends on each rank alone. With `overlap` the call returns after the
        exchange of status. The call that ends the next transaction, or `drain`, waits for the rest, and
        raises its errors.

        Returns:
            The ranks that aborted the step, usually none. If there are any, the step is undone on all ranks.

        Raises:
            StepFailed: Another rank's step failed, or the ranks are not in the same step. Undone here.
            PeerFailure: A peer died before this rank prepared. Undone here.
            NotEnoughSpace: A journal can't grow. Undone here.
        """
        transaction, began = self._open(), time.perf_counter()
        self._whereabouts.place = f"at the end of step {transaction - 1}"
        whole = self._steps + 1 >= self._window.size
        if whole or self._pending is None or self._pending.done():
            self.settle()
        aborted: list[int] = []
        if whole:
            aborted = self._end_window(transaction, began)
        else:
            self._steps += 1
        self.in_flight = None
        self._whereabouts.place = f"before step {transaction}"
        return aborted

    def drain(self) -> None:
        """Commits the steps of an open window and waits for a pending commit. All ranks, between steps.

        Raises:
            The errors of `commit`.
        """
        if self._steps or self._pending is not None:
            self.in_flight, began = self.next_step, time.perf_counter()
            self.settle()
            if self._steps:
                self._end_window(self.in_flight, began)
                self.settle()
            self.in_flight = None

    @property
    def is_between(self) -> bool:
        """Whether no step is open, and no window: all that has ended is decided, or will be by the thread."""
        return self.in_flight is None and self._steps == 0

    def close(self) -> None:
        """Ends the thread, if there is one; the last call."""
        if self._thread is not None:
            self._thread.shutdown()

    def settle(self) -> None:
        """Waits until the transaction before is decided, if one is pending. One rank.

        Raises:
            The errors of `commit`: the transaction before is then not prepared.
        """
        if self._pending is not None:
            self._pace.hurry()
            with self.phase("wait"), self._whereabouts.waiting():
                self._pending.result()
            self._pending = None

    def _end_window(self, transaction: int, began: float) -> list[int]:
        """Ends a transaction: its status now; the rest now, or in the thread. All ranks.

        Returns:
            The ranks that aborted it: it is then undone, and empty.
        """
        self._apart.take(self._memory.journal)
        if not self.aborting:
            self._write(transaction)
        verdict = self._conclude(transaction)
        if verdict.aborted:
            self._undo_all(verdict.turn)
            self._write(transaction)
        self._steps = 0
        self._window.agree(verdict.window)
        if not verdict.is_lacking:
            self._background.end()
        changed = self._apart.hand_over(self._memory.journal)
        if self._thread is None or not self._background.is_over:
            self._decide(transaction, verdict.turn, changed)
            self._window.end(time.perf_counter() - began)
        else:
            spent_s = time.perf_counter() - began
            self._handed = transaction
            self._pending = pending = Future[None]()  # known before it can begin, whatever interrupts here
            self._pace.begin()
            hand_over(self._thread, pending, self._decide_beside, transaction, verdict.turn, changed, spent_s)
        return verdict.aborted

    def _write(self, transaction: int) -> None:
        """Writes rank state and replicated state of a transaction's end into the arena."""
        with self.phase("state"):
            self._memory.write_rank_state(front(self._memory.rank_state, self._rank_state.pack()))
            self._replicated.save(self._memory.slots, transaction)

    def _conclude(self, transaction: int) -> Verdict:
        """Agrees with all ranks on how the transaction ended."""
        flag, digest = ABORTED if self.aborting else FINE, 0
        if flag == FINE and self._commits % self._compare_every == 0:
            digest = self._replicated.digest()
        with self.phase("status"):
            return self._agreement.conclude(
                transaction,
                flag,
                window=self._window.wish(self._apart.owed_bytes),
                digest=digest,
                committed=self._memory.committed,
                differs=lambda: replica_check.compare(self._replicated.whole(), self._transport),
                is_lacking=self._background.is_lacking,
            )

    def _decide_beside(self, transaction: int, turn: Turn, changed: Changed, spent_s: float) -> None:
        """Runs `_decide` in the thread; `spent_s` is what the main thread has taken for the end."""
        self._pace.start()
        try:
            laid_out_s = self._decide(transaction, turn, changed, self._pace.rest)
            self._window.end(spent_s + laid_out_s)
        except BaseException as error:
            if self._is_undecided:
                undecided.end_process(transaction, error)
            raise

    def _decide(
        self, transaction: int, turn: Turn, changed: Changed, rest: Callable[[], None] = lambda: None
    ) -> float:
        """From the lay-out of deltas, whose processor time in s it returns, to `committed`. All ranks."""
        try:
            began = time.thread_time()
            self._apart.store(changed)
            with self.phase("delta"):
                messages = self._memory.lay_out(self._memory.outbox(changed.journal), rest)
            laid_out_s = time.thread_time() - began
            with self.phase("exchange"):
                what = f"the exchange of step {transaction - 1}"
                self._agreement.exchange(turn, messages, what)
            self._background.pause()
            self._memory.prepare(transaction)
        except BaseException:
            self._agreement.withdraw(turn)
            raise
        with self.phase("agree"):
            self._agreement.vote(turn, f"the agreement on step {transaction - 1}")
        with self.phase("apply"):
            self._memory.apply(transaction, rest)
        self._memory.commit(transaction)
        self._background.resume()
        self._commits += 1
        return laid_out_s

    def undo(self, error: BaseException) -> None:
        """Takes the transaction in flight back on this rank, and announces the failure to the others.

        Rows and rank state are as when the transaction began, at the first step of its window. Replicated
        state is undefined in this process. The other ranks notice at the transaction's end. The job needs a
        restart, as this rank may have left collectives.

        A prepared transaction is not undone: the process ends (docs/protocol.md, 1.1). A transaction before
        it that is still being decided comes first: it commits, or is undone like this one.

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
        self._pace.hurry()
        if pending is not None and not pending.cancel():
            to_the_end(lambda: wait([pending]))  # it owes rounds of the vote
        if self._is_undecided:
            undecided.end_process(transaction, error)
        if isinstance(error, (NotEnoughSpace, MemoryError)):
            self._window.run_out()
        try:
            try:
                self._agreement.leave(transaction)
            finally:
                self._memory.undo(self._memory.committed)
                self._rank_state.unpack(read(self._memory.rank_state))
        finally:
            self.in_flight, self._steps = None, 0
            self.aborting = False
            self._background.resume()

    def _undo_all(self, turn: Turn) -> None:
        """Takes an aborted transaction back to the last commit, except positions in the data. All ranks."""
        with self._agreement.gathering(turn):
            dense = gathered(self._memory, self._transport)
        self._apart.drop()
        self._memory.journal.empty()
        self._replicated.load(dense, self._memory.committed)
        self._rank_state.unpack(read(self._memory.rank_state), positions=False)
        self.aborting = False

    @property
    def _is_undecided(self) -> bool:
        """Whether the decision belongs to recovery."""
        return self._memory.prepared > self._memory.committed

    def _open(self) -> int:
        if self.in_flight is None:
            raise UsageError("no step is open: use `with guard.step():`")
        return self.in_flight

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Adds a block's duration to `seconds`, and shows the block to profilers."""
        return Phase(name, self.seconds)
