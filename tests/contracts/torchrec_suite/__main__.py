"""Runs all cases of the peers' own tests, and prints a table of them for docs/torchrec.md.

python tests/contracts/torchrec_suite [WORD ...]     those whose names have all these words
"""

from __future__ import annotations

import collections
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[level]) for level in (2, 3)]

from contracts.torchrec_suite.cases import CASES, run  # noqa: E402 - the path comes first


def main(words: list[str]) -> int:
    began = time.monotonic()
    results = run([case for case in CASES if all(word in str(case) for word in words)])
    counts: dict[str, collections.Counter[str]] = {}
    for case, failure in results.items():
        counts.setdefault(case.test, collections.Counter())["failed" if failure else "passed"] += 1
        if failure:
            print(f"FAILED {case}\n{failure}")
    print(f"TorchRec {version('torchrec')}, {time.monotonic() - began:.0f} s")
    for test, count in counts.items():
        print(f"| `{test}` | {count['passed']} of {count['passed'] + count['failed']} |")
    return any(results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
