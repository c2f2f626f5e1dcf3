"""The workers of a start agree on one roster over torchrun's store (docs/protocol.md, 3.1).

torchrun reuses its store, with entries of dead workers in it. So every worker stores its entry under its
index, where its successor overwrites it, and waits for its own mailbox, a key with a random nonce. The
worker with torchrun's RANK 0 leads: it reads all entries, writes a proposal, the roster, and puts the
proposal's name into every mailbox. A proposal counts when all of its workers have taken it. A proposal with a
dead worker never counts: the leader replaces it when that worker's successor has stored its entry.

    announce/I    the entry of worker I               arrivals    number of such entries so far
    domains/D     a table of failure domains          plan/NONCE  mailbox: the name of a proposal
    roster/P      a proposal: the roster of all       taken/P     number of workers that have taken it
    verdict/P     it counts, or the proposal instead  current     proposals in the store, and nonces

Where workers are replaced one by one, the leader may die alone, and living workers wait for its proposals.
Its successor can't tell these from dead ones: it puts `again` into all mailboxes and verdicts of these
proposals, and every worker that reads it announces itself again, with another nonce.

The entries don't grow with the tables, nor from start to start: a start overwrites or removes the entries of
the last start. All workers but the leader make a few operations, whatever the number of workers is, and wait
without polling; while the leader waits for workers, it polls one counter.

Owns the wire format of rosters, of proposals and of entries: a worker's entry is a roster of that worker
alone. Every text and every set of words is written once, because on most starts the words of all arenas are
equal. A table of failure domains grows with the ranks, and so it is a value of its own, which rosters name by
a digest.

The store is trusted as far as the job's own workers are; no value in it is a pickle. Counts are compared with
the number of bytes that are left before memory is allocated for them, and bytes that `write_roster` can't
have written raise RendezvousError.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import secrets
import struct
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..errors import RendezvousError
from ..memory.header import NONE, Header, Identity, State
from .assignment import Report, Roster, Worker

T = TypeVar("T")

MOST_BYTES = 4 << 20
"""Largest value. torch's store accepts 8 MiB, and resets a connection that sends more."""
_COUNTS, _AGAIN = "counts", "again"
_OWN_STORE = "Give the launch an --rdzv-id and --rdzv-endpoint of its own"
_SHORTEST_S, _LONGEST_S, _GROWTH = 0.003, 0.05, 1.25  # between two reads of a counter
_ROUNDING_S = 0.01  # the store rounds deadlines
_AGAIN_S = 0.25  # before entries are read again, as one may be of a dead worker with a successor


def agree(
    store: dist.Store,
    worker: Worker,
    reports: Sequence[Report],
    index: int,
    world_size: int,
    deadline: float,
) -> Roster:
    """Finds the workers of this start among the entries of earlier starts in the store. All workers.

    Args:
        store: the store of the job, for all workers.
        worker: this worker.
        reports: the arenas on this host.
        index: torchrun's RANK.
        world_size: number of workers.
        deadline: on time.monotonic().

    Returns:
        The same roster on all workers.

    Raises:
        Superseded: the leader died, and its successor wants every worker to announce itself again.
        StoreGone: the store does not answer any more.
        RendezvousError: a worker did not come before the deadline, or the store holds values that are not
            ecemb's.
    """
    client = _StoreClient(store, deadline)
    _announce(client, worker, reports, index)
    if index == 0:
        return _Leader(client, worker, world_size).lead()
    try:
        name = client.wait(f"plan/{worker.nonce}")
        while True:
            if name == _AGAIN:
                raise Superseded
            _take(client, name, worker.nonce, world_size)
            verdict = client.wait(f"verdict/{name}")
            if verdict == _AGAIN:
                raise Superseded
            if verdict == _COUNTS:
                return read_roster(client.get(f"roster/{name}"), client.domains)
            name = verdict
    except TimeoutError:  # if all workers have announced themselves, the leader does not answer
        raise _late(world_size, _unannounced(client, range(world_size)) or [0]) from None


def is_replaced(store: dist.Store, worker: Worker, index: int, deadline: float) -> bool:
    """Whether another process has announced itself in place of a worker of this start's roster.

    Args:
        store: the store of the job, for all workers.
        worker: a worker of the roster.
        index: its RANK.
        deadline: on time.monotonic().

    Raises:
        StoreGone: the store does not answer any more.
    """
    client = _StoreClient(store, deadline)
    return read_roster(client.get(f"announce/{index}"), client.domains).workers[0].nonce != worker.nonce


