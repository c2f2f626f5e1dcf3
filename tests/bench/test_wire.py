"""Packings give back what they were given; and whether they pay follows from their ratio and speed."""

from __future__ import annotations

import numpy as np
import pytest

from bench import wire
from bench.packings import PACKINGS, bound
from bench.result import Arguments, Row, WrongResult
from bench.wire import QUICK

SHAPES = ((0, 4), (1, 1), (3, 1), (65, 7), (130, 64), (64, 33))


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("used_bits", [0, 1, 7, 8, 17, 24, 31, 32])
def test_what_is_packed_comes_back(name: str, shape: tuple[int, int], used_bits: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << used_bits, shape, np.uint64).astype(np.uint32)
    values[rng.random(shape) < 0.3] = 0
    packing = PACKINGS[name]
    packed = np.full(bound(values), 0xEE, np.uint8)
    size = packing.pack(values, packed)
    assert size <= len(packed)
    kept = np.concatenate([packed[:size], rng.integers(0, 256, 8 + -size % 8, np.uint8)])
    out = np.full_like(values, 0xDEADBEEF)
    packing.unpack(kept, out)
    assert out.tolist() == values.tolist()


@pytest.mark.parametrize(
    ("name", "size"),
    [("row planes", 100 * (1 + 2 * 32)), ("row bits", 100 * (1 + 4 * 10)), ("bitmap", 100 * (16 + 2 * 32))],
)
def test_only_what_is_used_is_kept(name: str, size: int) -> None:
    values = np.full((100, 32), 0x03FF, np.uint32)
    assert PACKINGS[name].pack(values, np.empty(bound(values), np.uint8)) == size


@pytest.mark.parametrize("optimizer", wire.OPTIMIZERS)
def test_deltas_are_those_of_touched_rows(optimizer: str) -> None:
    columns = {"SGD": [16], "row-wise Adagrad": [16, 1], "Adagrad": [16, 16], "Adam": [16, 16, 16]}[optimizer]
    found = dict(wire.deltas(QUICK, optimizer, 0.01, seed=1))
    assert list(found) == ["early", "late"]
    for deltas in found.values():
        assert [values.shape[1] for values in deltas] == columns
        assert 30 < len(deltas[0]) < QUICK.batch * QUICK.tables
        assert all(values.any() for values in deltas)
        assert (deltas[0] != 0).any(axis=1).mean() > 0.9


def test_a_step_that_changes_nothing_is_not_measured() -> None:
    with pytest.raises(WrongResult, match="changed nothing"):
        wire.measure(QUICK, [np.zeros((5, 4), np.uint32)])


def test_a_packing_that_loses_something(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = PACKINGS["bitmap"]._replace(unpack=lambda packed, out: None)
    monkeypatch.setattr(wire, "PACKINGS", {"wrong": wrong})
    with pytest.raises(WrongResult, match="wrong: unpacked deltas"):
        wire.measure(QUICK, [np.ones((5, 4), np.uint32)])


def test_packing_pays_below_a_speed_and_costs_above() -> None:
    one = 0.75, 4e9, 2e9
    limit = wire.pays_below(*one) / 1e9
    assert limit == pytest.approx(8 * 0.25 / 0.75)
    assert wire.saved(*one, limit) == pytest.approx(0)
    assert wire.saved(*one, limit / 2) > 0 > wire.saved(*one, 2 * limit)
    assert wire.pays_below(1.1, 4e9, 2e9) == 0


def test_every_packing_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "RATES", (0.01,))
    monkeypatch.setattr(wire, "OPTIMIZERS", {"SGD": wire.OPTIMIZERS["SGD"]})
    rows = wire.run(Arguments(quick=True, seed=2))

    def of(metric: str) -> list[Row]:
        return [row for row in rows if row.metric == metric]

    for metric in ("wire_ratio", "pays_below_gbit_per_s"):
        assert len(of(metric)) == 2 * len(PACKINGS)
    for metric in ("pack_gb_per_s", "unpack_gb_per_s"):
        assert [row.labels["packing"] for row in of(metric)] == list(PACKINGS)
    verdicts = dict(zip((tuple(row.labels.items()) for row in of("pays")), of("pays"), strict=True))
    for row in of("saved_pct"):
        assert verdicts[tuple(row.labels.items())].value == (row.low > 0)
