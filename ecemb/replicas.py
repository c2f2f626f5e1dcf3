"""Compares replicated state by name when the ranks' checksums of the whole have turned out to differ.

Must not know: when it is compared, and what follows from a difference.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .outline import checksums
from .transport import Transport

_SHOWN = 8  # ranks in a message


def compare(memory: NDArray[np.uint8], transport: Transport) -> str:
    """Says what differs between the ranks, and on which. All ranks.

    Args:
        memory: this rank's saved state, uint8, as a slot's `read` gives it.
        transport: the control group.

    Returns:
        The first name that differs, the ranks that differ there from most others, and how many more names
        do; the same on all ranks.

    Raises:
        InconsistentArenas: `memory` holds no saved state.
        PeerFailure: a peer died.
    """
    own = json.dumps(checksums(memory)).encode()
    told = transport.gather(own, "looking for what differs in replicated state")
    return difference([json.loads(one) for one in told])


def difference(told: Sequence[Mapping[str, int]]) -> str:
    """As `compare`.

    Args:
        told: rank -> checksum by name, in the order of the state.
    """
    names = list(dict.fromkeys(name for one in told for name in one))
    found = {name: values for name in names if len(set(values := [one.get(name) for one in told])) > 1}
    if not found:
        return "the order of its parts differs"
    first, values = next(iter(found.items()))
    usual, _ = Counter(values).most_common(1)[0]
    ranks = [rank for rank, value in enumerate(values) if value != usual]
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    plural = "s" if len(ranks) > 1 else ""
    others = f", and {len(found) - 1} more after it" if len(found) > 1 else ""
    return (
        f"{first} is the first that differs, on rank{plural} {ranks[:_SHOWN]}{more} from most others{others}"
    )
