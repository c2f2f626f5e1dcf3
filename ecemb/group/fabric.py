"""Waits for the work of a group, and the fabric, which carries deltas from device to device.

Must not know: what messages are about.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ..errors import EcembError, NotEnoughSpace, PeerFailure
from ..kernels.contract import Words
from .error_file import lost_peer
from .whereabouts import Whereabouts

T = TypeVar("T")


class Waits:
    """Waits for the work of a group, each time with a name and a deadline."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self._group = group
        self._timeout_s = timeout_s
        self._deadline = datetime.timedelta(seconds=timeout_s)
        self.whereabouts = Whereabouts()

    def close(self) -> None:
        """Ends the group. All ranks, each for itself."""
        dist.destroy_process_group(self._group)

    def started(self, start: Callable[[], T | None], what: str) -> T:
        """Starts work; `what` names it in the error.

        Raises:
            PeerFailure: a peer has died.
        """
        try:
            work = start()
        except RuntimeError as error:
            raise self.failure(what, 0.0, error) from error
        if work is None:
            raise EcembError(f"rank {self.rank} is not in the group that it uses for {what}")
        return work

    def ended(self, work: dist.Work, what: str) -> None:
        """Waits for `work`; again, if a signal's handler raised when it had just ended."""
        if work.is_completed():
            return
        began = time.monotonic()
        try:
            with self.whereabouts.waiting():
                work.wait(self._deadline)  # with it NCCL's wait blocks the host
            if not work.is_completed():
                raise RuntimeError("the wait has ended before it")
        except RuntimeError as error:
            raise self.failure(what, time.monotonic() - began, error) from error

    def failure(self, what: str, waited_s: float, error: Exception) -> PeerFailure:
        """The error of a wait that has failed."""
        return lost_peer(self.rank, self.world_size, what, waited_s, self._timeout_s, error)


class Fabric(Waits):
    """Messages from one device's memory to another's, over a group with a backend such as NCCL.

    All ranks, once: the constructor makes the group's connections, because point-to-point messages between
    some of the ranks may not be a group's first messages (`torch.distributed.batch_isend_irecv`).

    Args:
        group: a process group of all ranks, for this object alone.
        device: a device of this rank alone, for sending and receiving.
        timeout_s: deadline of every exchange.

    Raises:
        PeerFailure: the ranks can't reach each other.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        super().__init__(group, timeout_s)
        self.device = device
        self._room = torch.empty(0, dtype=torch.int64, device=device)
        here = torch.zeros(1, dtype=torch.float32, device=device)
        what = "connecting the devices"
        with self._on_device():
            self.ended(self.started(lambda: dist.all_reduce(here, group=group, async_op=True), what), what)

    def exchange(self, send: Mapping[int, Words], out: Mapping[int, Words], what: str) -> None:
        """See `Transport.exchange`. The messages in `out` are in host memory when this returns.

        The device's current stream is waited for.

        Raises:
            NotEnoughSpace: the device has no room for the messages; none was sent from here.
            PeerFailure: as for `Transport.exchange`.
        """
        messages = [*send.values(), *out.values()]
        if not messages:
            return
        sizes = [len(words) for words in messages]
        parts = self._taken(sum(sizes), what).split(sizes)
        held = [torch.from_numpy(words.view(np.int64)) for words in messages]
        with self._on_device():
            for part, words in zip(parts[: len(send)], held, strict=False):
                part.copy_(words, non_blocking=True)  # not pinned, so that it is read before this returns
            peers = [(dist.isend, rank) for rank in send] + [(dist.irecv, rank) for rank in out]
            operations = [
                dist.P2POp(start, part, group=self._group, group_peer=rank)
                for (start, rank), part in zip(peers, parts, strict=True)
            ]
            for work in self.started(lambda: dist.batch_isend_irecv(operations), what):
                self.ended(work, what)
            for words, part in zip(held[len(send) :], parts[len(send) :], strict=True):
                words.copy_(part)

    @property
    def held_bytes(self) -> int:
        """Device memory for messages."""
        return self._room.nbytes

    def _taken(self, size: int, what: str) -> torch.Tensor:
        """int64 [size] of the device's memory, of any content; the earlier content is lost."""
        if size > len(self._room):
            self._room = self._room.new_empty(0)  # free it first: both may not fit
            try:
                self._room = self._room.new_empty(size + size // 4)
            except torch.OutOfMemoryError:
                raise NotEnoughSpace(
                    f"{what} needs {8 * (size + size // 4)} bytes of {self.device}'s memory, which are not "
                    f"free: train with a smaller batch or window, or leave parity_backend out, so that "
                    f"deltas go from host memory"
                ) from None
        return self._room[:size]

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes the device current, as NCCL requires."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
