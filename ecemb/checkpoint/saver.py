"""Saves a job's checkpoints, and finds them again: the collective part.

Owns the order of a save (`CheckpointWriter`), and the save in the background. Invariant: a checkpoint is of
one transaction, which all ranks have committed. Must not know: how checkpoints are stored.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import errors
from ..errors import (
    CheckpointError,
    CheckpointFailed,
    ConfigurationError,
    EcembError,
    JobFinished,
    PeerFailure,
)
from ..memory.rank_memory import RankMemory
from ..net.collectives import Transport
from ..net.worker_exit import before_end
from ..recovery.state_slices import gathered
from ..state.replicated import ReplicatedState
from .contents import JobIdentity, Shard, account, facts_of, pieces_of
from .folder_store import SIGHT_S, CheckpointFolder, one_tells
from .interface import CheckpointReader, CheckpointWriter, DifferentialWriter, Piece, Stored

logger: logging.Logger = logging.getLogger("ecemb")

_POLL_S = 0.2

Path = str | os.PathLike[str]
Listener = Callable[[int, NDArray[np.int64]], None]
"""Called with a table's index and the rows of this rank's shard that are about to change."""


class Saver:
    """This rank's side of saving; between steps only.

    Args:
        job: the job, as checkpoints describe it.
        memory: this rank's arena, live.
        transport: the control group.
        replicated: for its checksum.
        shards: this rank's tables in the order of their addresses.
        another: makes another control group for the background; all ranks.
        listen: registers a listener for rows that change; returns a function that removes it.
    """

    def __init__(
        self,
        job: JobIdentity,
        memory: RankMemory,
        transport: Transport,
        replicated: ReplicatedState,
        shards: Sequence[Shard],
        another: Callable[[], Transport],
        listen: Callable[[Listener], Callable[[], None]],
    ) -> None:
        self._job = job
        self._memory = memory
        self._transport = transport
        self._replicated = replicated
        self._shards = list(shards)
        self._another = another
        self._listen = listen
        self._following: list[tuple[DifferentialWriter, Callable[[], None]]] = []
        self._background_transport: Transport | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stores: dict[str, CheckpointWriter] = {}

    def keep_in_mind(self, store: object) -> None:
        """Adds the store of `protect(resume=)` to those of `finish`.

        If it is a differential writer, changed rows are reported to it from now on.
        """
        if isinstance(store, CheckpointWriter):
            self._stores[name_of(store)] = store
        self._follow(store)

    def mark_all_dirty(self) -> None:
        """Marks all rows as changed for every differential writer: rows may have changed unreported."""
        for store, _ in self._following:
            tell = self._listener(store)
            for index, shard in enumerate(self._shards):
                if shard.layout.rows:
                    tell(index, np.arange(shard.layout.rows))

    def save(self, path: Path | CheckpointWriter, *, keep: int, asynchronous: bool) -> None:
        """Saves the transaction that all ranks have committed. All ranks; see `Guard.save`."""
        began = time.perf_counter()
        self.drain()
        writer, facts = self._agree(path, keep, asynchronous=asynchronous)
        prepared = shared(
            self._transport,
            "preparing a checkpoint",
            lambda: writer.prepare(facts["step"], facts) if self._transport.rank == 0 else "",
        )
        self._stores[name_of(writer)] = writer
        if not (token := prepared[0]):
            logger.info("step %d is in %s already", facts["step"], name_of(writer))
            return
        rank, size = self._transport.rank, self._transport.world_size
        with self._discarding(writer, token):
            slots = gathered(self._memory, self._transport)
            pieces = pieces_of(self._memory, slots, self._shards, size)
            if isinstance(writer, DifferentialWriter):
                given, pieces = pieces, []
                shared(self._transport, "copying what has changed", lambda: writer.take(token, rank, given))
            elif asynchronous:
                shared(self._transport, "copying all tables", lambda: _copy_(pieces))
        if asynchronous:
            if self._background_transport is None:
                self._background_transport = self._another()
                atexit.register(self._wait)
            arguments = (self._background_transport, writer, token, facts, pieces, keep)
            self._thread = threading.Thread(
                target=self._behind, args=arguments, name="ecemb-save", daemon=True
            )
            self._thread.start()
        else:
            self._write(self._transport, writer, token, facts, pieces, keep)
            self._log(writer, facts, time.perf_counter() - began)

    def drain(self) -> None:
        """Waits for the save in the background, if there is one.

        Raises:
            CheckpointFailed: it failed.
            PeerFailure: a peer died in the meantime.
        """
        if self._thread is not None and self._thread.is_alive():
            logger.info("waiting for the checkpoint in the background")
        self._wait()
        error, self._error = self._error, None
        if error is not None:
            kind = type(error) if isinstance(error, (CheckpointError, PeerFailure)) else CheckpointFailed
            raise kind(f"the last checkpoint in the background failed: {error}") from error

    def finish(self) -> None:
        """Records in every store of the job that it is closed; all arenas already say so."""
        if self._transport.rank == 0:
            for _, store in sorted(self._stores.items()):
                finish(store, self._job.name, self._memory.committed)

    def close(self) -> None:
        """Ends the background's control group and all listeners, after all ranks have drained."""
        if self._background_transport is not None:
            self._background_transport.close()
            self._background_transport = None
            atexit.unregister(self._wait)
        for store, end in self._following:
            end()
            store.release()
        self._following.clear()

    def abandon(self) -> None:
        """Ends the save in the background and all listeners, in a process that stays after a peer's death.

        The groups are aborted, and end that save.
        """
        self._wait()
        atexit.unregister(self._wait)
        self._background_transport = None
        self.close()

    def _wait(self) -> None:
        if self._thread is not None:
            if self._thread.ident is not None:  # else an interrupt came before its start
                self._thread.join()  # its own waits have deadlines
            self._thread = None

    def _agree(
        self, path: Path | CheckpointWriter, keep: int, *, asynchronous: bool
    ) -> tuple[CheckpointWriter, dict[str, Any]]:
        """The writer, and the facts of the checkpoint from the accounts of all ranks. All ranks.

        What a rank refuses is refused on all.
        """
        writers: list[CheckpointWriter] = []

        def own() -> str:
            writers.append(writer := _writer_of(path, keep, asynchronous=asynchronous))
            self._follow(writer)
            asked = [name_of(writer), keep, asynchronous]
            return json.dumps({"asked": asked, **account(self._memory, self._shards, self._replicated)})

        answers = [json.loads(text) for text in shared(self._transport, "agreeing on a checkpoint", own)]
        for what, rule in (
            ("step", "every rank must be between the same steps"),
            ("asked", "path, keep= and asynchronous= must be the same"),
            ("dense", "dense parameters, buffers and optimizer state must be the same on all ranks"),
        ):
            if len({json.dumps(one[what]) for one in answers}) > 1:
                shown = {rank: one[what] for rank, one in enumerate(answers)}
                raise ConfigurationError(f"guard.save() differs between ranks: {rule}; they have {shown}")
        return writers[0], facts_of(self._job, answers)

    def _write(
        self,
        transport: Transport,
        writer: CheckpointWriter,
        token: str,
        facts: Mapping[str, Any],
        pieces: Sequence[Piece],
        keep: int,
    ) -> None:
        """Does everything after the preparation. All ranks; a failure on one rank fails on all."""
        rank, size = transport.rank, transport.world_size

        def commit(receipts: Sequence[str]) -> None:
            if rank == 0:
                writer.commit(token, facts, receipts)
                writer.retain(keep)

        with self._discarding(writer, token):
            receipts = shared(
                transport, "writing a checkpoint", lambda: writer.write(token, rank, size, pieces)
            )
            shared(transport, "committing a checkpoint", lambda: commit(receipts))

    @contextmanager
    def _discarding(self, writer: CheckpointWriter, token: str) -> Generator[None]:
        """Runs the body, which fails on all ranks or on none; rank 0 then removes the save's leftovers."""
        try:
            yield
        except EcembError:
            if self._transport.rank == 0:
                _discard(writer, token)
            raise

    def _follow(self, store: object) -> None:
        """Begins to report changed rows to a differential writer.

        Raises:
            ConfigurationError: another writer follows the same store.
        """
        if not isinstance(store, DifferentialWriter):
            return
        for known, _ in self._following:
            if known is store:
                return
            if name_of(known) == name_of(store):
                raise ConfigurationError(
                    f"guard.save() was given another {type(store).__name__} for {name_of(store)} than "
                    f"before, and it doesn't know the changes so far: make one writer, and give it to "
                    f"protect(resume=) and to every guard.save()"
                )
        rank = self._memory.rank
        shards = {one.key(rank): range(one.start, one.start + one.layout.rows) for one in self._shards}
        store.follow(shards)
        self._following.append((store, self._listen(self._listener(store))))

    def _listener(self, store: DifferentialWriter) -> Listener:
        keys = [shard.key(self._memory.rank) for shard in self._shards]
        return lambda index, rows: store.touched(keys[index], torch.from_numpy(rows))

    def _behind(self, *arguments: Any) -> None:
        """Runs the save in the background's thread."""
        began = time.perf_counter()
        try:
            with before_end():
                self._write(*arguments)
            self._log(arguments[1], arguments[3], time.perf_counter() - began)
        except BaseException as error:  # noqa: BLE001 - raised by the next save, or by close
            self._error = error
            logger.error("the checkpoint of step %d failed: %s", arguments[3]["step"], error)

    def _log(self, writer: CheckpointWriter, facts: Mapping[str, Any], seconds: float) -> None:
        level = logging.INFO if self._transport.rank == 0 else logging.DEBUG
        logger.log(level, "step %d is saved in %s (%.2f s)", facts["step"], name_of(writer), seconds)


