"""The network of a simulated job: torchrun's store, gloo's messages, and the ranks' own connections.

Bytes arrive late, in pieces, and not in the order of their senders. A process that ends takes what it has not
sent with it, and sometimes what it has. Links can be cut, with an end of file at both ends, or go silent.

gloo reads a message's memory when it is delivered, not when `send` is called. Work that a death ends counts
as completed, and raises only in `wait`.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ecemb.net.collectives import Transport
from ecemb.net.error_file import Activity
from ecemb.net.mesh import Mesh, Notes
from ecemb.net.network import Network
from simulator.baton import Baton

if TYPE_CHECKING:
    from simulator.job import Rank

_OVER, _LATE = 0, -1
_SOCKET, _OUT_AT, _OUT_LEFT, _IN_AT, _IN_LEFT, _IN_FLAGS = range(6)


class Store:
    """torchrun's store, which outlives its workers."""

    def __init__(self, baton: Baton) -> None:
        self.baton = baton
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self.baton.moment()
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.baton.moment()
        if key not in self.values:
            raise RuntimeError(f"the simulated store has no {key}")
        return self.values[key]

    def check(self, keys: Sequence[str]) -> bool:
        self.baton.moment()
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.baton.moment()
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.baton.moment()
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = value.encode()
        return self.values[key]

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self.baton.moment()
        self.values.update({key: value.encode() for key, value in zip(keys, values, strict=True)})

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        self.baton.moment()
        return self.values.pop(key, None) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        until = self.baton.now + timeout.total_seconds()
        if not self.baton.block(lambda: all(key in self.values for key in keys), until):
            raise RuntimeError(f"wait timeout after {timeout}, keys: {keys}")


class Pipe:
    """One direction of a connection."""

    def __init__(self) -> None:
        self.pieces = deque[tuple[float, bytes]]()  # when it arrives, and what
        self.size = 0
        self.is_closed = self.is_silent = False

    def arrived(self, now: float) -> bool:
        return bool(self.pieces) and not self.is_silent and self.pieces[0][0] <= now

    def ended(self) -> bool:
        return self.is_closed and not self.pieces and not self.is_silent


class End:
    """This end of a connection, as far as a `Mesh` uses a socket."""

    def __init__(self, number: int, out: Pipe, into: Pipe) -> None:
        self.number, self.out, self.into = number, out, into

    def fileno(self) -> int:
        return self.number

    def shutdown(self, how: int) -> None:
        self.out.is_closed = self.into.is_closed = True

    def close(self) -> None:
        self.shutdown(socket.SHUT_RDWR)


class Work:
    """`dist.Work`: of some transfers, all of which have to end."""

    def __init__(self, net: Net, parts: int) -> None:
        self._net, self._left = net, parts
        self.error = ""

    def end(self, error: str = "") -> None:
        self._left, self.error = self._left - 1, self.error or error

    def is_completed(self) -> bool:
        return self._left <= 0 or bool(self.error)

    def wait(self, timeout: timedelta) -> bool:
        baton = self._net.baton
        if not baton.block(self.is_completed, baton.now + timeout.total_seconds()):
            self.error = f"Timed out waiting {timeout} for recv operation to complete"
        if self.error:
            raise RuntimeError(self.error)
        return True


class Transfer:
    """A message of gloo: delivered when both ends have begun."""

    def __init__(self) -> None:
        self.sent: tuple[Any, Work] | None = None
        self.wanted: tuple[Any, Work] | None = None

    def fail(self, error: str) -> None:
        for end in (self.sent, self.wanted):
            if end is not None:
                end[1].end(error)


