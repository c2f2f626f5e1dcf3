"""Lives of a simulated job: from the roll call to `close`, with failures, until the training ends.

A *life* is one launch of all workers. Its processes are threads that share only what processes share: files
of arenas, the store of torchrun, and the network. A process that ends writes nothing more: its mapping of its
arena is made private at that moment.

What is checked: at each start, and at the end, tables, optimizers' state, dense state and rank state of every
rank are those of the plain twin at that step. No start loses a transaction that a rank has committed. Where
more memory is lost than the code survives, no rank trains: all refuse. No arena is FINISHED before all ranks
have committed the last step, the end is recorded when all arenas are FINISHED, and a closed job never trains
again. No rank ends by an error that no failure explains.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import itertools
import logging
import math
import mmap
import os
import random
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from ecemb import guard as guard_module
from ecemb.checkpoint.saver import Saver
from ecemb.errors import (
    ArenaBusy,
    EcembError,
    JobFinished,
    NotEnoughSpace,
    PeerFailure,
    RendezvousError,
    StateLost,
    StepFailed,
    TooManyErasures,
)
from ecemb.kernels import contract
from ecemb.kernels.threads import IdleProcessors
from ecemb.memory import arena as arena_module
from ecemb.memory import capacity, header, journal, private_files, rank_memory, scan
from ecemb.memory.arena import Arena
from ecemb.memory.classify import classify
from ecemb.memory.header import State, Word
from ecemb.memory.scan import Directory
from ecemb.net import collectives, mesh, rendezvous, roster
from ecemb.net.assignment import Worker, assign
from ecemb.net.collectives import Transport
from ecemb.net.error_file import Activity
from ecemb.recovery import background as background_module
from ecemb.recovery import requester, server, throttle, verify
from ecemb.session import Session
from ecemb.start import agree, opening
from ecemb.step import transaction
from simulator.baton import Baton, Killed, Task, Threads, clock
from simulator.network import Net, SimulatedNetwork, Store
from simulator.training import Job, Training, difference, twin
from support import simulation
from support.simulation import Torn

JOB = "simulated"
TIMEOUT_S, PATIENCE_S = 120.0, 1800.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


class Difference(AssertionError):
    """The job is not as its twin, or ended without a reason."""


@dataclasses.dataclass
class Fault:
    """Something that happens to a process.

    Attributes:
        rank: torchrun's RANK of the process.
        mark: where it is armed: "launch", "protect", "step N", "close", "store WORD", "barrier NAME".
        after: moments of the process from there on.
        kind: what happens.
        nth: how often the process passes the mark before.
    """

    rank: int
    mark: str
    after: int
    kind: str
    nth: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of worker {self.rank}, {self.after} moments after {self.mark} ({self.nth})"


KINDS = {
    "kill": 12,
    "interrupt": 3,
    "error": 2,
    "sigterm": 1,
    "full": 3,
    "cut": 2,
    "silence": 1,
    "stop": 1,
}


class Rank:
    """A worker's process."""

    def __init__(self, life: Life, index: int) -> None:
        self.life, self.index = life, index
        self.host = life.hosts[index]
        self.rank, self.world_size = index, life.job.size
        self.is_dead = self.is_stopped = False
        self.session: Any = None
        self.guard: Any = None
        self.error: BaseException | None = None
        self.outcome = "runs"
        self.step = -1
        self.moments = 0
        self.main: Any = None
        self._armed: list[tuple[int, str]] = []  # moment, kind
        self._arenas: list[Arena] = []
        self._threads = 0
        self.is_full = False
        self.has_died = False
        self._marks = {fault.mark: fault.nth for fault in life.faults if fault.rank == index}

    def spawn(self, act: Callable[[], object]) -> Task:
        self._threads += 1
        return self.life.run.baton.spawn(self, act, str(1000 * self._threads + self.index))

    def start(self) -> None:
        self.main = self.life.run.baton.spawn(self, self._run, str(self.index))

    def mark(self, name: str) -> None:
        """The process is at a place where faults may be armed."""
        if name not in self._marks:
            return
        self._marks[name] -= 1
        if self._marks[name] == -1:
            for fault in self.life.faults:
                if fault.rank == self.index and fault.mark == name:
                    self.arm(fault.after, fault.kind)

    def arm(self, after: int, kind: str) -> None:
        self._armed.append((self.moments + after, kind))

    def at_moment(self) -> None:
        self.moments += 1
        if not self._armed:
            return
        for due in [one for one in self._armed if one[0] <= self.moments]:
            if due[1] == "interrupt" and self.life.run.baton.current is not self.main:
                continue  # the main thread alone runs handlers of signals
            self._armed.remove(due)
            self._suffer(due[1])

    def _suffer(self, kind: str) -> None:
        life = self.life
        if kind != "news":
            life.is_hit = True
        if kind == "kill":
            life.note(f"{self} is killed")
            self.die("killed")
        elif kind == "news":
            self.die("news of a death")
        elif kind == "interrupt":
            life.note(f"{self} is interrupted")
            life.is_disturbed = True
            raise KeyboardInterrupt
        elif kind == "error":
            life.note(f"{self} fails in a step")
            self.fails = True
        elif kind == "sigterm":
            life.note(f"{self} gets SIGTERM")
            life.is_disturbed = True
            if self.guard is not None:
                self.guard._sigterm._came = True
            else:
                self.die("killed")
        elif kind == "full":
            life.note(f"{self} finds its disk full")
            life.is_disturbed = self.is_full = True
        elif kind == "stop":
            life.note(f"{self} is stopped")
            life.is_disturbed = life.has_stopped = self.is_stopped = True
        elif kind in ("cut", "silence"):
            others = [one.rank for one in life.ranks if one is not self]
            if kind == "cut":
                others = [life.run.rng.choice(others)]
            life.note(f"{self} loses its connections with {others} ({kind})")
            life.is_disturbed = True
            for other in others:
                life.net.cut(self.rank, other, silently=kind == "silence")

    fails = _is_drained = False

    def die(self, why: str) -> None:
        """The process ends here and now."""
        if self.is_dead:
            raise Killed
        if self.outcome == "runs":
            self.outcome = why
        self.ended()
        raise Killed

    def ended(self, *, fails: bool = True) -> None:
        """Nothing of this process writes any more."""
        if self.is_dead:
            return
        self.is_dead, self.is_stopped = True, False
        for arena in self._arenas:
            freeze(arena)
        rng = self.life.run.rng
        self.life.net.end(self.rank, loses=rng.random() < 0.5)
        if fails:
            self.life.spread(self)

    def opened(self, arena: Arena) -> None:
        self._arenas.append(arena)

    def release(self) -> None:
        """The operating system takes back what the process held."""
        if self.guard is not None:
            self.guard._remaining.forget()
        for arena in filter(is_open, self._arenas):
            arena.close()
        self._arenas.clear()
        self.guard = self.session = None

    def _run(self) -> None:
        is_closed = False
        try:
            self._live()
            is_closed = True
            self.outcome = "closed"
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001 - looked at when the life is over
            self.error = error
            self.outcome = f"{type(error).__name__}: {error}"
            self.life.note(f"{self} ends: {self.outcome[:150]}")
            for _ in range(self.life.run.rng.choice((0, 0, 20, 200))):  # its other threads go on meanwhile
                self.life.run.baton.moment()
        finally:
            self.ended(fails=not is_closed)

    def _live(self) -> None:
        life, job = self.life, self.life.job
        self.mark("launch")
        self.session = self._join()
        self.mark("protect")
        training = Training(job, self.session.rank, life.run.baton.moment)
        guard = self.guard = training.protect()
        life.begun(self, guard, training)
        cancels = {step for step, rank in job.cancels if rank == self.rank}
        while guard.next_step < job.steps or not self._is_drained:
            with suppress(StopIteration):
                self._train(guard, training, cancels)
        if job.rebuild == "background":
            guard.wait_rebuilt()
        life.compare(self, training, job.steps, "at the end")
        self.mark("close")
        if life.scrubs:
            report = guard.scrub()
            if report.findings:
                raise Difference(f"rank {self.rank}: scrub() finds {report}")
        guard.close()

    def _train(self, guard: Any, training: Training, cancels: set[int]) -> None:
        """Runs the steps that are left. The script's data end where a step is cancelled, and begin again."""
        for step in guard.steps(self.life.job.steps):
            self.mark(f"step {step.number}")
            with step:
                if step.number in cancels:
                    cancels.remove(step.number)
                    raise StopIteration
                training.step(step.number, guard.touch)
                if self.fails:
                    self.life.is_disturbed = True
                    raise ValueError("the user's code fails")
                if (step.number, self.rank) in self.life.job.aborts:
                    step.abort()
        self._is_drained = True

    def _join(self) -> Session:
        """`ecemb.init_process_group`, with the simulated store and network."""
        life = self.life
        directory = Directory(life.run.root, JOB, self.host)
        found = directory.scan(timeout_s=0)
        life.run.baton.moment()
        reports = [rendezvous.report_of(directory, one) for one in found]
        worker = Worker(self.host, f"{life.number}-{self.index}", self.index + 1, ("127.0.0.1",), 1)
        store: Any = life.run.store
        deadline = life.run.baton.now + TIMEOUT_S
        agreed = roster.agree(store, worker, reports, self.index, self.world_size, deadline)
        assignments = assign(agreed.workers, agreed.reports, agreed.opened)
        own = assignments[self.index]
        self.rank = own.rank
        life.run.baton.moment()
        arena = None
        if own.arena_id is not None:
            arena = rendezvous.claim(found, own.arena_id, own.rank, 1)
        hosts = {one.rank: w.host for one, w in zip(assignments, agreed.workers, strict=True)}
        return Session(
            job=JOB,
            directory=directory,
            rank=own.rank,
            world_size=self.world_size,
            hosts=tuple(hosts[rank] for rank in range(self.world_size)),
            addresses=(("127.0.0.1",),) * self.world_size,
            roster=agreed,
            arena=arena,
            job_flags=store,
            timeout_s=TIMEOUT_S,
            patience_s=PATIENCE_S,
            watch=None,
            activity=Activity(),
            network=SimulatedNetwork(life.net, self),
        )

    def __str__(self) -> str:
        return f"worker {self.index} (rank {self.rank})"


