"""Where checkpoints lie: objects by path, each written whole or not at all.

A folder is written by this module itself, so that what is written would survive a power failure; anything
else goes through fsspec, whose object stores put whole objects, and whose clients retry by their own rules.
An object that arrived with another size than was sent is sent again. A half object that a killed writer
leaves has a wrong checksum.

Must not know: what objects are.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, Final

import fsspec
from fsspec.asyn import AsyncFileSystem

from baselines.files import sync
from baselines.pace import Pace

_PARTIAL: Final = ".partial"
_LOCAL: Final = "file://"
_PUTS: Final = 2
"""How often an object is sent whose size is another one in the store."""
_FILE_MODE: Final = 0o644
_FOLDER_MODE: Final = 0o755
"""No user but the writer may change what is there, whatever the umask is: followers refuse it otherwise."""


class Store(ABC):
    """Objects by path; parts of a path are parted by "/". May be used by several threads and processes."""

    @abstractmethod
    def put(self, path: str, data: bytes | memoryview) -> None:
        """Writes an object; on return it would survive a power failure, if the store can promise that."""

    @abstractmethod
    def get(self, path: str) -> bytes:
        """Reads an object.

        Raises:
            FileNotFoundError: it isn't there.
        """

    @abstractmethod
    def paths(self) -> list[str]:
        """Of all objects, and of what killed writers have left of them."""

    @abstractmethod
    def remove(self, paths: Iterable[str]) -> None:
        """Removes objects, in this order; those that are not there count as removed."""


class Folder(Store):
    """A folder of a file system that all ranks see.

    Args:
        path: made by the first write.
    """

    def __init__(self, path: Path) -> None:
        self._root = path

    def put(self, path: str, data: bytes | memoryview) -> None:
        """See `Store.put`."""
        final = self._root / path
        self._make(final.parent)
        partial = final.with_name(f"{final.name}{_PARTIAL}")
        with open(partial, "wb", opener=_closed_to_others) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(final)
        sync(final.parent)

    def get(self, path: str) -> bytes:
        """See `Store.get`."""
        return (self._root / path).read_bytes()

    def paths(self) -> list[str]:
        """See `Store.paths`."""
        found: list[str] = []
        for folder, _, names in os.walk(self._root):
            inside = Path(folder).relative_to(self._root)
            found += [(inside / name).as_posix() for name in names]
        return sorted(found)

    def remove(self, paths: Iterable[str]) -> None:
        """See `Store.remove`. Folders that are empty then go as well."""
        for folder, names in groupby(map(PurePosixPath, paths), key=lambda path: path.parent):
            place = self._root / folder
            for name in names:
                (self._root / name).unlink(missing_ok=True)
            if place.exists():
                sync(place)
            if place != self._root:
                with suppress(OSError):  # it is gone, or not empty
                    place.rmdir()

    def _make(self, folder: Path) -> None:
        for place in (self._root, folder):
            if not place.exists():
                place.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
                sync(place.parent)


def _closed_to_others(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE_MODE)


class Remote(Store):
    """A folder or bucket of any file system of fsspec.

    Args:
        url: as `s3://bucket/folder` or `memory://folder`.
        options: of the file system.

    Raises:
        ValueError: fsspec knows no such protocol.
        ImportError: a package is missing that the protocol needs; fsspec says which.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        try:
            self._files, self._root = fsspec.core.url_to_fs(url, **options)
        except ValueError as error:
            raise ValueError(
                f"{url}: {error}. Give a folder's path, or a URL of fsspec, such as s3://bucket/folder"
            ) from error

    def put(self, path: str, data: bytes | memoryview) -> None:
        """See `Store.put`.

        Raises:
            OSError: the store keeps another number of bytes than it was sent.
        """
        place, content = self._place(path), bytes(data)
        stored = -1
        for _ in range(_PUTS):
            try:
                self._files.pipe_file(place, content)
            except (
                FileNotFoundError
            ):  # no such folder or bucket, or a multipart upload that has ended already
                self._files.makedirs(self._files._parent(place), exist_ok=True)
                self._files.pipe_file(place, content)
            self._files.invalidate_cache()
            stored = self._files.info(place)["size"]
            if stored == len(content):
                return
        raise OSError(
            errno.EIO,
            f"{place} was sent {_PUTS} times with {len(content)} bytes, and has {stored} in the store",
        )

    def get(self, path: str) -> bytes:
        """See `Store.get`."""
        self._files.invalidate_cache()  # what others have put since it listed a folder would not be there
        return self._files.cat_file(self._place(path))

    def paths(self) -> list[str]:
        """See `Store.paths`."""
        self._files.invalidate_cache()
        root = self._files._strip_protocol(self._root).rstrip("/")
        places = self._files.find(self._root) if self._has_own_find() else self._below(self._root)
        return sorted(place[len(root) :].lstrip("/") for place in places)

    def remove(self, paths: Iterable[str]) -> None:
        """See `Store.remove`."""
        for path in paths:
            try:
                self._files.rm_file(self._place(path))
            except FileNotFoundError:
                continue

    def _place(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def _has_own_find(self) -> bool:
        """Whether the file system lists in a way of its own, and not folder by folder as fsspec does."""
        kind = type(self._files)
        if issubclass(kind, AsyncFileSystem):
            return kind._find is not AsyncFileSystem._find
        return kind.find is not fsspec.AbstractFileSystem.find

    def _below(self, folder: str) -> Iterator[str]:
        """All objects below a folder.

        fsspec's own walk leaves out, in silence, a folder that it can't list: no checkpoint would be found.
        """
        try:
            entries = self._files.ls(folder, detail=True)
        except FileNotFoundError:  # it isn't there yet, or was removed meanwhile
            return
        for entry in entries:
            if entry["type"] != "directory":
                yield entry["name"]
            elif entry["name"].rstrip("/") != folder.rstrip("/"):
                yield from self._below(entry["name"])


class PacedReads(Store):
    """A store that is read no faster than a bandwidth allows, on average since this was made.

    Args:
        store: that has the objects.
        bytes_per_s: allowed; None: any.
    """

    def __init__(self, store: Store, bytes_per_s: float | None) -> None:
        self._store, self._pace = store, Pace(bytes_per_s)

    def put(self, path: str, data: bytes | memoryview) -> None:
        """See `Store.put`."""
        self._store.put(path, data)

    def get(self, path: str) -> bytes:
        """See `Store.get`."""
        data = self._store.get(path)
        self._pace.wait(len(data))
        return data

    def paths(self) -> list[str]:
        """See `Store.paths`."""
        return self._store.paths()

    def remove(self, paths: Iterable[str]) -> None:
        """See `Store.remove`."""
        self._store.remove(paths)


def store_at(target: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Store:
    """The store that a path or a URL means.

    Args:
        target: a folder's path, or a URL that fsspec knows; `file://` is a path.
        options: of fsspec's file system, for URLs.

    Raises:
        ValueError, ImportError: see `Remote`.
    """
    text = os.fspath(target)
    if "://" in text and not text.startswith(_LOCAL):
        return Remote(text, options or {})
    return Folder(Path(text.removeprefix(_LOCAL)))
