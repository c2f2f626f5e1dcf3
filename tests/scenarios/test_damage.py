"""Bytes that no ecemb wrote: in an arena's header, in its regions, in messages, in the store.

Whatever they are, what reads them raises an error of ecemb's own or goes on with values that fit; it never
writes outside of what it was given, waits for nothing, and asks for no absurd amount of memory.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ecemb.coding.parity import Delta, size_words, unpack
from ecemb.coding.placement import WHOLE
from ecemb.errors import (
    ArenaDamaged,
    ArenaError,
    ArenaIncompatible,
    EcembError,
    InconsistentArenas,
    NotEnoughSpace,
    PeerFailure,
    RecoveryError,
    RendezvousError,
)
from ecemb.kernels import contract
from ecemb.memory import header as headers
from ecemb.memory.arena import Arena
from ecemb.memory.header import CONSTANTS_OFFSET, WORDS, WORDS_OFFSET, Constants, State
from ecemb.memory.rank_memory import RankMemory
from ecemb.memory.scan import Directory
from ecemb.net import roster
from ecemb.net.assignment import Roster, Worker, assign
from ecemb.net.collectives import Transport
from ecemb.recovery import execute, scrub, state_slices
from ecemb.state import rank_state, serialize
from ecemb.state.replicated import ReplicatedState
from support.arena_holders import constants, create
from support.arena_reports import report
from support.simulation import Job, Machines, Wires, deliver, job_of, message_of

NONSENSE = (-1, 0, 1, 2, 7, 255, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with one thing wrong with it."""
    out = bytearray(data)
    at = rng.randrange(len(out))
    kind = rng.randrange(5)
    if kind == 0:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        out[at : at + 8] = rng.randbytes(8)
    elif kind == 2:
        run = rng.randrange(1, 4096)
        out[at : at + run] = bytes([rng.choice([0, 255])]) * run
    elif kind == 3:
        word = at // 8 * 8
        out[word : word + 8] = struct.pack("<q", rng.choice(NONSENSE))
    else:
        del out[at or 1 :]  # not all of it: it may be mutated once more
    return bytes(out)


# --- headers ------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> bytes:
    """The first pages of an arena."""
    arena = create(Directory(tmp_path, "ctr", "a"))
    arena.join(5, 6)
    arena.set("prepared", 3)
    arena.set("committed", 3)
    arena.set("state", State.LIVE)
    size = CONSTANTS_OFFSET + len(arena.constants.encode())
    arena.close()
    with arena.path.open("rb") as opened:
        return opened.read(size)


def test_a_damaged_header_is_told_or_is_one_that_could_be(file: bytes, seed: int) -> None:
    rng = random.Random(seed)
    good, _ = headers.parse(file, lambda size: file[CONSTANTS_OFFSET:][:size])
    told = 0
    for _ in range(2000):
        data = mutated(mutated(file, rng), rng) if rng.randrange(2) else mutated(file, rng)
        head, rest = data[:CONSTANTS_OFFSET], data[CONSTANTS_OFFSET:]
        try:
            found, _ = headers.parse(head, lambda size: rest[:size])  # noqa: B023
            header = headers.snapshot(found, headers.words_of(head))
        except (ArenaDamaged, ArenaIncompatible):
            told += 1
        else:
            assert found == good  # they are under a checksum
            assert header.state in State
    assert 500 < told < 2000


def test_a_header_is_torn_only_if_nothing_was_ever_in_it(file: bytes) -> None:
    for damage in (slice(0, 8), slice(WORDS_OFFSET, WORDS_OFFSET + 8)):  # the magic; the state
        data = bytearray(file)
        data[damage] = bytes(8)
        head, rest = bytes(data[:CONSTANTS_OFFSET]), bytes(data[CONSTANTS_OFFSET:])
        assert not headers.torn(head)
        with pytest.raises(ArenaDamaged, match="not an arena|state is 0"):
            headers.snapshot(headers.parse(head, lambda _: rest)[0], headers.words_of(head))  # noqa: B023
    assert headers.torn(bytes(CONSTANTS_OFFSET))


