"""Bits of a code, by how often a job will have to restore: each restore trains on from quantized rows.

Follows Check-N-Run (Eisenman et al., NSDI 2022). With L restores expected: 2 bits for L <= 1, 3 for L <= 3,
4 for L <= 20, and 8 for more; 8 when there have been more than were planned for; adaptive up to 4 bits, and
plain asymmetric with 8: all recalled. That L is the job's length over its mean time between failures:
derived, for failures that come at a constant rate.

All functions are pure.
"""

from __future__ import annotations

import math
from typing import Final

from .quantize_scheme import Metadata, Scheme

LIMITS: Final = ((1, 2), (3, 3), (20, 4))
"""(most restores, bits) in ascending order."""
FALL_BACK: Final = 8
"""Bits, for more restores than `LIMITS` has, and for more than were planned for."""


def expected_restores(total_h: float, mtbf_h: float) -> float:
    """L: failures that a job of `total_h` hours expects, one in `mtbf_h` hours.

    Raises:
        ValueError: there is no such job.
    """
    if not (0 <= total_h < math.inf and mtbf_h > 0):
        raise ValueError(
            f"total_h, of the job, is 0 or more, and mtbf_h above 0; they are {total_h} and {mtbf_h}"
        )
    return total_h / mtbf_h


def bits_for(planned_restores: float, restores: int = 0) -> int:
    """Bits of a code.

    Args:
        planned_restores: L, of the whole job.
        restores: there have been until now.

    Raises:
        ValueError: one is negative, or NaN.
    """
    if not planned_restores >= 0 or restores < 0:
        raise ValueError(
            f"restores, planned and past, are 0 or more; they are {planned_restores} and {restores}"
        )
    planned = next((bits for most, bits in LIMITS if planned_restores <= most), FALL_BACK)
    return planned if restores <= capacity(planned) else FALL_BACK


def capacity(bits: int) -> float:
    """How many restores these bits are for.

    Raises:
        ValueError: the rule knows no such bits.
    """
    known = {of: float(most) for most, of in LIMITS} | {FALL_BACK: math.inf}
    if bits not in known:
        raise ValueError(f"bits are one of {tuple(known)}; they are {bits}")
    return known[bits]


def scheme_for(planned_restores: float, restores: int = 0, metadata: Metadata = "float32") -> Scheme:
    """The scheme of `bits_for`: adaptive, but with 8 bits asymmetric.

    Raises:
        ValueError: see `bits_for`.
    """
    bits = bits_for(planned_restores, restores)
    return Scheme("asymmetric" if bits == FALL_BACK else "adaptive", bits, metadata)
