"""The checkpoint that a start begins with, or takes tables from: compared with the model on all ranks.

Owns the collective half of these checks; nothing is written before they have passed.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import cast

from ..checkpoint import contents, saver
from ..checkpoint.contents import Shard
from ..checkpoint.interface import Stored
from ..checkpoint.transfer import Sources, Taking, Transfer, examine, refusal
from ..errors import CheckpointFailed
from ..group.collectives import Transport
from ..session import Session
from .request import Request


def check_checkpoint(
    session: Session,
    request: Request,
    transport: Transport,
    stored: Stored,
    shards: tuple[Shard, ...],
    everywhere: Collection[str],
) -> Sources:
    """Compares the model with the checkpoint that the plan begins with. All ranks.

    Returns:
        The stored values that this rank's tables are read from.
    """
    found: Sources = {}
    here = session.rank, session.world_size, everywhere, request.renamed
    saver.shared(
        transport,
        f"comparing the model with {stored.name}",
        lambda: found.update(contents.check(stored, shards, *here)) or "",
    )
    return found


def check_transfer(
    request: Request, transport: Transport, shards: tuple[Shard, ...], everywhere: Collection[str]
) -> Taking:
    """Finds what the training takes from another one, and compares it with the model. All ranks.

    Raises:
        CheckpointError: there is no checkpoint, or something doesn't fit on a rank; the same on all.
    """
    transfer = cast("Transfer", request.transfer)
    reader = transport.together("looking at transfer=", request.source)
    stored = saver.find(reader, transport, None)
    place = saver.name_of(reader)
    if stored is None:
        raise CheckpointFailed(f"transfer= {place} has no complete checkpoint: give the folder of one")
    tables = [shard.describe() for shard in shards]

    def look() -> tuple[Taking, list[str]]:
        contents.check_format(stored)
        return examine(transfer, stored, tables, everywhere)

    taking, problems = transport.together("comparing the model with transfer=", look)
    each = transport.gather(json.dumps(problems).encode(), "sharing what doesn't fit")
    if every := list(dict.fromkeys(one for text in each for one in json.loads(text))):
        raise refusal(place, stored, every)
    return taking
