"""What the runs of the matrix came to: the table, and the raw results in the form of bench/."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from pathlib import Path

from bench.harness.result import Arguments, Row, document, write
from failures.driver import Outcome
from failures.matrix import MAIN, ROLES, ROWS, Cell, Chain
from failures.plan import Setting

WIDTH = 15


@dataclasses.dataclass
class Tally:
    """What came of one cell.

    Attributes:
        runs: that met it.
        identical: those of them that ended bit-identical.
        recovery_s: from each kill until all ranks had committed their next step.
        refused_s: from each kill until the last rank had refused.
    """

    runs: int = 0
    identical: int = 0
    recovery_s: list[float] = dataclasses.field(default_factory=list)
    refused_s: list[float] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        seconds = self.refused_s or self.recovery_s
        longest = f" {max(seconds):4.1f}s" if seconds else "      "
        return f"{self.identical}/{self.runs}{longest}{'r' if self.refused_s else ' '}"

    @property
    def holds(self) -> bool:
        return self.runs > 0 and self.identical == self.runs


class Results:
    """Counts runs.

    Attributes:
        jobs: runs at a time.
        unmet: cells that no run could be brought to meet.
        controls: part of recovery that was left out -> whether it was noticed.
        others: further scenarios, by name.
        interrupted: whether it was ended before its time.
        not_reached: cells that had not had their turn then.
    """

    def __init__(self, seed: int, jobs: int = 1) -> None:
        self.seed, self.jobs = seed, jobs
        self.unmet: list[Cell] = []
        self.controls: dict[str, bool] = {}
        self.others: dict[str, Tally] = {}
        self.interrupted = False
        self.not_reached: list[Cell] = []
        self._cells: dict[Cell, Tally] = defaultdict(Tally)
        self._settings: dict[Setting, Tally] = defaultdict(Tally)
        self._roles: Counter[str] = Counter()
        self._kills: Counter[str] = Counter()
        self._wrong: list[str] = []

    def add(self, chain: Chain, outcome: Outcome, met: set[int], wrong: str) -> None:
        """Count a run; if it went wrong, so did all its cells."""
        if wrong:
            self._wrong.append(wrong)
        setting = self._settings[dataclasses.replace(chain.plan.setting, workers=0)]
        setting.runs += 1
        setting.identical += not wrong
        for index in met:
            tally = self._cells[chain.cells[index]]
            tally.runs += 1
            tally.identical += not wrong
            if index + 1 in outcome.refused:
                tally.refused_s.append(outcome.refused[index + 1])
            else:
                deaths = [death for death in outcome.deaths if death.event == index]
                tally.recovery_s += (
                    [max(d.recovery_s for d in deaths if d.recovery_s is not None)]
                    if any(d.recovery_s is not None for d in deaths)
                    else []
                )
            setting.recovery_s += tally.recovery_s
            if index in chain.roles:
                self._roles[chain.roles[index]] += 1
        self._kills.update(death.what for death in outcome.deaths)

    def interrupt(self, asked: list[Cell]) -> None:
        """The run ends before its time: what is known is shown, and it counts as failed."""
        self.interrupted = True
        self.not_reached = [cell for cell in asked if cell not in self._cells and cell not in self.unmet]

    @property
    def failed(self) -> bool:
        """Whether anything did not hold."""
        tallies = [*self._cells.values(), *self.others.values()]
        held = all(tally.holds for tally in tallies) and all(self.controls.values())
        return bool(self._wrong or self.unmet or self.interrupted) or not held

    def __str__(self) -> str:
        r = MAIN.tolerated
        counts = list(range(1, r + 2))
        columns = [(count, memory) for memory in (False, True) for count in counts]
        half = WIDTH * len(counts)
        lines = [
            "",
            f"{MAIN.ranks} ranks, {MAIN.code}, forked, by ecemb-run, or in ecemb.run, a third each:",
            "runs that ended bit-identical",
            "/ runs, and the longest time from the kill until every rank had committed its next step (after",
            f"a second failure, too, if one came before that). r: more than {r} losses, refused by all;",
            "the time is until the last one had; the survivors' bytes were the same afterwards, and the",
            "memory was then brought back. A fresh start that is cut off begins anew.",
            *([f"Times are of {self.jobs} runs at a time."] if self.jobs > 1 else []),
            "",
            f"{'':34}{'killed':<{half}}{'killed, with their memory':<{half}}".rstrip(),
            f"{'while':34}" + "".join(f"{count:<{WIDTH}}" for count, _ in columns).rstrip(),
        ]
        for row in ROWS:
            texts = [self._text(Cell(row.name, count, memory, MAIN)) for count, memory in columns]
            if any(text.strip() for text in texts):
                lines.append(f"{row.name:34}" + "".join(f"{text:<{WIDTH}}" for text in texts).rstrip())
        lines += ["", f"{'setting':44}{'runs':>6}{'identical':>11}{'longest recovery':>18}"]
        for setting, tally in self._settings.items():
            name = f"{setting.ranks} ranks, {setting.code}, {setting.optimizer}"
            longest = f"{max(tally.recovery_s):.1f} s" if tally.recovery_s else ""
            lines.append(f"{name:44}{tally.runs:6}{tally.identical:11}{longest:>18}")
        for name, tally in self.others.items():
            longest = f"{max(tally.recovery_s):.1f} s" if tally.recovery_s else ""
            lines.append(f"{name:44}{tally.runs:6}{tally.identical:11}{longest:>18}")
        roles = ", ".join(f"{role} rank {self._roles[role]}" for role in ROLES)
        lines += ["", f"who found the line, or was first: {roles}"]
        lines.append("died: " + ", ".join(f"{what} {count}" for what, count in sorted(self._kills.items())))
        for part, noticed in self.controls.items():
            lines.append(f"without {part!r}: {'noticed' if noticed else 'NOT NOTICED'}")
        lines += [f"NOT MET: {cell}" for cell in self.unmet] + [f"FAILED: {text}" for text in self._wrong]
        held = sum(tally.holds for tally in self._cells.values())
        if self.interrupted:
            lines.append(f"INTERRUPTED: {len(self.not_reached)} cells had not had their turn")
        total = len(self._cells) + len(self.unmet) + len(self.not_reached)
        lines += ["", f"{held} of {total} cells hold"]
        return "\n".join(lines)

    def _text(self, cell: Cell) -> str:
        return str(self._cells[cell]) if cell in self._cells else ""

    def write(self, path: Path) -> None:
        """Write one row for each cell, setting by setting."""
        rows: list[Row] = []
        for cell, tally in sorted(self._cells.items(), key=lambda item: str(item[0])):
            seconds = sorted(tally.refused_s or tally.recovery_s) or [0.0]
            labels = {
                "phase": cell.row,
                "kind": "memory" if cell.memory else "process",
                "victims": cell.victims,
                "ranks": cell.setting.ranks,
                "code": f"({cell.setting.n}, {cell.setting.k})",
                "runs": tally.runs,
                "identical": tally.identical,
                "outcome": "refused" if tally.refused_s else "recovered",
                **({"device": cell.setting.device} if cell.setting.device != "cpu" else {}),
                **({"start": cell.start} if cell.start != "plain" else {}),
            }
            middle = seconds[len(seconds) // 2]
            rows.append(
                Row(
                    "failure_cell",
                    round(middle, 2),
                    "s",
                    round(seconds[0], 2),
                    round(seconds[-1], 2),
                    tally.runs,
                    labels,
                )
            )
        for name, tally in self.others.items():
            seconds = sorted(tally.recovery_s) or [0.0]
            labels = {"phase": name, "runs": tally.runs, "identical": tally.identical}
            rows.append(Row("failure_cell", seconds[0], "s", seconds[0], seconds[-1], tally.runs, labels))
        for part, noticed in self.controls.items():
            rows.append(
                Row(
                    "control_noticed", int(noticed), "ratio", int(noticed), int(noticed), 1, {"without": part}
                )
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, document("failures", Arguments(seed=self.seed), rows))
