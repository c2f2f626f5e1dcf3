"""The Guard: `ecemb.protect` returns it, and a training script talks to nothing else.

Owns the line that rank 0 logs at the end of a process that has not closed its job: the job's memory stays. A
process that torchrun is about to start again doesn't log it, nor does a process that is killed.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn

from .checkpoint.folder_store import reader_of
from .checkpoint.interface import CheckpointReader, CheckpointWriter
from .checkpoint.transfer import Transfer
from .coding.code import Code
from .engines.contract import Hooks
from .engines.discover import listed, modules_of, optimizers_of
from .errors import (
    ArenaInsecure,
    ConfigurationError,
    EcembError,
    PeerFailure,
    StepFailed,
    UndeclaredWrite,
    UsageError,
)
from .memory import scan
from .memory.arena import Arena
from .memory.header import Word
from .memory.private_files import lost_name
from .net import replacement
from .net.error_file import cause_of, follows, is_last_attempt, own_failure, placed
from .net.rendezvous import has_agents_store
from .net.watch import before_hard_exit, forget, last_exception
from .net.wording import counted, short
from .recovery.execute import RecoveryReport
from .recovery.scrub import Scrubber, ScrubReport
from .recovery.verify import VERIFY_SHARE, Verifier
from .session import Session, current
from .start.opening import Opened, open_memory
from .start.request import FailureDomain, ParityBackend, RebuildMode, Request, codes_of
from .state.data import Batches, bind
from .state.rank_state import Stateful, kept_generators
from .step.transaction import COMPARE_EVERY, Sigterm, Step, Transactions
from .step.window import Window

logger: logging.Logger = logging.getLogger("ecemb")


class Guard:
    """Protects the tables of one training; made by `protect`, one per process."""

    def __init__(self) -> None:
        raise UsageError("ecemb.protect() makes the guard: keep what it returns")

    def _begin(self, session: Session, opened: Opened) -> None:
        request, training, transport = opened.start.request, opened.start.training, opened.start.transport
        self._session, self._activity = session, session.activity
        self._code = request.code
        self._memory = opened.memory
        self._transport = transport
        self._tables = training.tables
        self._rank_state = training.rank_state
        self._saver = opened.saver
        self._transactions = Transactions(
            opened.memory,
            transport,
            training.replicated,
            training.rank_state,
            request.window,
            overlap=request.overlap,
            compare_every=request.compare_every,
            activity=session.activity,
            images=training.tables.images or None,
            background=opened.background,
        )
        self._sigterm = Sigterm(self._transactions, session.watch)
        if request.elastic:
            self._sigterm.listen()
        self._scrubber = Scrubber(opened.memory, transport)
        self._verifier = Verifier(
            opened.memory, transport, self._scrubber, request.verify, self._transactions.next_step
        )
        self._failed: str | None = None
        self._cause: str | None = None  # the failure's cause, if another rank caused it
        self._remaining = Remaining(session, opened.memory.arena)
        self._closed = ""  # why it takes no more calls, if it is closed
        self._steps = self._aborted = 0
        self._committed_before = opened.memory.committed  # before this process's first step
        self._forgotten = opened.forgotten
        self._counts_steps = False  # whether `steps` was called
        self.recovery: RecoveryReport = opened.report
        self._optimizers = training.optimizers
        self._optimizers.watch(self._is_open)
        self._background = opened.background
        hooks = Hooks(self._transactions.capture, self._is_open, opened.memory.mark_undeclared)
        if opened.background.is_lacking:
            hooks.ensure, hooks.ensure_all = opened.background.ensure, opened.background.ensure_all
            opened.background.at_end = training.tables.all_are_there
        training.tables.watch(hooks)

    def __repr__(self) -> str:
        """Job, rank, next step, window, code, and a step that is open or failed, or the job's end."""
        job, transactions = self._session, self._transactions
        state = "in a step" if self._is_open() else "between steps"
        if self._background.is_lacking:
            state += ", rebuilding"
        if self._failed is not None:
            state = short(self._failed, 80)
        return (
            f"<Guard of job {job.job!r}, rank {job.rank} of {job.world_size}: next step "
            f"{transactions.next_step}, window {transactions.window.size}, {self._code}, "
            f"{self._closed.partition(';')[0] or state}>"
        )

    @property
    def next_step(self) -> int:
        """The number of the step to run next: 0 after a fresh start."""
        self._transactions.is_position_read = True
        return self._transactions.next_step

    @property
    def tables(self) -> list[str]:
        """Keys of this rank's protected tables, as `touch` takes them."""
        return [table.name for table in self._tables.tables]

    def step(self) -> Step:
        """One step as a transaction: commits on all ranks when the body ends, or on none. All ranks.

        With `window=s`, s steps are one transaction: it commits when the last one's body ends. With
        `overlap=True`, it commits beside the steps that follow.

        Everything that changes state belongs in the body. If it raises, its changes are undone on all ranks,
        with those of the window's earlier steps, except that dense state is undefined in the process; the job
        needs a restart. Also a decorator, for a function whose calls are steps. StopIteration, before any row
        changes, ends the step as if it had not begun: `next(data)` may end an epoch in the body.

        Returns:
            The step, with its number, whose block is its body: `with guard.step() as step:`.

        Raises:
            StepFailed: an earlier step failed, here or on another rank.
            UndeclaredWrite: a protected table changed without being declared.
            PeerFailure: a peer died; the step is undone here.
            UsageError: another step is open, or the guard is closed; or, from the step of an optimizer in the
                body: its gradients are from before the transaction.
            All of them come from the block, not from this call.
        """
        return Step(self._run, self._transactions)

    def steps(self, total: int) -> Iterator[Step]:
        """The steps from `next_step` until `total` steps have ended; the last ones are committed. All ranks.

            for step in guard.steps(total):
                with step:
                    ...

        After `step.abort()` in a window of several steps, it gives the steps of the window again, so that
        `window=` may be any. Choose the batch by `step.number`, or take it from `guard.batches`. A step whose
        data end, by StopIteration, is given again.

        Args:
            total: number of steps of the whole training, 0 or more.

        Raises:
            ConfigurationError: `total` is not such a number.
            UsageError: the loop's body didn't run the step.
            Those of `step`, for the steps that are committed at the end.
        """
        if type(total) is not int or total < 0:
            raise ConfigurationError(
                f"guard.steps() takes the number of steps of the training; it is {total!r}"
            )
        self._counts_steps = True
        return self._steps_until(total)

    def _steps_until(self, total: int) -> Iterator[Step]:
        while True:
            if self._transactions.next_step >= total:
                self._check_between_steps("steps")
                self._drain()
                if self._transactions.next_step >= total:  # no step of the last window was aborted
                    return
            step = Step(self._run, self._transactions, goes_back=True)
            yield step
            if not step.has_begun:
                self._check_usable()  # as the step has found it
                raise UsageError(
                    f"step {self._transactions.next_step} was not run: the body of a loop over guard.steps() "
                    f"runs each step that it gets, in `with step:`"
                )

    @contextmanager
    def _run(self, step: Step) -> Generator[None]:
        self._check_usable()
        if self._is_open():
            number = f"step {self._transactions.next_step} is still open; leave its with block first"
            raise UsageError(f"guard.step() inside guard.step(): {number}")
        if self._steps == 1 and self._forgotten is not None:
            knows = self._transactions.is_position_read or bool(self._rank_state.positions)
            self._forgotten.name(knows_position=knows, counts_steps=self._counts_steps)  # made since
        number = self._transactions.next_step
        try:
            if self._transactions.is_between:
                self._optimizers.gradients.begin(number)
            self._transactions.begin()
            self._tables.are_touched = False
            self._tables.check()
            try:
                yield
            except StopIteration:  # the script's data have ended
                self._tables.check()
                if not self._tables.are_touched and self._transactions.aborts != number:
                    self._transactions.cancel()
                raise
            self._tables.check()
            aborted = self._transactions.commit()
            self._steps = self._activity.steps = self._steps + 1
            if self._memory.committed > self._committed_before:
                replacement.made_progress()
            if aborted:
                step.aborted = self._undone(number, aborted)
            self._verify()
            self._sigterm.obey()
        except BaseException as error:
            self._fail(number, error)
            raise

    @placed
    def wait_rebuilt(self) -> None:
        """Waits until this rank has all rows and parity; at once, unless they are rebuilt in the background.

        Between steps. `save`, `scrub`, `close`, `leave` and `state_dict()` of the model, which read whole
        tables, wait by themselves. Call it before other reads of whole tables, such as of `table.weight`.

        Raises:
            UsageError: a step is open, or the guard is closed.
            StepFailed: a step failed.
            PeerFailure: a rank that holds the rows died.
        """
        self._check_between_steps("wait_rebuilt")
        self._background.ensure_all()

    def touch(self, table: str, rows: torch.Tensor | None = None) -> None:
        """Declares, inside a step, that rows of a table are about to be written by hand.

        All rows at once take as much memory as the table, and 8 bytes a row, in the arena's journal, once in
        a transaction. The journal grows by a quarter at most beyond that, and stays as large. Rows
        are copied in chunks of at most 16 MiB. The commit needs as much again for their deltas, and r/k of it
        on the ranks that keep their parity.

        Args:
            table: the table's key, one of `tables`.
            rows: integer tensor of any shape, row numbers of this rank's shard; None for all its rows.

        Raises:
            UsageError: no such table or row, no row numbers, or no step is open.
            NotEnoughSpace: the journal can't grow; don't write.
        """
        self._tables.touch(table, rows)

    def batches(
        self,
        loader: Any,
        *,
        limit: int | None = None,
        replay: bool = False,
        order_may_change: bool = False,
    ) -> Batches:
        """Batches of a loader, epoch after epoch, whose position is committed with each step.

        Call `next(batches)` inside the step any number of times; the iterator never ends. After a restart it
        continues with the batch after the last committed one, even if workers had read ahead: no sample is
        lost or repeated, and the order is that of a run without a failure. Call `batches` after `protect`,
        outside of a step, once for each loader, in the same order at each start.

        `batches.epoch` is the epoch of the last batch; each epoch begins with a call of set_epoch() of the
        sampler (and of dataset and loader). A restart costs, by kind of loader:

        - DataLoader or StatefulDataLoader over a map-style dataset, any number of workers: drawing the
          indices of the epoch's earlier batches from the sampler again; no sample is read. Its order must
          follow from set_epoch() and from random generators as they are when the epoch begins: torch's,
          numpy's and python's global ones, and those that are attributes of loader, samplers and dataset.
          The indices of the last batch are compared: if they differ, `next` raises LayoutMismatch.
        - others with state_dict() and load_state_dict(), such as a StatefulDataLoader: load_state_dict().
        - a list, or another iterable: iterating again over the epoch's earlier batches, which reads them.

        The dataset's random draws come back exactly in this process (no workers). Workers start with their
        former seeds at the stream's beginning: augmentations are not reproduced after a restart.

        A pipeline that draws ahead of the training, such as TorchRec's, would lose the batches in it: give it
        an iterator that begins with batch `guard.next_step` instead.

        Args:
            loader: the loader.
            limit: most batches of an epoch; None for all of the loader's.
            replay: read the epoch's earlier samples again at a restart, for a dataset whose samples follow
                from more than their index, and which begins again in each epoch.
            order_may_change: go on, with a warning, if a restart finds another order of the samples; some
                samples of that epoch are then repeated, and others skipped.

        Returns:
            An iterator.

        Raises:
            ConfigurationError: the loader has no position that could be found again.
            LayoutMismatch: at this place another loader was given when the job was started.
            UsageError: a step is open, the loader was given before, or the guard is closed.
            StepFailed: a step failed.
        """
        self._check_between_steps("batches", "call it once, before the training loop")
        return bind(
            loader,
            self._rank_state,
            self._is_open,
            limit=limit,
            replay=replay,
            order_may_change=order_may_change,
        )

    @contextmanager
    def evaluation(self) -> Generator[None]:
        """A block between steps that may draw random numbers, as iterating over a DataLoader does. This rank.

        When it ends, the global generators of torch, numpy and python, and those of CUDA devices, are as
        before: training draws the same numbers, however often the block runs. In front of a step, with a
        condition on the step's number, it runs again after a failure that interrupted it:

            for step in guard.steps(total):
                if step.number % 1000 == 0:
                    with guard.evaluation():
                        evaluate(model)
                with step:
                    ...

        Raises:
            UsageError: a step is open, or the guard is closed.
            StepFailed: a step failed.
        """
        self._check_between_steps("evaluation", "evaluate in front of the step, or behind it")
        with kept_generators():
            yield

    @placed
    def scrub(self, fraction: float = 1.0) -> ScrubReport:
        """Compares parity with all rows, or with the next part of them, and repairs rotten memory. All ranks.

        Between steps. Compares every bit of the rows, of rank state and of parity; a cursor goes around, so
        that 1 / fraction calls compare everything. With r >= 2, if one block is wrong in a word, it is found
        and the word is repaired; otherwise nothing is written, and the report names the suspects:

        - r = 1 finds that a word is wrong, and not in which block: all blocks of the stripe are suspects.
        - r = 2 repairs one wrong block in each word. Two wrong blocks in the same byte of a stripe may look
          like one error in a third block: (n - 2) / 255 of such pairs would be "repaired" in the wrong
          place. r >= 3 excludes that.

        Writes past torch, such as `weight.data[i] = x` or through numpy, look like rot: with r >= 2 they are
        taken back, and reported. Detected undeclared writes raise here as in a step. Scrub often: a repair
        flips wrong bits back. If a step has changed the row since the fault, that is right for a flipped bit;
        a row that was overwritten undeclared, then trained, gets neither the written nor the trained values.

        Args:
            fraction: part of all words to compare in this call, above 0 and at most 1.

        Returns:
            The report, the same on all ranks.

        Raises:
            UsageError: a step is open, the guard is closed, the ranks call it differently, or this is a
                job of one rank, which has no parity.
            ConfigurationError: the fraction is out of range.
            StepFailed: a step failed; the guard takes no more.
            UndeclaredWrite: a protected table was written without being declared.
            PeerFailure: a peer died or failed; what was repaired until then stays so.
        """
        self._check_between_steps("scrub")
        self._drain()
        self._background.ensure_all()
        report = self._scrubber.scrub(fraction, self._tables.check, self._tables.verify)
        if report.repaired_words:
            self._saver.mark_all_dirty()  # stored rows may be rotten
        return report

    @placed
    def save(
        self,
        path: str | os.PathLike[str] | CheckpointWriter,
        *,
        keep: int = 2,
        asynchronous: bool = False,
    ) -> None:
        """Saves a checkpoint that outlives all machines; between steps, all ranks.

        Tables, dense parameters, optimizer state, random generators, `state=` objects and data positions go
        to {path}/step-{next_step}, which plain torch.distributed.checkpoint can read as well. It appears
        complete, when it is on disk: whatever is killed meanwhile, earlier ones stay complete. Begin from it
        with `protect(resume=path)`.

        Args:
            path: folder of this job's checkpoints, on a file system that all hosts share; made if missing.
                Or a CheckpointWriter, which is given to `protect(resume=)`, too.
            keep: how many checkpoints stay there; older ones are removed.
            asynchronous: copy the state now (for a differential writer: what has changed), and write it while
                training goes on. One at a time: the next save waits. An error is logged, and raised by the
                next save, or by close.

        Raises:
            CheckpointFailed: the folder can't be written to (or the last save in the background failed).
                Earlier checkpoints are untouched, and training can go on.
            CheckpointInsecure: others can write to the folder.
            CheckpointMismatch: it holds checkpoints of another training.
            ConfigurationError: the ranks ask for different things, or `keep` is less than 1.
            UsageError: a step is open.
            StepFailed: an earlier step failed.
            PeerFailure: a peer died.
        """
        self._check_between_steps("save")
        self._tables.check()
        self._drain()
        self._background.ensure_all()
        self._saver.save(path, keep=keep, asynchronous=asynchronous)

    def stats(self) -> dict[str, Any]:
        """Counts and sizes of this rank as a plain dict.

        Returns:
            `job` and `rank`; `next_step`; `steps` that ended in this process, of them `aborted_steps`;
            `replaced`, the number of processes that `ecemb-run` has replaced before this one, since torchrun
            last started the rank; `rejoined`, how often this process stayed after another rank's death;
            `window`, the steps of a transaction; `captured_rows`, each once in a transaction; `sent_bytes`
            over the network for protection; `scrubbed_words` of every block, and `verified_words` beside
            training; `wrong_words` that either found, of them `repaired_words`; `verified_age_s`, the time
            since the stripe was compared beside training that was compared longest ago, or None unless in
            the last pass all fitted their rows; `seconds` by phase, among them "verify"; `bytes`: memory by
            what it holds (`tables` is the protected tensors themselves; journals, `inbox`, `messages` grow
            with the rows of a transaction);
            `rebuild`: on a rank whose lost rows are rebuilt beside training, what is left, else empty.
        """
        return {
            "job": self._session.job,
            "rank": self._session.rank,
            "next_step": self._transactions.next_step,
            "steps": self._steps,
            "replaced": replacement.predecessors,
            "rejoined": replacement.rejoins,
            "aborted_steps": self._aborted,
            "window": self._transactions.window.size,
            "captured_rows": self._transactions.captured_rows,
            "sent_bytes": self._transport.sent_bytes,
            "scrubbed_words": self._scrubber.scrubbed_words,
            "verified_words": self._verifier.verified_words,
            "verified_age_s": self._verifier.age_s,
            "wrong_words": self._scrubber.wrong_words + self._verifier.wrong_words,
            "repaired_words": self._scrubber.repaired_words,
            "seconds": dict(self._transactions.seconds),
            "bytes": {"tables": self._tables.size_bytes, **self._transactions.held_bytes},
            "rebuild": self._background.stats(),
        }

    @placed
    def close(self) -> None:
        """Ends the job: its arenas are marked finished and removed. All ranks.

        The tables stay usable in this process. Save the model before: a closed job does not train again.

        Raises:
            UsageError: a step is open.
            StepFailed: a step failed; the arenas are kept, so that a restart goes on from them.
        """
        if self._closed:
            return
        self._check_between_steps("close")
        self._tables.check()
        self._drain()
        self._background.ensure_all()
        self._saver.drain()
        self._transport.barrier("closing the job")
        # Not earlier: if a rank died that has not come here, all are replaced. Not later: the other ranks may
        # have closed the job before a replacement comes.
        replacement.leave()
        self._memory.finish()
        self._session.job_flags.set("finished", "1")
        try:
            self._transport.barrier("the end of the job")
            self._saver.finish()  # only now: from an arena that is LIVE, a restart might train on
            self._transport.barrier("the removal of the arenas")
            self._remove_arena()
        except PeerFailure as error:  # the peer may not have finished: the tombstone stays
            path = self._memory.arena.path
            logger.warning("a peer ended while the job was closed, so %s stays: %s", path, error)
        self._release("the job is finished; train again under another job=")

    @placed
    def asked_to_leave(self) -> bool:
        """Whether `ecemb move` asks the job, on any of its hosts, to leave. All ranks.

        Between steps. The call commits the steps that have ended, and each rank sends a message to each other
        rank: call it every 100 steps, for example. If it is True, call `leave`, and end the script.

        Returns:
            The same on all ranks.

        Raises:
            UsageError: a step is open, or the guard is closed.
            StepFailed: an earlier step failed.
            PeerFailure: a peer died.
        """
        self._check_between_steps("asked_to_leave")
        self._drain()
        asked = scan.is_asked_to_leave(self._session.directory)
        return any(self._transport.vote(asked, "asking whether to leave"))

    @placed
    def leave(self, path: str | os.PathLike[str] | CheckpointWriter, *, keep: int = 2) -> None:
        """Ends this launch, so that the job goes on elsewhere: commits, saves, removes its memory. All ranks.

        Unlike `close`, it leaves the job unfinished: launched again with `protect(resume=path)`, on other
        hosts, with another number of ranks, or with its tables in another engine, it goes on with the next
        step. The tables stay usable in this process. A restart by this torchrun does not train on: it raises
        JobFinished, unless torchrun makes a store for each restart.

        Args:
            path: as for `save`.
            keep: as for `save`.

        Raises:
            UsageError: a step is open.
            StepFailed: a step failed; the arenas are kept, so that a restart goes on from them.
            CheckpointError: as `save`; nothing was removed, and training can go on.
            PeerFailure: a peer died.
        """
        if self._closed:
            return
        self.save(path, keep=keep)
        replacement.leave()  # a replacement would find a job that has left
        if self._session.rank == 0:
            self._session.job_flags.set("left", str(path))  # two launches must not train on
        self._transport.barrier("leaving")
        try:
            self._remove_arena()
            self._transport.barrier("the removal of the arenas")
        except PeerFailure as error:
            logger.warning("a peer ended while the job was leaving: %s", error)
        level = logging.INFO if self._session.rank == 0 else logging.DEBUG
        logger.log(level, "the job has left this launch: step %d is next, from %s", self.next_step, path)
        self._release(f"the job has left; launch it again with ecemb.protect(..., resume={str(path)!r})")

    def _remove_arena(self) -> None:
        try:
            scan.withdraw_request(self._session.directory)
            if not self._memory.arena.remove():
                logger.warning("%s", lost_name(self._memory.arena.path))
        except ArenaInsecure as error:
            logger.warning("the arena stays: %s", error)

    def _release(self, why: str) -> None:
        """Ends the guard's hooks, threads and connections; later calls raise an error with `why`."""
        self._sigterm.stop()
        self._remaining.forget()
        self._tables.unwatch()
        self._optimizers.unwatch()
        self._saver.close()
        self._transactions.close()
        self._background.end()
        self._transport.close()
        if self._session.watch is not None:
            self._session.watch.say_goodbye()
        self._closed = why

    def _abandon(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Ends the guard in a process that stays after a peer's death; this rank's arena is as it is.

        Args:
            model: the model, which the process may keep: without gradients, as a new process has none.
            optimizers: its optimizers, likewise.
        """
        self._closed = "another rank has died, and this process begins again"
        self._sigterm.stop()
        self._remaining.forget()
        self._tables.unwatch()
        self._optimizers.unwatch()
        self._transactions.close()
        self._saver.abandon()
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        for parameter in (*model.parameters(), *(one for group in groups for one in group)):
            if isinstance(parameter, nn.Parameter) or type(parameter) is torch.Tensor:  # not TorchRec's
                parameter.grad = None
        for metric in self._rank_state.growing.values():
            cast("Any", metric).reset()

    def _is_open(self) -> bool:
        return self._transactions.in_flight is not None

    def _check_usable(self) -> None:
        if self._closed:
            raise UsageError(f"the guard is closed: {self._closed}")
        if (watch := self._session.watch) is not None and watch.stays:
            raise follows(
                PeerFailure("another rank has died: this process ends its session, and begins again")
            )
        if self._failed is not None:
            error = StepFailed(
                f"{self._failed}; this guard takes no more steps, and dense state may be broken: let the "
                f"process end; the next start of the job goes on from step {self.next_step}"
            )
            raise error if self._cause is None else follows(error, self._cause)
        self._memory.arena.check_open()  # raises in a forked child, before it uses its parent's connections

    def _check_between_steps(self, call: str, way_out: str = "leave the with block first") -> None:
        if self._is_open():
            raise UsageError(f"guard.{call}() inside guard.step(): {way_out}")
        self._check_usable()

    def _undone(self, last: int, ranks: list[int]) -> bool:
        """Ends an abort of a transaction, whose last step is `last`; returns whether this step has ended."""
        self._failed = f"the abort of step {last} was interrupted"  # cleared below, unless it is
        self._tables.take_back()
        self._failed = None
        level = logging.WARNING if self._session.rank == 0 else logging.DEBUG
        first = self._transactions.next_step
        if first > last:
            self._aborted += 1
            logger.log(level, "step %d was aborted by ranks %s and is undone on all", last, ranks)
        else:
            logger.log(
                level,
                "ranks %s aborted a step: steps %d to %d, all since the last commit, are undone to run again",
                *(ranks, first, last),
            )
        return first > last

    def _verify(self) -> None:
        """Compares the next slice of parity with rows, if that is due. All ranks."""
        transactions, number = self._transactions, self._transactions.next_step
        if not (transactions.is_between and self._background.is_over and self._verifier.is_due(number)):
            return
        self._failed = f"comparing parity with rows after step {number - 1} was interrupted"
        with transactions.phase("verify"):
            self._verifier.compare(number, self._drain, self._tables.verify)
        self._failed = None

    def _drain(self) -> None:
        """Commits all steps that have ended. All ranks."""
        last = self._transactions.next_step - 1
        try:
            if aborted := self._transactions.drain():
                self._undone(last, aborted)
        except BaseException as error:
            self._fail(last, error)
            raise

    def _fail(self, number: int, error: BaseException) -> None:
        """Undoes the open step; the guard then takes no more steps. Does nothing if no step is open."""
        if not self._is_open():
            return
        self._failed = f"step {number} failed ({type(error).__name__}: {short(error, 1000)})"
        self._cause = cause_of(error)
        if (watch := self._session.watch) is None or not watch.saw_death:  # else it may follow from that
            self._activity.failure = own_failure(error)
        if refusal := self._optimizers.gradients.refusal:  # a restart would not see these gradients
            with suppress(RuntimeError):  # no store is left
                self._session.job_flags.set("refused", refusal)
        self._transactions.undo(error)
        try:
            if isinstance(error, UndeclaredWrite):
                self._tables.put()  # any row may have been written
            else:
                self._tables.put_back()
        except Exception as failed:  # noqa: BLE001 - the step's error is the cause, and has to be raised
            logger.error(
                "rank %d: rows on a device are not as before step %d (%s: %s); the arena's are: let "
                "the process end",
                *(self._session.rank, number, type(failed).__name__, short(failed, 110)),
            )


def protect(
    model: nn.Module,
    *,
    optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer = (),
    tables: Mapping[str, nn.Module | nn.Parameter] | None = None,
    code: Code | Sequence[Code] | Callable[[int], Code | Sequence[Code]],
    state: Mapping[str, Stateful] | Sequence[Stateful] | Stateful | None = None,
    without_optimizer: Sequence[nn.Module | nn.Parameter] | nn.Module | nn.Parameter = (),
    window: int | Literal["auto"] = 1,
    mtbf: timedelta | None = None,
    max_replay: timedelta | float | None = None,
    overlap: bool = False,
    failure_domain: FailureDomain = "auto",
    parity_backend: ParityBackend = "tcp",
    compare_every: int = COMPARE_EVERY,
    verify: float = VERIFY_SHARE,
    resume: str | os.PathLike[str] | CheckpointReader | None = None,
    resume_required: bool = False,
    renamed: Mapping[str, str] | None = None,
    transfer: Transfer | None = None,
    elastic: bool = False,
    shards: Mapping[str, tuple[int, int]] | None = None,
    rebuild: RebuildMode = "blocking",
    strict: bool = False,
) -> Guard:
    """Protects a model's sharded embedding tables; a fresh start, or a recovery, happens here. All ranks.

    Finds every table of `ecemb.nn` and every sharded collection of TorchRec in the model
    (docs/torchrec.md lists them), and adds `tables`. Tables move into the arena; those on the meta device are
    materialised there. Those on a CUDA device stay, and have an image there. After a recovery, tables, dense
    parameters, optimizer state, random number generators and `state` are as they were after step
    `guard.next_step` - 1.

    Args:
        model: the whole model; all of it but protected tables must be the same on all ranks. Wrap it before
            in TorchRec's DistributedModelParallel, or dense parts alone in DistributedDataParallel.
        optimizers: all optimizers of the training, or the only one; those of dense parameters are the same on
            every rank, with the same options. Tables need torch.optim.SGD, Adagrad or SparseAdam, or a class
            with `ecemb_row_state`, see docs/guides/by-hand.md (TorchRec's: its fused SGD, row-wise Adagrad or
            Adagrad). TorchRec's combined optimizers are taken apart.
        tables: further tables, sharded by hand: nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True)
            by a key of your choice. Ranks need not hold the same ones. Of another module, name the parameter:
            that is your word that only sparse gradients change it.
        code: the (n, k) code; n at most the number of ranks. A list has codes by preference: the first that
            fits counts. Or a function of the number of ranks that returns a code or a list.
        state: schedules, counters and the like of this rank, with state_dict() and load_state_dict(), by
            name. Or one such object, or a list in a fixed order without two objects of one class.
        without_optimizer: parameters, or modules, with requires_grad=True that no optimizer changes: frozen
            ones, and those that the script writes inside the step. All other parameters need one of
            `optimizers`.
        window: number of steps that are committed together: a row that several of them change is sent once,
            and at most this many steps are run again after a failure. "auto" measures the first steps, and
            picks the number with which commits and steps run again cost least (Young's formula); it picks
            again when a commit or a step takes half as long again, or half as long. Windows are shorter if
            the rows that they change have no room.
        mtbf: mean time between failures of the whole job, for "auto"; None: 60 days / hosts, as published.
        max_replay: longest time of steps that a failure may undo, for "auto": a timedelta, or seconds.
        overlap: whether a thread commits while the next steps run; a failure may undo these as well.
        failure_domain: "host": any r lost hosts are survived, or an error names codes that fit; "rank":
            any r lost ranks; "auto": hosts if there are enough, else ranks, with a warning.
        parity_backend: the transport of deltas: "tcp", from host memory over the ranks' own connections, or
            "nccl", through each rank's current CUDA device, also for rows when parity is made or checked;
            not with `overlap`.
        compare_every: commits between two comparisons of dense state among the ranks, by checksum.
        verify: share of training's time in which parity is compared with rows beside it, slice by slice
            between steps; 0 for never. The first pass takes up to 2 % if that is more, so that writes past
            torch show early. A difference is a warning that names table and rows; nothing is repaired, as
            `Guard.scrub` would. With every window, `overlap` and code; with one rank there is no parity, and
            while lost memory is rebuilt beside training nothing is compared.
        resume: folder that `Guard.save` saves to (or a CheckpointReader). A fresh start begins at its newest
            checkpoint, with any number of ranks, and so does a job that has lost more memory than the code
            survives. It may be empty or missing, and is made by the first save: then the job begins at step
            0, with a warning. Tables may have moved to another engine, between `ecemb.nn` and TorchRec: rows
            are found by table and number.
        resume_required: whether a job without memory begins at a checkpoint or not at all: without one in
            `resume`, because of a wrong path for example, the start raises CheckpointFailed.
        renamed: keys of tables in the checkpoint of `resume`, by their keys now, where the two differ; a key
            is the table's path in the model, without a range of columns.
        transfer: tables of another training that this one takes at step 0, where it begins.
        elastic: whether the job goes on with another number of ranks, from memory: rows, their optimizer's
            state and dense state exactly, the rest as from a checkpoint. Hosts need room for old and new
            arenas at once. Tables sharded by hand need `shards`, also in the launch before.
        shards: the place of this rank's rows in a table that is sharded by hand, by its key in `tables`: the
            whole table's row at which they begin, and the whole table's number of rows. With it, another
            number of ranks can go on with the table, by `resume` or `elastic`.
        rebuild: "blocking": training waits until lost rows are rebuilt. "background": training begins at
            once; a replacement rank waits for the rows that a batch needs, and receives the others meanwhile.
            Until it has all rows, its memory counts as lost.
        strict: whether to refuse a start where the script has objects with state that no recovery restores,
            such as a schedule that is not in `state`. Otherwise a fresh start names them in a warning.

    Returns:
        The guard.

    Raises:
        NotInitialized: ecemb.init_process_group() comes first.
        UsageError: this process has a guard already, or an earlier start of this launch was refused because
            an optimizer used gradients from before the last commit.
        ConfigurationError: an argument breaks a rule; also UnsupportedTable, UnsupportedOptimizer,
            PlacementError.
        LayoutMismatch: the job was started with another model or code.
        RendezvousError: the job was started with another number of ranks, and `elastic` is not set.
        NotEnoughSpace: the arena doesn't fit.
        RecoveryError: the job can't go on: TooManyErasures, StateLost, JobFinished, InconsistentArenas.
        CheckpointError: what `resume` or `transfer` names can't be read, isn't safe, or doesn't fit; the
            error lists all that doesn't fit, and nothing was written.
        PeerFailure: a peer died or failed, or an argument breaks a rule there alone.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"ecemb.protect() takes the model, a torch.nn.Module; it got {model!r}. Name tables that are "
            f"sharded by hand in tables="
        )
    session = current()
    if session.protected:
        raise UsageError("this process has a guard already: call ecemb.protect() once, and keep its guard")

    def asked() -> Request:
        codes = codes_of(code(session.world_size) if callable(code) else code)
        return Request(
            model=model,
            optimizers=optimizers_of(optimizers),
            modules=modules_of(tables),
            code=codes[0],
            state=state,
            without=listed(without_optimizer),
            window=Window(window, mtbf, max_replay),
            overlap=overlap,
            failure_domain=failure_domain,
            parity_backend=parity_backend,
            compare_every=compare_every,
            verify=verify,
            reader=None if resume is None else reader_of(resume, "resume="),
            resume_required=resume_required,
            renamed=renamed or {},
            transfer=transfer,
            elastic=elastic,
            codes=codes,
            shards=shards or {},
            rebuild=rebuild,
            strict=strict,
        )

    opened = open_memory(session, asked)
    session.protected = True
    guard = Guard.__new__(Guard)
    guard._begin(session, opened)  # pyright: ignore[reportPrivateUsage]
    # Without the agents' store, the ranks' store may be the dead one's.
    if session.stay is not None and has_agents_store():
        request = opened.start.request
        session.stay.at_end(partial(guard._abandon, model, request.optimizers))  # pyright: ignore[reportPrivateUsage]
        session.stay.has_trained(session.rank, opened.memory.arena.constants.arena_id)
    return guard


