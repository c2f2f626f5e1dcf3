"""Words of log lines."""

from __future__ import annotations

import pytest

from ecemb.net.wording import byte_size, counted, listed, short


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([3, 1], "ranks 1 and 3"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6 and 7"),
        (range(64), "ranks 0, 1, 2, 3, 4, 5, 6 and 57 more"),
    ],
)
def test_lists_of_ranks_stay_short(ranks: list[int], text: str) -> None:
    assert listed(ranks) == text


def test_counts_have_their_plural() -> None:
    assert [counted(count, "host") for count in (0, 1, 2000)] == ["0 hosts", "1 host", "2,000 hosts"]


def test_long_texts_are_cut_and_later_lines_left_out() -> None:
    assert short("one\ntwo") == "one" and short("") == ""
    assert short(ValueError("x" * 2000), 20) == "x" * 19 + "…"
    assert short("x" * 160) == "x" * 160


def test_sizes_for_reading() -> None:
    assert [byte_size(count) for count in (0, 999, 1e3, 2.5e9, 3e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "2.5 GB",
        "3e+03 TB",
    ]
