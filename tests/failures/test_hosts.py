"""Hosts as failure domains: the quick form of `python tests/failures/hosts.py`, which runs all scenarios."""

from __future__ import annotations

from failures.hosts import SCENARIOS


def test_a_new_host_takes_the_ranks_of_one_that_is_gone_with_its_memory() -> None:
    result = SCENARIOS["lost"]()
    print(result)
    assert result.identical, result.note
