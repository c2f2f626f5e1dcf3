"""What each rule says, what happens without it, and the smallest job in which the model shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .moves import Moves
from .rules import ALL, Config
from .search import Result, Searched, search
from .starts import Starts


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of the table.

    Attributes:
        rule: a field of `Rules`.
        says: the rule.
        without: what happens without it, as in the shortest counterexample; or why nothing does.
        kind: how the counterexample ends, up to its colon; empty where there is none.
        config: where to look.
    """

    rule: str
    says: str
    without: str
    kind: str
    config: Searched

    def search(self) -> Result:
        """Switches the rule off and looks."""
        return search(self.config, ALL.without(self.rule))

    def text(self) -> str:
        """The line of the table, but for what was found."""
        return f"| `{self.rule}` | {self.says} | {self.without} |"


def _two(steps: int = 1, **bounds: int | bool) -> Config:
    return Config(**{"n": 2, "k": 1, "size": 2, "steps": steps, "crashes": 1, **bounds})


def _three(**bounds: int | bool) -> Config:
    return Config(**{"steps": 1, "crashes": 1, **bounds})


ENTRIES = (
    # a step
    Entry(
        "count_before_label",
        "Arming empties the journal first, then gives it the label.",
        "A crash between the two: the old records of the last step, under the label of the next one, are "
        "copied over rows that were committed.",
        "rows",
        _two(steps=2),
    ),
    Entry(
        "capture_first",
        "The old record is in the journal before the row changes.",
        "A crash between the two: the row stays changed, and its step is not taken.",
        "rows",
        _two(),
    ),
    Entry(
        "entry_before_count",
        "The old record is written first, then the journal's count.",
        "A crash between the two: undo copies whatever lay there before over the row.",
        "rows",
        _two(),
    ),
    Entry(
        "inbox_before_prepared",
        "`prepared` is stored when the inbox is complete.",
        "All have prepared t and die: t is decided, and one keeper doesn't have its deltas.",
        "no inbox",
        _two(),
    ),
    Entry(
        "no_undo_after_prepared",
        "A rank that has prepared undoes nothing by itself.",
        "One gives up waiting for the votes and undoes, another has all votes and has committed: the arenas "
        "contradict each other, and every start refuses.",
        "false refusal",
        _two(fails=1),
    ),
    Entry(
        "agreement",
        "Parity changes only when all are known to have prepared.",
        "One has committed t, another dies before it has prepared it: no transaction is left on which all "
        "can stand.",
        "false refusal",
        _two(),
    ),
    Entry(
        "agreement_of_all",
        "Parity changes after the last round of the vote, which has something of all ranks.",
        "After the first round: a rank commits t while another, of which that round has nothing, dies before "
        "it has prepared t.",
        "false refusal",
        _three(),
    ),
    Entry(
        "parity_saved_first",
        "The old words of a parity row are in the journal before the row changes.",
        "A crash while the row changes: the redo has nothing to begin with.",
        "parity",
        _two(),
    ),
    Entry(
        "row_before_change",
        "The journal names the row before the row changes.",
        "A crash while the row changes: the redo adds the delta to what is half changed.",
        "parity",
        _two(),
    ),
    Entry(
        "rows_alternate",
        "The old words of a row go to the place that does not hold those of the row before.",
        "A crash before the journal names the next row: the redo copies that one's old words over this one.",
        "parity",
        _three(),
    ),
    Entry(
        "row_void_before_label",
        "The parity journal names no row before it gets a new label.",
        "A crash between the two: the redo begins with the row that the last transaction ended with.",
        "parity",
        _two(steps=2),
    ),
    Entry(
        "committed_after_apply",
        "`committed` is stored when parity stands on t.",
        "A crash between the two: no rank redoes the parity, which stays behind the rows.",
        "parity",
        _two(),
    ),
    Entry(
        "committed_voids_journals",
        "A row journal with a label that is not above T is never undone.",
        "All have prepared t and die: t is decided, and rows are copied back from its journal.",
        "rows",
        _two(),
    ),
    # the decision
    Entry(
        "least_prepared",
        "T is the smallest `prepared`, not the smallest `committed`.",
        "One has committed t, another has only prepared it: no transaction is left on which all can stand.",
        "false refusal",
        _two(),
    ),
    Entry(
        "prepared_lowered_first",
        "`prepared` := T is stored before the first row is undone.",
        "A second crash after the undo, and the rank that had not prepared t is lost: now all are seen to "
        "have prepared t, and go forward to it with rows that are of t - 1.",
        "rows",
        _two(crashes=2, losses=1),
    ),
    Entry(
        "redo_restores_first",
        "A redo copies the old words of the row that the journal names back, and begins with that row.",
        "A crash while the row changes: the redo adds the delta to what is half changed.",
        "parity",
        _two(),
    ),
    Entry(
        "all_decided_before_rebuild",
        "Barrier between undo and redo, and the rebuild.",
        "A replacement rank is rebuilt from a survivor that still has to undo or redo: garbage.",
        "parity",
        _two(losses=1),
    ),
    Entry(
        "rebuilding_is_lost",
        "REBUILDING counts as lost.",
        "A crash in the rebuild: the replacement rank's arena, which holds nothing, takes part in the "
        "decision.",
        "false refusal",
        _two(losses=1),
    ),
    Entry(
        "live_last",
        "LIVE is the last store of a rebuild.",
        "A crash between the two: the replacement rank's arena, which holds nothing, is taken for a "
        "survivor's.",
        "half-rebuilt",
        _two(losses=1),
    ),
    Entry(
        "all_live_before_training",
        "Barrier between recovery and training.",
        "Nothing: a rank that trains ahead can't prepare without the status of all, which they send after "
        "their recovery.",
        "",
        _three(losses=1),
    ),
    # a fresh start
    Entry(
        "all_filled_before_live",
        "Barrier between `prepared` = 0 and LIVE.",
        "A crash when one rank is LIVE and the others hold nothing: more than r are lost, of a job that has "
        "not begun.",
        "false refusal",
        _three(fresh=True),
    ),
    Entry(
        "initial_beside_live",
        "INIT and prepared counts as a survivor's beside a LIVE arena.",
        "A crash when the first rank is LIVE: more than r are lost, of a job that has lost nothing.",
        "false refusal",
        _three(fresh=True),
    ),
    # membership
    Entry(
        "stale_is_lost",
        "An arena whose `joined` is below the highest `opened` counts as lost.",
        "A host is cut off, its rank is rebuilt elsewhere, and it comes back: two arenas of one rank, "
        "and no rule can tell which one counts.",
        "false refusal",
        _two(cuts=1),
    ),
    Entry(
        "all_joined_before_opened",
        "Barrier between `joined` and `opened`.",
        "A crash when one rank has opened what the others have not joined: they all look stale.",
        "false refusal",
        _three(),
    ),
    Entry(
        "opened_before_changes",
        "`opened` is stored before anything else changes.",
        "A host is cut off, its rank is rebuilt elsewhere, and it comes back before `opened` says that the "
        "others went on: two arenas of one rank.",
        "false refusal",
        _two(crashes=2, cuts=1),
    ),
    Entry(
        "generation_by_clock",
        "A generation's number is at least the clock's: a new store has not counted.",
        "A rank joins alone and is cut off, the job is launched again, its first start takes the same "
        "number, "
        "and the host comes back: one generation with two ids, which every start refuses.",
        "false refusal",
        _two(crashes=2, cuts=1, relaunches=1),
    ),
    Entry(
        "store_counts_generations",
        "It is higher than every number that was given out over the same store.",
        "A rank joins alone and is cut off, the clock of the next start's leader is behind, and the host "
        "comes back: it has joined a higher number than the one that the others have opened.",
        "false refusal",
        _two(crashes=2, cuts=1, skew=True),
    ),
    Entry(
        "id_void_while_joining",
        "The generation's id says unknown while `joined` changes.",
        "A crash between the two stores: it looks like one generation with two ids.",
        "false refusal",
        _two(),
    ),
    Entry(
        "started_mark",
        "The store says that the job has started.",
        "All memory is lost: the job silently begins again at step 0.",
        "restart from 0",
        _two(crashes=0, losses=2),
    ),
    Entry(
        "mark_tells_generation",
        "The mark in the store is the generation that was opened, and staleness goes by it as well.",
        "A host is cut off, the job goes on without it, all other memory is lost, and it comes back: it "
        "looks like the only survivor, and the job goes back to where it was cut off.",
        "stale",
        _two(crashes=2, losses=2, cuts=1),
    ),
    Entry(
        "rebuilding_is_evidence",
        "A REBUILDING arena also shows that the job had started.",
        "All memory but a replacement rank's is lost, and the store is new: the job silently begins "
        "again at step 0.",
        "restart from 0",
        _two(losses=2, relaunches=1),
    ),
    # overlap
    Entry(
        "two_row_journals",
        "With overlap, a step arms the row journal that the undecided step before does not need.",
        "A crash when one journal is armed again: nothing is left from which the undecided step is undone.",
        "rows",
        _two(steps=2, overlap=True),
    ),
    Entry(
        "settled_before_inbox",
        "The inbox takes deltas of t when t - 1 is committed here.",
        "All have prepared t - 1 and die: it is decided, and its deltas are overwritten.",
        "no inbox",
        _two(steps=2, overlap=True),
    ),
    Entry(
        "settled_before_undo",
        "An exception undoes nothing while the other thread is at work on the step before.",
        "The rows of that step are undone as well, and then it is prepared.",
        "rows",
        _two(steps=2, overlap=True, fails=1),
    ),
    Entry(
        "newest_undone_first",
        "Of two row journals above T, that with the higher label is undone first.",
        "Rows that both steps changed end as they were between the two.",
        "rows",
        _two(steps=2, overlap=True),
    ),
    Entry(
        "undone_is_void",
        "A row journal is void when it is undone, before an older one is.",
        "Two crashes in the same step, each with the other journal: both keep its label, and the next start "
        "has none to arm.",
        "no journal",
        _two(overlap=True, crashes=2),
    ),
    Entry(
        "settled_before_close",
        "A close waits until the last step is committed here.",
        "The job is finished, and its last step is not.",
        "closed early",
        _two(overlap=True, crashes=0, close=True),
    ),
    # which headers count
    Entry(
        "unsettled_is_silent",
        "An INIT arena has no say in what was opened before another arena of its fill is LIVE or REBUILDING.",
        "All hosts are away, a resume is killed half-way, and they come back: their memory looks stale, and "
        "committed steps are thrown away.",
        "false refusal",
        Starts(crashes=1, cuts=2, resumes=1),
    ),
    Entry(
        "initial_beside_rebuilding",
        "INIT and prepared counts as a survivor's beside a REBUILDING arena of its fill as well.",
        "The first rank that was LIVE is lost while another one is rebuilt: the last survivor doesn't count.",
        "false refusal",
        Starts(n=3, k=1, size=3, steps=1, crashes=2, losses=2, fresh=True),
    ),
    Entry(
        "prepared_is_evidence",
        "An INIT arena that was prepared with a transaction above 0 shows that the job had started.",
        "A resume is killed before its first LIVE, nothing else is left, and the next launch passes no "
        "`resume=`: the job silently begins again at step 0.",
        "restart from 0",
        Starts(losses=1, cuts=1, relaunches=1, resumes=1),
    ),
    Entry(
        "finished_not_stale",
        "A tombstone counts only if it is not stale, and no later history has started.",
        "A replacement host holds a tombstone of an earlier run of that name: the job counts as finished.",
        "false finish",
        Starts(crashes=1, losses=1, tombstones=1),
    ),
    Entry(
        "fill_of_donor",
        "A replacement has its donor's fill.",
        "A crash in the first rebuild: the replacement looks like a later history, beside which the "
        "survivors are stale.",
        "false refusal",
        Starts(crashes=1, losses=1),
    ),
    Entry(
        "mark_before_changes",
        "A recovery sets the started mark when all have joined, before the first `opened`.",
        "Those who went on are cut off before the mark is set, and a start of the one that had been cut off "
        "before joins a higher generation: when they are back, neither can go on from the other.",
        "false refusal",
        Starts(losses=1, cuts=2),
    ),
    Entry(
        "other_format_stops",
        "An arena of another format stops the start.",
        "It counts as lost while its memory is there: too many losses, or a resume from an old checkpoint.",
        "false refusal",
        Starts(crashes=1, losses=1, formats=1),
    ),
    Entry(
        "kept_until_superseded",
        "Before a start's own arenas are LIVE, only those are removed that no later start can use.",
        "The only rank that is LIVE is away, and a fresh start removes what others had prepared beside it.",
        "thrown away",
        Starts(crashes=1, cuts=1, fresh=True),
    ),
    # the end
    Entry(
        "barrier_before_finished",
        "Barrier before FINISHED.",
        "One rank marks the job as finished while another is in the last step, which no rank will end.",
        "closed early",
        _two(crashes=0, close=True),
    ),
    Entry(
        "tombstone",
        "FINISHED is stored before arenas are removed.",
        "A crash while they are removed, and the store is new: what is left looks like a job with too many "
        "losses.",
        "false refusal",
        _three(relaunches=1, close=True),
    ),
    Entry(
        "finished_mark",
        "The store says that the job is finished.",
        "A start after the end: the job seems to have lost all its memory.",
        "false refusal",
        _two(close=True),
    ),
    Entry(
        "all_finished_before_removal",
        "Barrier between FINISHED and the removal.",
        "A crash when some arenas are removed and others still LIVE, and the store is new: too many losses.",
        "false refusal",
        _three(relaunches=1, close=True),
    ),
    # a move to another number of ranks
    Entry(
        "old_join_the_move",
        "All old arenas that survived join and open the move's generation before one is undone or redone.",
        "A host is away, T is decided without it, and it comes back after a crash: the others have committed "
        "what it has not prepared.",
        "false refusal",
        Moves(crashes=2, cuts=1),
    ),
    Entry(
        "decided_before_copy",
        "Barrier between undo and redo on old arenas, and the first row that is copied.",
        "A row is copied from an arena that still has to undo or redo, or is decoded with its parity: "
        "garbage.",
        "rows",
        Moves(size=2, crashes=1),
    ),
    Entry(
        "live_before_join",
        "An INIT arena that survived goes LIVE before it joins a generation.",
        "The only new arena that is LIVE is lost in the next start, after it has opened: the others don't "
        "count, and beside the mark the old ones are stale.",
        "false refusal",
        Moves(size=2, crashes=2, cuts=1),
    ),
    Entry(
        "leftovers_after_open",
        "What an earlier move left is removed when all old arenas have opened this one.",
        "The only new arena that was LIVE is away, the others are removed, and it comes back: beside it the "
        "old ones are stale.",
        "false refusal",
        Moves(size=2, crashes=2, cuts=1),
    ),
    Entry(
        "new_fill_is_higher",
        "New arenas begin a history of g + 1, and old ones join g.",
        "A crash when the first new arena is LIVE: old and new ones are two histories, and no rule can tell "
        "which one counts.",
        "false refusal",
        Moves(size=2, crashes=1),
    ),
    Entry(
        "joined_is_not_opened",
        "Of two histories, the higher fill counts, if no arena of the other has opened its generation.",
        "The only new arena that was LIVE is away, one old arena has joined the next start, and it comes "
        "back: both look current.",
        "false refusal",
        Moves(size=2, crashes=2, cuts=1),
    ),
    Entry(
        "all_moved_before_live",
        "Barrier between `prepared` = T of all new arenas and the first LIVE.",
        "A crash when one new arena is LIVE and another holds nothing: beside it the old ones are stale.",
        "false refusal",
        Moves(size=2, crashes=1),
    ),
    Entry(
        "old_until_all_live",
        "Old arenas are removed when all new ones are LIVE.",
        "A crash when all new ones are prepared, none is LIVE, and one old one is removed, and another host "
        "is lost: too little is left of either layout.",
        "false refusal",
        Moves(size=2, crashes=1, losses=1),
    ),
)

HEAD = """\
| rule | says | without it | shortest way there |
|---|---|---|---|"""


def table(entries: Iterable[Entry] = ENTRIES) -> Iterable[str]:
    """The table of docs/protocol.md, line by line, each after its search."""
    yield HEAD
    for entry in entries:
        result = entry.search()
        found = f"{len(result.trace)} transitions" if result.broken else f"none in {result.states:,} states"
        yield f"{entry.text()} N={entry.config.size}: {found} |"
