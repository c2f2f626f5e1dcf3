"""Tensors that outlive the process: their storages are files on tmpfs, trained on in place.

A server that goes on has its state in its memory. torchrun, however, ends and restarts the workers of all
ranks, so here a survivor's state may be that of a process that ended at any instant. It could be saved as it
ends, but SIGKILL leaves no time for that; or copied in each step, for as much memory again. So storages are
moved: what is trained on are files in the machine's memory, at no cost in steps, and without memory beside
the training's own, as with servers (chosen). A process that is cut off within a step leaves rows, and dense
parameters, of which some have taken the step and others haven't: partial recovery, an approximation, bears
it. One that stays (`ecemb.run`) leaves a step only where it waits for others, and so between optimizers.

Tensors on a device can't lie in files. Of tables there are images in the machine's memory, to which the rows
that a step has changed are copied after it (chosen).

Every tensor of the process that lies in such a storage is pointed at the file, TorchRec's and FBGEMM's views
included: the garbage collector knows them all.

Invariant: a file that has its name is filled. Must not know: who survived, what is saved elsewhere.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from baselines.files import made, mapped

_PARTIAL = ".partial"
Spot = tuple[str, str, list[int], list[int], int]
"""Of a tensor: its file, its type, shape, stride, and where it begins, in numbers of its type."""
Places = Mapping[str, Spot]
"""By the tensors' names; what JSON makes of it is as good."""


class LivingTensors:
    """Storages of this rank's tensors, in files of a folder.

    Args:
        folder: on tmpfs, this rank's own; made if missing, for this user alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._held: dict[int, tuple[torch.UntypedStorage, Path]] = {}  # by address
        self._images: dict[str, tuple[Tensor, Tensor]] = {}  # of tensors on a device, and them

    @property
    def paths(self) -> list[Path]:
        """All files."""
        return sorted([*self._folder.glob("*.rows"), *self._folder.glob(f"*{_PARTIAL}")])

    @property
    def image_bytes(self) -> int:
        """Memory that images of tensors on a device take."""
        return sum(image.nbytes for image, _ in self._images.values())

    def move(self, find: Callable[[], Mapping[str, Tensor]], *, survived: bool) -> None:
        """Moves the storages of tensors that haven't moved yet; meanwhile, they are there twice.

        Of tensors on a device images are made, or, if they are to be gone on with, copied there.

        Args:
            find: gives the tensors as the training sees them, by names that are the same in each life, in the
                same order.
            survived: the files hold what is to be gone on with, and the tensors hold nothing of worth; else
                the files are filled from the tensors.

        Raises:
            ValueError: the files are another training's.
            OSError: there is not enough space.
            RuntimeError: a tensor could not be moved.
        """
        left: dict[int, Tensor] = {}
        paths: list[Path] = []
        moved: list[torch.UntypedStorage] = []  # held, so that no other storage takes their addresses
        for name, tensor in find().items():
            if is_on_device(tensor):
                self._image(name, tensor, survived=survived)
                continue
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if not storage.nbytes() or address in self._held or address in left:
                continue
            path = self._path(name)
            if not survived:
                _fill(path, torch.empty(0, dtype=torch.uint8).set_(storage))
            left[address] = _span(path, name, storage.nbytes())
            paths.append(path)
            moved.append(storage)
        if not left:
            return
        _repoint(left)
        for span, path in zip(left.values(), paths, strict=True):
            self._held[span.untyped_storage().data_ptr()] = span.untyped_storage(), path
        for name, tensor in find().items():
            if is_on_device(tensor):
                continue
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in self._held:
                raise RuntimeError(
                    f"{name} could not be moved to memory that outlives the process: call gc.unfreeze() "
                    f"first, if gc.freeze() was called"
                )

    def places(self, tensors: Mapping[str, Tensor]) -> Places:
        """Where tensors lie that have moved.

        Args:
            tensors: by name; on the CPU.
        """
        found: dict[str, Spot] = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                path = self._held[tensor.untyped_storage().data_ptr()][1]
                dtype = str(tensor.dtype).removeprefix("torch.")
                found[name] = (
                    path.name,
                    dtype,
                    list(tensor.shape),
                    list(tensor.stride()),
                    tensor.storage_offset(),
                )
        return found

    def are_there(self, places: Places) -> bool:
        """Whether this machine has the files."""
        return all((self._folder / spot[0]).exists() for spot in places.values())

    def read(self, places: Places) -> dict[str, Tensor]:
        """What an earlier life of this rank has trained, in place, by the names of `places`."""
        files = {
            file: torch.from_numpy(mapped(self._folder / file))
            for file in {spot[0] for spot in places.values()}
        }
        return {
            name: files[file].view(getattr(torch, dtype)).as_strided(shape, stride, offset)
            for name, (file, dtype, shape, stride, offset) in places.items()
        }

    def copy_rows(self, name: str, rows: Tensor) -> None:
        """A step has changed rows of a tensor on a device.

        Args:
            name: as `find` has it.
            rows: int64 [m] on the device, each once. Read.
        """
        if name in self._images:
            image, live = self._images[name]
            image[rows.cpu()] = live.detach().index_select(0, rows).cpu()

    def _image(self, name: str, tensor: Tensor, *, survived: bool) -> None:
        if name in self._images and self._images[name][1].data_ptr() == tensor.data_ptr():
            return
        path, live = self._path(name), tensor.detach()
        if not survived:
            _fill(path, live.cpu().contiguous().reshape(-1).view(torch.uint8))
        image = _span(path, name, live.nbytes).view(live.dtype).reshape(live.shape)
        if survived:
            live.copy_(image)
        self._images[name] = image, live

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.rows"

    def remove(self) -> None:
        """Gives the files' names back; what is trained stays where it is until the process ends."""
        for path in self.paths:
            path.unlink()


def is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor is in the memory of a device."""
    return tensor.device.type != "cpu"


def _fill(path: Path, content: Tensor) -> None:
    """Makes a file of bytes (uint8 [any]), which has its name when it is whole."""
    partial = path.with_suffix(_PARTIAL)
    torch.from_numpy(made(partial, content.numel())).copy_(content)
    partial.rename(path)


def _span(path: Path, name: str, size_bytes: int) -> Tensor:
    """A file in place, uint8 [size_bytes]."""
    there_bytes = path.stat().st_size if path.exists() else 0
    if there_bytes != size_bytes:
        raise ValueError(
            f"{path} holds {there_bytes} bytes, and {name} has {size_bytes}: it is another training's; run "
            f"the script that started it, or name another folder"
        )
    return torch.from_numpy(mapped(path))


def _repoint(places: Mapping[int, Tensor]) -> None:
    """Points all tensors of this process that lie in storages, by address, at what has taken their places."""
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if not issubclass(type(thing), Tensor):
                continue
            try:
                span = places.get(thing.untyped_storage().data_ptr())
            except (RuntimeError, NotImplementedError):  # a tensor without a storage of its own
                continue
            if span is not None:
                values = span.view(thing.dtype)
                thing.data = values.as_strided(thing.size(), thing.stride(), thing.storage_offset())
