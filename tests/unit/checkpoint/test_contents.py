"""Who reads what of a checkpoint."""

from __future__ import annotations

from ecemb.checkpoint.contents import states_of


def test_every_state_is_read_by_a_rank_and_by_all_new_ones() -> None:
    for former in range(1, 9):
        for now in range(1, 9):
            read = [states_of(former, rank, now) for rank in range(now)]
            assert sorted(one for of_rank in read[:former] for one in of_rank) == [*range(former)]
            assert all(of_rank[0] == rank for rank, of_rank in enumerate(read[:former]))
            assert all([*of_rank] == [*range(former)] for of_rank in read[former:])
