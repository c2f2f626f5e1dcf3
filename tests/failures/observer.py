"""What a worker of the soak sees of itself at equal points: memory, descriptors, threads, files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist

import ecemb
from failures.board import Board

SOAK_TIMEOUT_S = 20.0  # after which a rank that was stopped counts as dead
LOOK_AFTER = 20  # steps of a start
SCRUB_EVERY, SCRUBBED = 25, 0.1


class Observer:
    """Called by the training before and after each step.

    Args:
        folder: the run's: samples go there, and word of the end comes from there.
        board: the worker's, which has the number of this start of the job, once all workers have met.
    """

    def __init__(self, folder: Path, board: Board) -> None:
        self._folder, self._board = folder, board
        self._stop = folder / "stop"
        self._steps = 0

    def ends(self, step: int) -> bool:
        """Whether the soak's driver said that this step is not to be run any more."""
        return self._stop.exists() and step >= int(self._stop.read_text())

    def look(self, guard: ecemb.Guard, step: int) -> None:
        """After a step, scrub now and then; after some steps, look."""
        if guard.next_step != step + 1:
            return  # the step begins
        self._board.set("whole", int(guard._background.is_over))
        if step % SCRUB_EVERY == SCRUB_EVERY - 1:
            report = guard.scrub(SCRUBBED)
            if report.wrong_words:
                (self._folder / "alarms").open("a").write(f"rank {dist.get_rank()}, step {step}: {report}\n")
        self._steps += 1
        if self._steps == LOOK_AFTER:
            path = self._folder / "samples" / f"{self._board.get('start')}.{dist.get_rank()}.json"
            path.with_suffix(".new").write_text(json.dumps(self._sample()))
            path.with_suffix(".new").rename(path)

    def _sample(self) -> dict[str, int]:
        paths = [path for path in Path(os.environ["ECEMB_ARENAS"]).rglob("*") if path.is_file()]
        arenas = [path.stat() for path in paths if path.parent.name != ".warm"]  # logs of fork servers
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "arena_files": len(arenas),
            "arena_bytes": sum(stat.st_blocks * 512 for stat in arenas),
        }