def replaced(tree: Any, rng: random.Random) -> Any:
    """A JSON value with one of its parts replaced by another value."""
    values = [None, True, "", "x", "\x00", -1, 0, 2, 2**70, 1.5, float("nan"), [], [[]], {}, {"rank": 0}]
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(list(tree))
        if rng.random() < 0.1:
            return {k: v for k, v in tree.items() if k != key}
        if rng.random() < 0.1:
            return {**tree, "more": 1}
        return {**tree, key: replaced(tree[key], rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        at = rng.randrange(len(tree))
        return [*tree[:at], replaced(tree[at], rng), *tree[at + 1 :]]
    return rng.choice(values)


def test_constants_of_nonsense_are_damage(seed: int) -> None:
    rng = random.Random(seed)
    tree = json.loads(constants().encode())
    for _ in range(2000):
        with contextlib.suppress(ArenaDamaged):
            Constants.decode(json.dumps(replaced(tree, rng)).encode())
    for text in ("", "{", "[" * 100_000, '{"constants": ' * 50_000, "\ud800", "NaN"):
        with pytest.raises(ArenaDamaged):
            Constants.decode(text.encode("utf-8", "surrogatepass"))


def test_a_world_of_absurd_size_costs_nothing() -> None:
    with pytest.raises(ValueError, match="domains"):
        constants(world_size=2**60)


# --- the store ----------------------------------------------------------------------------------


def test_a_roster_of_nonsense_is_a_rendezvous_error(seed: int) -> None:
    """Whatever is read is a roster, or a named error; counts are not believed before the bytes are there."""
    rng = random.Random(seed)
    reports = (report(0, "a", ("a", "b")), report(1, "b", ("a", "b")))
    workers = (Worker("a", "00ff", 12, ("10.0.0.1", "fe80::1"), 4000), Worker("b", "00fe"))
    good = roster.write_roster(Roster(1, 2, "x", False, workers, reports, "ab" * 16, 3))
    domains = roster.write_domains(("a", "b"))

    def tables(digest: str) -> tuple[str, ...]:
        if digest != roster.digest(("a", "b")):
            raise RendezvousError("there is no such table")
        return ("a", "b")

    read = 0
    for _ in range(3000):
        data = mutated(good, rng)
        try:
            roster.read_roster(data, tables)
        except RendezvousError:
            continue
        read += 1
    for _ in range(3000):
        with contextlib.suppress(RendezvousError):
            roster.read_domains(mutated(domains, rng))
    assert read < 2000
    for size in range(len(good)):
        with pytest.raises(RendezvousError, match="the store holds bytes"):
            roster.read_roster(good[:size], tables)
    for size in range(len(domains)):
        with pytest.raises(RendezvousError, match="the store holds bytes"):
            roster.read_domains(domains[:size])
    for text in (b"", b"\xff", b"[]", b'{"workers": 3}', good + b"x", good[:-4] + b"\xff" * 4):
        with pytest.raises(RendezvousError, match="the store holds bytes"):
            roster.read_roster(text, tables)
        with pytest.raises(RendezvousError):
            roster.read_domains(text)


def test_one_arena_in_two_files_gives_nobody_a_seat() -> None:
    """Copied with its folder, under another host's name: two workers would be the same rank."""
    reports = [report(0, "a", ("a", "b")), report(0, "copy", ("a", "b")), report(1, "b", ("a", "b"))]
    workers = [Worker("a", ""), Worker("b", "")]
    with pytest.raises(InconsistentArenas, match="/a/0 on a and /copy/0 on copy are copies of one arena"):
        assign(workers, reports)


# --- messages -----------------------------------------------------------------------------------


def message(rng: random.Random) -> NDArray[np.uint64]:
    deltas = []
    for _ in range(rng.randrange(1, 4)):
        m, width = rng.randrange(4), rng.randrange(1, 3)
        offsets = np.arange(m, dtype=np.int64) * width
        deltas.append(Delta(rng.randrange(2), offsets, np.ones((m, width), np.uint64)))
    return message_of(*deltas)


def spoiled(words: NDArray[np.uint64], rng: random.Random) -> NDArray[np.uint64]:
    out = words.copy()
    for _ in range(rng.randrange(1, 3)):
        out.view(np.int64)[rng.randrange(len(out))] = rng.choice([*NONSENSE, *range(-6, 7)])
    return out[: rng.randrange(len(out) + 1)] if rng.randrange(3) == 0 else out


def test_a_message_of_nonsense_is_refused_or_whole(seed: int) -> None:
    rng = random.Random(seed)
    refused = 0
    for _ in range(3000):
        words = spoiled(message(rng), rng)
        try:
            deltas = list(unpack(words))
        except InconsistentArenas:
            refused += 1
            continue
        assert sum(size_words(*delta.words.shape) for delta in deltas) == len(words)
    assert refused > 300


class Job4:
    """Four ranks after a few steps, every arena's bytes kept aside."""

    def __init__(self, root: Path, seed: int) -> None:
        self.job: Job = job_of(4, 2, 4, random.Random(seed))
        self.machines = Machines(root, self.job)
        assert not self.machines.run(2).failures


@pytest.fixture
def memories(tmp_path: Path, seed: int) -> Iterator[list[RankMemory]]:
    four = Job4(tmp_path / "job", seed)
    with four.machines.memories("cpu") as opened:
        yield opened


def state_of(memory: RankMemory, *regions: str) -> dict[str, bytes]:
    arena = memory.arena
    return {name: arena.region(name)[: arena.reserved(name)].tobytes() for name in regions}


def put_back(memory: RankMemory, regions: dict[str, bytes], words: dict[str, int]) -> None:
    for name, content in regions.items():
        memory.arena.region(name)[: len(content)] = np.frombuffer(content, np.uint8)
    for name, value in words.items():
        memory.arena.set(name, value)


def test_a_message_from_a_peer_is_refused_before_it_can_be_prepared(
    memories: list[RankMemory], seed: int
) -> None:
    rng = random.Random(seed)
    memory = memories[0]
    for other in memories:
        other.journal.arm(3)
        for table, layout in enumerate(layout.layout for layout in other.space.tables):
            other.journal.capture(table, np.arange(layout.rows, dtype=np.int64))
    parts = {other.rank: other.lay_out(other.outbox())[0] for other in memories[1:]}
    before = state_of(memory, "rows", "parity")
    refused = 0
    for _ in range(300):
        deliver(memory, {i: spoiled(part, rng) if rng.randrange(2) else part for i, part in parts.items()})
        try:
            memory.prepare(3)
        except InconsistentArenas:
            refused += 1
            assert memory.arena.get("prepared") == 2
        else:
            memory.apply(3)  # it fits, so that it can be applied
            put_back(memory, before, {"prepared": 2, "parity_label": 2})
        assert state_of(memory, "rows", "parity") == before
    assert refused > 30


@pytest.mark.parametrize("sizes", [[2**50, 0, 0], [2**63 - 1] * 3])
def test_a_size_of_petabytes_is_no_space(memories: list[RankMemory], sizes: list[int]) -> None:
    with pytest.raises(NotEnoughSpace, match="has a capacity of"):
        memories[0].inbox.receive(dict(enumerate(sizes, 1)))


class Liar(Wires):
    """A network in which every announced length is the same nonsense."""

    def __init__(self, size: int, announced: int) -> None:
        self.rank, self.world_size, self.announced = 0, size, announced

    def all_to_all(self, send: Any, what: str) -> Any:
        return np.full_like(send, self.announced)

    def expect(self, out: NDArray[np.uint64], source: int, what: str) -> Callable[[], None]:
        out.view(np.int64)[:] = self.announced
        return lambda: None


@pytest.mark.parametrize("announced", [-1, 2**50, 2**63 - 1, -(2**63)])
def test_announced_lengths_of_nonsense_cost_no_memory(memories: list[RankMemory], announced: int) -> None:
    memory, liar = memories[0], Liar(4, announced)
    with pytest.raises(InconsistentArenas, match="announce messages of"):
        scrub.collect_parity(memory, liar, 0, 8, "verifying")
    with pytest.raises(PeerFailure, match="announce .* bytes in comparing"):
        Transport.gather(liar, b"x", "comparing")
    plan = execute.RecoveryPlan("memory", 2, (1, 2, 3), (0,), donor=1)
    for sizes in ((64, announced), (announced, 64)):
        told = [b"[]", *[json.dumps(sizes).encode()] * 3]
        with (
            mock.patch.object(
                liar, "gather", lambda data, what, told=told: told if "comp" in what else [b""]
            ),
            pytest.raises((NotEnoughSpace, ArenaError, InconsistentArenas)),
        ):
            state_slices.copy_lost(memory, liar, plan, *state_slices.compare(memory, liar, plan))


# --- what lies in an arena ----------------------------------------------------------------------


def damage(memory: RankMemory, region: str, word: str | None, rng: random.Random) -> None:
    content = memory.arena.region(region)[: memory.arena.reserved(region)]
    used = memory.arena.get(word) if word else len(content)
    if word and rng.randrange(4) == 0:
        memory.arena.set(word, rng.choice([*NONSENSE, used - 8, used + 8, used - 1]))
    elif used >= 8:
        words = content[: used // 8 * 8].view(np.int64)
        for _ in range(rng.randrange(1, 4)):
            words[rng.randrange(min(len(words), 24))] = rng.choice([*NONSENSE, *range(-6, 7)])


def test_a_damaged_journal_or_inbox_stops_recovery_and_writes_nowhere_else(
    memories: list[RankMemory], seed: int
) -> None:
    rng = random.Random(seed)
    memory = memories[rng.randrange(4)]
    words = {name: memory.arena.get(name) for name in WORDS if name not in ("state", "pid", "pid_start")}
    words |= {"committed": 1, "parity_label": 1}  # it has prepared transaction 2, and nothing more
    names = ["rows", "parity", "row_journal", "inbox", "parity_journal", "slot0", "slot1"]
    before = state_of(memory, *names)
    others = {"row_journal": "parity", "inbox": "rows"}
    stopped = 0
    for turn in range(240):
        put_back(memory, before, words)
        region, word, transaction = (
            ("row_journal", "rows_bytes", 1) if turn % 2 else ("inbox", "inbox_bytes", 2)
        )
        damage(memory, region, word, rng)
        try:
            memory.roll_to(transaction)
        except (ArenaError, RecoveryError):
            stopped += 1
            assert state_of(memory, "rows", "parity") == {name: before[name] for name in ("rows", "parity")}
        untouched = others[region]
        assert state_of(memory, untouched)[untouched] == before[untouched]
    assert stopped > 20


@pytest.mark.parametrize("whole", [True, False])
def test_damaged_replicated_state_is_told(memories: list[RankMemory], seed: int, whole: bool) -> None:
    """In a slot with all of it, when it is loaded; in one with slices, when ranks compare theirs."""
    rng = random.Random(seed)
    memory = memories[0]
    assert not memory.slots.share.is_whole
    if whole:
        memory.slots.share = WHOLE
    model = torch.nn.Linear(100, 1)
    replicated = ReplicatedState(model, [torch.optim.Adam(model.parameters())], [])

    def read() -> None:
        if whole:
            replicated.load(memory.slots, 3)
        else:
            state_slices.described(memory, 3)

    replicated.save(memory.slots, 3)
    slot = next(name for name in ("slot0", "slot1") if memory.arena.get(f"{name}_label") == 3)
    before, size = state_of(memory, slot), memory.arena.get(f"{slot}_bytes")
    read()
    told = 0
    for _ in range(100):
        put_back(memory, before, {f"{slot}_bytes": size})
        damage(memory, slot, f"{slot}_bytes", rng)
        try:
            read()
        except EcembError:
            told += 1
    assert told > 10


def test_damaged_rank_state_is_told(seed: int) -> None:
    rng = random.Random(seed)
    state = rank_state.RankState([], dict, lambda _: None)
    good = state.pack()
    record = np.zeros(rank_state.room(len(good)), np.uint8)
    rank_state.write_(record, good)
    assert rank_state.read(record) == good
    for _ in range(200):
        at = rng.randrange(8 + len(good))
        record[at] ^= 1 << rng.randrange(8)
        with pytest.raises(InconsistentArenas, match="doesn't fit its checksum"):
            rank_state.read(record)
        rank_state.write_(record, good)
    told = 0
    for _ in range(300):
        try:
            serialize.load(mutated(good, rng))
        except InconsistentArenas:
            told += 1
    assert told > 30


@pytest.mark.parametrize("word", ["rows_bytes", "inbox_bytes", "slot0_bytes", "slot1_bytes"])
@pytest.mark.parametrize("value", [-1, 2**40, 2**63 - 1, -(2**63)])
def test_a_word_that_claims_more_than_is_reserved_is_never_followed(
    memories: list[RankMemory], word: str, value: int
) -> None:
    """Bytes past the reserved ones may have no memory behind them: touching them is SIGBUS."""
    memory = memories[0]
    memory.arena.set(word, value)
    acts: dict[str, Callable[[], object]] = {
        "rows_bytes": memory.journal.undo,
        "inbox_bytes": lambda: memory.inbox.deltas(memory.arena.get("inbox_label")),
        "slot0_bytes": lambda: memory.slots.read(2),
        "slot1_bytes": lambda: memory.slots.read(1),
    }
    with pytest.raises(ArenaDamaged, match=f"claims that {value} bytes .* arenas rm .*rebuilt"):
        acts[word]()


def test_kernels_write_nowhere_for_offsets_that_overflow() -> None:
    words = np.zeros(3, np.uint64)
    offsets = np.array([2**63 - 1], np.int64)
    for name in ("cpu", "reference"):
        with pytest.raises(EcembError, match="not within"):
            contract.get_kernels(name).mul_add_rows_(words, offsets, np.ones((1, 4), np.uint64), 1)


def test_parity_and_arena_agree_on_what_is_refused(memories: list[RankMemory]) -> None:
    parity = memories[0].parity
    assert parity is not None
    for block in (-1, 2, 2**40):
        wrong = Delta(block, np.zeros(0, np.int64), np.zeros((0, 1), np.uint64))
        with pytest.raises(InconsistentArenas, match="does not keep"):
            parity.check([(1, wrong)])


def test_the_arena_names_its_way_out(tmp_path: Path) -> None:
    arena: Arena = create(Directory(tmp_path, "ctr", "a"))
    assert f"arenas rm {arena.path}" in arena.way_out
