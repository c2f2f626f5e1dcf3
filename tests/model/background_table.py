"""A rebuild beside training: what is searched, what each rule says, and the smallest job to show its use."""

from __future__ import annotations

from typing import Any

from .background import Background
from .table import Entry


def _two(**bounds: Any) -> Background:
    return Background(n=2, k=1, size=2, **bounds)


def _both(**bounds: Any) -> Background:
    """Two of three ranks are rebuilt at once, each from one holder."""
    return Background(n=3, k=1, size=3, replaced=(0, 1), **bounds)


BACKGROUND_QUICK = (
    _two(crashes=1, flights=2),
    _two(steps=2, crashes=2, losses=1),
    Background(crashes=1),
)
"""For `make test`."""

BACKGROUND_FULL = (
    *BACKGROUND_QUICK,
    _two(steps=3, crashes=2, losses=1, aborts=1, flights=2),
    Background(crashes=1, losses=1, aborts=1),
    Background(steps=2, crashes=1, aborts=1),
    Background(steps=2, crashes=2, losses=1),
    _both(crashes=1),
    Background(n=4, k=2, size=4, crashes=1),
)
"""For `make model`."""

BACKGROUND = (
    Entry(
        "ensured_before_lookup",
        "A row is looked up when its bit is set.",
        "The step computes with bytes that were never stored.",
        "wrong row",
        _two(),
    ),
    Entry(
        "bytes_before_bit",
        "A bit is set when its bytes are stored.",
        "The step computes with bytes that were never stored.",
        "wrong row",
        _two(),
    ),
    Entry(
        "stored_where_unset",
        "Bytes are stored only where the bit is unset.",
        "Of two requests for one row, the second puts back what a step has changed.",
        "wrong parity",
        _two(flights=2, crashes=1),
    ),
    Entry(
        "asked_when_settled",
        "A rank asks for parity as of t only while it has committed t, and has not prepared the next.",
        "Parity of t arrives after the deltas of t + 1 were due: they are missing.",
        "wrong parity",
        _two(crashes=1),
    ),
    Entry(
        "dropped_before_prepared",
        "Before a rank stores `prepared`, it drops all requests for parity that are under way.",
        "Parity of t arrives after the deltas of t + 1 were due: they are missing.",
        "wrong parity",
        _two(crashes=1),
    ),
    Entry(
        "journal_first",
        "A holder takes a row from its journal, if that is of a later transaction and has the row.",
        "What the open step has made of the row is taken for what it was before.",
        "wrong parity",
        Background(crashes=1),
    ),
    Entry(
        "looked_at_again",
        "After the copy the holder looks again. If what decided where it looked has changed, it says so, and "
        "the rank asks again.",
        "The step has changed the row between the look and the copy.",
        "wrong parity",
        _two(crashes=1),
    ),
    Entry(
        "attempt_looked_at",
        "The second look compares how often the journal was armed as well.",
        "The step is aborted meanwhile; the journal of the empty step has its label, and not the row.",
        "wrong parity",
        Background(crashes=1, aborts=1),
    ),
    Entry(
        "no_apply_begun",
        "A holder gives parity of t only if it has committed t and begun no other.",
        "A row is asked for before the step is prepared, and added up from parity in which the step is "
        "applied.",
        "wrong row",
        Background(crashes=1),
    ),
    Entry(
        "holders_are_whole",
        "A rank that is rebuilt gives nothing.",
        "Another one stores what was never stored there.",
        "wrong row",
        _both(crashes=1),
    ),
    Entry(
        "inbox_keeps_all",
        "The inbox takes all deltas; those of words whose bit is unset are skipped when they are applied.",
        "The word arrives after its delta was dropped, and the rank is LIVE when all die: a redo lacks the "
        "delta.",
        "lost deltas",
        _two(crashes=1),
    ),
    Entry(
        "live_when_whole",
        "A rank is LIVE when all its bits are set.",
        "A crash: it is taken for a survivor, and holds nothing.",
        "wrong row",
        _two(crashes=1),
    ),
    Entry(
        "rebuilding_counts_as_lost",
        "In every start before that it counts as lost, whatever it has trained.",
        "A crash: it is taken for a survivor, and holds nothing.",
        "wrong row",
        _two(crashes=1),
    ),
)
