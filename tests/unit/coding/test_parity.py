"""Parity blocks against zfec's encoder and galois' algebra: kept up, cut off, finished, compared."""

from __future__ import annotations

import random
from collections.abc import Sequence

import galois
import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.coding.code import Code
from ecemb.coding.parity import Delta, ParityBlocks, class_words, parity_words
from ecemb.coding.placement import Placement
from ecemb.errors import InconsistentArenas
from ecemb.kernels import contract
from support.simulation import generator_of, parity_of

Words = NDArray[np.uint64]
Received = Sequence[tuple[int, Delta]]

SHAPES = [(2, 1, 2), (3, 1, 3), (3, 2, 5), (4, 2, 4), (5, 2, 6), (6, 4, 6), (7, 4, 9)]
FIELD = galois.GF(2**8, irreducible_poly=0x11D, primitive_element=2)


class Stripes:
    """Every rank's data blocks as plain arrays, and the parity blocks that all ranks keep."""

    def __init__(self, n: int, k: int, size: int, rng: random.Random, kernel: str) -> None:
        self.placement = Placement(n, k, tuple(rng.sample(range(size), size)))
        lengths = [0, 3, 17, 40]
        self.block_words = [[rng.choice(lengths) for _ in range(k)] for _ in range(size)]
        self.data = [[np.zeros(m, np.uint64) for m in blocks] for blocks in self.block_words]
        self.kept = [
            ParityBlocks(
                np.zeros(parity_words(self.placement, self.block_words, rank), np.uint64),
                self.placement,
                rank,
                self.block_words,
                generator_of(Code(n, k)),
                contract.get_kernels(kernel),
            )
            for rank in range(size)
        ]
        self._rng = rng

    def change(self, rank: int, block: int) -> list[tuple[int, Delta]]:
        """Changes some records of a block; returns the Deltas for its keepers, each with its keeper."""
        words = self.data[rank][block]
        width = self._rng.choice([1, 2, 3])
        offsets = [i for i in range(0, len(words) - width + 1, width) if self._rng.random() < 0.5]
        changed = np.frombuffer(self._rng.randbytes(8 * width * len(offsets)), np.uint64)
        delta = Delta(block, np.array(offsets, np.int64), changed.reshape(-1, width))
        for offset, change in zip(offsets, delta.words, strict=True):
            words[offset : offset + width] ^= change
        return [(keeper, delta) for keeper in self.placement.keepers(rank, block)]

    def change_some(self) -> list[list[tuple[int, Delta]]]:
        """Keeper -> what it received, as (sender, Delta), in the order of senders."""
        received: list[list[tuple[int, Delta]]] = [[] for _ in self.data]
        for rank, blocks in enumerate(self.data):
            for block in range(len(blocks)):
                if self._rng.random() < 0.7:
                    for keeper, delta in self.change(rank, block):
                        received[keeper].append((rank, delta))
        return received

    def stripe(self, c: int) -> list[Words]:
        members = self.placement.members(c)[: self.placement.k]
        return [self.data[rank][block] for block, rank in enumerate(members)]

    def check(self) -> None:
        for c in range(self.placement.world_size):
            keepers = self.placement.members(c)[self.placement.k :]
            expected = parity_of(self.stripe(c), self.placement.n)
            for keeper, words in zip(keepers, expected, strict=True):
                assert np.array_equal(self.kept[keeper].block(c), words)


@pytest.fixture(params=SHAPES, ids=str)
def stripes(request: pytest.FixtureRequest, seed: int) -> Stripes:
    return Stripes(*request.param, random.Random(seed), "reference")


def parity_bytes(stripes: Stripes) -> list[bytes]:
    return [words.tobytes() for kept in stripes.kept for _, words in kept.blocks.values()]


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parity_kept_up_by_deltas_is_zfecs_encoding(
    shape: tuple[int, int, int], kernel: str, seed: int
) -> None:
    """update == encode again; a stripe is a valid zfec codeword after every step."""
    stripes = Stripes(*shape, random.Random(seed), kernel)
    stripes.check()
    for _ in range(4):
        for kept, received in zip(stripes.kept, stripes.change_some(), strict=True):
            kept.update_(received)
        stripes.check()


def test_parity_is_the_generator_times_the_data_over_galois_field(stripes: Stripes) -> None:
    for kept, received in zip(stripes.kept, stripes.change_some(), strict=True):
        kept.update_(received)
    placement = stripes.placement
    generator = FIELD(generator_of(Code(placement.n, placement.k))[placement.k :])
    for c in range(placement.world_size):
        data = stripes.stripe(c)
        size = max(len(block) for block in data)
        padded = [np.concatenate([b, np.zeros(size - len(b), np.uint64)]) for b in data]
        product = generator @ FIELD(np.stack([b.view(np.uint8) for b in padded]))
        keepers = placement.members(c)[placement.k :]
        for keeper, row in zip(keepers, product, strict=True):
            assert stripes.kept[keeper].block(c).tobytes() == row.tobytes()


