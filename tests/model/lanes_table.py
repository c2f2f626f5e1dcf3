"""Lanes of parity rows: what is searched, what each rule says, and the smallest job to show its use."""

from __future__ import annotations

from .lanes import Lanes
from .table import Entry

LANES_QUICK = (
    Lanes(runs=(3, 2), transactions=2),
    Lanes(runs=(1, 4, 1), crashes=2),
    Lanes(runs=(3,), threads=3),
    Lanes(runs=(2, 2), do_overlap=True),
)
"""For `make test`."""

LANES_FULL = (
    *LANES_QUICK,
    Lanes(runs=(1, 4, 1, 3), crashes=3),
    Lanes(runs=(3, 4), transactions=2, crashes=3),
    Lanes(runs=(1, 4), threads=3, transactions=2, crashes=2),
    Lanes(runs=(6,), threads=3, crashes=2),
)
"""For `make model`."""

LANES = (
    Entry(
        "lines_before_lanes",
        "The lines of all lanes are written before a lane changes a row.",
        "A crash when one lane has changed a row and another has no line: no start can tell whose rows are "
        "left.",
        "false refusal",
        Lanes(runs=(3,), threads=3),
    ),
    Entry(
        "lanes_void_first",
        "The numbers of all lanes are void before lines are written.",
        "A redo cuts the run into other lanes: the number that an earlier line had counts with the first row "
        "of the new one.",
        "false refusal",
        Lanes(runs=(4,), threads=3, crashes=2),
    ),
    Entry(
        "lanes_void_before_label",
        "The numbers of all lanes are void before the parity journal gets a new label.",
        "A crash before the first lanes: those of the last transaction seem to be open, and the redo leaves "
        "out their rows.",
        "parity",
        Lanes(runs=(3,), transactions=2),
    ),
    Entry(
        "whole_void_before_label",
        "No row is complete before the parity journal gets a new label.",
        "A crash between the two: the redo leaves out the rows that were complete in the last transaction.",
        "parity",
        Lanes(runs=(3,), transactions=2),
    ),
    Entry(
        "lane_places",
        "The old words of each lane's rows have places of their own.",
        "A crash while two lanes change rows: the redo copies the old words of one lane over the row of "
        "another.",
        "parity",
        Lanes(),
    ),
    Entry(
        "lane_rows_apart",
        "The rows of a run don't overlap.",
        "Two threads change the same words, and a delta is lost.",
        "parity",
        Lanes(runs=(2,), crashes=0, do_overlap=True),
    ),
    Entry(
        "lanes_done_before_whole",
        "Rows are complete when all lanes have ended.",
        "A crash while another thread still changes rows: the redo goes on behind them.",
        "parity",
        Lanes(),
    ),
    Entry(
        "whole_before_row",
        "The rows of lanes are complete before the journal names the last of them.",
        "A crash between the two: the redo copies other words over that row, as if it were half changed.",
        "parity",
        Lanes(),
    ),
    Entry(
        "whole_rows_stay",
        "A redo leaves the row that the journal names as it is, if lanes have completed it.",
        "A crash behind lanes: the redo copies other words over that row.",
        "parity",
        Lanes(),
    ),
    Entry(
        "lanes_end_first",
        "A redo ends the lanes that are open, each from its own row, before it goes on.",
        "A crash in lanes: the redo adds deltas that their rows already have.",
        "parity",
        Lanes(),
    ),
)
