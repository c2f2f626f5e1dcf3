"""Rows and parity that come to replacement ranks over real connections, while all ranks train."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from numpy.typing import NDArray

from ecemb.errors import PeerFailure
from ecemb.kernels.contract import get_kernels
from ecemb.memory.arena import Backing, promised
from ecemb.memory.header import Word
from ecemb.memory.rank_memory import RankMemory
from ecemb.memory.scan import Directory
from ecemb.net.error_file import Activity
from ecemb.recovery import missing
from ecemb.recovery import requester as requester_module
from ecemb.recovery.plan import RecoveryPlan, plan_recovery
from ecemb.recovery.requester import Holders, InFlight, Requester
from ecemb.recovery.server import ANSWER_WORDS, Answer, Request, Server, Snapshot
from ecemb.start import opening
from ecemb.state import rank_state
from support.fork_server import fork_server
from support.processes import DEADLINE_S, run_ranks, session_of
from support.simulation import Job, Rank, create, job_of, parity_of

LATER = ("rows", "parity")
_PUNCH_HOLE = 3
_libc = ctypes.CDLL(None)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
Words = NDArray[np.uint64]
Found = tuple[Words, dict[int, Words], dict[str, Any]]
"""A rank's row space without the rank state's record; its parity; facts of the rebuild."""


class Worker:
    """A rank of a job that has begun, some of whose ranks then lose what they hold.

    Args:
        folder: of all ranks.
        job: what is trained.
        lost: the ranks that lose it.
        timeout_s: deadline of the requests.
    """

    def __init__(self, folder: Path, job: Job, lost: tuple[int, ...], timeout_s: float = DEADLINE_S) -> None:
        self.number, self.job, self.lost = dist.get_rank(), job, lost
        self.control = opening.control_group(session_of(), notes=True)
        self.control.swap_mesh = opening.swap_mesh(session_of(), self.control, job.placement)
        layouts, kernels = job.layouts(self.number), get_kernels("reference")
        arena = create(
            Directory(folder, "job", f"host{self.number}"),
            self.number,
            layouts,
            job.geometry,
        )
        self.memory = RankMemory(arena, layouts, job.geometry, kernels)
        self.rank = Rank(job, self.memory, self.control)  # pyright: ignore[reportArgumentType]
        self.rank.start(RecoveryPlan("fresh", 0), 1)
        self.control.barrier("the start")
        headers = [
            one.header
            for rank in range(job.size)
            if rank not in lost
            for one in Directory(folder, "job", f"host{rank}").scan(timeout_s=0)
            if one.header is not None
        ]
        self.plan = plan_recovery(headers, job.placement, started=True, opened=1)
        self.control.barrier("the plan")
        self.requester = self.server = None
        self.requests = requests = opening.requests(session_of(), self.control, self.plan)
        if self.number in lost:
            requests.timeout_s = timeout_s
            _lose(self.memory)
            self.requester = Requester(self.memory, requests, self.plan, Activity())
            self.requester.start()
        else:
            self.server = Server(self.memory, requests, self.plan)
            self.server.start()

    def ensure_state(self) -> None:
        """Waits for the rank state's record, which always has bytes."""
        assert self.requester is not None
        self.requester.ensure(len(self.memory.space.named) - 1, np.zeros(1, np.int64))

    def follow(self) -> None:
        """Makes a replacement rank wait for its rows, and pause, as a guard does."""
        requester = self.requester
        assert requester is not None
        self.ensure_state()
        self.rank.position.unpack(rank_state.read(self.memory.rank_state))
        prepare, commit, capture = self.memory.prepare, self.memory.commit, self.rank.transactions.capture

        def prepared(transaction: int) -> None:
            requester.pause()
            prepare(transaction)

        def committed(transaction: int) -> None:
            commit(transaction)
            requester.resume()

        def captured(table: int, ids: NDArray[np.int64]) -> None:
            requester.ensure(table, ids)
            requester.assert_there(table, ids)
            capture(table, ids)

        for owner, name, act in (
            (self.memory, "prepare", prepared),
            (self.memory, "commit", committed),
            (self.rank.transactions, "capture", captured),
        ):
            setattr(owner, name, act)

    def found(self) -> Found:
        """What this rank has."""
        parity = self.memory.parity
        assert parity is not None
        facts = {} if self.requester is None else self.requester.stats()
        blocks = {c: words.copy() for c, (_, words) in parity.blocks.items()}
        return self.memory.space.read(0, self.memory.space.words), blocks, facts

    def close(self) -> None:
        """Ends, when all ranks do."""
        for one in (self.requester, self.server):
            if one is not None:
                one.stop(DEADLINE_S)
        self.control.barrier("the end")
        self.memory.arena.close()