def freeze(arena: Arena) -> None:
    """What is written to the arena from here on stays in this process's memory, and the file is as it is."""
    data = arena._data
    if data is None or not is_open(arena):
        return
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    address = data.__array_interface__["data"][0]
    if _libc.mmap(address, data.size, protection, flags, arena._fd, 0) != address:
        raise OSError(ctypes.get_errno(), "an arena can't be frozen")


def is_open(arena: Arena) -> bool:
    """Whether its descriptor is its own still: an arena whose creation failed has closed it."""
    try:
        return os.fstat(arena._fd).st_ino == arena._inode
    except OSError:
        return False


class Life:
    """One launch of all workers."""

    def __init__(self, run: Run, number: int, faults: list[Fault]) -> None:
        self.run, self.number, self.faults = run, number, faults
        self.job = run.job if number == 0 else dataclasses.replace(run.job, **draw_options(run.rng))
        self.hosts = run.hosts
        self.net = Net(run.baton, run.rng, run.delay_s, run.room)
        self.ranks = [Rank(self, index) for index in range(self.job.size)]
        self.is_hit = self.is_disturbed = False  # by a fault; by what follows from it as well
        self.has_stopped = False  # a process, which may hold the lock of its host's memory
        self.scrubs = run.rng.random() < 0.5
        self.next_steps: dict[int, int] = {}

    def note(self, text: str) -> None:
        self.run.note(f"life {self.number}: {text}")

    def go(self) -> None:
        self.run.baton.when_stuck = self._when_stuck
        for rank in self.ranks:
            rank.start()
        self.run.baton.run()
        for rank in self.ranks:
            rank.release()

    def spread(self, dead: Rank) -> None:
        """A process has ended: the failure detectors of the others end them, each at some moment."""
        self.is_disturbed = True
        rng = self.run.rng
        for other in self.ranks:
            if not other.is_dead and not other.has_died:
                other.has_died = True
                other.arm(rng.choice((0, rng.randrange(20), rng.randrange(200), rng.randrange(2000))), "news")

    def _when_stuck(self, leap_s: float | None) -> bool:
        """torchrun's agent ends all processes of a launch that has lost one."""
        living = [one for one in self.ranks if not one.is_dead]
        if living and self.is_disturbed and (leap_s is None or leap_s > 30):
            is_agents = any(one.is_dead for one in self.ranks) or any(one.is_stopped for one in living)
            if is_agents or leap_s is None:
                for one in living:
                    one.outcome = "ended by its agent" if one.outcome == "runs" else one.outcome
                    one.ended(fails=False)
                return True
        return False

    def begun(self, rank: Rank, guard: Any, training: Training) -> None:
        """`protect` has returned on a rank."""
        step = guard.next_step
        if self.run.refusal:
            raise Difference(f"rank {rank.rank} goes on from step {step}, although {self.run.refusal}")
        self.next_steps[rank.rank] = step
        if len(set(self.next_steps.values())) > 1:
            raise Difference(f"ranks begin at different steps: {self.next_steps}")
        self.run.begun = self.run.is_marked = True
        if step < self.run.floor:
            raise Difference(f"training goes on from step {step}, and step {self.run.floor} was committed")
        if not guard._background.is_lacking:
            self.compare(rank, training, step, f"when life {self.number} begins")

    def compare(self, rank: Rank, training: Training, step: int, when: str) -> None:
        expected = self.run.twin[rank.rank][step]
        if names := difference(training.state(), expected):
            raise Difference(f"rank {rank.rank} differs from its twin after {step} steps in {names}, {when}")


