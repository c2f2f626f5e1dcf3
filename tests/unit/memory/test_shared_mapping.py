"""The mapping: shared, without a descriptor of its own, gone with its last view."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from ecemb.memory.arena import map_shared
from support import holdings

SIZE_BYTES = 3 * 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "mapped-file"
    path.write_bytes(bytes(SIZE_BYTES))
    return path


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_stores_reach_the_file_and_back(path: Path) -> None:
    with path.open("r+b") as file:
        data = map_shared(file.fileno(), SIZE_BYTES)
    assert (data.shape, data.dtype, data.flags.writeable) == ((SIZE_BYTES,), np.uint8, True)
    data[5] = 9
    assert path.read_bytes()[5] == 9
    with path.open("r+b") as file:
        file.write(b"\x07")
    assert data[0] == 7


def test_it_has_no_descriptor(path: Path) -> None:
    with path.open("r+b") as file:
        before = holdings.descriptors()
        data = map_shared(file.fileno(), SIZE_BYTES)
        assert not holdings.descriptors() - before
    assert data.size == SIZE_BYTES


def test_it_lives_as_long_as_any_view(path: Path) -> None:
    with path.open("r+b") as file:
        data = map_shared(file.fileno(), SIZE_BYTES)
    view = data[8:16].view(np.int64)
    del data
    gc.collect()
    assert mapped(path)
    view[0] = 5
    del view
    gc.collect()
    assert not mapped(path)


def test_a_file_that_is_mapped_is_not_mapped_again(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "another-file"
    other.write_bytes(bytes(SIZE_BYTES))
    with path.open("r+b") as file, path.open("r+b") as again, other.open("r+b") as different:
        one = map_shared(file.fileno(), SIZE_BYTES)
        addresses = [
            map_shared(each.fileno(), SIZE_BYTES).__array_interface__["data"][0]
            for each in (again, different)
        ]
    here = one.__array_interface__["data"][0]
    assert addresses[0] == here != addresses[1]
    del one
    gc.collect()
    assert not mapped(path)


def test_the_kernels_refusal_is_an_os_error(path: Path) -> None:
    with path.open("rb") as file, pytest.raises(PermissionError):
        map_shared(file.fileno(), SIZE_BYTES)
    with pytest.raises(OSError, match="Bad file"):
        map_shared(-1, SIZE_BYTES)
