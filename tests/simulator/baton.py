"""One thread at a time: the scheduler, the clock and the locks of a simulated job.

Each thread of a simulated process is a `Task`. One of them runs; at each *moment* (a message, a store to an
arena's header, half a kernel, an allocation) and at each wait, the `Baton` chooses by its generator which one
runs next. Time passes by a tick at each moment, and by a leap to the next deadline or delivery when all tasks
wait. So a run follows from its seed alone.

`Threads` and `Clock` stand in for the modules `threading` and `time`.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import zlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Protocol

TICK_S = 1e-4
BEGIN_S = 1e9
MOST_MOMENTS = 400_000
"""Of a run: more means that ranks send to each other in a circle."""


class Killed(BaseException):
    """The process of this task has ended here."""


class Stuck(Exception):
    """The run makes no progress."""


class Process(Protocol):
    """What the baton knows of a simulated process."""

    is_dead: bool
    is_stopped: bool

    def at_moment(self) -> None:
        """A moment of the process: it may end here, or be interrupted."""
        ...


class Task:
    """A thread of a simulated process."""

    def __init__(self, process: Process, act: Callable[[], object], name: str, baton: Baton) -> None:
        self.process, self.name = process, name
        self.gate = threading.Lock()
        self.gate.acquire()
        self.ready: Callable[[], bool] | None = None  # None: it can go on
        self.until: float | None = None
        self.is_over = False
        self._act, self._baton = act, baton
        # The name is a number: simulation.moment() counts such threads alone.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self.gate.acquire()
        try:
            self._act()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the run reports it
            self._baton.errors.append(error)
        finally:
            self.is_over = True
            self._baton.end(self)


class Baton:
    """Chooses the task that runs.

    Args:
        rng: of the run.
        rate: the share of moments at which another task may go on.

    Attributes:
        now: the time, in seconds.
        current: the task that runs; None outside of `run`.
        errors: what tasks raised besides `Killed`.
        trace: a checksum of all choices.
        when_stuck: called when every task waits, before time leaps; returns whether something changed.
    """

    def __init__(self, rng: random.Random, rate: float) -> None:
        self.now = BEGIN_S
        self.current: Task | None = None
        self.errors: list[BaseException] = []
        self.trace = 0
        self.moments = 0
        self.when_stuck: Callable[[float | None], bool] = lambda leap_s: False
        self._rng, self._rate = rng, rate
        self._tasks: list[Task] = []
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._over = threading.Semaphore(0)

    def spawn(self, process: Process, act: Callable[[], object], name: str) -> Task:
        """A new task, which goes on when it is chosen."""
        task = Task(process, act, name, self)
        self._tasks.append(task)
        task.thread.start()
        return task

    def run(self) -> None:
        """Runs all tasks to their ends."""
        if self._tasks:
            self._go(self._choose())
            while not self._over.acquire(timeout=120):
                raise Stuck("no task has given the baton on for 120 s")
        self.current = None

    def at(self, when: float, act: Callable[[], object]) -> None:
        """Calls `act` at a time."""
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def moment(self) -> None:
        """The task that runs may be interrupted here, and another one may go on."""
        task = self.current
        if task is None or task.thread.ident != threading.get_ident():
            return
        process = task.process
        if process.is_dead:
            raise Killed
        self.moments += 1
        self.now += TICK_S
        if self.moments > MOST_MOMENTS:
            raise Stuck(f"{MOST_MOMENTS} moments, and the run has not ended")
        process.at_moment()
        if process.is_stopped or self._rng.random() < self._rate:
            self._give_on(task)

    def block(self, ready: Callable[[], bool], until: float | None = None) -> bool:
        """Waits until `ready()` or a time; returns whether `ready()`.

        Outside of tasks nothing changes meanwhile, so it returns at once.
        """
        task = self.current
        if task is None or task.thread.ident != threading.get_ident():
            return ready()
        self.moment()
        while not ready():
            if until is not None and self.now >= until:
                return False
            task.ready, task.until = ready, until
            self._give_on(task)
            self.moment()
        return True

    def sleep(self, seconds: float) -> None:
        """Waits for a time."""
        self.block(lambda: False, self.now + max(seconds, TICK_S))

    def end(self, task: Task) -> None:
        """The task has ended: another one goes on."""
        self._tasks.remove(task)
        if self._tasks:
            self._go(self._choose())
        else:
            self.current = None
            self._over.release()

    def _give_on(self, task: Task) -> None:
        chosen = self._choose()
        if chosen is not task:
            self._go(chosen)
            task.gate.acquire()
        task.ready = task.until = None
        if task.process.is_dead:
            raise Killed

    def _go(self, task: Task) -> None:
        self.current = task
        task.gate.release()

    def _choose(self) -> Task:
        while True:
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            now = self.now
            able = [
                one
                for one in self._tasks
                if one.process.is_dead
                or (
                    not one.process.is_stopped
                    and (one.ready is None or (one.until is not None and now >= one.until) or one.ready())
                )
            ]
            if able:
                chosen = able[0] if len(able) == 1 else self._rng.choice(able)
                self.trace = zlib.crc32(f"{chosen.name} {self.moments}".encode(), self.trace)
                self.current = chosen
                return chosen
            times = [one.until for one in self._tasks if one.until is not None]
            times += [self._events[0][0]] if self._events else []
            leap_s = min(times) - self.now if times else None
            if not self.when_stuck(leap_s):
                if leap_s is None:
                    self.errors.append(Stuck("every task waits without a deadline"))
                    for one in self._tasks:
                        one.process.is_dead = True
                else:
                    self.now = max(self.now, min(times))


class Threads:
    """The module `threading`, for tasks."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._names = itertools.count(1)

    def get_ident(self) -> int:
        return id(self._baton.current)

    def current_thread(self) -> Any:
        return self._baton.current

    def main_thread(self) -> Any:
        current: Any = self._baton.current
        return None if current is None else getattr(current.process, "main", None)

    def enumerate(self) -> list[Any]:
        return []

    def Lock(self) -> Lock:  # noqa: N802 - as in `threading`
        return Lock(self._baton)

    def RLock(self) -> Lock:  # noqa: N802
        return Lock(self._baton, again=True)

    def Condition(self, lock: Any = None) -> Condition:  # noqa: N802
        return Condition(self._baton)

    def Event(self) -> Event:  # noqa: N802
        return Event(self._baton)

    def Thread(self, *, target: Any, args: Any = (), name: str = "", daemon: bool = True) -> Thread:  # noqa: N802
        return Thread(self._baton, lambda: target(*args))

    def ThreadPoolExecutor(self, most: int, name: str = "") -> Executor:  # noqa: N802
        return Executor(self._baton)

    @property
    def Future(self) -> Any:  # noqa: N802
        """`Future[None]`, the only one that the product makes."""
        return {None: lambda: Future(self._baton)}

    def wait(self, futures: Iterable[Future]) -> None:
        """`concurrent.futures.wait`."""
        for one in futures:
            self._baton.block(one.done)


