"""Agreement, windows, slices: what is searched, what each rule says, and the smallest job to show its use."""

from __future__ import annotations

from typing import Any

from .rules import Config
from .table import Entry


def _job(size: int, n: int, k: int, **bounds: int | bool | tuple[int, ...]) -> Config:
    """One step, no crash and no abort, unless something else is asked for."""
    given: dict[str, Any] = {"steps": 1, "crashes": 0, **bounds}
    return Config(size=size, n=n, k=k, **given)


def _two(**bounds: int | bool | tuple[int, ...]) -> Config:
    return _job(2, 2, 1, **bounds)


def _three(**bounds: int | bool) -> Config:
    return _job(3, 3, 2, **bounds)


def _four(**bounds: int | bool) -> Config:
    return _job(4, 2, 1, **bounds)


ROUNDS_QUICK = (
    _three(steps=2, crashes=2, losses=1),
    _two(steps=2, window=2, crashes=2, shortages=1, choices=1),
    _two(steps=2, crashes=1, losses=1, fails=1, overlap=True),
    _two(steps=3, window=2, crashes=2, losses=1, overlap=True, saves=(1,)),
    _two(steps=2, crashes=1, losses=1, aborts=2, fails=1),
    _three(steps=2, aborts=2, fails=1, overlap=True),
    _two(steps=3, window=3, aborts=2, fails=1),
    _two(steps=2, window=2, crashes=1, losses=1, aborts=1, fails=1),
    _four(steps=2, fails=2, overlap=True),
    _job(5, 2, 1, steps=2, fails=1, overlap=True),
)
"""For `make test`."""

ROUNDS_FULL = (
    *ROUNDS_QUICK,
    # windows and overlap together
    _two(steps=4, window=2, crashes=1, losses=1, fails=1, overlap=True),
    _two(steps=4, window=2, crashes=1, shortages=2, choices=1, overlap=True),
    _three(steps=4, window=2, crashes=1, losses=1, overlap=True),
    # aborts, of two steps in a row as well
    _two(steps=3, crashes=1, losses=1, aborts=2, fails=1, overlap=True),
    _three(steps=2, crashes=1, losses=1, aborts=2),
    _three(steps=2, aborts=2, fails=2, overlap=True),
    # and in windows, whose steps run again
    _two(steps=3, window=3, crashes=1, losses=1, aborts=2, fails=1, overlap=True),
    _three(steps=3, window=3, crashes=1, losses=1, aborts=1),
    _three(steps=3, window=2, crashes=1, aborts=1, overlap=True),
    # losses
    _three(steps=2, crashes=1, losses=1, fails=1, overlap=True),
    _job(4, 4, 2, crashes=1, losses=2),
    _job(4, 4, 2, steps=2, crashes=1, losses=2, overlap=True),
    _job(4, 3, 2, crashes=1, losses=1, fails=1),
    _job(5, 2, 1, crashes=1, losses=1),
    # exceptions alone, among more ranks
    _job(4, 3, 2, steps=2, fails=3, overlap=True),
    _job(4, 3, 2, steps=2, aborts=1, fails=2, overlap=True),
    _job(5, 2, 1, aborts=1, fails=2),
    _job(5, 2, 1, steps=2, fails=2, overlap=True),
    _job(6, 2, 1, fails=2),
    # from the fresh start to the close; hosts that come back
    _two(steps=2, crashes=2, losses=1, relaunches=1, fails=1, overlap=True, close=True, fresh=True),
    _three(crashes=2, losses=1, cuts=1),
)
"""For `make model`."""

