"""Who dies or hangs is noticed by all ranks of a real job, whatever collective they are in."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ecemb
from bench.harness.ports import ReservedPort
from ecemb.net.watch import EXIT_UNDECIDED
from support import agents
from support.arena_holders import Holder, holding

DEADLINE_S = 600.0
SILENCE_S = 12.0  # a worker may stand still for less, on a busy machine
RANKS = 2


# --- collectives that tell only some ranks of a death ----------------------------------------------


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1000))


def broadcast() -> None:
    dist.broadcast(torch.ones(1000), src=2)


def all_to_all() -> None:
    dist.all_to_all_single(torch.empty(1000), torch.ones(1000))


class Telling(logging.Handler):
    def __init__(self, pipe: Connection) -> None:
        super().__init__(logging.WARNING)
        self.pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self.pipe.send(record.getMessage())


def work(pipe: Connection, index: int, size: int, port: int, folder: Path, act: Callable[[], None]) -> None:
    os.environ.update(RANK=str(index), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    logging.getLogger("ecemb").addHandler(Telling(pipe))
    ecemb.init_process_group("gloo", job="detection", arena_dir=folder, timeout=timedelta(seconds=DEADLINE_S))
    pipe.send("ready")
    pipe.recv()
    act()
    pipe.recv()


@pytest.mark.parametrize("act", [all_reduce, broadcast, all_to_all])
def test_a_death_ends_all_that_wait_in_a_collective(act: Callable[[], None], tmp_path: Path) -> None:
    with ExitStack() as stack:
        port = stack.enter_context(ReservedPort()).number
        holders = [stack.enter_context(holding(work, index, 5, port, tmp_path, act)) for index in range(5)]
        assert [holder.told() for holder in holders] == ["ready"] * 5
        victim = holders.pop(2)
        for holder in holders:
            holder.pipe.send("go")
        time.sleep(0.3)
        victim.process.kill()
        for holder in holders:
            _await_notice(holder)
        for holder in holders:
            assert holder.ended() in (1, EXIT_UNDECIDED)


def _await_notice(holder: Holder) -> None:
    """Waits until a rank notices: it says so, or its main thread was faster and raised.

    It may hear first of another survivor, whose collective was faster still to fail.
    """
    assert wait([holder.pipe, holder.process.sentinel], DEADLINE_S)
    try:
        text = holder.pipe.recv()
    except EOFError:
        return
    first = r"(2 \(host .*\) died|[0134] \(host .*\) ended by an exception \(see its log\))"
    assert re.match(
        rf"PeerFailure: rank {first}; this process ends as well|rank {first}; this rank ends as well", text
    ), text


# --- under torchrun -------------------------------------------------------------------------------


class Job:
    """A training under torchrun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start = 0
        self.agent = self.launch()

    def launch(self) -> agents.Agent:
        """Workers are commands: those that are forked end with their agent, whatever they notice."""
        options = [f"--nproc-per-node={RANKS}", "--max-restarts=1", "--monitor-interval=0.05", "--no-python"]
        script = str(Path(__file__).with_name("detection_worker.py"))
        words = [*options, sys.executable, script, str(self.folder), str(SILENCE_S)]
        variables = {"DETECTION_FIRST": str(self.start)}
        return agents.start("torch.distributed.run", words, self.folder / "log", variables)

    def wait(self, what: str, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, f"{what} in vain:\n{self.log()}"
            time.sleep(0.01)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def pids(self) -> dict[int, int]:
        """Rank -> pid, once all ranks wait in a step for rank 0."""
        self.wait("waited for the third step", lambda: self._steps() >= RANKS)
        return {
            rank: int((self.folder / f"{self.start}.{rank}").read_text().split()[0]) for rank in range(RANKS)
        }

    def _steps(self) -> int:
        """How many ranks are at where this start waits."""
        try:
            texts = [(self.folder / f"{self.start}.{rank}").read_text().split() for rank in range(RANKS)]
            return sum(int(step) == 3 * (self.start + 1) for _, step in texts)
        except (FileNotFoundError, ValueError):
            return 0

    def close(self) -> None:
        self.agent.kill()
        self.agent.wait()
        for path in self.folder.glob("[0-9].[0-9]"):
            pid = int(path.read_text().split()[0])
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def job(folder: Path) -> Iterator[Job]:
    one = Job(folder)
    try:
        yield one
    finally:
        one.close()


def alive(pid: int) -> bool:
    """Whether this is still a worker of the job."""
    try:
        return b"detection_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_slow_ranks_are_awaited_hung_ones_are_not_and_orphans_end(tmp_path: Path) -> None:
    with job(tmp_path) as one:
        pids = one.pids()
        assert one.log().count("was slow") == 1
        assert "PeerFailure" not in one.log()

        os.kill(pids[1], signal.SIGSTOP)
        noticed = re.compile(r"(CRITICAL|WARNING) (.* was silent .*)\n")
        one.wait("waited for one to notice", lambda: noticed.search(one.log()))
        for level, text in noticed.findall(one.log()):
            silence = re.search(rf"rank 1 \(host .*, pid {pids[1]}\) was silent for ([\d.]+) s;", text)
            assert level == "CRITICAL" and silence and float(silence[1]) >= SILENCE_S
        one.wait("waited for it to end", lambda: not alive(pids[0]))
        os.kill(pids[1], signal.SIGKILL)  # torchrun gives it 30 s

        one.start = 1
        pids = one.pids()
        one.agent.kill()
        one.wait("waited for orphans to end", lambda: not any(map(alive, pids.values())))

        one.agent.wait()
        one.start = 2
        one.agent = one.launch()
        one.pids()
        (tmp_path / "go.2").touch()
        assert one.agent.wait(DEADLINE_S) == 0, one.log()
        assert len(list(tmp_path.glob("done.*"))) == RANKS
