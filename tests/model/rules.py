"""The rules of the protocol, each of which can be switched off, and where to look for what happens then."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which rules hold; all of them in ecemb."""

    count_before_label: bool = True
    capture_first: bool = True
    entry_before_count: bool = True
    inbox_before_prepared: bool = True
    no_undo_after_prepared: bool = True
    agreement: bool = True
    agreement_of_all: bool = True
    parity_saved_first: bool = True
    row_void_before_label: bool = True
    row_before_change: bool = True
    rows_alternate: bool = True
    redo_restores_first: bool = True
    committed_after_apply: bool = True
    committed_voids_journals: bool = True
    least_prepared: bool = True
    prepared_lowered_first: bool = True
    rebuilding_is_lost: bool = True
    live_last: bool = True
    initial_beside_live: bool = True
    all_filled_before_live: bool = True
    all_decided_before_rebuild: bool = True
    all_live_before_training: bool = True
    stale_is_lost: bool = True
    all_joined_before_opened: bool = True
    opened_before_changes: bool = True
    generation_by_clock: bool = True
    store_counts_generations: bool = True
    id_void_while_joining: bool = True
    started_mark: bool = True
    mark_tells_generation: bool = True
    rebuilding_is_evidence: bool = True
    barrier_before_finished: bool = True
    tombstone: bool = True
    finished_mark: bool = True
    all_finished_before_removal: bool = True
    two_row_journals: bool = True
    settled_before_slots: bool = True
    settled_before_inbox: bool = True
    settled_before_undo: bool = True
    settled_before_close: bool = True
    newest_undone_first: bool = True
    undone_is_void: bool = True
    mark_before_changes: bool = True
    unsettled_is_silent: bool = True
    initial_beside_rebuilding: bool = True
    prepared_is_evidence: bool = True
    finished_not_stale: bool = True
    fill_of_donor: bool = True
    other_format_stops: bool = True
    kept_until_superseded: bool = True
    # a move to another number of ranks
    old_join_the_move: bool = True
    decided_before_copy: bool = True
    live_before_join: bool = True
    leftovers_after_open: bool = True
    new_fill_is_higher: bool = True
    joined_is_not_opened: bool = True
    all_moved_before_live: bool = True
    old_until_all_live: bool = True
    # agreement
    status_of_all: bool = True
    failed_before_first_round: bool = True
    rounds_finished_first: bool = True
    failed_to_all_rounds: bool = True
    failed_sent_on: bool = True
    failed_at_once: bool = True
    owed_rounds_first: bool = True
    mark_for_sizes: bool = True
    failed_receives: bool = True
    no_to_all_rounds: bool = True
    no_sent_on: bool = True
    undo_before_prepared: bool = True
    abort_gathers: bool = True
    failure_for_slices: bool = True
    first_abort_in_fold: bool = True
    failed_after_going_back: bool = True
    no_ends_undecided: bool = True
    count_not_label: bool = True
    kind_in_messages: bool = True
    count_in_messages: bool = True
    kind_or_count_in_messages: bool = True
    window_in_fold: bool = True
    halved_window_kept: bool = True
    newer_from_journal: bool = True
    # and slices
    slices_with_stripes: bool = True
    slots_by_label: bool = True
    slots_by_arena: bool = True
    slice_label_last: bool = True
    slices_before_prepared: bool = True
    slices_before_next_body: bool = True
    slices_before_live: bool = True
    all_fetch_slices: bool = True
    # a rank that is rebuilt beside training
    ensured_before_lookup: bool = True
    bytes_before_bit: bool = True
    stored_where_unset: bool = True
    asked_when_settled: bool = True
    dropped_before_prepared: bool = True
    journal_first: bool = True
    looked_at_again: bool = True
    attempt_looked_at: bool = True
    no_apply_begun: bool = True
    holders_are_whole: bool = True
    inbox_keeps_all: bool = True
    live_when_whole: bool = True
    rebuilding_counts_as_lost: bool = True
    # parity rows in lanes
    lines_before_lanes: bool = True
    lanes_void_first: bool = True
    lanes_void_before_label: bool = True
    whole_void_before_label: bool = True
    lane_places: bool = True
    lane_rows_apart: bool = True
    lanes_done_before_whole: bool = True
    whole_before_row: bool = True
    whole_rows_stay: bool = True
    lanes_end_first: bool = True

    def without(self, *names: str) -> Rules:
        """These rules, with some switched off."""
        return dataclasses.replace(self, **dict.fromkeys(names, False))


ALL = Rules()

HEARD = (
    "failed_before_first_round",
    "rounds_finished_first",
    "failed_to_all_rounds",
    "failed_sent_on",
    "failed_at_once",
    "owed_rounds_first",
    "mark_for_sizes",
    "failed_receives",
    "failed_after_going_back",
    "no_to_all_rounds",
    "no_sent_on",
    "count_not_label",
    "kind_in_messages",
    "count_in_messages",
    "kind_or_count_in_messages",
    "window_in_fold",
    "halved_window_kept",
    "newer_from_journal",
)
"""Rules without which a start reads no more of an arena than with them."""

BUDGETS = ("crashes", "losses", "cuts", "aborts", "relaunches", "fails", "shortages", "choices")
"""What may happen so often in a search, by the fields of its `Config`."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What is searched: a job, and how much may happen to it.

    Attributes:
        n: blocks in a stripe.
        k: data blocks in a stripe.
        size: ranks.
        steps: steps that are trained.
        crashes: how often the job's processes die, any of them at any moment each time.
        losses: ranks whose memory goes, in all.
        cuts: hosts that are cut off in all; each may come back at any later start, with what it had.
        aborts: votes to abort, in all.
        relaunches: how often the job is launched again, with a new store.
        overlap: whether a step is decided beside the next one's body.
        apart: whether rows change apart from the arena, and come there beside the next one's body.
        close: whether the job is closed after the last step.
        fresh: whether the search begins before the fresh start, or with all ranks LIVE at transaction 0.
        skew: whether a start's leader may have a clock that is behind all earlier leaders'.
        window: steps of a transaction at most.
        saves: steps after which all ranks drain an open window.
        fails: exceptions, in all, but for those that follow from another.
        shortages: how often a journal runs out in a window, in all.
        choices: how often a rank can take a smaller window only, in all.
    """

    n: int = 3
    k: int = 2
    size: int = 3
    steps: int = 2
    crashes: int = 2
    losses: int = 0
    cuts: int = 0
    aborts: int = 0
    relaunches: int = 0
    overlap: bool = False
    apart: bool = False
    close: bool = False
    fresh: bool = False
    skew: bool = False
    window: int = 1
    saves: tuple[int, ...] = ()
    fails: int = 0
    shortages: int = 0
    choices: int = 0

    def __str__(self) -> str:
        job = f"N={self.size} n={self.n} k={self.k}, {self.steps} steps"
        counts = [f"{getattr(self, name)} {name}" for name in BUDGETS if getattr(self, name)]
        if self.window > 1:
            job += f", windows of {self.window}"
        options = (
            ("overlap", "overlap"),
            ("apart", "rows apart"),
            ("saves", "saves"),
            ("close", "close"),
            ("fresh", "fresh start"),
        )
        words = [text for name, text in options if getattr(self, name)]
        return ", ".join([job, *counts, *words, *(["clocks apart"] if self.skew else [])])
