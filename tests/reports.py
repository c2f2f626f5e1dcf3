"""Reports of arenas, made up: what the tests of seats and of the rendezvous start from."""

from __future__ import annotations

from collections.abc import Sequence

from ecemb.header import Constants, Header, State
from ecemb.roster import Report


def header(rank: int, domains: Sequence[str], **words: int | State) -> Header:
    size = len(domains)
    constants = Constants(
        job="job",
        arena_id=f"{rank:08x}",
        rank=rank,
        world_size=size,
        n=2,
        k=1,
        positions=tuple(range(size)),
        domains=tuple(domains),
        layout_hash="",
        layout="",
        block_words=((1,),) * size,
        regions=(("rows", 0),),
    )
    defaults = {"state": State.LIVE, "joined": 1, "generation_id": 7, "opened": 1}
    return Header(constants, **{**defaults, "committed": 3, "prepared": 3, **words})


def report(rank: int, host: str, domains: Sequence[str], **words: int | State) -> Report:
    return Report(host, f"/{host}/{rank}", header(rank, domains, **words), None, None)
