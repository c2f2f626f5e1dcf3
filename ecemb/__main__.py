"""The command line: `python -m ecemb plan`, `check`, `top`, `move`, `arenas ls`, `arenas rm`, and `run`.

Owns the choice of the command and the exit codes: 0 done, 1 refused or nothing found, 2 not understood.
`run` is `ecemb-run`; it starts before anything else is imported.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.argv[1:2] == ["run"]:  # the stub imports the standard library alone
    from .launch.stub import main as run

    run(sys.argv[2:])

import argparse
import signal
from collections.abc import Sequence

from . import __version__
from .errors import EcembError
from .tools import arenas, check, move, plan, rehearse, top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: All words after the program's name; None for the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m ecemb", description="Tools of ecemb.")
    parser.add_argument("--version", action="version", version=f"ecemb {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for tool in (plan, check, rehearse, top, move, arenas):
        name, about = tool.__name__.rpartition(".")[2], f"{tool.HELP.capitalize()}."
        tool.add(commands.add_parser(name, help=tool.HELP, description=about, epilog=tool.SHOWS))
    commands.add_parser("run", help="run a script warm, as ecemb-run does", add_help=False)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except argparse.ArgumentError as error:
        parser.error(str(error))
    except EcembError as error:
        print(f"ecemb: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends the command without a traceback
    sys.exit(main())