def _writer_of(path: Path | CheckpointWriter, keep: int, *, asynchronous: bool) -> CheckpointWriter:
    """The writer for the arguments of `Guard.save`.

    Raises:
        ConfigurationError: an argument breaks a rule.
    """
    writer = CheckpointFolder(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(writer, CheckpointWriter):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"guard.save() takes a path or a CheckpointWriter; it got {path!r}")
    if type(keep) is not int or keep < 1:
        raise ConfigurationError(
            f"keep= is the number of checkpoints to keep, an int of at least 1; it is {keep!r}"
        )
    if not isinstance(asynchronous, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"asynchronous= is True or False; it is {asynchronous!r}")
    return writer


def _copy_(pieces: list[Piece]) -> None:
    """Replaces the pieces' tensors by copies."""
    pieces[:] = [dataclasses.replace(piece, tensor=piece.tensor.clone()) for piece in pieces]


def _discard(writer: CheckpointWriter, token: str) -> None:
    try:
        writer.discard(token)
    except Exception as error:  # noqa: BLE001 - a store's own; the save's error is the one to raise
        logger.warning("leftovers of a failed save can't be removed: %s: %s", type(error).__name__, error)


def shared(transport: Transport, what: str, act: Callable[[], str | None]) -> list[str]:
    """Runs `act` on every rank, and returns all ranks' results, "" for None. All ranks.

    Raises:
        EcembError: `act` failed on a rank; the same on all, a CheckpointFailed if the error is not ecemb's.
        PeerFailure: a peer died.
    """
    failure: Exception | None = None
    said = ["", ""]
    try:
        said[1] = act() or ""
    except Exception as error:  # noqa: BLE001 - raised after all ranks have learned of it
        failure, said = error, [type(error).__name__, str(error)]
    answers = [json.loads(text) for text in transport.gather(json.dumps(said).encode(), what)]
    failed = {rank: (name, text) for rank, (name, text) in enumerate(answers) if name}
    if not failed:
        return [text for _, text in answers]
    if isinstance(failure, EcembError):
        raise failure
    rank, (name, text) = min(failed.items())
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, EcembError)):
        kind, text = CheckpointFailed, f"{name}: {text}"
    ranks = f"ranks {list(failed)}" if len(failed) > 1 else f"rank {rank}"
    raise kind(f"{what} failed on {ranks}: {text}") from failure


