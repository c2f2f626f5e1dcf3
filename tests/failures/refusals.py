"""More memory is gone than the code survives: every rank says so, and nothing of the rest is overwritten.

Runs in the workers of a start in which the plan has a `Refused` event. The worker with torchrun's RANK 0
reads all arenas before it joins the rendezvous, once the workers of the start before have ended: they may
still undo their step. It reads them again when every rank has refused; then it brings back the memory that
was put aside. The others wait for that before they end.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from ecemb.memory import scan
from ecemb.memory.header import NONE, WORDS, WORDS_OFFSET
from failures.board import AWAY, Board

ALL_SAY_SO_S = 240.0
_POLL_S = 0.01
_CLAIMED = ("pid", "pid_start")  # who holds the arena: the only words that a refused start may write


class Refusal:
    """One worker's part.

    Args:
        folder: the run's.
        start: number of this start of the job.
        board: this worker's.
        arenas: the folder of all arenas.
        met: whether the workers of this start have met.
    """

    def __init__(self, folder: Path, start: int, board: Board, arenas: Path, *, met: bool) -> None:
        self._folder = folder / "refusals"
        self._start = start
        self._board = board
        self._arenas = arenas
        self._began = time.monotonic()
        self._before: dict[str, str] = {}
        if board.get("worker") == 0:
            deadline = self._began + ALL_SAY_SO_S
            while not met and any(one.holder for one in scan.arenas(arenas)) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._before, states = contents(arenas)
            _write(self._folder / f"{start}.before.json", {"states": states})

    def tell(self, error: Exception) -> None:
        """Say why this rank refused, and wait until all have."""
        about = {
            "rank": self._board.known_rank,
            "error": type(error).__name__,
            "message": str(error),
            "seconds": time.monotonic() - self._began,
            "at_ns": time.monotonic_ns(),
        }
        _write(self._folder / f"{self._start}.rank{about['rank']}.json", about)
        verdict = self._folder / f"{self._start}.verdict.json"
        deadline = time.monotonic() + ALL_SAY_SO_S
        if self._board.get("worker") != 0:
            while not verdict.exists() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            return
        ranks = int(os.environ["WORLD_SIZE"])
        while len(told := list(self._folder.glob(f"{self._start}.rank*.json"))) < ranks:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        after, _ = contents(self._arenas)
        changed = [name for name in sorted(self._before | after) if self._before.get(name) != after.get(name)]
        back = [path.rename(path.with_suffix(".arena")) for path in self._arenas.rglob("*" + AWAY)]
        _write(
            verdict, {"told": len(told), "changed": changed, "kept": len(after), "brought_back": len(back)}
        )


def contents(folder: Path) -> tuple[dict[str, str], list[int]]:
    """A digest of each arena's bytes, but for the words that say who holds it; and the arenas' states."""
    digests: dict[str, str] = {}
    states: list[int] = []
    for path in sorted(folder.rglob("*.arena")):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            at = 0
            while at < size:
                try:
                    at = os.lseek(file.fileno(), at, os.SEEK_DATA)  # most of the file has no memory yet
                except OSError:
                    break
                stop = os.lseek(file.fileno(), at, os.SEEK_HOLE)
                data = bytearray(os.pread(file.fileno(), stop - at, at))
                for word in _CLAIMED:
                    place = WORDS_OFFSET + 8 * WORDS.index(word) - at
                    if 0 <= place < len(data):
                        data[place : place + 8] = NONE.to_bytes(8, "little", signed=True)
                if any(data):  # whether a page of zeros is there or a hole is no difference
                    digest.update(at.to_bytes(8, "little") + data)
                at = stop
            state = os.pread(file.fileno(), 8, WORDS_OFFSET + 8 * WORDS.index("state"))
        states.append(int.from_bytes(state, "little", signed=True))
        digests[path.name] = digest.hexdigest()
    return digests, states


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps(content))
    partial.rename(path)
