"""Many ranks start, one is lost, and the answer says how large the store's values were."""

from __future__ import annotations

from bench.harness.result import Arguments
from bench.questions.start import question as start


def test_ranks_start_and_recover_and_the_stores_values_are_small() -> None:
    rows = start.run(Arguments(quick=True, seed=3))
    assert {row.metric for row in rows} >= {"start_s", "restart_s", "store_value_bytes_max"}
    sizes = {
        (row.labels["ranks"], row.labels["simulated"]): row.value
        for row in rows
        if row.metric == "store_value_bytes_max"
    }
    assert {ranks for ranks, simulated in sizes if simulated == 1} == set(start.SIMULATED_RANKS)
    assert all(size < 256 << 10 for (ranks, _), size in sizes.items() if ranks <= 2048)
