"""The command line of `ecemb`, but for `ecemb run`: the choice of a command, its errors, and the exit codes.

Exit codes: 0 done, 1 refused or nothing found, 2 not understood. Imports the chosen command's module alone.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import requirements
from ..errors import EcembError

COMMANDS = {
    "run": "start a script warm, in place of python (the same as ecemb-run)",
    "check": "list what a script's ecemb.protect() would protect, and what not",
    "rehearse": "run a script with and without failures, and compare all steps",
    "plan": "what codes would cost a job, and what they would survive",
    "top": "watch running jobs: a live view of their arenas on this machine",
    "arenas": "list or remove memory that workers left behind, or hold",
    "move": "let a running job save and leave, so that it goes on elsewhere",
}
"""Command -> its help. `run` is `ecemb_run.main`'s; each other one is a module of this package: its `add`
takes a parser, and sets `run` to the function that does the work; `SHOWS` says more in the command's help."""
_AFTER = "`ecemb COMMAND --help` has a command's options."


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the way out."""

    def error(self, message: str) -> NoReturn:
        """Prints the error, and ends the process with exit code 2."""
        self.exit(2, f"{self.prog}: {message}: see `{self.prog} --help`\n")


def end_with_the_reader() -> None:
    """Lets `ecemb ... | head` end without a traceback."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def main(words: Sequence[str], version: str) -> int:
    """Runs the command line.

    Args:
        words: All words after the program's name.
        version: ecemb's.

    Returns:
        The exit code.
    """
    try:
        if words and not words[0].startswith("-"):
            requirements.check_platform()
        return _run(words, version)
    except EcembError as error:
        print(f"ecemb: {error}", file=sys.stderr)
        return 1


def _run(words: Sequence[str], version: str) -> int:
    parser = Parser(
        prog="ecemb", description="Protects embedding tables against the loss of machines.", epilog=_AFTER
    )
    parser.add_argument("--version", action="version", version=f"ecemb {version}")
    commands = parser.add_subparsers(title="commands", dest="the_command", metavar="COMMAND")
    chosen: argparse.ArgumentParser = parser
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        if words[:1] == [name] and name != "run":
            tool = importlib.import_module(f".{name}", __package__)
            tool.add(command)
            command.epilog = tool.SHOWS
            chosen = command
    options, unknown = parser.parse_known_args(words)
    if unknown:
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.the_command is None:
        print(parser.format_help(), end="", file=sys.stderr)
        return 2
    return options.run(options)
