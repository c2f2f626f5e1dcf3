"""Check-N-Run's checkpoints as an `ecemb.checkpoint.Follower` reads them: chains, and rows by checkpoint.

    follower = ecemb.checkpoint.Follower(Increments("s3://bucket/job"))

Of what `CheckNRun` has written, and of what `guard.save` has through a `DurableTier`; exact and quantized. It
only reads, and a writer's retention may remove what is being read: that is `CheckpointFailed`, and the
follower looks for the newest chain.

A folder's files are read only if they belong to this user, to root or to `owner`, and no other can write
them. There is no pickle in them, so what another user has put there could not be run, but it would be served.

Must not know: snapshots, who reads rows.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ecemb.checkpoint import Chain, Link, StoredTable
from ecemb.errors import CheckpointFailed, CheckpointInsecure, CheckpointMismatch, EcembError

from .manifest import Manifest, OtherFormat, newest, number_of
from .restoring import AnotherTraining, Damaged, Shard, last_chain, rest, rows
from .store import Folder, Store, store_at

FINISHED: Final = "finished-"
"""Begins the names of the objects that say that a job is closed."""
_LOOKS: Final = 5
"""How often a chain is looked for while the writer replaces the newest one."""
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class Increments:
    """Check-N-Run's checkpoints in one place: an `ecemb.checkpoint.IncrementReader`.

    Args:
        target: a folder, or any URL that fsspec knows.
        options: of fsspec's file system.
        owner: number of the user who writes a folder, where that is another one than reads it.

    Raises:
        ValueError: fsspec knows no such protocol.
        ImportError: a package is missing that the protocol needs.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        options: Mapping[str, Any] | None = None,
        owner: int | None = None,
    ) -> None:
        self._place = os.fspath(target) if "://" in os.fspath(target) else os.path.abspath(target)
        store = store_at(self._place, options)
        self._store = (
            OwnFolder(Path(self._place.removeprefix("file://")), owner) if _is_local(store) else store
        )
        self._manifests: dict[str, Manifest] = {}

    def __str__(self) -> str:
        return self._place

    def chain(self) -> Chain | None:
        """See `ecemb.checkpoint.IncrementReader`."""
        with self._named():
            found = self._newest()
        if not found:
            return None
        self._manifests = {one.name: one for one in found}
        last = found[-1].facts
        return Chain(
            tuple(_link(one) for one in found),
            last.step,
            str(last.about.get("lineage", "")),
            str(last.about.get("job", "")),
            {key: _table(table) for key, table in last.tables.items()},
        )

    @torch.no_grad()
    def apply_(self, link: Link, tables: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor | None]:
        """See `ecemb.checkpoint.IncrementReader`."""
        manifest = self._manifests[link.name]
        is_full = not manifest.facts.needs
        shards: list[Shard] = []
        for key, columns in tables.items():
            there = manifest.facts.tables[key]["tensors"]
            whole_rows = manifest.facts.tables[key]["rows"]
            if is_full:
                self._check_complete(manifest, key, whole_rows)
                for name in columns.keys() - there.keys():
                    columns[name].zero_()  # an optimizer has made it later
            stored = {name: tensor for name, tensor in columns.items() if name in there}
            shards.append(Shard(key, 0, whole_rows, whole_rows, stored))
        taken: dict[str, list[Tensor]] = {key: [] for key in tables}
        with self._named():
            rows(self._store, [manifest], shards, lambda shard, numbers: taken[shard.table].append(numbers))
        nothing = torch.empty(0, dtype=torch.int64)
        return {key: None if is_full else torch.cat([nothing, *parts]) for key, parts in taken.items()}

    @torch.no_grad()
    def dense_(self, tensors: Mapping[str, Tensor]) -> None:
        """See `ecemb.checkpoint.IncrementReader`."""
        last = list(self._manifests.values())[-1]
        with self._named():
            found = rest(self._store, last, range(last.facts.world_size))
        for name, tensor in tensors.items():
            stored = found.get(name)
            if stored is None or (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
                there = "none" if stored is None else f"{stored.dtype} of shape {tuple(stored.shape)}"
                raise CheckpointMismatch(
                    f"a follower asks {last.name} in {self} for a dense tensor {name!r}, {tensor.dtype} of "
                    f"shape {tuple(tensor.shape)}; there is {there}: follow the folder of the right model, "
                    "or pass other tensors as dense="
                )
            tensor.copy_(stored)

    def _check_complete(self, manifest: Manifest, table: str, rows: int) -> None:
        """Raises CheckpointFailed unless a full checkpoint names as many rows of a table as the table has."""
        found = sum(chunk.rows for chunk in manifest.chunks if chunk.is_rows and chunk.table == table)
        if found != rows:
            raise CheckpointFailed(
                f"{manifest.name} in {self} has {found} of the {rows} rows of table {table!r}, and it is a "
                "full checkpoint: another program has written it; move its manifest away"
            )

    def _newest(self) -> list[Manifest]:
        """The newest chain; nothing if there is none.

        A writer may remove a chain between the look at its newest manifest and the look at what it stands on:
        if the manifests have changed meanwhile, that was it, and there is a newer one.
        """
        for look in range(_LOOKS):
            paths = self._store.paths()
            failure: Damaged | None = None
            try:
                if found := last_chain(self._store):
                    return found
            except Damaged as error:
                failure = error
            if look < _LOOKS - 1 and newest(self._store.paths()) != newest(paths):
                continue
            if failure is not None:
                raise failure
            if others := [one for one in paths if number_of(one) is None and not one.startswith(FINISHED)]:
                raise CheckpointMismatch(
                    f"{self} holds {others[0]!r}, and no checkpoint of Check-N-Run: follow what "
                    "guard.save(path) has written with ecemb.checkpoint.Follower(path)"
                )
            break
        return []

    @contextmanager
    def _named(self) -> Generator[None]:
        """Turns what these modules, and clients of object storage, raise into ecemb's errors."""
        try:
            yield
        except EcembError:
            raise
        except (OtherFormat, AnotherTraining) as error:
            raise CheckpointMismatch(f"{self}: {error}") from error
        except Damaged as error:
            raise CheckpointFailed(f"{self}: {error}") from error
        except Exception as error:  # of any class
            raise CheckpointFailed(
                f"{self} can't be read: {type(error).__name__}: {error}. The next look tries again"
            ) from error


class OwnFolder(Store):
    """A folder that is only read, and only where no other user can have written.

    Args:
        path: of the folder; need not be there.
        owner: another user whose files are read.
    """

    def __init__(self, path: Path, owner: int | None) -> None:
        self._root, self._folder = path, Folder(path)
        self._owners = {os.geteuid(), 0, *(() if owner is None else (owner,))}

    def put(self, path: str, data: bytes | memoryview) -> None:
        """Not for followers.

        Raises:
            PermissionError: always.
        """
        raise PermissionError(f"{self._root / path} is only read here")

    def remove(self, paths: Iterable[str]) -> None:
        """Not for followers.

        Raises:
            PermissionError: always.
        """
        raise PermissionError(f"{self._root} is only read here")

    def get(self, path: str) -> bytes:
        """See `Store.get`.

        Raises:
            CheckpointInsecure: another user can have written it.
        """
        parents = [self._root.joinpath(*Path(path).parts[:depth]) for depth in range(len(Path(path).parts))]
        for folder in parents:
            self._check(folder, stat.S_ISDIR)
        self._check(self._root / path, stat.S_ISREG)
        return self._folder.get(path)

    def paths(self) -> list[str]:
        """See `Store.paths`.

        Raises:
            CheckpointInsecure: another user can write to the folder.
        """
        if self._root.exists():
            self._check(self._root, stat.S_ISDIR)
        return self._folder.paths()

    def _check(self, path: Path, is_kind: Any) -> None:
        status = os.lstat(path)
        if not is_kind(status.st_mode):
            raise CheckpointInsecure(
                f"{path} is a symbolic link, or neither a plain file nor a folder: another user can have put "
                "it there; follow the folder itself"
            )
        if status.st_uid not in self._owners:
            raise CheckpointInsecure(
                f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}: rows that another "
                f"user has put there would be served. If you trust that user, pass owner={status.st_uid}"
            )
        if status.st_mode & _OTHERS_WRITE:
            raise CheckpointInsecure(
                f"{path} has mode {status.st_mode & 0o7777:04o}, so that others can write to it: rows that "
                f"they put there would be served. If you trust what is there, `chmod -R go-w {self._root}`"
            )


def _is_local(store: Store) -> bool:
    return isinstance(store, Folder)


def _link(manifest: Manifest) -> Link:
    with_rows = {chunk.table for chunk in manifest.chunks if chunk.is_rows}
    return Link(manifest.name, frozenset(with_rows if manifest.facts.needs else manifest.facts.tables))


def _table(described: Mapping[str, Any]) -> StoredTable:
    columns = {name: (str(dtype), tuple(shape)) for name, (dtype, shape) in described["tensors"].items()}
    return StoredTable(described["rows"], columns)
