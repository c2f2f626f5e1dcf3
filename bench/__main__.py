"""`python -m bench QUESTION [--quick] [--seed N] [--json F]`, with options; `... all`; `... report`."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from bench import RESULTS
from bench.harness import register
from bench.harness.result import (
    Arguments,
    BadFile,
    Incomplete,
    Row,
    Unavailable,
    commit,
    document,
    table,
    write,
)
from bench.harness.result import command as line

if TYPE_CHECKING:
    from bench import suite

QUESTIONS = {
    "agreement": "what it costs the ranks to agree on a transaction, with 4 to 64 of them (--setting)",
    "check_n_run": "what Check-N-Run's checkpoints write, keep, stall and lose, beside the paper's",
    "compare": "what each way of surviving failures costs, and what killed ranks leave (--engine)",
    "cpr": "what partial recovery saves in overhead and costs in quality, beside CPR's published figures",
    "drift": "how far rows rebuilt from parity of floats are off, and what one NaN takes from it",
    "elastic": "how long a move to another number of ranks takes, and what memory for the while",
    "gpu": "tests, kills, kernels, steps and recovery on a CUDA device, in 8 minutes (make gpu)",
    "host": "what a window's end costs a host's processors, and how fast tables come back (--base)",
    "kernels": "how fast parity is encoded and updated, against zfec and ISA-L",
    "memory": "how much memory protection takes",
    "network": "what steps, agreement and a rebuild cost over links of 1 and 10 Gbit/s (as root)",
    "overhead": "what protection costs a training step (--engine torchrec or sparse)",
    "profile": "where the time of a protected step goes, and what bytes it moves (--engine)",
    "publish": "how fresh the rows are that a follower serves, and what an interval writes",
    "quality": "what quality a model ends with after failures, under each way of surviving them (--data)",
    "quantization": "what rows lose in being stored in a few bits, and how fast they are",
    "rebuild": "how soon training goes on, and how fast, while lost memory is rebuilt beside it",
    "recovery": "how long a failure stops the training, by how processes start, and how fast a rebuild is",
    "scaling": "what protection costs a rank when there are more ranks",
    "simulate": "which method and which code are enough on 16 to 4096 hosts, by simulation (--trace)",
    "start": "whether many ranks start, and recover a lost one, and what the store has to hold (--setting)",
}
"""Question -> what it asks. `run(arguments) -> list[Row]` in the folder of that name answers it."""

OF_ENGINES = {
    "compare": ("sparse", "torchrec"),
    "overhead": ("torchrec", "sparse"),
    "profile": ("torchrec", "sparse"),
}
"""Questions that are asked of one engine of tables, and which; the first is the default."""

OF_SETTINGS = {
    "agreement": ("4", "8", "16", "32", "64"),
    "compare": ("pages",),
    "gpu": ("kernels", "step", "windows", "fused", "recovery"),
    "overhead": ("dlrm", "sparse-heavy", "managed-collision", "verification"),
    "recovery": ("sparse", "torchrec"),
    "start": ("8", "64"),
}
"""Questions that are asked of several settings, and which; all of them by default, and more for `gpu`.

Of `compare`: the methods that the README and docs/choosing.md show; by default all methods."""

OF_TRACES = ("simulate",)
"""Questions that can be asked of a real cluster's faults."""

OF_RESULTS = ("simulate",)
"""Questions that start from the answers to others; see `Arguments.results`."""

OF_DATA = {"quality": ("criteo", "movielens")}
"""Questions that can be asked of a file of clicks, and of which formats."""

OF_PAIRS = ("overhead",)
"""Questions that compare pairs of steps, as many as are asked for."""

LEAST_PAIRS = 2

OF_NETWORKS = ("simulate",)
"""Questions that can be asked of hosts on a network of a rate and a round trip."""

OF_BASES = ("host",)
"""Questions that can also be asked of an older commit's clone, in the same run."""

USUAL: Mapping[str, tuple[str, ...]] = {"": ()}
IN_ALL: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "compare": {"": ("--engine", "torchrec", "--setting", "pages")},
    "overhead": {
        **USUAL,
        "-sparse": ("--engine", "sparse"),
        "-managed-collision": ("--engine", "torchrec", "--setting", "managed-collision"),
    },
}
"""Questions that `all` asks in another way than the usual one, or in several: what their files' names end
with -> options."""
QUICK = ("compare", "kernels", "simulate")
"""Questions that `all --quick` asks, of one engine; the tests ask most of the others as quickly."""