def name_of(store: object) -> str:
    """The name of a writer or a reader, the same on all ranks."""
    return str(store) if type(store).__str__ is not object.__str__ else type(store).__name__


def absence_of(reader: CheckpointReader) -> str:
    """For messages, says that a reader finds no checkpoint."""
    if isinstance(reader, CheckpointFolder) and not os.path.lexists(reader.path):
        return f"there is no folder {reader}"
    return f"{name_of(reader)} has no complete one"


def finish(store: CheckpointWriter, job: str, step: int) -> None:
    """Records in one store that the job is closed; rank 0. A failure is logged."""
    try:
        store.finish(job, step)
    except Exception as error:  # noqa: BLE001 - a store's own; an outage must not keep a job open
        logger.warning(
            "%s has no record that job %s is finished: with resume= the job would continue from its newest "
            "checkpoint (%s: %s)",
            name_of(store),
            job,
            type(error).__name__,
            error,
        )


def find(reader: CheckpointReader, transport: Transport, job: str | None) -> Stored | None:
    """The newest complete checkpoint, the same on all ranks; None if there is none. All ranks.

    Args:
        reader: finds it.
        transport: the control group.
        job: the job that continues from it; None if it is another training's, which may be finished.

    Raises:
        JobFinished: the job was closed.
        CheckpointFailed: the ranks see different checkpoints; or as the reader.
    """
    found: list[Stored | None] = [None]
    one_tells(reader, transport.rank)

    def look() -> str:
        if job is not None and (where := reader.finished(job)):
            raise JobFinished(
                f"job {job!r} is finished: guard.close() was called, says {where}. It does not train again; "
                f"give job= another name to continue from its last checkpoint, or remove that file"
            )
        found[0] = reader.newest()
        return "" if found[0] is None else found[0].name

    deadline = time.monotonic() + SIGHT_S
    while True:
        names = shared(transport, f"looking for a checkpoint in {name_of(reader)}", look)
        if len(set(names)) == 1:
            return found[0]
        late = transport.vote(time.monotonic() < deadline, "looking for a checkpoint again")
        if not all(late):
            raise CheckpointFailed(
                f"the ranks don't see the same newest checkpoint in {name_of(reader)}: "
                f"{dict(enumerate(names))}; all hosts must have the same file system there"
            )
        time.sleep(_POLL_S)
