"""The number of steps in a transaction: a fixed number, or Young's optimum, bounded by room for journals.

Each rank sends the most steps that it wants, by its own measurements and by the room for its journals. The
smallest number is the size of the next window on all ranks. The arenas keep the measurements of "auto", and
half the size of a window that ran out of room, so a restart continues with them.

Must not know: what a commit does, and how ranks agree.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

from ..errors import ConfigurationError, UsageError
from ..memory.header import Word
from ..memory.rank_memory import RankMemory
from ..net.collectives import Transport
from ..net.wording import byte_size
from .interval import best, published_mtbf

logger: logging.Logger = logging.getLogger("ecemb")

WARM_UP, MEASURED = 5, 20
"""Steps that "auto" skips first, and steps that it then measures; until then each step is a transaction."""
COMMITS = 5
"""Number of latest commits at one window size whose median "auto" compares with the first such median."""
LESS, MORE = 0.5, 1.5
"""Bounds of the ratio of a time now to its value when the window was chosen; beyond, "auto" chooses again."""

_TIMES = Word.WINDOW_COMMIT_NS, Word.WINDOW_STEP_NS
_clock: Callable[[], float] = time.perf_counter


class Window:
    """The number of steps of a transaction; the same on all ranks.

    Args:
        steps: 1 or more, or "auto".
        mtbf: Mean time between failures of the whole job, for "auto"; None for the published rate for this
            number of hosts (`published_mtbf`).
        max_replay: Most time of steps that a failure may take back, for "auto", as a timedelta or in seconds;
            None for the bounds of `interval` alone.

    Attributes:
        asked: `steps`, `mtbf` and `max_replay`, for the comparison between ranks.
        size: The number of steps; 1 while "auto" measures.

    Raises:
        ConfigurationError: `steps` is neither 1 or more nor "auto", a time isn't above 0, or a time is given
            without "auto".
    """

    def __init__(
        self,
        steps: int | Literal["auto"] = 1,
        mtbf: timedelta | None = None,
        max_replay: timedelta | float | None = None,
    ) -> None:
        if steps != "auto" and (type(steps) is not int or steps < 1):
            raise ConfigurationError(f"window is a number of steps from 1 on, or 'auto'; it is {steps!r}")
        if steps != "auto" and mtbf is not None:
            raise ConfigurationError(
                f"mtbf, the mean time between failures of the job, goes with window='auto'; they are "
                f"{mtbf!r} and {steps!r}: e.g. window='auto', mtbf=timedelta(hours=3)"
            )
        if steps != "auto" and max_replay is not None:
            raise ConfigurationError(
                f"max_replay, the most time of steps that a failure may take back, goes with window='auto'; "
                f"they are {max_replay!r} and {steps!r}: e.g. window='auto', max_replay=timedelta(seconds=30)"
            )
        if mtbf is not None and not (isinstance(mtbf, timedelta) and timedelta(0) < mtbf):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"mtbf is a time above 0, e.g. timedelta(hours=3); it is {mtbf!r}")
        self._max_replay_s = _seconds(max_replay)
        self.asked: list[int | str] = [steps, str(mtbf), str(self._max_replay_s)]
        self._mtbf = mtbf
        self._is_auto = steps == "auto"
        self._memory: RankMemory | None = None
        self._overlap = False
        self._room = 0  # bound of the size since a journal ran out of room, in steps; 0 without a bound
        self._speaks = self._has_logged_room = False
        self._want: int = 1 if steps == "auto" else steps
        self.size: int = self._want
        self._began: deque[float] = deque(maxlen=MEASURED + 1)
        self._committing_s: list[float] = []
        self._first_s: float | None = None  # first median duration of commits at this window size
        self._times: tuple[float, float] | None = None  # commit and step, in seconds, that the choice is for

    def take_up(self, memory: RankMemory, transport: Transport, hosts: int, *, overlap: bool = False) -> None:
        """Continues with the measurements and the room for journals that the arenas hold. All ranks.

        A rank without measurements, after a loss or an early kill, takes them from another rank.

        Args:
            memory: This rank's memory.
            transport: The control group.
            hosts: Number of hosts of the job.
            overlap: Whether a failure may take back the window before as well.
        """
        self._memory, self._overlap, self._speaks = memory, overlap, transport.rank == 0
        if not self._is_auto and self._want == 1:
            return
        self._mtbf = self._mtbf or published_mtbf(hosts)
        own = [memory.arena.get(word) for word in (*_TIMES, Word.WINDOW_ROOM)]
        known = json.dumps([*own, memory.has_room_for_all(overlap=overlap)]).encode()
        texts = transport.gather(known, "going on with the window")
        answers: list[tuple[int, int, int, bool]] = [json.loads(text) for text in texts]
        self._room = min((room for *_, room, _ in answers if room > 0), default=0)
        size = self._want
        measured = [(commit, step) for commit, step, *_ in answers if commit > 0 and step > 0]
        if self._is_auto and measured:  # a kill may have left one of the two words
            commit, step = own[:2] if min(own[:2]) > 0 else max(measured)
            self._choose(commit / 1e9, step / 1e9)
            size = min(self._best(commit / 1e9, step / 1e9) for commit, step in measured)
        if not all(has_room for *_, has_room in answers):
            size = 1  # one step shows how many rows a step changes, and so how many steps have room
        self.agree(min(size, self._room or size))

    def begin(self) -> None:
        """Marks the begin of a step."""
        if self._is_auto:
            self._began.append(_clock())

    def end(self, committing_s: float) -> None:
        """Records the duration of a commit on this rank in seconds, by which "auto" may choose again."""
        if not self._is_auto:
            return
        self._committing_s.append(committing_s)
        if self._times is None:
            if len(self._committing_s) >= WARM_UP + MEASURED and len(self._began) > MEASURED:
                self._choose(statistics.median(self._committing_s[WARM_UP:]), self._step_s())
        else:
            self._adapt(*self._times)

    def wish(self, owed_bytes: int = 0) -> int:
        """The most steps that this rank wants in its next window. Called at the end of a window.

        Args:
            owed_bytes: see `RankMemory.window_room`.
        """
        most = min(self._want, self._room or self._want)
        if most == 1 or self._memory is None:
            return most
        fits = self._memory.window_room(most, overlap=self._overlap, owed_bytes=owed_bytes)
        if fits < most and not self._has_logged_room:
            self._has_logged_room = True
            logger.warning(
                "window: there is room for the rows of %d steps, and %d are asked for: windows are shorter "
                "until there is more memory for %s, beside %s that stay free for other processes. This is "
                "said once",
                fits,
                most,
                self._memory.arena.path.parent,
                byte_size(self._memory.reserve_bytes),
            )
        return fits

    def agree(self, size: int) -> None:
        """Sets the next window's size.

        Args:
            size: The smallest `wish` of all ranks.
        """
        if size == self.size:
            return
        self.size = size
        self._committing_s.clear()
        self._first_s = None
        if self._times is not None:
            logger.log(
                logging.INFO if self._speaks else logging.DEBUG,
                "window: %d steps are committed together from now on (a commit takes %.1f ms, a step "
                "%.1f ms; mean time between failures %s)",
                size,
                *(1e3 * one for one in self._times),
                self._mtbf,
            )

    def run_out(self) -> None:
        """Stores half of this window's size in the arena, as the bound of windows after a restart.

        Called when a journal had no room for this window, before the step fails.
        """
        if self._memory is not None and self.size > 1:
            self._memory.mark_window_room(self.size // 2)

    def _step_s(self) -> float:
        return statistics.median(b - a for a, b in itertools.pairwise(tuple(self._began)))

    def _adapt(self, commit_s: float, step_s: float) -> None:
        """Chooses again when a commit's or step's time is beyond `LESS` or `MORE` times its old value."""
        now_s, ratio = step_s, 1.0
        if len(self._began) > MEASURED:
            now_s = self._step_s()
        commits = self._committing_s[1:]  # the first may belong to a window of the size before
        if len(commits) >= COMMITS:
            latest_s = statistics.median(commits[-COMMITS:])
            if self._first_s is None:
                self._first_s = max(latest_s, 1e-9)
            ratio = latest_s / self._first_s
            del self._committing_s[1:-COMMITS]
        if _differs(now_s / step_s) or _differs(ratio):
            self._choose(commit_s * ratio, now_s)

    def _choose(self, commit_s: float, step_s: float) -> None:
        """Chooses the number of steps by these times in seconds, and stores the times in the arena."""
        if self._memory is None:
            raise UsageError("a window is chosen after `take_up`")
        for word, value in zip(_TIMES, (commit_s, step_s), strict=True):
            self._memory.arena.set(word, max(1, round(1e9 * value)))
        self._times = commit_s, step_s = max(commit_s, 1e-9), max(step_s, 1e-9)
        self._want = self._best(commit_s, step_s)
        self._began.clear()
        self._committing_s.clear()
        self._first_s = None

    def _best(self, commit_s: float, step_s: float) -> int:
        if self._mtbf is None:
            raise UsageError("a window is chosen after `take_up`")
        most_s = None if self._max_replay_s is None else self._max_replay_s / (2 if self._overlap else 1)
        return best(commit_s, step_s, self._mtbf.total_seconds(), most_s)


def _differs(ratio: float) -> bool:
    return not LESS < ratio < MORE


def _seconds(max_replay: timedelta | float | None) -> float | None:
    if max_replay is None:
        return None
    given = max_replay.total_seconds() if isinstance(max_replay, timedelta) else max_replay
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"max_replay is a time above 0, as a timedelta or in seconds; it is {max_replay!r}"
        )
    return float(given)
