"""`python -m bench all`: every question, one after another, each in a process of its own.

What a question prints goes to a file beside its JSON. One that fails doesn't stop the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

_TAIL_LINES = 15


PLANNED: Mapping[str, float] = {
    "agreement": 12,
    "check_n_run": 6,
    "compare": 27,
    "cpr": 3,
    "drift": 6,
    "elastic": 2,
    "host": 3,
    "kernels": 3,
    "memory": 1,
    "network": 8,
    "overhead": 24,
    "overhead-managed-collision": 6,
    "overhead-sparse": 8,
    "profile": 1,
    "publish": 2,
    "quality": 2,
    "quantization": 2,
    "rebuild": 16,
    "recovery": 18,
    "scaling": 1,
    "simulate": 3,
    "start": 1.5,
}
"""Answer -> the minutes that it is to take on two cores; all together leave a tenth of three hours."""


class SuiteFailed(Exception):
    """Some questions were not answered; the message names them, and has their last words."""


@dataclass(frozen=True)
class Asked:
    """One question, as it is asked.

    Attributes:
        name: Of its files.
        words: Of the command line.
    """

    name: str
    words: tuple[str, ...]


def expected(questions: Sequence[Asked], results: Path) -> str:
    """Says how long all will take, by what each took for the results of a folder, or else by the plan."""
    known = {one.name: minutes for one in questions if (minutes := _minutes(results, one.name)) is not None}
    planned = {one.name: PLANNED.get(one.name, 0.0) for one in questions if one.name not in known}
    whole = sum(known.values()) + sum(planned.values())
    others = f"; by the plan: {', '.join(planned)}" if planned else ""
    return f"{len(questions)} questions: {whole:.0f} minutes, as when they were last asked{others}"


def took(questions: Sequence[Asked], folder: Path) -> str:
    """Says how long each that was answered took, and all of them."""
    found = {one.name: minutes for one in questions if (minutes := _minutes(folder, one.name)) is not None}
    lines = [f"{minutes:8.1f} minutes  {name}" for name, minutes in found.items()]
    return "\n".join([*lines, f"{sum(found.values()):8.1f} minutes"])


def _minutes(folder: Path, name: str) -> float | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")).get("minutes") if path.exists() else None


def ask(questions: Sequence[Asked], folder: Path, seed: int, *, quick: bool) -> None:
    """Asks all, and writes NAME.json, and NAME.log with what was printed, to a folder.

    Raises:
        SuiteFailed: Some were not answered; the others were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    bar = tqdm(questions, unit="question")
    for one in bar:
        bar.set_description(one.name)
        options = ["--seed", str(seed), "--json", str(folder / f"{one.name}.json")]
        log = folder / f"{one.name}.log"
        with log.open("wb") as out:
            done = subprocess.run(
                [sys.executable, "-m", "bench", *one.words, *options, *(["--quick"] if quick else [])],
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            failed.append("\n".join([f"{one.name} ended with {done.returncode}:", *lines[-_TAIL_LINES:]]))
    if failed:
        raise SuiteFailed("\n\n".join(failed))
