"""Steps while a replacement rank still lacks rows and parity (docs/protocol.md, 9), searched.

The fourth part of the model. A replacement rank trains with one bit for each of its rows and
parity words; it asks k holders of a stripe for what it lacks, as of its last committed transaction, while
they train on. Here a rank has one row in each of its k blocks, and step t changes the row of block t mod k on
every rank: such a rank needs one at once, and gets the other behind it. Values are sets of the transactions
that they contain; parity is a tuple of the k values that it adds up, so a delta that is missing, or that came
twice, shows.

Serving is three transitions for each holder: where it looks (row or journal), the copy, and the second look.
A crash ends all processes, with any memory that the budget allows, and the start after it is one transition.
What the model has no word for: pipelines (no overlap of transactions
while a rank is rebuilt), rates, and windows, in which a transaction changes more rows and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

from ecemb.coding.placement import Placement

from .rank import Broken
from .rules import ALL, Rules
from .transition import Next

Value = int
GARBAGE = -1
"""What was never stored, or was added up from values of different transactions."""
SPECIAL = -1
"""Number of the record that an aborted step changes all the same: it is written where a row's record was."""
ROW, WORD = "row", "word"
ASKED, LOOKED, COPIED, GIVEN = range(4)


@dataclasses.dataclass(frozen=True)
class Background:
    """What is searched: a job one of whose starts has replaced ranks, and how much may happen to it.

    Attributes:
        n: blocks in a stripe.
        k: data blocks in a stripe.
        size: ranks.
        replaced: ranks that begin without a row.
        steps: that are trained.
        flights: requests of a rank that are under way at most.
        crashes: how often the job's processes die.
        losses: memories that go, in all.
        aborts: votes to abort, in all.
    """

    n: int = 3
    k: int = 2
    size: int = 3
    replaced: tuple[int, ...] = (0,)
    steps: int = 1
    flights: int = 1
    crashes: int = 0
    losses: int = 0
    aborts: int = 0

    def __str__(self) -> str:
        names = ("crashes", "losses", "aborts")
        counts = [f"{getattr(self, name)} {name}" for name in names if getattr(self, name)]
        job = f"N={self.size} n={self.n} k={self.k}, {self.steps} steps, {len(self.replaced)} rebuilt"
        return ", ".join([job, f"{self.flights} requests at a time", *counts])


class Piece(NamedTuple):
    """One holder's part of a request: where it looked, what it saw there, and what it copied."""

    rank: int
    block: int
    stage: int = ASKED
    at: int = GARBAGE  # position in the journal; GARBAGE: the row, or the word, itself
    seen: tuple[int, int, bool] = (0, 0, False)  # label and attempt of the journal; whether it has the row
    value: Any = GARBAGE


class Flight(NamedTuple):
    """A request for a row or a word as of a transaction; `stored`: its bytes are in, or its bit."""

    kind: str
    index: int
    of: int
    pieces: tuple[Piece, ...]
    stored: bool = False


class Rank(NamedTuple):
    """A rank's arena, its thread, and its requests. Journals and inboxes have the label of a transaction."""

    rows: tuple[Value, ...]
    parity: tuple[Any, ...]
    live: bool
    row_bits: tuple[bool, ...]
    word_bits: tuple[bool, ...]
    prepared: int = 0
    committed: int = 0
    label: int = 0
    attempt: int = 0
    entries: tuple[tuple[int, Value], ...] = ()
    inbox: tuple[int, tuple[Any, ...]] = (0, ())
    saved: tuple[int, tuple[Any, ...]] = (0, ())
    sent: tuple[int, tuple[Value, ...]] = (0, ())
    t: int = 0
    pc: str = "arm"
    said: int = 0  # the last transaction of which it has said how it ended
    flights: tuple[Flight, ...] = ()


class World(NamedTuple):
    """All ranks, the transactions that were aborted, the budgets, and the last committed transaction."""

    ranks: tuple[Rank, ...]
    aborted: tuple[int, ...] = ()
    crashes: int = 0
    losses: int = 0
    aborts: int = 0
    top: int = 0
    over: bool = False


