"""The settings of torchrun that decide how soon it restarts workers, and whether it does.

Owns the one line of advice that `ecemb-run` prints. It reads what torchrun shows to the commands that it
starts: their environment, and torchrun's own command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_MONITOR_S = 0.1
"""torchrun's own default of the time between two looks at its workers."""
_MOST_MONITOR_S = 0.05
_KEEP_ALIVE = ("keep_alive_interval", "keep_alive_max_attempt")
_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def advice(environment: Mapping[str, str], command_line: Sequence[str]) -> str | None:
    """Names the settings that torchrun lacks for fast restarts; None if it has them, or isn't torchrun.

    Args:
        environment: of a command that torchrun has started.
        command_line: torchrun's.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    wanted: list[str] = []
    if environment.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        wanted.append("--max-restarts 100 (it is 0: the first failure ends the training)")
    if any(
        word.endswith(("torchrun", "torch.distributed.run", "distributed/run.py")) for word in command_line
    ):
        interval = _option(command_line, "monitor-interval", environment.get("PET_MONITOR_INTERVAL"))
        if _number(interval, _MONITOR_S) > _MOST_MONITOR_S:
            wanted.append(f"--monitor-interval 0.01 (it is {interval or _MONITOR_S})")
        nodes = _option(command_line, "nnodes", environment.get("PET_NNODES")) or "1"
        if nodes not in ("1", "1:1"):
            given = _option(command_line, "rdzv-conf", environment.get("PET_RDZV_CONF")) or ""
            names = [*_KEEP_ALIVE, *(["last_call_timeout"] if _is_range(nodes) else [])]
            values = {"keep_alive_max_attempt": 5}
            if missing := [f"{name}={values.get(name, 1)}" for name in names if f"{name}=" not in given]:
                wanted.append(f"--rdzv-conf {','.join(missing)}")
            if environment.get(_SHARED_STORE) != "1":
                wanted.append(f"{_SHARED_STORE}=1 in its environment")
    return f"for fast restarts, launch torchrun with {' and '.join(wanted)}" if wanted else None


def _option(words: Sequence[str], name: str, otherwise: str | None) -> str | None:
    """The value of an option of torchrun, which may be written with - or _, and with = or a space."""
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.startswith("--") and option[2:].replace("_", "-") == name:
            return value if equals else next(iter(words[index + 1 : index + 2]), None)
    return otherwise


def _number(text: str | None, otherwise: float) -> float:
    try:
        return otherwise if text is None else float(text)
    except ValueError:
        return otherwise


def _is_range(nodes: str) -> bool:
    least, colon, most = nodes.partition(":")
    return bool(colon) and least != most
