"""The choice of code and placement, which spread the parity of new arenas over ranks and hosts.

Pure except for log lines: the same on all ranks. Must not know: arenas, plans.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from ..coding.code import Code
from ..coding.placement import Placement
from ..errors import PlacementError
from ..net.wording import counted

FailureDomain = Literal["auto", "host", "rank"]

logger: logging.Logger = logging.getLogger("ecemb")


def chosen(codes: Sequence[Code], hosts: Sequence[str], domain: FailureDomain) -> Code:
    """The first of `codes` that fits the ranks and hosts.

    With "auto", the first code that puts the blocks of each stripe on different hosts; if there is none, the
    first code that fits the number of ranks. One rank has no parity, so any code fits.

    Args:
        codes: one or more codes, by preference.
        hosts: rank -> its host.
        domain: the failure domain.

    Raises:
        PlacementError: no code fits; the message has the last code's reason, which names codes that fit.
    """
    if len(codes) == 1 or len(hosts) == 1:
        return codes[0]
    ranks, why = [str(rank) for rank in range(len(hosts))], ""
    for domains in {"auto": (hosts, ranks), "host": (hosts,), "rank": (ranks,)}[domain]:
        for code in codes:
            try:
                Placement.plan(code.n, code.k, domains)
            except PlacementError as error:
                why = str(error)
            else:
                return code
    asked = ", ".join(f"({code.n}, {code.k})" for code in codes)
    raise PlacementError(f"none of the codes {asked} fits these {len(hosts)} ranks: {why}")


def placed(code: Code, hosts: Sequence[str], domain: FailureDomain, *, first: bool) -> Placement | None:
    """The placement of a start with new arenas; None for one rank.

    Args:
        code: the code.
        hosts: rank -> its host.
        domain: the failure domain.
        first: whether this rank logs the warning about hosts.

    Raises:
        PlacementError: the code does not fit; the message names codes that do.
    """
    if len(hosts) == 1:
        logger.warning(
            "one rank has no other to keep its parity: it survives crashes of its process, but not "
            "the loss of its memory"
        )
        return None
    if domain == "host":
        return Placement.plan(code.n, code.k, hosts)
    ranks = Placement.ranks(code.n, code.k, len(hosts))
    if domain == "rank":
        return ranks
    try:
        return Placement.plan(code.n, code.k, hosts)
    except PlacementError as error:
        placement = Placement.interleaved(code.n, code.k, hosts)
        if first:
            _warn_of_fragile_hosts(code, hosts, placement)
            logger.debug("%s", error)
        return placement


def _warn_of_fragile_hosts(code: Code, hosts: Sequence[str], placement: Placement) -> None:
    survived = f"the loss of any one host is survived, but not that of any r = {code.r} at once"
    if fragile := placement.fragile(hosts):
        others = f", and so for {counted(len(fragile) - 1, 'other host')}" if len(fragile) > 1 else ""
        survived = f"the loss of host {fragile[0]!r} alone would be more than the code survives{others}"
    logger.warning(
        "parity is spread over ranks, not over hosts: %s; failure_domain='host' names codes that fit, 'rank' "
        "silences this",
        survived,
    )
