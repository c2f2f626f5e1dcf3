"""A reserved port is free for the process that names it, and for no other."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from bench.harness.ports import ReservedPort


@pytest.mark.parametrize("libuv", [False, True])
def test_a_store_listens_there_and_is_found(libuv: bool) -> None:
    with ReservedPort() as port:
        store = dist.TCPStore(
            "127.0.0.1", port.number, is_master=True, wait_for_workers=False, use_libuv=libuv
        )
        dist.TCPStore("127.0.0.1", port.number, is_master=False).set("key", "value")
        assert store.get("key") == b"value"


def test_nobody_else_gets_it() -> None:
    with ReservedPort() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port.number))
        assert all(chosen != port.number for chosen in chosen_ports(200))


def chosen_ports(count: int) -> list[int]:
    """Ports that the kernel chooses, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def test_it_is_given_back() -> None:
    with ReservedPort() as port:
        assert port._socket.fileno() >= 0
    assert port._socket.fileno() == -1