ON_GPUS = ("gpu",)
"""Questions that `all` leaves out: they are asked by `make gpu`."""

KEEP = "`--json FILE` writes the numbers, for the pages to a file of bench/results"
ALL, REPORT = "all", "report"
NO_QUESTIONS = {
    ALL: f"asks all of them; with --quick: {', '.join(QUICK)}",
    REPORT: "writes docs/results*, build/results.html with all tables, and figures of other pages",
}


def main(words: Sequence[str] | None = None) -> None:
    choices = QUESTIONS | NO_QUESTIONS
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Verifies, measures, prints a table, and writes raw numbers as JSON.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:13} {about}" for name, about in choices.items()),
    )
    parser.add_argument("question", choices=choices, metavar="QUESTION")
    parser.add_argument("--quick", action="store_true", help="small and short; not for quoting")
    parser.add_argument("--seed", type=int, default=0, help="of every random choice (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the raw numbers")
    parser.add_argument(
        "--json-dir",
        type=Path,
        metavar="FOLDER",
        help=f"for {ALL}: where to write them (default: bench/results); for {REPORT}: where to read them, "
        "and to write the pages",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help=f"answers to other questions, for {', '.join(OF_RESULTS)} (default: bench/results)",
    )
    parser.add_argument("--engine", metavar="NAME", help=f"of the tables, for {', '.join(OF_ENGINES)}")
    parser.add_argument("--setting", metavar="NAME", help=f"only this one, for {', '.join(OF_SETTINGS)}")
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help=f"faults of a real cluster, for {', '.join(OF_TRACES)}; may be given several times",
    )
    parser.add_argument(
        "--system",
        default="",
        metavar="N,M",
        help="of LANL's trace, or all (default: the one with the most faults)",
    )
    parser.add_argument(
        "--data",
        nargs=2,
        metavar=("FORMAT", "PATH"),
        help="clicks of a file, for " + "; ".join(f"{q}: {' or '.join(of)}" for q, of in OF_DATA.items()),
    )
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help=f"pairs of steps to compare in each case, for {', '.join(OF_PAIRS)}: more, narrower intervals",
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="FOLDER",
        help=f"clone of an older commit, to be measured in the same run, for {', '.join(OF_BASES)}",
    )
    parser.add_argument(
        "--network",
        type=_network,
        metavar="GBIT,US",
        help=f"rate of a host's network, and a round trip in microseconds, for {', '.join(OF_NETWORKS)}: "
        "messages wait for them, where else costs of one machine stand for all",
    )
    given = parser.parse_args(words)
    if given.json_dir is not None and given.question not in NO_QUESTIONS:
        parser.error(f"--json-dir is for {' and '.join(NO_QUESTIONS)}; for {given.question}: --json FILE")
    if given.question == REPORT:
        from bench.report import pages  # what draws is not everywhere where things are measured

        print(pages.write(given.json_dir))
        return
    if given.question == ALL:
        traces = [word for path in given.trace for word in ("--trace", str(path))]
        traces += ["--system", given.system] if given.system else []
        data = [given.data] if given.data else []
        _ask_all(given.json_dir, given.seed, traces, data, quick=given.quick)
        return
    engines = OF_ENGINES.get(given.question, ("",))
    engine = given.engine or engines[0]
    if engine not in engines:
        parser.error(f"{given.question} is not asked of the engine {engine!r}: {[e for e in engines if e]}")
    settings = OF_SETTINGS.get(given.question, ())
    if given.setting is not None and given.setting not in settings:
        parser.error(f"{given.question} has no setting {given.setting!r}: {list(settings)}")
    if (given.trace or given.system) and given.question not in OF_TRACES:
        parser.error(f"{given.question} is not asked of a trace; {', '.join(OF_TRACES)} is")
    if given.results is not None and given.question not in OF_RESULTS:
        parser.error(f"{given.question} starts from no other answers; {', '.join(OF_RESULTS)} does")
    if given.pairs is not None and given.question not in OF_PAIRS:
        parser.error(f"{given.question} compares no pairs of steps; {', '.join(OF_PAIRS)} does")
    if given.pairs is not None and given.pairs < LEAST_PAIRS:
        parser.error(f"--pairs is at least {LEAST_PAIRS}; it is {given.pairs}")
    if given.base is not None and given.question not in OF_BASES:
        parser.error(f"{given.question} is not asked of another commit; {', '.join(OF_BASES)} is")
    if given.network is not None and given.question not in OF_NETWORKS:
        parser.error(f"{given.question} is not asked of a network; {', '.join(OF_NETWORKS)} is")
    data = None
    if given.data is not None:
        formats = OF_DATA.get(given.question, ())
        if given.data[0] not in formats:
            parser.error(
                f"{given.question} is not asked of data in the format {given.data[0]!r}: {list(formats)}"
            )
        data = given.data[0], Path(given.data[1])

    run: Callable[[Arguments], list[Row]] = importlib.import_module(
        f"bench.questions.{given.question}.question"
    ).run
    arguments = Arguments(
        given.quick,
        given.seed,
        engine,
        given.setting or "",
        tuple(given.trace),
        given.system,
        data,
        given.results or RESULTS,
        given.pairs or 0,
        given.base,
        given.network,
    )
    try:
        failure = _answer(given.question, run, arguments, given.json)
    except (BadFile, Unavailable) as error:
        parser.error(str(error))
    if failure:
        sys.exit(failure)


