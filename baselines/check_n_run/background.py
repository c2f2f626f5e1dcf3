"""Who writes: a thread of the training's process, or a process of its own, one checkpoint at a time.

A process doesn't take the training's interpreter lock, and costs the import of torch once in each life. It is
a plain child with pipes (`worker`), not multiprocessing's, which would run the training's script again; it
ends when its parent does.

Must not know: what is written.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from .manifest import Receipt
from .store import store_at
from .writing import CheckpointFailed, WriteTask, write

Write = Callable[[WriteTask], Receipt]


class Background:
    """Writes one checkpoint while training goes on.

    Args:
        target: see `store.store_at`.
        options: of fsspec's file system.
        process: in a process of its own.
    """

    def __init__(self, target: str, options: Mapping[str, Any], *, process: bool) -> None:
        self._child = Child(target, options) if process else None
        store = store_at(target, options)
        self._write: Write = (lambda job: write(job, store)) if self._child is None else self._child
        self._writing: tuple[WriteTask, Future[Receipt]] | None = None

    def start(self, job: WriteTask) -> None:
        """Begins to write; the checkpoint before it has been waited for."""
        writing = Future[Receipt]()

        def run() -> None:
            try:
                writing.set_result(self._write(job))
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                writing.set_exception(error)

        self._writing = job, writing
        threading.Thread(target=run, name="check-n-run", daemon=True).start()

    def wait(self) -> tuple[WriteTask, Receipt] | None:
        """What has been written since this was called last; on rank 0, the checkpoint is whole then.

        Raises:
            CheckpointFailed: it failed.
        """
        if self._writing is None:
            return None
        (job, writing), self._writing = self._writing, None
        try:
            return job, writing.result()
        except CheckpointFailed:
            raise
        except Exception as error:
            raise CheckpointFailed(
                f"the checkpoint of step {job.facts.step} was not written: {type(error).__name__}: {error}. "
                f"Those before it are untouched"
            ) from error

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._child is not None:
            self._child.close()


class Child:
    """`write` in a process of its own. Called by one thread at a time.

    Args:
        target: see `store.store_at`.
        options: of fsspec's file system; pickled.
    """

    def __init__(self, target: str, options: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "baselines.check_n_run.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._tell((target, dict(options)))

    def __call__(self, job: WriteTask) -> Receipt:
        """See `writing.write`.

        Raises:
            CheckpointFailed: it failed, or the process is gone.
        """
        self._tell(job)
        out = self._process.stdout
        try:
            found = pickle.load(out) if out is not None else None
        except EOFError:
            found = None
        if isinstance(found, Receipt):
            return found
        raise CheckpointFailed(
            f"the checkpoint of step {job.facts.step} was not written: "
            f"{found or f'its process ended with {self._process.wait()}, as its stderr says'}"
        )

    def close(self) -> None:
        """Ends the process, at once."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what it did not receive is lost with it
                    pipe.close()
        self._process.wait()

    def _tell(self, what: object) -> None:
        into = self._process.stdin
        if into is not None:
            with suppress(BrokenPipeError):  # it is gone: who waits for its answer will hear
                into.write(pickle.dumps(what))
                into.flush()
