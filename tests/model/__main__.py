"""`make model`: search all reachable states, then switch off one rule after another.

    python tests/model [--rule NAME] [--table] [--quick]

Ends with code 1 if the protocol fails in any configuration, or if a rule shows no counterexample that should.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.run import main

if __name__ == "__main__":
    sys.exit(main())
