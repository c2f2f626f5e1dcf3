"""The connections that ecemb makes for itself, beside the training's own.

Owns their creation, with the session's deadline: the control group and its notes, which carry the collectives
of the protocol; the streams, or the fabric that `parity_backend` asks for, which carry deltas; and those over
which ranks ask for what they lost. All are collective calls.

A gloo device is a thread that looks for messages a hundred times a second, also while there are none. The
control group uses that of the training, where there is one.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from ..coding.placement import Placement
from ..errors import ConfigurationError
from ..group.channels import Mesh, Notes
from ..group.collectives import Fabric, Transport
from ..group.links import Listener, Peer, connect, neighbours
from ..recovery.background import partners
from ..recovery.plan import RecoveryPlan
from ..session import Session
from .request import ParityBackend

_ON_DEVICE = "ecemb_gloo"
"""The name in torch of gloo groups on a device that another group has made."""
_WHOLE_REBUILD_S = 30 * 86400.0
"""How long a holder waits for a request."""


def control_group(session: Session, *, notes: bool = False) -> Transport:
    """A gloo group of all ranks, apart from the training's collectives. All ranks.

    Args:
        session: This process's.
        notes: Whether the group has notes, which carry the rounds of steps and of `barrier`.
    """
    patience = datetime.timedelta(seconds=session.patience_s)
    backend = "gloo"
    if training_devices():
        backend = _ON_DEVICE
        if backend not in dist.Backend.backend_list:
            dist.Backend.register_backend(backend, _on_training_devices, devices=["cpu"])
    group = cast("dist.ProcessGroup", dist.new_group(backend=backend, timeout=patience))
    transport = Transport(group, session.patience_s)
    transport.whereabouts = session.whereabouts
    if notes:
        near = neighbours(session.rank, session.world_size)
        transport.notes = Notes(_mesh(session, transport, near, b"notes"))
    return transport


def streams(session: Session, transport: Transport, placement: Placement) -> Mesh:
    """This rank's connections for deltas, with those that keep each other's parity. All ranks."""
    near = {*placement.recipients(session.rank), *placement.senders(session.rank)}
    return _mesh(session, transport, sorted(near), b"streams")


def _mesh(session: Session, transport: Transport, near: Sequence[int], purpose: bytes) -> Mesh:
    """Connects this rank with some others, each of which names this rank as well.

    All ranks; none sends before all have called another collective.
    """
    with Listener() as listener:
        own = np.array([listener.port], np.uint64)
        ports = {peer: np.zeros(1, np.uint64) for peer in near}
        transport.exchange(dict.fromkeys(near, own), ports, "the ports of other ranks")
        peers = {
            peer: Peer(f"rank {peer} (host {session.hosts[peer]})", session.addresses[peer], int(port[0]))
            for peer, port in ports.items()
        }
        secret = bytes.fromhex(session.roster.secret) + purpose
        deadline = time.monotonic() + session.patience_s  # a busy rank is waited for
        links = connect(listener, session.rank, session.world_size, peers, secret, deadline)
    return Mesh(links, session.rank, session.world_size, session.patience_s, session.whereabouts)


def training_devices() -> Sequence[Any]:
    """The gloo devices of the training's default group; none if it has no gloo, or torch hides them."""
    world: Any = dist.group.WORLD
    if world is None:  # it has been destroyed: torch says so when a group is made
        return ()
    try:
        gloo: Any = world._get_backend(torch.device("cpu"))
    except RuntimeError:  # a group of devices alone
        return ()
    if not isinstance(gloo, dist.ProcessGroupGloo):
        return ()
    return getattr(getattr(gloo, "options", None), "_devices", ())


def _on_training_devices(store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta) -> Any:
    """A gloo backend that makes no device of its own; torch calls it for a new group."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = training_devices(), timeout
    return gloo(store, rank, world_size, options)


def requests(session: Session, transport: Transport, plan: RecoveryPlan) -> Mesh:
    """This rank's connections for a rebuild beside training. All ranks."""
    made = _mesh(session, transport, partners(plan, session.rank), b"requests")
    # A holder may get no request while other blocks are rebuilt; the failure detector knows which rank died.
    if session.rank not in plan.lost:
        made.timeout_s = _WHOLE_REBUILD_S
    transport.barrier("connecting for a rebuild")  # a request could be taken for a part of a handshake
    return made


def fabric(session: Session, backend: ParityBackend, transport: Transport) -> Fabric:
    """A group of all ranks that sends from each rank's own device. All ranks.

    Args:
        session: this process's.
        backend: of the group.
        transport: the control group.

    Raises:
        ConfigurationError: a rank has no device, or ranks share one.
    """
    device, name = transport.together("looking for a device", lambda: _device(backend))
    used = transport.gather(name, "comparing devices")
    if shared_by := [rank for rank, one in enumerate(used) if used.count(one) > 1]:
        raise ConfigurationError(
            f"parity_backend={backend!r} needs a device of its own for each rank, and ranks {shared_by} "
            f"share theirs: call torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count()) before "
            f"ecemb.protect(), or leave parity_backend out"
        )
    patience = datetime.timedelta(seconds=session.patience_s)
    group = cast("dist.ProcessGroup", dist.new_group(backend=backend, timeout=patience))
    return Fabric(group, device, session.patience_s)


def _device(backend: ParityBackend) -> tuple[torch.device, bytes]:
    """The device that a backend sends from, and a name that no other device has."""
    if torch.cuda.is_available() and dist.is_backend_available(backend):
        device = torch.device("cuda", torch.cuda.current_device())
        return device, str(torch.cuda.get_device_properties(device).uuid).encode()
    raise ConfigurationError(
        f"parity_backend={backend!r} needs a CUDA device for each rank and a torch that was built with "
        f"{backend}; one of them is missing here: leave parity_backend out, and deltas go over TCP"
    )
