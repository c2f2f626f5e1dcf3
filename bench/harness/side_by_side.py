"""Work that reads no clock, side by side: processes of one thread each, as many as there are cores.

Must not know: what the work is. Nothing that is timed may run meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch

Given = TypeVar("Given")
Found = TypeVar("Found")


def side_by_side(
    work: Callable[[Given], Found], given: Iterable[Given], *, quick: bool = False
) -> list[Found]:
    """Calls a function, which other processes import by its name, for each of `given`, in their order.

    If it is `quick`, one after the other in this process: others would take longer to begin.
    """
    if quick:
        return list(map(work, given))
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        return list(pool.map(work, given))
