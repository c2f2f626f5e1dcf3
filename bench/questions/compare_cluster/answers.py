"""What the ranks of a launch have left: ledgers, marks, and what they ended with.

Clocks of hosts are compared by `time.time()`, which NTP keeps alike, as far as it does.

Must not know: methods, how anything was launched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from baselines.method import Promise
from bench.harness.result import WrongResult
from bench.methods.ledger import Account, Life, account
from bench.questions.compare_cluster.rank import Order
from bench.questions.compare_cluster.steps import AFTER, SAVES
from bench.questions.compare_cluster.watched import FOLLOWED, PLAIN, PLAIN_END, SAVE, STALLED, WRITTEN

Mark = Mapping[str, Any]


@dataclass(frozen=True)
class Answers:
    """Of one launch.

    Attributes:
        order: What it was.
        ends: What each rank came to at its end.
        noted: What it had come to after `Order.noted` steps; empty without.
        accounts: Of each rank, in seconds since 1970.
        marks: Of each rank, by name.
        hosts: Of each host, what `watched.host` says.
        window: Steps that ecemb commits together at last; 1 for others.
    """

    order: Order
    ends: Sequence[Mapping[str, Any]]
    noted: Sequence[Mapping[str, Any]]
    accounts: Sequence[Account]
    marks: Sequence[Mapping[str, Mark]]
    hosts: Sequence[Mapping[str, Any]]
    window: int

    @property
    def step_wall_s(self) -> float:
        """Of a plain step, on the slowest rank."""
        return self._most(PLAIN, PLAIN_END, "wall_s") / self.order.plain

    @property
    def step_cpu_s(self) -> float:
        """Of a plain step, of all ranks."""
        return sum(self._each(PLAIN, PLAIN_END, "cpu_s")) / self.order.plain

    @property
    def link_bytes(self) -> float:
        """That a host sends over its interfaces in a plain step, on average."""
        sent = [
            sum(one[PLAIN_END]["links"].values()) - sum(one[PLAIN]["links"].values())
            for one in self.marks
            if one[PLAIN]["links"]
        ]
        return float(np.mean(sent)) / self.order.plain if sent else math.nan

    @property
    def sent_bytes(self) -> float:
        """That a rank sends for protection in a plain step, on average."""
        return float(np.mean(self.spent(PLAIN, PLAIN_END, "sent_bytes"))) / self.order.plain

    @property
    def table_bytes(self) -> int:
        """Of a rank's tables and their optimizer state, of the rank with most."""
        return max(end["table_bytes"] for end in self.ends)

    def spent(self, begin: str, end: str, what: str) -> list[float]:
        """Of each rank, what a method's costs rise by between two marks."""
        return [one[end]["costs"][what] - one[begin]["costs"][what] for one in self.marks]

    def saves(self) -> list[Mapping[str, float]]:
        """Of each save: how long training stood still, what it lost, when it was whole; written and sent."""
        found: list[Mapping[str, float]] = []
        for number in range(SAVES) if any(f"{SAVE} 0" in one for one in self.marks) else ():
            save, stalled, followed, written = (
                f"{name} {number}" for name in (SAVE, STALLED, FOLLOWED, WRITTEN)
            )
            stall_s = max(0.0, self._most(save, stalled, "wall_s") - self.step_wall_s)
            lost_s = self._most(save, followed, "wall_s") - AFTER * self.step_wall_s
            found.append(
                {
                    "stall_s": stall_s,
                    "lost_s": max(stall_s, lost_s),
                    "written_s": self._most(save, written, "wall_s"),
                    "written_bytes": float(np.mean(self.spent(save, written, "written_bytes"))),
                    "sent_bytes": float(np.mean(self.spent(save, written, "sent_bytes"))),
                }
            )
        return found

    def is_as(self, others: Sequence[Mapping[str, Any]]) -> bool:
        """Whether all ranks have ended with the bytes of these ends."""
        return [end["digest"] for end in self.ends] == [end["digest"] for end in others]

    def _each(self, begin: str, end: str, what: str) -> list[float]:
        return [one[end][what] - one[begin][what] for one in self.marks]

    def _most(self, begin: str, end: str, what: str) -> float:
        return max(self._each(begin, end, what))


def read(order: Order, ranks: int) -> Answers:
    """What a launch has left in its folder."""
    notes = [_notes(order, rank) for rank in range(ranks)]
    clocks = [{one["life"]: one["clock_s"] for one in of_rank if "clock_s" in one} for of_rank in notes]
    windows = [one["window"] for of_rank in notes for one in of_rank if "window" in one]
    hosts = {one["host"]: one for of_rank in notes for one in of_rank if "host" in one}
    return Answers(
        order,
        _ends(order, ranks, order.steps),
        _ends(order, ranks, order.noted) if order.noted else (),
        [_in_common_time(account(order.ledgers, rank), clocks[rank]) for rank in range(ranks)],
        [{one["mark"]: one for one in of_rank if "mark" in one} for of_rank in notes],
        list(hosts.values()),
        windows[-1] if windows else 1,
    )


def _ends(order: Order, ranks: int, steps: int) -> list[Mapping[str, Any]]:
    """What all ranks had come to after this many steps."""
    return [json.loads(order.end(rank, steps).read_text(encoding="utf-8")) for rank in range(ranks)]


def _notes(order: Order, rank: int) -> list[Mark]:
    path = order.marks / f"{rank}.jsonl"
    return list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))


def _in_common_time(own: Account, clocks: Mapping[int, float]) -> Account:
    """An account whose times are of `time.time()` instead of the host's own clock."""

    def moved(life: Life, clock_s: float) -> Life:
        struck_s = None if life.struck_at_s is None else life.struck_at_s + clock_s
        done = tuple(replace(one, at_s=one.at_s + clock_s) for one in life.done)
        return replace(life, done=done, struck_at_s=struck_s)

    return Account(tuple(moved(life, clocks[number]) for number, life in enumerate(own.lives)))


def check(answers: Answers, undisturbed: Sequence[Mapping[str, Any]], promise: Promise) -> None:
    """Compares what became of a training with what its method promises.

    Raises:
        WrongResult: It is less; or other ranks died than were to, or NaN has come of it.
    """
    order, name = answers.order, answers.order.method
    if not all(end["finite"] for end in answers.ends):
        raise WrongResult(f"{name} ended with NaN or infinities")
    for rank, one in enumerate(answers.accounts):
        if len(one.lives) != order.kills + 1:
            raise WrongResult(
                f"{name}, rank {rank}: {len(one.lives)} lives, and {order.kills + 1} were to be"
            )
        if one.costs.samples_lost and not promise.samples_lost:
            raise WrongResult(f"{name}, rank {rank}: {one.costs.samples_lost:g} samples are lost")
    for life, victim in enumerate(order.victims[: order.kills]):
        struck = [
            rank for rank, one in enumerate(answers.accounts) if one.lives[life].struck_at_s is not None
        ]
        if struck != [victim]:
            raise WrongResult(f"{name}, life {life}: ranks {struck} were killed, and not {victim}")
    if promise.bit_identical and not answers.is_as(undisturbed):
        raise WrongResult(f"{name} ended with other bytes than without a kill")
