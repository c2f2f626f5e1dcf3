"""What the fork server learns of a worker that has ended: whether `ecemb-run` replaces it by itself.

A worker that a signal killed, or that ends because another worker died, is replaced on its host at once, and
torchrun does not notice. All other ends are torchrun's matter: an error of the script, a success, a silent
host. docs/protocol.md, 3.5 has the rule, and `launch.stub` decides by it.

A forked worker and its server share one page of memory. The worker writes here how far it is, and the server
reads it once the process has ended: a killed process sends nothing. In a plain start there is no page, and
every function here does nothing.

Must not know: sockets, and who forks.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
from collections.abc import Collection
from contextlib import suppress
from enum import IntEnum


class End(IntEnum):
    """What the end of this process would mean, as the worker has written it.

    Attributes:
        PLAIN: the worker is not in a job of ecemb, or has left it: no end is replaced.
        IF_KILLED: it takes part in a job: it is replaced if a signal ends it.
        PEER_DIED: it ends because another worker died: it is replaced, whatever its exit code is.
        FINAL: it ends for a reason of its own, or for one that a replacement would meet as well.
    """

    PLAIN = 0
    IF_KILLED = 1
    PEER_DIED = 2
    FINAL = 3


predecessors: int = 0
"""Number of workers that this process's `ecemb-run` has replaced before it, without a restart by torchrun."""
rejoins: int = 0
"""How often this process has stayed after another worker's death, and met the others again."""

_END, _PROGRESS, _WIDTHS = 0, 1, 4  # bytes of the page
_NUMBER = struct.Struct("<I")
MOST_WIDTHS, MOST_RECORD_BYTES = 256, 1 << 13
"""Numbers on the page, and bytes of a record, for which the server compiles."""
_page: mmap.mmap | None = None
_server = 0
_lock = threading.Lock()


def new_page() -> mmap.mmap:
    """A page that this process shares with the processes that it forks, of zeros."""
    return mmap.mmap(-1, mmap.PAGESIZE)


def read_page(page: mmap.mmap) -> tuple[End, bool]:
    """What a worker that has ended wrote: its end, and whether it made progress."""
    written = page[_END]
    return End(written) if written <= End.FINAL else End.PLAIN, bool(page[_PROGRESS])


def begin(page: mmap.mmap | None, replaced: int) -> None:
    """Sets this module up in a forked worker.

    Args:
        page: shared with the fork server; None if it may not be replaced.
        replaced: number of its predecessors.
    """
    global _page, _server, predecessors, rejoins
    _page, _server, predecessors, rejoins = page, os.getppid(), replaced, 0


def is_possible() -> bool:
    """Whether this process would be replaced if a signal ended it, or another worker's death does."""
    return _page is not None and _page[_END] in (End.IF_KILLED, End.PEER_DIED)


def is_due() -> bool:
    """Whether this process ends because another worker died, and is replaced."""
    return _page is not None and _page[_END] == End.PEER_DIED


def follows_death() -> bool:
    """Whether torchrun did not make this start, but a worker's death: some workers may not come."""
    return predecessors + rejoins > 0


def join() -> None:
    """This process takes part in a job from here on."""
    _write(End.IF_KILLED)


def peer_died() -> None:
    """This process ends because another worker died; no effect after `leave`."""
    _write(End.PEER_DIED)


def stay() -> bool:
    """This process stays after another worker's death: it ends no more. Progress that it has made counts.

    Returns:
        Whether it may: False after `leave`, or without a page.
    """
    global rejoins
    if _page is None:
        return False
    with _lock:
        if _page[_END] != End.PEER_DIED:
            return False
        _page[_END] = End.IF_KILLED
        rejoins += 1
    return True


def leave() -> None:
    """The end of this process is not replaced from here on."""
    _write(End.FINAL)


def made_progress() -> None:
    """A step was committed in this process: its death is no sign that a replacement would die as well."""
    if _page is not None:
        _page[_PROGRESS] = 1


def write_widths(tables: Collection[tuple[int, ...]]) -> None:
    """Says for which records this process compiles loops: processes that are forked later have them.

    Args:
        tables: for each table the bytes of a row in each column; too many of them are left out.
    """
    if _page is None or _number(_page, 0):
        return
    numbers: list[int] = []
    for widths in sorted(set(tables)):
        if 0 < sum(widths) <= MOST_RECORD_BYTES and len(numbers) + 1 + len(widths) <= MOST_WIDTHS:
            numbers += [len(widths), *widths]
    for place, number in enumerate(numbers, 1):
        _NUMBER.pack_into(_page, _WIDTHS + place * _NUMBER.size, number)
    _NUMBER.pack_into(_page, _WIDTHS, len(numbers))  # last: the server may read meanwhile
    if numbers:
        with suppress(OSError):  # it has ended, or this process has become another user's
            os.kill(_server, signal.SIGCHLD)


def read_widths(page: mmap.mmap) -> set[tuple[int, ...]]:
    """What a worker's `write_widths` has written; an empty set for anything else."""
    found = set[tuple[int, ...]]()
    place, end = 1, _number(page, 0)
    if end > MOST_WIDTHS:
        return found
    while place <= end:
        count = _number(page, place)
        widths = tuple(_number(page, place + one) for one in range(1, min(count, end - place) + 1))
        if not 0 < count == len(widths) or not 0 < sum(widths) <= MOST_RECORD_BYTES or 0 in widths:
            return set()
        found.add(widths)
        place += 1 + count
    return found


def _number(page: mmap.mmap, place: int) -> int:
    return _NUMBER.unpack_from(page, _WIDTHS + place * _NUMBER.size)[0]


def _write(end: End) -> None:
    if _page is None:
        return
    with _lock:
        if _page[_END] < end:
            _page[_END] = end
