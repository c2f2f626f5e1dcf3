"""The network of a start: the control group of all ranks, and meshes of the ranks' own connections.

A session has a `Network`, through which `open_memory` makes all of these. A simulation of all ranks in one
process hands over its own.

A gloo device is a thread that polls for messages a hundred times a second, also while there are none. The
control group uses the device of the training's group, if it has one.

Must not know: what is sent, and why two ranks are connected.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from .collectives import Transport
from .error_file import Activity
from .links import Listener, Peer, connect
from .mesh import Mesh

_ON_DEVICE = "ecemb_gloo"
"""Name of the torch backend for gloo groups on the device of another group."""


class Network:
    """Makes groups over gloo, and connections over TCP."""

    def control_group(self, patience_s: float) -> Transport:
        """Makes a gloo group of all ranks. All ranks.

        Args:
            patience_s: deadline of the group's collectives, in seconds.
        """
        patience = datetime.timedelta(seconds=patience_s)
        backend = "gloo"
        if training_devices():
            backend = _ON_DEVICE
            if backend not in dist.Backend.backend_list:
                # As gloo itself: torch asks a new group for the backend of the training's `device_id`.
                dist.Backend.register_backend(backend, _on_training_devices, devices=["cpu", "cuda"])
        group = cast("dist.ProcessGroup", dist.new_group(backend=backend, timeout=patience))
        return Transport(group, patience_s)

    def mesh(
        self,
        transport: Transport,
        near: Sequence[int],
        peer: Callable[[int, int], Peer],
        secret: bytes,
        patience_s: float,
        activity: Activity,
    ) -> Mesh:
        """Connects this rank with some other ranks. All ranks.

        Args:
            transport: the control group.
            near: the other ranks; each of them has this rank in its own `near`.
            peer: (rank, port of its listener) -> the peer.
            secret: of the handshake; different for each mesh.
            patience_s: deadline of the connections, and longest time of a wait without a byte.
            activity: shows that the main thread waits.
        """
        rank, size = transport.rank, transport.world_size
        with Listener() as listener:
            own = np.array([listener.port], np.uint64)
            ports = {one: np.zeros(1, np.uint64) for one in near}
            transport.exchange(dict.fromkeys(near, own), ports, "the ports of other ranks")
            peers = {one: peer(one, int(port[0])) for one, port in ports.items()}
            deadline = time.monotonic() + patience_s
            # No rank sends before all have connected: its data could be taken for a part of a handshake.
            links = transport.together(
                "connecting", lambda: connect(listener, rank, size, peers, secret, deadline)
            )
        return Mesh(links, rank, size, patience_s, activity)


def training_devices() -> Sequence[Any]:
    """The gloo devices of the training's default group; empty if it has no gloo, or torch hides them."""
    world: Any = dist.group.WORLD
    if world is None:  # destroyed by the script: torch raises when the next group is made
        return ()
    try:
        gloo: Any = world._get_backend(torch.device("cpu"))
    except RuntimeError:  # the group has no backend for the CPU
        return ()
    if not isinstance(gloo, dist.ProcessGroupGloo):
        return ()
    return getattr(getattr(gloo, "options", None), "_devices", ())


def _on_training_devices(store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta) -> Any:
    """Makes a gloo backend on the training's devices, without a new one. Called by torch for a new group."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = training_devices(), timeout
    return gloo(store, rank, world_size, options)
