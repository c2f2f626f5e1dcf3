"""The start of `ecemb` and of `python -m ecemb`, which are one command.

Owns one choice: `run`, which is `ecemb-run`, starts before argparse and the other commands are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script.

    Args:
        arguments: All words after the program's name; None for the process's own.

    Returns:
        The exit code. Does not return for `run`: it ends like its worker, or becomes it.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["run"]:
        from .launch.stub import main as run

        run(words[1:])
    from . import __version__
    from .tools import command_line

    if arguments is None:
        command_line.end_with_the_reader()
    return command_line.main(words, __version__)


if __name__ == "__main__":
    sys.exit(main())
