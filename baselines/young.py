"""Young's interval between saves (J. W. Young, CACM 1974), to first order the best.

Must not know: what is saved.
"""

from __future__ import annotations

import math


def young(save: float, between_failures: float) -> float:
    """sqrt(2 O_save T_fail), in the unit of both arguments.

    Args:
        save: what a save costs (O_save).
        between_failures: mean time between failures of the whole job (T_fail).
    """
    return math.sqrt(2 * save * between_failures)