def _network(text: str) -> tuple[float, float]:
    """Parses a rate and a round trip."""
    try:
        rate_gbit, trip_us = (float(part) for part in text.split(","))
    except ValueError:
        rate_gbit = trip_us = math.nan
    if not (0 < rate_gbit < math.inf and 0 < trip_us < math.inf):
        raise argparse.ArgumentTypeError(
            f"a network is GBIT,US, both above 0, for example 10,400; got {text!r}"
        )
    return rate_gbit, trip_us


def _answer(
    question: str, run: Callable[[Arguments], list[Row]], arguments: Arguments, path: Path | None
) -> str:
    """Asks a question, prints the answer, and writes it to a file, if one is given; quick ones don't count.

    Returns:
        What was not measured; empty if all was.
    """
    is_lost = path is None and not arguments.quick and register.is_clean(commit())
    if is_lost:
        print(f"nothing will be kept: {KEEP}", flush=True)
    began, failure = time.monotonic(), ""
    is_registered = path is not None and not arguments.quick
    asked_by = line(question, arguments)
    with register.registered(question, asked_by, path) if is_registered else nullcontext([]) as notes:
        try:
            rows = run(arguments)
        except Incomplete as error:
            rows, failure = error.rows, str(error)
            notes.append(failure)
        print(table(rows))
        if path is not None:
            write(path, document(question, arguments, rows, (time.monotonic() - began) / 60))
    if is_lost:
        print(f"nothing was kept: {KEEP}", flush=True)
    return failure


def _ask_all(
    folder: Path | None, seed: int, traces: Sequence[str], data: Sequence[Sequence[str]], *, quick: bool
) -> None:
    """Into bench/results only from a commit, with the pages; into another folder without."""
    from bench import suite

    questions = asked(quick=quick, traces=traces, results=folder, data=data)
    if folder is None and commit().endswith("-dirty"):
        sys.exit("files differ from the commit, whose numbers bench/results has: commit first, or --json-dir")
    print(suite.expected(questions, RESULTS), flush=True)
    try:
        suite.ask(questions, folder or RESULTS, seed, quick=quick)
    except suite.SuiteFailed as error:
        sys.exit(str(error))
    finally:
        print(suite.took(questions, folder or RESULTS))


def asked(
    *,
    quick: bool,
    traces: Sequence[str] = (),
    results: Path | None = None,
    data: Sequence[Sequence[str]] = (),
) -> list[suite.Asked]:
    """What `all` asks; the answers' files are named as in bench/results.

    Args:
        quick: Few of them.
        traces: Options for the questions that can be asked of traces.
        results: Where the answers go, for those that start from others; None for bench/results.
        data: Formats of clicks and files of them, which are asked beside made data.
    """
    from bench import suite

    found: list[suite.Asked] = []
    for question in QUICK if quick else [one for one in QUESTIONS if one not in ON_GPUS]:
        words = [question, *(traces if question in OF_TRACES else ())]
        words += ["--results", str(results)] if question in OF_RESULTS and results else []
        ways = USUAL if quick else IN_ALL.get(question, USUAL)
        found += [suite.Asked(question + end, (*words, *options)) for end, options in ways.items()]
        if question in OF_DATA:
            found += [
                suite.Asked(f"{question}-{kind}", (question, "--data", kind, path)) for kind, path in data
            ]
    return found


if __name__ == "__main__":
    main()
