"""The options of a comparison on a cluster, and which of them go together.

Imports hardly anything, and nothing of ecemb: all questions are asked by a command line that has them.

Must not know: how anything is launched or measured.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench import ROOT
from bench.harness.result import BadOption
from bench.questions.compare_cluster.launchers import BUILT_IN, HERE, check

Device = Literal["cpu", "cuda"]
Backend = Literal["gloo", "nccl"]
SCRIPT = ROOT / "bench" / "workloads" / "scripts" / "clicks_nn.py"
"""What is trained without --script."""
NAMES = (
    *("launcher", "hosts", "ranks_per_host", "shared", "memory", "device", "backend", "network", "script"),
    *("set", "methods", "kills", "steps", "launches"),
)
BEGINS = ("launcher", "hosts", "script")
"""Of these, the ones that turn `compare` into this comparison."""
LEAST_LAUNCHES = 2
_COMMA = re.compile(r",(?![^(]*\))")
"""Between names of methods, in which codes are in brackets."""
FULL, QUICK = (200, 3, 4), (60, 1, 2)
"""Steps, kills and launches by default, and with --quick."""


@dataclass(frozen=True)
class Options:
    """What is compared, and where.

    Attributes:
        launcher: A name of `BUILT_IN`, or a template; see `launchers`.
        hosts: Of each launch.
        ranks_per_host: Ranks on each of them; 0: as many as this machine has devices, or 4 without any.
        shared: Folder that all hosts see; None on one host: a temporary one.
        memory: Folder on tmpfs, of each host.
        device: Where models are trained.
        backend: Of the process group.
        network: What the rows say of the network; "": its speed as the hosts' interfaces have it.
        script: What is trained; see `bench.workloads.scripts`.
        settings: NAME=VALUE each, for the script.
        methods: Names of methods; (): those of the head to head.
        kills: Of each launch.
        steps: Of each launch.
        launches: Of each method.
    """

    launcher: str = HERE
    hosts: int = 1
    ranks_per_host: int = 0
    shared: Path | None = None
    memory: Path = Path("/dev/shm")
    device: Device = "cpu"
    backend: Backend = "gloo"
    network: str = ""
    script: Path = SCRIPT
    settings: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    kills: int = FULL[1]
    steps: int = FULL[0]
    launches: int = FULL[2]

    def words(self) -> list[str]:
        """The options that differ from the defaults, as words of the command line; of files, names alone."""
        given: list[str] = []
        for name in NAMES:
            value: Any = getattr(self, {"set": "settings"}.get(name, name))
            if value == getattr(Options, {"set": "settings"}.get(name, name)) or name == "shared":
                continue
            option = f"--{name.replace('_', '-')}"
            if name == "set":
                given += [f"{option} {one}" for one in value]
                continue
            shown = value.name if isinstance(value, Path) and name == "script" else value
            shown = ",".join(shown) if isinstance(shown, tuple) else str(shown)
            given.append(f"{option} '{shown}'" if " " in shown else f"{option} {shown}")
        return given


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the command line of `python -m bench`."""
    group = parser.add_argument_group(
        "compare on any cluster, for a script of yours",
        f"One of {', '.join(map(_option, BEGINS))} makes `compare` launch whole trainings by a launcher "
        "(docs/guides/comparing.md).",
    )
    group.add_argument(
        "--launcher",
        metavar="NAME|TEMPLATE",
        help=f"{', '.join(BUILT_IN)}, or a command that runs {{command}} (words) or {{line}} (one word for a "
        f"shell) once on each of {{hosts}} hosts (default: {HERE})",
    )
    group.add_argument("--hosts", type=int, metavar="H", help="of each launch (default: 1)")
    group.add_argument("--ranks-per-host", type=int, metavar="R", help="default: its devices; 4 on CPUs")
    group.add_argument("--shared", type=Path, metavar="FOLDER", help="that all hosts see; needed if H > 1")
    group.add_argument(
        "--memory", type=Path, metavar="FOLDER", help="on tmpfs, of each host (default: /dev/shm)"
    )
    group.add_argument("--device", choices=("cpu", "cuda"), help="where models are trained (default: cpu)")
    group.add_argument(
        "--backend", choices=("gloo", "nccl"), help="default: nccl with --device cuda, else gloo"
    )
    group.add_argument("--network", metavar="TEXT", help="for the rows (default: the interfaces' speed)")
    group.add_argument("--script", type=Path, metavar="FILE.py", help="what is trained")
    group.add_argument("--set", action="append", metavar="NAME=VALUE", help="for the script; may be repeated")
    group.add_argument("--methods", metavar="A,B,...", help="also of compare on one machine (default: all)")
    group.add_argument("--kills", type=int, metavar="K", help=f"of each launch (default: {FULL[1]})")
    group.add_argument("--steps", type=int, metavar="S", help=f"of each launch (default: {FULL[0]})")
    group.add_argument("--launches", type=int, metavar="L", help=f"of each method (default: {FULL[2]})")


