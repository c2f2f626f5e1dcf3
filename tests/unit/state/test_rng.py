"""Generators go on where they were, whatever library they are of."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ecemb.state import rng
from ecemb.state.serialize import dump, load, plain

KINDS: dict[str, Any] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "python": random.Random,
    "numpy legacy": np.random.RandomState,
    **{
        kind.__name__: lambda seed, kind=kind: np.random.Generator(kind(seed))
        for kind in (
            np.random.PCG64,
            np.random.PCG64DXSM,
            np.random.MT19937,
            np.random.Philox,
            np.random.SFC64,
        )
    },
}


def draw(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.randn(5, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(5)]
    return generator.standard_normal(5).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_goes_on_where_it_was(kind: str, seed: int) -> None:
    """Also in another object, from packed bytes, and in the middle of a pair of normal numbers."""
    generator = KINDS[kind](seed)
    draw(generator)
    packed = dump(plain(rng.state(generator)))
    expected = draw(generator)
    other = KINDS[kind](seed + 1)
    rng.set_state(other, load(packed))
    assert draw(other) == expected
    rng.set_state(generator, load(packed))
    assert draw(generator) == expected


def test_the_generators_of_an_object_are_found_once_and_in_order() -> None:
    class Holder:
        def __init__(self) -> None:
            self.first = random.Random(1)
            self.number = 7
            self.second = torch.Generator()
            self.again = self.first
            self.everyones = torch.default_generator
            self.stateless = random.SystemRandom()

    one, two = Holder(), Holder()
    two.second = one.second
    found = rng.owned([one, [random.Random(2)], two, None])
    assert list(map(id, found)) == list(map(id, (one.first, one.second, two.first)))