class Superseded(Exception):
    """This start's rendezvous begins again: a worker in it has died, and was replaced."""


class StoreGone(RendezvousError):
    """The store does not answer any more."""


class _StoreClient:
    """A store, with limits and errors that name the cause.

    If the store doesn't answer, all methods raise RendezvousError.

    Attributes:
        deadline: deadline of waits, on time.monotonic().
        tables: digest -> table of failure domains, of all tables that were read.
    """

    def __init__(self, store: dist.Store, deadline: float) -> None:
        self.deadline = deadline
        self.tables: dict[str, Domains] = {}
        self._store = store

    def put(self, key: str, value: bytes | str) -> None:
        """Stores a value."""
        data = value.encode() if isinstance(value, str) else value
        if len(data) > MOST_BYTES:
            raise RendezvousError(
                f"{key} of this start takes {len(data)} bytes, and ecemb stores at most {MOST_BYTES} in one "
                f"value of torchrun's store, which takes no more than 8388608: remove unneeded arenas "
                f"(ecemb arenas ls, and rm), or launch fewer ranks"
            )
        self._asked(lambda: self._store.set(key, data))  # pyright: ignore[reportArgumentType]

    def mail(self, keys: Sequence[str], value: str) -> None:
        """Stores one value under all keys."""
        if keys:
            self._asked(lambda: self._store.multi_set(list(keys), [value] * len(keys)))  # pyright: ignore

    def get(self, key: str) -> bytes:
        """Reads an existing value."""
        return self._asked(lambda: self._store.get(key))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Reads existing values."""
        return self._asked(lambda: list(self._store.multi_get(list(keys))))

    def has(self, *keys: str) -> bool:
        """Whether all keys exist."""
        return self._asked(lambda: self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter; returns the sum."""
        return self._asked(lambda: self._store.add(key, amount))

    def put_once(self, key: str, value: str) -> str:
        """Stores a value unless the key exists; returns the value that is stored then."""
        return _text(self._asked(lambda: self._store.compare_set(key, "", value)))

    def remove(self, *keys: str) -> None:
        """Removes the keys that exist."""
        for key in keys:
            self._asked(lambda: self._store.delete_key(key))  # noqa: B023

    def comes(self, key: str, most_s: float) -> bool:
        """Waits for a value, for `most_s` or until the deadline. Returns whether the key has one."""
        most_s = max(min(most_s, self.deadline - time.monotonic()), 0)
        waits_until = time.monotonic() + most_s
        try:
            self._store.wait([key], timedelta(seconds=most_s + _ROUNDING_S))
        except RuntimeError as error:
            if time.monotonic() < waits_until:
                raise _gone(error) from error
            return False
        return True

    def wait(self, key: str) -> str:
        """Waits for a value.

        Raises:
            TimeoutError: the key has no value at the deadline.
        """
        left_s = max(self.deadline - time.monotonic(), 0) + _ROUNDING_S
        try:
            self._store.wait([key], timedelta(seconds=left_s))
        except RuntimeError as error:
            if time.monotonic() < self.deadline:
                raise _gone(error) from error
            raise TimeoutError from error
        return _text(self.get(key))

    def domains(self, digest: str) -> Domains:
        """The table of failure domains with this digest.

        Raises:
            RendezvousError: the store has no such table, or bytes that are none.
        """
        if digest not in self.tables:
            if not self.has(f"domains/{digest}"):
                raise _foreign(f"the name of domains/{digest}, and not that")
            self.tables[digest] = read_domains(self.get(f"domains/{digest}"))
        return self.tables[digest]

    def looks(self) -> Iterator[None]:
        """Yields for each poll until the deadline, at growing intervals."""
        pause_s = _SHORTEST_S
        while True:
            yield
            if time.monotonic() > self.deadline:
                return
            time.sleep(pause_s)
            pause_s = min(pause_s * _GROWTH, _LONGEST_S)

    def _asked(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except RuntimeError as error:
            raise _gone(error) from error


class _Leader:
    """The leader, RANK 0: reads all entries, and writes proposals until one counts."""

    def __init__(self, client: _StoreClient, worker: Worker, world_size: int) -> None:
        self._client, self._worker, self._world_size = client, worker, world_size
        self._names = [f"announce/{i}" for i in range(world_size)]
        self._arrivals = 0
        self._before = _Proposals.of(client.get("current")) if client.has("current") else _Proposals()
        self._names_given: list[str] = []
        self._roster: Roster | None = None
        if not self._before.counted:  # a leader died before its proposal counted, and its workers may wait
            client.mail([f"plan/{nonce}" for nonce in self._before.nonces], _AGAIN)
            for name in self._before.names:
                client.put_once(f"verdict/{name}", _AGAIN)

    def lead(self) -> Roster:
        """Writes proposals until one counts: a further one if a worker of the last had a successor."""
        announced = self._first()
        while True:
            roster = self._publish(announced)
            if (again := self._settled(roster.prefix, announced)) is None:
                break
            announced = again
        self._clean(roster)
        return roster

    def _first(self) -> list[Roster]:
        """Waits until every worker has an entry that is not of a worker of an earlier start's proposal.

        Returns:
            The entries, in the order of RANK.

        Raises:
            RendezvousError: a worker is missing at the deadline.
        """
        size, dead = self._world_size, set(self._before.nonces)
        alive: list[int] = []
        enough = 0
        for _ in self._client.looks():
            arrivals = self._client.add("arrivals", 0)
            if arrivals < enough:
                continue
            if not self._client.has(*self._names):
                enough = max(arrivals + 1, size)
                continue
            # Read all: an entry that was read before may be of a dead worker, and its successor's by now.
            announced = self._read()
            self._arrivals = arrivals
            alive = [i for i, one in enumerate(announced) if one.workers[0].nonce not in dead]
            if len(alive) == size:
                return announced
            # Each missing worker still has to add 1 to the counter: until then no entry has changed.
            enough = arrivals + size - len(alive)
        missing = sorted({*range(size)}.difference(alive))
        raise _late(size, _unannounced(self._client, missing) or missing)  # or entries of an earlier start

    def _publish(self, announced: Sequence[Roster]) -> Roster:
        """Writes a proposal and sends its name to its workers.

        Returns:
            The proposal; or the one before it, if that counts by now.
        """
        client, name, last = self._client, secrets.token_hex(8), self._roster
        roster = _propose(client, name, announced)
        client.put(f"roster/{name}", write_roster(roster))
        self._names_given.append(name)
        known = set() if last is None else {one.nonce for one in last.workers}
        nonces = [one.nonce for one in roster.workers]
        left = [*self._before.nonces, *known.difference(nonces)]
        names, tables = [*self._before.names, *self._names_given], {*self._before.tables, *client.tables}
        client.put("current", json.dumps(_Proposals(names, [*nonces, *left], sorted(tables))))
        if last is not None:
            if client.put_once(f"verdict/{last.prefix}", name) == _COUNTS:
                return last
            client.remove(*(f"plan/{nonce}" for nonce in known.difference(nonces)))
        client.mail([f"plan/{nonce}" for nonce in nonces if nonce not in known], name)
        self._roster = roster
        _take(client, name, self._worker.nonce, self._world_size)
        return roster

    def _settled(self, name: str, announced: Sequence[Roster]) -> list[Roster] | None:
        """Waits until the proposal `name` counts, or entries of other workers than `announced` are there.

        Returns:
            None if it counts; else the new entries.

        Raises:
            RendezvousError: neither at the deadline.
        """
        while time.monotonic() < self._client.deadline:
            if self._client.comes(f"verdict/{name}", _AGAIN_S):
                return None
            if (arrivals := self._client.add("arrivals", 0)) != self._arrivals:
                self._arrivals = arrivals
                again = self._read()
                if [one.workers for one in again] != [one.workers for one in announced]:
                    return again
        left = [i for i, one in enumerate(announced) if self._client.has(f"plan/{one.workers[0].nonce}")]
        raise _late(self._world_size, left or [0])

    def _read(self) -> list[Roster]:
        """The entries of all workers, in the order of RANK."""
        announced = [read_roster(text, self._client.domains) for text in self._client.get_all(self._names)]
        if any(len(one.workers) != 1 for one in announced):
            raise _foreign("a worker's entry that is not of one worker")
        return announced

    def _clean(self, roster: Roster) -> None:
        """Removes the entries of earlier starts, and this start's proposals that did not count."""
        client, before = self._client, self._before
        for name in {*before.names, *self._names_given} - {roster.prefix}:
            client.remove(f"roster/{name}", f"taken/{name}", f"verdict/{name}")
        if not before.counted:
            client.remove(*(f"plan/{nonce}" for nonce in before.nonces))
        # Entries of a start with more workers: a later start with as many must not take them for its own.
        client.remove(*(f"announce/{i}" for i in range(self._world_size, len(before.nonces))))
        used = {
            digest(names) for names in {one.header.constants.domains for one in roster.reports if one.header}
        }
        client.remove(*(f"domains/{old}" for old in {*before.tables, *client.tables} - used))
        last = _Proposals([roster.prefix], [one.nonce for one in roster.workers], sorted(used), counted=True)
        client.put("current", json.dumps(last))


class _Proposals(NamedTuple):
    """A leader's entry `current` for the leader of the next start.

    Attributes:
        names: names of its proposals, the last one last.
        nonces: nonces of the workers in the last proposal, then of workers in earlier proposals.
        tables: digests of the tables of failure domains in the store.
        counted: whether the last proposal counted, so that no mailbox has its name any more.
    """

    names: Sequence[str] = ()
    nonces: Sequence[str] = ()
    tables: Sequence[str] = ()
    counted: bool = False

    @classmethod
    def of(cls, text: bytes) -> _Proposals:
        try:
            names, nonces, tables, counted = json.loads(text)
            return cls(list(map(str, names)), list(map(str, nonces)), list(map(str, tables)), bool(counted))
        except (ValueError, TypeError, RecursionError) as error:
            raise _foreign(f"an invalid list of proposals ({error})") from error


def _announce(client: _StoreClient, worker: Worker, reports: Sequence[Report], index: int) -> None:
    domains = {one.header.constants.domains for one in reports if one.header is not None}
    for names in sorted(domains):
        if not client.has(key := f"domains/{digest(names)}"):
            client.put(key, write_domains(names))
    alone = Roster(0, 0, "", False, (worker,), tuple(reports))
    client.put(f"announce/{index}", write_roster(alone))
    client.add("arrivals", 1)


def _take(client: _StoreClient, name: str, nonce: str, world_size: int) -> None:
    """Takes a proposal that has this worker. The last of its workers to take it stores that it counts."""
    client.remove(f"plan/{nonce}")
    if client.add(f"taken/{name}", 1) == world_size:
        client.put_once(f"verdict/{name}", _COUNTS)


def _propose(client: _StoreClient, prefix: str, announced: Sequence[Roster]) -> Roster:
    reports = tuple(
        {one.path + "@" + one.host: one for roster in announced for one in roster.reports}.values()
    )
    headers = [one.header for one in reports if one.header is not None]
    opened = _mark(client, "started")
    held = [one.header for one in reports if one.header is not None and one.holder is not None]
    if began := [one.opened for one in held if one.state in (State.LIVE, State.REBUILDING)]:
        # Another launch of the job runs. Its memory may be gone when this job is started again.
        opened = max(opened, 0, *began)
        client.put("started", str(opened))
    known = [_mark(client, "generation"), opened, *(max(h.joined, h.opened) for h in headers)]
    generation = max(
        2 + max(known), time.time_ns()
    )  # a start that moves memory takes the next number as well
    client.put("generation", str(generation))  # the next leader's clock may be behind
    return Roster(
        generation=generation,
        generation_id=secrets.randbits(62),
        prefix=prefix,
        finished=client.has("finished"),
        workers=tuple(roster.workers[0] for roster in announced),
        reports=reports,
        secret=secrets.token_hex(16),
        opened=opened,
    )


def _mark(client: _StoreClient, name: str) -> int:
    """The generation in a mark of the store; NONE without the mark."""
    if not client.has(name):
        return NONE
    text = client.get(name)
    try:
        return max(0, int(text))
    except ValueError as error:
        raise _foreign(f"the mark `{name}` with the value {text[:40]!r}") from error


def _unannounced(client: _StoreClient, span: Sequence[int]) -> list[int]:
    """The workers of `span` without an entry.

    Searched by halves: few are missing, and one request checks that a whole half has entries.
    """
    if not span or client.has(*(f"announce/{i}" for i in span)):
        return []
    if len(span) == 1:
        return list(span)
    half = len(span) // 2
    return _unannounced(client, span[:half]) + _unannounced(client, span[half:])


def _late(world_size: int, silent: Sequence[int]) -> RendezvousError:
    return RendezvousError(
        f"the rendezvous of {world_size} workers did not end before its deadline; no word from torchrun "
        f"ranks {list(silent)}: see their logs, or raise timeout= if they are only slow to start"
    )


def _gone(error: RuntimeError) -> StoreGone:
    return StoreGone(
        f"torchrun's store does not answer any more ({str(error).splitlines()[0]}): its agent, or RANK 0 if "
        f"the launcher keeps no store, has ended; see its log"
    )


def _foreign(what: str) -> RendezvousError:
    return RendezvousError(
        f"the store holds {what}, which no worker of this version of ecemb writes: do all hosts run the same "
        f"version, and does no other program use the store? {_OWN_STORE}"
    )


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


Domains = tuple[str, ...]
Resolve = Callable[[str], Domains]

_MAGIC = b"ecembR04"
_HEAD = struct.Struct("<8sqqqBII")  # magic, generation, its id, opened, finished, workers, reports
_COUNT = struct.Struct("<I")
_TEXT = struct.Struct("<H")
_WORDS = struct.Struct("<Bqqqqqqq")  # state, joined, its id, opened, committed, prepared, undeclared; fill
_WORKER = struct.Struct("<IIIIIH")  # host, nonce, addresses, the arena that it keeps; pid; port
_REPORT = struct.Struct("<IIIIqIIIIBB")  # host, folder, file, damage; holder; words, id, rank, domains; flags
_DIGEST_BYTES = 16
_NOTHING = 0xFFFFFFFF
_MOST_DAMAGE = 300  # longest text about an unreadable arena, in characters
_SUFFIX = ".arena"


class _Table(dict[Any, int]):
    """Value -> the number that stands for it in the records. A lookup adds a missing value."""

    def __missing__(self, value: Any) -> int:
        self[value] = number = len(self)
        return number


def digest(domains: Domains) -> str:
    """The digest that names a table of failure domains."""
    return hashlib.blake2b(write_domains(domains), digest_size=_DIGEST_BYTES).hexdigest()


def write_domains(domains: Domains) -> bytes:
    """Packs one table of failure domains: rank -> host."""
    texts = _Table()
    numbers = [texts[name] for name in domains]
    return _texts(texts) + _numbers(numbers)


def read_domains(data: bytes) -> Domains:
    """Inverse of `write_domains`.

    Raises:
        RendezvousError: `write_domains` does not return such bytes.
    """
    with _reading(data) as source:
        texts = source.texts()
        return tuple(texts[number] for number in source.numbers())


def write_roster(roster: Roster) -> bytes:
    """Packs a roster. Of the constants of arenas, it writes only the `Identity`."""
    texts, words, domains = _Table(), _Table(), _Table()
    workers = [
        _WORKER.pack(
            texts[one.host],
            texts[one.nonce],
            texts[",".join(one.addresses)],
            texts[one.keeps],
            one.pid,
            one.port,
        )
        for one in roster.workers
    ]
    reports = [_report(one, texts, words, domains) for one in roster.reports]
    job = next((one.header.constants.job for one in roster.reports if one.header is not None), "")
    fixed = [texts[text] for text in (roster.prefix, roster.secret, job)]
    head = _HEAD.pack(
        _MAGIC,
        roster.generation,
        roster.generation_id,
        roster.opened,
        roster.finished,
        len(workers),
        len(reports),
    )
    parts = [_texts(texts), _numbers(fixed), _COUNT.pack(len(words)), *words]
    parts += [_COUNT.pack(len(domains)), *(bytes.fromhex(digest(one)) for one in domains)]
    return b"".join([head, *parts, *workers, *reports])


def read_roster(data: bytes, resolve: Resolve) -> Roster:
    """Inverse of `write_roster`.

    Args:
        data: any bytes.
        resolve: returns a table of failure domains by its digest.

    Raises:
        RendezvousError: `write_roster` does not return such bytes.
    """
    with _reading(data) as source:
        magic, generation, generation_id, opened, finished, workers, reports = source.unpack(_HEAD)
        if magic != _MAGIC:
            raise ValueError(f"it begins with {magic!r}")
        texts = source.texts()
        prefix, secret, job = (texts[number] for number in source.numbers())
        bytes.fromhex(secret)
        words = [_words(*one) for one in source.records(_WORDS, source.count())]
        domains: list[Domains] = []
        for _ in range(source.count()):  # ends with the bytes, however large the count is
            domains.append(resolve(source.bytes(_DIGEST_BYTES).hex()))
        return Roster(
            generation=generation,
            generation_id=generation_id,
            prefix=prefix,
            finished=bool(finished),
            workers=tuple(_worker(texts, *one) for one in source.records(_WORKER, workers)),
            reports=tuple(
                _found(job, texts, words, domains, *one) for one in source.records(_REPORT, reports)
            ),
            secret=secret,
            opened=opened,
        )


def _report(one: Report, texts: _Table, words: _Table, domains: _Table) -> bytes:
    folder, file = os.path.split(one.path)
    named, damage, holder = _NOTHING, _NOTHING, -1 if one.holder is None else one.holder
    if one.damage is not None:
        damage = texts[one.damage[:_MOST_DAMAGE]]
    says = name = rank = where = _NOTHING
    if (header := one.header) is not None:
        identity = header.constants
        name, rank, where = texts[identity.arena_id], identity.rank, domains[identity.domains]
        generations = (header.joined, header.generation_id, header.opened)
        numbers = (*generations, header.committed, header.prepared, header.undeclared)
        says = words[_WORDS.pack(header.state, *numbers, identity.fill)]
        if file == identity.arena_id + _SUFFIX:
            named = name
    if named == _NOTHING:
        named = texts[file]
    place = texts[one.host], texts[folder], named
    return _REPORT.pack(*place, damage, holder, says, name, rank, where, one.torn, one.incompatible)


def _texts(values: Collection[str]) -> bytes:
    encoded = [value.encode("utf-8", "surrogateescape") for value in values]
    return _COUNT.pack(len(values)) + b"".join(_TEXT.pack(len(text)) + text for text in encoded)


def _numbers(values: Sequence[int]) -> bytes:
    return _COUNT.pack(len(values)) + struct.pack(f"<{len(values)}I", *values)


class _Source:
    """Parses untrusted bytes from front to end.

    Methods raise ValueError or struct.error if too few bytes are left.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def bytes(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError(f"{size} bytes should follow byte {self._at}, of {len(self._data)}")
        self._at += size
        return self._data[self._at - size : self._at]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.bytes(form.size))

    def records(self, form: struct.Struct, count: int) -> Iterable[tuple[Any, ...]]:
        return form.iter_unpack(self.bytes(form.size * count))

    def count(self) -> int:
        return self.unpack(_COUNT)[0]

    def numbers(self) -> tuple[int, ...]:
        count = self.count()
        return struct.unpack(f"<{count}I", self.bytes(4 * count))

    def texts(self) -> list[str]:
        found: list[str] = []
        for _ in range(self.count()):  # each takes two bytes or more: ends with the bytes
            found.append(self.bytes(self.unpack(_TEXT)[0]).decode("utf-8", "surrogateescape"))
        return found

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many")


@contextmanager
def _reading(data: bytes) -> Generator[_Source]:
    """Gives the block a `_Source` of `data`, which the block has to read to its end.

    Raises:
        RendezvousError: the block raised an error of parsing, or left bytes.
    """
    source = _Source(data)
    try:
        yield source
        source.end()
    except (ValueError, IndexError, OverflowError, struct.error) as error:
        raise _foreign(f"bytes ({type(error).__name__}: {error})") from error


def _words(state: int, *numbers: int) -> dict[str, int]:
    names = ("joined", "generation_id", "opened", "committed", "prepared", "undeclared", "fill")
    return {"state": State(state), **dict(zip(names, numbers, strict=True))}


def _worker(
    texts: Sequence[str], host: int, nonce: int, addresses: int, keeps: int, pid: int, port: int
) -> Worker:
    each = tuple(str(ipaddress.ip_address(one)) for one in texts[addresses].split(",") if one)
    return Worker(texts[host], texts[nonce], pid, each, port, texts[keeps])


def _found(
    job: str, texts: Sequence[str], words: Sequence[dict[str, Any]], domains: Sequence[Domains], *fields: int
) -> Report:
    host, folder, file, damage, holder, says, name, rank, where, torn, incompatible = fields
    header = None
    if says != _NOTHING:
        names, numbers = domains[where], dict(words[says])
        header = Header(Identity(job, texts[name], rank, len(names), names, numbers.pop("fill")), **numbers)
    leaf = texts[file] + (_SUFFIX if header is not None and file == name else "")
    return Report(
        host=texts[host],
        path=os.path.join(texts[folder], leaf),
        header=header,
        damage=None if damage == _NOTHING else texts[damage],
        holder=None if holder < 0 else holder,
        torn=bool(torn),
        incompatible=bool(incompatible),
    )
