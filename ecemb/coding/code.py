"""The (n, k) erasure code: encodes parity from data, and decodes lost blocks from the surviving ones.

Owns: the field GF(2^8), the generator matrix, and the weights that rebuild lost blocks. Pure
algebra over small matrices; bulk bytes go through `ecemb.kernels`.

Invariant: a stripe is `n` blocks, `block[i] = XOR_j generator[i, j] * block[j]` over the k data
blocks j, bytewise in GF(2^8), and any k of the n blocks give the other r = n - k back. With r >= 2
a stripe is a valid zfec codeword.

Knows nothing of: ranks, placement, kernels, memory. The field is two small tables; the tests compare it with
the galois package, which the product does not import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from ecemb.errors import CodeError

POLYNOMIAL: Final = 0x11D
"""x^8 + x^4 + x^3 + x^2 + 1, as in zfec, ISA-L and RAID 6; 2 generates the field."""

MAX_BLOCKS: Final = 256
"""A Vandermonde matrix over GF(2^8) has one row for each of the 256 elements of the field."""


def _exponentials() -> NDArray[np.uint8]:
    """Returns 2^i for i in [0, 510): two periods, so a sum of two logarithms needs no modulus."""
    powers = np.empty(510, np.uint8)
    value = 1
    for i in range(255):
        powers[i] = powers[i + 255] = value
        value <<= 1
        if value > 255:
            value ^= POLYNOMIAL
    return powers


_EXP: Final = _exponentials()
_LOG: Final = np.zeros(256, np.int64)
_LOG[_EXP[:255]] = np.arange(255)


def multiply(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Multiplies elementwise in GF(2^8): `2^(log a + log b)`, and 0 where either is 0.

    Args:
        a: uint8, any shape; read.
        b: uint8, any shape that broadcasts with `a`; read.

    Returns:
        uint8, the broadcast shape; new.
    """
    return np.where((a == 0) | (b == 0), np.uint8(0), _EXP[_LOG[a] + _LOG[b]])


