"""`make failures`: the failure matrix with real processes; `make soak`, `make hunt`: random kills.

    python tests/failures [--seed N] [--cells PATTERN ...] [--device cuda] [--json FILE] [--list]
    python tests/failures --plan FILE
    python tests/failures soak [--minutes 15] [--seed N] [--json FILE]
    python tests/failures hunt [--kills 200] [--seed N]

Ends with code 1 if any run is not bit-identical to the undisturbed one, if more losses than the code
survives are not refused, or if leaving out a part of recovery goes unnoticed. What a failed run leaves
behind is kept, and its path printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

from bench.harness import register  # noqa: E402 - the path comes first
from failures import campaign, hunt, soak  # noqa: E402

if __name__ == "__main__":
    words = sys.argv[1:]
    name = words[0] if words and words[0] in ("soak", "hunt") else ""
    main = {"soak": soak.main, "hunt": hunt.main}.get(name, campaign.main)
    question, script = (name, f"tests/failures {name}") if name else ("failures", "tests/failures")
    sys.exit(register.script(question, main, script, words[1:] if name else words))
