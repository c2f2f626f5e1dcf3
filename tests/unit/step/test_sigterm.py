"""SIGTERM: when the process ends, and when it goes on. Each case is a forked child."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable

from ecemb.step.transaction import Sigterm

CHILD_LIVES = 7


class Transactions:
    """What `Sigterm` asks of a process's transactions."""

    rank, next_step = 2, 5

    def __init__(self, *, is_between: bool) -> None:
        self.is_between, self.settled = is_between, 0

    def settle(self) -> None:
        self.settled += 1


class Watch:
    """What `Sigterm` asks of a failure detector."""

    def announce_failure(self, error: str = "") -> None: ...


def ends(act: Callable[[], object]) -> int:
    """How a forked child ends that runs `act`: the signal as a negative number, or CHILD_LIVES."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logging.disable()
        try:
            act()
        finally:
            os._exit(CHILD_LIVES)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_between_two_steps_the_process_ends_at_once() -> None:
    def act() -> None:
        Sigterm(Transactions(is_between=True), None).listen()
        terminate()

    assert ends(act) == -signal.SIGTERM


def test_in_a_step_it_goes_on() -> None:
    def act() -> None:
        sigterm = Sigterm(Transactions(is_between=False), None)
        sigterm.listen()
        terminate()
        sigterm.obey()

    assert ends(act) == CHILD_LIVES


def test_after_the_step_it_settles_says_so_and_ends() -> None:
    read, write = os.pipe()

    class Said(Watch):
        def announce_failure(self, error: str = "") -> None:
            os.write(write, f"{error}; settled {transactions.settled} times".encode())

    transactions = Transactions(is_between=False)

    def act() -> None:
        sigterm = Sigterm(transactions, Said())
        sigterm.listen()
        terminate()
        transactions.is_between = True
        sigterm.obey()

    assert ends(act) == -signal.SIGTERM
    os.close(write)
    assert os.read(read, 99) == b"SIGTERM, between two steps; settled 1 times"
    os.close(read)


def test_without_sigterm_the_process_goes_on() -> None:
    transactions = Transactions(is_between=True)
    sigterm = Sigterm(transactions, None)
    sigterm.obey()
    assert transactions.settled == 0


def test_a_handler_of_the_script_stays() -> None:
    def act() -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(3))
        sigterm = Sigterm(Transactions(is_between=True), None)
        sigterm.listen()
        sigterm.stop()
        terminate()

    assert ends(act) == 3


def test_a_closed_guard_leaves_sigterm_to_the_process() -> None:
    def act() -> None:
        sigterm = Sigterm(Transactions(is_between=False), None)
        sigterm.listen()
        sigterm.stop()
        terminate()

    assert ends(act) == -signal.SIGTERM


def test_a_thread_installs_no_handler() -> None:
    def act() -> None:
        sigterm = Sigterm(Transactions(is_between=False), None)
        thread = threading.Thread(target=sigterm.listen)
        thread.start()
        thread.join()
        terminate()

    assert ends(act) == -signal.SIGTERM


def test_a_forked_child_ends_at_once() -> None:
    def act() -> None:
        Sigterm(Transactions(is_between=False), None).listen()
        assert ends_inside() == -signal.SIGTERM
        os._exit(4)

    def ends_inside() -> int:
        pid = os.fork()
        if pid == 0:
            terminate()
            os._exit(CHILD_LIVES)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert ends(act) == 4
