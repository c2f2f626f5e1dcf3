"""Who is ahead, over the whole range of every input; and what it takes to turn that.

Owns: `judge`, which compares all methods on the same faults. The kind that trains most of the time where all
inputs are likeliest is ahead *for certain* if it is also ahead of each other kind where the inputs stand
worst for it against that kind. Worst is found by moving each group of inputs to either end of its range by
itself, and then all groups together to their worse ends.

Must not know: which jobs are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from bench.questions.simulate import step_cost
from bench.questions.simulate.faults import Fault
from bench.questions.simulate.inputs import End, Inputs
from bench.questions.simulate.methods import KINDS, kind, methods
from bench.questions.simulate.training import train
from ecemb.tools.job import Job

CANNOT_TELL = "cannot tell"
ALL, EXACT, LEAN = PANELS = ("all", "that lose no samples", "that lose no samples and keep no second copy")
"""Of the map: all methods; those that lose no samples; of these, those whose memory holds neither a second
copy of the tables nor one of all that a save has."""
COPIES = ("full, async", "Check-N-Run", "snapshots", "live copies")
"""How the names of those begin that keep one, some while they save."""
OURS = ("ecemb", "live copies")


@dataclass(frozen=True)
class Group:
    """Inputs that stand at the same end together.

    Attributes:
        inputs: Their names.
        kinds: Of the methods that depend on them; others need not be tried again.
    """

    inputs: tuple[str, ...]
    kinds: tuple[str, ...] = KINDS


GROUPS: Mapping[str, Group] = {
    "ecemb's cost of a step": Group(
        (*(f"ecemb: {name}" for name in step_cost.TERMS), "ecemb: GPU host"), OURS
    ),
    "steps that ecemb runs again": Group(("undecided", "rows by window", "commit by ranks"), OURS),
    "ecemb's recovery and messages": Group(("added to a restart", "rebuild", "round trip"), OURS),
    "copies' cost of a step": Group(tuple(f"copies: {name}" for name in step_cost.TERMS), OURS),
    "what CPR does in each step": Group(("CPR: step",), ("CPR",)),
    "CPR's PLS target": Group(("CPR's PLS target",), ("CPR",)),
    "Check-N-Run's saves": Group(
        (
            *("Check-N-Run's copy", "Check-N-Run's volume", "Check-N-Run's storage", "Check-N-Run: step"),
            "rows by interval",
        ),
        ("Check-N-Run", "snapshots"),
    ),
    "snapshots' copy": Group(("snapshots' copy", "encode"), ("snapshots",)),
    "idle network": Group(("idle network",), ("snapshots",)),
    "copy to memory": Group(("copy", "put back")),
    "between durable saves": Group(("between durable saves",)),
    "storage": Group(("storage",)),
    "network": Group(("network",)),
    "restart": Group(("restart",)),
    "replace a host": Group(("replace a host",)),
    "touched rows": Group(("touched rows",)),
}
ENDS: tuple[End, End] = ("cheap", "dear")
Ettrs = dict[str, float]


@dataclass(frozen=True)
class Case:
    """A job, and the faults that strike it.

    Attributes:
        job: The job.
        given: Its inputs.
        struck: Faults of each of several trainings.
        hours: How long each of them runs.
    """

    job: Job
    given: Inputs
    struck: Sequence[Sequence[Fault]]
    hours: float


@dataclass(frozen=True)
class Verdict:
    """Who is ahead in a case.

    Attributes:
        ettrs: Method -> ETTR where all inputs are likeliest.
        ranges: Method -> the least and the most where one group of inputs is at an end.
        loses: Methods that lose samples.
        certain: Panel -> the kind that is ahead for certain, or `CANNOT_TELL`.
        candidates: Panel -> kinds that may be ahead, the likeliest first.
        moved: (group, end) -> panel -> the kind that is ahead then.
    """

    ettrs: Ettrs
    ranges: Mapping[str, tuple[float, float]]
    loses: frozenset[str]
    certain: Mapping[str, str]
    candidates: Mapping[str, Sequence[str]]
    moved: Mapping[tuple[str, End], Mapping[str, str]]

    def panel(self, among: str) -> Ettrs:
        """Method -> ETTR, of the methods of a panel."""
        return _panel(self.ettrs, self.loses, among)


def judge(case: Case) -> Verdict:
    """Compares all methods; see the module."""
    likeliest, loses = _ettrs(case, {})
    moved: dict[tuple[str, End], Ettrs] = {}
    for name, group in GROUPS.items():
        if any(one in case.given for one in group.inputs):
            for end in ENDS:
                found, more = _ettrs(case, {name: end}, group.kinds)
                moved[name, end] = likeliest | found
                loses |= more
    certain: dict[str, str] = {}
    candidates: dict[str, Sequence[str]] = {}
    for among in PANELS:
        kinds = _best(_panel(likeliest, loses, among))
        first = max(kinds, key=lambda name: kinds[name])
        near = [
            other for other in kinds if other != first and _reaches(case, moved, loses, among, first, other)
        ]
        near.sort(key=lambda name: -kinds[name])
        certain[among] = CANNOT_TELL if near else first
        candidates[among] = [first, *near]
    spread = {
        name: (min(found), max(found))
        for name, value in likeliest.items()
        if (found := [value, *(one[name] for one in moved.values() if name in one)])
    }
    leaders = {
        at: {among: leader(_panel(one, loses, among)) for among in PANELS} for at, one in moved.items()
    }
    return Verdict(likeliest, spread, frozenset(loses), certain, candidates, leaders)


def leader(ettrs: Ettrs) -> str:
    """The kind of the method with the highest ETTR."""
    return kind(max(ettrs, key=lambda name: ettrs[name]))


def _reaches(
    case: Case,
    moved: Mapping[tuple[str, End], Ettrs],
    loses: set[str],
    among: str,
    first: str,
    other: str,
) -> bool:
    """Whether a kind is as good as the first one where inputs stand worst for the first one against it."""
    worst: dict[str, End] = {}
    for group in dict.fromkeys(group for group, _ in moved):
        ahead: dict[End, float] = {}
        for end in ENDS:
            best = _best(_panel(moved[group, end], loses, among))
            ahead[end] = best[first] - best[other]
        if ahead["cheap"] != ahead["dear"]:
            worst[group] = min(ENDS, key=lambda end: ahead[end])
    found, _ = _ettrs(case, worst, (first, other))
    best = _best(_panel(found, loses, among))
    return best[other] >= best[first]


def _ettrs(case: Case, ends: Mapping[str, End], kinds: Sequence[str] = KINDS) -> tuple[Ettrs, set[str]]:
    """Method -> mean ETTR with groups at ends of their ranges; and the methods that lose samples."""
    given = {**case.given}
    for group, end in ends.items():
        given |= {name: given[name].at(end) for name in GROUPS[group].inputs if name in given}
    found: Ettrs = {}
    loses: set[str] = set()
    for method in methods(case.job, given):
        if kind(method.name) in kinds:
            outcomes = [
                train(method, faults, case.hours, hosts=case.job.hosts, ranks=case.job.ranks)
                for faults in case.struck
            ]
            found[method.name] = mean(outcome.ettr for outcome in outcomes)
            loses |= {method.name} if method.back == "failed" else set()
    return found, loses


def _panel(ettrs: Ettrs, loses: set[str] | frozenset[str], among: str) -> Ettrs:
    left = {name: ettr for name, ettr in ettrs.items() if among == ALL or name not in loses}
    return {name: ettr for name, ettr in left.items() if among != LEAN or not name.startswith(COPIES)}


def _best(ettrs: Ettrs) -> Ettrs:
    """Kind -> the highest ETTR of its methods."""
    found: Ettrs = {}
    for name, ettr in ettrs.items():
        found[kind(name)] = max(ettr, found.get(kind(name), 0.0))
    return found
