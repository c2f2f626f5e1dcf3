"""Hosts as network namespaces of this machine, each with a link of a rate and, where the kernel can, a delay.

Owns: the namespaces, the bridge that connects them, and the queues of their links. The bridge is in a
namespace of its own, so that the machine's network stays as it is. A link is limited in both directions, at
its host and at the bridge; a packet is delayed where it leaves its host. Hosts share all else of the machine:
processors, file systems, the hostname. Takes root and iproute2. Where the kernel can't delay, `Relayed` hosts
have no bridge: a process carries their packets.

Must not know: what ranks do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.harness import relay
from bench.harness.ranks import Line, Ranks
from bench.harness.relay import INTERFACE, address, enter
from bench.harness.result import Unavailable

NETEM, TBF, RELAY = "netem", "tbf", "relay"
"""What limits a link: a queue of the kernel, or the process of `bench.harness.relay`."""
_PREFIX = "ecemb-bench-"
_COMMAND_S = 60.0
_CREDIT_S = 200e-6
"""A queue that was empty sends this much of its rate at once. With less, a link of 10 Gbit/s stays far below
its rate, since the kernel looks at the queue too late for that."""
_LEAST_PACKET_BYTES, _MOST_PACKET_BYTES = 1 << 14, (1 << 16) - 1
"""Of the packets that a host gives to its queue, which a network card would cut into frames."""
_NETEM_PACKETS = 10_000
_TBF_LATENCY = "50ms"
"""The longest that a packet waits in a queue of `TBF`; it is dropped before it would wait longer."""


@dataclass(frozen=True)
class Link:
    """What a host's link to all others is to be.

    Attributes:
        name: For a row's labels.
        rate_gbit: Gbit/s, each way.
        delay_us: From a host to another, if the kernel has a queue that delays.
    """

    name: str
    rate_gbit: float
    delay_us: float


class Hosts:
    """Hosts 0 .. `count` - 1, each on a link like all others. A context: at its end all namespaces are gone.

    A process may have hosts on links of several rates.

    Args:
        count: How many hosts.
        link: Of each of them.

    Attributes:
        queue: What limits the links, after entering: `NETEM`, or `TBF` where the kernel lacks it.
        delay_us: What a packet is delayed by: the link's, or 0 by `TBF`, which has no delay.

    Raises:
        Unavailable: Not root, no iproute2, or the kernel refuses; on entering.
    """

    _kind = "bridged"

    def __init__(self, count: int, link: Link) -> None:
        self._link, self.queue, self.delay_us = link, NETEM, link.delay_us
        prefix = f"{_PREFIX}{os.getpid()}-{self._kind}-{link.rate_gbit:g}g"
        self._bridge, self._names = f"{prefix}-bridge", [f"{prefix}-{host}" for host in range(count)]

    def __enter__(self) -> Hosts:
        check()
        _remove_leftovers()
        try:
            self._make()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, subprocess.CalledProcessError):
                raise Unavailable(
                    f"{' '.join(error.cmd)}: {error.stderr.strip()}; network namespaces can't be made here: "
                    f"run the question where root has CAP_NET_ADMIN and CAP_SYS_ADMIN"
                ) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in {self._bridge, *self._names} & set(_existing()):
            _run("ip", "netns", "delete", name)

    def ranks(self, count: int, function: Callable[..., None], *args: Any, deadline_s: float) -> Ranks:
        """Ranks that call a function, each on a host of its own; see `Ranks`."""
        imports = (function.__module__,)
        return Ranks(count, inside, self._names, function, *args, deadline_s=deadline_s, imports=imports)

    def _make(self) -> None:
        for name in (self._bridge, *self._names):
            _run("ip", "netns", "add", name)
        self._ip(self._bridge, "link", "add", "bridge", "type", "bridge")
        self._ip(self._bridge, "link", "set", "bridge", "up")
        for host, name in enumerate(self._names):
            port = f"host{host}"
            peer = ("peer", "name", INTERFACE, "netns", name)
            self._ip(self._bridge, "link", "add", port, "type", "veth", *peer)
            self._ip(self._bridge, "link", "set", port, "master", "bridge", "up")
            self._ip(name, "address", "add", f"{address(host)}/16", "dev", INTERFACE)
            self._ip(name, "link", "set", INTERFACE, "up")
            self._ip(name, "link", "set", "lo", "up")
            self._limit(name, INTERFACE, self._link.delay_us)
            self._limit(self._bridge, port, 0.0)

    def _limit(self, name: str, device: str, delay_us: float) -> None:
        """Give what a device sends its rate, and its delay."""
        rate, packet_bytes, burst_bytes = credit(self._link.rate_gbit)
        self._ip(name, "link", "set", device, "gso_max_size", str(packet_bytes))
        begin = ["tc", "-n", name, "qdisc", "replace", "dev", device, "root"]
        if self.queue == NETEM:
            words = [*begin, NETEM, "rate", rate, "delay", f"{delay_us:g}us", "limit", str(_NETEM_PACKETS)]
            if not _fails(words):
                return
            self.queue, self.delay_us = TBF, 0.0
        _run(*begin, TBF, "rate", rate, "burst", f"{burst_bytes}b", "latency", _TBF_LATENCY)

    def _ip(self, name: str, *words: str) -> None:
        _run("ip", "-n", name, *words)


class Relayed(Hosts):
    """Hosts whose packets a process carries, which limits and delays them: `bench.harness.relay`."""

    _kind = "relayed"

    def __init__(self, count: int, link: Link) -> None:
        super().__init__(count, link)
        self.queue = RELAY
        self._process: subprocess.Popen[bytes] | None = None

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate(timeout=_COMMAND_S)  # its input ends, and so does it
        super().__exit__()

    def _make(self) -> None:
        for name in self._names:
            _run("ip", "netns", "add", name)
        words = [f"{self._link.rate_gbit:g}", f"{self._link.delay_us:g}", *self._names]
        self._process = subprocess.Popen(
            [sys.executable, "-m", relay.__name__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        if (output := self._process.stdout) is None or output.readline() != relay.READY:
            _, said = self._process.communicate(timeout=_COMMAND_S)
            why = said.decode(errors="replace").strip().splitlines()[-1:]
            raise Unavailable(f"ip tuntap: {' '.join(why)}; a relay takes TUN devices: load the module tun")
        for host, name in enumerate(self._names):
            self._ip(name, "address", "add", f"{address(host)}/24", "dev", INTERFACE)
            self._ip(name, "link", "set", INTERFACE, "mtu", str(relay.MTU_BYTES), "up")
            self._ip(name, "link", "set", "lo", "up")


def check() -> None:
    """Raises Unavailable where no hosts can be made: not root, or no iproute2."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces take root: run the question as root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise Unavailable(f"network namespaces take the program {program}, of iproute2: install that")