def test_a_block_is_as_long_as_the_longest_of_its_class(stripes: Stripes) -> None:
    placement = stripes.placement
    for c in range(placement.world_size):
        longest = max(len(block) for block in stripes.stripe(c))
        assert class_words(placement, stripes.block_words, c) == longest
    for rank, kept in enumerate(stripes.kept):
        total = sum(len(words) for _, words in kept.blocks.values())
        assert total == parity_words(placement, stripes.block_words, rank)
        assert len(kept.blocks) == placement.n - placement.k


def numbered(received: Received) -> list[tuple[int, Delta]]:
    """One Delta of one row for each row, in order."""
    return [(sender, delta.rows(i, i + 1)) for sender, delta in received for i in range(len(delta.offsets))]


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_update_that_was_cut_off_is_finished(shape: tuple[int, int, int], kernel: str, seed: int) -> None:
    """At any row, with the row half changed; blocks of one class overlap in their keeper's parity."""
    rng = random.Random(seed)
    stripes = Stripes(*shape, rng, kernel)
    for _ in range(3):
        for kept, received in zip(stripes.kept, stripes.change_some(), strict=True):
            rows = numbered(received)
            saved, mark = np.zeros((2, 3), np.uint64), np.array([-1], np.int64)
            for sender, delta in rows[: rng.randint(0, len(rows))]:
                kept.advance_(sender, delta, saved, mark)
            done = int(mark[0]) + 1
            if done:
                sender, delta = rows[done - 1]
                words = kept.block(stripes.placement.stripe_class(sender, delta.block))
                words[delta.offsets[0] : delta.offsets[0] + rng.randint(0, delta.words.size)] ^= np.uint64(77)
                for _ in range(2):
                    kept.finish_(sender, delta, saved[(done - 1) % 2])
            for sender, delta in rows[done:]:
                kept.advance_(sender, delta, saved, mark)
            assert int(mark[0]) == len(rows) - 1
        stripes.check()


# --- comparing parity with rows -----------------------------------------------------------------


def from_zero(stripes: Stripes, keeper: int, start: int, stop: int) -> list[tuple[int, Delta]]:
    """Words start..stop-1 of every block whose parity `keeper` has, as deltas from zero."""
    found: list[tuple[int, Delta]] = []
    for rank, blocks in enumerate(stripes.data):
        for block, words in enumerate(blocks):
            part = words[start:stop]
            if keeper in stripes.placement.keepers(rank, block) and len(part):
                found.append((rank, Delta(block, np.array([start], np.int64), part.reshape(1, -1))))
    return found


@pytest.mark.parametrize(("start", "stop"), [(0, 40), (0, 7), (13, 29), (39, 45), (40, 50)])
def test_parity_that_fits_the_rows_does_not_differ(stripes: Stripes, start: int, stop: int) -> None:
    for kept, received in zip(stripes.kept, stripes.change_some(), strict=True):
        kept.update_(received)
    for keeper, kept in enumerate(stripes.kept):
        assert kept.syndromes(from_zero(stripes, keeper, start, stop), start, stop) == []


def test_wrong_bits_are_found_in_their_classes(stripes: Stripes, seed: int) -> None:
    rng = random.Random(seed)
    for kept, received in zip(stripes.kept, stripes.change_some(), strict=True):
        kept.update_(received)
    for keeper, kept in enumerate(stripes.kept):
        for c, (row, words) in kept.blocks.items():
            if not len(words):
                continue
            wrong = sorted(rng.sample(range(len(words)), rng.randint(1, min(3, len(words)))))
            bits = np.array([1 << rng.randrange(64) for _ in wrong], np.uint64)
            words[wrong] ^= bits
            for start, stop in ((0, 40), (wrong[0], wrong[-1] + 1)):
                [found] = kept.syndromes(from_zero(stripes, keeper, start, stop), start, stop)
                assert (found.stripe_class, found.row) == (c, row)
                assert found.offsets.tolist() == wrong and np.array_equal(found.words, bits)
            for start, stop in ((0, wrong[0]), (wrong[-1] + 1, 40)):
                assert kept.syndromes(from_zero(stripes, keeper, start, stop), start, stop) == []
            words[wrong] ^= bits
    for keeper, kept in enumerate(stripes.kept):
        assert kept.syndromes(from_zero(stripes, keeper, 0, 40), 0, 40) == []


def test_cleared_parity_is_the_code_of_rows_that_are_all_0(stripes: Stripes) -> None:
    for kept, received in zip(stripes.kept, stripes.change_some(), strict=True):
        kept.update_(received)
    for blocks in stripes.data:
        for words in blocks:
            words[:] = 0
    for kept in stripes.kept:
        kept.clear_()
    stripes.check()


def test_a_delta_for_parity_that_is_not_kept_here_is_refused() -> None:
    stripes = Stripes(4, 2, 6, random.Random(1), "reference")
    placement = stripes.placement
    for sender in range(6):
        for block in range(2):
            delta = Delta(block, np.empty(0, np.int64), np.empty((0, 1), np.uint64))
            keepers = placement.keepers(sender, block)
            for keeper in range(6):
                if keeper in keepers:
                    stripes.kept[keeper].update_([(sender, delta)])
                    continue
                with pytest.raises(InconsistentArenas, match=f"rank {sender} sent rank {keeper}"):
                    stripes.kept[keeper].update_([(sender, delta)])
