"""`make failures`: kill real processes at random moments, compare bits, print where the kills fell.

    python tests/failures [--kills 80] [--seed N] [--plan FILE]

Ends with code 1 if any run is not bit-identical to the undisturbed one, or if leaving out a part
of recovery goes unnoticed. What a failed run leaves behind is kept, and its path printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from failures.campaign import main

if __name__ == "__main__":
    sys.exit(main())