def credit(rate_gbit: float) -> tuple[str, int, int]:
    """A link's rate as tc has it, the largest packet that a host queues, and what `TBF` sends at once.

    The latter is at least two packets, so packets of slow links are small.
    """
    credit_bytes = int(rate_gbit * 1e9 / 8 * _CREDIT_S)
    packet_bytes = min(max(credit_bytes // 2, _LEAST_PACKET_BYTES), _MOST_PACKET_BYTES)
    return f"{round(rate_gbit * 1000)}mbit", packet_bytes, max(credit_bytes, 2 * packet_bytes)


def inside(line: Line, names: list[str], function: Callable[..., None], *args: Any) -> None:
    """What a rank does: it enters its host's namespace, and calls a function there."""
    enter(names[int(os.environ["RANK"])])
    os.environ.update(MASTER_ADDR=address(0), GLOO_SOCKET_IFNAME=INTERFACE)
    function(line, *args)


def moved_bytes() -> tuple[int, int]:
    """Bytes that this process's host has received and sent over its link, frames' headers included.

    Both are 0 outside of hosts.
    """
    for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = numbers.split()
            return int(fields[0]), int(fields[8])
    return 0, 0


def _remove_leftovers() -> None:
    """Of processes that were killed."""
    for name in _existing():
        if name.startswith(_PREFIX) and not os.path.exists(f"/proc/{name.split('-')[2]}"):
            _run("ip", "netns", "delete", name)


def _existing() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=_COMMAND_S).stdout


def _fails(words: list[str]) -> bool:
    return subprocess.run(words, check=False, capture_output=True, timeout=_COMMAND_S).returncode != 0
