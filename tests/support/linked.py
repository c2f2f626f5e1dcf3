"""Ranks of one process that are linked by real connections, each with a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ecemb.net.links import Link, keep
from ecemb.net.mesh import Mesh
from support.processes import DEADLINE_S


def connected() -> tuple[socket.socket, socket.socket]:
    """The ends of a connection. Sockets of other families drop nothing unread."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return keep(one), keep(other)


def linked(size: int) -> list[list[Link]]:
    """The links of ranks of which each is linked with each other one."""
    links: list[list[Link]] = [[] for _ in range(size)]
    for i in range(size):
        for j in range(i):
            one, other = connected()
            links[i].append(Link(j, one))
            links[j].append(Link(i, other))
    return links


@contextmanager
def mesh(size: int, timeout_s: float = DEADLINE_S) -> Iterator[list[Mesh]]:
    """The meshes of ranks of which each is linked with each other one."""
    ranks = [Mesh(links, rank, size, timeout_s) for rank, links in enumerate(linked(size))]
    try:
        yield ranks
    finally:
        for one in ranks:
            one.close()


def together(size: int, run: Callable[[int], None]) -> None:
    """Runs a function of the rank in all ranks' threads, which end."""
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