def _lose(memory: RankMemory) -> None:
    """Takes all memory of rows and parity away; what is read too early is 0."""
    arena, folder = memory.arena, Directory(*_place(memory.arena.path))
    for name in LATER:
        offset, size = arena._span(name)
        assert _libc.fallocate(arena._fd, _PUNCH_HOLE, offset, -(-size // 4096) * 4096) == 0
        assert not arena.region(name).any()
        arena._opened_words()[arena._reserved_index[name]] = 0
    memory._backing = Backing(arena, LATER, promised(folder, arena.constants, LATER))


def _place(path: Path) -> tuple[Path, str, str]:
    return path.parents[3], path.parents[1].name, path.parents[0].name


def train(folder: Path, job: Job, lost: tuple[int, ...], words: int, steps: int) -> Found:
    """Trains while what is lost comes in chunks of some words."""
    small = [mock.patch.multiple(module, CHUNK_WORDS=words) for module in (missing, requester_module)]
    run, told, record = Requester._run, list[int](), RankMemory.record_lacking
    live, go_live = list[int](), RankMemory.go_live  # at the start of the job, and when it is rebuilt

    def runs_when_awaited(self: Requester) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._demands, DEADLINE_S)
        run(self)

    def goes_live(self: RankMemory) -> None:
        live.append(self.rank)
        go_live(self)

    def records(self: RankMemory, size_bytes: int) -> None:
        told.append(size_bytes)
        record(self, size_bytes)

    recording = mock.patch.multiple(RankMemory, record_lacking=records, go_live=goes_live)
    with small[0], small[1], recording, mock.patch.object(Requester, "_run", runs_when_awaited):
        worker = Worker(folder, job, lost)
        if worker.requester is not None:
            worker.follow()
        for _ in range(steps):
            worker.rank.step()
        worker.rank.drain()
        if worker.requester is not None:
            worker.requester.ensure_all()
            assert not worker.requester.is_lacking and live == [worker.number] * 2
            arena = worker.memory.arena
            assert told[0] > max(told[1:-1], default=0) and told[-1] == arena.get(Word.LACKING_BYTES) == 0
            assert all(arena.reserved(name) == len(arena.region(name)) for name in LATER)
            worker.ensure_state()
        worker.control.barrier("all is there")
        found = worker.found()
        worker.close()
        return found


def check(job: Job, found: list[Found], transaction: int) -> None:
    """Compares the rows with those of an undisturbed training, and parity with an oracle's."""
    for rank, (rows, _, _) in enumerate(found):
        expected = job.expected(rank, transaction)
        assert np.array_equal(rows[: len(expected)], expected), f"rows of rank {rank}"
    for c in range(job.size):
        members = job.placement.members(c)
        bounds = [np.cumsum([0, *job.block_words[rank]]).tolist() for rank in members]
        data = [
            found[rank][0][bounds[b][b] : bounds[b][b + 1]]
            for b, rank in enumerate(members[: job.placement.k])
        ]
        for row, words in enumerate(parity_of(data, job.placement.n)):
            assert np.array_equal(found[members[job.placement.k + row]][1][c], words), (
                f"parity {row} of class {c}"
            )


STEPS = 6


@pytest.mark.parametrize(
    ("shape", "rows", "words", "window"),
    [
        ((2, 1, 2), 40, 3, 1),
        ((3, 2, 3), 40, 1, 1),
        ((4, 2, 4), 40, 7, 1),
        ((3, 1, 4), 40, 1 << 17, 1),
        ((4, 3, 5), 40, 2, 3),
        ((3, 2, 3), 4000, 300, 1),  # parity on several pages, which chunks don't begin with
    ],
)
def test_replaced_ranks_train_with_the_rows_and_the_parity_of_all_others(
    shape: tuple[int, int, int], rows: int, words: int, window: int, tmp_path: Path, seed: int
) -> None:
    n, k, size = shape
    job = job_of(n, k, size, random.Random(seed), rows=rows)
    job = dataclasses.replace(job, window=window, aborts=frozenset({(2, 0)} if window == 1 else ()))
    lost = tuple(sorted(random.Random(seed).sample(range(size), n - k)))
    found = run_ranks(size, train, tmp_path, job, lost, words, STEPS)
    check(job, found, STEPS)
    for rank in lost:
        facts = found[rank][2]
        assert facts["rows_left"] == {} and facts["bytes_left"] == 0 and facts["bytes_per_s"] > 0
        assert facts["waited_s"] > 0


# --- answers -------------------------------------------------------------------------------------


def two(seed: int, rows: int = 40, least_words: int = 0) -> Job:
    """Two ranks, of which each holds a copy of the other's rows; rank 0 has at least `least_words`."""
    rng = random.Random(seed)
    while True:
        job = job_of(2, 1, 2, rng, rows)
        if len(job.expected(0, 0)) >= least_words:
            return job


def ask_again(folder: Path, job: Job) -> int:
    """Rank 0 is given nothing three times."""
    answers = [False] * 3
    read = Snapshot.read

    def refuses_at_first(self: Snapshot, *arguments: Any) -> bool:
        return answers.pop() if answers else read(self, *arguments)

    with mock.patch.object(Snapshot, "read", refuses_at_first):
        worker = Worker(folder, job, (0,))
        if worker.requester is not None:
            worker.requester.ensure_all()
            assert np.array_equal(worker.memory.space.read(0, len(job.expected(0, 0))), job.expected(0, 0))
        worker.close()
    return len(answers)


def test_what_is_gone_is_asked_for_again(tmp_path: Path, seed: int) -> None:
    assert run_ranks(2, ask_again, tmp_path, two(seed)) == [3, 0]


LOOKED_UP = 68  # words from the first on


def look_much_up(folder: Path, job: Job) -> None:
    """Rank 0 asks for all rows in one lookup: requests and answers are far more than its sockets hold."""
    narrow = mock.patch.multiple(requester_module, CHUNK_WORDS=16)
    with narrow, mock.patch.object(Requester, "_run", return_value=None):
        worker = Worker(folder, job, (0,))
        for connection in worker.requests._sockets.values():
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, buffer, 1 << 14)
        worker.control.barrier("sockets are small")
        if worker.requester is not None:
            requester = worker.requester
            words = np.arange(1 << 13) % (LOOKED_UP - 4)
            asked = [requester._ask(0, words, 4, lambda _: None) for _ in range(2)]
            assert [requester._holders.receive(one) is not None for one in asked] == [True, True]
            requester._holders.send_end()
        worker.close()