ROUNDS = (
    # the status
    Entry(
        "status_of_all",
        "The verdict is that of the last round of the status, which has something of all ranks.",
        "After the first round: a rank that has nothing of the one that aborts goes on, and the others wait "
        "for its slices forever.",
        "deadlock",
        _three(aborts=1),
    ),
    Entry(
        "failed_before_first_round",
        "FAILED is said only by a rank that has sent no round of that status.",
        "Ranks reach different verdicts: some go on, and wait for the deltas of a rank that has left.",
        "deadlock",
        _three(fails=1),
    ),
    Entry(
        "rounds_finished_first",
        "A rank that fails after its first round sends the other rounds of that status before it leaves, "
        "unless a peer has died.",
        "A rank that waits for one of those rounds waits forever.",
        "deadlock",
        _three(fails=1),
    ),
    Entry(
        "failed_to_all_rounds",
        "FAILED goes to the out-neighbours of all rounds at once.",
        "A rank that waits for a later round of the failed rank waits forever.",
        "deadlock",
        _three(fails=1),
    ),
    Entry(
        "failed_sent_on",
        "A rank that receives FAILED sends it on in all its later rounds before it leaves.",
        "The out-neighbour of a later round waits forever. From 4 ranks on: with 3, FAILED reaches both "
        "others directly.",
        "deadlock",
        _four(fails=1),
    ),
    Entry(
        "failed_at_once",
        "With overlap, a failed body says FAILED before its rank waits for its own commit thread.",
        "Nothing: that thread ends by itself, and FAILED comes later. The others wait less with it.",
        "",
        _three(steps=3, fails=2, overlap=True),
    ),
    Entry(
        "owed_rounds_first",
        "With overlap, a rank whose body fails leaves when its commit thread is done.",
        "The others wait for rounds of the vote that the thread still owed.",
        "deadlock",
        _two(steps=2, fails=1, overlap=True),
    ),
    # after it
    Entry(
        "mark_for_sizes",
        "A rank that fails after the status, before it has sent its sizes, sends a mark in their place.",
        "A neighbour waits for the sizes forever.",
        "deadlock",
        _two(fails=1),
    ),
    Entry(
        "failed_receives",
        "A rank that fails after the status receives the deltas that others send it, before it leaves.",
        "A neighbour's deltas fill the connection, and it waits forever until they are taken.",
        "deadlock",
        _two(fails=1),
    ),
    Entry(
        "no_to_all_rounds",
        "A rank that fails between the status and `prepared` sends NO to the out-neighbours of all rounds of "
        "the vote at once.",
        "A rank that waits for a later round of the failed rank waits forever.",
        "deadlock",
        _four(fails=1),
    ),
    Entry(
        "no_sent_on",
        "A rank that receives NO sends it on in all its later rounds before it ends.",
        "The out-neighbour of a later round waits forever.",
        "deadlock",
        _four(fails=1),
    ),
    Entry(
        "no_ends_undecided",
        "A rank that has prepared and receives NO undoes nothing: its process ends.",
        "The failed rank is lost, all others are seen to have prepared t, and go forward to it with rows "
        "that are undone.",
        "rows",
        _two(crashes=1, losses=1, fails=1),
    ),
    # messages
    Entry(
        "count_not_label",
        "Messages carry a count of statuses since the start, not the transaction's label.",
        "A rank that fails early in a window says FAILED of a label that no other rank will wait for.",
        "deadlock",
        _two(steps=2, window=2, fails=1),
    ),
    Entry(
        "kind_in_messages",
        "Messages say whether they are of a status or of a vote.",
        "Nothing, as long as they carry the count and those between two ranks arrive in order.",
        "",
        _three(steps=3, fails=2, overlap=True),
    ),
    Entry(
        "count_in_messages",
        "Messages carry a count at all.",
        "Nothing, as long as they say their kind and those between two ranks arrive in order.",
        "",
        _three(steps=3, fails=2, overlap=True),
    ),
    Entry(
        "kind_or_count_in_messages",
        "Messages carry their kind or the count.",
        "FAILED of t + 1, said while the vote on t goes on, is taken for that vote.",
        "mistaken",
        _two(steps=3, fails=2, overlap=True),
    ),
    # abort
    Entry(
        "undo_before_prepared",
        "A rank stores `prepared` for the empty step after it has undone the aborted one.",
        "All have prepared the empty step and die: it is decided, and rows still hold the aborted one.",
        "parity",
        _two(crashes=1, aborts=1),
    ),
    Entry(
        "abort_gathers",
        "An abort brings all slices of the last committed transaction to all ranks.",
        "A rank has its own slices only, and trains with the rest as the aborted step has made it.",
        "dense state",
        _three(aborts=1),
    ),
    Entry(
        "failure_for_slices",
        "A rank that fails after an abort's status, before it has sent its slices, tells all in their place.",
        "The others wait for its slices forever.",
        "deadlock",
        _two(aborts=1, fails=1),
    ),
    Entry(
        "first_abort_in_fold",
        "The status says which is the first aborted step of the transaction, and this one is a transaction "
        "of its own when the steps run again.",
        "Two ranks abort different steps of a window. One ends its next transaction before the first of "
        "them, the other before the second.",
        "out of step",
        _two(steps=3, window=3, aborts=2),
    ),
    Entry(
        "failed_after_going_back",
        "A rank that fails while it undoes several aborted steps says FAILED of the next status: no rank "
        "exchanges deltas of these steps, or votes.",
        "It waits forever for the deltas of others.",
        "deadlock",
        _two(steps=2, window=2, aborts=1, fails=1),
    ),
    # windows
    Entry(
        "window_in_fold",
        "The smallest window that any rank can take goes round with the status, and is the next one's size.",
        "One rank ends its window while another goes on with the same one.",
        "out of step",
        _two(steps=4, window=2, choices=1),
    ),
    Entry(
        "halved_window_kept",
        "A rank whose journal runs out fails the window, and stores half its size in its arena; a start goes "
        "on with the smallest that is stored.",
        "The window is run again at the same size, and fails again.",
        "no progress",
        _two(steps=2, window=2, crashes=1, shortages=2),
    ),
    Entry(
        "newer_from_journal",
        "With overlap, the deltas of t are laid out beside the next body, and take a row that the next "
        "transaction has journalled from that journal.",
        "They say of the rows that both change what the next one made of them.",
        "parity",
        _two(steps=2, overlap=True),
    ),
    # slices
    Entry(
        "slices_with_stripes",
        "The holders of a slice are r + 1 consecutive members of one stripe class.",
        "With holders N / (r + 1) apart: two ranks are lost that have no stripe in common, and a slice with "
        "them.",
        "dense state",
        _four(crashes=1, losses=2),
    ),
    Entry(
        "slots_by_label",
        "The slot that is written is the one whose label is not the last committed transaction.",
        "Taken from whether the label is odd: with windows of 2 no label is, and the slot that all go back "
        "to is overwritten.",
        "dense state",
        _two(steps=4, window=2, crashes=1),
    ),
    Entry(
        "slots_by_arena",
        "Which one that is, the labels in the arena say, and no count of the process.",
        "After a restart the count begins again, and the slot that all go back to is overwritten.",
        "dense state",
        _two(steps=2, crashes=2),
    ),
    Entry(
        "slice_label_last",
        "A slot's label is stored after its bytes.",
        "Nothing: a start reads the slot of T only, and `prepared` comes after both. It lets damage be "
        "noticed.",
        "",
        _two(steps=2, crashes=2, losses=1),
    ),
    Entry(
        "slices_before_prepared",
        "A holder writes its slices before it stores `prepared`.",
        "All have prepared t and die: t is decided, and its dense state is nowhere.",
        "dense state",
        _two(crashes=1),
    ),
    Entry(
        "settled_before_slots",
        "With overlap, slices of t are written when t - 1 is committed here.",
        "The slot that is overwritten holds t - 1, which is prepared everywhere.",
        "dense state",
        _two(steps=2, crashes=1, overlap=True),
    ),
    Entry(
        "slices_before_next_body",
        "With overlap, slices of t are written before the next body, on the thread that trains.",
        "They hold dense state that the next body has changed.",
        "dense state",
        _two(steps=2, crashes=1, overlap=True),
    ),
    Entry(
        "slices_before_live",
        "A replacement rank has written its slices when it says LIVE.",
        "It counts as a holder, and holds nothing.",
        "dense state",
        _two(crashes=1, losses=1),
    ),
    Entry(
        "all_fetch_slices",
        "Every restarted rank fetches all slices, not only a replacement.",
        "A rank whose memory survived has its own slices only, and trains with the rest as the script made "
        "it.",
        "dense state",
        _three(crashes=1),
    ),
)
"""The rules of agreement, windows and slices."""