class Remaining:
    """Logs at the end of this process that the job's memory stays, unless `forget` has been called.

    Args:
        session: this process's.
        arena: this rank's, live.
    """

    def __init__(self, session: Session, arena: Arena) -> None:
        # Keeps values of the session, not the session, which has connections: exit handlers keep their
        # objects until the process ends.
        self._job, self._hosts, self._directory = session.job, session.hosts, session.directory
        self._arena, self._pid = arena, os.getpid()
        self._activity = session.activity
        self._unsaid = threading.Lock()  # acquired by the thread that logs the line
        self._say_of_a_failed_process = partial(self._say, is_failed=True)
        if session.rank == 0:
            atexit.register(self._say)
            before_hard_exit(self._say_of_a_failed_process)

    def forget(self) -> None:
        """Cancels the line: the job is closed or has left, so that no memory stays."""
        atexit.unregister(self._say)
        forget(self._say_of_a_failed_process)

    def _say(self, *, is_failed: bool = False) -> None:
        failed = is_failed or isinstance(last_exception(), Exception) or self._activity.failure is not None
        is_restarted = failed and (replacement.is_due() or not is_last_attempt())
        if os.getpid() != self._pid or is_restarted or not _is_kept(self._arena):
            return
        if not self._unsaid.acquire(blocking=False):
            return
        logger.warning(
            "job %s was not closed: the memory of its %s stays in %s of %s. The same launch goes on from "
            "step %d; to remove it, on each host: %s",
            self._job,
            counted(len(self._hosts), "rank"),
            self._directory.arena_dir,
            counted(len(set(self._hosts)), "host"),
            self._arena.get(Word.COMMITTED),
            self._directory.removal,
        )


def _is_kept(arena: Arena) -> bool:
    """Whether the arena is open, and will still be found when this process has ended."""
    try:
        arena.check_open()
        return arena.is_named()
    except EcembError:
        return False