class BackgroundModel:
    """The steps of a configuration, under some rules.

    Args:
        config: the job, and what may happen to it.
        rules: those that are on.
    """

    def __init__(self, config: Background, rules: Rules = ALL) -> None:
        self.config, self.rules = config, rules
        self.placement = Placement.ranks(config.n, config.k, config.size)

    def initial(self) -> World:
        """All ranks stand on transaction 0; replacement ranks have nothing of it."""
        c = self.config
        ranks = tuple(self._rank(i, 0, (), is_new=i in c.replaced) for i in range(c.size))
        return World(ranks, (), c.crashes, c.losses, c.aborts)

    def successors(self, world: World) -> list[Next]:
        """All that may happen next."""
        if world.over:
            return []
        found: list[Next] = []
        for i, rank in enumerate(world.ranks):
            for text, move in self._moves(world, i, rank):
                try:
                    found.append(Next(f"rank {i} {text}", move()))
                except Broken as broken:
                    found.append(Next(f"rank {i} {text}", world, str(broken)))
        if not found and any(rank.pc != "done" for rank in world.ranks):
            return [Next("", world, "stuck: some rank waits, and no rank can move")]
        if world.crashes:
            found += self._crashes(world)
        return found

    # --- what should be ---

    def _row(self, block: int, t: int, aborted: tuple[int, ...]) -> Value:
        changed = (s for s in range(1, t + 1) if s % self.config.k == block and s not in aborted)
        return functools.reduce(lambda value, s: value ^ (1 << s), changed, 0)

    def _word(self, t: int, aborted: tuple[int, ...]) -> tuple[Value, ...]:
        return tuple(self._row(block, t, aborted) for block in range(self.config.k))

    def _rank(self, i: int, t: int, aborted: tuple[int, ...], *, is_new: bool) -> Rank:
        k, r = self.config.k, self.placement.r
        word = GARBAGE if is_new else self._word(t, aborted)
        rows = (GARBAGE,) * k if is_new else tuple(self._row(block, t, aborted) for block in range(k))
        bits = (not is_new,) * k, (not is_new,) * r
        pc = "done" if t == self.config.steps else "arm"
        return Rank(rows, (word,) * r, not is_new, *bits, prepared=t, committed=t, t=t, said=t, pc=pc)

    # --- moves ---

    def _moves(self, world: World, i: int, rank: Rank) -> Iterator[tuple[str, Any]]:
        if rank.pc != "done":
            yield from getattr(self, f"do_{rank.pc}")(world, i, rank)
        for at, flight in enumerate(rank.flights):
            yield from self._flies(world, i, rank, at, flight)
        if len(rank.flights) < self.config.flights and not rank.live:
            yield from self._asks(world, i, rank)
        if not rank.live and (all((*rank.row_bits, *rank.word_bits)) or not self.rules.live_when_whole):
            yield "is LIVE", lambda: _put(world, i, rank._replace(live=True, flights=()))

    def do_arm(self, world: World, i: int, rank: Rank) -> Iterator[tuple[str, Any]]:
        """Between two steps."""
        t = rank.t + 1
        armed = rank._replace(t=t, label=t, attempt=rank.attempt + 1, entries=(), pc="capture")
        yield f"arms the journal for {t}", lambda: _put(world, i, armed)

    def do_capture(self, world: World, i: int, rank: Rank) -> Iterator[tuple[str, Any]]:
        """Waits for the row that the step looks up, and saves it."""
        block = rank.t % self.config.k
        if not rank.row_bits[block] and self.rules.ensured_before_lookup:
            return
        entries = (*rank.entries, (block, rank.rows[block]))
        yield (
            f"looks up and saves row {block}",
            lambda: _put(world, i, rank._replace(entries=entries, pc="change")),
        )

    def do_change(self, world: World, i: int, rank: Rank) -> Iterator[tuple[str, Any]]:
        """Changes it, if it is what it should be, and says how the step ended."""

        def change() -> World:
            block = rank.t % self.config.k
            if rank.rows[block] != self._row(block, rank.t - 1, world.aborted):
                raise Broken(f"wrong row: step {rank.t} computes with {rank.rows[block]} in row {block}")
            rows = _with(rank.rows, block, rank.rows[block] ^ 1 << rank.t)
            return _put(world, i, rank._replace(rows=rows, said=rank.t, pc="verdict"))

        yield "changes it, and says FINE", change
        if world.aborts:
            aborted = tuple(sorted({*world.aborted, rank.t}))
            yield (
                "changes it, and votes to abort",
                lambda: change()._replace(aborts=world.aborts - 1, aborted=aborted),
            )

    def do_verdict(self, world: World, i: int, rank: Rank) -> Iterator[tuple[str, Any]]:
        """Waits for the status of all; then takes the step back, or lays out what it changed."""
        if any(other.said < rank.t for other in world.ranks):
            return
        if rank.t not in world.aborted:
            yield "sends its deltas", lambda: _put(world, i, self._sent(rank))
            return
        undone = rank._replace(rows=_undone(rank.rows, rank.entries), pc="rearm")
        yield "undoes the step", lambda: _put(world, i, undone)

    def do_rearm(self, world: World, i: int, rank: Rank) -> Iterator[tuple[str, Any]]:
        """The empty step's journal, with the same label, and its deltas."""
        empty = rank._replace(attempt=rank.attempt + 1, entries=((SPECIAL, GARBAGE),))
        yield (
            "arms the journal for the empty step, and sends its deltas",
            lambda: _put(world, i, self._sent(empty)),
        )

    def _sent(self, rank: Rank) -> Rank:
        old = dict(rank.entries)
        deltas = tuple(old.get(block, row) ^ row for block, row in enumerate(rank.rows))
        return rank._replace(sent=(rank.t, deltas), pc="receive")

    def do_receive(self, world: World, i: int, rank: Rank) -> Iterator[tuple[str, Any]]:
        """Waits for all deltas. Only requests of a replacement rank come between that and `prepared`."""
        if any(world.ranks[source].sent[0] != rank.t for source in self.placement.senders(i)):
            return
        words = [self._deltas(world, c) for c, _ in self.placement.kept(i)]
        if not self.rules.inbox_keeps_all:
            words = [word if has else None for word, has in zip(words, rank.word_bits, strict=True)]
        full = rank._replace(inbox=(rank.t, tuple(words)), pc="prepare")
        if rank.live:
            yield from self.do_prepare(world, i, full)
        else:
            yield "has all deltas", lambda: _put(world, i, full)

    def do_prepare(self, world: World, i: int, rank: Rank) -> Iterator[tuple[str, Any]]:
        """Drops requests for parity that are under way, and stores `prepared`."""
        flights = rank.flights
        if self.rules.dropped_before_prepared:
            flights = tuple(flight for flight in flights if flight.kind == ROW)
        yield (
            f"prepared := {rank.t}",
            lambda: _put(world, i, rank._replace(prepared=rank.t, flights=flights, pc="vote")),
        )

    def do_vote(self, world: World, i: int, rank: Rank) -> Iterator[tuple[str, Any]]:
        """Waits until all have prepared; saves the old parity, and adds the deltas to the words it has."""
        if any(other.prepared < rank.t for other in world.ranks):
            return
        parity = tuple(
            _added(word, deltas) if has else word
            for word, deltas, has in zip(rank.parity, rank.inbox[1], rank.word_bits, strict=True)
        )
        new = rank._replace(saved=(rank.t, rank.parity), parity=parity, pc="commit")
        yield "changes its parity", lambda: _put(world, i, new)

    def do_commit(self, world: World, i: int, rank: Rank) -> Iterator[tuple[str, Any]]:
        """The step is over."""
        new = rank._replace(committed=rank.t, pc="done" if rank.t == self.config.steps else "arm")
        yield f"committed := {rank.t}", lambda: _put(world, i, new)._replace(top=max(world.top, rank.t))

    # --- requests ---

    def _asks(self, world: World, i: int, rank: Rank) -> Iterator[tuple[str, Any]]:
        lacking = [(ROW, b) for b, has in enumerate(rank.row_bits) if not has]
        if rank.prepared == rank.committed or not self.rules.asked_when_settled:
            lacking += [(WORD, q) for q, has in enumerate(rank.word_bits) if not has]
        for kind, index in lacking:
            pieces = self._sources(world, i, kind, index)
            if pieces is not None:
                flight = Flight(kind, index, rank.committed, pieces)
                flights = tuple(sorted((*rank.flights, flight)))
                yield (
                    f"asks for {kind} {index} as of {rank.committed}",
                    functools.partial(_put, world, i, rank._replace(flights=flights)),
                )

    def _sources(self, world: World, i: int, kind: str, index: int) -> tuple[Piece, ...] | None:
        c = self.placement.stripe_class(i, index) if kind == ROW else self.placement.kept(i)[index][0]
        whole = [
            Piece(rank, block)
            for block, rank in enumerate(self.placement.members(c))
            if rank != i and (world.ranks[rank].live or not self.rules.holders_are_whole)
        ]
        k = self.config.k
        return tuple(whole[:k]) if len(whole) >= k else None

    def _flies(self, world: World, i: int, rank: Rank, at: int, flight: Flight) -> Iterator[tuple[str, Any]]:
        what = f"{flight.kind} {flight.index}"
        for number, piece in enumerate(flight.pieces):
            if piece.stage != GIVEN:
                text, new = self._serves(world, piece, flight.of)
                flights = _without(rank.flights, at)
                if new is not None:
                    pieces = _with(flight.pieces, number, new)
                    flights = tuple(sorted((*flights, flight._replace(pieces=pieces))))
                yield (
                    f"is served {what}: rank {piece.rank} {text}",
                    functools.partial(_put, world, i, rank._replace(flights=flights)),
                )
        if all(piece.stage == GIVEN for piece in flight.pieces):
            yield from self._stores(world, i, rank, at, flight)

    def _serves(self, world: World, piece: Piece, of: int) -> tuple[str, Piece | None]:
        """What a holder does next for a request, and its part then; None: the answer is "gone"."""
        rank, k = world.ranks[piece.rank], self.config.k
        is_row = piece.block < k
        if piece.stage == ASKED:
            if not is_row and not self._is_of(rank, of):
                return "has other parity", None
            at = GARBAGE
            if is_row and rank.label > of and self.rules.journal_first:
                at = next((p for p, (b, _) in enumerate(rank.entries) if b == piece.block), GARBAGE)
            return "looks", piece._replace(stage=LOOKED, at=at, seen=self._seen(rank, piece, of))
        if piece.stage == LOOKED:
            if not is_row:
                value: Any = rank.parity[piece.block - k]
            elif piece.at == GARBAGE:
                value = rank.rows[piece.block]
            else:
                value = rank.entries[piece.at][1] if piece.at < len(rank.entries) else GARBAGE
            return "copies", piece._replace(stage=COPIED, value=value)
        if self.rules.looked_at_again and not self._is_still(rank, piece, of, is_row=is_row):
            return "looks again, and it has changed", None
        return "looks again", piece._replace(stage=GIVEN, at=GARBAGE, seen=(0, 0, False))

    def _is_of(self, rank: Rank, of: int) -> bool:
        """Whether parity is that of a transaction."""
        has_begun = rank.saved[0] > rank.committed and self.rules.no_apply_begun
        return rank.committed == of and not has_begun

    def _is_still(self, rank: Rank, piece: Piece, of: int, *, is_row: bool) -> bool:
        """Whether what was copied is of the transaction that it was asked of."""
        if not is_row:
            return self._is_of(rank, of)
        label, attempt, captured = self._seen(rank, piece, of)
        if not self.rules.attempt_looked_at:
            attempt = piece.seen[1]
        return rank.committed <= of and (label, attempt, captured) == piece.seen

    @staticmethod
    def _seen(rank: Rank, piece: Piece, of: int) -> tuple[int, int, bool]:
        return rank.label, rank.attempt, rank.label > of and piece.block in dict(rank.entries)

    def _stores(self, world: World, i: int, rank: Rank, at: int, flight: Flight) -> Iterator[tuple[str, Any]]:
        bits = rank.row_bits if flight.kind == ROW else rank.word_bits
        if bits[flight.index] and not flight.stored and self.rules.stored_where_unset:
            yield (
                "drops what it has",
                lambda: _put(world, i, rank._replace(flights=_without(rank.flights, at))),
            )
            return
        is_bytes = flight.stored != self.rules.bytes_before_bit
        if is_bytes:
            value = self._decoded(i, flight)
            place = rank.rows if flight.kind == ROW else rank.parity
            stored = {"rows" if flight.kind == ROW else "parity": _with(place, flight.index, value)}
        else:
            stored = {"row_bits" if flight.kind == ROW else "word_bits": _with(bits, flight.index, True)}
        flights = _without(rank.flights, at)
        if not flight.stored:
            flights = tuple(sorted((*flights, flight._replace(stored=True))))
        what = "the bytes" if is_bytes else "the bit"
        yield (
            f"stores {what} of {flight.kind} {flight.index}",
            lambda: _put(world, i, rank._replace(**stored, flights=flights)),
        )

    def _decoded(self, i: int, flight: Flight) -> Any:
        """What k blocks of a stripe say of another: garbage unless they are of one transaction."""
        k = self.config.k
        known: dict[int, Value] = {p.block: p.value for p in flight.pieces if p.block < k}
        words = [p.value for p in flight.pieces if p.block >= k]
        if GARBAGE in known.values() or GARBAGE in words:
            return GARBAGE
        values = list(words[0]) if words else [0] * k
        fits = all(word == words[0] for word in words) and all(
            not words or words[0][block] == value for block, value in known.items()
        )
        for block, value in known.items():
            values[block] = value
        if not fits:
            return GARBAGE
        return values[flight.index] if flight.kind == ROW else tuple(values)

    def _deltas(self, world: World, c: int) -> tuple[Value, ...]:
        members = self.placement.members(c)
        return tuple(world.ranks[members[block]].sent[1][block] for block in range(self.config.k))

    # --- crashes, and the start after each ---

    def _crashes(self, world: World) -> Iterator[Next]:
        for count in range(world.losses + 1):
            for gone in combinations(range(self.config.size), count):
                text = f"all processes die, with the memory of {list(gone)}" if gone else "all processes die"
                try:
                    yield Next(text, self._started(world, gone))
                except Broken as broken:
                    yield Next(text, world, str(broken))

    def _started(self, world: World, gone: tuple[int, ...]) -> World:
        """The world after the next start, which checks what survived."""
        counts = [rank.live or not self.rules.rebuilding_counts_as_lost for rank in world.ranks]
        lost = tuple(i for i, counted in enumerate(counts) if i in gone or not counted)
        left = world._replace(crashes=world.crashes - 1, losses=world.losses - len(gone))
        if not self.placement.tolerates(lost):
            return left._replace(over=True)
        survivors = {i: rank for i, rank in enumerate(world.ranks) if i not in lost}
        t = min(rank.prepared for rank in survivors.values())
        if t < world.top:
            raise Broken(f"lost step: {world.top} was committed, and the start goes on from {t}")
        for i, rank in survivors.items():
            self._check(i, rank, t, world.aborted)
        aborted = tuple(s for s in world.aborted if s <= t)
        ranks = tuple(self._rank(i, t, aborted, is_new=i in lost) for i in range(self.config.size))
        return left._replace(ranks=ranks, aborted=aborted, top=t, over=not left.crashes)

    def _check(self, i: int, rank: Rank, t: int, aborted: tuple[int, ...]) -> None:
        """Undoes or redoes on a survivor, and raises Broken unless it then has rows and parity of t."""
        if rank.committed > t:
            raise Broken(f"contradiction: rank {i} has committed {rank.committed}, and T is {t}")
        rows = _undone(rank.rows, rank.entries) if rank.label > t else rank.rows
        parity = rank.parity
        if rank.committed < t:
            if rank.inbox[0] != t or None in rank.inbox[1]:
                raise Broken(f"lost deltas: rank {i} can't redo the parity of {t}")
            old = rank.saved[1] if rank.saved[0] == t else parity
            parity = tuple(_added(word, deltas) for word, deltas in zip(old, rank.inbox[1], strict=True))
        self._compare(i, rows, parity, t, aborted)

    def _compare(
        self, i: int, rows: tuple[Value, ...], parity: tuple[Any, ...], t: int, aborted: tuple[int, ...]
    ) -> None:
        if rows != self._word(t, aborted):
            raise Broken(f"wrong row: after the start rank {i} has {rows} as of {t}")
        if any(word != self._word(t, aborted) for word in parity):
            raise Broken(f"wrong parity: after the start rank {i} has {parity} as of {t}")


def _put(world: World, i: int, rank: Rank) -> World:
    return world._replace(ranks=_with(world.ranks, i, rank))


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _without(values: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    return (*values[:at], *values[at + 1 :])


def _undone(rows: tuple[Value, ...], entries: tuple[tuple[int, Value], ...]) -> tuple[Value, ...]:
    for block, old in entries:
        if block != SPECIAL:
            rows = _with(rows, block, old)
    return rows


def _added(word: Any, deltas: Any) -> Any:
    if word == GARBAGE or deltas is None:
        return word
    return tuple(value ^ delta for value, delta in zip(word, deltas, strict=True))
