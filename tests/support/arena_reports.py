"""Reports of arenas, made up: what the tests of seats and of the rendezvous start from."""

from __future__ import annotations

from collections.abc import Sequence

from ecemb.memory.header import Header, Identity, State
from ecemb.net.assignment import Report


def header(rank: int, domains: Sequence[str], **words: int | State) -> Header:
    constants = Identity("job", f"{rank:08x}", rank, len(domains), tuple(domains), fill=1)
    defaults = {"state": State.LIVE, "joined": 1, "generation_id": 7, "opened": 1}
    return Header(constants, **{**defaults, "committed": 3, "prepared": 3, **words})


def report(rank: int, host: str, domains: Sequence[str], **words: int | State) -> Report:
    return Report(host, f"/{host}/{rank}", header(rank, domains, **words), None, None)