class Lock:
    """`threading.Lock`, or `RLock`."""

    def __init__(self, baton: Baton, *, again: bool = False) -> None:
        self._baton, self._again = baton, again
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._baton.current or self
        if self._again and self._owner is me:
            self._depth += 1
            return True
        if self._owner is not None:
            until = None if timeout < 0 else self._baton.now + timeout
            if not blocking or not self._baton.block(lambda: self._owner is None, until):
                return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._owner = None

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """`threading.Condition`."""

    def __init__(self, baton: Baton) -> None:
        super().__init__(baton, again=True)
        self._notified = 0

    def wait(self, timeout: float | None = None) -> bool:
        before, depth, owner = self._notified, self._depth, self._owner
        self._owner = None
        until = None if timeout is None else self._baton.now + timeout
        try:
            return self._baton.block(lambda: self._notified > before, until)
        finally:
            if not self._baton.current or not self._baton.current.process.is_dead:
                self._baton.block(lambda: self._owner is None)
            self._owner, self._depth = owner, depth

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else self._baton.now + timeout
        while not (found := predicate()):
            left_s = None if until is None else until - self._baton.now
            if left_s is not None and left_s <= 0:
                return predicate()
            self.wait(left_s)
        return found

    def notify_all(self) -> None:
        self._notified += 1

    notify = notify_all


class Event:
    """`threading.Event`."""

    def __init__(self, baton: Baton) -> None:
        self._baton, self._set = baton, False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._baton.block(self.is_set, None if timeout is None else self._baton.now + timeout)


class Thread:
    """`threading.Thread`, of the process that makes it."""

    def __init__(self, baton: Baton, act: Callable[[], object]) -> None:
        self._baton, self._act = baton, act
        self._process: Any = None if baton.current is None else baton.current.process
        self.ident: int | None = None
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._process.spawn(self._act)
        self.ident = id(self._task)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_over

    def join(self, timeout: float | None = None) -> None:
        self._baton.block(lambda: not self.is_alive(), None if timeout is None else self._baton.now + timeout)


class Future:
    """`concurrent.futures.Future`."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._state = "pending"
        self._error: BaseException | None = None
        self._result: Any = None

    def set_running_or_notify_cancel(self) -> bool:
        if self._state == "cancelled":
            return False
        self._state = "running"
        return True

    def cancel(self) -> bool:
        if self._state == "pending":
            self._state = "cancelled"
        return self._state == "cancelled"

    def done(self) -> bool:
        return self._state in ("cancelled", "done")

    def set_result(self, result: Any) -> None:
        self._result, self._state = result, "done"

    def set_exception(self, error: BaseException) -> None:
        self._error, self._state = error, "done"

    def result(self) -> Any:
        self._baton.block(self.done)
        if self._error is not None:
            raise self._error
        return self._result


class Executor:
    """`ThreadPoolExecutor`, whose calls have threads of their own: the product makes one at a time."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._threads: list[Thread] = []

    def submit(self, act: Callable[..., object], *arguments: Any) -> None:
        thread = Thread(self._baton, lambda: act(*arguments))
        self._threads.append(thread)
        thread.start()

    def shutdown(self, wait: bool = True) -> None:
        for thread in self._threads:
            thread.join()


def clock(baton: Baton) -> Any:
    """The module `time`."""

    def now() -> float:
        return baton.now

    def now_ns() -> int:
        return int(baton.now * 1e9)

    return SimpleNamespace(
        monotonic=now,
        time=now,
        perf_counter=now,
        thread_time=now,
        process_time=now,
        time_ns=now_ns,
        monotonic_ns=now_ns,
        perf_counter_ns=now_ns,
        sleep=baton.sleep,
    )
