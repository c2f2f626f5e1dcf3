"""Which ways to multiply there are here, and what they read."""

from __future__ import annotations

import galois
import numpy as np
import pytest

from ecemb.kernels import contract, cpu
from ecemb.kernels.cpu import Cpu, Products

FIELD = galois.GF(2**8, irreducible_poly=0x11D)
PRODUCTS = np.asarray(FIELD.elements[:, None] * FIELD.elements[None, :], np.uint8)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (set[str](), ["planes 16"]),
        ({"neon"}, ["shuffle 16", "planes 16"]),
        ({"ssse3"}, ["shuffle 16", "planes 16"]),
        ({"ssse3", "avx2"}, ["shuffle 32", "shuffle 16", "planes 32"]),
        ({"ssse3", "gfni"}, ["shuffle 16", "planes 16"]),  # its wider forms come with AVX
        (
            {"ssse3", "avx2", "gfni"},
            ["affine 32", "shuffle 32", "shuffle 16", "planes 32"],
        ),
        (
            {"ssse3", "avx2", "avx512bw", "gfni"},
            ["affine 64", "affine 32", "shuffle 64", "shuffle 32", "shuffle 16", "planes 64"],
        ),
    ],
)
def test_the_fastest_that_the_processor_can_do_comes_first(
    monkeypatch: pytest.MonkeyPatch, features: set[str], expected: list[str]
) -> None:
    monkeypatch.setattr(cpu, "features", lambda: features)
    assert [f"{way.way} {way.vector_bytes}" for way in cpu.available()] == expected


def test_the_kernels_use_the_fastest() -> None:
    work = contract.get_kernels("cpu")
    assert isinstance(work, Cpu)
    assert work.products == cpu.available()[0]


def test_the_matrices_multiply() -> None:
    """By the definition of GF2P8AFFINEQB: bit i of the result is the parity of x AND byte 7 - i."""
    matrices = Products("affine", 64).constants()
    assert (matrices.shape, matrices.dtype) == ((256, 8), np.dtype(np.uint8))
    parity = np.array([bin(x).count("1") % 2 for x in range(256)], np.uint8)
    x = np.arange(256, dtype=np.uint8)
    for weight in range(256):
        product = sum(parity[x & matrices[weight, 7 - bit]] << bit for bit in range(8))
        assert np.array_equal(product, PRODUCTS[weight])


def test_the_tables_of_halves_add_up() -> None:
    low, high = np.split(Products("shuffle", 32).constants(), 2, axis=1)
    x = np.arange(256)
    assert np.array_equal(low[:, x & 15] ^ high[:, x >> 4], PRODUCTS)
