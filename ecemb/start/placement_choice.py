"""How the parity of new arenas is spread over ranks and hosts: the choice of code, and the placement.

Pure, but for the warnings: the same on all ranks. Must not know: arenas, plans.
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
    """The first of `codes` that fits, by preference.

    With "auto", the first that puts the blocks of each stripe on different hosts, else the first that fits
    the number of ranks. One rank has no parity, so that any code fits.

    Args:
        codes: one or more.
        hosts: rank -> its host.
        domain: of failures.

    Raises:
        PlacementError: none fits; the message, that of the last one, has codes that do.
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
        code: which fits, or an error names codes that do.
        hosts: rank -> its host.
        domain: of failures.
        first: whether this is the rank that warns.

    Raises:
        PlacementError: the code does not fit.
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
