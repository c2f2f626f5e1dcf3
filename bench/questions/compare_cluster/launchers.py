"""How one command comes to run once on each host: templates of launchers.

    {command}         the words of the command
    {line}            the same as one word for a shell, as ssh and `bash -c` take it
    {hosts}           on how many hosts it has to run
    {ranks_per_host}  ranks that it starts on each of them

Must not know: what the command does.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from string import Formatter

from bench.harness.result import BadOption

HERE, SRUN = "torchrun", "srun"
BUILT_IN: Mapping[str, str] = {
    HERE: "{command}",
    SRUN: "srun --nodes={hosts} --ntasks={hosts} --ntasks-per-node=1 --kill-on-bad-exit=1 {command}",
}
"""Name -> template. What runs on each host is torchrun's agent, so on this machine nothing is before it."""
COMMANDS = ("command", "line")
PLACEHOLDERS = (*COMMANDS, "hosts", "ranks_per_host")


def check(launcher: str) -> None:
    """Refuses what is neither a name of `BUILT_IN` nor a template.

    Raises:
        BadOption: It isn't.
    """
    template = BUILT_IN.get(launcher, launcher)
    try:
        used = [
            name
            for word in shlex.split(template)
            for _, name, *_ in Formatter().parse(word)
            if name is not None
        ]
    except ValueError as error:
        raise BadOption(
            f"--launcher {launcher!r} can't be read: {error}; double braces stand for one"
        ) from None
    if unknown := sorted({*used} - {*PLACEHOLDERS}):
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise BadOption(f"--launcher has no placeholder {{{unknown[0]}}}; there are {known}")
    if not {*used} & {*COMMANDS}:
        raise BadOption(
            f"--launcher is {', '.join(BUILT_IN)}, or a template with {{command}} or {{line}} in it, which "
            f"has to run once on each host; it is {launcher!r}"
        )


def words(launcher: str, command: Sequence[str], hosts: int, ranks_per_host: int) -> list[str]:
    """The words that run a command on all hosts.

    Args:
        launcher: A name of `BUILT_IN`, or a template.
        command: To be run once on each host.
        hosts: How many.
        ranks_per_host: That it starts.
    """
    found: list[str] = []
    for word in shlex.split(BUILT_IN.get(launcher, launcher)):
        if word == "{command}":
            found += command
        else:
            line = shlex.join(command)
            found.append(word.format(command=line, line=line, hosts=hosts, ranks_per_host=ranks_per_host))
    return found
