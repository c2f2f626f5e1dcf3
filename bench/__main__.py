"""`python -m bench QUESTION [--quick] [--seed N] [--json F] [--verbose]`; `... all`; `... report`."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from bench import RESULTS, ROOT
from bench.harness import register
from bench.harness.result import (
    Arguments,
    BadFile,
    BadOption,
    Incomplete,
    Row,
    Unavailable,
    commit,
    document,
    table,
    write,
)
from bench.harness.result import command as line
from bench.questions.compare_cluster import options as cluster

if TYPE_CHECKING:
    from bench import suite

THEMES: Mapping[str, Mapping[str, str]] = {
    "Which method": {
        "compare": "what each way of surviving failures costs, and what killed ranks leave",
        "compare_cluster": "the same on a cluster, for your script: compare --hosts, --launcher or --script",
        "simulate": "which method and which code are enough on 16 to 4096 hosts, by simulation",
    },
    "What protection costs": {
        "overhead": "what it costs a training step",
        "profile": "where the time of a protected step goes, and what bytes it moves",
        "memory": "how much memory it takes",
        "scaling": "what it costs a rank when there are more ranks",
        "agreement": "what it costs the ranks to agree on a transaction",
        "network": "what steps, agreement and a rebuild cost over links of 1 and 10 Gbit/s (as root)",
        "host": "what a window's end costs a host's processors, and how fast tables come back",
        "gpu": "tests, kills, kernels, steps and recovery on a CUDA device (make gpu)",
    },
    "How fast training goes on": {
        "recovery": "how long a failure stops the training, by how processes start; how fast a rebuild is",
        "rebuild": "how soon training goes on, and how fast, while lost memory is rebuilt beside it",
        "start": "whether many ranks start, and recover a lost one, and what the store has to hold",
        "elastic": "how long a move to another number of ranks takes, and what memory for the while",
    },
    "Rivals and parts": {
        "check_n_run": "what Check-N-Run's checkpoints write, keep, stall and lose, beside the paper's",
        "cpr": "what partial recovery saves in overhead and costs in quality, beside CPR's published figures",
        "quality": "what quality a model ends with after failures, under each way of surviving them",
        "quantization": "what rows lose in being stored in a few bits, and how fast they are",
        "drift": "how far rows rebuilt from parity of floats are off, and what one NaN takes from it",
        "publish": "how fresh the rows are that a follower serves, and what an interval writes",
        "kernels": "how fast parity is encoded and updated, against zfec and ISA-L",
    },
}
"""Theme -> its questions -> what each asks."""
QUESTIONS = {name: about for of_theme in THEMES.values() for name, about in of_theme.items()}
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
    "overhead": ("dlrm", "sparse-heavy", "managed-collision", "verification", "device"),
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
FEW: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "compare": {"": ("--methods", "nothing,ecemb (4, 3),check-n-run intermittent")},
}
"""Of these, the ones that `all --quick` asks in another way than `--quick` alone; as in `IN_ALL`."""

ON_GPUS = ("gpu",)
"""Questions that `all` leaves out: they are asked by `make gpu`."""

ON_CLUSTERS = ("compare_cluster",)
"""Questions that `all` leaves out: they are asked where several hosts are."""

KEEP = "the pages are made of files of bench/results: --json bench/results/NAME.json, from a commit"
LATEST = ROOT / "build" / "bench"
"""Where an answer goes without --json; the next one takes its place."""
ALL, REPORT = "all", "report"
NO_QUESTIONS = {
    ALL: f"asks all of them; with --quick: {', '.join(QUICK)}",
    REPORT: "writes docs/results*, build/results.html with all tables, and figures of other pages",
}


def main(words: Sequence[str] | None = None) -> None:
    choices = QUESTIONS | NO_QUESTIONS
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Verifies, measures, prints the answer, and writes all numbers as JSON.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=catalogue(),
        usage="python -m bench QUESTION [--quick] [--seed N] [--json FILE] [--verbose] [options]",
    )
    words = sys.argv[1:] if words is None else words
    if not words:
        print(f"{parser.format_usage()}\n{catalogue()}\n\npython -m bench --help lists all options")
        return
    if words[0] in QUESTIONS and {"-h", "--help"} & {*words}:
        print(about(words[0]))
        return
    parser.add_argument("question", choices=choices, metavar="QUESTION")
    parser.add_argument("--quick", action="store_true", help="small and short; not for quoting")
    parser.add_argument("--seed", type=int, default=0, help="of every random choice (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the raw numbers")
    parser.add_argument("--verbose", action="store_true", help="print all figures, and not the answer alone")
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
    cluster.add(parser)
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
    data = None
    if given.data is not None:
        formats = OF_DATA.get(given.question, ())
        if given.data[0] not in formats:
            parser.error(
                f"{given.question} is not asked of data in the format {given.data[0]!r}: {list(formats)}"
            )
        data = given.data[0], Path(given.data[1])

    try:
        more = cluster.of(given)
    except BadOption as error:
        parser.error(str(error))
    question = given.question if more is None else ON_CLUSTERS[0]
    run: Callable[[Arguments], list[Row]] = importlib.import_module(
        f"bench.questions.{question}.question"
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
        more,
        cluster.methods_of(given) if more is None else (),
    )
    try:
        failure = _answer(question, run, arguments, given.json, verbose=given.verbose)
    except (BadFile, BadOption, Unavailable) as error:
        parser.error(str(error))
    if failure:
        sys.exit(failure)


def _answer(
    question: str,
    run: Callable[[Arguments], list[Row]],
    arguments: Arguments,
    path: Path | None,
    *,
    verbose: bool,
) -> str:
    """Asks a question, prints the answer, and writes it to a file; quick ones don't count.

    Returns:
        What was not measured; empty if all was.
    """
    is_registered = path is not None and not arguments.quick
    kept = path or LATEST / f"{question}.json"
    if path is None and not arguments.quick and register.is_clean(commit()):
        print(f"goes to {kept.relative_to(ROOT)}; {KEEP}", file=sys.stderr, flush=True)
    began, failure = time.monotonic(), ""
    asked_by = line(question, arguments)
    with (
        register.registered(question, asked_by, path) if is_registered and path else nullcontext([]) as notes
    ):
        try:
            rows = run(arguments)
        except Incomplete as error:
            rows, failure = error.rows, str(error)
            notes.append(failure)
        answer = document(question, arguments, rows, (time.monotonic() - began) / 60)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write(kept, answer)
    if verbose:
        print(table(rows), end="\n\n")
    from bench.report.verdict import verdict  # what draws is not everywhere where things are measured

    print(verdict(question, answer, kept))
    return failure


def catalogue() -> str:
    """All questions by theme, with the minutes that they take, and what else `python -m bench` does."""
    from bench.suite import PLANNED

    lines: list[str] = []
    for theme, questions in THEMES.items():
        lines += ["", f"{theme}:"]
        for name, asks in questions.items():
            minutes = f"{PLANNED[name]:3.0f} min" if name in PLANNED else "  -    "
            lines.append(f"  {name:16} {minutes}  {asks}")
    lines += ["", *(f"{name:18} {asks}" for name, asks in NO_QUESTIONS.items())]
    return "\n".join([*lines[1:], "", "python -m bench QUESTION --help: what it measures, and its options"])


def about(question: str) -> str:
    """What a question measures, how long it takes, and the options that it has beside those of all."""
    from bench.suite import PLANNED

    path = ROOT / "bench" / "questions" / question / "question.py"
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    named: list[str] = []
    if question in OF_ENGINES:
        named.append(f"--engine {' | '.join(OF_ENGINES[question])} (default: {OF_ENGINES[question][0]})")
    if question in OF_SETTINGS:
        named.append(f"--setting {' | '.join(OF_SETTINGS[question])} (default: all)")
    if question in OF_TRACES:
        named.append("--trace FILE [--system N,M]: faults of a real cluster")
    if question in OF_RESULTS:
        named.append("--results FOLDER: answers that it starts from (default: bench/results)")
    if question in OF_DATA:
        named.append(f"--data {' | '.join(OF_DATA[question])} PATH: clicks of a file")
    if question in OF_PAIRS:
        named.append("--pairs N: of steps, in each case")
    if question in OF_BASES:
        named.append("--base FOLDER: clone of an older commit, measured in the same run")
    if question in ("compare", *ON_CLUSTERS):
        named.append("--methods A,B,...: names of methods; --launcher, --hosts or --script: on a cluster")
    minutes = [f"About {PLANNED[question]:g} minutes on two cores."] if question in PLANNED else []
    parts = [
        doc,
        "\n".join(minutes),
        "\n".join(["Options: --quick, --seed N, --json FILE, --verbose", *named]),
    ]
    return "\n\n".join(filter(None, parts))


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
    every = [one for one in QUESTIONS if one not in (*ON_GPUS, *ON_CLUSTERS)]
    for question in QUICK if quick else sorted(every, key=lambda one: (one in OF_RESULTS, one)):
        words = [question, *(traces if question in OF_TRACES else ())]
        words += ["--results", str(results)] if question in OF_RESULTS and results else []
        ways = (FEW if quick else IN_ALL).get(question, USUAL)
        found += [suite.Asked(question + end, (*words, *options)) for end, options in ways.items()]
        if question in OF_DATA:
            found += [
                suite.Asked(f"{question}-{kind}", (question, "--data", kind, path)) for kind, path in data
            ]
    return found


if __name__ == "__main__":
    main()