class Net:
    """The network of one life of a job.

    Args:
        baton: schedules.
        rng: of the run.
        delay_s: mean delay of a message.
        room: bytes that a connection takes before its sender waits.
    """

    def __init__(self, baton: Baton, rng: random.Random, delay_s: float, room: int) -> None:
        self.baton, self.rng = baton, rng
        self._delay_s, self._room = delay_s, room
        self._pipes: dict[tuple[bytes, int, int], Pipe] = {}
        self._ends: dict[int, End] = {}
        self._numbers = itertools.count(100)
        self._transfers = defaultdict[tuple[Any, ...], deque[Transfer]](deque)
        self._broken: dict[frozenset[int], str] = {}  # pairs of ranks whose connections have ended
        self._silent: set[frozenset[int]] = set()

    def delay(self) -> float:
        return self.rng.expovariate(1 / self._delay_s) if self._delay_s else 0.0

    # --- connections ---

    def end_of(self, purpose: bytes, rank: int, peer: int) -> End:
        """This rank's end of a connection, for one purpose."""
        pair = frozenset((rank, peer))
        pipes: list[Pipe] = []
        for way in ((purpose, rank, peer), (purpose, peer, rank)):
            pipe = self._pipes.setdefault(way, Pipe())
            pipe.is_silent |= pair in self._silent
            pipe.is_closed |= pair in self._broken
            pipes.append(pipe)
        end = End(next(self._numbers), *pipes)
        self._ends[end.number] = end
        return end

    def move(self, plan_at: int, polled_at: int, count: int, all_sent: int, ms: int) -> int:
        """The loop of `ecemb.net.mesh`, by the same arguments."""
        until = self.baton.now + ms / 1000
        plan = np.ctypeslib.as_array((ctypes.c_int64 * (6 * count)).from_address(plan_at)).reshape(count, 6)
        while True:
            self.baton.moment()
            waiting: list[Callable[[], bool]] = []
            is_over = True
            for i, channel in enumerate(plan):
                end = self._ends[int(channel[_SOCKET])]
                if channel[_OUT_LEFT] > 0 and not self._send(end, channel):
                    return i + 1
                if channel[_IN_LEFT] > 0:
                    if end.into.ended():
                        return i + 1
                    if end.into.arrived(self.baton.now):
                        self._receive(end.into, channel)
                if channel[_IN_LEFT] > 0:
                    is_over = False
                    waiting.append(lambda pipe=end.into: pipe.arrived(self.baton.now) or pipe.ended())
                if channel[_OUT_LEFT] > 0:
                    is_over = is_over and not all_sent
                    waiting.append(lambda pipe=end.out: pipe.size < self._room or pipe.is_closed)
            if is_over:
                return _OVER
            if not self.baton.block(lambda: any(one() for one in waiting), until):  # noqa: B023
                return _LATE

    def _send(self, end: End, channel: Any) -> bool:
        pipe = end.out
        if pipe.is_closed:
            return False
        size = min(int(channel[_OUT_LEFT]), self._room - pipe.size)
        if size <= 0:
            return True
        if self.rng.random() < 0.1:
            size = self.rng.randint(1, size)
        at = self.baton.now + self.delay()
        if pipe.pieces:
            at = max(at, pipe.pieces[-1][0])
        pipe.pieces.append((at, ctypes.string_at(int(channel[_OUT_AT]), size)))
        pipe.size += size
        self.baton.at(at, lambda: None)
        channel[_OUT_AT] += size
        channel[_OUT_LEFT] -= size
        return True

    def _receive(self, pipe: Pipe, channel: Any) -> None:
        at, data = pipe.pieces.popleft()
        size = min(len(data), int(channel[_IN_LEFT]))
        if self.rng.random() < 0.1:
            size = self.rng.randint(1, size)
        if not channel[_IN_FLAGS] & socket.MSG_TRUNC:
            ctypes.memmove(int(channel[_IN_AT]), data[:size], size)
        if data[size:]:
            pipe.pieces.appendleft((at, data[size:]))
        pipe.size -= size
        if not channel[_IN_FLAGS] & socket.MSG_TRUNC:
            channel[_IN_AT] += size
        channel[_IN_LEFT] -= size

    # --- gloo ---

    def transfer(
        self, key: tuple[Any, ...], source: int, to: int, array: Any, work: Work, *, sends: bool
    ) -> None:
        """One end of a message begins."""
        if why := self._broken.get(frozenset((source, to))):
            work.end(why)
            return
        queue = self._transfers[(*key, source, to)]
        one = next((t for t in queue if (t.sent if sends else t.wanted) is None), None)
        if one is None:
            queue.append(one := Transfer())
        if sends:
            one.sent = array, work
        else:
            one.wanted = array, work
        if one.sent is not None and one.wanted is not None:
            if frozenset((source, to)) not in self._silent:
                self.baton.at(self.baton.now + self.delay(), lambda: self._deliver((*key, source, to), one))

    def _deliver(self, key: tuple[Any, ...], one: Transfer) -> None:
        if one not in self._transfers[key] or one.sent is None or one.wanted is None:
            return  # failed meanwhile
        self._transfers[key].remove(one)
        (data, sent), (out, wanted) = one.sent, one.wanted
        if data.size > out.size:
            one.fail("the simulated message is longer than its receiver expects")
            return
        out[: data.size] = data
        sent.end()
        wanted.end()

    # --- failures ---

    def end(self, rank: int, *, loses: bool) -> None:
        """The process of a rank has ended: its peers read what has arrived, or all that it has sent."""
        for (_, source, to), pipe in self._pipes.items():
            if rank in (source, to):
                if source == rank and loses:
                    pipe.pieces = deque(piece for piece in pipe.pieces if piece[0] <= self.baton.now)
                pipe.is_closed = True
        self._break(lambda pair: rank in pair, "Connection closed by peer", rank)

    def cut(self, one: int, other: int, *, silently: bool) -> None:
        """The connections of two ranks end, or carry nothing any more."""
        pair = frozenset((one, other))
        if silently:
            self._silent.add(pair)
        for (_, source, to), pipe in self._pipes.items():
            if frozenset((source, to)) == pair:
                pipe.is_silent |= silently
                pipe.is_closed |= not silently
        if not silently:
            self._break(lambda which: which == pair, "Connection reset by peer", one, other)

    def _break(self, which: Callable[[frozenset[int]], bool], why: str, *ranks: int) -> None:
        everyone = {one for key in self._transfers for one in key[-2:]} | {*range(16)}
        for pair in {frozenset((a, b)) for a in ranks for b in everyone if a != b}:
            if which(pair):
                self._broken.setdefault(pair, why)
        for key, queue in self._transfers.items():
            if which(frozenset(key[-2:])):
                for one in queue:
                    one.fail(why)
                queue.clear()