ALLOWED = (PeerFailure, StepFailed, RendezvousError, KeyboardInterrupt, NotEnoughSpace, JobFinished)


class Run:
    """A run of a seed.

    Args:
        seed: decides all.
        says: called with a line for each event.

    Attributes:
        refusal: why the next start has to refuse on all ranks; empty if it has to go on.
        refuses: errors of such a refusal.
        lost: ranks without memory that counts, of a job that has begun.
        is_marked: whether a rank has begun to train since the store is there, so that it says so.
    """

    def __init__(self, seed: int, says: Callable[[str], object] = lambda line: None) -> None:
        self.seed, self._says = seed, says
        self.rng = rng = random.Random(seed)
        self.job = draw_job(rng)
        self.hosts = list(self.job.hosts)
        self.baton = Baton(rng, rng.choice((0.02, 0.1, 0.3, 1.0)))
        self.store = Store(self.baton)
        self.delay_s = rng.choice((0.0, 1e-4, 1e-3, 1e-2))
        self.room = rng.choice((1 << 13, 1 << 16, 1 << 20))
        self.twin: list[list[dict[str, bytes]]] = []
        self.floor = -1
        self.begun = self.is_marked = False
        self.refusal, self.refuses = "", tuple[type[Exception], ...]()
        self.lost = set[int]()
        self.lives = 0
        self.root = Path()

    def note(self, text: str) -> None:
        self._says(f"{self.baton.now - 1e9:10.4f} {text}")

    def go(self) -> None:
        """Runs the job to its end.

        Raises:
            Difference: it is not as its twin.
        """
        self.root = Path(tempfile.mkdtemp(prefix="ecemb-simulator-", dir="/dev/shm"))
        try:
            with simulated(self):
                self.twin = twin(self.job)
                self._go()
        finally:
            shutil.rmtree(self.root, ignore_errors=True)

    def _go(self) -> None:
        self.note(f"{self.job}")
        disturbed = self.rng.choice((1, 1, 2, 2, 3, 4, 5))
        for number in itertools.count():
            faults = draw_faults(self.rng, self.job, self.begun) if number < disturbed else []
            if self.refusal:
                faults = []
                self.note(f"life {number}: has to refuse, as {self.refusal}")
            for fault in faults:
                self.note(f"life {number}: planned: {fault}")
            life = Life(self, number, faults)
            life.go()
            self.lives += 1
            if self._look(life):
                return
            if number > disturbed:
                raise Difference("the job has not ended after a life without faults")
            self._lose()
            there = self._survivors()
            self.lost = set(range(self.job.size)) - there if there else set()

    def _look(self, life: Life) -> bool:
        """Judges how a life has ended; returns whether the run has."""
        for error in self.baton.errors:
            if not isinstance(error, (KeyboardInterrupt, EcembError)):
                raise Difference(f"a thread of a rank ends by {type(error).__name__}: {error}") from error
        self.baton.errors.clear()
        for rank in life.ranks:
            error = rank.error
            if isinstance(error, Difference):
                raise error
            if error is None or self.refusal:
                continue
            is_users = isinstance(error, ValueError) and rank.fails
            if not life.is_hit:
                raise Difference(f"{rank} ends without a failure: {type(error).__name__}: {error}") from error
            is_kept_out = isinstance(error, ArenaBusy) and life.has_stopped
            if not isinstance(error, ALLOWED) and not is_users and not is_kept_out:
                raise Difference(f"{rank} ends by {type(error).__name__}: {error}") from error
        if self.refusal:
            if not any(isinstance(one.error, self.refuses) for one in life.ranks):
                ends = [one.outcome[:100] for one in life.ranks]
                raise Difference(f"no rank refuses, although {self.refusal}: they end by {ends}")
            return True
        headers = self._headers()
        judged = classify(headers, self._opened())
        self.floor = max([self.floor, *(one.committed for one in judged.survivors)])
        if judged.finished:
            self._check_finished([*judged.finished, *judged.survivors])
        elif judged.survivors and not any(one.outcome == "closed" for one in life.ranks):
            self._check_survivors(judged.survivors)
        if any(one.outcome == "closed" for one in life.ranks) or judged.finished:
            return self._is_over(life, headers)
        return False

    def _check_finished(self, headers: Sequence[Any]) -> None:
        for one in headers:
            if one.committed != self.job.steps:
                of = f"rank {one.constants.rank} has committed {one.committed} of {self.job.steps} steps"
                raise Difference(f"the job is finished, and {of}")

    def check_all_are_finished(self) -> None:
        """The durable tier records the end of the job when all arenas are FINISHED, and before any goes."""
        finished = {one.constants.rank for one in self._headers() if one.state is State.FINISHED}
        if missing := set(range(self.job.size)) - finished:
            raise Difference(f"the end of the job is recorded, and ranks {sorted(missing)} are not FINISHED")

    def _check_survivors(self, headers: Sequence[Any]) -> None:
        """No life gives up memory that was there when it began; a mark in the store comes after LIVE."""
        there = {one.constants.rank for one in headers}
        if gone := set(range(self.job.size)) - there - self.lost:
            raise Difference(f"the memory of ranks {sorted(gone)} does not count any more, and was not lost")
        for one in headers:
            if one.state is State.INIT and self._opened() >= one.constants.fill:
                raise Difference(f"the job has started, and rank {one.constants.rank} is not LIVE")

    def _is_over(self, life: Life, headers: Sequence[Any]) -> bool:
        """Whether the run ends here, with a closed job; otherwise the job is launched once more."""
        if self.rng.random() < (0.9 if all(one.outcome == "closed" for one in life.ranks) else 0.2):
            return True
        if headers and self.rng.random() < 0.5:
            self._replace_store()  # only the arenas say that the job is finished
        self.refusal, self.refuses = "the job is finished", (JobFinished,)
        return False

    def _opened(self) -> int:
        return int(self.store.values.get("started", str(header.NONE).encode()))

    def _survivors(self) -> set[int]:
        return {one.constants.rank for one in classify(self._headers(), self._opened()).survivors}

    def _headers(self) -> list[Any]:
        found = [
            one
            for host in sorted(set(self.hosts))
            for one in Directory(self.root, JOB, host).scan(timeout_s=0)
        ]
        return [one.header for one in found if one.header is not None]

    def _lose(self) -> None:
        """Hosts lose their memory, as many as the code survives at most; workers may change places.

        A host that was cut off, and not lost, may come back with the memory that it had.
        """
        rng, job = self.rng, self.job
        if self.refusal or self._lose_too_much():
            return
        is_back = False
        for path in sorted(self.root.rglob("*.away")):
            if rng.random() < 0.3:
                self.note(f"an arena of {path.parent.name} comes back")
                path.rename(path.with_suffix(header.SUFFIX))
                is_back = True
        survivors = self._survivors()
        hurt = {host for rank, host in enumerate(job.hosts) if rank not in survivors}
        whole = sorted(set(job.hosts) - hurt)
        spare = job.code[0] - job.code[1] - len(hurt)
        if spare > 0 and whole and rng.random() < 0.6:
            for host in rng.sample(whole, min(len(whole), rng.randint(1, spare))):
                is_cut_off = rng.random() < 0.5
                self.note(f"host {host} {'is cut off' if is_cut_off else 'loses its memory'}")
                for found in Directory(self.root, JOB, host).scan(timeout_s=0):
                    if is_cut_off:
                        found.path.rename(found.path.with_suffix(".away"))
                    else:
                        found.path.unlink()
        if rng.random() < (0.5 if is_back else 0.1):  # then arenas alone say that one of them is stale
            self.note("the job is launched again, with a new store")
            self._replace_store()
        if rng.random() < 0.3:
            names = sorted(set(self.hosts))
            places = dict(zip(names, rng.sample(names, len(names)), strict=True))
            self.hosts = [places[host] for host in self.hosts]

    def _replace_store(self) -> None:
        self.store, self.is_marked = Store(self.baton), False

    def _lose_too_much(self) -> bool:
        """Maybe all memory is lost that counts; returns whether it is. What comes back is stale."""
        rng = self.rng
        away = sorted(self.root.rglob("*.away"))
        is_half_there = bool(away) or any(one.state is State.REBUILDING for one in self._headers())
        if not (self.is_marked or self._opened() != header.NONE):
            return False
        if rng.random() > (0.2 if is_half_there else 0.05):
            return False
        for path in away:
            path.rename(path.with_suffix(header.SUFFIX))
        left: list[State] = []
        opened = max((one.opened for one in self._headers()), default=header.NONE)
        for host in sorted(set(self.hosts)):
            for found in Directory(self.root, JOB, host).scan(timeout_s=0):
                one = found.header
                if one is not None and (one.state is State.REBUILDING or one.joined < opened):
                    left.append(one.state)
                else:
                    found.path.unlink()
        if set(left) == {State.REBUILDING} and rng.random() < 0.5:
            self._replace_store()
        self.refusal, self.refuses = "no memory is left that counts", (StateLost, TooManyErasures)
        self.note(f"all memory is lost that counts; {len(left)} arenas are left")
        return True


