"""The bytes in which workers announce themselves at a start, and in which all learn the roster.

Owns one compact form of a `Roster`; a worker's announcement is a roster of that worker alone. Every text and
every set of words is written once, because on most starts all arenas say the same. An arena's report does not
grow with its tables. A table of failure domains grows with the ranks: an announcement names it by a digest,
and the table travels once for all (`tables`); the roster of all contains it.

Nothing that is read is trusted: counts are compared with the bytes at hand before anything is allocated for
them, and bytes that `write` can't have written raise RendezvousError. Must not know of the store.
them, and what can't have been written here raises RendezvousError. Must not know of the store.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ..arena.header import Header, Identity, State
from ..errors import RendezvousError
from .assignment import Report, Roster, Worker

T = TypeVar("T")
Domains = tuple[str, ...]
Resolve = Callable[[str], Domains]

_MAGIC = b"ecembR02"
_HEAD = struct.Struct("<8sqqqBBII")  # generation, its id, opened, started, finished, workers, reports
_COUNT = struct.Struct("<I")
_TEXT = struct.Struct("<H")
_WORDS = struct.Struct("<Bqqqqqqq")  # state, joined, its id, opened, committed, prepared, undeclared; fill
_WORKER = struct.Struct("<IIIIH")  # host, nonce, addresses; pid; port
_REPORT = struct.Struct("<IIIIqIIIIBB")  # host, folder, file, damage; holder; words, id, rank, domains; flags
_DIGEST_BYTES = 16
_NOTHING = 0xFFFFFFFF
_MOST_DAMAGE = 300  # characters of the text about an unreadable arena
_SUFFIX = ".arena"


class _Table:
    """Values that are written once, and referenced by number."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, value: object) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    @property
    def values(self) -> list[Any]:
        return list(self._numbers)


def digest(domains: Domains) -> str:
    """The digest that names a table of failure domains."""
    return hashlib.blake2b(write_domains(domains), digest_size=_DIGEST_BYTES).hexdigest()


def write_domains(domains: Domains) -> bytes:
    """Packs one table of failure domains: rank -> host."""
    texts = _Table()
    numbers = [texts.number(name) for name in domains]
    return _texts(texts.values) + _numbers(numbers)


def read_domains(data: bytes) -> Domains:
    """Inverse of `write_domains`.

    Raises:
        RendezvousError: `write_domains` does not return such bytes.
    """
    return _guarded(_read_domains, data)


def write(roster: Roster, *, whole: bool) -> bytes:
    """Packs a roster.

    Args:
        roster: of the arenas' constants only the `Identity` is needed in reports.
        whole: with tables of failure domains; else with their digests.
    """
    texts, words, domains = _Table(), _Table(), _Table()
    workers = [
        _WORKER.pack(
            texts.number(one.host),
            texts.number(one.nonce),
            texts.number(",".join(one.addresses)),
            one.pid,
            one.port,
        )
        for one in roster.workers
    ]
    reports = [_report(one, texts, words, domains) for one in roster.reports]
    job = next((one.header.constants.job for one in roster.reports if one.header is not None), "")
    fixed = [texts.number(text) for text in (roster.prefix, roster.secret, job)]
    tables: list[bytes] = []
    for names in domains.values:
        if whole:
            tables.append(_numbers([texts.number(name) for name in names]))
        else:
            tables.append(bytes.fromhex(digest(names)))
    head = _HEAD.pack(
        _MAGIC,
        roster.generation,
        roster.generation_id,
        roster.opened,
        roster.started,
        roster.finished,
        len(workers),
        len(reports),
    )
    parts = [_texts(texts.values), _numbers(fixed), _COUNT.pack(len(words.values)), *words.values]
    parts += [bytes([whole]), _COUNT.pack(len(tables)), *tables]
    return b"".join([head, *parts, *workers, *reports])


def read(data: bytes, resolve: Resolve | None = None) -> Roster:
    """Inverse of `write`.

    Args:
        data: any bytes.
        resolve: returns a table of failure domains by its digest; None if `data` must contain the tables.

    Raises:
        RendezvousError: `write` does not return such bytes.
    """
    return _guarded(lambda source: _read(source, resolve), data)


