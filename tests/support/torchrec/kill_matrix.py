"""Each sharding type, optimizer and precision of TorchRec's tables alone, with ranks killed on the way.

    PYTHONPATH=.:tests python -m support.torchrec.kill_matrix [PART ...]

A case is "bags/fp32/sgd/row_wise"; parts select cases that have all of them. Takes about a minute each.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from pathlib import Path

from support.torchrec.runs import KILLED, Kill, Setting, differences, every_table, recoveries, run

KILLS = (
    Kill(1, (2,), "backward"),
    Kill(2, (3,), "body"),
    Kill(4, (0,), "backward", wipe=True),
    Kill(5, (1, 2), "body", wipe=True),
)


def main() -> int:
    wrong = 0
    for case in every_table():
        if not all(part in case.split("/") for part in sys.argv[1:]):
            continue
        begun = time.monotonic()
        kind = case.split("/")[0]
        load = -1 if kind in KILLED["managed"] else 3  # of maps, it is refused
        setting = Setting((case,), steps=7, load=load, groups=2 if kind in KILLED["groups"] else 1)
        with tempfile.TemporaryDirectory() as folder:
            expected = run(Path(folder) / "undisturbed", setting)
            killed = dataclasses.replace(setting, protected=True, kills=KILLS)
            found = run(Path(folder) / "killed", killed, deadline_s=600)
            kinds = ", ".join(recoveries(Path(folder) / "killed"))
        names = differences(expected, found)
        wrong += bool(names)
        outcome = f"DIFFERS: {names[:3]}" if names else "bit-identical"
        print(f"{case:<44} {outcome}; {kinds}; {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