def draw_job(rng: random.Random) -> Job:
    """What a run trains."""
    n, k, size, per_host = rng.choice(
        [(2, 1, 2, 1), (2, 1, 3, 1), (3, 2, 3, 1), (3, 1, 3, 1), (4, 2, 4, 1), (3, 2, 4, 1), (2, 1, 4, 2)]
    )
    hosts = tuple(f"host{rank // per_host}" for rank in range(size))
    steps = rng.randint(2, 8)
    aborts = {(step, rng.randrange(size)) for step in range(steps) if rng.random() < 0.08}
    cancels = {(step, rank) for step in range(steps) for rank in range(size) if rng.random() < 0.02}
    return Job(
        seed=rng.randrange(2**31),
        hosts=hosts,
        code=(n, k),
        domain="host",
        steps=steps,
        **draw_options(rng),
        rows=tuple((rng.randint(1, 9), rng.randint(1, 6), rng.randint(1, 12)) for _ in range(size)),
        dims=(rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 6)),
        aborts=frozenset(aborts),
        cancels=frozenset(cancels),
        verify=rng.choice((0.0, 0.0, 1.0)),
        compare_every=rng.choice((1, 2, 1000)),
    )


def draw_options(rng: random.Random) -> dict[str, Any]:
    """What each start may choose for itself."""
    return {
        "window": rng.choice((1, 1, 2, 3)),
        "overlap": rng.random() < 0.3,
        "rebuild": "background" if rng.random() < 0.3 else "blocking",
    }


