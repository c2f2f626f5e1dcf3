"""Scalars of tables that move between ranks."""

from __future__ import annotations

from ecemb.state import rank_state


def test_what_only_others_have_is_added_down_to_the_batches_of_an_engine() -> None:
    of_ranks = [
        {"tables": {"fused": {"a": {"lr": 1.0}, "b": {"lr": 2.0}}}, "buckets": {"x": 1}},
        {
            "tables": {"fused": {"a": {"lr": 9.0, "more": 1}, "c": {"lr": 3.0}}, "other": {"d": 4}},
            "buckets": {},
        },
    ]
    first, second = of_ranks
    both = rank_state.joined_scalars(first, second)
    assert (
        both
        == rank_state.joined_scalars(both, second)
        == {
            "tables": {"fused": {"a": {"lr": 1.0}, "b": {"lr": 2.0}, "c": {"lr": 3.0}}, "other": {"d": 4}},
            "buckets": {"x": 1},
        }
    )
    assert rank_state.joined_scalars(second, first)["tables"]["fused"]["a"] == {"lr": 9.0, "more": 1}