def _report(one: Report, texts: _Table, words: _Table, domains: _Table) -> bytes:
    folder, file = os.path.split(one.path)
    named, damage, holder = _NOTHING, _NOTHING, -1 if one.holder is None else one.holder
    if one.damage is not None:
        damage = texts.number(one.damage[:_MOST_DAMAGE])
    says = name = rank = where = _NOTHING
    if (header := one.header) is not None:
        identity = header.constants
        name, rank, where = texts.number(identity.arena_id), identity.rank, domains.number(identity.domains)
        generations = (header.joined, header.generation_id, header.opened)
        told = (*generations, header.committed, header.prepared, header.undeclared)
        says = words.number(_WORDS.pack(header.state, *told, identity.fill))
        if file == identity.arena_id + _SUFFIX:
            named = name
    if named == _NOTHING:
        named = texts.number(file)
    place = texts.number(one.host), texts.number(folder), named
    return _REPORT.pack(*place, damage, holder, says, name, rank, where, one.torn, one.incompatible)


def _texts(values: Sequence[str]) -> bytes:
    encoded = [value.encode("utf-8", "surrogateescape") for value in values]
    return _COUNT.pack(len(values)) + b"".join(_TEXT.pack(len(text)) + text for text in encoded)


def _numbers(values: Sequence[int]) -> bytes:
    return _COUNT.pack(len(values)) + struct.pack(f"<{len(values)}I", *values)


class _Source:
    """Reads from untrusted bytes."""

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
        for _ in range(self.count()):  # each takes at least two bytes, so the end comes first
            found.append(self.bytes(self.unpack(_TEXT)[0]).decode("utf-8", "surrogateescape"))
        return found

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many")


def _guarded(parse: Callable[[_Source], T], data: bytes) -> T:
    source = _Source(data)
    try:
        result = parse(source)
        source.end()
    except (ValueError, IndexError, OverflowError, struct.error) as error:
        raise RendezvousError(
            f"the store holds bytes that no worker of this version of ecemb writes ({type(error).__name__}: "
            f"{error}): do all hosts run the same version, and does no other program use the store?"
        ) from error
    return result


def _read_domains(source: _Source) -> Domains:
    texts = source.texts()
    return tuple(texts[number] for number in source.numbers())


def _read(source: _Source, resolve: Resolve | None) -> Roster:
    magic, generation, generation_id, opened, started, finished, workers, reports = source.unpack(_HEAD)
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic!r}")
    texts = source.texts()
    prefix, secret, job = (texts[number] for number in source.numbers())
    bytes.fromhex(secret)
    words = [_words(*one) for one in source.records(_WORDS, source.count())]
    if (whole := source.bytes(1)[0]) > 1 or (not whole and resolve is None):
        raise ValueError("its tables of failure domains are elsewhere")
    domains: list[Domains] = []
    for _ in range(source.count()):  # each takes at least four bytes
        if whole or resolve is None:
            domains.append(tuple(texts[number] for number in source.numbers()))
        else:
            domains.append(resolve(source.bytes(_DIGEST_BYTES).hex()))
    return Roster(
        generation=generation,
        generation_id=generation_id,
        prefix=prefix,
        started=bool(started),
        finished=bool(finished),
        workers=tuple(_worker(texts, *one) for one in source.records(_WORKER, workers)),
        reports=tuple(_found(job, texts, words, domains, *one) for one in source.records(_REPORT, reports)),
        secret=secret,
        opened=opened,
    )


def _words(state: int, *told: int) -> dict[str, int]:
    names = ("joined", "generation_id", "opened", "committed", "prepared", "undeclared", "fill")
    return {"state": State(state), **dict(zip(names, told, strict=True))}


def _worker(texts: Sequence[str], host: int, nonce: int, addresses: int, pid: int, port: int) -> Worker:
    each = tuple(str(ipaddress.ip_address(one)) for one in texts[addresses].split(",") if one)
    return Worker(texts[host], texts[nonce], pid, each, port)


def _found(
    job: str, texts: Sequence[str], words: Sequence[dict[str, Any]], domains: Sequence[Domains], *fields: int
) -> Report:
    host, folder, file, damage, holder, says, name, rank, where, torn, incompatible = fields
    header = None
    if says != _NOTHING:
        names, told = domains[where], dict(words[says])
        header = Header(Identity(job, texts[name], rank, len(names), names, told.pop("fill")), **told)
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