class _Gloo:
    """gloo's messages, as `Transport` calls them."""

    def __init__(self, net: Net, rank: int, group: int) -> None:
        self._net, self._rank, self._group = net, rank, group

    def send(self, tensors: Sequence[Any], to: int, tag: int) -> Work:
        return self._begin(tensors[0], self._rank, to, tag, sends=True)

    def recv(self, tensors: Sequence[Any], source: int, tag: int) -> Work:
        return self._begin(tensors[0], source, self._rank, tag, sends=False)

    def _begin(self, tensor: Any, source: int, to: int, tag: int, *, sends: bool) -> Work:
        self._net.baton.moment()
        work = Work(self._net, 1)
        key = "message", self._group, tag
        self._net.transfer(key, source, to, tensor.numpy(), work, sends=sends)
        return work


class SimulatedTransport(Transport):
    """`Transport`, whose group is simulated: all but the calls of torch.distributed is the product's."""

    def __init__(self, net: Net, rank: int, size: int, group: int, timeout_s: float) -> None:
        self.rank, self.world_size = rank, size
        self._timeout_s, self._deadline = timeout_s, timedelta(seconds=timeout_s)
        self.activity = Activity()
        self._gloo = _Gloo(net, rank, group)
        self.fabric = None
        self.swap_mesh = Mesh([], rank, size, timeout_s, move=net.move)
        self.notes = Notes(self.swap_mesh)
        self._exchanges = self._barriers = 0
        self.sent_bytes = 0
        self._net, self._number, self._calls = net, group, 0

    def _all_to_all(self, send: Any, out: Any, what: str, *sizes: list[int]) -> None:
        receive, give = sizes or ([len(out) // self.world_size] * self.world_size,) * 2
        work: Any = self.started(lambda: self._start(send, out, receive, give), what)
        self.ended(work, what)

    def _start(self, send: Any, out: Any, receive: list[int], give: list[int]) -> Any:
        self._net.baton.moment()
        self._calls += 1
        work = Work(self._net, 2 * (self.world_size - 1))
        key = "all to all", self._number, self._calls
        ins, outs = np.cumsum([0, *receive]).tolist(), np.cumsum([0, *give]).tolist()
        for other in range(self.world_size):
            into, part = out[ins[other] : ins[other + 1]], send[outs[other] : outs[other + 1]]
            if other == self.rank:
                into[:] = part
                continue
            self._net.transfer(key, other, self.rank, into, work, sends=False)
            self._net.transfer(key, self.rank, other, part, work, sends=True)
            self._net.baton.moment()
        return work

    def close(self) -> None:
        for mesh in (self.swap_mesh, self.notes.mesh):
            mesh.close()


class SimulatedNetwork(Network):
    """`Network` of a simulated process."""

    def __init__(self, net: Net, process: Rank) -> None:
        self._net, self._process, self._groups = net, process, 0

    def control_group(self, patience_s: float) -> Transport:
        self._groups += 1
        rank, size = self._process.rank, self._process.world_size
        return SimulatedTransport(self._net, rank, size, self._groups, patience_s)

    def mesh(
        self,
        transport: Transport,
        near: Sequence[int],
        peer: Callable[[int, int], Any],
        secret: bytes,
        patience_s: float,
        activity: Any,
    ) -> Mesh:
        rank = transport.rank
        ends: Mapping[int, End] = transport.together(
            "connecting", lambda: {one: self._net.end_of(secret, rank, one) for one in near}
        )
        links: Any = [SimpleNamespace(peer=one, release=lambda end=end: end) for one, end in ends.items()]
        return Mesh(links, rank, transport.world_size, patience_s, activity, self._net.move)
