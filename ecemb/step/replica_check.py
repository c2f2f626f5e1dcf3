"""Compares replicated state by name, after the ranks' checksums of all of it were found to differ.

Must not know: when it is compared, and what a difference leads to.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..group.collectives import Transport
from ..state.flatten import checksums

_SHOWN = 8  # ranks in a message


def compare(memory: NDArray[np.uint8], transport: Transport) -> str:
    """Names the replicated state that differs, and the ranks that differ. All ranks.

    Args:
        memory: This rank's saved state, uint8, as a slot's `read` returns it.
        transport: The control group.

    Returns:
        The first name that differs, the ranks that differ there from most others, and the number of further
        names that differ; the same on all ranks.

    Raises:
        InconsistentArenas: `memory` holds no saved state.
        PeerFailure: A peer died.
    """
    own = json.dumps(checksums(memory)).encode()
    texts = transport.gather(own, "looking for what differs in replicated state")
    return difference([json.loads(text) for text in texts])


def difference(of_ranks: Sequence[Mapping[str, int]]) -> str:
    """Does the work of `compare`, without messages.

    Args:
        of_ranks: Per rank, the checksum by name, in the order of the state.
    """
    names = list(dict.fromkeys(name for one in of_ranks for name in one))
    found = {name: values for name in names if len(set(values := [one.get(name) for one in of_ranks])) > 1}
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
