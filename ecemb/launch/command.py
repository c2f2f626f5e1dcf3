"""The command line of `ecemb-run`.

Owns the options and their parsing, by hand: argparse takes as long to import as everything else together.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigurationError

USAGE = """\
usage: ecemb-run [options] SCRIPT [ARGUMENT ...]
       ecemb-run [options] -m MODULE [ARGUMENT ...]
       ecemb-run [options] --standby [SCRIPT | -m MODULE]
       ecemb-run [--arena-dir DIR] --stop

Run a script as `python SCRIPT` would, in a process that is forked from one that has imported torch already.
As what torchrun starts: torchrun --no-python [torchrun's options] ecemb-run SCRIPT [ARGUMENT ...]

options:
  --preload MODULE     also import this before processes are forked; may be repeated
  --no-preload MODULE  don't import this, nor what is below it, before processes are forked; may be repeated
  --cold               start as `python SCRIPT` does
  --no-replace         leave every restart to torchrun, also that after a worker's death
  --standby            start the fork server ahead, and no process; it waits until it is used or stopped
  --stop               let this user's fork servers on this host end, as soon as none of their processes runs
  --idle S             seconds without a process after which the server ends (900; on standby never); once
                       torchrun has ended, a fifteenth of it
  --arena-dir DIR      where the server's socket lies, below ecemb-UID (/dev/shm)
  -h, --help           show this
"""

IDLE_S = 900.0


class Command:
    """One call of `ecemb-run`.

    Attributes:
        action: "run", "standby", "stop" or "help".
        is_module: whether `target` is a module's name; else it is the path of a script.
        target: what to run; None on standby for a script that isn't known yet, and for "stop".
        arguments: of the script.
        preload: further modules to import in the server.
        without: modules not to import in the server.
        cold: whether to start without the server.
        replaces: whether a worker that a signal or a peer's death has ended is replaced here.
        idle_s: seconds without a process after which the server ends; None for never.
        arena_dir: folder of the server's socket.
    """

    def __init__(self) -> None:
        self.action: str = "run"
        self.is_module: bool = False
        self.target: str | None = None
        self.arguments: list[str] = []
        self.preload: list[str] = []
        self.without: list[str] = []
        self.cold: bool = False
        self.replaces: bool = True
        self.idle_s: float | None = None
        self.arena_dir: str = "/dev/shm"


def parse(words: Sequence[str]) -> Command:
    """Parses the words after the program's name.

    Raises:
        ConfigurationError: the words are not understood.
    """
    command = Command()
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-m":
        option, equals, value = left.pop(0).partition("=")
        if option in ("-h", "--help"):
            command.action = "help"
            return command
        if option in ("--cold", "--no-replace", "--standby", "--stop") and not equals:
            if option == "--cold":
                command.cold = True
            elif option == "--no-replace":
                command.replaces = False
            else:
                command.action = option[2:]
            continue
        if option not in ("--preload", "--no-preload", "--idle", "--arena-dir"):
            raise ConfigurationError(
                f"option {option!r} is not known; `ecemb-run --help` lists the options, and the script's own "
                "options come after the script"
            )
        if not equals:
            if not left:
                raise ConfigurationError(f"option {option} needs a value; `ecemb-run --help` says which")
            value = left.pop(0)
        _set(command, option, value)
    if left and left[0] == "-m":
        command.is_module = True
        del left[0]
        if not left:
            raise ConfigurationError("option -m needs the name of a module")
    if left:
        command.target, command.arguments = left[0], left[1:]
    if command.action == "run" and command.target is None:
        raise ConfigurationError("there is no script to run; `ecemb-run --help` says how to name one")
    if command.idle_s is None and command.action == "run":
        command.idle_s = IDLE_S
    return command


def _set(command: Command, option: str, value: str) -> None:
    if option == "--arena-dir":
        command.arena_dir = value
    elif option == "--idle":
        try:
            command.idle_s = float(value)
        except ValueError:
            command.idle_s = -1.0
        if not 0 <= command.idle_s < float("inf"):
            raise ConfigurationError(f"--idle takes a number of seconds, 0 or more; it is {value!r}")
    else:
        names = [name for name in value.split(",") if name]
        if not names or not all(part.isidentifier() for name in names for part in name.split(".")):
            raise ConfigurationError(f"{option} takes the name of a module; it is {value!r}")
        (command.preload if option == "--preload" else command.without).extend(names)
