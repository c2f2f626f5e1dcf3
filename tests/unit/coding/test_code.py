"""The code against three witnesses: the laws of a field, galois' algebra, and zfec's bytes."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import galois
import numpy as np
import pytest
import zfec
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ecemb.coding.code import MAX_BLOCKS, Code, multiply
from ecemb.errors import CodeError, ConfigurationError
from ecemb.kernels import contract

FIELD = galois.GF(2**8)
SMALL = [Code(n, k) for n in range(2, 9) for k in range(1, n)]
LARGE = [Code(*nk) for nk in ((14, 10), (20, 17), (64, 60), (255, 253), (256, 2), (256, 250))]
BLOCK_WORDS = 3

Bytes = NDArray[np.uint8]


@functools.cache
def generator(code: Code) -> Bytes:
    return code.generator()


@functools.cache
def products() -> Bytes:
    """All 256 x 256 products, by our tables."""
    elements = np.arange(256, dtype=np.uint8)
    return multiply(elements[:, None], elements[None, :])


def stripe(code: Code, rng: random.Random) -> Bytes:
    """A random stripe, uint8 [n, bytes], encoded by table look-up and not by a kernel."""
    data = np.frombuffer(rng.randbytes(code.k * BLOCK_WORDS * 8), np.uint8).reshape(code.k, -1)
    return combined(generator(code), data)


def combined(weights: Bytes, blocks: Bytes) -> Bytes:
    """Weights [p, k] times blocks [k, bytes] over GF(2^8)."""
    return np.bitwise_xor.reduce(products()[weights[:, :, None], blocks[None, :, :]], axis=1)


def losses(code: Code) -> list[tuple[int, ...]]:
    """Every set of up to r blocks that may be lost."""
    return [lost for count in range(code.r + 1) for lost in itertools.combinations(range(code.n), count)]


def choice(code: Code, lost: Sequence[int], rng: random.Random) -> list[int]:
    """Any k blocks that are not lost, in any order."""
    return rng.sample([block for block in range(code.n) if block not in lost], code.k)


# The field.


def test_products_are_those_of_galois() -> None:
    elements = FIELD.elements
    assert FIELD.irreducible_poly == galois.Poly.Int(0x11D)
    assert products().tobytes() == np.asarray(elements[:, None] * elements[None, :]).tobytes()


def test_multiplication_is_associative_commutative_and_distributive() -> None:
    table = products()
    elements = np.arange(256, dtype=np.uint8)
    assert np.array_equal(table, table.T)
    for c in range(256):
        assert np.array_equal(table[table, c], table[:, table[:, c]]), "(a b) c = a (b c)"
        left = table[elements[:, None] ^ elements[None, :], c]
        assert np.array_equal(left, table[:, c, None] ^ table[None, :, c]), "(a + b) c = a c + b c"


def test_one_is_neutral_zero_absorbs_and_each_other_element_has_one_inverse() -> None:
    table = products()
    assert np.array_equal(table[1], np.arange(256))
    assert not table[0].any()
    assert np.array_equal((table[1:] == 1).sum(axis=1), np.ones(255))


# The code's parameters.


@pytest.mark.parametrize("code", [*SMALL, *LARGE], ids=str)
def test_r_is_what_may_be_lost(code: Code) -> None:
    assert code.r == code.n - code.k >= 1


def test_the_largest_codes_exist() -> None:
    assert Code(MAX_BLOCKS, MAX_BLOCKS - 1).r == 1
    assert Code(MAX_BLOCKS, 1).r == MAX_BLOCKS - 1


@pytest.mark.parametrize(
    ("n", "k", "message"),
    [
        (3, 3, r"n = 3 .* more than k = 3 .*Code\(n=4, k=3\)"),
        (2, 4, r"n = 2 .* more than k = 4"),
        (4, 0, r"k = 0 data blocks.*at least 1"),
        (4, -1, r"k = -1"),
        (257, 3, r"at most 256 blocks"),
        (4.0, 3, r"n is a number of blocks .* not float"),
        (4, "3", r"k is a number of blocks .* not str"),
        (4, True, r"k is a number of blocks .* not bool"),
        (None, 3, r"n is a number of blocks .* not NoneType"),
    ],
)
def test_there_is_no_such_code(n: Any, k: Any, message: str) -> None:
    with pytest.raises(CodeError, match=message) as caught:
        Code(n, k)
    assert isinstance(caught.value, ConfigurationError)


def test_a_code_is_a_value() -> None:
    assert Code(4, 3) == Code(n=4, k=3)
    assert hash(Code(4, 3)) == hash(Code(4, 3))
    with pytest.raises(AttributeError):
        Code(4, 3).n = 5  # pyright: ignore[reportAttributeAccessIssue]


# The generator.


@pytest.mark.parametrize("code", [*SMALL, *LARGE], ids=str)
def test_the_generator_is_systematic(code: Code) -> None:
    matrix = generator(code)
    assert matrix.dtype == np.uint8
    assert matrix.shape == (code.n, code.k)
    assert type(matrix) is np.ndarray
    assert matrix.flags.c_contiguous
    assert np.array_equal(matrix[: code.k], np.eye(code.k))
    assert matrix[code.k :].all(), "each parity block depends on each data block"


@pytest.mark.parametrize("code", [Code(2, 1), Code(4, 3), Code(9, 8), Code(256, 255)], ids=str)
def test_one_parity_block_is_plain_xor(code: Code) -> None:
    assert np.array_equal(generator(code)[code.k :], np.ones((1, code.k)))


@pytest.mark.parametrize("code", [Code(2, 1), Code(3, 1), Code(256, 1)], ids=str)
def test_one_data_block_is_copied(code: Code) -> None:
    assert np.array_equal(generator(code), np.ones((code.n, 1)))


@pytest.mark.parametrize(
    "code",
    [
        *(Code(n, k) for n in range(3, 17) for k in range(1, n - 1)),
        *(Code(*nk) for nk in ((3, 1), (64, 60), (255, 253), (256, 2), (256, 250))),
    ],
    ids=str,
)
def test_the_generator_is_zfecs(code: Code) -> None:
    unit_blocks = [bytes(row) for row in np.eye(code.k, dtype=np.uint8)]
    encoded = zfec.Encoder(code.k, code.n).encode(unit_blocks)
    # Byte j of each block is a stripe of its own, whose only nonzero data byte is a 1 in block j.
    assert generator(code).tobytes() == b"".join(map(bytes, encoded))


# Decoding.


@pytest.mark.parametrize("code", SMALL, ids=str)
def test_every_loss_of_up_to_r_blocks_decodes(code: Code, seed: int) -> None:
    rng = random.Random(seed)
    reference = contract.get_kernels("reference")
    blocks = stripe(code, rng)
    words = [block.view(np.uint64) for block in blocks]
    for lost in losses(code):
        available = choice(code, lost, rng)
        weights = code.decode_weights(lost, available, generator(code))
        assert weights.dtype == np.uint8
        assert weights.shape == (len(lost), code.k)
        rebuilt = [np.empty(BLOCK_WORDS, np.uint64) for _ in lost]
        reference.dot([words[j] for j in available], weights, rebuilt)
        for block, again in zip(lost, rebuilt, strict=True):
            assert again.tobytes() == blocks[block].tobytes(), (lost, available)


@pytest.mark.parametrize("code", [*SMALL, Code(14, 10), Code(40, 32)], ids=str)
def test_the_weights_are_those_of_galois(code: Code, seed: int) -> None:
    rng = random.Random(seed)
    matrix = FIELD(generator(code))
    for _ in range(3):
        lost = rng.sample(range(code.n), rng.randint(1, code.r))
        available = choice(code, lost, rng)
        expected = matrix[lost] @ np.linalg.inv(matrix[available])
        weights = code.decode_weights(lost, available, generator(code))
        assert weights.tobytes() == np.asarray(expected, np.uint8).tobytes(), (lost, available)


@pytest.mark.parametrize("code", LARGE, ids=str)
def test_samples_of_losses_of_large_codes_decode(code: Code, seed: int) -> None:
    rng = random.Random(seed)
    blocks = stripe(code, rng)
    for count in {1, 2, code.r // 2, code.r}:
        lost = rng.sample(range(code.n), count)
        available = choice(code, lost, rng)
        weights = code.decode_weights(lost, available, generator(code))
        assert combined(weights, blocks[available]).tobytes() == blocks[lost].tobytes()


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_code_decodes_any_loss(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 40), "n")
    code = Code(n, data.draw(st.integers(1, n - 1), "k"))
    order = data.draw(st.permutations(range(n)), "order")
    lost = order[: data.draw(st.integers(0, code.r), "lost")]
    available = order[n - code.k :]
    weights = code.decode_weights(lost, available, generator(code))
    blocks = stripe(code, random.Random(n))
    assert combined(weights, blocks[available]).tobytes() == blocks[lost].tobytes()


@pytest.mark.parametrize(
    "code", [code for code in [*SMALL, Code(14, 10), Code(256, 250)] if code.r >= 2], ids=str
)
def test_zfec_decodes_our_bytes(code: Code, seed: int) -> None:
    rng = random.Random(seed)
    fast = contract.get_kernels("cpu")
    data = stripe(code, rng)[: code.k]
    words = [block.view(np.uint64) for block in data]
    blocks = [block.tobytes() for block in data]
    parity = [np.empty(BLOCK_WORDS, np.uint64) for _ in range(code.r)]
    fast.dot(words, generator(code)[code.k :], parity)
    blocks += [block.tobytes() for block in parity]
    decoder = zfec.Decoder(code.k, code.n)
    sets: Any = itertools.combinations(range(code.n), code.k)
    if code.n > 8:
        sets = [sorted(rng.sample(range(code.n), code.k)) for _ in range(20)]
    for available in sets:
        decoded = decoder.decode([blocks[j] for j in available], list(available))
        assert b"".join(map(bytes, decoded)) == data.tobytes(), available


def test_what_is_available_passes_through() -> None:
    code = Code(5, 3)
    weights = code.decode_weights([3, 4], [2, 0, 1], generator(code))
    assert np.array_equal(weights, generator(code)[3:][:, [2, 0, 1]])
    assert code.decode_weights([], [4, 3, 0], generator(code)).shape == (0, 3)


@pytest.mark.parametrize(
    ("lost", "available", "message"),
    [
        ([4], [0, 1], r"lost contains block 4; .* 0\.\.3"),
        ([-1], [0, 1], r"lost contains block -1"),
        ([0], [1, 7], r"available contains block 7"),
        ([0, 0], [1, 2], r"lost contains a block twice"),
        ([0], [1, 1], r"available contains a block twice"),
        ([0, 1], [1, 2], r"blocks \[1\] are both lost and available"),
        ([0], [1], r"exactly k = 2 available blocks, not 1"),
        ([0], [1, 2, 3], r"exactly k = 2 available blocks, not 3"),
    ],
)
def test_blocks_that_make_no_sense(lost: list[int], available: list[int], message: str) -> None:
    code = Code(4, 2)
    with pytest.raises(CodeError, match=message):
        code.decode_weights(lost, available, generator(code))


def test_a_generator_that_is_not_the_codes() -> None:
    code = Code(4, 2)
    good = generator(code)
    for bad in (good[:3], good.T, good.astype(np.int64), generator(Code(4, 3))):
        with pytest.raises(CodeError, match=r"the generator has to be uint8 \[4, 2\]"):
            code.decode_weights([0], [1, 2], bad)
    damaged = good.copy()
    damaged[2] = damaged[1]
    with pytest.raises(CodeError, match=r"blocks \[1, 2\] do not determine the stripe"):
        code.decode_weights([0], [1, 2], damaged)
    assert np.array_equal(good, code.generator()), "the generator is read, not written"


@pytest.mark.parametrize("n", [*range(3, 21), 64, 256])
def test_the_generator_is_that_of_galois(n: int) -> None:
    """V over the inverse of its top, by galois' algebra; of all codes with n blocks, or of some if many."""
    points = FIELD([0, *(int(FIELD(2) ** i) for i in range(n - 1))])
    for k in range(2, n - 1) if n <= 20 else (2, n // 2, n - 2):
        vandermonde = points[:, None] ** np.arange(k)
        expected = vandermonde @ np.linalg.inv(vandermonde[:k])
        found = Code(n, k).generator()
        assert found.flags.c_contiguous and found.dtype == np.uint8
        assert found.tobytes() == np.asarray(expected, np.uint8).tobytes()


# Updating.


@pytest.mark.parametrize("name", ["reference", "cpu"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_updating_is_encoding_again(name: str, data: st.DataObject) -> None:
    work = contract.get_kernels(name)
    n = data.draw(st.integers(2, 12), "n")
    code = Code(n, data.draw(st.integers(1, n - 1), "k"))
    size = data.draw(st.integers(0, 20), "block words")
    old = [words(data.draw(st.binary(min_size=size * 8, max_size=size * 8))) for _ in range(code.k)]
    parity = encoded(work, code, old)
    changed = data.draw(st.integers(0, code.k - 1), "changed block")
    # Rows of one block change: they are disjoint, since each is captured once in a step.
    width = data.draw(st.integers(1, 4), "words of a row")
    rows = (
        data.draw(st.lists(st.integers(0, size // width - 1), unique=True), "rows") if size >= width else []
    )
    offsets = np.array(rows, np.int64) * width
    count = 8 * len(rows) * width
    fresh = words(data.draw(st.binary(min_size=count, max_size=count))).reshape(len(rows), width)

    delta = np.empty_like(fresh)
    work.gather_rows(old[changed], offsets, delta)
    delta ^= fresh
    for row, block in zip(generator(code)[code.k :], parity, strict=True):
        work.mul_add_rows_(block, offsets, delta, int(row[changed]))
    for offset, row in zip(offsets.tolist(), fresh, strict=True):
        old[changed][offset : offset + width] = row

    for updated, again in zip(parity, encoded(work, code, old), strict=True):
        assert updated.tobytes() == again.tobytes()


def words(content: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(content, np.uint64).copy()


def encoded(work: contract.Kernels, code: Code, data: list[NDArray[np.uint64]]) -> list[NDArray[np.uint64]]:
    parity = [np.empty_like(data[0]) for _ in range(code.r)]
    work.dot(data, generator(code)[code.k :], parity)
    return parity