def reciprocal(a: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Inverts elementwise in GF(2^8), `2^(255 - log a)`; no element may be 0."""
    return _EXP[255 - _LOG[a]]


def _matmul(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the product uint8 [p, s] of a [p, q] and b [q, s] over GF(2^8)."""
    product = np.zeros((a.shape[0], b.shape[1]), np.uint8)
    for j in range(a.shape[1]):
        product ^= multiply(a[:, j, None], b[None, j, :])
    return product


def _inverse(matrix: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Returns the inverse of uint8 [k, k] by Gauss-Jordan elimination, or None if singular."""
    k = matrix.shape[0]
    work = np.hstack((matrix, np.eye(k, dtype=np.uint8)))
    for column in range(k):
        candidates = np.flatnonzero(work[column:, column])
        if candidates.size == 0:
            return None
        pivot = column + int(candidates[0])
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = multiply(work[column], reciprocal(work[column, column : column + 1]))
        factors = work[:, column].copy()
        factors[column] = 0
        work ^= multiply(factors[:, None], work[None, column, :])
    return work[:, k:].copy()


@dataclass(frozen=True)
class Code:
    """An (n, k) code: n blocks in a stripe, k of them data, any r = n - k of them may be lost.

    Blocks are numbered 0..n-1 within their stripe: data 0..k-1, parity k..n-1.

    Attributes:
        n: Total blocks in a stripe.
        k: Data blocks in a stripe; 1 <= k < n <= 256.

    Raises:
        CodeError: There is no such code.
    """

    n: int
    k: int

    def __post_init__(self) -> None:
        for name, value in (("n", self.n), ("k", self.k)):
            given = cast(object, value)
            if not isinstance(given, int) or isinstance(given, bool):
                raise CodeError(
                    f"Code(n={self.n!r}, k={self.k!r}): {name} is a number of blocks and has to be an int, "
                    f"not {type(given).__name__}; for example Code(n=4, k=3)"
                )
        if self.k < 1:
            raise CodeError(f"{self!r}: k = {self.k} data blocks; at least 1 is needed, as in Code(n=2, k=1)")
        if self.n <= self.k:
            raise CodeError(
                f"{self!r}: n = {self.n} blocks in total has to be more than k = {self.k} data "
                f"blocks, or no block may be lost; to survive the loss of one block, use "
                f"Code(n={self.k + 1}, k={self.k})"
            )
        if self.n > MAX_BLOCKS:
            raise CodeError(
                f"{self!r}: a stripe over GF(2^8) has at most {MAX_BLOCKS} blocks; n is the size "
                "of one stripe, not the number of ranks: choose a smaller n"
            )

    @property
    def r(self) -> int:
        """Parity blocks in a stripe, n - k: how many blocks may be lost; at least 1."""
        return self.n - self.k

    def generator(self) -> NDArray[np.uint8]:
        """Builds the generator matrix G: block i of a stripe is XOR_j G[i, j] * data[j].

        With r = 1 parity is one row of ones (plain XOR), with k = 1 copies. Otherwise G = V · V[:k]^-1 over
        GF(2^8) / 0x11D, where V[i, j] = x_i^j, x_0 = 0 and x_i = 2^(i-1): Rizzo's systematic
        Vandermonde code, as zfec has it. Any k rows of V are independent since the x_i differ, and
        so are any k rows of G: every set of k blocks decodes.

        Called at a fresh start; arenas store the result.

        Returns:
            uint8 [n, k], new; the top k rows are the identity.
        """
        if self.r == 1 or self.k == 1:
            return np.vstack((np.eye(self.k, dtype=np.uint8), np.ones((self.r, self.k), np.uint8)))
        vandermonde = np.zeros((self.n, self.k), np.uint8)
        vandermonde[1:] = _EXP[np.outer(np.arange(self.n - 1), np.arange(self.k)) % 255]
        vandermonde[0, 0] = 1  # 0^0; the other powers of 0 are 0
        inverse = _inverse(vandermonde[: self.k])
        if inverse is None:
            raise CodeError(
                f"{self!r}: its Vandermonde matrix has no inverse, which is a bug: please report it"
            )
        return np.ascontiguousarray(_matmul(vandermonde, inverse))

    def decode_weights(
        self, lost: Sequence[int], available: Sequence[int], generator: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Computes the weights that rebuild lost blocks from k available blocks: G[lost] · G[available]^-1.

        `block[lost[i]] = XOR_j weights[i, j] * block[available[j]]`. The plan of a recovery calls it, with
        the same arguments on all ranks.

        Args:
            lost: Block numbers to rebuild, data or parity, distinct; may be empty.
            available: Exactly k distinct numbers of surviving blocks, in any order, none of them in `lost`.
            generator: uint8 [n, k], the result of `generator()` at the fresh start; read.

        Returns:
            uint8 [len(lost), k], new.

        Raises:
            CodeError: A number is not a block of the stripe, or is repeated, or is in both arguments;
                `available` has other than k members; or the matrix belongs to another code.
        """
        for name, blocks in (("lost", lost), ("available", available)):
            for block in blocks:
                if not 0 <= block < self.n:
                    raise CodeError(
                        f"{self!r}: {name} contains block {block}; a stripe's blocks are "
                        f"0..{self.n - 1} (data below {self.k}, parity from {self.k})"
                    )
            if len(set(blocks)) != len(blocks):
                raise CodeError(f"{self!r}: {name} contains a block twice: {list(blocks)}")
        both = sorted(set(lost) & set(available))
        if both:
            raise CodeError(
                f"{self!r}: blocks {both} are both lost and available; a block is one or the other"
            )
        if len(available) != self.k:
            raise CodeError(
                f"{self!r}: decoding takes exactly k = {self.k} available blocks, not "
                f"{len(available)}: {list(available)}"
            )
        self._check_generator(generator)
        inverse = _inverse(generator[list(available)])
        if inverse is None:
            raise CodeError(
                f"{self!r}: blocks {list(available)} do not determine the stripe under this "
                "generator; with generator()'s matrix any k blocks do, so this matrix is damaged "
                "or belongs to another code"
            )
        return _matmul(generator[list(lost)], inverse)

    def locate(
        self, syndromes: NDArray[np.uint64], possible: NDArray[np.uint64], generator: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Finds the single wrong block that explains why parity differs from data: single-error correction.

        Let S_q be the stored parity row q XOR the parity of the stored data, bytewise. If only data block j
        is wrong, by e, then S_q = G[k+q, j] * e for every q; if only parity row q is wrong, S_q = e and all
        others are 0. Each of the n hypotheses is tried on each word, with e = S_0 / G[k, j] for data. It has
        to explain all 8 bytes by one block: a word whose bytes point at different blocks fits no hypothesis.

        For r >= 2 at most one hypothesis fits: the code is MDS (MacWilliams and Sloane, The Theory of
        Error-Correcting Codes, 1977, chapter 11, theorem 8), so any r columns of [G[k:] | I] are independent
        and its distance is r + 1 >= 3. It follows, when w blocks are wrong in one word:

        - w = 1 is always found.
        - 2 <= w <= r - 1 is never mistaken for one wrong block: the word is left alone.
        - w >= r may be mistaken for a single other wrong block. With r = 2 and two blocks wrong in the same b
          bytes, this happens for (n - 2) / 255^b of all errors; it never happens if they are wrong in
          different bytes.
        - r = 1 cannot distinguish the hypotheses, and finds nothing.

        Args:
            syndromes: uint64 [r, m], S_q of m words of any stripes; read.
            possible: uint64 [n, m], the bits of each word that block i has; a hypothesis that changes other
                bits (padding, or words beyond the end of a short block) is ruled out; read.
            generator: uint8 [n, k], as for `decode_weights`; read.

        Returns:
            int64 [m], the block's number in its stripe, or -1 where no single block fits; and
            uint64 [m], the error to XOR into that block's word, or 0.

        Raises:
            CodeError: The matrix belongs to another code.
        """
        self._check_generator(generator)
        if not generator[self.k :].all():
            raise CodeError(
                f"{self!r}: a coefficient of the generator's parity rows is 0, which a code of distance "
                f"n - k + 1 never has: the matrix is damaged or belongs to another code"
            )
        blocks = np.full(syndromes.shape[1], -1, np.int64)
        errors = np.zeros(syndromes.shape[1], np.uint64)
        if self.r == 1:
            return blocks, errors
        first = np.ascontiguousarray(syndromes[0]).view(np.uint8)
        for block in range(self.n):
            if block < self.k:
                weights = generator[self.k :, block]
                scaled = multiply(first, reciprocal(weights[:1]))
                explained = np.stack([multiply(scaled, weight).view(np.uint64) for weight in weights])
                error = scaled.view(np.uint64)
            else:
                error = syndromes[block - self.k]
                explained = np.zeros_like(syndromes)
                explained[block - self.k] = error
            fits = (explained == syndromes).all(axis=0) & (error != 0) & (error & ~possible[block] == 0)
            blocks[fits], errors[fits] = block, error[fits]
        return blocks, errors

    def _check_generator(self, generator: NDArray[np.uint8]) -> None:
        if generator.shape != (self.n, self.k) or generator.dtype != np.uint8:
            raise CodeError(
                f"{self!r}: the generator has to be uint8 {[self.n, self.k]}, not "
                f"{generator.dtype} {list(generator.shape)}; pass the result of generator() of the same "
                "code"
            )
