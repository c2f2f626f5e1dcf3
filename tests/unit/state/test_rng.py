"""Generators go on where they were, whatever library they are of."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ecemb.errors import ConfigurationError
from ecemb.state import rank_state
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
    packed = dump(plain(rank_state.generator_state(generator)))
    expected = draw(generator)
    other = KINDS[kind](seed + 1)
    rank_state.set_generator_state(other, load(packed))
    assert draw(other) == expected
    rank_state.set_generator_state(generator, load(packed))
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
    found = rank_state.owned_generators([one, [random.Random(2)], two, None])
    assert list(map(id, found)) == list(map(id, (one.first, one.second, two.first)))


# --- the process's, read again and again ----------------------------------------------------------


DRAWS: dict[str, Any] = {
    "torch": (lambda: torch.rand(()), lambda: torch.randn(3), lambda: torch.manual_seed(1)),
    "numpy": (
        np.random.random,
        np.random.standard_normal,
        lambda: np.random.seed(1),
        lambda: np.random.binomial(10, 0.3),
    ),
    "python": (
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.seed(1),
        lambda: random.getrandbits(1),
    ),
}
DRAWS[""] = (lambda: None,)


@pytest.mark.usefixtures("kept_generators")
def test_no_draw_is_missed(seed: int) -> None:
    """Nor one that takes only the second of a pair of normal numbers, or brings it back."""
    dice, reader = random.Random(seed), rank_state.Reader()
    before = rank_state.process_states()
    kept = [before]
    for _ in range(600):
        name = dice.choice(list(DRAWS))
        for _ in range(dice.randrange(3)):
            dice.choice(DRAWS[name])()
        if dice.random() < 0.2:
            rank_state.set_process_states(dice.choice(kept))
        now = reader.read()
        assert same_bytes(now, rank_state.process_states())
        for one, state in before.items():
            assert rank_state.is_same(now[one], before[one]) == same_bytes(now[one], state)
        kept = [*kept[-3:], now]
        before = now


def same_bytes(one: Any, other: Any) -> bool:
    return dump(plain(one)) == dump(plain(other))


@pytest.mark.usefixtures("kept_generators")
def test_the_second_of_a_pair_of_normal_numbers_is_seen_alone() -> None:
    for first, at in ((np.random.standard_normal, "numpy"), (lambda: random.gauss(0, 1), "python")):
        np.random.seed(3)
        random.seed(3)
        reader = rank_state.Reader()
        first()
        held = reader.read()
        first()  # no word is drawn
        used = reader.read()
        assert not rank_state.is_same(held[at], used[at])
        rank_state.set_process_states(held)
        assert same_bytes(reader.read(), held)


@pytest.mark.usefixtures("kept_generators")
def test_what_was_not_drawn_from_is_not_read_again() -> None:
    reader = rank_state.Reader()
    first = reader.read()
    with mock.patch.object(np.random, "get_state", side_effect=AssertionError):
        torch.rand(())
        again = reader.read()
    assert again["numpy"] is first["numpy"] and again["python"] is first["python"]
    assert not rank_state.is_same(again["torch"], first["torch"])


def test_another_generator_of_numpy_is_refused() -> None:
    reader, own = rank_state.Reader(), np.random.get_bit_generator()
    reader.read()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        for read in (reader.read, rank_state.process_states):
            with pytest.raises(ConfigurationError, match="is PCG64, and ecemb keeps only MT19937"):
                read()
        np.random.set_bit_generator(np.random.MT19937(1))
        assert same_bytes(reader.read(), rank_state.process_states())
    finally:
        np.random.set_bit_generator(own)
    assert same_bytes(reader.read(), rank_state.process_states())