def test_a_lookup_of_more_rows_than_sockets_hold_comes_to_its_end(tmp_path: Path, seed: int) -> None:
    """A holder reads a request only when its last answer is on its way."""
    run_ranks(2, look_much_up, tmp_path, two(seed, rows=4000, least_words=LOOKED_UP))


def read_for_long(folder: Path, job: Job) -> list[bool]:
    """Rank 1 ends while its answer is not read yet; whether its socket is open then, and after that."""
    begun, may_end, read = threading.Event(), threading.Event(), Snapshot.read

    def reads(self: Snapshot, *arguments: Any) -> bool:
        begun.set()
        assert may_end.wait(DEADLINE_S)
        return read(self, *arguments)

    found: list[bool] = []
    with mock.patch.object(Snapshot, "read", reads):
        worker = Worker(folder, job, (0,))
        if worker.server is not None:
            assert begun.wait(DEADLINE_S)
            worker.server.end()
            found.append(worker.requests._sockets[0].fileno() >= 0)
            may_end.set()
            found.append(worker.server.stop(DEADLINE_S))
        else:
            with pytest.raises(PeerFailure):
                worker.ensure_state()
        worker.close()
    return found


def test_a_socket_lasts_as_long_as_the_thread_that_may_use_it(tmp_path: Path, seed: int) -> None:
    """The next connection, which may be another part's, would get its number."""
    assert run_ranks(2, read_for_long, tmp_path, two(seed)) == [[], [True, True]]


