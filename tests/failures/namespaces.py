"""Network namespaces that stand for hosts with addresses of their own, and links that can be cut.

All hang on a bridge in a namespace of its own, so that the machine's network stays as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess

_PREFIX = "ecemb-test-"
INTERFACE = "eth0"


class NotPossible(Exception):
    """This machine can't make namespaces; says why."""


class Namespaces:
    """Hosts 1 .. count. A context: at its end all namespaces are gone.

    Raises:
        NotPossible: not root, no `ip`, or the kernel refuses.
    """

    def __init__(self, count: int) -> None:
        self._names = [f"{_PREFIX}{os.getpid()}-{index}" for index in range(count + 1)]  # 0: the bridge's

    def __enter__(self) -> Namespaces:
        if os.geteuid() != 0:
            raise NotPossible("network namespaces take root")
        if shutil.which("ip") is None:
            raise NotPossible("network namespaces take the program ip, of iproute2")
        _remove_leftovers()
        try:
            self._make()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, subprocess.CalledProcessError):
                raise NotPossible(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in set(self._names) & set(_existing()):
            _ip("netns", "delete", name)

    def address(self, host: int) -> str:
        """Of a host; the same subnet for all."""
        return f"10.213.77.{host}"

    def inside(self, host: int) -> list[str]:
        """Words that a command begins with to run on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    def cut(self, host: int) -> None:
        """Take a host's link down: nothing arrives, and no host is notified."""
        self._bridge("link", "set", f"host{host}", "down")

    def mend(self, host: int) -> None:
        """Take it up again."""
        self._bridge("link", "set", f"host{host}", "up")

    def _make(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
        self._bridge("link", "add", "bridge", "type", "bridge")
        self._bridge("link", "set", "bridge", "up")
        for host, name in list(enumerate(self._names))[1:]:
            port = f"host{host}"
            self._bridge("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            self._bridge("link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def _bridge(self, *words: str) -> None:
        _ip("-n", self._names[0], *words)


def _remove_leftovers() -> None:
    """Of tests that were killed."""
    for name in _existing():
        if name.startswith(_PREFIX) and not os.path.exists(f"/proc/{name.split('-')[2]}"):
            _ip("netns", "delete", name)


def _existing() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line]


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=300).stdout
