"""The kernels in Triton: on tensors, in memory that is registered with CUDA, and compiled without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.questions.gpu import cuda
from ecemb.kernels.reference import product

DEVICE = torch.device("cpu" if cuda.INTERPRETED else "cuda")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator).to(DEVICE)


@pytest.mark.parametrize("width", [0, 1, 15, 16, 17, 127, 129])
@pytest.mark.parametrize("rows", [0, 1, 40, 300])
def test_rows_are_copied_between_tables_and_records(
    generator: torch.Generator, rows: int, width: int
) -> None:
    table, records = draw(generator, 301, width), draw(generator, rows, width + 5)
    ids = torch.randperm(301, generator=generator)[:rows].to(DEVICE)
    expected = records.clone()
    expected[:, 3 : 3 + width] = table[ids]
    cuda.copy_rows_(records[:, 3 : 3 + width], table, of=ids)
    assert torch.equal(records, expected)

    other, part = draw(generator, 301, width), records[:, 2 : 2 + width]
    expected = other.clone()
    expected[ids] = part
    cuda.copy_rows_(other, part, to=ids)
    assert torch.equal(other, expected)

    expected[ids.flip(0)] = table[ids]
    cuda.copy_rows_(other, table, to=ids.flip(0), of=ids)
    assert torch.equal(other, expected)


@pytest.mark.parametrize("width", [0, 1, 17, 127])
def test_rows_are_compared_with_records(generator: torch.Generator, width: int) -> None:
    table, out = draw(generator, 90, width), draw(generator, 70, width + 1)
    old = draw(generator, 70, width + 4)[:, 2 : 2 + width]
    ids = torch.randint(0, 90, (70,), generator=generator).to(DEVICE)
    expected = out.clone()
    expected[:, 1:] = table[ids] ^ old
    cuda.differ_rows_(out[:, 1:], old, table, ids)
    assert torch.equal(out, expected)


def test_rows_may_begin_at_any_word(generator: torch.Generator) -> None:
    words = draw(generator, 50, 2).view(torch.int64).reshape(-1)
    rows = cuda.rows_at_words(words, 3)
    assert rows.shape == (48, 3)
    assert rows[47].tolist() == words[47:].tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_registered_memory_is_reached_in_place_on_cuda(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `Cuda` relies on: torch takes such memory for pinned, and Triton its pointers for the device's."""
    memory = np.random.default_rng(seed).integers(0, 2**63, 3 << 16, np.uint64)
    offsets, dst, src = np.split(memory, 3)  # the later ones begin somewhere in it
    places = offsets[:30].view(np.int64)
    places[:] = np.arange(5, 5 + 30 * 100, 100)
    rows = src[: 30 * 65].reshape(30, 65)
    expected = memory.copy()
    for place, row in zip(places, rows, strict=True):
        expected[(1 << 16) + place :][:65] ^= product(142, row)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("it was to be reached in place")

    cudart: Any = torch.cuda.cudart()
    assert cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0) == cudart.cudaError.success
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "cuda", copied)
            cuda.Cuda().mul_add_rows_(dst, places, rows, 142)
        assert np.array_equal(memory, expected)
    finally:
        assert cudart.cudaHostUnregister(memory.ctypes.data) == cudart.cudaError.success
    assert not torch.from_numpy(memory.view(np.int64)).is_pinned()


COMPILES = """
from itertools import product
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bench.questions.gpu import triton_loops as loops

def compiled(loop, constants, **kinds):
    names = [parameter.name for parameter in loop.params]
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    made = triton.compile(ASTSource(loop, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"]

blocks = dict(block_rows=16, block_columns=128)
for kind, of, to in product(("*i8", "*i16", "*i32", "*i64"), (False, True), (False, True)):
    rows = dict(source_rows="*i64" if of else kind, target_rows="*i64" if to else kind)
    compiled(loops.copy, dict(blocks, by_source=of, by_target=to), source=kind, target=kind, **rows)
for kind in ("*i8", "*i16", "*i32", "*i64"):
    compiled(loops.differ, blocks, table=kind, ids="*i64", old=kind, out=kind)
for atomic in (False, True):
    compiled(loops.add_rows, dict(blocks, atomic=atomic), dst="*i32", offsets="*i64", src="*i32")
compiled(loops.add, dict(block=2048), dst="*i32", src="*i32")
"""


def test_loops_compile_for_a_gpu_without_one(tmp_path: Path) -> None:
    """For the H200; the interpreter is not so strict about types."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