def of(given: argparse.Namespace) -> Options | None:
    """The comparison that the command line asks for; None if none of these options is given.

    Raises:
        BadOption: Some don't go together, or one has a value that it can't have.
    """
    values = {name: getattr(given, name) for name in NAMES if getattr(given, name) is not None}
    if not values or (given.question == "compare" and values.keys() == {"methods"}):
        return None
    if given.question not in ("compare", "compare_cluster"):
        raise BadOption(f"{_option(next(iter(values)))} is for compare, and not for {given.question}")
    if given.question == "compare" and not values.keys() & {*BEGINS}:
        raise BadOption(
            f"{_option(next(iter(values)))} is for a comparison on a cluster, which one of "
            f"{', '.join(map(_option, BEGINS))} asks for: add --hosts 1 for this machine"
        )
    for name in ("engine", "setting"):
        if getattr(given, name) is not None:
            raise BadOption(
                f"--{name} chooses among the models of bench/, and a comparison on a cluster trains a "
                f"script: leave --{name} out, or give the script another size with --set"
            )
    steps, kills, launches = QUICK if given.quick else FULL
    values = {"steps": steps, "kills": kills, "launches": launches, **values}
    if "methods" in values:
        values["methods"] = methods_of(given)
    values["settings"] = tuple(values.pop("set", ()))
    if values.get("device") == "cuda":
        values.setdefault("backend", "nccl")
    return checked(Options(**values))


def methods_of(given: argparse.Namespace) -> tuple[str, ...]:
    """The names of methods that the command line has."""
    return tuple(one.strip() for one in _COMMA.split(given.methods or "") if one.strip())


def checked(options: Options) -> Options:
    """The same options.

    Raises:
        BadOption: See `of`.
    """
    check(options.launcher)
    for name, least in (("hosts", 1), ("ranks_per_host", 0), ("kills", 1), ("launches", LEAST_LAUNCHES)):
        if getattr(options, name) < least:
            raise BadOption(f"{_option(name)} is at least {least}; it is {getattr(options, name)}")
    if options.hosts > 1 and options.launcher == HERE:
        raise BadOption(
            f"--launcher {HERE} starts ranks on this machine alone, and --hosts is {options.hosts}: give "
            "--launcher srun, or a template of your own launcher"
        )
    if options.hosts > 1 and options.shared is None:
        raise BadOption(
            f"--shared is needed with several hosts, and --hosts is {options.hosts}: give a folder that all "
            "of them see, for example on NFS"
        )
    if options.backend == "nccl" and options.device == "cpu":
        raise BadOption(
            "--backend nccl exchanges tensors of devices, and --device is cpu: give --device cuda"
        )
    if not options.script.is_file():
        raise BadOption(
            f"--script {options.script} is no file: give the path of a script as in {SCRIPT.parent}"
        )
    for one in options.settings:
        if "=" not in one:
            raise BadOption(f"--set takes NAME=VALUE; it is {one!r}")
    from bench.questions.compare_cluster.steps import LEAST_PLAIN, Steps  # imports ecemb

    least = Steps(0, options.kills).total + LEAST_PLAIN
    if options.steps < least:
        raise BadOption(
            f"--steps is at least {least} with --kills {options.kills}, so that {LEAST_PLAIN} of them are "
            f"measured; it is {options.steps}"
        )
    return options


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
