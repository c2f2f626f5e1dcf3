"""A folder of checkpoints that plain torch.distributed.checkpoint reads.

    {path}/step-000000001234/.metadata           DCP's index, a pickle, for readers without ecemb
                             __0_0.distcp        the pieces of rank 0, as DCP writes them
                             ecemb-index.json    the rows in these files, and checksums of them
                             ecemb.json          facts: step, job, world size, tables; size and checksum of
                                                 every other file, and its own
    {path}/finished-{job}                        the job was closed

Owns these names, and the way a checkpoint appears: it is written in a hidden folder next to its place,
synced, and at last renamed. So a folder with a checkpoint's name is complete, and a hidden folder is a
leftover of a killed save: the next save removes it.

Invariant: no byte of a checkpoint is used before its checksum was verified. A checkpoint that an older ecemb
wrote has no checksums: it is read all the same, and a line in the log says so.

Invariant: a file or folder is used only if no user but this one (or root) can have written it. The levels
above are opened and checked by `private_files.descend`; the folder, a checkpoint's folder and each file are
opened from the level above without following links, and the checked owner and mode are those of the
descriptor that is read or written, on every rank. So to replace a folder in between has no effect.

torch.distributed.checkpoint takes a second to import: `dcp` is imported by the first save, so that no restart
pays for it. Must not know: arenas, the network, DCP's own types.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import (
    CheckpointFailed,
    CheckpointInsecure,
    CheckpointMismatch,
    ConfigurationError,
    EcembError,
)
from ..memory import private_files
from . import index
from .index import Index, damaged
from .interface import CheckpointReader, Piece, Stored, is_stored

logger: logging.Logger = logging.getLogger("ecemb")

FACTS = "ecemb.json"
INDEX = "ecemb-index.json"
_INDEX_OF_DCP = ".metadata"
_MANIFEST = re.compile(r"\d{12}-.+\.manifest")  # of Check-N-Run
_NAME = re.compile(r"step-(\d{12,})")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_HIDDEN = re.compile(r"\.step-\d{12,}\.[0-9a-f]{16}")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FOLDER_MODE = 0o777 & ~_OTHERS_WRITE  # others can't write there, even with a umask of 0
SIGHT_S = 5.0  # time until other hosts see a new folder on a network file system
_POLL_S = 0.1


class CheckpointFolder:
    """The checkpoints of a job in one folder: a `CheckpointWriter` and a `CheckpointReader`.

    Args:
        path: the folder; made by the first save. All ranks must see the same folder.

    Raises:
        ConfigurationError: the path is relative, and this process has no working directory any more; or it
            is empty, a URL, or begins with "~", and would name another folder than what it looks like.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = _absolute(path)
        self.tells: bool = True
        """Whether this process does the work that only one reader of the folder has to do: it logs, checks
        the sizes of files that it doesn't read, and verifies torch's index."""
        self._read_last: tuple[str, object, Index] | None = None

    def __str__(self) -> str:
        return str(self.path)

    def prepare(self, step: int, facts: Mapping[str, Any]) -> str:
        """See `CheckpointWriter`.

        Raises:
            CheckpointMismatch: the folder holds another training's checkpoints, later steps, or other files.
            CheckpointInsecure: another user can write to the folder.
            CheckpointFailed: the folder can't be made or written to.
        """
        with _explained(self.path, "written"), self._opened(create=True) as top:
            if is_stored(self.path, self._newest(top), step, facts):
                return ""
            # only after the check: in another job's folder, hidden folders are that job's
            for name in filter(_HIDDEN.fullmatch, os.listdir(top)):
                _remove(top, name)
            token = _hidden(_name(step))
            os.mkdir(token, _FOLDER_MODE, dir_fd=top)
        return token

    def write(self, token: str, rank: int, world_size: int, pieces: Sequence[Piece]) -> str:
        """See `CheckpointWriter`."""
        from . import dcp

        folder = self.path / token
        with _explained(folder, "written"):
            self._await_sight(token)
        with _explained(folder, "written"), self._opened() as top, _level(top, folder) as fd:
            receipt = dcp.write(fd, folder, rank, world_size, pieces)
            os.fsync(fd)
        return receipt

    def commit(self, token: str, facts: Mapping[str, Any], receipts: Sequence[str]) -> None:
        """See `CheckpointWriter`."""
        from . import dcp

        folder = self.path / token
        with _explained(folder, "written"), self._opened() as top, _level(top, folder) as fd:
            files = dcp.sums_of(receipts) | dcp.write_index(fd, folder, receipts)
            files[INDEX] = _write_text(fd, INDEX, index.text_of(dcp.index_of(receipts)))
            save = token.rpartition(".")[2]  # differs if the same step is saved again
            _write_text(fd, FACTS, index.signed({**facts, "save": save, "files": files}))
            os.fsync(fd)
            name = _name(facts["step"])
            os.rename(token, name, src_dir_fd=top, dst_dir_fd=top)  # makes it visible
            os.fsync(top)

    def discard(self, token: str) -> None:
        """See `CheckpointWriter`."""
        with self._opened() as top:
            _remove(top, token)

    def retain(self, keep: int) -> None:
        """See `CheckpointWriter`. A folder that can't be removed is logged."""
        with self._opened() as top:
            for name in _complete(top)[: -max(keep, 1)]:
                hidden = _hidden(name)
                try:  # a partial checkpoint must not have a checkpoint's name
                    os.rename(name, hidden, src_dir_fd=top, dst_dir_fd=top)
                    _remove(top, hidden)
                except OSError as error:
                    logger.warning("the old checkpoint %s can't be removed: %s", self.path / name, error)

    def finish(self, job: str, step: int) -> None:
        """See `CheckpointWriter`. Does nothing if no save has made the folder.

        Raises:
            CheckpointFailed: the folder can't be written to.
            CheckpointInsecure: another user can write to it.
        """
        hidden = _hidden(_name(step))
        with _explained(self.path, "written"), contextlib.suppress(FileNotFoundError), self._opened() as top:
            _write_text(top, hidden, json.dumps({"job": job, "step": step}))
            os.rename(hidden, _finished(job), src_dir_fd=top, dst_dir_fd=top)
            os.fsync(top)

    def finished(self, job: str) -> str | None:
        """See `CheckpointReader`."""
        with _explained(self.path, "read"), contextlib.suppress(FileNotFoundError), self._opened() as top:
            os.stat(_finished(job), dir_fd=top, follow_symlinks=False)
            return str(self.path / _finished(job))
        return None

    def newest(self) -> Stored | None:
        """See `CheckpointReader`.

        Raises:
            CheckpointInsecure: another user could have written it.
            CheckpointFailed: its facts can't be read, or are not as they were written.
            CheckpointMismatch: the folder is itself a checkpoint, or holds those of another store.
        """
        with _explained(self.path, "read"), contextlib.ExitStack() as opened:
            try:
                top = opened.enter_context(self._opened())
            except FileNotFoundError:
                return None
            return self._newest(top)

    def _newest(self, top: int) -> Stored | None:
        names = _complete(top)
        if not names:
            self._check_no_others(top)
            return None
        folder = self.path / names[-1]
        with _level(top, folder) as fd, _missing_named(folder):
            content = _content(fd, folder / FACTS)
        try:
            facts = index.facts_in(content)
            step = int(facts["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(folder, f"{FACTS}: {error}") from None
        if names[-1] != _name(step):
            raise damaged(folder, f"{FACTS} is that of step {step}")
        return Stored(names[-1], step, facts)

    def read(self, stored: Stored, pieces: Sequence[Piece]) -> None:
        """See `CheckpointReader`.

        Raises:
            CheckpointFailed: a file is missing, or is not as it was written.
            CheckpointInsecure: another user could have written it.
        """
        folder = self.path / stored.name
        with (
            _explained(folder, "read"),
            _missing_named(folder),
            self._opened() as top,
            _level(top, folder) as fd,
        ):
            found = self._index(stored, folder, fd)
            files = stored.facts.get("files")
            index.read(folder, found, pieces, lambda name: _open_sized(fd, folder / name, files))

    def _index(self, stored: Stored, folder: Path, fd: int) -> Index:
        """The index of a checkpoint. If `tells` is set, checks all files' sizes as well."""
        last, save = self._read_last, stored.facts.get("save")
        if last is not None and last[:2] == (stored.name, save):
            return last[2]
        files = stored.facts.get("files")
        try:
            if files is None:
                found = self._older_index(folder, fd)
            else:
                if self.tells:
                    _check_all(folder, fd, files)
                found = _checked_index(folder, fd, files)
        except (EcembError, OSError):
            raise
        except Exception as error:  # on damaged bytes, json and pickle raise errors of any class
            raise damaged(folder, f"its index: {type(error).__name__}: {error}") from error
        self._read_last = (stored.name, save, found)
        return found

    def _older_index(self, folder: Path, fd: int) -> Index:
        from . import dcp

        logger.log(
            logging.WARNING if self.tells else logging.DEBUG,
            "%s has no checksums, for an older ecemb wrote it: whether its bits are those that were saved "
            "can't be verified; what guard.save() writes from now on has checksums",
            folder,
        )
        return dcp.older_index(_content(fd, folder / _INDEX_OF_DCP))

    def _check_no_others(self, top: int) -> None:
        """Raises CheckpointMismatch for checkpoints of another kind: training must not begin at step 0."""
        inside = sorted(os.listdir(top))
        if FACTS in inside or _INDEX_OF_DCP in inside:
            raise CheckpointMismatch(
                f"{self.path} is itself a checkpoint, not a folder of checkpoints: pass the folder above "
                f"it, {self.path.parent}"
            )
        if manifests := [name for name in inside if _MANIFEST.fullmatch(name)]:
            raise CheckpointMismatch(
                f"{self.path} holds {manifests[-1]}, another store's checkpoints: pass the object that has "
                f"written them (such as baselines.check_n_run.durable.DurableTier), or another folder"
            )

    @contextmanager
    def _opened(self, *, create: bool = False) -> Generator[int]:
        """A descriptor of the folder, which only this user and root can change or replace."""
        above = private_files.descend(self.path.parent, self._insecure, create=create)
        try:
            if create:
                private_files.make_level(above, self.path.name)
            with _level(above, self.path) as fd:
                yield fd
        finally:
            os.close(above)

    def _insecure(self, why: str) -> CheckpointInsecure:
        return CheckpointInsecure(
            f"{why}: it is above {self.path}, and other checkpoints could take the place of yours. Pass a "
            f"folder whose levels above all belong to you or root, and can't be written by other users"
        )

    def _await_sight(self, token: str) -> None:
        """Waits until this rank sees the folder that rank 0 has made."""
        folder = self.path / token
        deadline = time.monotonic() + SIGHT_S
        while True:
            with contextlib.suppress(FileNotFoundError), self._opened() as top, _level(top, folder):
                return
            if time.monotonic() > deadline:
                raise CheckpointFailed(
                    f"rank 0 made {folder}, and it is not there on this rank: a checkpoint needs a folder "
                    f"that all ranks share; pass one on a file system that all hosts have mounted"
                )
            time.sleep(_POLL_S)


def _absolute(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if not text or "\0" in text:
        raise ConfigurationError(f"{text!r} is no path of a folder for checkpoints: pass one")
    if _URL.match(text):
        raise ConfigurationError(
            f"{text!r} is a URL, and checkpoints go to a folder that all ranks see: pass its path, or an "
            f"object that writes and reads another store"
        )
    if text.startswith("~"):
        raise ConfigurationError(
            f"{text!r} begins with ~, which only a shell replaces by the home folder: pass "
            f"os.path.expanduser({text!r}), or ./{text} for a folder of this name"
        )
    try:
        return Path(os.path.abspath(text))
    except OSError as error:
        raise ConfigurationError(
            f"{text!r} is a relative path, and this process has no working directory that it "
            f"could begin at ({error.strerror}): pass an absolute path"
        ) from None


def reader_of(source: str | os.PathLike[str] | CheckpointReader, argument: str) -> CheckpointReader:
    """The reader for an argument that takes a folder or a reader.

    Raises:
        ConfigurationError: the argument is neither a path nor a reader; or as `CheckpointFolder`.
    """
    reader = CheckpointFolder(source) if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(reader, CheckpointReader):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"{argument} takes a path or a CheckpointReader; it got {source!r}")
    return reader


def one_tells(reader: CheckpointReader, rank: int) -> None:
    """Sets `CheckpointFolder.tells` on rank 0, and clears it on the other ranks that read a folder."""
    if isinstance(reader, CheckpointFolder):
        reader.tells = rank == 0


def _name(step: int) -> str:
    return f"step-{step:012d}"


def _hidden(name: str) -> str:
    return f".{name}.{secrets.token_hex(8)}"


def _finished(job: str) -> str:
    return f"finished-{job}"


def _complete(top: int) -> list[str]:
    """Names of the complete checkpoints, by step."""
    names = [name for name in os.listdir(top) if _NAME.fullmatch(name)]
    return sorted(names, key=lambda name: int(name.removeprefix("step-")))


@contextmanager
def _explained(path: Path, what: str) -> Generator[None]:
    """Turns an error of the file system into one that names the path and the way out."""
    try:
        yield
    except EcembError:
        raise
    except (OSError, RuntimeError) as error:  # torch.save hides a full disk behind a RuntimeError
        reason = error.strerror if isinstance(error, OSError) else None
        way_out = "make room on the file system or mend its permissions, or pass another folder"
        if what == "read":
            way_out = "mend the file system, or its permissions"
        raise CheckpointFailed(
            f"{path} can't be {what}: {reason or error}. Checkpoints that were complete are untouched; "
            f"{way_out}"
        ) from error


@contextmanager
def _missing_named(folder: Path) -> Generator[None]:
    """Turns a missing file into an error that names it, unless the whole checkpoint is gone."""
    try:
        yield
    except FileNotFoundError as error:
        if not folder.is_dir():  # removed meanwhile
            raise
        raise damaged(folder, f"{os.path.basename(error.filename or 'a file')} is missing") from None


_Files = Mapping[str, Sequence[int]]
"""Number of bytes and checksum of files, by name."""


def _check_all(folder: Path, fd: int, files: _Files) -> None:
    """Raises CheckpointFailed if a file is missing or has another size, or torch's index is another."""
    for name in sorted(files.keys() - {INDEX, _INDEX_OF_DCP}):
        os.close(_open_sized(fd, folder / name, files))
    _checked_content(folder, fd, _INDEX_OF_DCP, files)


def _checked_index(folder: Path, fd: int, files: _Files) -> Index:
    """The index of a checkpoint with checksums. The files of rows are verified as they are read."""
    found = index.index_of(_checked_content(folder, fd, INDEX, files))
    if strangers := {one.file for tensor in found.values() for one in tensor.chunks} - files.keys():
        raise damaged(folder, f"{INDEX} names {sorted(strangers)}, which {FACTS} doesn't")
    return found


def _checked_content(folder: Path, fd: int, name: str, files: _Files) -> bytes:
    with open(_open_sized(fd, folder / name, files), "rb") as file:
        content = file.read()
    (size, written), found = files[name], zlib.crc32(content)
    if found != written:
        raise damaged(
            folder, f"{name}: its {size} bytes have the checksum (crc32) {found}, and {written} was written"
        )
    return content


def _open_sized(fd: int, path: Path, files: _Files | None) -> int:
    """A descriptor of a file.

    Raises:
        CheckpointFailed: the file's size is not that in `files`.
        CheckpointInsecure, FileNotFoundError: see `_open`.
    """
    file = _open(fd, path, folder=False)
    try:
        size = os.fstat(file).st_size
        if files is not None and size != (written := files[path.name][0]):
            raise damaged(path.parent, f"{path.name}: it has {size} bytes, and {written} were written")
    except BaseException:
        os.close(file)
        raise
    return file


@contextmanager
def _level(above: int, path: Path) -> Generator[int]:
    """Opens the folder `path` by `_open`, and closes its descriptor after the block."""
    fd = _open(above, path, folder=True)
    try:
        yield fd
    finally:
        os.close(fd)


def _content(fd: int, path: Path) -> bytes:
    with open(_open(fd, path, folder=False), "rb") as file:
        return file.read()


def _open(above: int, path: Path, *, folder: bool) -> int:
    """A descriptor of the folder or file `path`, opened from that of the level above.

    Raises:
        CheckpointInsecure: another user could change it.
        FileNotFoundError: it is missing.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | (os.O_DIRECTORY if folder else os.O_NONBLOCK)
    try:
        fd = os.open(path.name, flags, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _no_plain(path, folder=folder) from None
        raise type(error)(error.errno, error.strerror, str(path)) from None
    try:
        _check_ours(os.fstat(fd), path, folder=folder)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _no_plain(path: Path, *, folder: bool) -> CheckpointInsecure:
    kind = "folder" if folder else "file"
    return CheckpointInsecure(
        f"{path} is a symbolic link, or no plain {kind}: a checkpoint is read only from a place where no "
        f"other user can have put it; pass the folder itself"
    )


def _check_ours(status: os.stat_result, path: Path, *, folder: bool) -> None:
    """Raises CheckpointInsecure if a user other than this one, or root, can have written `path`."""
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(status.st_mode):
        raise _no_plain(path, folder=folder)
    if status.st_uid not in (os.geteuid(), 0):
        raise CheckpointInsecure(
            f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}: a training would go "
            f"on from what its owner put into it. If you trust it, copy it"
        )
    if status.st_mode & _OTHERS_WRITE:
        raise CheckpointInsecure(
            f"{path} has mode {status.st_mode & 0o7777:04o}, so that others can write to it: a training "
            f"would go on from what they put into it. If you trust what is there, `chmod -R go-w {path}`"
        )


def _write_text(fd: int, name: str, text: str) -> tuple[int, int]:
    """Writes and syncs a new file; returns the number of its bytes and their checksum."""
    content = text.encode()
    with open(index.new_file(fd, name), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return len(content), zlib.crc32(content)


def _remove(above: int, name: str) -> None:
    """Removes a file, or a folder and all that is in it, from the folder of a descriptor."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        os.unlink(name, dir_fd=above)
        return
    try:
        for entry in os.listdir(fd):
            _remove(fd, entry)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=above)