def _places(words: Sequence[Word], barriers: Sequence[str]) -> list[str]:
    return [*(f"store {word}" for word in words), *(f"barrier {name}" for name in barriers)]


_OF_START = (Word.STATE, Word.JOINED, Word.GENERATION_ID, Word.OPENED, Word.PREPARED, Word.COMMITTED)
STARTING = _places(
    _OF_START,
    ("joining the generation", "the initial state", "the end of recovery", "the start of training"),
)
STEPPING = _places(
    [
        *(Word.ROWS_LABEL, Word.ROWS_BYTES, Word.NEXT_LABEL, Word.NEXT_BYTES, Word.INBOX_LABEL),
        *(Word.INBOX_BYTES, Word.PARITY_LABEL, Word.PARITY_ROW, Word.PREPARED, Word.COMMITTED),
        *(Word.SLOT0_LABEL, Word.SLOT0_BYTES, Word.SLOT1_LABEL, Word.SLOT1_BYTES),
    ],
    (),
)
CLOSING = _places((Word.STATE,), ("closing the job", "the end of the job", "the removal of the arenas"))
"""Marks beside those of the script."""


def draw_faults(rng: random.Random, job: Job, begun: bool) -> list[Fault]:
    """What happens in a life."""
    marks = ["launch", "protect", "close", *(f"step {i}" for i in range(job.steps))]
    weights = [2, 6, 2, *([8 / job.steps] * job.steps)]
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        if rng.random() < 0.4:
            kind = kind if rng.random() < 0.3 else "kill"
            places = rng.choice((STARTING, STARTING, STEPPING, STEPPING, CLOSING)) if begun else STARTING
            mark, nth = rng.choice(places), rng.randrange(3)
            if places is STEPPING:
                nth = rng.randrange(2 * job.steps)
            after = rng.choice((0, 0, 1, 2, rng.randrange(30)))
            faults.append(Fault(rng.randrange(job.size), mark, after, kind, nth))
            continue
        mark = rng.choices(marks, weights)[0]
        most = {"launch": 40, "protect": 400, "close": 80}.get(mark, 250)
        early = int(math.exp(rng.uniform(0, math.log(most))))  # the end of a step comes in the second half
        after = rng.choice((early, rng.randrange(most // 2)))
        faults.append(Fault(rng.randrange(job.size), mark, after, kind))
    return faults


class _RunDelay:
    """`RunDelay`: training waits for a processor now and then."""

    def __init__(self, randoms: random.Random) -> None:
        self._randoms, self._waited_ns = randoms, 0

    def so_far_ns(self) -> int:
        self._waited_ns += self._randoms.choice((0, 0, 10 * throttle.BUSY_NS))
        return self._waited_ns

    def close(self) -> None:
        pass


class _Unshared(dict[Any, Any]):
    """Mappings of files by process: simulated processes share none, as each of them ends by itself."""

    def __setitem__(self, key: Any, mapping: Any) -> None:
        """Keeps nothing, so that each arena that is attached is mapped."""


@contextmanager
def simulated(run: Run) -> Generator[None]:
    """The product's modules use the run's threads, clock and random numbers."""
    baton = run.baton
    threads, time = Threads(baton), clock(baton)
    randoms = random.Random(run.seed + 1)
    secrets = SimpleNamespace(
        token_hex=lambda size: randoms.randbytes(size).hex(),
        token_bytes=randoms.randbytes,
        randbits=randoms.getrandbits,
    )

    def process() -> Any:
        task = baton.current
        return task.process if task is not None and task.thread.ident == threading.get_ident() else None

    opened = Arena.__init__

    def open_arena(self: Arena, *arguments: Any, **named: Any) -> None:
        opened(self, *arguments, **named)
        if (own := process()) is not None:
            own.opened(self)

    store, barrier, record = Arena.set, Transport.barrier, Saver.finish

    def set_word(self: Arena, word: Word, value: int) -> None:
        if (own := process()) is not None:
            if word is Word.STATE or self.get(Word.STATE):  # not for each word of a file that is being made
                own.mark(f"store {word}")
            baton.moment()
        store(self, word, value)

    def barriers(self: Transport, what: str) -> None:
        if (own := process()) is not None:
            own.mark(f"barrier {what}")
        barrier(self, what)

    def record_the_end(self: Saver) -> None:
        if (own := process()) is not None and own.rank == 0:
            run.check_all_are_finished()
        record(self)

    fallocate = os.posix_fallocate

    def allocate(fd: int, offset: int, length: int) -> None:
        baton.moment()
        if (own := process()) is not None and own.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(fd, offset, length)

    made = throttle.RebuildThrottle.__init__

    def on_two_processors(self: Any) -> None:
        made(self)
        self._processors = 2

    def end_process(number: int, error: BaseException) -> None:
        own = process()
        own.life.note(f"{own} ends, as transaction {number} is undecided ({type(error).__name__})")
        own.die("undecided")

    def end_by_signal() -> None:
        process().die("SIGTERM")

    def current() -> Session:
        return process().session

    for seed in (torch.manual_seed, np.random.seed, random.seed):  # what scripts draw is in rank state
        seed(0)
    with ExitStack() as patches:
        patches.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        patches.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        patch = lambda where, name, value: patches.enter_context(mock.patch.object(where, name, value))  # noqa: E731
        patches.enter_context(simulation.watched(baton.moment))  # pyright: ignore
        for module in (mesh, journal, rank_memory, arena_module, requester, background_module, transaction):
            patch(module, "threading", threads)
        patch(server, "threading", threads)
        for name in ("ThreadPoolExecutor", "wait", "Future"):
            patch(transaction, name, getattr(threads, name))
        for module in (
            roster,
            mesh,
            collectives,
            capacity,
            private_files,
            scan,
            transaction,
            rank_memory,
            requester,
        ):
            patch(module, "time", time)
        patch(transaction, "_work", time.thread_time)
        patch(throttle, "time", time)
        for module in (requester, server):
            patch(module, "RunDelay", lambda: _RunDelay(randoms))
        patch(throttle.RebuildThrottle, "__init__", on_two_processors)
        patch(IdleProcessors, "are_idle", lambda self: randoms.random() < 0.5)
        patch(verify, "_clock", time.monotonic)
        for module in (roster, agree, header, capacity):
            patch(module, "secrets", secrets)
        patch(contract, "get_kernels", lambda *_: Torn())
        # What a start only reads for its messages takes a third of a life's time.
        patch(opening, "Forgotten", lambda start: SimpleNamespace(name=lambda **_: None))
        patch(capacity, "limits", lambda *_: [])
        patch(arena_module, "_mapped", _Unshared())
        patch(Arena, "__init__", open_arena)
        patch(Arena, "set", set_word)
        patch(Transport, "barrier", barriers)
        patch(Saver, "finish", record_the_end)
        patch(os, "posix_fallocate", allocate)
        patch(transaction, "end_process", end_process)
        patch(transaction, "_end_by_signal", end_by_signal)
        patch(guard_module, "current", current)
        yield


def run(seed: int, says: Callable[[str], object] = lambda line: None) -> Run:
    """Runs a seed."""
    one = Run(seed, says)
    one.go()
    return one