def end_while_it_asks(folder: Path, job: Job, is_paused: bool) -> list[bool]:
    """Rank 0 ends while an answer is not read yet, or while it waits for `resume`; a thread waits for all."""
    begun, may_end, read = threading.Event(), threading.Event(), Snapshot.read

    def reads(self: Snapshot, *arguments: Any) -> bool:
        begun.set()
        assert is_paused or may_end.wait(DEADLINE_S)
        return read(self, *arguments)

    with mock.patch.object(Snapshot, "read", reads):
        with mock.patch.object(Requester, "start"):
            worker = Worker(folder, job, (0,))
        if (requester := worker.requester) is None:
            assert worker.server is not None and begun.wait(DEADLINE_S)
            worker.control.barrier("rank 0 has asked")
            worker.control.barrier("rank 0 has ended")
            may_end.set()
            return [worker.server.stop(DEADLINE_S)]
        if is_paused:
            requester.pause()
        requester.start()
        worker.control.barrier("rank 0 has asked")
        with ThreadPoolExecutor(1) as threads:
            awaited = threads.submit(requester.ensure_all)
            with requester._changed:
                assert requester._changed.wait_for(
                    lambda: requester._demands_of_all and (requester._waits_for_resume or not is_paused),
                    DEADLINE_S,
                )
            requester.end()
            is_told = isinstance(awaited.exception(DEADLINE_S), PeerFailure)
        is_closed = all(one.fileno() < 0 for one in worker.requests._sockets.values())
        worker.control.barrier("rank 0 has ended")
        return [is_told, is_closed, requester.is_lacking]


@pytest.mark.parametrize("is_paused", [False, True])
def test_who_waits_for_rows_hears_of_the_end_of_this_rank(tmp_path: Path, seed: int, is_paused: bool) -> None:
    assert run_ranks(2, end_while_it_asks, tmp_path, two(seed), is_paused) == [[True] * 3, [True]]


Meddle = Callable[[Requester, Words | None], Words | None]


@contextmanager
def parity_passes(meddle: Meddle) -> Iterator[list[Requester]]:
    """In chunks of 8 words; answers with parity come through a function. Gives the requesters."""
    made, init, receive = list[Requester](), Requester.__init__, Holders.receive

    def noted(self: Requester, *arguments: Any) -> None:
        made.append(self)
        init(self, *arguments)

    def received(self: Holders, asked: InFlight) -> Words | None:
        words = receive(self, asked)
        return words if asked.prepared is None else meddle(made[0], words)

    with (
        mock.patch.object(Requester, "__init__", noted),
        mock.patch.object(Holders, "receive", received),
        mock.patch.object(missing, "CHUNK_WORDS", 8),
    ):
        yield made


def answer_late(folder: Path, job: Job) -> int:
    """Rank 0 commits while its first three requests for parity are under way, and the answers are wrong."""
    late = [True] * 3

    def meddle(requester: Requester, words: Words | None) -> Words | None:
        if words is not None and late:
            late.pop()
            requester.pause()
            words = ~words
            requester.resume()
        return words

    with parity_passes(meddle):
        worker = Worker(folder, job, (0,))
        if worker.requester is not None:
            worker.requester.ensure_all()
            assert np.array_equal(worker.memory.space.read(0, len(job.expected(0, 0))), job.expected(0, 0))
            parts = worker.memory.parity
            assert parts is not None
            [(_, copied)] = parts.blocks.values()
            assert np.array_equal(copied[: len(job.expected(1, 0))], job.expected(1, 0))
        worker.close()
    return len(late)


def test_parity_that_comes_after_a_commit_is_dropped_and_asked_for_again(tmp_path: Path, seed: int) -> None:
    assert run_ranks(2, answer_late, tmp_path, two(seed)) == [0, 3]


