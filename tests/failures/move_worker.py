"""A worker of a move that is killed by SIGKILL at a line of code; `moves.py` launches it.

Takes the arguments of tests/support/elastic_worker.py. ECEMB_MOVE_DEATH names the stage, the line of code in
it, torchrun's RANK of the victim, and its kind; only the first start of a launch has a victim.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import ecemb
from ecemb.recovery import execute
from ecemb.start import create, moving, opening
from support import elastic_worker

STAGES = {
    "planning": (opening, "plan_move"),
    "settling": (opening, "settle"),
    "undo and redo": (moving.RankMemory, "roll_to"),
    "making room": (moving, "make_room"),
    "creating an arena": (opening, "claim_or_create"),
    "joining": (opening, "join"),
    "carrying rows": (moving, "carry"),
    "gathering replicated state": (moving, "gather_old"),
    "restoring": (moving.contents, "restore_state"),
    "encoding": (execute, "_encode"),
    "going live": (create, "fill"),
    "superseding": (opening, "_supersede"),
    "restoring state": (opening, "_restore"),
}
"""What a worker does in a move, and the function that does it; a stage within another is not the other's."""
KINDS = ("process", "memory", "leader", "torchrun")
CODES = [ecemb.Code(4, 2), ecemb.Code(3, 2)]  # on four hosts, and on three
_SOURCES = str(Path(ecemb.__file__).parent)
_KERNELS = str(Path(ecemb.__file__).with_name("kernels"))


class Death:
    """Counts lines of code in one stage, and kills this process at one of them, or at the stage's end.

    Args:
        stage: in `STAGES`.
        line: how many lines of it are run.
        kind: in `KINDS`.
        root: the folder of all launches.
        host: this worker's.
    """

    def __init__(self, stage: str, line: int, kind: str, root: Path, host: str) -> None:
        self._stage, self._left, self._kind, self._root, self._host = stage, line, kind, root, host
        self._stages: list[str] = []

    def install(self) -> None:
        """Wraps the stages."""
        for name, (owner, attribute) in STAGES.items():
            setattr(owner, attribute, self._within(name, getattr(owner, attribute)))
        sys.settrace(self._call)

    def _within(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def within(*arguments: Any, **more: Any) -> Any:
            self._stages.append(name)
            try:
                result = function(*arguments, **more)
                if name == self._stage:
                    self._die("its end")
                return result
            finally:
                self._stages.pop()

        return within

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        return self._line if name.startswith(_SOURCES) and not name.startswith(_KERNELS) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and self._stages and self._stages[-1] == self._stage:
            self._left -= 1
            if self._left <= 0:
                self._die(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return self._line

    def _die(self, place: str) -> None:
        sys.settrace(None)
        (self._root / "died").write_text(place)
        if self._kind == "torchrun":
            while True:  # until it is killed, and this process with it
                time.sleep(0.1)
        if self._kind == "memory":
            shutil.rmtree(self._root / f"ecemb-{os.geteuid()}" / "elastic" / self._host, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    elastic_worker.CODES[:] = CODES
    root, hosts = Path(sys.argv[1]), sys.argv[4].split(",")
    if (planned := os.environ.get("ECEMB_MOVE_DEATH")) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        stage, line, victim, kind = planned.split(",")
        if os.environ["RANK"] == victim:
            Death(stage, int(line), kind, root, hosts[int(victim)]).install()
    elastic_worker.main(
        root, sys.argv[2], sys.argv[3], hosts, int(sys.argv[5]), sys.argv[6] if len(sys.argv) > 6 else ""
    )


if __name__ == "__main__":
    main()
