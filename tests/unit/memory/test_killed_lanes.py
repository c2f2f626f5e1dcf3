"""Processes that are killed at any instruction of several threads, while these change parity in lanes.

Each process is killed when the journal names a drawn row, or soon after it: which threads have stored how
much then differs from run to run, and the parity must not.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.coding.placement import Placement
from ecemb.coding.rows import WORD_BYTES, Column, TableLayout
from ecemb.kernels.cpu import Cpu
from ecemb.kernels.threads import Team
from ecemb.memory.arena import Arena
from ecemb.memory.header import WORDS, WORDS_OFFSET, Word
from ecemb.memory.journal import PARITY_HEAD_BYTES
from ecemb.memory.rank_memory import RankMemory
from support.fork_server import fork_server
from support.simulation import Job, Machines

THREADS = (2, 3, 4)
ROWS, ROW_BYTES = 3000, 1000
LEFT = 4
"""Processes that are killed in a row before the parity is compared, each with another number of threads."""


@dataclasses.dataclass
class Prepared:
    """Rank 0 of a job in which all ranks have prepared transaction 1, and what its parity has to be."""

    machines: Machines
    path: Path
    whole: Path  # a copy of its arena, before any parity has changed
    head: int  # where the head of the parity journal begins in the file
    rows: int  # of its inbox
    parity: bytes


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, run_seed: int) -> Prepared:
    root = tmp_path_factory.mktemp("job")
    tables = ((TableLayout("table", ROWS, (Column("c", "uint8", ROW_BYTES),)),),) * 3
    job = Job(Placement(3, 1, (0, 1, 2)), tables, run_seed)
    machines = Machines(root / "job", job)
    assert not machines.run(0).failures
    rng = np.random.default_rng(run_seed)
    with machines.memories() as memories:
        for memory in memories:
            memory.arm(1)
            rows = np.flatnonzero(rng.random(ROWS) < 0.9)
            memory.journal.capture(0, rows)
            column = memory.space.tables[0].columns[0]
            column[rows] = rng.integers(0, 256, (len(rows), ROW_BYTES), np.uint8)
        sent = [memory.lay_out(memory.outbox()) for memory in memories]
        for receiver, memory in enumerate(memories):
            messages = {sender: one[receiver] for sender, one in enumerate(sent) if receiver in one}
            views = memory.inbox.receive({sender: len(words) for sender, words in messages.items()})
            for sender, words in messages.items():
                views[sender][:] = words
        own = memories[0]
        own.kernels = in_threads(max(THREADS))  # which decide how many lanes have space
        own.prepare(1)
        path, head = own.arena.path, own.arena.offset("parity_journal")
        inbox = own.inbox.deltas(1)
    whole = root / "whole"
    shutil.copy(path, whole)
    with machines.memories() as memories:
        memories[0].apply(1)
        parity = memories[0].arena.region("parity").tobytes()
    return Prepared(machines, path, whole, head, sum(len(delta.offsets) for _, delta in inbox), parity)


def in_threads(threads: int) -> Cpu:
    """Kernels whose threads share even a few rows."""
    work = Cpu(threads=threads)
    work._team = Team(threads, least_bytes=1)
    return work


def opened(machines: Machines, threads: int) -> RankMemory:
    arena = Arena.attach(machines.directory(0).scan(timeout_s=0)[0])
    return RankMemory(arena, machines.job.layouts(0), machines.job.geometry, in_threads(threads))


def applies(root: Path, job: Job, threads: int) -> None:
    opened(Machines(root, job), threads).apply(1)


def kill_at(process: BaseProcess, words: NDArray[np.int64], label: NDArray[np.int64], row: int) -> int:
    """Kills a process when a lane names a row, or one after it; returns the lanes that had begun by then."""
    lines = words[1:]
    while process.is_alive() and not (label[0] == 1 and lines[:, 0].max() >= row):
        pass
    process.kill()
    process.join()
    marks, firsts, stops = lines[: int(words[0, 1]), :3].T
    return int(np.sum(marks >= firsts)) if words[0, 0] < stops.max(initial=0) else 0


@pytest.mark.slow
def test_parity_is_the_same_whenever_processes_are_killed(prepared: Prepared, seed: int) -> None:
    draw = random.Random(seed)
    job, root, path = prepared.machines.job, prepared.machines.root, prepared.path
    context, were_open = fork_server(), 0
    for _ in range(12):
        path.write_bytes(prepared.whole.read_bytes())
        file = np.memmap(path, np.uint8, "r")
        words = file[prepared.head : prepared.head + PARITY_HEAD_BYTES].view(np.int64).reshape(-1, 16)
        at = WORDS_OFFSET + WORDS.index(Word.PARITY_LABEL) * WORD_BYTES
        label, row = file[at : at + WORD_BYTES].view(np.int64), 0
        for _ in range(draw.randint(1, LEFT)):
            process = context.Process(target=applies, args=(root, job, draw.choice(THREADS)))
            process.start()
            row = draw.randint(row, prepared.rows - 1)
            were_open += kill_at(process, words, label, row) > 1
        memory = opened(prepared.machines, draw.choice((1, *THREADS)))
        memory.apply(1)
        assert memory.arena.region("parity").tobytes() == prepared.parity
        memory.arena.close()
    assert were_open, "no process was killed in lanes"