def die_or_wait(rank: int, folder: Path, job: Job, told: Connection) -> None:
    """Rank 1 dies when it is asked; rank 0 says how its wait ended."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with mock.patch.object(Snapshot, "read", side_effect=lambda *_: os._exit(1)):
        worker = Worker(folder, job, (0,))
        if worker.server is not None:
            worker.server.stop(DEADLINE_S)
    assert worker.requester is not None
    with pytest.raises(PeerFailure) as error:
        worker.ensure_state()
    told.send(str(error.value))


def test_a_rank_that_waits_for_rows_hears_of_the_death_of_a_holder(tmp_path: Path, seed: int) -> None:
    context = fork_server()
    here, there = context.Pipe(duplex=False)
    processes = [
        context.Process(target=die_or_wait, args=(rank, tmp_path, two(seed), there)) for rank in (0, 1)
    ]
    try:
        for process in processes:
            process.start()
        assert here.poll(DEADLINE_S)
        assert "rank 0 of 2 lost a peer in asking for block" in here.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
        here.close()
        there.close()


# --- requests ------------------------------------------------------------------------------------


def misbehave(folder: Path, job: Job, head: Request, offsets: list[int]) -> int:
    """Rank 0 sends a request of its own making; returns the answer."""
    with mock.patch.object(Requester, "start"):
        worker = Worker(folder, job, (0,))
    answer = np.zeros(ANSWER_WORDS, np.uint64)
    if worker.server is None:
        channels = worker.requests.channels([1])
        channels.send(1, head.words, np.array(offsets, np.int64))
        channels.expect({1: answer})
        channels.run("the test")
    else:
        worker.server.stop(DEADLINE_S)
        assert "ecemb-serve-0" not in [thread.name for thread in threading.enumerate()]
    worker.control.barrier("the end")
    return int(answer[0])


@pytest.mark.parametrize(
    ("head", "offsets"),
    [
        (Request(0, 0, 0, 1, 1 << 40), []),
        (Request(9, 0, 0, 1, 1), []),
        (Request(0, 1 << 40, 0, 1, 1), []),
        (Request(0, 0, 0, 1, 1, 1 << 40), []),
        (Request(0, 0, 0, 1, 2), [0, -1]),
    ],
)
def test_a_holder_refuses_to_read_what_it_does_not_have(
    head: Request, offsets: list[int], tmp_path: Path, seed: int
) -> None:
    """Whichever class's block 0 it is: rank 1 has block 0 of one class, and block 1 of the other."""
    answer, _ = run_ranks(2, misbehave, tmp_path, two(seed), head, offsets)
    assert answer == Answer.REFUSED


def commit_often(folder: Path, job: Job) -> bool:
    """Every answer with parity is later than the next commit of rank 0, unless that waits for it."""
    begun, ended = [0], [0]

    def meddle(_: Requester, words: Words | None) -> Words | None:
        then = ended[0]
        while begun[0] <= then:
            time.sleep(0.001)
        seen = time.monotonic()
        while ended[0] <= then and time.monotonic() - seen < 0.2:  # longer: it is waited for
            time.sleep(0.001)
        return words

    with parity_passes(meddle) as made:
        worker = Worker(folder, job, (0,))
        deadline = time.monotonic() + DEADLINE_S
        while made and made[0].is_lacking and time.monotonic() < deadline:
            begun[0] += 1
            made[0].pause()
            ended[0] += 1
            made[0].resume()
        whole = not made or not made[0].is_lacking
        worker.close()
    return whole


def test_parity_comes_although_steps_are_shorter_than_a_chunk_takes(tmp_path: Path, seed: int) -> None:
    assert run_ranks(2, commit_often, tmp_path, two(seed)) == [True, True]


def mislead(folder: Path, job: Job, answer: int | None) -> str:
    """Rank 1 answers what no holder answers, or never."""
    with mock.patch.object(Server, "start"):
        worker = Worker(folder, job, (0,), 1.0 if answer is None else DEADLINE_S)
    raised = ""
    if worker.requester is not None:
        with pytest.raises(PeerFailure) as error:
            worker.ensure_state()
        assert worker.requester.is_lacking
        with pytest.raises(PeerFailure):
            worker.requester.ensure_all()
        with pytest.raises(PeerFailure):  # a step that waits for no row ends as well
            worker.requester.pause()
        raised = str(error.value)
    elif answer is not None:
        channels = worker.requests.channels([0])
        channels.send(0, np.array([answer, 0], np.uint64))
        channels.run("the test")
    worker.control.barrier("the end")
    return raised


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "rank 0 of 2 lost a peer in asking for block"),
        (int(Answer.REFUSED), "rank 1 refuses to give rank 0"),
        (77, "rank 1 answers 77"),
    ],
)
def test_a_rank_that_waits_for_rows_hears_of_a_holder_that_gives_none(
    answer: int | None, text: str, tmp_path: Path, seed: int
) -> None:
    told, _ = run_ranks(2, mislead, tmp_path, two(seed), answer)
    assert text in told
