"""Which code of a list is taken."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ecemb.coding.code import Code
from ecemb.errors import PlacementError
from ecemb.start.placement_choice import FailureDomain, chosen

CODES = [Code(6, 4), Code(3, 2), Code(2, 1)]


@pytest.mark.parametrize(
    ("hosts", "domain", "expected"),
    [
        ("abcdef", "auto", 0),
        ("aabbcc", "auto", 1),  # the first that a host may be lost of
        ("aabb", "auto", 2),
        ("aaab", "auto", 1),  # no code survives the loss of host a
        ("aabbcc", "rank", 0),
        ("aabbcc", "host", 1),
        ("a", "auto", 0),
    ],
)
def test_the_first_code_that_fits_is_taken(hosts: str, domain: FailureDomain, expected: int) -> None:
    assert chosen(CODES, hosts, domain) == CODES[expected]


@pytest.mark.parametrize(
    ("codes", "hosts", "domain"),
    [(CODES, "aaab", "host"), (CODES[:2], "ab", "rank"), (CODES[:2], "ab", "auto")],
)
def test_if_none_fits_codes_that_do_are_named(
    codes: Sequence[Code], hosts: str, domain: FailureDomain
) -> None:
    with pytest.raises(PlacementError, match=r"none of the codes \(6, 4\), \(3, 2\).* fits these"):
        chosen(codes, hosts, domain)
