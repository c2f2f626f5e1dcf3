"""A run of pytest with the plugins of this folder, on a module of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
DEADLINE_S = 600.0


def run(folder: Path, source: str, *options: str, **environment: str) -> tuple[int, str]:
    """Returns the exit status and the output.

    Args:
        folder: for the module.
        source: of the module.
        options: of pytest.
        environment: of the run; neither CI nor ECEMB_MAY_SKIP is inherited.
    """
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\nmarkers = processes\n")
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "ECEMB_MAY_SKIP")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "support.seeds", "-p", "support.skips"),
            *("-p", "no:cacheprovider", *options),
        ],
        cwd=folder,
        env=kept | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "COLUMNS": "200"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    return done.returncode, done.stdout
