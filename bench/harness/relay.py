"""`python -m bench.harness.relay GBIT US NAMESPACE ...`: carries packets between hosts, each after a delay.

For kernels that have no queue that delays. Each host has a TUN device, whose packets come to this process. It
sends each packet on when the link of its sender, the delay, and the link of its receiver have let it pass. It
ends when its input does. Imports little, since it is a process of its own.

Owns: the devices, and `enter`. Must not know: what the packets carry.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

INTERFACE = "bench0"
"""Of each host's link: a name that no machine has for its own."""
MTU_BYTES = 65_000
"""Of the devices: the fewer packets, the faster is this process."""
READY = b"ready\n"
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_IPV4, _DESTINATION = 4, slice(16, 20)
_PACKET_BYTES = 1 << 16


@dataclass
class Links:
    """When packets pass the links of hosts.

    Attributes:
        bytes_per_s: Of each link, each way.
        delay_s: Of a packet on its way.
        free: (host, whether it receives) -> when its link has passed all packets so far.
    """

    bytes_per_s: float
    delay_s: float
    free: dict[tuple[int, bool], float] = field(default_factory=dict[tuple[int, bool], float])

    def arrives(self, now: float, size: int, sender: int, receiver: int) -> float:
        """When a packet of `size` bytes, which its sender sends now, has passed the receiver's link."""
        took_s = size / self.bytes_per_s
        sent = max(now, self.free.get((sender, False), 0.0)) + took_s
        self.free[sender, False] = sent
        arrived = max(sent + self.delay_s - took_s, self.free.get((receiver, True), 0.0)) + took_s
        self.free[receiver, True] = arrived
        return arrived


def address(host: int) -> str:
    """Of a host; all are of one subnet."""
    return f"10.213.78.{host + 1}"


def host_of(packet: bytes, count: int) -> int | None:
    """The host that a packet is for; None if it is for none, or not of IPv4."""
    host = packet[_DESTINATION][-1] - 1 if packet[0] >> 4 == _IPV4 else -1
    return host if 0 <= host < count else None


def enter(name: str) -> None:
    """Moves this thread, and those that it starts later, into a network namespace.

    Raises:
        OSError: The kernel refuses.
    """
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(_NAMESPACES / name, os.O_RDONLY)
    try:
        if library.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"network namespace {name} can't be entered")
    finally:
        os.close(descriptor)


def opened(name: str) -> int:
    """A new TUN device in a namespace; the descriptor stays good in any other."""
    enter(name)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def carry(devices: Sequence[int], links: Links) -> None:
    """Carries packets until standard input ends."""
    on_the_way: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        wait_s = max(0.0, on_the_way[0][0] - time.perf_counter()) if on_the_way else None
        ready, _, _ = select.select([0, *devices], [], [], wait_s)
        if 0 in ready and not os.read(0, 1):
            return
        now = time.perf_counter()
        for host, device in enumerate(devices):
            if device not in ready:
                continue
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(device, _PACKET_BYTES):
                    to = host_of(packet, len(devices))
                    if to is not None:
                        number += 1
                        due = links.arrives(now, len(packet), host, to)
                        heapq.heappush(on_the_way, (due, number, devices[to], packet))
        while on_the_way and on_the_way[0][0] <= time.perf_counter():
            _, _, device, packet = heapq.heappop(on_the_way)
            with contextlib.suppress(OSError):  # a device that is down takes no packet, as no cable would
                os.write(device, packet)


def main(words: Sequence[str]) -> None:
    rate_gbit, delay_us, *names = words
    devices = [opened(name) for name in names]
    with contextlib.suppress(PermissionError):  # the control's round trip shows whether it is late
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # ranks keep all processors busy
    os.write(1, READY)
    carry(devices, Links(float(rate_gbit) * 1e9 / 8, float(delay_us) / 1e6))


if __name__ == "__main__":
    main(sys.argv[1:])
