"""`make cluster`: a Slurm cluster on this machine, and what happens to trainings on it.

    python tests/cluster [NAME ...] [--json FILE] [--list]

Needs root, slurm-wlm and munge. Ends with code 1 if a scenario doesn't hold: the training's end must be that
of an undisturbed run, bit by bit. What a failed one leaves behind is kept, and its path printed. The file has
the results of all scenarios that came to their end, and is written after each.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

from bench.harness import register  # noqa: E402 - the path comes first
from bench.harness.result import Arguments, Row, document, once, summary, write  # noqa: E402 - after the path
from cluster.box import CommandFailed, end_on_signals  # noqa: E402
from cluster.scenarios import SCENARIOS, Result  # noqa: E402
from failures.hosts import Unexpected  # noqa: E402
from failures.namespaces import NotPossible  # noqa: E402


def rows(results: Sequence[Result]) -> Iterator[Row]:
    """What is written, by scenario."""
    for one in results:
        labels = {"scenario": one.name, "ranks": one.ranks}
        yield once("cluster_differences", "differences", len(one.differences), **labels, note=one.note)
        if one.recovery_s:
            yield summary("cluster_next_step_s", "s", one.recovery_s, **labels)


def _load(waiting: Sequence[float]) -> Row:
    """How many processes wanted a processor before each scenario: those of other work, if there were any."""
    return summary("cluster_load_before", "processes", waiting, cores=len(os.sched_getaffinity(0)))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="scenarios; all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the raw results")
    parser.add_argument("--list", action="store_true", help="only the names of the scenarios")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(SCENARIOS)):
        parser.error(f"no scenario {', '.join(unknown)}; there are: {', '.join(SCENARIOS)}")
    if options.list:
        print("\n".join(SCENARIOS))
        return 0
    results: list[Result] = []
    failed = 0
    began = time.monotonic()
    waiting: list[float] = []
    for name in options.names or SCENARIOS:
        waiting.append(os.getloadavg()[0])
        try:
            result = SCENARIOS[name]()
        except NotPossible as error:
            print(f"{name}: skipped: {error}", flush=True)
            continue
        except (CommandFailed, TimeoutError, Unexpected) as error:
            print(f"{name}: FAILED: {error}", flush=True)
            failed += 1
            continue
        results.append(result)
        if options.json:
            write(options.json, document("cluster", Arguments(), [*rows(results), _load(waiting)]))
        failed += bool(result.differences)
        verdict = "NOT IDENTICAL: " + "; ".join(result.differences[:6]) if result.differences else "identical"
        took = ", ".join(f"{seconds:.1f} s" for seconds in result.recovery_s) or "-"
        print(f"{name}: {verdict}; next step after {took}; {result.note}", flush=True)
    if results:
        print(f"{len(results)} scenarios in {(time.monotonic() - began) / 60:.1f} minutes")
    return int(failed > 0)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(register.script("cluster", main, "tests/cluster", sys.argv[1:]))
