"""A sample chooses the search's parameters: good ones, and no dearer than they must be."""

from __future__ import annotations

import pytest
import torch

from baselines.check_n_run.quantize import l2_errors
from baselines.check_n_run.quantize_scheme import Scheme
from baselines.check_n_run.quantize_search import LEAST_ROWS, SLACK, choose_search, sample


@pytest.mark.parametrize("bits", [2, 4])
def test_the_cheapest_of_the_good_ones(bits: int) -> None:
    rows = torch.randn(300, 32, generator=torch.Generator().manual_seed(bits))
    scheme = Scheme("adaptive", bits, "float16")
    bins, ratios = (5, 20, 40), (0.2, 0.6, 1.0)
    chosen = choose_search(rows, scheme, bins, ratios)
    errors = {
        (cut, ratio): float(l2_errors(rows, Scheme("adaptive", bits, "float16", cut, ratio)).mean())
        for cut in bins
        for ratio in ratios
    }
    least = min(errors.values())
    assert (chosen.bits, chosen.metadata) == (bits, "float16")
    assert errors[chosen.bins, chosen.ratio] <= least * (1 + SLACK)
    cheaper = [
        key for key in errors if Scheme("adaptive", bits, "float16", *key).search[1] < chosen.search[1]
    ]
    assert cheaper and all(errors[key] > least * (1 + SLACK) for key in cheaper)


def test_rows_that_have_no_range_need_no_search() -> None:
    rows = torch.ones(3, 4)
    assert choose_search(rows, Scheme("adaptive", 2)).search == (5, 1)


def test_rows_that_arent_finite_have_no_say() -> None:
    scheme = Scheme("adaptive", 2)
    assert choose_search(torch.full((3, 4), torch.nan), scheme) is scheme
    assert choose_search(torch.zeros(0, 4), scheme) is scheme
    rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    mixed = torch.cat([rows, torch.full((3, 8), torch.inf)])
    assert choose_search(mixed, scheme) == choose_search(rows, scheme)


def test_other_methods_have_no_search() -> None:
    with pytest.raises(ValueError, match="the method is 'asymmetric'"):
        choose_search(torch.ones(3, 4), Scheme("asymmetric"))


@pytest.mark.parametrize("rows", [0, 1, 999, 1000, 3999, 4001, 300_000_000])
def test_a_sample(rows: int) -> None:
    chosen = sample(rows, torch.Generator().manual_seed(rows))
    assert len(chosen) == min(rows, max(LEAST_ROWS, rows // 100_000))
    assert bool((chosen.diff() > 0).all())
    assert not len(chosen) or (int(chosen[0]) >= 0 and int(chosen[-1]) < rows)
    assert chosen.equal(sample(rows, torch.Generator().manual_seed(rows)))
